"""Checks of user input, which raise a `UserError` with the value received and what is allowed, and float comparisons with a
tolerance for rounding.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from lightning_fl.errors import require

ROUNDING = 1e-6
"""Largest relative distance of a computed number from the exact one; float32 has some 6e-8 for each operation."""


def is_whole(value: Any) -> bool:
    """True if `value` is a whole number (Python's or NumPy's, and not a bool)."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """True if `value` is a finite real number (and not a bool)."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def check_whole(name: str, value: Any, minimum: int) -> None:
    """Raise `UserError` unless `value` is a whole number of at least `minimum`."""
    require(
        is_whole(value) and value >= minimum,
        f"{name}={value!r} is not allowed: give a whole number of at least {minimum}.",
    )


def check_share(name: str, value: Any, *, zero: bool, one: bool) -> None:
    """Raise `UserError` unless `value` lies between 0 and 1; `zero` and `one` allow the ends."""
    inside = is_real(value) and (value >= 0 if zero else value > 0) and (value <= 1 if one else value < 1)
    interval = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
    require(inside, f"{name}={value!r} is not allowed: give a number in {interval}.")


def reaches(value: Any, target: float, falls: bool = False) -> Any:
    """True where a value has reached the target to within rounding: 0.9 in float32, which is below 0.9, reaches 0.9.

    Args:
        value: a number, or an array of numbers; nan reaches nothing.
        target: the value to reach.
        falls: True if lower is better.

    >>> reaches(0.8999999762, 0.9), reaches(0.8999, 0.9), reaches(0.30000000000000004, 0.3, falls=True)
    (True, False, True)
    """
    slack = ROUNDING * abs(target)
    return value <= target + slack if falls else value >= target - slack


def whole_share(share: float, count: int) -> int:
    """Return ⌊share · count⌋ without rounding error: a share of 0.29 of 100 is 29, although 0.29 · 100 is 28.999… in floats.

    >>> whole_share(0.29, 100), whole_share(0.5, 3), whole_share(1.0, 7)
    (29, 1, 7)
    """
    return math.floor(share * count + 1e-9)
