"""What a run leaves behind: its folder, metrics.csv, checkpoints, progress bar, final table, loggers, figures."""
