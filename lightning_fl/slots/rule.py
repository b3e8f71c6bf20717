"""The slot of a client's training: what it does with its gradients and what it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Any

import torch
from torch import Tensor

from lightning_fl.slots.message import Message, State
from lightning_fl.slots.setting import Setting


class Gradients(Flag):
    """Gradients that a rule reads; the runner gathers no others."""

    NONE = 0
    MINIBATCH = auto()
    """`LocalTraining.gradient` of the minibatches of a step, which `observe`, `correct` and `step` look at."""
    MINIBATCH_AT_RECEIVED = auto()
    """`gradient_at_received`: of the same minibatches at the received model, which takes as long again as the step."""
    FULL_AT_RECEIVED = auto()
    """`full_gradient`: on all samples at the received model, which takes a pass over them."""


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
        steps_in_pass: optimiser steps of one pass over the client's samples; (K, 1) in a stack.
        sum_learning_rate: sum of the learning rates of these steps.
        full_gradient: gradient (d,) of the loss on all samples at the received model, for rules that read it.
        gradient_at_received: gradient (d,) of the minibatch loss at the received model, for rules that read it.
        num_samples: samples that the client reads in its steps, those of all passes together; in a stack (K, 1).
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
    steps_in_pass: int | Tensor = 1
    sum_learning_rate: float | Tensor = 0.0
    full_gradient: Tensor = field(default_factory=lambda: torch.zeros(0))
    gradient_at_received: Tensor = field(default_factory=lambda: torch.zeros(0))
    num_samples: float | Tensor = 0.0


class Rule:
    """What a client does with its gradients and what it reports. The base rule follows the module's own optimiser.

    All operations are elementwise, so that the same code runs on one client (d,) and on a stack of clients (K, d).
    """

    reads = Gradients.MINIBATCH
    """The gradients that it reads."""
    own_step = False
    """Whether `step` replaces the module's optimiser, which must then be plain SGD."""
    why_plain_sgd = "so that what an optimiser does beyond it would be lost"
    """Why there must be no other, behind "in place of plain SGD, …"."""
    receives = frozenset[str]()
    """Names the rule needs from the server besides `model` and `buffers`."""
    sends = frozenset[str]()
    """Names it uploads besides `model` and `buffers`."""
    needs_whole_upload = False
    """Whether its clients keep what they believe the server has received, so that an exchange may leave nothing out."""
    unmasked_state = frozenset[str]()
    """Names in its state of parameters that a pruning mask has left out, too."""

    def check(self, setting: Setting) -> None:
        """Before the first round: raise `UserError` where the rule does not fit the run."""

    def takes_full_batches(self, setting: Setting) -> bool:
        """Whether in this round each of a client's steps, as many as ever, follows the gradient on all of its samples."""
        return False

    def init(self, params: Tensor) -> State:
        """State of a client that takes part for the first time; `params` is the model it received."""
        return {}

    def start(self, local: LocalTraining) -> None:
        """Before the first step: fill `local.memory`."""

    def observe(self, local: LocalTraining) -> None:
        """Look at `local.gradient` as the loss gives it; then a pruning mask, if there is one, makes it 0 outside of it."""

    def correct(self, local: LocalTraining) -> None:
        """Change `local.gradient` in place."""

    def step(self, local: LocalTraining) -> None:
        """Change `local.params` in place."""
        local.optimizer_step()

    def finish(self, local: LocalTraining) -> Message:
        """The upload after the last step; also replaces `local.state` where the client keeps something."""
        return {"model": local.params - local.received["model"]}
