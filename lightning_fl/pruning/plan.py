"""What a structured pruning keeps of a network."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """Which filters stay, and what that means for every tensor of the network.

    Attributes:
        filters: of each layer that loses some, by the name of its module, the indices of the filters that it keeps, ascending.
        axes: of each parameter and buffer that changes, by its name, the kept indices (ascending, int64) of each axis that
            loses some: {"conv1.weight": {0: …}, "conv1.bias": {0: …}, "conv2.weight": {1: …}}.
        widths: filters of the prunable layers before, c_l, by the name of the module; Σ c_l bits tell a client what to cut.
    """

    filters: dict[str, Tensor] = field(default_factory=dict)
    axes: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """What is kept of a tensor that has the shape of the parameter or buffer `name`: a copy, or itself if all of it.

        The copy keeps the memory format of a convolution's weight.
        """
        channels_last = tensor.dim() == 4 and not tensor.is_contiguous()
        for axis, kept in self.axes.get(name, {}).items():
            tensor = tensor.index_select(axis, kept.to(tensor.device))
        return tensor.contiguous(memory_format=torch.channels_last) if channels_last else tensor
