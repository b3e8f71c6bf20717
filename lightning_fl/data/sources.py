"""`Source`: a holder of training samples, for parts that query each holder about the model (adaptive pruning)."""

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
        samples: the whole data set, as evaluation reads it where that is known.
        indices: indices of this source's samples in it, int64 (n,), not empty.
        degree: non-IID degree D(P) in [0, 1] of their labels against those of all clients together; 0 if the samples
            have no classes.
        on_answer: called with the client and the count of numbers that it sends; never called for the server, which
            sends nothing.
    """

    client: int | None
    samples: Samples
    indices: np.ndarray
    degree: float = 0.0
    on_answer: Callable[[int, int], None] | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples, n."""
        return len(self.indices)

    def batch(self, size: int, rng: np.random.Generator) -> Any:
        """Return a random batch, without augmentation.

        Args:
            size: size of the batch, at least 1; all samples if there are fewer.
            rng: generator that draws the samples, without replacement.
        """
        return SampleLoader(self.samples, self.indices, size).draw(size, rng)

    def answer(self, count: int) -> None:
        """Report that this client sends `count` numbers about the current model to the server."""
        if self.client is not None and self.on_answer is not None:
            self.on_answer(self.client, count)
