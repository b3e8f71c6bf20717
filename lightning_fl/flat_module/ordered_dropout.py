"""Ordered dropout: Horváth et al., FjORD: Fair and Accurate Federated Learning under Heterogeneous Targets with Ordered Dropout,
NeurIPS 2021 (arXiv:2102.13451).

In every step of a client a share of the units is drawn, and layers read 0 in place of the others. The network then computes as if
it were cut to the first units, and the gradient of the others is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_fl.slots import LocalTraining


class OrderedDropout:
    """Hooks of the layers that read hidden units; every step of a client draws one of several widths.

    The draws come from torch's global generator, which is seeded for each client.

    Attributes:
        distils: True if the widest network teaches the one that a step draws.
    """

    def __init__(self, masks: Sequence[Mapping[str, Tensor]], distils: bool = False) -> None:
        """Draw nothing yet.

        Args:
            masks: for each width bools of what a layer reads, by the name of the layer; the widest is the last, {}.
            distils: see the class.
        """
        self._masks, self.distils = masks, distils
        self._suspended = False
        self._local: LocalTraining | None = None
        self._step = self._drawn = 0
        self._of: Any = None

    def hook(self, module: nn.Module, flat_module: Any) -> list[RemovableHandle]:
        """Register the hooks.

        Args:
            module: the module.
            flat_module: its flat module, whose progress tells a client's steps apart.
        """
        self._of = flat_module
        names = dict.fromkeys(name for masks in self._masks for name in masks)
        return [module.get_submodule(name).register_forward_pre_hook(partial(self._mask, name)) for name in names]

    def draw(self) -> bool:
        """Draw a width if a new step has begun, and say if it is narrower than the widest."""
        local: LocalTraining = self._of.progress.local
        if self._local is not local or self._step != local.num_steps:
            self._local, self._step = local, local.num_steps
            self._drawn = int(torch.randint(len(self._masks), ()))
        return self._drawn < len(self._masks) - 1

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let the network compute with all its units inside the context."""
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    def _mask(self, name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._suspended or not layer.training or self._of.progress is None:
            return None
        self.draw()
        mask = self._masks[self._drawn].get(name)
        return None if mask is None else (inputs[0] * mask.to(inputs[0].dtype), *inputs[1:])
