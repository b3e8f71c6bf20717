"""`SampleLoader`: a data loader of `Samples`, for the hooks of a `LightningDataModule`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from lightning_fl.data.samples.dataset_samples import seeded
from lightning_fl.data.samples.tensor_samples import Samples

ROWS_PER_GATHER = 8192
"""Resident samples converted at a time in a shuffled pass, so that the data set need not fit into memory as floats."""


class SampleOrder:
    """Order of a shuffled loader, which follows from a seed and the epoch that Lightning sets, as torch's `DistributedSampler`'s.

    Without `set_epoch`, each iteration goes on with the random numbers of the one before.

    Args:
        seed: seed of the first epoch.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration have the order of this epoch, from 0."""
        self.generator.manual_seed(self.seed + epoch)


class SampleLoader:
    """Batches of `samples`, re-iterable and with a length, as `L.Trainer` and `FederatedTrainer` expect of a loader.

    Args:
        samples: data set to read.
        indices: indices of the samples to read, (m,) int64; None: all.
        batch_size: samples per batch, at least 1; the last batch may be smaller.
        seed: seed for shuffling anew in each iteration, with augmentation; None: in order, without augmentation.
        drop_last: True to leave out the last batch of a shuffled iteration when it is not full.
        rank: process whose share of the samples a shuffled iteration reads, as by torch's `DistributedSampler`.
        num_replicas: number of processes that share the samples; shares are equal, so that some samples may be read twice.
    """

    def __init__(
        self,
        samples: Samples,
        indices: np.ndarray | None,
        batch_size: int,
        seed: int | None = None,
        drop_last: bool = False,
        rank: int = 0,
        num_replicas: int = 1,
    ) -> None:
        self.samples = samples
        self.indices = indices
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.rank, self.num_replicas = rank, num_replicas
        self._generator = None
        if seed is not None:
            order = SampleOrder(seed)
            # A place where Lightning looks for `set_epoch`; with `overfit_batches` it would replace a loader with a `sampler`.
            self.batch_sampler = SimpleNamespace(sampler=order)
            self._generator = order.generator

    @property
    def dataset(self) -> Subset | None:
        """The samples as part of the user's data set, unchanged; if they are tensors without one, as part of `TensorRows`."""
        return self.samples.select(np.arange(len(self.samples)) if self.indices is None else self.indices).dataset

    @property
    def num_workers(self) -> int:
        """See `Samples.num_workers`."""
        return self.samples.num_workers

    @property
    def shuffles(self) -> bool:
        """True if each iteration has another order."""
        return self._generator is not None

    @property
    def num_samples(self) -> int:
        """Number of samples that one iteration yields."""
        total = -(-(len(self.samples) if self.indices is None else len(self.indices)) // self.num_replicas)
        return total - total % self.batch_size if self.drop_last else total

    def reseeded(self, seed: int, batch_size: int) -> SampleLoader:
        """Return a loader of the same samples in other batches, shuffled from `seed`; this loader does not change."""
        return SampleLoader(self.samples, self.indices, batch_size, seed)

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self.num_samples // self.batch_size)

    def draw(self, size: int, rng: np.random.Generator) -> Any:
        """Return a random batch of at most `size` samples, without augmentation; running iterations do not change."""
        indices = np.arange(len(self.samples)) if self.indices is None else self.indices
        rows = rng.choice(indices, min(size, len(indices)), replace=False)
        seed = int(copy.deepcopy(rng).integers(2**32))  # of a copy, as `rng` decides what its reader draws next
        with seeded(seed):  # for random transforms
            return next(iter(self.samples.batches(len(rows), rows)))

    def __iter__(self) -> Iterator[Any]:
        """Iterate once over the samples."""
        if self._generator is None:
            yield from self.samples.batches(self.batch_size, self.indices)
            return
        indices = np.arange(len(self.samples)) if self.indices is None else self.indices
        shuffled = indices[torch.randperm(len(indices), generator=self._generator).numpy()]
        padded = -(-len(shuffled) // self.num_replicas) * self.num_replicas
        shuffled = np.resize(shuffled, padded)[self.rank :: self.num_replicas][: self.num_samples]
        rows = max(1, ROWS_PER_GATHER // self.batch_size) * self.batch_size if self.samples.resident else len(shuffled)
        for start in range(0, len(shuffled), rows):
            yield from self.samples.select(shuffled[start : start + rows]).batches(self.batch_size, self._generator)
