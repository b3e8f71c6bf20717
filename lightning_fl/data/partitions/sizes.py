"""IID partitions with different sizes of clients.

`QuantitySkew`: Li et al., Federated Learning on Non-IID Data Silos: An Experimental Study, ICDE 2022 ("NIID-Bench",
arXiv:2102.02079). `LogNormalSizes`: the unbalanced clients in the code of Acar et al., Federated Learning Based on Dynamic
Regularization, ICLR 2021 ("FedDyn", arXiv:2111.04263).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt

from lightning_fl.data.partitions.client_indices import ClientIndices
from lightning_fl.data.partitions.partition import Partition, even_sizes, require_enough, require_minimum
from lightning_fl.errors import UserError

MOST_TRIES = 1000
"""Draws before an error is raised, if `max_tries` is not given."""


@dataclass(frozen=True)
class Sizes(Partition):
    """Shuffle the samples and cut them into parts of the sizes that a subclass draws."""

    needs_labels = False
    takes_shuffled = True

    @abstractmethod
    def sizes(self, num_samples: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the number of samples of each client, (num_clients,) int64, which add up to `num_samples`."""

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> ClientIndices:
        """Divide `labels` over the clients: see `Partition`."""
        sizes = self.sizes(len(labels), num_clients, rng)
        return ClientIndices(rng.permutation(len(labels)), sizes)


@dataclass(frozen=True)
class IID(Sizes):
    """Shuffle the samples and deal them out evenly: sizes differ by at most one."""

    def sizes(self, num_samples: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return even sizes, the larger ones first: see `Sizes`."""
        require_enough(num_samples, num_clients)
        return even_sizes(num_samples, num_clients)


@dataclass(frozen=True)
class QuantitySkew(Sizes):
    """Draw the clients' shares of the samples from `Dir(alpha)`; repeat until all have `min_samples`.

    Args:
        alpha: concentration, > 0: the smaller, the more the sizes differ. NIID-Bench uses 0.5.
        min_samples: smallest number of samples of a client, at least 1; 10 in NIID-Bench.
        max_tries: number of draws before an error is raised, at least 1; 1000 if not given.
    """

    alpha: Annotated[float, Gt(0)] = 0.5
    min_samples: Annotated[int, Ge(1)] = 10
    max_tries: Annotated[int, Ge(1)] | None = None

    def sizes(self, num_samples: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return sizes in proportion to shares drawn from a Dirichlet distribution: see `Sizes`."""
        require_minimum(num_samples, num_clients, self.min_samples)

        def shares() -> np.ndarray:
            return rng.dirichlet(np.full(num_clients, self.alpha))

        setting = f"{self} for {num_clients:,} clients: raise alpha or max_tries"
        return drawn_sizes(shares, num_samples, self.min_samples, setting, self.max_tries or MOST_TRIES)


@dataclass(frozen=True)
class LogNormalSizes(Sizes):
    """Draw clients' sizes proportional to `exp(sigma · z)`, z standard normal; repeat until all have `min_samples`.

    Args:
        sigma: spread of the logarithms of the sizes, at least 0; 0 gives even sizes.
        min_samples: smallest number of samples of a client, at least 1.
        max_tries: number of draws before an error is raised, at least 1; 1000 if not given.
    """

    sigma: Annotated[float, Ge(0)] = 0.5
    min_samples: Annotated[int, Ge(1)] = 1
    max_tries: Annotated[int, Ge(1)] | None = None

    def sizes(self, num_samples: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return sizes in proportion to log-normal numbers: see `Sizes`."""
        require_minimum(num_samples, num_clients, self.min_samples)

        def weights() -> np.ndarray:
            logarithms = self.sigma * rng.standard_normal(num_clients)
            return np.exp(logarithms - logarithms.max())  # or large ones overflow

        setting = f"{self} for {num_clients:,} clients: lower sigma, raise max_tries"
        return drawn_sizes(weights, num_samples, self.min_samples, setting, self.max_tries or MOST_TRIES)


def drawn_sizes(
    draw: Callable[[], np.ndarray], num_samples: int, min_samples: int, setting: str, max_tries: int
) -> np.ndarray:
    """Return whole sizes in proportion to drawn weights, the first of which all are at least `min_samples`.

    Args:
        draw: returns weights (num_clients,).
        num_samples: sum of the sizes.
        min_samples: smallest size.
        setting: the partition, the clients and a remedy, for the error.
        max_tries: draws before an error is raised.
    """
    best = 0
    for _ in range(max_tries):
        weights = draw()
        if not 0 < weights.sum() < np.inf:  # extreme parameters: numbers beyond the range of floats
            continue
        sizes = rounded_sizes(weights / weights.sum() * num_samples, num_samples)
        if sizes.min() >= min_samples:
            return sizes
        best = max(best, int(sizes.min()))
    raise UserError(
        f"In {max_tries:,} draws some client had fewer than {min_samples} of the {num_samples:,} samples (at best {best}), "
        f"by {setting}, lower min_samples or use fewer clients."
    )


def rounded_sizes(exact: np.ndarray, total: int) -> np.ndarray:
    """Round sizes that add up to `total` to whole numbers that do: those with the largest remainders are rounded up.

    >>> rounded_sizes(np.array([5, 2.5, 2.5]), 10).tolist()
    [5, 3, 2]
    """
    sizes = np.floor(exact).astype(np.int64)
    sizes[np.argsort(sizes - exact, kind="stable")[: total - sizes.sum()]] += 1
    return sizes
