"""Encode ascending positions by the gaps between them, in Golomb-Rice codes (Golomb, 1966; Rice, 1971).

A gap g ≥ 1 has ⌊(g − 1) / 2^b⌋ ones, a zero, and b bits for the rest of g − 1. Here the b bits of all gaps come first, and all
ones and zeros follow: so many bits as one gap after the other, but decoded without a loop.
"""

from __future__ import annotations

from math import floor, log, log2, sqrt

import torch
from torch import Tensor

from lightning_fl.coding.bit_packing import pack, unpack

GOLDEN = (1 + sqrt(5)) / 2


def rice_width(expected: int, count: int) -> int:
    """Return b for about `expected` positions k among d at random: max(0, 1 + ⌊log2(ln(φ − 1) / ln(1 − k/d))⌋).

    Sattler et al. (IEEE TNNLS 2020) take this b, with the golden ratio φ.

    >>> [rice_width(k, 21840) for k in (1, 218, 1092, 7862, 10920, 21840, 0)]
    [14, 6, 4, 1, 0, 0, 0]
    """
    if expected in (0, count):
        return 0
    return max(0, 1 + floor(log2(log(GOLDEN - 1) / log(1 - expected / count))))


def most_bits(k: int, count: int, width: int) -> int:
    """Return the most bits that k positions among d may take: k(b + 1) + ⌊(d − k) / 2^b⌋.

    >>> most_bits(1092, 21840, 4)
    6756
    """
    return k * (width + 1) + ((count - k) >> width)


def pack_gaps(positions: Tensor, count: int, width: int) -> tuple[Tensor, int]:
    """Pack ascending positions into bytes: their gaps, or a mask if gaps may take more than d bits; nothing if k = d.

    Args:
        positions: whole numbers (k,) in [0, d).
        count: d.
        width: b, bits of each gap besides ones and zeros.

    Returns:
        Bytes (⌈bits / 8⌉,), and the bits in them.
    """
    k = len(positions)
    if k == count:
        bits = positions.new_zeros(0, dtype=torch.bool)
    elif most_bits(k, count, width) > count:
        bits = torch.zeros(count, dtype=torch.bool, device=positions.device)
        bits[positions] = True
    else:
        excess = positions.diff(prepend=positions.new_full((1,), -1)) - 1
        ends = ((excess >> width) + 1).cumsum(0)
        ones = torch.ones(int(ends[-1]) if k else 0, dtype=torch.bool, device=positions.device)
        ones[ends - 1] = False
        rest = excess & ((1 << width) - 1)
        bits = torch.cat((unpack(pack(rest, width), k * width, 1).bool(), ones))
    return pack(bits, 1), len(bits)


def unpack_gaps(packed: Tensor, k: int, count: int, width: int) -> Tensor:
    """Return the ascending positions (k,), int64, that `pack_gaps` packed.

    >>> packed, bits = pack_gaps(torch.tensor([0, 5, 6, 19]), 20, 2)
    >>> bits, unpack_gaps(packed, 4, 20, 2).tolist()
    (16, [0, 5, 6, 19])
    """
    if k == count:
        return torch.arange(count, device=packed.device)
    bits = unpack(packed, 8 * len(packed), 1)
    if most_bits(k, count, width) > count:
        return bits[:count].nonzero().flatten()
    ends = (bits[k * width :] == 0).nonzero().flatten()[:k]
    quotients = ends.diff(prepend=ends.new_full((1,), -1)) - 1
    rest = unpack(pack(bits[: k * width], 1), k, width)
    return ((quotients << width) + rest.long() + 1).cumsum(0) - 1
