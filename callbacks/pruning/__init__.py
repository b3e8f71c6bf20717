"""Callbacks that prune the module; import them from `lightning_fl.callbacks`."""
