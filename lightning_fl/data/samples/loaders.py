"""A data loader over `Samples`, for the hooks of a `LightningDataModule`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lightning_fl.data.samples.tensor_samples import Samples

ROWS_PER_GATHER = 8192
"""Resident samples converted at a time when a whole data set is shuffled: it need not fit into memory as floats."""


class SampleLoader:
    """Batches of `samples`, re-iterable and with a length, as `L.Trainer` and `FederatedTrainer` expect of a loader.

    Args:
        samples: where to read.
        indices: (m,) int64 which samples; None: all.
        batch_size: samples per batch, at least 1; the last batch may be smaller.
        seed: shuffle (anew in each iteration, and augment) from this seed; None: in order.
    """

    def __init__(self, samples: Samples, indices: np.ndarray | None, batch_size: int, seed: int | None = None) -> None:
        self.samples = samples
        self.indices = indices
        self.batch_size = batch_size
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    @property
    def num_samples(self) -> int:
        """How many samples one iteration yields."""
        return len(self.samples) if self.indices is None else len(self.indices)

    def reseeded(self, seed: int, batch_size: int) -> SampleLoader:
        """The same samples in other batches, shuffled from `seed`; this loader's own order is left alone."""
        return SampleLoader(self.samples, self.indices, batch_size, seed)

    def __len__(self) -> int:
        """The number of batches."""
        return -(-self.num_samples // self.batch_size)

    def draw(self, size: int, rng: np.random.Generator) -> Any:
        """A random batch of at most `size` samples, without augmentation; no iteration notices."""
        indices = np.arange(self.num_samples) if self.indices is None else self.indices
        rows = rng.choice(indices, min(size, len(indices)), replace=False)
        return next(iter(self.samples.batches(len(rows), rows)))

    def __iter__(self) -> Iterator[Any]:
        """One pass over the samples."""
        if self._generator is None:
            yield from self.samples.batches(self.batch_size, self.indices)
            return
        indices = np.arange(self.num_samples) if self.indices is None else self.indices
        shuffled = indices[torch.randperm(len(indices), generator=self._generator).numpy()]
        rows = max(1, ROWS_PER_GATHER // self.batch_size) * self.batch_size if self.samples.resident else len(indices)
        for start in range(0, len(indices), rows):
            yield from self.samples.select(shuffled[start : start + rows]).batches(self.batch_size, self._generator)
