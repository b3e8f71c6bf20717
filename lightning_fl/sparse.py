"""The largest k of d numbers, and how the other side learns which they are."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from lightning_fl.bits import bit_width, pack, unpack


def num_kept(alpha: float, count: int) -> int:
    """k = max(1, ⌊alpha · d⌋); nothing of nothing.

    >>> [num_kept(0.05, 21840), num_kept(0.29, 100), num_kept(0.001, 5), num_kept(1.0, 0)]
    [1092, 29, 1, 0]
    """
    # The decimal fraction that was written, not the binary one nearest to it: 0.29 · 100 is 29.
    return min(count, max(1, int(Fraction(str(alpha)) * count)))


def top_k(vector: Tensor, k: int) -> Tensor:
    """Which k numbers are the largest in magnitude: of equal ones the first, a NaN only where nothing else is left.

    Args:
        vector: numbers (d,).
        k: how many, 0 ≤ k ≤ d.

    Returns:
        Mask (d,) of exactly k coordinates.

    >>> top_k(torch.tensor([1.0, -3.0, 3.0, float("nan"), 2.0]), 2).tolist()
    [False, True, True, False, False]
    """
    return _largest(_magnitude(vector), k)


def top_k_of_max(vectors: Sequence[Tensor], k: int) -> Tensor:
    """Which k coordinates are the largest in magnitude in any of the vectors (d,); otherwise as `top_k`."""
    return _largest(torch.stack([_magnitude(x) for x in vectors]).amax(0), k)


def top_k_in_turns(vectors: Sequence[Tensor], k: int) -> Tensor:
    """k coordinates taken rank by rank: each vector offers its largest, then its second, … until k distinct ones are there.

    At one rank the offers are taken in order of magnitude, of equal ones the earlier vector's.

    Args:
        vectors: of d numbers each.
        k: how many, 0 ≤ k ≤ d.

    Returns:
        Mask (d,) of exactly k coordinates.
    """
    offers, magnitudes = [], []
    for vector in vectors:
        magnitude = _magnitude(vector)
        chosen = _largest(magnitude, k).nonzero().flatten()
        ranked = magnitude[chosen].sort(descending=True, stable=True)
        offers.append(chosen[ranked.indices])
        magnitudes.append(ranked.values)
    in_turn = torch.stack(magnitudes).sort(dim=0, descending=True, stable=True).indices
    sequence = torch.stack(offers).gather(0, in_turn).T.flatten()  # rank by rank, (k · vectors,)
    turns = torch.arange(len(sequence), device=sequence.device)
    first = torch.full_like(vectors[0], len(sequence), dtype=torch.int64)
    first.scatter_reduce_(0, sequence, turns, "amin")
    mask = torch.zeros_like(vectors[0], dtype=torch.bool)
    mask[sequence[first[sequence] == turns][:k]] = True
    return mask


def _magnitude(vector: Tensor) -> Tensor:
    """|x|, and −1 for NaN, so that it comes last."""
    magnitude = vector.abs()
    return torch.where(magnitude.isnan(), -1.0, magnitude)


def _largest(magnitude: Tensor, k: int) -> Tensor:
    """Mask of the k largest of `magnitude` (d,), of equal ones the first."""
    if k == 0 or k >= len(magnitude):
        return torch.full_like(magnitude, k > 0, dtype=torch.bool)
    threshold = magnitude.topk(k, sorted=False).values.amin()
    mask = magnitude > threshold
    missing = k - int(mask.sum())
    mask[(magnitude == threshold).nonzero().flatten()[:missing]] = True
    return mask


def positions_bits(k: int, count: int) -> int:
    """Bits that say which k of d coordinates are meant: d in a mask or k·⌈log2 d⌉ in a list, none where all are.

    >>> [positions_bits(1092, 21840), positions_bits(487546, 9750922), positions_bits(7, 7), positions_bits(0, 7)]
    [16380, 9750922, 0, 0]
    """
    return 0 if k == count else min(count, k * bit_width(count))


def pack_positions(mask: Tensor) -> Tensor:
    """The coordinates of a mask (d,) as bytes, in the shorter of the two ways."""
    indices = mask.nonzero().flatten()
    k, count = len(indices), len(mask)
    if k == count:
        return torch.empty(0, dtype=torch.uint8, device=mask.device)
    return pack(indices, bit_width(count)) if k * bit_width(count) < count else pack(mask, 1)


def unpack_positions(packed: Tensor, k: int, count: int) -> Tensor:
    """The indices (k,), ascending, that `pack_positions` packed."""
    if k == count:
        return torch.arange(count, device=packed.device)
    if k * bit_width(count) < count:
        return unpack(packed, k, bit_width(count)).long()
    return unpack(packed, count, 1).nonzero().flatten()
