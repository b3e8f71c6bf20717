"""Pack small whole numbers into bytes bit by bit: masks, indices, levels of a quantiser."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

FEW_BORDERS = 32  # so many comparisons of all numbers take no longer than a binary search for each


def bit_width(count: int) -> int:
    """Return the bits of a number in 0 … count − 1: ⌈log2 count⌉.

    >>> [bit_width(count) for count in (1, 2, 3, 21840)]
    [0, 1, 2, 15]
    """
    return max(count - 1, 0).bit_length()


def nearest_level(values: Tensor, levels: Tensor) -> Tensor:
    """Return the index of the level that is nearest to each value, of two equally near ones the higher; 0 for NaN.

    Args:
        values: numbers of any shape.
        levels: at most 256 ascending numbers on the CPU.

    Returns:
        Indices of the shape of `values`, uint8.

    >>> nearest_level(torch.tensor([-3.0, 0.4, 0.5, 9.0]), torch.tensor([-1.0, 0.0, 1.0])).tolist()
    [0, 1, 2, 2]
    """
    borders = (levels[1:] + levels[:-1]) / 2
    if len(borders) > FEW_BORDERS:
        indices = torch.bucketize(values, borders.to(values), right=True, out_int32=True)
        return indices.masked_fill_(values.isnan(), 0).to(torch.uint8)
    indices = torch.zeros_like(values, dtype=torch.uint8)
    for border in borders.tolist():
        indices += (values >= border).view(torch.uint8)  # which is faster to add than bools
    return indices


def pack(values: Tensor, width: int) -> Tensor:
    """Pack numbers of `width` bits one after the other, lowest bit first.

    Args:
        values: whole numbers (n,) in [0, 2^width), or booleans.
        width: bits per number, at most 32.

    Returns:
        Bytes (⌈n·width / 8⌉,).

    >>> pack(torch.tensor([True, False, True, True]), 1).tolist()
    [13]
    """
    # Eight numbers fill `width` whole bytes, so the same few shifts pack every group of eight.
    num_groups = -(-len(values) // 8)
    dtype = torch.uint8 if width <= 8 else torch.int64
    groups = torch.zeros(num_groups * 8, dtype=dtype, device=values.device)
    groups[: len(values)] = values
    groups = groups.view(num_groups, 8)
    packed = torch.zeros(num_groups, width, dtype=torch.uint8, device=values.device)
    for number, byte, shift in _overlaps(width):
        part = groups[:, number] << shift if shift >= 0 else groups[:, number] >> -shift
        packed[:, byte] |= part if dtype == torch.uint8 else (part & 255).to(torch.uint8)
    return packed.view(-1)[: -(-len(values) * width // 8)]


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """Return the numbers that `pack` packed.

    Args:
        packed: bytes (⌈count·width / 8⌉,).
        count: n, the number of packed numbers.
        width: bits per number.

    Returns:
        The numbers (n,), uint8 if they fit in a byte, int64 if not.

    >>> unpack(pack(torch.tensor([5, 0, 1023]), 10), 3, 10).tolist()
    [5, 0, 1023]
    """
    num_groups = -(-count // 8)
    dtype = torch.uint8 if width <= 8 else torch.int64
    whole = torch.zeros(num_groups * width, dtype=torch.uint8, device=packed.device)
    whole[: len(packed)] = packed
    bytes_of_group = whole.view(num_groups, width)
    groups = torch.zeros(num_groups, 8, dtype=dtype, device=packed.device)
    for number, byte, shift in _overlaps(width):
        part = bytes_of_group[:, byte].to(dtype)
        groups[:, number] |= part >> shift if shift >= 0 else part << -shift
    groups &= (1 << width) - 1
    return groups.view(-1)[:count]


def _overlaps(width: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number, byte, shift) for each byte of `width` that holds part of one of eight numbers.

    The shift is the offset of the number's lowest bit from that of the byte.
    """
    for number in range(8):
        for byte in range(number * width // 8, -(-(number + 1) * width // 8)):
            yield number, byte, number * width - 8 * byte
