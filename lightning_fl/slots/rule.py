"""The rule slot: a client's optimiser steps and its upload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Any

import torch
from torch import Tensor

from lightning_fl.slots.message import Message, State, check_tensors
from lightning_fl.slots.part import Part
from lightning_fl.slots.round_context import RoundContext
from lightning_fl.vectors.pieces import difference

EMPTY = torch.zeros(0)
"""A vector that nobody reads, the same for all clients."""


class Gradients(Flag):
    """Gradients that a rule reads; the runner computes only these."""

    NONE = 0
    MINIBATCH = auto()
    """`LocalTraining.gradient`, the gradient of a step's minibatches, for `observe`, `correct` and `step`."""
    MINIBATCH_AT_RECEIVED = auto()
    """`LocalTraining.gradient_at_received`, the same minibatches' gradient at the received model; doubles the time of a step."""
    MINIBATCH_AT_POINT = auto()
    """`LocalTraining.gradient_at_point`, the same minibatches' gradient at `Rule.point`; doubles the time of a step."""
    REPRESENTATIONS = auto()
    """`Rule.penalty` of each minibatch's representations, which is added to its loss, and so to every gradient of it.

    Clients then train one after the other. The forward passes of the other models count as one gradient of each step.
    """
    FULL_AT_RECEIVED = auto()
    """`LocalTraining.full_gradient`, the gradient on all samples at the received model; costs one more pass over them."""


def _no_loss(params: Tensor) -> Tensor:
    return params.new_zeros(())


@dataclass
class LocalTraining:
    """A client's local training, as a rule sees it. A stack of K clients adds a leading axis: (K, d) instead of (d,).

    Attributes:
        context: facts about the run.
        received: message that the client has received: `model` (d,), `buffers` (d_b,) and what the rule `needs`. It is
            the same for all clients and has no leading axis in a stack.
        params: the client's parameters (d,), to be trained in place.
        gradient: gradient (d,) of the minibatch loss, to be changed in place.
        learning_rate: present learning rate of the optimiser: a number, or (d,) if parameter groups differ.
        optimizer_step: makes one step of the module's own optimiser on `params` with `gradient`.
        state: copy of the client's state between rounds, which `finish` may change or replace. In a stack every entry has the
            leading axis, so keep a number that is combined with vectors as a vector (1,).
        memory: tensors for this round only, {} at first. In a stack, entries with one axis are shared by the clients.
        num_steps: optimiser steps made so far; tau_k at the end.
        steps_in_pass: optimiser steps in one pass over the client's samples; (K, 1) in a stack.
        sum_learning_rate: sum of the learning rates of the steps made so far, a number or (d,).
        full_gradient: gradient (d,) of the loss on all samples at the received model; empty unless the rule reads it.
        gradient_at_received: gradient (d,) of the minibatch loss at the received model; empty unless the rule reads it.
        gradient_at_point: gradient (d,) of the minibatch loss at `Rule.point`, without weight decay; empty unless the rule reads
            it.
        num_samples: samples that the client reads in all its steps, each counted once a pass; (K, 1) in a stack.
        full_loss: returns the mean loss () on all samples, in evaluation mode, of a model (d,), for `start`; 0 unless the rule
            reads `num_losses`.
        buffers: float buffers (d_b,) after the last step, for `finish`; empty before.
    """

    context: RoundContext
    received: Message
    params: Tensor
    gradient: Tensor
    optimizer_step: Callable[[], Any]
    state: State = field(default_factory=dict)
    memory: State = field(default_factory=dict)
    learning_rate: float | Tensor = 0.0
    num_steps: int = 0
    steps_in_pass: int | Tensor = 1
    sum_learning_rate: float | Tensor = 0.0
    full_gradient: Tensor = EMPTY
    gradient_at_received: Tensor = EMPTY
    gradient_at_point: Tensor = EMPTY
    num_samples: float | Tensor = 0.0
    full_loss: Callable[[Tensor], Tensor] = _no_loss
    buffers: Tensor = EMPTY

    def where_it_learns(self, number: float) -> float | Tensor:
        """Return a number where the learning rate is above 0, and 0 elsewhere: a number, or (d,) in the model's dtype."""
        learns = self.learning_rate > 0
        return learns.to(self.params.dtype) * number if isinstance(learns, Tensor) else number * learns

    def drop_vectors(self) -> None:
        """Drop the vectors that nobody reads after `Rule.finish`. The object stays, for readers of the client's progress."""
        self.state, self.memory = {}, {}
        self.buffers = self.full_gradient = self.gradient_at_received = self.gradient_at_point = EMPTY


class Rule(Part):
    """Trains a client and returns its upload. The base rule makes the steps of the module's own optimiser.

    In each round a runner calls `init` (only the first time a client takes part) and `start`, then `observe`, `correct` and
    `step` for every optimiser step, and `finish` at the end. Write elementwise operations, so that the same code runs on one
    client (d,) and on a stack of clients (K, d).

    Clients must receive the entries that it `needs`, and upload those that it `provides`.
    """

    reads = Gradients.MINIBATCH
    """Gradients that the rule reads; the others are not computed."""
    num_losses = 0
    """Number of models whose `LocalTraining.full_loss` `start` reads. Clocks count one forward pass over a client's samples for
    each. If above 0, clients train one after the other."""
    reads_length = False
    """True if the rule reads `LocalTraining.num_samples` or `steps_in_pass`, which are unknown with loaders of clients' own."""
    own_step = False
    """True if `step` replaces the module's optimiser, which must then be plain SGD."""
    plain_sgd_reason = "so that momentum or adaptive step sizes of the optimiser would be lost"
    """Reason for plain SGD, which ends the error's clause "makes the clients' steps itself, in place of plain SGD, …"."""
    needs_whole_upload = False
    """True if clients keep a copy of what they sent, so that an exchange must send the whole upload."""
    unmasked_state = frozenset[str]()
    """Names in a client's state that a pruning mask leaves unchanged; the mask sets other entries to 0 where it prunes."""

    @property
    def omits(self) -> frozenset[str]:
        """Names of the entries, which may include `model`, that uploads lack in some rounds."""
        return frozenset()

    @property
    def repeats(self) -> int:
        """Optimiser steps on each minibatch, one after the other."""
        return 1

    def check(self, context: RoundContext) -> None:
        """Raise `UserError` if the rule does not fit the run; called before the first round."""

    def takes_full_batches(self, context: RoundContext) -> bool:
        """True if each step of this round uses the gradient on all samples of the client; the number of steps stays the same."""
        return False

    def steps_in_round(self, context: RoundContext) -> int | None:
        """Return the optimiser steps, times `repeats`, of every client in this round; None if the trainer's flags decide."""
        return None

    def note_on_resume(self, context: RoundContext, planned: int) -> str:
        """Return a sentence for the log of a run that is resumed, in the present round of `context`; '' for none.

        Args:
            context: facts about the run, with its present number of rounds.
            planned: number of rounds that the run had when its checkpoint was saved.
        """
        return ""

    def init(self, params: Tensor) -> State:
        """Return the state of a client that takes part for the first time, given the model that it received (d,)."""
        return {}

    def start(self, local: LocalTraining) -> None:
        """Prepare the local training, for example fill `local.memory`; called before the first step."""

    def observe(self, local: LocalTraining) -> None:
        """Read `local.gradient` before the pruning mask, clipping and weight decay change it; called first in every step."""

    def point(self, local: LocalTraining) -> Tensor:
        """Return parameters (d,) at which the step's minibatches give a second gradient, if the rule reads one.

        Called in every step, after the pruning mask and clipping. The result is a new tensor, or one that stays as it is.
        """
        return local.received["model"]

    @property
    def representation(self) -> str | None:
        """Name of the module's part whose input represents a sample, for `penalty`; None for the last linear layer."""
        return None

    def compared(self, local: LocalTraining) -> Sequence[tuple[Tensor, Tensor]]:
        """Return the models (d,), (d_b,) whose representations `penalty` reads; called once, after `start`."""
        return ()

    def penalty(self, own: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Return a term () of a minibatch's loss, if the rule reads representations; logged losses do not have it.

        Args:
            own: representations (n, f) of the samples by the client's model, differentiable.
            others: representations (n, f) by the models that `compared` returned, in evaluation mode.
        """
        return own.new_zeros(())

    def correct(self, local: LocalTraining) -> None:
        """Change `local.gradient` in place; called in every step, after the pruning mask and clipping."""

    def step(self, local: LocalTraining) -> None:
        """Change `local.params` in place; called last in every step.

        A rule whose `step` does not call `local.optimizer_step` must set `own_step`.
        """
        local.optimizer_step()

    def finish(self, local: LocalTraining) -> Message:
        """Return the upload, deltas (d,) by name, and update `local.state`; called after the last step.

        The runner adds `buffers`.
        """
        return {"model": difference(local.params, local.received["model"])}

    def arrived(self, state: State, message: Message) -> State:
        """Return a client's new state, given its state after `finish` and the upload as the server received it.

        A client encodes its own upload, so it knows the error of the codec. The new state is kept only if the server accepts the
        upload.
        """
        return state


def message_of(rule: Rule, local: LocalTraining) -> Message:
    """Return the upload of a rule, from `Rule.finish`.

    Raises:
        UserError: it is no dictionary of vectors.
    """
    message = rule.finish(local)
    check_tensors(message, f"What {type(rule).__name__}.finish returns", local.params.dim())
    return message
