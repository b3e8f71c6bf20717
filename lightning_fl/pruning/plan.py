"""`Plan`: the parts of a network that structured pruning keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """Filters that stay, and the kept indices of every tensor that changes.

    Attributes:
        filters: kept filters (ascending indices) of each layer that loses some, by the name of its module.
        axes: kept indices (ascending, int64) of each axis that loses some, by the name of the parameter or buffer:
            {"conv1.weight": {0: …}, "conv1.bias": {0: …}, "conv2.weight": {1: …}}.
        widths: number of filters of each prunable layer before the cut, c_l, by the name of its module; a client needs
            Σ c_l bits to know which filters to cut.
    """

    filters: dict[str, Tensor] = field(default_factory=dict)
    axes: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """Cut a tensor with the shape of the parameter or buffer `name`: return a copy, or itself if nothing is cut.

        The copy keeps the tensor's memory format.
        """
        order = tensor.dim_order()
        for axis, indices in self.axes.get(name, {}).items():
            tensor = tensor.index_select(axis, indices.to(tensor.device))
        if tensor.dim_order() == order:
            return tensor
        return torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
