"""Partitions, which divide the training samples over the clients.

- `IID`: samples shuffled and dealt out evenly.
- `Shards`: samples sorted by label and cut into shards, a few shards per client. McMahan et al.,
  Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017; used by Liu et al.,
  Efficient Federated Learning Using Dynamic Update and Adaptive Pruning with Momentum on Shared Server Data, ACM TIST
  2024.
- `Dirichlet`: each class split over the clients by proportions drawn from a Dirichlet distribution. Yurochkin et al.,
  Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019; Li et al., Federated Learning on Non-IID Data
  Silos: An Experimental Study, ICDE 2022 ("NIID-Bench").

To add one, subclass `Partition` as a frozen dataclass and use its class path in place of a partition's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import InitVar, dataclass
from itertools import pairwise

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_deprecation

from lightning_fl.checks import check_positive, check_whole
from lightning_fl.errors import UserError, require


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


@dataclass(frozen=True)
class IID(Partition):
    """Shuffle the samples and deal them out evenly: sizes differ by at most one."""

    needs_labels = False

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Divide `labels` over the clients: see `Partition`."""
        require_enough(len(labels), num_clients)
        return cut(rng.permutation(len(labels)), even_sizes(len(labels), num_clients))


@dataclass(frozen=True)
class Shards(Partition):
    """Sort by label (stably), cut into `num_clients · shards_per_client` equal shards, deal out without replacement.

    A shard may span several classes and a client may get two shards of one class, so a client holds about
    `shards_per_client` classes, not exactly. If the samples do not divide evenly, shard sizes differ by at most one.

    Args:
        shards_per_client: shards each client gets, at least 1; 2 for CIFAR-10 and 20 for CIFAR-100 in FedDUMAP (Liu et
            al. 2024).
    """

    shards_per_client: int = 2

    def __post_init__(self) -> None:
        check_whole("shards_per_client", self.shards_per_client, 1)

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Divide `labels` over the clients: see `Partition`."""
        require_enough(len(labels), num_clients)
        num_shards = num_clients * self.shards_per_client
        require(
            num_shards <= len(labels),
            f"{num_clients:,} clients with {self.shards_per_client} shards each need at least {num_shards:,} samples, "
            f"but there are {len(labels):,}: use fewer clients or a smaller shards_per_client.",
        )
        by_label = np.argsort(labels, kind="stable")
        sizes = even_sizes(len(labels), num_shards)
        shards = cut(by_label, sizes)
        dealt = rng.permutation(num_shards)
        order = np.concatenate([shards[shard] for shard in dealt])
        return cut(order, sizes[dealt].reshape(num_clients, -1).sum(1))


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Split each class over the clients by proportions `π ~ Dir(alpha)`; draw again until all have `min_samples`.

    The literature has several splits of this name:

    - Yurochkin et al. 2019 and Li et al. 2022 draw the shares of the clients in each class, as here. The papers stop there
      (`skip_full_clients` False); the code of both also skips clients that are full (True).
    - Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019, draw
      the shares of the classes in each client, and give all clients the same number of samples: no partition here does.

    Clients' sizes differ widely in any case, with skipping less: ten classes of 5,000 samples over 30 clients give sizes of
    about 20 to 5,500 with `alpha` 0.1, and of about 20 to 7,500 without skipping.

    Args:
        alpha: concentration, > 0: the smaller, the fewer classes per client. NIID-Bench uses 0.5 and 0.1.
        skip_full_clients: True if a client that already holds an even share of all samples gets nothing of the next classes
            (`self_balancing` of Flower's DirichletPartitioner); False for the plain split.
        min_samples: smallest number of samples of a client, at least 1; 10 in NIID-Bench.
        max_tries: number of draws before an error is raised, at least 1.
        balanced: deprecated name of skip_full_clients.
    """

    alpha: float = 0.5
    skip_full_clients: bool = True
    min_samples: int = 10
    max_tries: int = 1000
    balanced: InitVar[bool | None] = None

    def __post_init__(self, balanced: bool | None) -> None:
        if balanced is not None:
            rank_zero_deprecation(
                "Dirichlet's balanced is now skip_full_clients, because the clients' sizes still differ."
            )
            object.__setattr__(self, "skip_full_clients", balanced)
        check_positive("alpha", self.alpha)
        check_whole("min_samples", self.min_samples, 1)
        check_whole("max_tries", self.max_tries, 1)

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Divide `labels` over the clients: see `Partition`."""
        require_enough(len(labels), num_clients)
        require(
            num_clients * self.min_samples <= len(labels),
            f"{num_clients:,} clients with min_samples={self.min_samples} need at least "
            f"{num_clients * self.min_samples:,} samples, but there are {len(labels):,}: use fewer clients or a "
            "smaller min_samples.",
        )
        classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        sizes = self._draw_sizes([len(members) for members in classes], num_clients, rng)
        shuffled = np.concatenate([rng.permutation(members) for members in classes])
        owners = np.concatenate([np.repeat(np.arange(num_clients), row) for row in sizes])
        return cut(shuffled[np.argsort(owners, kind="stable")], np.sum(sizes, axis=0))

    def _draw_sizes(self, class_sizes: list[int], num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Draw for each class its number of samples per client; a failed draw is cheap, as it moves no sample."""
        even_share = sum(class_sizes) / num_clients
        best = 0
        for _ in range(self.max_tries):
            held = np.zeros(num_clients, dtype=np.int64)
            sizes = []
            for size in class_sizes:
                proportions = rng.dirichlet(np.full(num_clients, self.alpha))
                if self.skip_full_clients:
                    proportions = proportions * (held < even_share)
                total = proportions.sum()
                if not (np.isfinite(total) and total > 0):
                    # A tiny alpha can give the whole class to a client that is already full: this draw fails.
                    break
                cuts = (np.cumsum(proportions / total)[:-1] * size).astype(np.int64)
                sizes.append(np.diff(cuts, prepend=0, append=size))
                held += sizes[-1]
            else:
                if held.min() >= self.min_samples:
                    return sizes
                best = max(best, int(held.min()))
        raise UserError(
            f"In {self.max_tries:,} draws {self} never gave each of {num_clients:,} clients {self.min_samples} of the "
            f"{sum(class_sizes):,} samples (the best draw's smallest client had {best}): raise alpha, lower "
            "min_samples or use fewer clients."
        )


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
