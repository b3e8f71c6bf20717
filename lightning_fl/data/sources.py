"""Who holds training samples, for what asks each of them about the model (an adaptive pruning, for instance)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_fl.data.loaders import SampleLoader
from lightning_fl.data.samples import Samples


@dataclass(frozen=True, eq=False)
class Source:
    """A client, or the server, with its training samples.

    Attributes:
        client: index of the client; None is the server.
        samples: a data set.
        indices: which of its samples are held, int64 (n,), not empty.
        degree: the non-IID degree D(P) in [0, 1] of their labels against those of all clients together; 0 where samples have
            no classes.
    """

    client: int | None
    samples: Samples
    indices: np.ndarray
    degree: float = 0.0

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
