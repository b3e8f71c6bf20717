"""Intervals, tests and their correction for the claims of a study.

A mean effect has the 95 % interval and the two-sided p-value of Student's t. Several claims are corrected together by the rule of
Benjamini and Hochberg (1995): with p_(1) ≤ … ≤ p_(m), q_(i) = min_{j ≥ i} m p_(j) / j. Of the claims with q ≤ 0.05, at most 5 %
are expected to be false.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import inf
from statistics import fmean, stdev

LEVEL = 0.05
SAME, SINGLE = 1e-9, 1e-6
"""Largest difference of values that count as equal: absolute, and relative for values of single precision."""


def noise_of(*values: float) -> float:
    """Return the largest difference of such values that says nothing, as they may be of single precision."""
    return max(SAME, SINGLE * max(map(abs, values), default=0.0))


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean by Student's t; infinite for one value."""
    if len(values) < 2:
        return -inf, inf
    half = _quantile(len(values) - 1) * stdev(values) / len(values) ** 0.5
    return fmean(values) - half, fmean(values) + half


@cache
def _quantile(degrees: int) -> float:
    """Return the number of standard errors from the mean to the ends of the interval."""
    from scipy.stats import t

    return float(t.ppf(1 - LEVEL / 2, degrees))


def student_p(values: Sequence[float], border: float, noise: float = SAME) -> float:
    """Return the two-sided p-value for the mean `border`; 1 for one value or equal ones, which show no deviation.

    Args:
        values: one or more.
        border: mean under the hypothesis.
        noise: largest difference of equal values.
    """
    if len(values) < 2 or max(values) - min(values) <= noise:
        return 1.0
    from scipy.stats import t

    distance, error = abs(fmean(values) - border), stdev(values) / len(values) ** 0.5
    return float(2 * t.sf(distance / error, len(values) - 1))


def adjusted(p_values: Sequence[float | None]) -> list[float | None]:
    """Return the q-values of Benjamini and Hochberg; None stays None and does not count.

    >>> adjusted([0.01, None, 0.04, 0.03])
    [0.03, None, 0.04, 0.04]
    """
    tested = sorted((p, at) for at, p in enumerate(p_values) if p is not None)
    adjusted_values: list[float | None] = [None] * len(p_values)
    smallest = 1.0
    for rank, (p, at) in reversed(list(enumerate(tested, 1))):
        smallest = min(smallest, p * len(tested) / rank)
        adjusted_values[at] = smallest
    return adjusted_values
