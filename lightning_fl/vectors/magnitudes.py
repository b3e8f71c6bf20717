"""Bring numbers of any size to where their squares and sums are numbers of the dtype, too."""

from __future__ import annotations

from math import frexp, isfinite

import torch
from torch import Tensor

NEAR = 40
"""Numbers up to 2^40, and sums of 2^27 of them, are far from the limits of float32."""


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a scale of numbers of some dtype: float64 for float64, and float32 for all others.

    >>> scale_dtype(torch.float16), scale_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def power_of_two(numbers: Tensor) -> float:
    """Return 2^i, which brings the largest magnitude of some numbers near 1; 1 if it is within 2^±40, 0 or not finite.

    >>> power_of_two(torch.tensor([3.0, -1e20])) == 2.0**-67, power_of_two(torch.tensor([1e-40])) == 2.0**126
    (True, True)
    """
    limits = torch.stack(torch.aminmax(numbers)) if numbers.numel() else numbers  # 25 times as fast as a norm
    largest = max(map(abs, limits.tolist()), default=0.0)
    exponent = frexp(largest)[1] if isfinite(largest) else 0
    most = 1 - frexp(torch.finfo(numbers.dtype).smallest_normal)[1]  # 2^±most and its inverse are normal numbers
    return 2.0 ** -max(-most, min(most, exponent)) if abs(exponent) > NEAR else 1.0


def by_largest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 rows (…, n) as shares of the largest magnitude of each, and these magnitudes (…, 1).

    Rows of other dtypes, whose squares are numbers of float64, are returned as they are, with the magnitude 1.
    """
    if rows.dtype != torch.float64 or not rows.shape[-1]:
        return rows, torch.ones((*rows.shape[:-1], 1), dtype=torch.float64, device=rows.device)
    largest = rows.abs().amax(-1, keepdim=True)
    return rows / torch.where(largest > 0, largest, 1.0), largest
