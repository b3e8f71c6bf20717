"""Interface and shared functions of partitions.

To add a partition, subclass `Partition` as a frozen dataclass and use its class path in place of a partition's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_fl.checks import Checked, check_whole
from lightning_fl.data.users import Groups
from lightning_fl.errors import require


@dataclass(frozen=True)
class Pool:
    """Samples to divide over the clients.

    Attributes:
        labels: class of each sample, (n,) int64; zeros if there are none.
        groups: group of each sample, or None if it is unknown or not needed.
    """

    labels: np.ndarray
    groups: Groups | None = None


@dataclass(frozen=True)
class Partition(Checked, ABC):
    """Rule that divides samples over clients, by their labels or groups (`divide`).

    The samples come in the order of the data set: if the server has none of them, an index is the position in the training
    set.
    """

    needs_labels = True
    needs_groups = False
    """True if the partition keeps groups whole; `num_clients` may then be None."""
    knows_num_clients = False
    """True if `num_clients` may be None."""
    divides_all = False
    """True if the partition divides the whole training set, so that the server can have none of it."""
    takes_shuffled = False
    """True if the partition ignores the order of samples, which may then be random."""

    @abstractmethod
    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Sequence[np.ndarray]:
        """Divide `labels` over the clients.

        Args:
            labels: (n,) int64, the class of each sample, in the order of the data set unless `takes_shuffled`.
            num_clients: number of parts, at least 1.
            rng: the only source of randomness.

        Returns:
            `num_clients` int64 index arrays into `labels`; together they hold each of 0..n-1 exactly once.

        Raises:
            UserError: the samples cannot be divided this way.
        """

    def divide(self, pool: Pool, num_clients: int | None, rng: np.random.Generator) -> Sequence[np.ndarray]:
        """Divide samples with labels and groups over the clients; by default, calls the partition with the labels.

        Args:
            pool: the samples' labels and groups.
            num_clients: number of clients, at least 1; None: as many as there are groups.
            rng: the only source of randomness.

        Returns:
            An int64 index array into the pool for each client; no sample is in two of them.

        Raises:
            UserError: the samples cannot be divided this way.
        """
        assert num_clients is not None
        return self(pool.labels, num_clients, rng)


def even_sizes(num_samples: int, num_parts: int) -> np.ndarray:
    """Return sizes (num_parts,) that differ by at most one, the larger ones first.

    >>> even_sizes(8, 3).tolist()
    [3, 3, 2]
    """
    return num_samples // num_parts + (np.arange(num_parts) < num_samples % num_parts)


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
