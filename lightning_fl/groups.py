"""Layer groups of any module, and their YAML: the public face of `lightning_fl.vectors.layer_groups`."""

from lightning_fl.vectors.layer_groups import as_yaml, layer_groups

__all__ = ["as_yaml", "layer_groups"]
