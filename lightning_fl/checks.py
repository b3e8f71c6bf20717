"""Checks of what a user gave: each raises a `UserError` with the value received and what is allowed."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from lightning_fl.errors import require


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
