"""Outputs of a run: its folder, metrics.csv, checkpoints, progress bar, final table, loggers, figures."""
