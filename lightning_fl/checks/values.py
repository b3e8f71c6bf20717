"""Checks of user input, and float comparisons with a tolerance for rounding.

A check raises a `UserError` with the value received and the allowed values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, Literal

from lightning_fl.errors import nearest, require

ROUNDING = 1e-6
"""Largest relative distance of a computed number from the exact one; float32 has some 6e-8 for each operation."""
LARGEST, SMALLEST = 3.4e38, 1.2e-38
"""Bounds of positive numbers: in float32, in which models are trained, larger ones are infinite and smaller ones are 0."""
MOST = 10**9
"""Largest count of anything."""
LARGEST_SEED = 2**32 - 1
"""Largest seed, as in Lightning's `seed_everything`."""


def is_whole(value: Any) -> bool:
    """True if `value` is a whole number (Python's or NumPy's, and not a bool)."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """True if `value` is a real number (and not a bool) that is finite in float32.

    >>> [is_real(value) for value in (1.5, 1e300, float("nan"), 10**400)]
    [True, False, False, False]
    """
    return is_number(value) and bool(abs(value) <= LARGEST)


def as_number(value: Any) -> Any:
    """Return the number that a text stands for; return any other value unchanged.

    YAML reads a number without the sign of its exponent as text.

    >>> [as_number(value) for value in ("1e6", "nan", "warm", 2)]
    [1000000.0, nan, 'warm', 2]
    """
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def is_number(value: Any) -> bool:
    """True if `value` is a real number, which may be infinite or nan (and not a bool)."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_whole(name: str, value: Any, minimum: int, maximum: int = MOST) -> None:
    """Raise `UserError` unless `value` is a whole number from `minimum` to `maximum`.

    >>> check_whole("max_rounds", True, 0)
    Traceback (most recent call last):
    lightning_fl.errors.UserError: max_rounds must be a whole number of at least 0, got True.
    """
    too_large = is_whole(value) and value > maximum
    allowed = f"from {minimum} to {maximum}" if too_large or maximum != MOST else f"of at least {minimum}"
    inside = is_whole(value) and minimum <= value <= maximum
    require(inside, f"{name} must be a whole number {allowed}, got {value!r}.")


def check_between(name: str, value: Any, low: float, high: float, ends: Literal["[]", "[)", "(]", "()"] = "[]") -> None:
    """Raise `UserError` unless `value` is a number between `low` and `high`; `ends` says which of them are allowed.

    If `low` is 0 and not allowed, numbers that are 0 in float32 are not allowed either.

    >>> check_between("dropout_rate", 1.0, 0, 1, "[)")
    Traceback (most recent call last):
    lightning_fl.errors.UserError: dropout_rate must lie in [0, 1), got 1.0.
    """
    inside = (
        is_real(value)
        and (value >= low if ends[0] == "[" else value > low)
        and (value <= high if ends[1] == "]" else value < high)
        and (value >= SMALLEST or low != 0 or ends[0] == "[")
    )
    least = f", from {SMALLEST}" if low == 0 and ends[0] == "(" and is_real(value) and 0 < value < SMALLEST else ""
    require(inside, f"{name} must lie in {ends[0]}{low}, {high}{ends[1]}{least}, got {value!r}.")


def check_at_least(name: str, value: Any, minimum: float) -> None:
    """Raise `UserError` unless `value` is a number of at least `minimum` that is finite in float32."""
    allowed = f"from {minimum} to {LARGEST}" if is_number(value) and value > LARGEST else f"at least {minimum}"
    require(is_real(value) and value >= minimum, f"{name} must be {allowed}, got {value!r}.")


def check_above(name: str, value: Any, minimum: float) -> None:
    """Raise `UserError` unless `value` is a number above `minimum` that is finite in float32."""
    too_large = is_number(value) and value > LARGEST
    allowed = f"above {minimum} and at most {LARGEST}" if too_large else f"a number above {minimum}"
    require(is_real(value) and value > minimum, f"{name} must be {allowed}, got {value!r}.")


def check_positive(name: str, value: Any) -> None:
    """Raise `UserError` unless `value` is a number above 0 that is neither infinite nor 0 in float32.

    >>> check_positive("epsilon", 1e300)
    Traceback (most recent call last):
    lightning_fl.errors.UserError: epsilon must be positive, from 1.2e-38 to 3.4e+38, got 1e+300.
    """
    allowed = f"positive, from {SMALLEST} to {LARGEST}" if is_number(value) and value > 0 else "positive"
    require(is_real(value) and value >= SMALLEST, f"{name} must be {allowed}, got {value!r}.")


def check_rounds(name: str, value: Any) -> None:
    """Raise `UserError` unless `value` is a count of rounds of at least 1, or a fraction of the run in (0, 1]."""
    inside = 1 <= value <= MOST if is_whole(value) else is_real(value) and SMALLEST <= value <= 1
    require(
        inside, f"{name} must be a count of rounds of at least 1, or a fraction of the run in (0, 1], got {value!r}."
    )


def check_choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise `UserError` unless `value` is one of the allowed values; the sentence names the nearest one.

    >>> check_choice("runner", "stackd", ("auto", "serial", "stacked"))
    Traceback (most recent call last):
    lightning_fl.errors.UserError: runner 'stackd' is unknown; did you mean 'stacked'? Allowed: auto, serial, stacked.
    """
    choices = tuple(allowed)
    require(value in choices, f"{name} {value!r} is unknown; {nearest(str(value), map(str, choices))}.")


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
    return math.floor(share * count * (1 + 1e-15) + 1e-9)
