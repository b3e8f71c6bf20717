"""Classes of samples in the forms in which data sets and users name them: whole numbers, true and false, text."""

from __future__ import annotations

from typing import Any

import numpy as np

NUMBERS, TEXT = "biu", "US"
"""Kinds of NumPy's types."""


def label_values(values: Any, count: int) -> np.ndarray | None:
    """Return one value per sample, (count,): numbers, or text; None if `values` are no such thing.

    A column (count, 1) is read as (count,), and objects as the numbers or the texts that they all are.

    >>> label_values([[2], [0]], 2).tolist(), label_values(np.array(["b", "a"], dtype=object), 2).tolist()
    ([2, 0], ['b', 'a'])
    """
    try:
        array = np.asarray(values)
    except (RuntimeError, TypeError, ValueError):
        # Ragged targets, such as boxes, and tensors on an accelerator or with a gradient, are not one class per sample.
        return None
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.shape != (count,):
        return None
    if array.dtype.kind == "O":
        kinds = {isinstance(value, str) for value in array}
        array = np.array(array.tolist()) if len(kinds) == 1 else array
    return array if array.shape == (count,) and array.dtype.kind in NUMBERS + TEXT + "f" else None


def numbered(values: np.ndarray) -> tuple[np.ndarray, list[str] | None] | None:
    """Return the class of each value, (n,) int64, and the sorted names of classes that are text; None if values are no classes.

    >>> numbered(np.array([1.0, 0.0])), numbered(np.array(["b", "a"])), numbered(np.array([0.5]))
    ((array([1, 0]), None), (array([1, 0]), ['a', 'b']), None)
    """
    if values.dtype.kind in TEXT:
        names, classes = np.unique(values, return_inverse=True)
        return classes.astype(np.int64), names.astype(str).tolist()
    if values.dtype.kind == "f" and not bool((np.isfinite(values) & (values == np.round(values))).all()):
        return None
    return values.astype(np.int64), None
