"""Batches of attackers: their images and labels, and the poisoned samples of an attacker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_fl.data import Selection
from lightning_fl.errors import require


class PoisonedSelection(Selection):
    """Samples of an attacker, each batch of which is changed when it is read.

    Args:
        inner: its own samples.
        poison: returns what the attacker trains on in place of a batch.
    """

    def __init__(self, inner: Selection, poison: Callable[[Any], Any]) -> None:
        self._inner, self._poison = inner, poison

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._inner)

    def batches(
        self, batch_size: int, generator: torch.Generator | None = None, share: Callable[[int], slice] | None = None
    ) -> Iterator[Any]:
        """Yield every sample once: see `Selection.batches`. Whole batches are changed, whichever rows a process takes."""
        whole = map(self._poison, self._inner.batches(batch_size, generator))
        if share is None:
            return whole
        return (with_parts(batch, {i: x[share(len(x))] for i, x in enumerate(batch)}) for batch in whole)


def labelled(batch: Any, attack: str, with_images: bool = False) -> tuple[Tensor, Tensor]:
    """Return inputs (B, …) and classes (B,) of a batch.

    Args:
        batch: a batch.
        attack: name of the attack, for the sentence.
        with_images: True if the inputs must be images (B, C, H, W).

    Raises:
        UserError: the batch has another form.
    """
    form = "images (B, C, H, W) and classes (B,)" if with_images else "inputs and classes (B,)"
    is_pair = isinstance(batch, list | tuple) and len(batch) >= 2 and all(isinstance(x, Tensor) for x in batch[:2])
    inputs, labels = batch[:2] if is_pair else (torch.zeros(0), torch.zeros(0))
    fits = is_pair and labels.dim() == 1 and not labels.is_floating_point() and (inputs.dim() == 4 or not with_images)
    require(fits, f"{attack} changes {form}, which the batches of these data are not.")
    return inputs, labels


def with_parts(batch: Any, parts: Mapping[int, Tensor]) -> Any:
    """Return a list or tuple with other parts at some places."""
    make = getattr(type(batch), "_make", type(batch))  # a named tuple takes its parts one by one
    return make([parts.get(place, part) for place, part in enumerate(batch)])
