"""Training data that clients read through loaders of their own, so that no samples are divided.

An iterable data set has no samples that could be divided, but a function may say what each client reads, and a single client can
read a loader as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from lightning_fl.checks import check_whole
from lightning_fl.data.partitions.sizes import IID
from lightning_fl.data.samples.tensor_samples import Samples, Selection
from lightning_fl.errors import UserError, require

OF_SAMPLES = (
    *("class_of", "eval_collate_fn", "eval_transform", "groups", "server_classes", "server_degree", "server_fraction"),
    *("server_groups", "shift", "val_fraction"),
)
"""Settings of `Federated` that need samples."""


class OwnLoaders(Samples):
    """Stand-in for the samples of clients that read loaders of their own, which only runner `lightning` does.

    Args:
        source: returns the loader of a client, 0..num_clients-1, or whatever else Lightning takes for training loaders.
    """

    labels = None
    resident = False

    def __init__(self, source: Callable[[int], Any]) -> None:
        self.loader_of = source

    def __len__(self) -> int:
        """Return 0: no sample can be read by its index."""
        return 0

    def place(self, device: torch.device) -> None:
        """Do nothing: the training moves each batch."""

    def select(self, indices: np.ndarray) -> Selection:
        """Refuse; the same holds for `stored` and `batches`.

        Raises:
            UserError: always.
        """
        refuse_reading()

    def stored(self, indices: np.ndarray) -> list[Tensor]:
        refuse_reading()

    def batches(self, batch_size: int, indices: np.ndarray | None = None) -> Iterator[Any]:
        refuse_reading()


class OwnLoader(Selection):
    """Samples of one client that its own loader reads.

    Args:
        client: index of the client.
        num_samples: its number of samples, as far as it is known, else 1.
    """

    def __init__(self, client: int, num_samples: int) -> None:
        self.client, self._num_samples = client, num_samples

    def __len__(self) -> int:
        """Number of samples."""
        return self._num_samples

    def batches(
        self, batch_size: int, generator: torch.Generator | None = None, share: Callable[[int], slice] | None = None
    ) -> Iterator[Any]:
        """Refuse to batch samples, because the loader does.

        Raises:
            UserError: always.
        """
        refuse_reading()


def refuse_reading() -> NoReturn:
    """Refuse to read samples of clients with loaders of their own.

    Raises:
        UserError: always.
    """
    raise UserError(
        "clients read loaders of their own here, so that nothing else can read or change their samples: use a method, callbacks "
        "and an adversary that do not, or a map-style Dataset, which Federated divides."
    )


def settings_of_samples(data: Any) -> list[str]:
    """Return the names of the settings of a `Federated` that are given, and need samples to divide or to batch."""
    given = [name for name in OF_SAMPLES if _is_given(getattr(data, name))]
    given += [name for name in ("batch_size", "drop_last") if getattr(data, f"_{name}_given")]
    given += ["partition"] if data.partition != IID() else []
    return given + (["client_fraction"] if data.client_fraction != 1 else [])


def _is_given(value: Any) -> bool:
    return value is not None and not (isinstance(value, (int, float)) and value == 0)


def check_client_loaders(data: Any) -> None:
    """Raise `UserError` if `client_loaders` of a `Federated` is no function, or does not fit its other settings."""
    if data.client_loaders is None:
        require(
            data.num_samples is None,
            "num_samples weighs clients with client_loaders, which are not given: leave it out.",
        )
        return
    require(
        callable(data.client_loaders),
        f"client_loaders must be a function from a client's index to its loader, got {type(data.client_loaders).__name__}.",
    )
    given = settings_of_samples(data)
    require(
        not given,
        "client_loaders says what each client reads, so that there are no samples to divide or batch: leave out "
        f"{' and '.join(given)}.",
    )
    if data.num_samples is None:
        return
    require(
        len(data.num_samples) == data.num_clients,
        f"num_samples has {len(data.num_samples):,} entries for {data.num_clients:,} clients: give one of each.",
    )
    for count in data.num_samples:
        check_whole("num_samples of each client", count, 1)
