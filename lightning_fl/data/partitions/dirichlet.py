"""Classes split over the clients by a Dirichlet distribution.

Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019 (arXiv:1905.12022); Li et al.,
Federated Learning on Non-IID Data Silos: An Experimental Study, ICDE 2022 ("NIID-Bench", arXiv:2102.02079); in blocks of
clients: the code of Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020 ("FedDF",
arXiv:2006.07242).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt

from lightning_fl.data.partitions.client_indices import ClientIndices
from lightning_fl.data.partitions.partition import Partition, even_sizes, require_minimum
from lightning_fl.errors import UserError, require


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Split each class over the clients by proportions `π ~ Dir(alpha)`; draw again until all have `min_samples`.

    The literature has several splits of this name:

    - Yurochkin et al. 2019 and Li et al. 2022 draw the clients' shares of each class, as here. The papers stop there
      (`skip_full_clients` False); their code also skips clients that are full (True).
    - Lin et al. 2020 shuffle the samples, split each block of them over ten clients in this way, join the results, and cut
      them into equal parts (`block` 10). So a part may span two clients' classes.
    - Hsu et al. 2019 draw each client's shares of the classes: `ClassPriors`.

    The same alpha gives a different skew in each of them. Without blocks, clients' sizes differ widely. For example, ten
    classes of 5,000 samples over 30 clients with `alpha` 0.1 give sizes of about 20 to 5,500, and without skipping of about 20
    to 7,500.

    Args:
        alpha: concentration, > 0: the smaller, the fewer classes per client. NIID-Bench uses 0.5 and 0.1.
        skip_full_clients: True if a client with an even share of all samples gets nothing from further classes
            (`self_balancing` of Flower's DirichletPartitioner); False for the plain split.
        min_samples: smallest number of samples of a client, at least 1; 10 in NIID-Bench.
        max_tries: number of draws before an error is raised, at least 1.
        block: clients of a block, at least 2. A block's draw is repeated until each client has half an even share; in the end
            all clients get an even share. None: one split over all clients.
    """

    takes_shuffled = True

    alpha: Annotated[float, Gt(0)] = 0.5
    skip_full_clients: bool = True
    min_samples: Annotated[int, Ge(1)] = 10
    max_tries: Annotated[int, Ge(1)] = 1000
    block: Annotated[int, Ge(2)] | None = None

    def __post_init__(self) -> None:
        if self.block is not None:
            require(
                self.skip_full_clients,
                f"block={self.block} skips clients that are full, as FedDF does: leave out skip_full_clients=False.",
            )

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> ClientIndices:
        """Divide `labels` over the clients: see `Partition`."""
        require_minimum(len(labels), num_clients, self.min_samples)
        if self.block is None:
            return self._split(labels, num_clients, self.min_samples, rng)
        clients = [min(self.block, num_clients - first) for first in range(0, num_clients, self.block)]
        sizes = np.diff([len(labels) * sum(clients[:end]) // num_clients for end in range(len(clients) + 1)])
        joined = []
        for members, count in zip(ClientIndices(rng.permutation(len(labels)), sizes), clients, strict=True):
            parts = self._split(labels[members], count, len(members) // (2 * count), rng)
            joined += [members[part] for part in parts]
        return ClientIndices(np.concatenate(joined), even_sizes(len(labels), num_clients))

    def _split(self, labels: np.ndarray, num_clients: int, minimum: int, rng: np.random.Generator) -> ClientIndices:
        """Split each class over the clients, each of which gets at least `minimum` samples."""
        classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        sizes = self._draw_sizes([len(members) for members in classes], num_clients, minimum, rng)
        shuffled = np.concatenate([rng.permutation(members) for members in classes])
        owners = np.concatenate([np.repeat(np.arange(num_clients), row) for row in sizes])
        return ClientIndices(shuffled[np.argsort(owners, kind="stable")], np.sum(sizes, axis=0))

    def _draw_sizes(
        self, class_sizes: list[int], num_clients: int, minimum: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
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
                if held.min() >= minimum:
                    return sizes
                best = max(best, int(held.min()))
        remedy = "lower min_samples" if self.block is None else "leave out block"
        raise UserError(
            f"In {self.max_tries:,} draws {self} never gave each of {num_clients:,} clients {minimum} of the "
            f"{sum(class_sizes):,} samples (the best draw's smallest client had {best}): raise alpha, {remedy} or use fewer "
            "clients."
        )
