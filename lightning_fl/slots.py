"""The five slots of an algorithm: rule, codec, exchange, aggregator, step.

A part is a frozen dataclass of hyper-parameters. It holds no tensor, module or loader: state is handed to it and lives in
`Run` alone. Every method of the base classes is the identity, or as near to it as the slot allows, so that a method states
only what is special about it.

Tensors are flat: `d` trainable parameters are one vector (d,), see `lightning_fl.tree`. A message is a dict of such vectors
under names `kind` or `kind/name`, whose kind (`KINDS`) is the line of the ledger that books it: `model`, `moments/control`.
In an upload every vector is a delta: client minus server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from lightning_fl.tree import Layout

KINDS = ("model", "moments", "mask", "scalars", "buffers", "data")
Message = dict[str, Tensor]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """What every part may know of the run it works in.

    Attributes:
        layout: which stretch of a vector (d,) is which parameter.
        buffer_layout: which stretch of a vector (d_b,) is which float buffer.
        num_clients: clients of the federation, N.
        round: index of the round under way, from 0.
        num_rounds: rounds of the run.
    """

    layout: Layout
    buffer_layout: Layout
    num_clients: int
    round: int = 0
    num_rounds: int = 1

    def num_rounds_of(self, share: int | float) -> int:
        """A number of rounds that was given as a count or as a fraction of the run, which is at least one."""
        return share if isinstance(share, int) else max(1, round(share * self.num_rounds))


def kind_of(name: str) -> str:
    """The ledger's kind of a message entry.

    >>> kind_of("moments/control")
    'moments'
    """
    kind = name.partition("/")[0]
    if kind not in KINDS:
        raise ValueError(f"a message entry is named after its kind ({', '.join(KINDS)}); got {name!r}")
    return kind


def compressible(name: str) -> bool:
    """Whether a lossy codec may touch a message entry: vectors (d,) of the model and its moments, nothing else.

    >>> [compressible(name) for name in ("model", "moments/first", "buffers", "scalars/steps")]
    [True, True, False, False]
    """
    return kind_of(name) in ("model", "moments")


@dataclass
class LocalTraining:
    """What a rule sees of a client's local training; stacked runs put a leading client axis before every d.

    Attributes:
        setting: of the run.
        received: what came down, `model` (d,) and whatever the steps share.
        params: the client's parameters (d,), trained in place.
        gradient: gradient (d,) of the minibatch loss, corrected in place.
        learning_rate: the optimiser's learning rate now, a number or (d,) where parameter groups differ.
        optimizer_step: one step of the module's own optimiser on `params` with `gradient`.
        state: what this client keeps between rounds; `finish` replaces it.
        memory: what lives for this round only.
        num_steps: optimiser steps done so far (tau_k at the end).
        sum_learning_rate: sum of the learning rates of these steps.
    """

    setting: Setting
    received: Message
    params: Tensor
    gradient: Tensor
    optimizer_step: Callable[[], Any]
    state: State = field(default_factory=dict)
    memory: State = field(default_factory=dict)
    learning_rate: float | Tensor = 0.0
    num_steps: int = 0
    sum_learning_rate: float | Tensor = 0.0


class Rule:
    """What a client does with its gradients and what it reports. The base rule follows the module's own optimiser.

    All operations are elementwise, so that the same code runs on one client (d,) and on a stack of clients (K, d).
    """

    reads_gradient: ClassVar[bool] = True
    """Whether `correct` or `step` look at the flat gradient; if not, the runner need not gather it."""
    own_step: ClassVar[bool] = False
    """Whether `step` replaces the module's optimiser, which must then be plain SGD."""
    receives: ClassVar[frozenset[str]] = frozenset()
    """Names the rule needs from the server besides `model` and `buffers`."""
    sends: ClassVar[frozenset[str]] = frozenset()
    """Names it uploads besides `model` and `buffers`."""

    def init(self, params: Tensor) -> State:
        """State of a client that takes part for the first time; `params` is the model it received."""
        return {}

    def start(self, local: LocalTraining) -> None:
        """Before the first step: fill `local.memory`."""

    def correct(self, local: LocalTraining) -> None:
        """Change `local.gradient` in place."""

    def step(self, local: LocalTraining) -> None:
        """Change `local.params` in place."""
        local.optimizer_step()

    def finish(self, local: LocalTraining) -> Message:
        """The upload after the last step; also replaces `local.state` where the client keeps something."""
        return {"model": local.params - local.received["model"]}


@dataclass(frozen=True)
class Packed:
    """One encoded entry of a message.

    Attributes:
        content: the tensor that crosses, packed as its codec packs it.
        bits: what crossing costs, as the ledger books it.
    """

    content: Tensor
    bits: int

    @classmethod
    def whole(cls, content: Tensor) -> Packed:
        """Every number as it is: the width of its dtype for each."""
        return cls(content, content.numel() * content.element_size() * 8)


Payload = dict[str, Packed]


class Codec(ABC):
    """How a message becomes bits and back. `decode(encode(message))` is what the other side sees."""

    def for_all(self) -> bool:
        """Whether a broadcast must reach every client of the federation, because the next one builds on it."""
        return False

    def deltas_only(self) -> bool:
        """Whether it leaves out what is small, which a delta survives and a whole model does not."""
        return False

    def needs(self) -> frozenset[str]:
        """Names without which it cannot encode a message."""
        return frozenset()

    def loses(self, name: str) -> bool:
        """Whether an entry of that name may come out different from what went in."""
        return False

    @abstractmethod
    def encode(self, message: Message, memory: State, setting: Setting) -> tuple[Payload, State]:
        """Encode; `memory` is the sender's from the last time ({} at first), the second result is its new one."""

    @abstractmethod
    def decode(self, payload: Payload, setting: Setting) -> Message:
        """The message that the payload holds."""

    def follow(self, payload: Payload, memory: State, setting: Setting) -> Message:
        """The message of a broadcast for clients that have followed the earlier ones; `memory` is what `encode` was given."""
        return self.decode(payload, setting)


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
    """

    client: int
    message: Message
    weight: float
    state: State
    counters: dict[str, Tensor]
    logs: dict[str, Any]
    num_steps: int


@dataclass
class Upload:
    """A result whose message has crossed the link."""

    result: Result
    message: Message


class Channel(Protocol):
    """What an exchange may do: send through the link, which encodes, counts and decodes."""

    setting: Setting

    def up(self, client: int, message: Message) -> Message:
        """Client to server."""

    def down(self, client: int, message: Message) -> Message:
        """Server to one client."""


class Exchange(ABC):
    """Who uploads what, in how many turns."""

    @abstractmethod
    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        """Turn results into uploads, one by one where the method allows, so that memory stays O(model)."""


class Aggregator(ABC):
    """How uploads merge."""

    reduction: ClassVar[Literal["sum", "members"]]
    """`sum`: the accumulator is a dict of tensors to be summed over ranks, whatever the number of clients; `members`: it keeps
    every upload."""

    @abstractmethod
    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Take one accepted upload into the accumulator ({} at first), in place."""

    @abstractmethod
    def finish(self, accumulator: dict[str, Any]) -> Message:
        """The merged message, in any floating dtype."""


@dataclass
class ServerTurn:
    """What the server's steps see and change in one round.

    Attributes:
        setting: of the run.
        round: index of the round, from 0.
        params: the model at the start of the round (d,), not to be changed.
        buffers: its float buffers (d_b,), not to be changed.
        merged: what the aggregator made of the uploads.
        proposal: the next model as the steps so far propose it (d,); a step replaces it.
        proposed_buffers: likewise for the buffers.
        metrics: what the steps report, logged with the round.
    """

    setting: Setting
    round: int
    params: Tensor
    buffers: Tensor
    merged: Message
    proposal: Tensor
    proposed_buffers: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


class Step(ABC):
    """What the server does next; an algorithm has a chain of steps, each working on the proposal of the one before."""

    shares: ClassVar[frozenset[str]] = frozenset()
    """Names that `share` sends down with the model."""
    consumes: ClassVar[frozenset[str]] = frozenset()
    """Names it needs in the merged message besides `model` and `buffers`."""

    def init(self, params: Tensor) -> State:
        """State before the first round."""
        return {}

    def share(self, state: State) -> Message:
        """What goes down with the model."""
        return {}

    @abstractmethod
    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Replace `turn.proposal` and return the step's new state."""
