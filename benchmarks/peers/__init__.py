"""Other simulators on the same work: `round_time.py --peer NAME`.

A peer is a module of this package with a class `Federation`, imported only when it is asked for. Each runs the peer's own FedAvg
through its public interface: plain SGD on cross-entropy, all clients in every round, an average weighted by samples, no
evaluation. All but fluke, which has a loader of its own, get their batches from the bare loop: a `torch.utils.data.DataLoader`
would take longer, and is no part of the peer.
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
    """What a round has to do.

    Attributes:
        net: the initial model; whoever trains it takes a copy.
        clients: inputs (samples, channels, height, width) and labels (samples,) of each client.
        batch_size: of which the last batch of an epoch may have fewer.
        epochs: of each client in a round.
        learning_rate: of plain SGD.
        shuffle: whether each epoch has an order of its own.
    """

    net: nn.Module
    clients: list[tuple[Tensor, Tensor]]
    batch_size: int
    epochs: int
    learning_rate: float
    shuffle: bool = True

    def batches(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """An epoch of a client."""
        order = torch.randperm(len(y), device=y.device) if self.shuffle else torch.arange(len(y), device=y.device)
        for chosen in order.split(self.batch_size):
            yield x[chosen], y[chosen]


class Peer(Protocol):
    """A simulation that is run one round at a time."""

    def __init__(self, work: Work) -> None: ...

    def round(self) -> None:
        """One round over all clients."""

    def global_weights(self) -> list[Tensor]:
        """The global model, in the order of the network's parameters."""

    def close(self) -> None:
        """End what runs in the background."""


def load(name: str) -> type[Peer]:
    """The peer of this name.

    Raises:
        UserError: there is none, or its package is not installed.
    """
    if name not in PACKAGES:
        raise UserError(f"--peer {name!r} is unknown; {nearest(name, PACKAGES)}.")
    try:
        return importlib.import_module(f"peers.{name}").Federation
    except ImportError as error:
        raise UserError(f"--peer {name} cannot be imported ({error}); pip install '{PACKAGES[name]}' first.") from error


def version(name: str) -> str:
    """The peer's package and its version."""
    package = PACKAGES[name].partition("[")[0]
    return f"{package} {metadata.version(package)}"


def require_same(name: str, peer: Peer, work: Work, expected: list[Tensor]) -> None:
    """Run one round of a peer and compare its model with the one expected.

    Raises:
        RuntimeError: their distance is more than a thousandth of how far the round moved the model.
    """
    peer.round()
    before, ours, theirs = (
        torch.cat([weight.detach().flatten() for weight in weights])
        for weights in (work.net.parameters(), expected, peer.global_weights())
    )
    difference = float((theirs - ours).norm() / (ours - before).norm())
    if not difference <= TOLERANCE:
        raise RuntimeError(
            f"{name} does other work than the bare loop: its update is {difference:.1e} of the length away."
        )
