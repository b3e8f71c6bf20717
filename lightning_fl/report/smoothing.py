"""The curve that results are read off (Liu et al., FedDUMAP, ACM TIST 2024; window and order are those of the authors' code).

A Savitzky–Golay filter of window 39 and order 3 over the accuracy after each round, rounded to three decimals. The final
accuracy is the maximum of the smoothed curve, not its last value. A cubic that is laid through a short, steep curve leaves the
range of the values, which those of 500 rounds never do: what it has beyond them is cut off.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WINDOW = 39
ORDER = 3

Floats = NDArray[np.float64]


def smooth(values: Floats, decimals: int | None = 3, window: int = WINDOW) -> Floats:
    """A smoothed curve.

    Args:
        values: one for each evaluation (n,).
        decimals: to which the smoothed curve is rounded; None not to.
        window: values that the filter reaches over, odd. With fewer values it is the largest odd number that fits; where that is
            no more than 3, nothing is smoothed.

    Returns:
        The smoothed values (n,).

    >>> smooth(np.array([0.1, 0.2, 0.4])).tolist()
    [0.1, 0.2, 0.4]
    >>> smooth(np.array([1.0, 8.0, 27.0, 64.0, 125.0])).tolist()  # a cubic stays as it is
    [1.0, 8.0, 27.0, 64.0, 125.0]
    """
    window = min(window, len(values) - (len(values) + 1) % 2)
    if window <= ORDER:
        return values
    from scipy.signal import savgol_filter

    smoothed: Floats = savgol_filter(values, window, ORDER)
    rounded = smoothed if decimals is None else smoothed.round(decimals)
    return rounded.clip(values.min(), values.max())
