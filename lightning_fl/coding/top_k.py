"""Choose the k largest of d numbers, and encode their positions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from math import ceil, log2
from typing import Literal

import torch
from torch import Tensor

from lightning_fl.coding.bit_packing import bit_width, pack, unpack

IndexBits = Literal["ceil", "exact"]
SAMPLE = 50_000  # numbers from which a threshold is estimated


def num_kept(alpha: float, count: int) -> int:
    """Return k = max(1, ⌊alpha · d⌋), and 0 for d = 0.

    >>> [num_kept(0.05, 21840), num_kept(0.29, 100), num_kept(0.001, 5), num_kept(1.0, 0)]
    [1092, 29, 1, 0]
    """
    # Use the decimal fraction as written, not the nearest binary one: 0.29 · 100 is 29.
    return min(count, max(1, int(Fraction(str(alpha)) * count)))


def top_k(vector: Tensor, k: int) -> Tensor:
    """Return the positions of the k numbers largest in magnitude; of equal ones the first, NaN last.

    Args:
        vector: numbers (d,).
        k: number of positions, 0 ≤ k ≤ d.

    Returns:
        Positions (k,), ascending.

    >>> top_k(torch.tensor([1.0, -3.0, 3.0, float("nan"), 2.0]), 2).tolist()
    [1, 2]
    """
    return _largest(vector.abs(), k)


def top_k_of_max(vectors: Sequence[Tensor], k: int) -> Tensor:
    """Return the positions of the k numbers largest in magnitude in any of the vectors (d,), otherwise as `top_k`."""
    return _largest(reduce(torch.fmax, (x.abs() for x in vectors)), k)  # fmax ignores NaN


def top_k_in_turns(vectors: Sequence[Tensor], k: int) -> Tensor:
    """Choose k positions rank by rank: each vector offers its largest, then its second, … until k are distinct.

    Offers of the same rank are taken in order of magnitude, of equal ones the earlier vector's first.

    Args:
        vectors: vectors of d numbers each.
        k: number of positions, 0 ≤ k ≤ d.

    Returns:
        Positions (k,), ascending.
    """
    offers, magnitudes = [], []
    for vector in vectors:
        positions = top_k(vector, k)
        ranked = _without_nan(vector[positions].abs()).sort(descending=True, stable=True)
        offers.append(positions[ranked.indices])
        magnitudes.append(ranked.values)
    in_turn = torch.stack(magnitudes, dim=1).sort(descending=True, stable=True).indices  # (k, vectors)
    sequence = torch.stack(offers, dim=1).gather(1, in_turn).flatten()
    return sequence[_is_first(sequence)][:k].sort().values


def _is_first(sequence: Tensor) -> Tensor:
    """True at the first of equal numbers (n,); a reduction by scatter would not be deterministic on a GPU."""
    ordered, places = sequence.sort(stable=True)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    return torch.zeros_like(begins).index_copy_(0, places, begins)


def _largest(magnitude: Tensor, k: int) -> Tensor:
    """Positions (k,), ascending, of the k largest of `magnitude` (d,), of equal ones the first, NaN last."""
    if k == 0 or k >= len(magnitude):
        return torch.arange(k, device=magnitude.device)
    among = _candidates(magnitude, k)
    if among is not None:
        return among[_largest_mask(magnitude[among], k)]
    return _largest_mask(_without_nan(magnitude), k).nonzero().flatten()


def _candidates(magnitude: Tensor, k: int) -> Tensor | None:
    """Return ascending positions of a few more than the k largest of many numbers: all above a threshold from a sample.

    Return None if there are few numbers, or if the threshold is of no use.
    """
    count, stride = len(magnitude), len(magnitude) // SAMPLE
    if stride < 2:
        return None
    sample = _without_nan(magnitude[::stride])
    expected = k * len(sample) / count
    rank = int(expected + 5 * expected**0.5) + 1
    if rank > len(sample):
        return None
    above = (magnitude > sample.topk(rank, sorted=False).values.amin()).nonzero().flatten()
    return above if len(above) >= k else None


def _largest_mask(magnitude: Tensor, k: int) -> Tensor:
    threshold = magnitude.topk(k, sorted=False).values.amin()
    mask = magnitude > threshold
    missing = k - int(torch.count_nonzero(mask))
    mask[(magnitude == threshold).nonzero().flatten()[:missing]] = True
    return mask


def _without_nan(magnitude: Tensor) -> Tensor:
    """Replace NaN by −1, so that it comes last."""
    return torch.where(magnitude.isnan(), -1.0, magnitude)


def positions_bits(k: int, count: int, index_bits: IndexBits = "ceil") -> int:
    """Return the bits that encode k of d positions: d in a mask or k·⌈log2 d⌉ in a list, whichever is less; 0 if k = d.

    With `exact`, a list has ⌈k·log2 d⌉ bits, as if its indices were the digits of one number, as in FedAdam-SSM's paper.

    >>> [positions_bits(1092, 21840), positions_bits(487546, 9750922), positions_bits(7, 7), positions_bits(0, 7)]
    [16380, 9750922, 0, 0]
    >>> positions_bits(1092, 21840, "exact")
    15741
    """
    if k == count:
        return 0
    return min(count, k * bit_width(count) if index_bits == "ceil" else ceil(k * log2(count)))


def pack_positions(positions: Tensor, count: int) -> Tensor:
    """Pack ascending positions (k,) among `count` into bytes, as a list or as a mask, the shorter of the two."""
    k = len(positions)
    if k == count:
        return torch.empty(0, dtype=torch.uint8, device=positions.device)
    if k * bit_width(count) < count:
        return pack(positions, bit_width(count))
    mask = torch.zeros(count, dtype=torch.bool, device=positions.device)
    mask[positions] = True
    return pack(mask, 1)


def unpack_positions(packed: Tensor, k: int, count: int) -> Tensor:
    """Return the ascending positions (k,) that `pack_positions` packed."""
    if k == count:
        return torch.arange(count, device=packed.device)
    if k * bit_width(count) < count:
        return unpack(packed, k, bit_width(count)).long()
    return unpack(packed, count, 1).nonzero().flatten()
