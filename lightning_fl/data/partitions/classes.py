"""Partitions by the classes of each client.

`Classes`: Li et al., Federated Learning on Non-IID Data Silos: An Experimental Study, ICDE 2022 ("NIID-Bench",
arXiv:2102.02079). `ClassPriors`: Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019 (arXiv:1909.06335).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt

from lightning_fl.data.partitions.client_indices import ClientIndices
from lightning_fl.data.partitions.partition import Partition, even_sizes, require_enough
from lightning_fl.data.partitions.sizes import IID, Sizes
from lightning_fl.errors import require

LEFT_TO_NOBODY = "use more clients or a larger classes_per_client, or set leave_out to True"
"""Remedies for a class that no client has."""


@dataclass(frozen=True)
class Classes(Partition):
    """Give each client samples of exactly `classes_per_client` classes; the clients of a class share it evenly.

    Client i has class i mod C of C classes, and others drawn at random without replacement.

    Args:
        classes_per_client: classes of a client, at least 1 and at most the number of classes; 1, 2 and 3 in NIID-Bench.
        leave_out: True to leave out the samples of a class that no client has, for example if 3 clients have 2 of 10 classes
            each; otherwise such a split is refused.
    """

    takes_shuffled = True

    classes_per_client: Annotated[int, Ge(1)] = 2
    leave_out: bool | None = None

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> ClientIndices:
        """Divide `labels` over the clients: see `Partition`."""
        require_enough(len(labels), num_clients)
        present = np.unique(labels)
        require(
            self.classes_per_client <= len(present),
            f"classes_per_client={self.classes_per_client} is more than the {len(present)} classes that the samples have.",
        )
        held = np.zeros((num_clients, len(present)), dtype=bool)
        for client, row in enumerate(held):
            first = client % len(present)
            others = np.delete(np.arange(len(present)), first)
            row[[first, *rng.choice(others, self.classes_per_client - 1, replace=False)]] = True
        owners = np.empty(len(labels), dtype=np.int64)
        for label, holders in zip(present, held.T, strict=True):
            members, clients = rng.permutation(np.flatnonzero(labels == label)), np.flatnonzero(holders)
            if not len(clients) and self.leave_out:
                owners[members] = -1
                continue
            require(
                0 < len(clients) <= len(members),
                f"{self} gives class {label}, which has {len(members):,} samples, to {len(clients):,} of {num_clients:,} "
                f"clients: {'use fewer clients' if len(clients) else LEFT_TO_NOBODY}.",
            )
            owners[members] = np.repeat(clients, even_sizes(len(members), len(clients)))
        return ClientIndices.by_owner(owners, num_clients)


@dataclass(frozen=True)
class ClassPriors(Partition):
    """Draw each client's shares of the classes, `q ~ Dir(alpha · p)`, where p are the classes' shares of all samples.

    A client's samples are drawn by q without replacement. A class without samples left has share 0 from then on, so the last
    clients get the remaining samples, whatever their q. `sizes` sets the clients' sizes, so only labels are skewed;
    `Dirichlet` skews both.

    Args:
        alpha: concentration, > 0: the smaller, the fewer classes per client. Hsu et al. use 0.05 to 100.
        sizes: the clients' sizes: IID() for even ones, LogNormalSizes() or QuantitySkew().
    """

    takes_shuffled = True

    alpha: Annotated[float, Gt(0)] = 0.5
    sizes: Sizes = IID()  # noqa: RUF009  (immutable)

    def __post_init__(self) -> None:
        require(
            isinstance(self.sizes, Sizes),
            f"sizes={self.sizes!r} must be IID(), LogNormalSizes() or QuantitySkew(), which choose the clients' sizes.",
        )

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> ClientIndices:
        """Divide `labels` over the clients: see `Partition`."""
        sizes = self.sizes.sizes(len(labels), num_clients, rng)
        present, left = np.unique(labels, return_counts=True)
        prior = self.alpha * left / len(labels)
        taken = np.array([self._draw(rng.dirichlet(prior), left, size, rng) for size in sizes])
        members = np.concatenate([rng.permutation(np.flatnonzero(labels == label)) for label in present])
        owners = np.concatenate([np.repeat(np.arange(num_clients), column) for column in taken.T])
        return ClientIndices(members[np.argsort(owners, kind="stable")], sizes)

    @staticmethod
    def _draw(shares: np.ndarray, left: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
        """Return how many samples of each class a client of `size` gets, and take them off `left`, in place.

        Draws from a class that is used up are repeated without it: as many, with the same distribution, as one after the other.
        """
        taken = np.zeros_like(left)
        while missing := size - taken.sum():
            shares = np.where(left > 0, shares, 0.0)
            if not shares.sum() > 0:  # nothing is left of this client's classes
                shares = left
            drawn = np.minimum(rng.multinomial(missing, shares / shares.sum()), left)
            taken += drawn
            left -= drawn
        return taken
