"""The server as steps see it: training and evaluation on its own samples, and training before the first round."""

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
    """Result of a training on the server's own samples.

    Attributes:
        message: deltas from the received model: `model` (d,), `buffers` (d_b,) if the module has any, and the names that the
            rule sends. All are 0 if any number of the result was not finite.
        weight: number of samples trained on, at most n_0; 0 if any number of the result was not finite.
        num_steps: optimiser steps made, tau.
    """

    message: Message
    weight: float
    num_steps: int


class Server(Protocol):
    """The server as a step sees it: its own samples, and training and evaluation on them; see `lightning_fl.engine.server_side`.

    Attributes:
        num_samples: samples that the server holds, n_0; 0 if it has none.
        counters: integer buffers of the module by name, which count up in its trainings.
        num_steps: optimiser steps of its trainings in this turn.
    """

    counters: dict[str, Tensor]
    num_steps: int

    def branch(self) -> Server:
        """Return a copy that counts its own trainings, for a step that may be undone."""

    @property
    def num_samples(self) -> int: ...

    @property
    def has_labels(self) -> bool:
        """True if the class of each sample is known, as `degrees` and `label_histograms` require."""

    @property
    def batch_size(self) -> int:
        """Samples in a minibatch, the same as for clients."""

    @property
    def skips_single_samples(self) -> bool:
        """True if the module cannot train on a batch of one sample, because of batch normalisation."""

    @property
    def samples_per_client(self) -> float:
        """Mean number of samples that a client reads in a round, over all passes; clients without samples are left out."""

    def require_samples(self) -> None:
        """Raise `UserError` if the server has no samples."""

    def inputs(self, rows: Tensor, batch_size: int) -> Iterator[Any]:
        """Yield the inputs of `forward` for the server's samples at `rows` (m,), in this order and in batches."""

    def degrees(self, clients: Sequence[int]) -> tuple[float, float]:
        """Return the non-IID degrees of these clients' samples and of the server's, relative to the samples of all clients."""

    def label_histograms(self) -> Tensor:
        """Return the number of samples of each client and class, float32 (N, C)."""

    @property
    def seed(self) -> int:
        """Seed of this round for random draws of a step; the same in every process."""

    @property
    def untrained(self) -> list[slice]:
        """Parts of the model (d,) that nobody trains, because the module's optimiser lacks them."""

    def train(
        self,
        received: Message,
        rule: Rule | None = None,
        epochs: int | None = None,
        rows: slice = slice(None),
        mask: Tensor | None = None,
    ) -> ServerTraining:
        """Train on the server's samples with the batches and the learning rate of a client.

        Args:
            received: model to start from: `model` (d,), `buffers` (d_b,) and what the rule `needs`.
            rule: rule of the training; None for the module's own optimiser.
            epochs: passes over the samples; None for as many epochs or steps as a client.
            rows: positions of the samples to train on, within the server's; all by default.
            mask: parameters to train (d,), bools, all others being 0; None for the run's pruning mask.
        """

    def accuracy(self, params: Tensor, buffers: Tensor, rows: slice = slice(None)) -> float:
        """Return the accuracy in [0, 1] of a model (d,), (d_b,) on the server's samples at `rows`, in evaluation mode."""

    def loss(self, params: Tensor, buffers: Tensor) -> float:
        """Return the mean training loss of a model (d,), (d_b,) over the server's samples, in evaluation mode."""

    def try_accuracy(self) -> None:
        """Raise `UserError` if the module does not log its accuracy."""

    def logits(self, params: Tensor, buffers: Tensor, inputs: Any, training: bool = False) -> Tensor:
        """Return the module's `forward`: logits (m, C), differentiable in `params` that the optimiser steps.

        Args:
            params: parameters (d,).
            buffers: float buffers (d_b,), which training mode may change in place.
            inputs: one batch from `inputs`, m samples.
            training: True for training mode, False for evaluation mode.
        """

    def try_logits(self) -> None:
        """Raise `UserError` if the module's `forward` does not return logits (m, C)."""

    def layer_macs(self) -> dict[str, int]:
        """Return the multiply-accumulates of each layer in the forward pass of one sample, by module name; {} if unknown."""


class Learner(Protocol):
    """The module as a classifier that an algorithm trains before the first round; see `lightning_fl.engine.pretraining`.

    A model is a message with `model` (d,) and `buffers` (d_b,), the values themselves instead of deltas.
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
        """Train a model with Adam on the cross-entropy.

        Args:
            start: model to start from.
            samples: m samples.
            labels: their classes (m,), in the order of the samples.
            epochs: passes over the samples.
            batch_size: samples in a minibatch.
            learning_rate: learning rate of Adam.
            random: source of the order of the samples and of the module's random draws.

        Returns:
            The trained model.
        """

    def votes(self, model: Message, samples: Selection) -> Tensor:
        """Return the predicted class of every sample as one-hot rows (m, C), int64 on the host; uses evaluation mode."""

    def sum_over_clients(self, work: Callable[[int], Tensor]) -> Tensor:
        """Return Σ_k work(k) over the clients that have samples, in every process; each process works for its own clients."""
