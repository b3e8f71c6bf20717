"""Flat storage of models: layouts, submodels, pruning maps, layer groups, top-k selection, bit packing."""
