"""Comparisons that the last bit of a float does not turn."""

from __future__ import annotations

from math import floor
from typing import Any

ROUNDING = 1e-6
"""How far a computed number may lie from the exact one, relative to it; float32 has some 6e-8 for each operation."""


def reaches(value: Any, target: float, falls: bool = False) -> Any:
    """True where a value has reached the target to within rounding: 0.9 in float32, which is below 0.9, has reached 0.9.

    Args:
        value: a number, or an array of numbers; nan reaches nothing.
        target: the value to reach.
        falls: if less is better.

    >>> reaches(0.8999999762, 0.9), reaches(0.8999, 0.9), reaches(0.30000000000000004, 0.3, falls=True)
    (True, False, True)
    """
    slack = ROUNDING * abs(target)
    return value <= target + slack if falls else value >= target - slack


def share_of(share: float, count: int) -> int:
    """Return ⌊share · count⌋ of the share as it was meant: of 100 a share of 0.29 is 29, though 0.29 · 100 is 28.999….

    >>> share_of(0.29, 100), share_of(0.5, 3), share_of(1.0, 7)
    (29, 1, 7)
    """
    return floor(share * count + 1e-9)
