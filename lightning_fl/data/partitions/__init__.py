"""Partitions, which divide the training samples over the clients."""
