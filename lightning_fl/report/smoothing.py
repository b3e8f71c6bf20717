"""The curve that results are read off (Liu et al., FedDUMAP, ACM TIST 2024; window and order are those of the authors' code).

A Savitzky–Golay filter of window 39 and order 3 over the accuracy after each round, rounded to three decimals. The final
accuracy is the maximum of the smoothed curve, not its last value. A cubic that is laid through a short, steep curve leaves the
range of the values, which those of 500 rounds never do: what it has beyond them is cut off before it is rounded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WINDOW = 39
ORDER = 3

Floats = NDArray[np.float64]


def fitting_window(count: int, window: int = WINDOW) -> int:
    """The largest odd number of values that is at most the window and at most `count`; 1 where a cubic would pass through all.

    >>> [fitting_window(count) for count in (3, 4, 5, 6, 500)]
    [1, 1, 5, 5, 39]
    """
    fits = min(window, count)
    fits -= 1 - fits % 2
    return fits if fits > ORDER else 1


def smooth(values: Floats, decimals: int | None = 3, window: int = WINDOW) -> Floats:
    """A smoothed curve.

    Args:
        values: one for each evaluation (n,), finite.
        decimals: to which the smoothed curve is rounded; None not to.
        window: values that the filter reaches over; those that it does are `fitting_window(n, window)`. Where that is 1,
            nothing is smoothed, nor rounded.

    Returns:
        The smoothed values (n,).

    >>> smooth(np.array([0.1, 0.2, 0.4])).tolist()
    [0.1, 0.2, 0.4]
    >>> smooth(np.array([1.0, 8.0, 27.0, 64.0, 125.0])).tolist()  # a cubic stays as it is
    [1.0, 8.0, 27.0, 64.0, 125.0]
    """
    window = fitting_window(len(values), window)
    if window == 1:
        return values
    from scipy.signal import savgol_filter

    smoothed: Floats = savgol_filter(values, window, ORDER).clip(values.min(), values.max())
    # Twice, so that the last bit of the filter does not decide what becomes of a half.
    return smoothed if decimals is None else smoothed.round(decimals + 6).round(decimals)
