"""Smoothed curve for results (Liu et al., FedDUMAP, ACM TIST 2024; window and order come from the authors' code).

A Savitzky–Golay filter of window 39 and order 3 smooths the accuracy after each round; the result is rounded to three decimals,
or to as many as the target has, if these are more.
The final accuracy of that paper is the maximum of the smoothed curve; reports call it `best (smoothed)`, because it is chosen on
the values that it reports, which are test values in the paper. A cubic fitted to a steep curve leaves the range of the values,
so each smoothed value is clipped to the range of the values in its window before it is rounded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WINDOW = 39
ORDER = 3
DECIMALS = 3

Floats = NDArray[np.float64]


def fitting_window(count: int, window: int = WINDOW) -> int:
    """Return the largest odd window of at most `window` and `count` values; 1 if a cubic would pass through all of them.

    >>> [fitting_window(count) for count in (3, 4, 5, 6, 500)]
    [1, 1, 5, 5, 39]
    """
    fits = min(window, count)
    fits -= 1 - fits % 2
    return fits if fits > ORDER else 1


def suitable_window(count: int) -> int:
    """Return the largest odd window of at most `WINDOW` and half of `count` values; 1 if a cubic would pass through all of them.

    A longer one covers so much of a short curve that its steep beginning shifts the later values.

    >>> [suitable_window(count) for count in (9, 10, 20, 77, 78, 500)]
    [1, 5, 9, 37, 39, 39]
    """
    return fitting_window(count // 2)


def smooth(values: Floats, decimals: int | None = DECIMALS, window: int = WINDOW) -> Floats:
    """Return the smoothed curve.

    Args:
        values: one value for each evaluation (n,), finite.
        decimals: decimals of the smoothed curve; None for no rounding.
        window: length of the filter in values; `fitting_window(n, window)` is used. If that is 1, the values are neither
            smoothed nor rounded.

    Returns:
        Smoothed values (n,).

    >>> smooth(np.array([0.1, 0.2, 0.4])).tolist()
    [0.1, 0.2, 0.4]
    >>> smooth(np.array([1.0, 8.0, 27.0, 64.0, 125.0])).tolist()  # a cubic does not change
    [1.0, 8.0, 27.0, 64.0, 125.0]
    """
    window = fitting_window(len(values), window)
    if window == 1:
        return values
    from scipy.ndimage import maximum_filter1d, minimum_filter1d
    from scipy.signal import savgol_filter

    least, most = (of(values, window, mode="nearest") for of in (minimum_filter1d, maximum_filter1d))
    smoothed: Floats = savgol_filter(values, window, ORDER).clip(least, most)
    # Round twice, so that the last bit of the filter does not decide how a half is rounded.
    return smoothed if decimals is None else smoothed.round(decimals + 6).round(decimals)
