"""Shards of sorted samples.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017 (arXiv:1602.05629);
also in Liu et al., Efficient Federated Learning Using Dynamic Update and Adaptive Pruning with Momentum on Shared Server Data,
ACM TIST 2024 (doi:10.1145/3690648).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge

from lightning_fl.data.partitions.client_indices import ClientIndices
from lightning_fl.data.partitions.partition import Partition, even_sizes, require_enough
from lightning_fl.errors import require


@dataclass(frozen=True)
class Shards(Partition):
    """Sort by label (stably), cut into `num_clients · shards_per_client` equal shards, deal out without replacement.

    A shard may span several classes and a client may get two shards of one class, so a client holds about
    `shards_per_client` classes, not exactly. If the samples do not divide evenly, shard sizes differ by at most one.

    Args:
        shards_per_client: shards each client gets, at least 1; 2 for CIFAR-10 and 20 for CIFAR-100 in FedDUMAP (Liu et
            al. 2024).
    """

    takes_shuffled = True

    shards_per_client: Annotated[int, Ge(1)] = 2

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> ClientIndices:
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
        shards = ClientIndices(by_label, sizes)
        dealt = rng.permutation(num_shards)
        order = np.concatenate([shards[shard] for shard in dealt])
        return ClientIndices(order, sizes[dealt].reshape(num_clients, -1).sum(1))
