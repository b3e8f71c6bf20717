"""The server's own model and samples: training, evaluation, the validation of single clients, pre-training, operation counts."""
