"""`ByGroup`: the users of the samples are the clients, as in LEAF (Caldas et al., LEAF: A Benchmark for Federated Settings,
2018, arXiv:1812.01097) and TensorFlow Federated; Flower calls it the natural-id partitioner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from lightning_fl.data.partitions.client_indices import ClientIndices
from lightning_fl.data.partitions.partition import Partition, Pool, even_sizes
from lightning_fl.errors import require


@dataclass(frozen=True)
class ByGroup(Partition):
    """Make the groups of the samples, such as users or writers, the clients; no group is split.

    Groups come from `groups` of the data. With `num_clients` null each group is a client.

    Args:
        min_samples: smallest number of training samples of a group, at least 1; smaller groups are left out with their samples.
        assign: one: each client is one group, and `num_clients` random groups take part; merge: deal all groups out at random
            to `num_clients` clients, whose numbers of groups differ by at most one.
    """

    min_samples: Annotated[int, Ge(1)] = 1
    assign: Literal["one", "merge"] = "one"

    needs_labels = False
    needs_groups = True
    takes_shuffled = True

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> ClientIndices:
        """Refuse samples without groups: see `divide`."""
        return self.divide(Pool(labels), num_clients, rng)

    def divide(self, pool: Pool, num_clients: int | None, rng: np.random.Generator) -> ClientIndices:
        """Divide the groups over the clients: see `Partition.divide`. Clients of one group each are in the order of its name."""
        groups = pool.groups
        require(groups is not None, f"{self} needs the group of each sample: give the data groups=….")
        assert groups is not None
        large_groups = np.flatnonzero(np.bincount(groups.codes, minlength=len(groups)) >= self.min_samples)
        require(
            len(large_groups) > 0,
            f"{self} leaves out all {len(groups):,} groups, because none has {self.min_samples:,} samples: lower min_samples.",
        )
        require(
            num_clients is not None or self.assign == "one",
            f"{self} deals groups out to num_clients clients: give their number instead of null.",
        )
        count = len(large_groups) if num_clients is None else num_clients
        smaller = "" if self.min_samples == 1 else f" with min_samples={self.min_samples}"
        require(
            count <= len(large_groups),
            f"num_clients={count:,} is more than the {len(large_groups):,} groups{smaller}: use at most {len(large_groups):,}.",
        )
        client_of_group = np.full(len(groups), -1)
        if self.assign == "merge":
            client_of_group[rng.permutation(large_groups)] = np.repeat(
                np.arange(count), even_sizes(len(large_groups), count)
            )
        else:
            chosen = (
                large_groups if count == len(large_groups) else np.sort(rng.choice(large_groups, count, replace=False))
            )
            client_of_group[chosen] = np.arange(count)
        return ClientIndices.by_owner(client_of_group[groups.codes], count)
