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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_fl.groups import Group
from lightning_fl.tree import Layout

if TYPE_CHECKING:
    from lightning_fl.data import FederatedDataModule
    from lightning_fl.excerpt import Excerpt

KINDS = ("model", "moments", "mask", "scalars", "buffers", "data")
Message = dict[str, Tensor]
State = dict[str, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """What every part may know of the run it works in.

    Attributes:
        layout: which stretch of a vector (d,) is which parameter.
        buffer_layout: which stretch of a vector (d_b,) is which float buffer.
        num_clients: clients of the federation, N.
        groups: the layers of the network.
        round: index of the round under way, from 0.
        num_rounds: rounds of the run.
        momentum: ρ of the module's SGD, v ← ρv + g, and 0 for other optimisers; None for an SGD that has no one such ρ.
    """

    layout: Layout
    buffer_layout: Layout
    num_clients: int
    groups: tuple[Group, ...] = ()
    round: int = 0
    num_rounds: int = 1
    momentum: float | None = 0.0

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


def is_finite(*messages: Message) -> bool:
    """Whether no number of some messages is NaN or infinite; a finite sum says so at once."""
    vectors = {id(x): x for message in messages for x in message.values()}.values()
    return all(isfinite(float(x.sum())) or bool(torch.isfinite(x).all()) for x in vectors)


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
        state: what this client keeps between rounds, a copy; `finish` changes or replaces it. In a stack every entry has the
            clients' axis in front, so a number that meets vectors should be a vector (1,).
        memory: what lives for this round only. In a stack entries with one axis are shared by the clients.
        num_steps: optimiser steps done so far (tau_k at the end).
        sum_learning_rate: sum of the learning rates of these steps.
        full_gradient: gradient (d,) of the loss on all samples at the received model, for rules that read it.
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
    full_gradient: Tensor = field(default_factory=lambda: torch.zeros(0))


class Rule:
    """What a client does with its gradients and what it reports. The base rule follows the module's own optimiser.

    All operations are elementwise, so that the same code runs on one client (d,) and on a stack of clients (K, d).
    """

    reads_gradient = True
    """Whether `correct` or `step` look at the flat gradient; if not, the runner need not gather it."""
    reads_full_gradient = False
    """Whether it needs the gradient on all samples at the received model, which costs a pass over them."""
    own_step = False
    """Whether `step` replaces the module's optimiser, which must then be plain SGD."""
    receives = frozenset[str]()
    """Names the rule needs from the server besides `model` and `buffers`."""
    sends = frozenset[str]()
    """Names it uploads besides `model` and `buffers`."""

    def check(self, setting: Setting) -> None:
        """Before the first round: raise `UserError` where the rule does not fit the run."""

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

    def takes(self, name: str) -> bool:
        """Whether an entry of that name goes through it; scalars and masks, whose every bit counts, cross whole otherwise."""
        return kind_of(name) not in ("scalars", "mask")

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
    """A result whose message has crossed the link.

    Attributes:
        result: of the client.
        message: what the server sees of it: whole vectors, 0 where nothing was sent.
        sent: which coordinates of a vector were sent, bools of its length; a vector that is not named here was sent whole.
    """

    result: Result
    message: Message
    sent: dict[str, Tensor] = field(default_factory=dict)


class Channel(Protocol):
    """What an exchange may do: send through the link, which encodes, counts and decodes.

    Attributes:
        setting: of the run.
        received: what every client of the round has received.
    """

    setting: Setting
    received: Message

    def up(self, client: int, message: Message, excerpt: Excerpt | None = None) -> Message:
        """Client to server; of the vectors only what the excerpt holds, the rest arrives as 0."""

    def down(self, client: int, message: Message) -> Message:
        """Server to one client."""

    def gather(self, mine: dict[int, T]) -> dict[int, T]:
        """What all processes know of their clients, in the order of the cohort; small things only, and all must call it."""

    def random(self, client: int) -> np.random.Generator:
        """The server's random numbers for a client in this round, the same in every process."""


class Exchange(ABC):
    """Who uploads what, in how many turns."""

    def check(self, setting: Setting, cohort_size: int) -> None:  # noqa: B027 -- most exchanges fit any run
        """Before the first round: raise `UserError` where the exchange does not fit the run.

        Args:
            setting: of the run.
            cohort_size: clients of a round, K.
        """

    def recipients(self, cohort: Sequence[int], setting: Setting) -> Sequence[int]:
        """The clients to whom the broadcast is charged."""
        return cohort

    @abstractmethod
    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        """Turn results into uploads, one by one where the method allows, so that memory stays O(model)."""


class Aggregator(ABC):
    """How uploads merge.

    Where clients send parts of a model, the aggregator says what it divides by: the weights of all clients, so that what was
    not sent counts as no change, or of those that sent the coordinate (`Upload.sent`).
    """

    reduction = "members"
    """`sum`: the accumulator is a dict of tensors to be summed over ranks, whatever the number of clients; `members`: it keeps
    every upload."""

    def needs(self) -> frozenset[str]:
        """Names it needs in every upload besides `model` and `buffers`."""
        return frozenset()

    @abstractmethod
    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Take one accepted upload into the accumulator ({} at first), in place."""

    @abstractmethod
    def finish(self, accumulator: dict[str, Any]) -> Message:
        """The merged message, in any floating dtype."""


@dataclass
class ServerTraining:
    """What a training on the server's own samples gave.

    Attributes:
        message: deltas from the received model: `model` (d,), `buffers` (d_b,) where there are any, and what the rule sends.
        weight: the server's samples, n_0. If a number of the training was not finite, the weight and all deltas are 0.
        num_steps: optimiser steps made, tau.
    """

    message: Message
    weight: float
    num_steps: int


class Server(Protocol):
    """What the server can do with samples of its own, see `lightning_fl.server`.

    Attributes:
        num_samples: samples the server holds, n_0; 0 if it has none.
    """

    @property
    def num_samples(self) -> int: ...

    @property
    def has_labels(self) -> bool:
        """Whether the class of each sample is known, so that `degrees` can be told."""

    @property
    def seed(self) -> int:
        """Of this round, for what a step draws itself."""

    def require_samples(self) -> None:
        """Raise `UserError` if the server has no samples."""

    def train(self, received: Message, rule: Rule | None = None, epochs: int | None = None) -> ServerTraining:
        """Train on the server's samples as a client would: same epochs (if not given), batches and learning rate."""

    def accuracy(self, params: Tensor, buffers: Tensor, rows: slice = slice(None)) -> float:
        """Share of the server's samples (or of those in `rows`) that a model gets right, in evaluation mode."""

    def try_accuracy(self) -> None:
        """Raise `UserError` if the module does not tell its accuracy."""

    def inputs(self, rows: Tensor) -> Any:
        """What `forward` takes of the server's samples at `rows` (m,)."""

    def logits(self, params: Tensor, buffers: Tensor, inputs: Any, training: bool = False) -> Tensor:
        """The module's `forward`, differentiable in `params`; in training mode `buffers` may change in place."""

    def try_logits(self) -> None:
        """Raise `UserError` if the module's `forward` does not turn inputs into logits (m, C)."""

    def degrees(self, clients: Sequence[int]) -> tuple[float, float]:
        """Non-IID degrees, against all clients together, of these clients' samples and of the server's."""

    def label_histograms(self) -> Tensor:
        """Samples of each client and class, float32 (N, C)."""


@dataclass
class ServerTurn:
    """What the server's steps see and change in one round.

    Attributes:
        setting: of the run.
        server: the server's own samples, and training on them.
        round: index of the round, from 0.
        clients: whose uploads were accepted.
        num_samples: their samples together, n'.
        shared: what the steps sent down with the model in this round.
        params: the model at the start of the round (d,), not to be changed.
        buffers: its float buffers (d_b,), not to be changed.
        merged: what the aggregator made of the uploads.
        proposal: the next model as the steps so far propose it (d,); a step replaces it.
        proposed_buffers: likewise for the buffers.
        metrics: what the steps report, logged with the round.
    """

    setting: Setting
    server: Server
    round: int
    clients: Sequence[int]
    num_samples: float
    shared: Message
    params: Tensor
    buffers: Tensor
    merged: Message
    proposal: Tensor
    proposed_buffers: Tensor
    metrics: dict[str, float] = field(default_factory=dict)

    def move(self, message: Message, share: float) -> None:
        """Add `share` times the deltas of `message` to the proposal, and to what else is merged under their names."""
        for name, delta in message.items():
            if name == "model":
                self.proposal = self.proposal + share * delta
            elif name == "buffers":
                self.proposed_buffers = self.proposed_buffers + share * delta
            else:
                self.merged[name] = self.merged[name] + share * delta


@dataclass
class SetUp:
    """The turn before the first round; the ledger books what crosses in it as set-up. A resumed run does not repeat it.

    Attributes:
        setting: of the run.
        data: as the clients hold them in this method (`Algorithm.arrange`).
        channel: to and from the clients; numbers cross whole, whatever the codecs of the rounds.
        server: the server's own samples, and training on them.
        params: the initial model (d,); may be replaced.
        buffers: its float buffers (d_b,); may be replaced.
    """

    setting: Setting
    data: FederatedDataModule
    channel: Channel
    server: Server
    params: Tensor
    buffers: Tensor


class Step(ABC):
    """What the server does next; an algorithm has a chain of steps, each working on the proposal of the one before."""

    shares = frozenset[str]()
    """Names that `share` sends down with the model."""
    consumes = frozenset[str]()
    """Names it needs in the merged message besides `model` and `buffers`."""

    needs_members = False
    """Whether it reads the uploads one by one, so that the aggregator must keep them."""

    def carries(self) -> tuple[str, Codec] | None:
        """The name of an entry that it shares, and the codec through which clients that hold the rest work its result out."""
        return None

    def rules(self) -> tuple[Rule, ...]:
        """The rules by which it trains on the server, if not by the module's own optimiser."""
        return ()

    def check(self, server: Server) -> None:  # noqa: B027 -- optional
        """Raise `UserError` if the run lacks what the step needs; called before anything is trained."""

    def prepare(self, turn: SetUp) -> None:  # noqa: B027
        """What has to cross, or be done, before the first round."""

    def init(self, params: Tensor) -> State:
        """State before the first round."""
        return {}

    def share(self, state: State) -> Message:
        """What goes down with the model."""
        return {}

    @abstractmethod
    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Replace `turn.proposal` and return the step's new state."""
