"""Sources of training data, in any trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset


class Source(Protocol):
    """Source of training data.

    Attributes:
        client: index of the client in a federation; None is the server, or a training without clients.
        num_samples: number of samples n_k.
        degree: non-IID degree D(P_k) of its labels against those of all, in [0, 1].
    """

    degree: float

    @property
    def client(self) -> int | None: ...

    @property
    def num_samples(self) -> int: ...

    def batch(self, size: int, rng: np.random.Generator) -> Any:
        """Draw a random batch of at most `size` samples."""

    def answer(self, count: int) -> None:
        """Record that it reports `count` numbers on the current model, which a federation books; called on every process."""


class _TrainingData:
    """Training data of a trainer without clients."""

    client = None
    degree = 0.0
    num_samples = 1

    def __init__(self, loaders: Any) -> None:
        self._loaders = loaders

    def batch(self, size: int, rng: np.random.Generator) -> Any:
        """Draw random samples of every loader, as the loaders collate them."""
        return tree_map(lambda loader: _draw(loader, size, rng), self._loaders)

    def answer(self, count: int) -> None:
        """Do nothing, as nothing is sent."""


def sources_of(trainer: Any) -> Sequence[Source]:
    """Return all sources of training data, the server first; without clients, the training data."""
    federation = getattr(trainer, "sources", None)
    return federation() if federation is not None else [_TrainingData(trainer.train_dataloader)]


def _draw(loader: Any, size: int, rng: np.random.Generator) -> Any:
    """Draw random samples of a map-style data set or of a loader that draws; else take the start of the first batch."""
    if hasattr(loader, "draw"):
        return loader.draw(size, rng)
    is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if is_map and loader.batch_sampler is not None:
        rows = rng.choice(len(loader.dataset), min(size, len(loader.dataset)), replace=False)
        return loader.collate_fn([loader.dataset[int(row)] for row in rows])
    return tree_map(lambda x: x[:size] if isinstance(x, Tensor) and x.dim() else x, next(iter(loader)))
