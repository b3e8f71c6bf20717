"""Who holds training samples, for what asks each of them about the model (an adaptive pruning, for instance)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_fl.data.samples.loaders import SampleLoader
from lightning_fl.data.samples.tensor_samples import Samples


@dataclass(frozen=True, eq=False)
class Source:
    """A client, or the server, with its training samples.

    Attributes:
        client: index of the client; None is the server.
        samples: a data set.
        indices: which of its samples are held, int64 (n,), not empty.
        degree: the non-IID degree D(P) in [0, 1] of their labels against those of all clients together; 0 where samples have
            no classes.
        on_answer: called with the client and how many numbers it tells; not for the server, whose answers go nowhere.
    """

    client: int | None
    samples: Samples
    indices: np.ndarray
    degree: float = 0.0
    on_answer: Callable[[int, int], None] | None = None

    @property
    def num_samples(self) -> int:
        """n."""
        return len(self.indices)

    def batch(self, size: int, rng: np.random.Generator) -> Any:
        """A random batch, without augmentation.

        Args:
            size: of the batch, at least 1; all samples if there are fewer.
            rng: draws them, without replacement.
        """
        return SampleLoader(self.samples, self.indices, size).draw(size, rng)

    def answer(self, count: int) -> None:
        """Take note that it tells the server so many numbers about the model as it is."""
        if self.client is not None and self.on_answer is not None:
            self.on_answer(self.client, count)
