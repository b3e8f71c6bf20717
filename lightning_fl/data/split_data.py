"""`SplitData`: the attributes of a `FederatedDataModule` that its checks, its server's draw and its descriptions read."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from lightning_fl.data.partitions.client_indices import ClientIndices
from lightning_fl.data.partitions.partition import Partition
from lightning_fl.data.samples.tensor_samples import Samples
from lightning_fl.data.shift import Shift
from lightning_fl.data.split import GroupsOfClients


class SplitData(Protocol):
    """Settings of a `FederatedDataModule`, and what its `setup` finds."""

    num_clients: int
    batch_size: int
    drop_last: bool
    partition: Partition
    client_fraction: float
    server_fraction: float
    server_classes: int | None
    server_degree: float | None
    groups: Any
    server_groups: float | None
    shift: Shift | None
    num_left_out: int
    train: Samples
    test: Samples | None
    client_indices: ClientIndices
    client_val_indices: ClientIndices
    groups_of_clients: GroupsOfClients | None
    server_indices: np.ndarray
    server_histogram: np.ndarray | None
    class_remedy: str

    @property
    def num_classes(self) -> int | None:
        """Number of classes."""

    @property
    def in_channels(self) -> int | None:
        """Number of channels of an image."""
