"""A client's local training: the module on flat storage, the optimiser, the hooks, and the runners that loop over clients."""
