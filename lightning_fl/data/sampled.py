"""`Sampled`: the samples of a data set that a loader's sampler names."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Subset


class Sampled(Subset):
    """Samples that a sampler names by their indices in the whole data set, by which users know them, too."""


def of_sampled(values: Any, dataset: Any) -> Any:
    """Return a user's entries for a sampler's samples (n,), if the user gives those of the whole data set; else `values`.

    Args:
        values: what the user gives: an array, a tensor or a list, one entry for each sample.
        dataset: data set of the n samples.
    """
    if not isinstance(dataset, Sampled) or not isinstance(values, Sized) or len(values) != len(dataset.dataset):  # type: ignore[arg-type]
        return values
    if isinstance(values, np.ndarray | Tensor):
        return values[dataset.indices]
    entries = list(values)  # type: ignore[call-overload]
    return [entries[index] for index in dataset.indices]
