"""Arithmetic on vectors as long as a large model, on a CPU: by pieces that fit its cache, and in memory that is used again.

An expression such as `total + weight * vector.double()` makes temporary copies of the vector, and the system hands out the memory
of each new one as pages that are faulted in one by one, which takes several times as long as the arithmetic. The functions here
do the same to the same bits. Short vectors, and those on an accelerator, whose allocator keeps its memory, take torch's own way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

LONG = 2**20
"""Numbers from which a vector is long."""
PIECE = 2**16
"""Numbers of a piece; in float64 they take half a MiB."""
KEPT_AT_MOST = 2**28
"""Bytes of the largest block that is kept: a client that trains a larger vector takes seconds, and needs the memory meanwhile."""
ALIGNMENT = 64
"""Bytes to which torch aligns its own memory."""


class Blocks:
    """Blocks of memory that are used again, for vectors of the same length, as soon as no tensor refers to them."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised vector (count,)."""
        size = count * dtype.itemsize
        if size > KEPT_AT_MOST:
            return torch.empty(count, dtype=dtype)
        free = self._free.setdefault(size, [])
        block = free.pop() if free else np.empty(size + ALIGNMENT, np.uint8)
        start = -block.ctypes.data % ALIGNMENT
        part = block[start : start + size]
        # Every tensor on this memory holds `part`. When the last one is gone, so is `part`, and the block is free.
        weakref.finalize(part, free.append, block).atexit = False
        return torch.from_numpy(part).view(dtype)

    @property
    def free_bytes(self) -> list[int]:
        """Bytes of each block to which no tensor refers."""
        return [size for size, blocks in self._free.items() for _ in blocks]

    def release(self) -> None:
        """Give back the memory to which no tensor refers, and later what is in use now."""
        self._free = {}


BLOCKS = Blocks()
"""Memory of the long vectors of this process, until its fit ends."""


def is_long(vector: Tensor) -> bool:
    """True if a tensor is a vector on the CPU for which pieces pay."""
    return vector.numel() >= LONG and vector.dim() == 1 and vector.device.type == "cpu"


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
    """Return an uninitialised vector (d,)."""
    if is_long(vector):
        return BLOCKS.empty(len(vector), dtype or vector.dtype)
    return torch.empty_like(vector, dtype=dtype)


def zeros_like(vector: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros (d,)."""
    return empty_like(vector, dtype).zero_() if is_long(vector) else torch.zeros_like(vector, dtype=dtype)


def difference(one: Tensor, other: Tensor) -> Tensor:
    """Return one − other (d,)."""
    return torch.sub(one, other, out=empty_like(one)) if is_long(one) and one.dtype == other.dtype else one - other


def sum_of(one: Tensor, other: Tensor) -> Tensor:
    """Return one + other (d,)."""
    return torch.add(one, other, out=empty_like(one)) if is_long(one) and one.dtype == other.dtype else one + other


def add_difference(total: Tensor, one: Tensor, other: Tensor, weight: float) -> None:
    """Add weight · (one − other) (d,) to a total (d,), in place."""
    for part, piece, subtracted in pieces(total, one, other):
        part.add_(piece - subtracted, alpha=weight)


def add_scaled(total: Tensor, vector: Tensor, weight: float) -> None:
    """Add weight · vector (d,) to a total (d,) of a wider dtype, in place."""
    for part, piece in pieces(total, vector):
        part.add_(piece, alpha=weight)


def subtract_scaled(total: Tensor, vector: Tensor, weight: Any) -> None:
    """Subtract weight · vector (d,) from a total (d,), in place; the weight is a number, or a tensor that fits the vector."""
    for part, piece, factor in pieces(total, vector, weight):
        part.sub_(piece * factor)


def by_pieces(function: Callable[..., Tensor], vector: Tensor, *others: Any) -> Tensor:
    """Return an elementwise function of a vector (d,) and others as a vector (d,), without temporary copies of its length.

    Args:
        function: called with matching `pieces` of all arguments; changes none of them.
        vector: (d,), whose dtype the result has.
        others: vectors (d,), or numbers and tensors that fit each piece.
    """
    if not is_long(vector):
        return function(vector, *others)
    result = empty_like(vector)
    for target, *parts in pieces(result, vector, *others):
        target.copy_(function(*parts))
    return result


def converted(vector: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a vector (d,) in a dtype; itself if it has it already."""
    return empty_like(vector, dtype).copy_(vector) if is_long(vector) and vector.dtype != dtype else vector.to(dtype)


def narrowed(vector: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a vector (d,), which must not be used any more, in a dtype; in its own memory if the dtype is narrower."""
    if not is_long(vector) or dtype.itemsize > vector.dtype.itemsize or not vector.is_contiguous():
        return converted(vector, dtype)
    result = vector.view(dtype)[: len(vector)] if dtype != vector.dtype else vector
    for target, part in pieces(result, vector):
        target.copy_(part.to(dtype))  # a copy between, because both lie in the same memory
    return result
