"""Elias's omega code of whole numbers, and buckets of signed levels in it (Elias, IEEE Transactions on Information Theory, 1975).

The code of N ≥ 1 ends with 0; before it stand the binary digits of N, before them those of their count less one, and so on until
that is 1: 1 is 0, 2 is 10 0, 4 is 10 100 0, 16 is 10 100 10000 0. A bucket is the number of its levels other than 0, plus one,
and for each of them its distance from the last one, a sign, and its magnitude (Alistarh et al., QSGD, NeurIPS 2017).
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDEST = 32
"""Binary digits of the longest number."""


def omega(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of numbers (n,) in 1 … 2^31 − 1 as whole numbers (n,), and their lengths (n,) in bits.

    >>> omega(torch.tensor([1, 2, 4, 8, 16]))[1].tolist()
    [1, 3, 6, 7, 11]
    """
    left = numbers.to(torch.int64)
    codes, lengths = torch.zeros_like(left), torch.ones_like(left)  # the 0 at the end
    while bool((left > 1).any()):
        going = left > 1
        count = torch.frexp(left.double()).exponent.to(torch.int64)  # binary digits
        codes = torch.where(going, codes | left << lengths, codes)
        lengths = torch.where(going, lengths + count, lengths)
        left = torch.where(going, count - 1, left)
    return codes, lengths


def joined(codes: Tensor, lengths: Tensor) -> Tensor:
    """Return the bits (Σ lengths,) of codes one after the other, each with its highest bit first."""
    ends = lengths.cumsum(0)
    within = torch.arange(int(ends[-1]) if len(ends) else 0) - (ends - lengths).repeat_interleave(lengths)
    return (codes.repeat_interleave(lengths) >> (lengths.repeat_interleave(lengths) - 1 - within) & 1).bool()


def encode_levels(levels: Tensor, bucket: int) -> Tensor:
    """Return the bits of signed levels (d,) in buckets of consecutive numbers."""
    levels = levels.cpu().to(torch.int64)
    positions = levels.nonzero().flatten()
    home = positions // bucket
    num_buckets = -(-len(levels) // bucket)
    before = torch.cat([torch.tensor([-1]), positions[:-1]])[: len(positions)]
    starts = home * bucket - 1
    gaps = positions - torch.maximum(before, starts)
    values = levels[positions]
    counts = torch.bincount(home, minlength=num_buckets)
    # In the order of the bits: a count for each bucket, then gap, sign and magnitude of each of its levels.
    order_of_counts = torch.arange(num_buckets) + 3 * (counts.cumsum(0) - counts)
    order_of_levels = home + 1 + 3 * torch.arange(len(positions))
    codes = torch.zeros(num_buckets + 3 * len(positions), dtype=torch.int64)
    lengths = torch.ones_like(codes)
    for order, numbers in ((order_of_counts, counts + 1), (order_of_levels, gaps), (order_of_levels + 2, values.abs())):
        codes[order], lengths[order] = omega(numbers)
    codes[order_of_levels + 1] = (values < 0).to(torch.int64)
    return joined(codes, lengths)


def decode_levels(bits: Tensor, count: int, bucket: int) -> Tensor:
    """Return the signed levels (d,) that `encode_levels` encoded; d = `count`."""
    values, ends = _numbers_from(bits)
    value, end = values.tolist(), ends.tolist()
    place, gaps, signs, counts = 0, list[int](), list[int](), list[int]()
    for _ in range(0, count, bucket):
        counts.append(value[place] - 1)
        place = end[place]
        for _ in range(counts[-1]):
            gaps.append(place)
            signs.append(end[place])
            place = end[end[place] + 1]
    levels = torch.zeros(count, dtype=torch.int64)
    steps = values[torch.tensor(gaps, dtype=torch.int64)]
    bucket_sizes = torch.tensor(counts, dtype=torch.int64)
    walked = steps.cumsum(0)
    first = bucket_sizes.cumsum(0) - bucket_sizes  # of each bucket, among all levels
    walked_before = torch.cat([torch.zeros(1, dtype=torch.int64), walked])[first]
    starts = torch.arange(len(counts)) * bucket - 1 - walked_before
    sign_places = torch.tensor(signs, dtype=torch.int64)
    signed = torch.where(bits[sign_places], -1, 1) * values[sign_places + 1]
    levels[walked + starts.repeat_interleave(bucket_sizes)] = signed
    return levels


def _numbers_from(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each position (n,) the number whose code begins there, and where it ends; nonsense where none does."""
    count = len(bits)
    padded = torch.cat([bits, torch.zeros(WIDEST + 1, dtype=torch.bool)]).to(torch.int64)
    words = torch.zeros(count + 1, dtype=torch.int64)  # the next bits from each position on
    for shift in range(WIDEST):
        words |= padded[shift : shift + count + 1] << (WIDEST - 1 - shift)
    values, places = torch.ones(count, dtype=torch.int64), torch.arange(count)
    while True:
        going = (padded[places] == 1) & (values < WIDEST)
        if not bool(going.any()):
            return values, (places + 1).clamp_(max=count)
        read = words[places] >> (WIDEST - 1 - values.clamp(max=WIDEST - 1))
        places = torch.where(going, (places + values + 1).clamp_(max=count), places)
        values = torch.where(going, read, values)
