"""Interface of partitions, and what they share.

To add a partition, subclass `Partition` as a frozen dataclass and use its class path in place of a partition's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_fl.checks import check_whole
from lightning_fl.errors import require


@dataclass(frozen=True)
class Partition(ABC):
    """A way to divide samples over clients, given their labels."""

    needs_labels = True

    @abstractmethod
    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Divide `labels` over the clients.

        Args:
            labels: (n,) int64, the class of each sample.
            num_clients: number of parts, at least 1.
            rng: the only source of randomness.

        Returns:
            `num_clients` int64 index arrays into `labels`; together they hold each of 0..n-1 exactly once.

        Raises:
            UserError: the samples cannot be divided this way.
        """


def even_sizes(num_samples: int, num_parts: int) -> np.ndarray:
    """Return sizes (num_parts,) that differ by at most one, the larger ones first.

    >>> even_sizes(8, 3).tolist()
    [3, 3, 2]
    """
    return num_samples // num_parts + (np.arange(num_parts) < num_samples % num_parts)


def cut(order: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Cut `order` into consecutive parts of these sizes, as views; np.split takes three times as long for many parts.

    >>> [part.tolist() for part in cut(np.arange(5), np.array([2, 0, 3]))]
    [[0, 1], [], [2, 3, 4]]
    """
    return [order[start:end] for start, end in pairwise([0, *np.cumsum(sizes).tolist()])]


def require_enough(num_samples: int, num_clients: int) -> None:
    """Raise `UserError` if there are fewer samples than clients, or no client."""
    check_whole("num_clients", num_clients, 1)
    require(
        num_clients <= num_samples,
        f"num_clients={num_clients:,} is more than the {num_samples:,} training samples to divide: use fewer clients.",
    )


def require_minimum(num_samples: int, num_clients: int, min_samples: int) -> None:
    """Raise `UserError` if there are too few samples for all clients to have `min_samples`, or no client."""
    require_enough(num_samples, num_clients)
    require(
        num_clients * min_samples <= num_samples,
        f"{num_clients:,} clients with min_samples={min_samples} need at least {num_clients * min_samples:,} samples, but "
        f"there are {num_samples:,}: use fewer clients or a smaller min_samples.",
    )
