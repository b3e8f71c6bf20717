"""Flat storage of models: layouts, submodels, pruning maps, layer groups; the kinds of message entries."""

from lightning_fl.vectors.layer_groups import as_yaml, layer_groups

__all__ = ["as_yaml", "layer_groups"]
