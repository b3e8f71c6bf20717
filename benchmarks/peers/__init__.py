"""Other simulators on the same work: `round_time.py --peer NAME`.

A peer is a module of this package with a class `Federation`, imported only when it is selected. Each runs the peer's own FedAvg
through its public interface: plain SGD on cross-entropy, all clients in every round, an average weighted by samples, no
evaluation. All except fluke, which has its own loader, get their batches from the bare loop: a `torch.utils.data.DataLoader`
would be slower, and is not part of the peer.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_fl.errors import UserError, nearest

PACKAGES = {"fedlab": "fedlab", "flower": "flwr[simulation]", "fluke": "fluke-fl", "pfl": "pfl[pytorch]"}
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Work:
    """Work of a round.

    Attributes:
        net: initial model; users train a copy of it.
        clients: inputs (samples, channels, height, width) and labels (samples,) of each client.
        batch_size: size of a batch; the last batch of an epoch may be smaller.
        epochs: number of epochs of each client in a round.
        learning_rate: learning rate of plain SGD.
        shuffle: True if the samples are shuffled in each epoch.
    """

    net: nn.Module
    clients: list[tuple[Tensor, Tensor]]
    batch_size: int
    epochs: int
    learning_rate: float
    shuffle: bool = True

    def batches(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of one epoch of a client."""
        order = torch.randperm(len(y), device=y.device) if self.shuffle else torch.arange(len(y), device=y.device)
        for chosen in order.split(self.batch_size):
            yield x[chosen], y[chosen]


class Peer(Protocol):
    """Simulation that runs one round at a time."""

    def __init__(self, work: Work) -> None: ...

    def round(self) -> None:
        """Run one round over all clients."""

    def global_weights(self) -> list[Tensor]:
        """Return the global model, in the order of the network's parameters."""

    def close(self) -> None:
        """Stop everything that runs in the background."""


def load(name: str) -> type[Peer]:
    """Import the peer of this name.

    Raises:
        UserError: there is no such peer, or its package is not installed.
    """
    if name not in PACKAGES:
        raise UserError(f"--peer {name!r} is unknown; {nearest(name, PACKAGES)}.")
    try:
        return importlib.import_module(f"peers.{name}").Federation
    except ImportError as error:
        raise UserError(f"--peer {name} cannot be imported ({error}); pip install '{PACKAGES[name]}' first.") from error


def version(name: str) -> str:
    """Return the name and version of the peer's package."""
    package = PACKAGES[name].partition("[")[0]
    return f"{package} {metadata.version(package)}"


def require_same(name: str, peer: Peer, work: Work, expected: list[Tensor]) -> None:
    """Run one round of a peer and compare its model with the expected one.

    Raises:
        RuntimeError: the distance between them is more than a thousandth of the length of the round's update.
    """
    peer.round()
    before, ours, theirs = (
        torch.cat([weight.detach().flatten() for weight in weights])
        for weights in (work.net.parameters(), expected, peer.global_weights())
    )
    difference = float((theirs - ours).norm() / (ours - before).norm())
    if not difference <= TOLERANCE:
        raise RuntimeError(
            f"{name} does other work than the bare loop: the relative difference of its update is {difference:.1e}."
        )
