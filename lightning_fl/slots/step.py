"""The slot of the server's own work after aggregation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from lightning_fl.slots.codec import Codec
from lightning_fl.slots.exchange import Channel
from lightning_fl.slots.message import Message, State
from lightning_fl.slots.rule import Rule
from lightning_fl.slots.setting import Setting

if TYPE_CHECKING:
    from lightning_fl.data import FederatedDataModule
    from lightning_fl.data.samples.tensor_samples import Selection


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
    """What the server can do with samples of its own, see `lightning_fl.server.server_side`.

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

    @property
    def batch_size(self) -> int:
        """Samples in a minibatch of its training, as of a client's."""

    @property
    def samples_per_client(self) -> float:
        """Samples that a client reads in a round's training, all passes together, on average over those that have some."""

    def layer_macs(self) -> dict[str, int]:
        """Multiply-accumulates of each layer, by the name of its module, in the forward pass of a sample of the server's."""

    def train(
        self,
        received: Message,
        rule: Rule | None = None,
        epochs: int | None = None,
        rows: slice = slice(None),
        mask: Tensor | None = None,
    ) -> ServerTraining:
        """Train on the server's samples (or those in `rows`) as a client would: same epochs (if not given), batches and learning
        rate; under the run's pruning mask, if not this one (d,).
        """

    def accuracy(self, params: Tensor, buffers: Tensor, rows: slice = slice(None)) -> float:
        """Share of the server's samples (or of those in `rows`) that a model gets right, in evaluation mode."""

    def loss(self, params: Tensor, buffers: Tensor) -> float:
        """Mean training loss of the server's samples, in evaluation mode."""

    def try_accuracy(self) -> None:
        """Raise `UserError` if the module does not tell its accuracy."""

    def inputs(self, rows: Tensor, batch_size: int) -> Iterator[Any]:
        """What `forward` takes of the server's samples at `rows` (m,), in their order and in batches."""

    def logits(self, params: Tensor, buffers: Tensor, inputs: Any, training: bool = False) -> Tensor:
        """The module's `forward`, differentiable in `params`; in training mode `buffers` may change in place."""

    def try_logits(self) -> None:
        """Raise `UserError` if the module's `forward` does not turn inputs into logits (m, C)."""

    def degrees(self, clients: Sequence[int]) -> tuple[float, float]:
        """Non-IID degrees, against all clients together, of these clients' samples and of the server's."""

    def label_histograms(self) -> Tensor:
        """Samples of each client and class, float32 (N, C)."""


class Learner(Protocol):
    """The module as a classifier that a method trains before the first round, see `lightning_fl.server.pretraining`.

    A model is a message of `model` (d,) and `buffers` (d_b,), whole, no delta.
    """

    def train(
        self,
        start: Message,
        samples: Selection,
        labels: Tensor,
        epochs: int,
        batch_size: int,
        learning_rate: float,
        random: np.random.Generator,
    ) -> Message:
        """The model that Adam on the cross-entropy with these classes (m,) makes of `start`, on all m samples in `epochs`."""

    def votes(self, model: Message, samples: Selection) -> Tensor:
        """One vote for a class from every sample (m, C), int64 on the host, in evaluation mode."""

    def sum_over_clients(self, work: Callable[[int], Tensor]) -> Tensor:
        """Σ_k work(k) over the clients that have samples, each done by the process that simulates the client."""


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
        mask: the parameters that pruning keeps (d,), all others being 0; None: all. A step may replace it.
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
    mask: Tensor | None = None
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
        learner: trains models that are not yet the federation's.
        params: the initial model (d,); may be replaced.
        buffers: its float buffers (d_b,); may be replaced.
        mask: the parameters that pruning keeps (d,), all others being 0; None: all; may be replaced.
    """

    setting: Setting
    data: FederatedDataModule
    channel: Channel
    server: Server
    learner: Learner
    params: Tensor
    buffers: Tensor
    mask: Tensor | None = None


class Step(ABC):
    """What the server does next; an algorithm has a chain of steps, each working on the proposal of the one before."""

    shares = frozenset[str]()
    """Names that `share` sends down with the model."""
    consumes = frozenset[str]()
    """Names it needs in the merged message besides `model` and `buffers`."""

    needs_members = False
    """Whether it reads the uploads one by one, so that the aggregator must keep them."""

    def proposes(self) -> bool:
        """Whether it changes the model by itself; False for a step that follows a change of others, or keeps something beside."""
        return True

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
