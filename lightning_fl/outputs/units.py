"""Numbers for display: in a unit that keeps them short, with three significant figures; only zero reads as zero."""

from __future__ import annotations

from collections.abc import Iterable
from math import floor, isfinite, log10

FIGURES = 3
BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
JOULES = {"J": 1.0, "kJ": 1e3, "MJ": 1e6, "GJ": 1e9}


def significant(value: float) -> str:
    """Return a number with three significant figures; digits before the point are kept, and 0 stays 0.

    >>> [significant(value) for value in (0, 0.00064, 0.9996, 4.5, 153.3, 61_706, 6.4e-7)]
    ['0', '0.000640', '1.00', '4.50', '153', '61,706', '6.4e-07']
    """
    if value == 0:
        return "0"
    if not isfinite(value) or not 1e-4 <= abs(value) < 1e15:
        return f"{value:.{FIGURES}g}"
    return f"{value:,.{decimals(value)}f}"


def decimals(value: float) -> int:
    """Return the number of decimals for three significant figures.

    >>> [decimals(value) for value in (0.0312, 0.9996, 4.5, 153.3, 0)]
    [4, 2, 2, 0, 0]
    """
    return max(0, FIGURES - 1 - magnitude(value, FIGURES)) if value and isfinite(value) else 0


def magnitude(value: float, figures: int) -> int:
    """Return the power of ten of the first digit of a number other than 0, rounded to so many significant figures.

    >>> magnitude(0.9996, 3), magnitude(0.9996, 4)
    (0, -1)
    """
    return floor(log10(abs(float(f"{value:.{figures - 1}e}"))))


def unit_of(value: float, units: dict[str, float]) -> str:
    """Return the largest unit in which a number is at least 1, or else the smallest unit.

    >>> [unit_of(value, BYTES) for value in (7_800, 999_600, 12, 0)]
    ['kB', 'MB', 'B', 'B']
    """
    rounded = float(f"{value:.{FIGURES - 1}e}")
    names = list(units)
    return next((name for name in reversed(names) if rounded >= units[name]), names[0])


def common_unit(values: Iterable[float], units: dict[str, float]) -> str:
    """Return the unit of a column: that of the geometric mean of its least and its largest value.

    >>> [common_unit(values, BYTES) for values in ([1.05e9, 16.4e6], [148e6, 75], [0, float("inf")])]
    ['MB', 'kB', 'B']
    """
    known = [value for value in values if value > 0 and isfinite(value)]
    return unit_of((max(known) * min(known)) ** 0.5 if known else 0.0, units)


def in_bytes(count: float) -> str:
    """Return a number of bytes with its unit; 1 MB is 10^6 bytes.

    >>> [in_bytes(count) for count in (148_094_400, 24_512_000, 7_800, 650, 0)]
    ['148 MB', '24.5 MB', '7.80 kB', '650 B', '0 B']
    """
    unit = unit_of(count, BYTES)
    return f"{count:,.0f} B" if unit == "B" and count == round(count) else f"{significant(count / BYTES[unit])} {unit}"


def counted(count: int, thing: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "round"), counted(1200, "round")
    ('1 round', '1,200 rounds')
    """
    return f"{count:,} {thing}{'s' * (count != 1)}"
