"""Warnings about rounds that lose uploads or train nothing, each printed in the first such round of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fl.algorithms import Algorithm
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.roles import Observer, Roles, Round
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.outputs.losses import TOO_STALE, rejection_reasons, say_lost
from lightning_fl.state.run_state import Run


@dataclass
class RoundNotes(Observer):
    """Warn of rounds that go wrong.

    Attributes:
        flat_module: module that clients train.
        algorithm: method of the run.
        may_explode: True if the loss guard rejects uploads.
        adds_noise: True if the server adds noise to the mean, even without uploads.
        trains_own: True if clients train parts of their own, possibly the whole model.
        keeps_buffers: True if clients keep their float buffers, for the sake of privacy.
        clip: returns the largest length of an upload; None if there is no limit.
    """

    flat_module: FlatModule
    algorithm: Algorithm
    may_explode: bool
    adds_noise: bool
    trains_own: bool
    keeps_buffers: bool
    clip: Callable[[Run], float | None]
    in_rehearsals: ClassVar[bool] = False
    """A rehearsal alters the clients' messages, so what goes wrong in its rounds tells nothing of the run."""
    _said: set[str] = field(default_factory=set, init=False, repr=False)

    def around(self, roles: Roles, engine: Engine) -> Roles:
        """Return the roles of a round that this object watches."""
        return roles.watched_by(self)

    def end_round(self, finished: Round) -> dict[str, float]:
        """Warn of problems that occur for the first time."""
        self._none_accepted(finished)
        self._without_loss(finished)
        self._nothing_changes(finished)
        self._buffers_stay(finished)
        return {}

    def _none_accepted(self, finished: Round) -> None:
        """Say that every upload is rejected, and not only stale ones; the table at the run's end counts them all."""
        outcome = finished.outcome
        if outcome.num_accepted or outcome.num_lost or outcome.num_uploads == outcome.rejected[TOO_STALE]:
            return
        why = rejection_reasons(self.may_explode, outcome.rejected[TOO_STALE] > 0)
        change = "only noise changed the model" if self.adds_noise else "the model did not change"
        if self._is_first("rejected"):
            say_lost(
                f"Round {finished.number}: all uploads ({outcome.num_uploads}) were rejected ({why}), so {change}. Most "
                "likely the learning rate is too high, or the inputs have values that are not finite."
            )

    def _without_loss(self, finished: Round) -> None:
        """Warn that clients have samples, but no loss to train on."""
        outcome = finished.outcome
        had_steps = outcome.num_steps or outcome.num_lost  # a sum may be lost before the training
        if had_steps or not finished.work.num_samples(finished.cohort.answering):
            return
        proposal = finished.proposal
        if (
            self.flat_module.is_manual
            and proposal is not None
            and not torch.equal(proposal.params, finished.run.params)
        ):
            return  # it steps an optimiser by other methods than step, such as SAM
        name = type(self.flat_module.module).__name__
        what, remedy = "returned None for every batch of all clients", "end it with `return loss`"
        if self.flat_module.is_manual:
            what, remedy = "made no step of an optimizer", "call step() of what self.optimizers() returns"
        if self._is_first("no loss"):
            rank_zero_warn(
                f"Round {finished.number}: training_step of {name} {what}, so nothing was trained: {remedy}."
            )

    def _nothing_changes(self, finished: Round) -> None:
        """Warn in the first round if the clients' steps leave the server's model as it was."""
        run, proposal, num_steps = finished.run, finished.proposal, finished.outcome.num_steps
        if run.round or proposal is None or proposal.is_undone or not num_steps or self.trains_own:
            return
        if torch.equal(proposal.params, run.params):
            clips = {
                "gradient_clip_val": finished.work.schedule.clip_value,
                "privacy.clip": self.clip(run),
            }
            why = _why_nothing_changes(self.flat_module.optimizer.largest_rate, clips, run.params.dtype)
            if proposal.params is run.params:
                why = f"the server's steps ({self._steps}) propose no model: set turn.proposal to a new tensor"
            rank_zero_warn(
                f"Round 1: {num_steps} optimiser steps of the clients changed no parameter of the model; {why}."
            )

    def _buffers_stay(self, finished: Round) -> None:
        """Warn that nothing has merged the float buffers that clients send."""
        run, proposal = finished.run, finished.proposal
        if proposal is None or proposal.is_undone or proposal.buffers is not run.buffers:
            return
        if self.keeps_buffers or not run.buffers.numel():
            return
        if self._is_first("buffers"):
            rank_zero_warn(
                f"Round {finished.number}: clients send float buffers, such as the statistics of batch normalisation, but the "
                f"server's stay as they are: {type(self.algorithm.aggregator).__name__} must return 'buffers', and a step "
                f"({self._steps}) must add them: turn.proposed_buffers = turn.buffers + turn.merged['buffers']."
            )

    @property
    def _steps(self) -> str:
        return ", ".join(type(step).__name__ for step in self.algorithm.steps)

    def _is_first(self, what: str) -> bool:
        is_first = what not in self._said
        self._said.add(what)
        return is_first


def _why_nothing_changes(rate: float, clips: Mapping[str, float | None], dtype: torch.dtype) -> str:
    """Return the most likely reason why steps change no parameter of a dtype.

    Args:
        rate: largest learning rate.
        clips: largest lengths of gradients and uploads, by the names of the settings; None for no limit.
        dtype: dtype of the model.
    """
    if not rate:
        return "the learning rate is 0"
    limits = {"the learning rate": rate} | {name: clip for name, clip in clips.items() if clip is not None}
    tiny = [f"{name} is {limit:g}" for name, limit in limits.items() if limit < torch.finfo(dtype).eps]
    if tiny:
        return f"{' and '.join(tiny)}, so that steps are too small for {str(dtype).removeprefix('torch.')}"
    return "most likely the loss does not depend on what is trained"
