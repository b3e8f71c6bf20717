"""Checks of what a user gave, each raising a `UserError` with the value received and what is allowed, and comparisons of
floats that no last bit turns.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from lightning_fl.errors import require

ROUNDING = 1e-6
"""How far a computed number may lie from the exact one, relative to it; float32 has some 6e-8 for each operation."""


def is_whole(value: Any) -> bool:
    """Whether `value` is a whole number (Python's or NumPy's, and not a bool)."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Whether `value` is a finite real number (and not a bool)."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def check_whole(name: str, value: Any, minimum: int) -> None:
    """Raise `UserError` unless `value` is a whole number of at least `minimum`."""
    require(
        is_whole(value) and value >= minimum,
        f"{name}={value!r} is not allowed: give a whole number of at least {minimum}.",
    )


def check_share(name: str, value: Any, *, zero: bool, one: bool) -> None:
    """Raise `UserError` unless `value` lies between 0 and 1; `zero` and `one` say whether the ends are allowed."""
    inside = is_real(value) and (value >= 0 if zero else value > 0) and (value <= 1 if one else value < 1)
    interval = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
    require(inside, f"{name}={value!r} is not allowed: give a number in {interval}.")


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


def whole_share(share: float, count: int) -> int:
    """Return ⌊share · count⌋ of the share as it was meant: of 100 a share of 0.29 is 29, though 0.29 · 100 is 28.999….

    >>> whole_share(0.29, 100), whole_share(0.5, 3), whole_share(1.0, 7)
    (29, 1, 7)
    """
    return math.floor(share * count + 1e-9)
