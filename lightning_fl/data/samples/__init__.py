"""Training samples in memory or behind a data set, and batches of them."""
