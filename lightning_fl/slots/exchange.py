"""The exchange slot: the turns in which clients and server exchange messages, and the parts that clients upload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor, nn

from lightning_fl.slots.codec import Codec
from lightning_fl.slots.message import Message, State
from lightning_fl.slots.part import Part
from lightning_fl.slots.round_context import RoundContext
from lightning_fl.slots.rule import Rule
from lightning_fl.slots.width import Width
from lightning_fl.vectors.submodel import Submodel

if TYPE_CHECKING:
    from lightning_fl.data import FederatedDataModule

T = TypeVar("T")
J = TypeVar("J", bound="Job")


@dataclass(frozen=True)
class TrainedModel:
    """A client's model at the end of its training.

    Attributes:
        params: parameters (d,).
        buffers: float buffers (d_b,).
        counters: integer buffers by name.
        owned: personal parameters and buffers, which the client never sends, as entries of its state.
    """

    params: Tensor
    buffers: Tensor
    counters: dict[str, Tensor]
    owned: State


@dataclass
class Result:
    """Result of one client's local training, as a runner yields it.

    Attributes:
        client: index of the client.
        message: its upload before encoding: the deltas that `Rule.finish` returned, and `buffers` (d_b,).
        weight: number of its samples, n_k.
        state: its new state between rounds, kept only if the upload is accepted.
        counters: integer buffers of its module by name; the server takes the maximum over clients.
        logs: values that the module logged: name to (sum over samples, number of samples).
        num_steps: optimiser steps that it made.
        owned: part of `state` that holds its personal parameters, which it trained and never sends.
        last_loss: mean training loss of its last pass over its samples; None if there is none or nobody reads it.
        attacking: 1 if the client attacks, 0 if not, and a share for a mean of several uploads; None without an adversary. Only
            reports may depend on it.
        num_uploads: number of uploads whose mean it is.
        trained: its model at the end of its training; None if no hook reads it.
        staleness: updates of the server since the client received the model from which it has trained; 0 in synchronous rounds.
        submodel: numbers of the model that the client has trained; its upload is 0 elsewhere. None for all.
    """

    client: int
    message: Message
    weight: float
    state: State
    counters: dict[str, Tensor]
    logs: dict[Any, Any]
    num_steps: int
    owned: State = field(default_factory=dict)
    last_loss: float | None = None
    attacking: float | None = None
    num_uploads: int = 1
    trained: TrainedModel | None = None
    staleness: int = 0
    submodel: Submodel | None = None


@dataclass
class Upload:
    """Result of a client whose message has crossed the link.

    Attributes:
        result: result of the client.
        message: decoded message that the server sees: vectors of full length, 0 where nothing was sent.
        sent: mask of the coordinates that were sent, bools of the vector's length, by name. A vector without a mask was sent
            whole.
    """

    result: Result
    message: Message
    sent: dict[str, Tensor] = field(default_factory=dict)

    @property
    def staleness(self) -> int:
        """Updates of the server since the client received the model from which it has trained."""
        return self.result.staleness


class Capacities(NamedTuple):
    """Levels of width, and a deadline. Every client trains the widest level that its clock expects to meet the deadline.

    Attributes:
        levels: shares of the units of every hidden layer, the widest first.
        deadline: limit of a client's round, its messages and its training, in simulated seconds.
    """

    levels: tuple[float, ...]
    deadline: float


class Uploader(NamedTuple):
    """Client of an upload, and `attacking` and `num_uploads` of its `Result`."""

    client: int
    attacking: float | None
    num_uploads: int = 1


class Job(Protocol):
    """Work of the clients in a round, as an exchange may change it.

    Attributes:
        rule: rule of the clients' local training.
        received: message that the clients have received: `model` (d,), `buffers` (d_b,) and the entries that the steps share.
    """

    @property
    def rule(self) -> Rule: ...

    @property
    def received(self) -> Message: ...

    def without_steps(self: J, rule: Rule) -> J:
        """Return a job that makes no optimiser step and uploads what `rule` uploads."""

    def receiving(self: J, message: Message) -> J:
        """Return the job with the entries of `message` added to `received`."""


class Channel(Protocol):
    """Access of an exchange to the link, which encodes, counts and decodes all messages.

    Attributes:
        context: facts about the run.
        received: decoded broadcast, which every client of the round has received.
    """

    context: RoundContext
    received: Message

    def send_up(
        self, client: int, message: Message, submodel: Submodel | None = None, codec: Codec | None = None
    ) -> Message:
        """Send a message from a client to the server, through the uplink codec.

        Args:
            client: index of the client.
            message: vectors (d,) or (d_b,).
            submodel: coordinates to send; None for all.
            codec: codec to send it through instead, if the exchange `compresses`.

        Returns:
            The decoded message, with vectors of full length that are 0 where nothing was sent.
        """

    def memory(self, client: int, message: Message) -> State:
        """Return the codec memory of a client, on the device of its message and not to be changed; {} at first."""

    def send_down(self, client: int, message: Message) -> Message:
        """Send a message to one client, through the downlink codec, and return the message that the client receives."""

    def send_to_all(self, clients: Sequence[int], message: Message) -> None:
        """Send the same message to each of these clients, uncompressed."""

    def gather(self, mine: dict[int, T], /) -> dict[int, T]:
        """Merge small values by client over all processes, in the order of the cohort; every process must call it."""

    def mean(self, uploads: Iterable[Upload], /) -> Message:
        """Merge uploads of all processes with the algorithm's aggregator; every process must call it. {} if there are none."""

    def random(self, client: int, /) -> np.random.Generator:
        """Return the server's random stream for a client in this round, the same in every process."""


class Exchange(Part, ABC):
    """Decides in how many turns clients and server exchange messages, and which parts clients upload.

    Every upload must contain the entries that the exchange `needs`, which may include `model`. It `provides` the entries that
    `before_training` adds to the clients' `received`; the server's steps find them in `ServerTurn.merged`. An exchange that sends
    parts of a model also `provides` `SENT`, and the aggregator must divide by these masks.
    """

    _promises = frozenset({"one_message", "sends_whole", "sums_suffice"})
    _kept_by = frozenset({"before_training", "around_training", "collect"})

    sums_suffice = False
    """True if the server may see sums over a round's clients in place of their messages."""
    one_message = False
    """True if a client sends only the message of its rule, once, whatever other clients send.

    Private runs and asynchronous rounds rely on this and on `sends_whole`.
    """
    sends_whole = False
    """True if every accepted client has sent its whole message."""
    compresses = False
    """True if it compresses the uploads itself, with the help of their mean, so that the uplink codec must be lossless."""
    keeps_changes = False
    """True if every change stays with its client, so that the server's model never learns."""
    uses_link = True
    """False if nothing crosses the link: neither its own messages, nor messages about prunings, nor queries of callbacks."""
    cuts = False
    """True if clients receive, train and send smaller networks, with the widths that `width` returns."""
    differs_in_steps = False
    """True if every client draws a width in every step, so that the clients of a stack have no common width."""
    prefers_large = False
    """True if of each number it takes the uploads that changed most, `num_senders` of them."""
    needs_shapes = False
    """True if it reads the shapes of tensors. A pruning mask destroys them: under it each tensor is one row."""

    @property
    def sender(self) -> Exchange:
        """The exchange that collects the uploads: itself, or the exchange inside if it only adds a turn."""
        return self

    def check(self, context: RoundContext, cohort_size: int) -> None:
        """Raise `UserError` if the exchange does not fit the run; called before the first round.

        Args:
            context: facts about the run.
            cohort_size: clients of a round, K.
        """

    def check_module(self, module: nn.Module, data: FederatedDataModule, method: str) -> None:
        """Raise `UserError` if it does not fit the network or the samples; called before the first round, if it `cuts`.

        Args:
            module: the whole network.
            data: samples of the clients.
            method: name of the method, for the sentence.
        """

    def around_training(
        self, train: Callable[[J, Sequence[int]], Iterator[Result]], module: nn.Module, data: FederatedDataModule
    ) -> Callable[[J, Sequence[int]], Iterator[Result]]:
        """Return how clients train: `train`, or a function around it; called once a run.

        Args:
            train: trains some clients on a job and yields their results.
            module: the network, which is cut while clients of a smaller one train.
            data: samples of the clients.
        """
        return train

    def num_senders(self, cohort_size: int) -> int:
        """Return the least number of clients that send the same coordinate in a round of `cohort_size` clients."""
        return cohort_size

    def width(self, client: int, context: RoundContext) -> Width | None:
        """Return the width of the network that a client trains in the present round, if the exchange `cuts`; None for the whole.

        Args:
            client: index of the client.
            context: facts about the run.
        """
        return None

    @property
    def capacities(self) -> Capacities | None:
        """Levels among which the clients' clock decides (`RoundContext.level`); None if widths do not depend on time."""
        return None

    @property
    def validated_widths(self) -> tuple[Width, ...]:
        """Widths of the smaller networks that are validated besides the whole one."""
        return ()

    def recipients(self, cohort: Sequence[int], context: RoundContext) -> Sequence[int]:
        """Return the clients to which the broadcast is charged; called at the start of each round.

        Args:
            cohort: indices of the selected clients (K,).
            context: facts about the run.
        """
        return cohort

    def before_training(
        self,
        job: J,
        clients: Sequence[int],
        train: Callable[[J, Sequence[int]], Iterator[Result]],
        channel: Channel,
    ) -> tuple[J, Sequence[int]]:
        """Exchange messages before the local training; called once a round, after the broadcast.

        Args:
            job: work of the clients in this round.
            clients: indices of the clients that this process trains.
            train: trains some clients on a job and yields their results.
            channel: connection to the clients.

        Returns:
            The job of the local training, and the clients that take part in it.
        """
        return job, clients

    @abstractmethod
    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        """Send the clients' messages to the server, and yield the uploads.

        Yield each upload before reading the next result if the method allows it, so that memory stays O(d).

        Args:
            results: results of the clients that this process trains; clients train while it is read.
            channel: connection to the clients.
        """
