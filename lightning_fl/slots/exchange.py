"""The slot of who uploads what, in how many turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from lightning_fl.slots.message import Message, State
from lightning_fl.slots.rule import Rule
from lightning_fl.slots.setting import Setting
from lightning_fl.vectors.submodel import Submodel

T = TypeVar("T")
J = TypeVar("J", bound="Job")


@dataclass
class Result:
    """What a runner yields for one client.

    Attributes:
        client: index of the client.
        message: its upload, before encoding.
        weight: its samples, n_k.
        state: its new state between rounds, committed only if the upload is accepted.
        counters: integer buffers of its module; the server takes the maximum.
        logs: what the module logged, name to (sum over samples, samples).
        num_steps: optimiser steps it made.
        owned: of its state, what it trained and does not send.
        last_loss: mean training loss in the last pass over its samples, where the plan asks for it and there is one.
    """

    client: int
    message: Message
    weight: float
    state: State
    counters: dict[str, Tensor]
    logs: dict[str, Any]
    num_steps: int
    owned: State = field(default_factory=dict)
    last_loss: float | None = None


@dataclass
class Upload:
    """A result whose message has crossed the link.

    Attributes:
        result: of the client.
        message: what the server sees of it: whole vectors, 0 where nothing was sent.
        sent: which coordinates of a vector were sent, bools of its length; a vector that is not named here was sent whole.
    """

    result: Result
    message: Message
    sent: dict[str, Tensor] = field(default_factory=dict)


class Job(Protocol):
    """What the clients of a round are asked to do, as an exchange may change it.

    Attributes:
        rule: what a client does with its gradients.
        received: what came down.
    """

    @property
    def rule(self) -> Rule: ...

    @property
    def received(self) -> Message: ...

    def without_steps(self: J, rule: Rule) -> J:
        """Return the job that makes no optimiser step and reports what `rule` reports."""

    def receiving(self: J, message: Message) -> J:
        """Return the job of clients that have received `message` too."""


class Channel(Protocol):
    """What an exchange may do: send through the link, which encodes, counts and decodes.

    Attributes:
        setting: of the run.
        received: what every client of the round has received.
    """

    setting: Setting
    received: Message

    def send_up(self, client: int, message: Message, submodel: Submodel | None = None) -> Message:
        """Client to server; of the vectors only what the submodel holds, the rest arrives as 0."""

    def send_down(self, client: int, message: Message) -> Message:
        """Server to one client."""

    def send_to_all(self, clients: Sequence[int], message: Message) -> None:
        """Server to each of some clients the same, whatever the codec."""

    def gather(self, mine: dict[int, T]) -> dict[int, T]:
        """What all processes know of their clients, in the order of the cohort; small things only, and all must call it."""

    def mean(self, uploads: Iterable[Upload]) -> Message:
        """Merge uploads as the algorithm's aggregator does, over all processes, which must all call it; {} of none."""

    def random(self, client: int) -> np.random.Generator:
        """The server's random numbers for a client in this round, the same in every process."""


class Exchange(ABC):
    """Who uploads what, in how many turns."""

    sends_whole = False
    """True if every client that is accepted has sent all of its message."""
    provides = frozenset[str]()
    """Names that clients receive from a turn before the training; the server's steps find them among what is merged."""

    def check(self, setting: Setting, cohort_size: int) -> None:  # noqa: B027 -- most exchanges fit any run
        """Before the first round: raise `UserError` where the exchange does not fit the run.

        Args:
            setting: of the run.
            cohort_size: clients of a round, K.
        """

    def recipients(self, cohort: Sequence[int], setting: Setting) -> Sequence[int]:
        """The clients to whom the broadcast is charged."""
        return cohort

    def before_training(
        self,
        job: J,
        clients: Sequence[int],
        train: Callable[[J, Sequence[int]], Iterator[Result]],
        channel: Channel,
    ) -> tuple[J, Sequence[int]]:
        """Take a turn before the local training.

        Args:
            job: what the clients are to do.
            clients: of the round that this process trains.
            train: trains clients by a job.
            channel: to and from the clients.

        Returns:
            The job that the clients then do, and the clients that go on.
        """
        return job, clients

    @abstractmethod
    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        """Turn results into uploads, one by one where the method allows, so that memory stays O(model)."""
