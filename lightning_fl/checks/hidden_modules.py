"""Tensors of modules in lists, tuples and the user's own objects, such as `self.teacher = [network]`, which torch does not find.

So no message carries them, and no mode, device or file of the module reaches them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_fl.checks.own_objects import is_module

ENTRIES = 64
"""Approximate number of entries of a tensor that tell whether it has changed, beside torch's count of changes in place."""


class HiddenModules:
    """Hidden modules, and their parameters and buffers as they are now.

    Args:
        objects: `own_objects` of a module, by their place.
        known: modules that torch finds, which are left out with their tensors.
        most_copied: most numbers to copy, those of the smallest tensors; of the others only changes are noticed.

    Attributes:
        parts: the modules and their parts, each with the place of the module, such as "teacher[0]".
    """

    def __init__(self, objects: Mapping[str, Any], known: Iterable[nn.Module], most_copied: int = 0) -> None:
        seen = {id(x) for one in known for x in (one, *one._parameters.values(), *one._buffers.values())}
        hidden = {id(part): (place, part) for place, one in objects.items() if is_module(one) for part in one.modules()}
        self.parts = [(place, part) for number, (place, part) in hidden.items() if number not in seen]
        tensors = {
            id(tensor): _Held(place, home, leaf, tensor)
            for place, part in self.parts
            for home in (part._parameters, part._buffers)
            for leaf, tensor in home.items()
            if id(tensor) not in seen and _is_plain(tensor)
        }
        self._before = []
        for held in sorted(tensors.values(), key=lambda held: held.tensor.numel()):
            most_copied -= held.tensor.numel()
            copied = held.tensor.detach().clone() if most_copied >= 0 else None
            self._before.append((held, _mark(held.tensor), copied))

    def changed(self, copied: bool = True) -> list[str]:
        """Return the places of the modules whose tensors are others now, or have other numbers; or of those not `copied`."""
        return sorted(
            {
                held.place
                for held, mark, copy in self._before
                if (copied or copy is None) and not (held.is_same and _are_equal(_mark(held.tensor), mark))
            }
        )

    def restore(self) -> None:
        """Set the tensors that were copied to what they were."""
        for held, _, copy in self._before:
            if copy is not None:
                if not held.is_same:
                    held.home[held.leaf] = held.tensor
                held.tensor.data.copy_(copy)  # past autograd, which may still need the tensor


class _Held(NamedTuple):
    """A tensor and what holds it."""

    place: str
    home: Any
    leaf: str
    tensor: Tensor

    @property
    def is_same(self) -> bool:
        """True unless another tensor has taken its place."""
        return self.leaf in self.home and self.home[self.leaf] is self.tensor


def _is_plain(tensor: Any) -> bool:
    """True for a tensor that a training may change and that can be read."""
    if type(tensor) not in (Tensor, nn.Parameter) or is_lazy(tensor) or tensor.is_inference():
        return False
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _mark(tensor: Tensor) -> tuple[int, Tensor]:
    """Return torch's count of changes in place, which writing to `.data` avoids, and the bytes of a few entries."""
    entries = tensor.detach().flatten()
    return tensor._version, entries[:: max(1, len(entries) // ENTRIES)].clone().view(torch.uint8)


def _are_equal(one: tuple[int, Tensor], other: tuple[int, Tensor]) -> bool:
    return one[0] == other[0] and torch.equal(one[1], other[1].to(one[1].device))
