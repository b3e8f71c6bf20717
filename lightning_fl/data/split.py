"""Parts of a federation's split that no partition decides: the server's groups, validation parts, test parts of clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_fl.data.partitions.client_indices import ClientIndices
from lightning_fl.data.partitions.partition import Partition
from lightning_fl.data.samples.tensor_samples import Samples
from lightning_fl.data.users import Groups, groups_of
from lightning_fl.errors import require


def needed_groups(samples: Samples, group_of: Any, partition: Partition, server_groups: float) -> Groups | None:
    """Return the group of each training sample if the settings need it, else None, and nothing is read.

    Raises:
        UserError: the settings need groups, but there are none.
    """
    if not (partition.needs_groups or server_groups):
        return None
    groups = groups_of(samples, group_of)
    asking = f"{partition}" if partition.needs_groups else f"server_groups={server_groups}"
    require(
        groups is not None,
        f"{asking} needs the group of each sample, but the data have none in groups, users or client_ids: give groups, one name "
        "per sample.",
    )
    return groups


def server_pool(
    order: np.ndarray, groups: Groups, share: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Split samples into those of the clients and those of random groups for the server.

    Args:
        order: indices of all samples, in random order.
        groups: group of each sample.
        share: share of the groups that go to the server.
        rng: the only source of randomness.

    Returns:
        The clients' and the server's indices, in the order of `order`.
    """
    present = np.unique(groups.codes)
    count = round(share * len(present))
    require(
        0 < count < len(present),
        f"server_groups={share} of {len(present):,} groups are {count:,}, but server and clients need at least one each.",
    )
    is_pooled = np.isin(groups.codes[order], rng.choice(present, count, replace=False))
    return order[~is_pooled], order[is_pooled]


def hold_out(parts: ClientIndices, fraction: float, rng: np.random.Generator) -> tuple[ClientIndices, ClientIndices]:
    """Hold out a random share of each client's samples for validation; every client keeps at least one.

    Args:
        parts: indices of each client's samples.
        fraction: share to hold out, in (0, 1).
        rng: the only source of randomness.

    Returns:
        The indices to train on, and those held out.
    """
    sizes = parts.sizes
    counts = np.minimum(np.round(fraction * sizes).astype(np.int64), np.maximum(sizes - 1, 0))
    require(
        bool(counts.sum() > 0),
        f"val_fraction={fraction} holds out no sample of any client, because the largest client has {sizes.max()}: raise it "
        "or use fewer clients.",
    )
    mixed = ClientIndices(parts.joined.copy(), sizes)
    for part in mixed:
        rng.shuffle(part)
    position = np.arange(len(mixed.joined)) - np.repeat(mixed.starts[:-1], sizes)
    held_out = position < np.repeat(counts, sizes)
    return ClientIndices(mixed.joined[~held_out], sizes - counts), ClientIndices(mixed.joined[held_out], counts)


@dataclass(frozen=True)
class GroupsOfClients:
    """The groups behind the clients of a partition that keeps groups whole.

    Attributes:
        group_names: names of all groups, (G,) strings, different from each other.
        client_of_group: client of each group, (G,) int64; -1 for none.
        num_clients: N.
        left_out: number of groups in the clients' pool that no client has, and of their samples.
    """

    group_names: np.ndarray
    client_of_group: np.ndarray
    num_clients: int
    left_out: tuple[int, int]

    @classmethod
    def of(cls, groups: Groups, pool: np.ndarray, parts: ClientIndices) -> GroupsOfClients:
        """Find the client of each group.

        Args:
            groups: group of each training sample.
            pool: indices of the training samples that were divided.
            parts: indices of each client's samples.
        """
        client_of_group = np.full(len(groups), -1, dtype=np.int64)
        client_of_group[groups.codes[parts.joined]] = np.repeat(np.arange(len(parts)), parts.sizes)
        present = np.unique(groups.codes[pool])
        num_absent = int((client_of_group[present] < 0).sum())
        return cls(groups.names, client_of_group, len(parts), (num_absent, len(pool) - len(parts.joined)))

    @property
    def names(self) -> np.ndarray | None:
        """Name of each client, (N,) strings; None if clients have several groups."""
        held = self.client_of_group >= 0
        if held.sum() != self.num_clients:
            return None
        return self.group_names[held][np.argsort(self.client_of_group[held])]

    def test_parts(self, groups: Groups) -> ClientIndices:
        """Return for each client the indices of the test samples of its groups.

        Args:
            groups: group of each test sample.
        """
        test_codes = groups.codes_of(self.group_names)  # -1 for a training group without test samples
        clients = np.full(len(groups), -1, dtype=np.int64)
        clients[test_codes[test_codes >= 0]] = self.client_of_group[test_codes >= 0]
        return ClientIndices.by_owner(clients[groups.codes], self.num_clients)

    def describe(self) -> str:
        """Describe how many groups the clients have."""
        held = int((self.client_of_group >= 0).sum())
        count, samples = self.left_out
        others = "other group" if count == 1 else "other groups"
        return f"{held:,} groups; {count:,} {others} with {samples:,} samples left out" if count else f"{held:,} groups"
