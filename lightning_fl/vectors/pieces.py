"""Arithmetic on vectors as long as a large model, on a CPU: by pieces that fit its cache, and in memory that is used again.

An expression such as `total + weight * vector.double()` makes temporary copies of the vector, and the system hands out the memory
of each new one as pages that are faulted in one by one, which takes several times as long as the arithmetic. The functions here
do the same to the same bits. Short vectors, and those on an accelerator, whose allocator keeps its memory, take torch's own way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

LONG = 2**20
"""Numbers from which a vector is long."""
PIECE = 2**16
"""Numbers of a piece; in float64 they take half a MiB."""
ALIGNMENT = 64
"""Bytes to which torch aligns its own memory."""


class Blocks:
    """Blocks of memory that are used again as soon as no tensor refers to them."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return a vector (count,) of any numbers."""
        size = count * dtype.itemsize
        start = -(block := self._block(size)).ctypes.data % ALIGNMENT
        return torch.from_numpy(block[start : start + size]).view(dtype)

    def _block(self, size: int) -> np.ndarray:
        """Return a block of at least this many bytes to which nothing refers; free ones that are too short are given back."""
        fits, others = [], []
        for block in self._blocks:
            is_free = sys.getrefcount(block) == 3  # the list, this name and the argument; a tensor refers to it, too
            if is_free and size + ALIGNMENT <= block.nbytes <= 2 * (size + ALIGNMENT):
                fits.append(block)
            elif not is_free or block.nbytes > size:
                others.append(block)
        if fits:
            return min(fits, key=lambda block: block.nbytes)
        self._blocks = [*others, block := np.empty(size + ALIGNMENT, np.uint8)]
        return block

    def release(self) -> None:
        """Give back all memory to which no tensor refers."""
        self._blocks = []


BLOCKS = Blocks()
"""Memory of the long vectors of this process, until its fit ends."""


def is_long(vector: Tensor) -> bool:
    """True if a tensor is a vector on the CPU for which pieces pay."""
    return vector.dim() == 1 and vector.device.type == "cpu" and len(vector) >= LONG


def pieces(vector: Tensor, *others: Any) -> Iterator[tuple[Any, ...]]:
    """Yield matching pieces of a vector (d,) and others, which are views; all of them whole if the vector is not long.

    Args:
        vector: (d,).
        others: vectors (d,); numbers and tensors of another shape are yielded whole with every piece.
    """
    if not is_long(vector):
        yield vector, *others
        return
    for start in range(0, len(vector), PIECE):
        part = slice(start, start + PIECE)
        yield tuple(x[part] if isinstance(x, Tensor) and x.shape == vector.shape else x for x in (vector, *others))


def empty_like(vector: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a vector (d,) of any numbers."""
    if is_long(vector):
        return BLOCKS.empty(len(vector), dtype or vector.dtype)
    return torch.empty_like(vector, dtype=dtype)


def zeros_like(vector: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros (d,)."""
    return empty_like(vector, dtype).zero_() if is_long(vector) else torch.zeros_like(vector, dtype=dtype)


def difference(one: Tensor, other: Tensor) -> Tensor:
    """Return one − other (d,)."""
    return torch.sub(one, other, out=empty_like(one)) if is_long(one) and one.dtype == other.dtype else one - other


def add_scaled(total: Tensor, vector: Tensor, weight: float) -> None:
    """Add weight · vector (d,) to a total (d,) of a wider dtype, in place."""
    for part, piece in pieces(total, vector):
        part.add_(piece, alpha=weight)


def subtract_scaled(total: Tensor, vector: Tensor, weight: Any) -> None:
    """Subtract weight · vector (d,) from a total (d,), in place; the weight is a number, or a tensor that fits the vector."""
    for part, piece, factor in pieces(total, vector, weight):
        part.sub_(piece * factor)


def converted(vector: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a vector (d,) in a dtype; itself if it has it already."""
    return empty_like(vector, dtype).copy_(vector) if is_long(vector) and vector.dtype != dtype else vector.to(dtype)
