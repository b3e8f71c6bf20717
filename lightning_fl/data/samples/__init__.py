"""Training samples, in memory or read from a data set, and batches of them."""
