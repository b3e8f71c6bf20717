"""What the server can do: train and measure on samples of its own, and train models before the first round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from lightning_fl.slots.message import Message
from lightning_fl.slots.rule import Rule

if TYPE_CHECKING:
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
        counters: integer buffers of the module, which its trainings raise.
        num_steps: optimiser steps of its trainings in this turn.
    """

    counters: dict[str, Tensor]
    num_steps: int

    def branch(self) -> Server:
        """Return a copy whose trainings are counted apart, for a step that may be undone."""

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
