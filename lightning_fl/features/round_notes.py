"""Sentences about rounds that lose uploads or train nothing, each said in the first such round of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.engine.population import Cohort
from lightning_fl.features.secure_sums import SecureSum
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.outputs.losses import rejection_reasons, say_lost
from lightning_fl.state.outcome import Outcome, Proposal


@dataclass
class RoundNotes:
    """Says what goes wrong in the rounds of a run; `number` is that of a round, from 1.

    Attributes:
        flat_module: module that clients train.
        deadline: seconds after which a round closes; None for never.
        may_explode: True if uploads whose loss explodes are rejected.
        adds_noise: True if the server adds noise to the mean, also of no upload.
    """

    flat_module: FlatModule
    deadline: float | None
    may_explode: bool
    adds_noise: bool
    _said: set[str] = field(default_factory=set, init=False, repr=False)

    def none_accepted(self, number: int, outcome: Outcome) -> None:
        """Say that every upload is rejected, and not only stale ones; the table at the run's end counts them all."""
        if outcome.num_accepted or outcome.num_lost or outcome.num_uploads == outcome.num_stale:
            return
        why = rejection_reasons(self.may_explode, outcome.num_stale > 0)
        if self._is_first("rejected"):
            say_lost(
                f"Round {number}: all uploads ({outcome.num_uploads}) were rejected ({why}), so {self._change}. Most "
                "likely the learning rate is too high, or the inputs have values that are not finite."
            )

    def lost_sum(self, number: int, outcome: Outcome, secure_sum: SecureSum | None) -> None:
        """Say that too few clients answered for a secure sum; the table at the run's end counts them all."""
        if secure_sum is None or not outcome.num_lost:
            return
        n = secure_sum.num_clients
        if self._is_first("lost"):
            say_lost(
                f"Round {number}: {outcome.num_lost} of {n} clients answered, and a secure sum over {n} needs "
                f"{secure_sum.protocol.threshold(n)}, so it is lost and {self._change}."
            )

    def all_late(self, number: int, cohort: Cohort, seconds: Mapping[int, float]) -> None:
        """Say that nobody answers before the deadline, so that the round trains nothing; `seconds` are those of each client."""
        if cohort.answering or not cohort.late:
            return
        fastest = min(seconds[client] for client in cohort.late)
        if self._is_first("late"):
            say_lost(
                f"Round {number}: none of the {len(cohort.late)} clients that answer does so before the deadline of "
                f"{self.deadline:g} simulated seconds, so the model did not change; the fastest would need {fastest:.3g}."
            )

    def without_loss(self, number: int, outcome: Outcome, num_samples: int) -> None:
        """Warn that clients have samples, but no loss to train on."""
        had_steps = outcome.num_steps or outcome.num_lost  # a sum may be lost before the training
        if had_steps or not num_samples:
            return
        name = type(self.flat_module.module).__name__
        what, remedy = "returned None for every batch of all clients", "end it with `return loss`"
        if self.flat_module.is_manual:
            what, remedy = "made no step of an optimizer", "call step() of what self.optimizers() returns"
        if self._is_first("no loss"):
            rank_zero_warn(f"Round {number}: training_step of {name} {what}, so nothing was trained: {remedy}.")

    def server_dropped(self, when: str) -> None:
        """Say that a training on the server's samples was dropped; `when` is its round, or the time before the first."""
        if self._is_first("server"):
            say_lost(
                f"{when}: the server's training on its own samples changed nothing, because its result was not finite. Most "
                "likely the learning rate is too high, or the inputs have values that are not finite."
            )

    def nothing_changes(
        self,
        number: int,
        proposal: Proposal | None,
        params: Tensor,
        outcome: Outcome,
        trains_own: bool,
        clips: Mapping[str, float | None],
    ) -> None:
        """Warn in the first round if the clients' steps leave the server's model as it was.

        Args:
            number: number of the round.
            proposal: the server's proposal; None if there is none.
            params: model (d,) before it.
            outcome: outcome of the round.
            trains_own: True if clients train something of their own, which may be all.
            clips: largest lengths of gradients and uploads, by the names of the settings; None for no limit.
        """
        if number > 1 or proposal is None or proposal.is_undone or not outcome.num_steps or trains_own:
            return
        if torch.equal(proposal.params, params):
            why = _why_nothing_changes(self.flat_module.optimizer.largest_rate, clips, params.dtype)
            rank_zero_warn(
                f"Round 1: {outcome.num_steps} optimiser steps of the clients changed no parameter of the model; {why}."
            )

    def drifted(self, number: int) -> None:
        """Warn that the processes have begun the round with different models."""
        if self._is_first("drifted"):
            rank_zero_warn(
                f"Round {number}: the processes have begun with models that differ, most likely because they "
                "compute on accelerators of different kinds; from now on all take the model of process 0 after each round."
            )

    @property
    def _change(self) -> str:
        """Words for the change of the model in a round without an upload."""
        return "only noise changed the model" if self.adds_noise else "the model did not change"

    def _is_first(self, what: str) -> bool:
        is_first = what not in self._said
        self._said.add(what)
        return is_first


def _why_nothing_changes(rate: float, clips: Mapping[str, float | None], dtype: torch.dtype) -> str:
    """Return the most likely reason why steps change no parameter of a dtype."""
    if not rate:
        return "the learning rate is 0"
    limits = {"the learning rate": rate} | {name: clip for name, clip in clips.items() if clip is not None}
    tiny = [f"{name} is {limit:g}" for name, limit in limits.items() if limit < torch.finfo(dtype).eps]
    if tiny:
        return f"{' and '.join(tiny)}, so that steps are too small for {str(dtype).removeprefix('torch.')}"
    return "most likely the loss does not depend on what is trained"
