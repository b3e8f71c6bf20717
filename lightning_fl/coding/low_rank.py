"""Matrices of a layout as products of two thin ones, for a low-rank compression: P = M Q, P̂ (n, R), Q' = Mᵀ P̂ (m, R), P̂ Q'ᵀ.

The thin matrices of all tensors lie one after the other in one vector. Everything is computed in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from lightning_fl.errors import require
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


def largest_rank(layout: Layout) -> int:
    """Return the largest rank with which some tensor does not stay whole; 0 if each always does."""
    sizes = [(shape[0], prod(shape[1:])) for shape in layout.shapes if len(shape) > 1 and 0 not in shape]
    return max(((n * m - 1) // (n + m) for n, m in sizes), default=0)


def check_rank(sender: str, rank: int, layout: Layout, instead: str) -> None:
    """Raise `UserError` if every tensor would stay whole; `instead` says what to do if each always does."""
    most = largest_rank(layout)
    require(
        left_size(layout, rank) > 0,
        f"{sender}(rank={rank}) would send every tensor whole, as no product of two factors is smaller than its tensor: "
        f"{f'give it a rank of at most {most}' if most else instead}.",
    )


def split(vector: Tensor, layout: Layout, rank: int) -> Iterator[tuple[str, Tensor, int]]:
    """Yield the name, the matrix (n, m) and R of each tensor of a vector (d,), as `matrices` does."""
    views = layout.views(vector)
    for tensor, n, m, r in matrices(layout, rank):
        yield tensor, views[tensor].reshape(n, m), r


def left_size(layout: Layout, rank: int) -> int:
    """Return the numbers of all P together, Σ R n."""
    return sum(n * r for _, n, _, r in matrices(layout, rank))


def sketch(vector: Tensor, layout: Layout, rank: int, starts: Mapping[str, Tensor]) -> Tensor:
    """Return all P (Σ R n,) of a vector (d,), float64; `starts` has the Q (m, R) of each matrix."""
    return _joined((m.double() @ starts[tensor].double() for tensor, m, r in split(vector, layout, rank) if r), vector)


def orthonormal(columns: Tensor) -> Tensor:
    """Return orthonormal columns (n, R) with the span of these (n, R), float64."""
    return torch.linalg.qr(columns.double()).Q


def all_orthonormal(sketches: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return all P̂ (Σ R n,) from all P (Σ R n,), float64."""
    shapes = [(n, r) for _, n, _, r in matrices(layout, rank) if r]
    parts = sketches.split([n * r for n, r in shapes])
    return _joined((orthonormal(part.view(shape)) for part, shape in zip(parts, shapes, strict=True)), sketches)


def project(vector: Tensor, left: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return all Q' and whole tensors of a vector (d,), in the order of the layout, float64; `left` has all P̂ (Σ R n,)."""
    lefts = iter(left.double().split([n * r for _, n, _, r in matrices(layout, rank)]))
    pairs = zip(split(vector.double(), layout, rank), lefts, strict=True)
    return _joined((matrix.T @ columns.view(-1, r) if r else matrix for (_, matrix, r), columns in pairs), vector)


def product(left: Tensor, rest: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return the vector (d,) of all P̂ Q'ᵀ and of the whole tensors, in the dtype of `rest`.

    Args:
        left: all P̂ (Σ R n,).
        rest: all Q', and the whole tensors, as `project` returns them.
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


def _joined(parts: Iterable[Tensor], like: Tensor) -> Tensor:
    """Return the numbers of all parts (·,), one after the other, on the device of `like`."""
    return torch.cat([like.new_zeros(0, dtype=torch.float64), *(part.flatten() for part in parts)])
