"""Matrices of a layout as products of two thin ones, P̂ (n, R) and Q' (m, R), for a low-rank compression."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_fl.vectors.layout import Layout


def matrices(layout: Layout, rank: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield the name of each tensor, its rows n, its columns m, and R; R is 0 for one that stays whole.

    A tensor of shape (n, …) is a matrix of n rows. It has R = min(rank, n, m), and stays whole unless R(n + m) < nm.
    """
    for name, shape, size in zip(layout.names, layout.shapes, layout.sizes, strict=True):
        n = shape[0] if len(shape) > 1 and size else 1
        m = size // n
        r = min(rank, n, m)
        yield name, n, m, r if len(shape) > 1 and r * (n + m) < n * m else 0


def orthonormal(columns: Tensor) -> Tensor:
    """Return orthonormal columns (n, R) with the span of these (n, R), computed in float64."""
    return torch.linalg.qr(columns.double()).Q


def left_size(layout: Layout, rank: int) -> int:
    """Return the numbers of all P̂ together, Σ R n."""
    return sum(n * r for _, n, _, r in matrices(layout, rank))


def product(left: Tensor, rest: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return the vector (d,) of all P̂ Q'ᵀ and of the whole tensors.

    Args:
        left: all P̂ (n, R), one after the other (Σ R n,).
        rest: all Q' (m, R), and the whole tensors, in the order of the layout.
        layout: layout of the vector.
        rank: r.
    """
    vector, at, start = rest.new_empty(layout.numel), 0, 0
    views = layout.views(vector)
    for tensor, n, m, r in matrices(layout, rank):
        matrix = rest[start : start + m * (r or n)]
        if r:
            matrix = left[at : at + n * r].view(n, r).double() @ matrix.view(m, r).double().T
        views[tensor].copy_(matrix.view(views[tensor].shape))
        at, start = at + n * r, start + m * (r or n)
    return vector
