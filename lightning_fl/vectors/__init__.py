"""Flat storage of models: layouts, submodels, pruning maps, layer groups; the kinds of message entries."""
