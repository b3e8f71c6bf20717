"""Optimisers of the clients, and the schedulers that move their hyper-parameters."""
