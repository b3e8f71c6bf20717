"""Reject uploads, undo server steps or undo rounds whose loss explodes; off by default.

FedDUMAP's code (Liu et al., ACM TIST 2024) drops clients at 3 times the initial loss, server steps that triple the loss, and
rounds at 3 times the initial loss, measured on test data. Here the loss is measured on training samples of the server or the
clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Annotated

from annotated_types import Gt
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl.checks import check_fields
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.roles import Observer, Roles, Round, TakeStep
from lightning_fl.errors import require
from lightning_fl.slots import Result, Server, ServerTurn, State, Step
from lightning_fl.state.outcome import Proposal
from lightning_fl.state.run_state import Run

GUARD = "loss_guard"
"""Name of the state in a run."""


@dataclass(frozen=True)
class LossGuard:
    """Factors by which an exploding (positive) loss grows; a loss that is not finite explodes, too.

    The initial loss is the loss on the server's samples before the first guarded round. If the server has no samples, it is
    the clients' mean training loss in that round, and no client of that round is rejected.

    Attributes:
        clients: an upload is rejected if the client's mean training loss in its last pass over its samples is at least this
            many times the initial loss. It counts in `clients/rejected`, and its bits are still counted. Above 1; None: never.
        server_steps: a server step after the first, such as FedDU's training on the server's samples, is undone if it makes the
            loss on these samples at least this many times the loss before. Above 1; None: never. Reports
            `guard/undone_steps`.
        rounds: a round is undone if the loss on the server's samples after it is at least this many times the initial loss.
            The model and the states of server and clients return to their values before the round; the clients' steps, bits
            and time still count. Above 1; None: never. Reports `guard/loss`, the loss after the round, and `guard/undone`.
    """

    _called = "loss_guard.{}, the factor by which an exploding loss grows,"
    clients: Annotated[float, Gt(1)] | None = None
    server_steps: Annotated[float, Gt(1)] | None = None
    rounds: Annotated[float, Gt(1)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def knows_initial_loss(self) -> bool:
        """True if a factor refers to the initial loss."""
        return self.clients is not None or self.rounds is not None

    def check(self, server: Server, steps: Sequence[Step]) -> None:
        """Raise `UserError` if there are no samples to measure the loss on, or no step to guard."""
        for name, factor in (("server_steps", self.server_steps), ("rounds", self.rounds)):
            require(
                factor is None or server.num_samples > 0,
                f"loss_guard.{name} needs the loss on the server's samples, but there are none: set --data.server_fraction, "
                "for example 0.05.",
            )
        require(
            self.server_steps is None or any(step.changes_model for step in steps[1:]),
            f"loss_guard.server_steps={self.server_steps} needs a server step after the first that changes the model, as in "
            f"FedDU; the steps here are {', '.join(type(step).__name__ for step in steps)}: use loss_guard.rounds instead.",
        )


@dataclass(frozen=True)
class RoundGuard(Observer):
    """Guards the rounds of a run.

    Attributes:
        guard: the factors.
        run: the run, which keeps the initial loss.
    """

    guard: LossGuard
    run: Run

    def around(self, roles: Roles, engine: Engine) -> Roles:
        """Return the roles of a round that this object guards."""
        return replace(
            roles.watched_by(self),
            accept=lambda upload: roles.accept(upload) or ("loss exploded" if self.rejects(upload.result) else ""),
            take_step=partial(self.take_step, roles.take_step),
            conclude=lambda turn, proposal: self.conclude(turn, roles.conclude(turn, proposal)),
        )

    def begin_round(self, run: Run, server: Server) -> None:
        """Measure the initial loss before the first guarded round, if the server has samples."""
        if self.initial_loss is None and self.guard.knows_initial_loss and server.num_samples:
            self._keep(server.loss(run.params, run.buffers))

    def end_round(self, finished: Round) -> dict[str, float]:
        """Keep the clients' mean loss in the first guarded round as the initial loss, if the server has no samples."""
        if self.initial_loss is None and self.guard.knows_initial_loss and "train/loss" in finished.averages:
            self._keep(finished.averages["train/loss"])
        return {}

    @property
    def initial_loss(self) -> float | None:
        """Loss with which others are compared; None until it is known."""
        return self.run.features.get(GUARD, {}).get("initial_loss")

    def _keep(self, loss: float) -> None:
        self.run.features[GUARD] = {"initial_loss": loss}

    def rejects(self, result: Result) -> bool:
        """True if a client's loss has exploded."""
        return result.last_loss is not None and explodes(result.last_loss, self.guard.clients, self.initial_loss)

    def take_step(
        self, take: TakeStep, position: int, step: Step, turn: ServerTurn, state: State
    ) -> tuple[ServerTurn, State]:
        """Take a step of the server, and undo it if its loss explodes.

        Args:
            take: takes a step.
            position: position of the step in the chain, from 0.
            step: step to take.
            turn: the server's turn, which may be changed in place.
            state: state of the step.

        Returns:
            The turn and the state of the step afterwards.
        """
        factor = self.guard.server_steps
        if factor is None or not position or not step.changes_model:
            return take(position, step, turn, state)
        before = turn.server.loss(turn.proposal, turn.proposed_buffers)
        tried = replace(turn, merged=dict(turn.merged), metrics=dict(turn.metrics), server=turn.server.branch())
        tried, new = take(position, step, tried, state)
        loss = turn.server.loss(tried.proposal, tried.proposed_buffers)
        is_undone = explodes(loss, factor, before)
        turn, state = (turn, state) if is_undone else (tried, new)
        turn.metrics["guard/undone_steps"] = turn.metrics.get("guard/undone_steps", 0.0) + is_undone
        return turn, state

    def conclude(self, turn: ServerTurn, proposal: Proposal) -> Proposal:
        """Return the proposal, which is undone, with all changes of the round, if the loss has exploded."""
        if self.guard.rounds is None:
            return proposal
        loss, initial_loss = turn.server.loss(proposal.params, proposal.buffers), self.initial_loss
        is_undone = explodes(loss, self.guard.rounds, initial_loss)
        if is_undone:
            rank_zero_info(
                f"Round {turn.round + 1} is undone: the loss on the server's samples would be {loss:.4g}, but the "
                f"initial loss was {initial_loss:.4g}."
            )
        metrics = {**proposal.metrics, "guard/loss": loss, "guard/undone": float(is_undone)}
        return replace(proposal, metrics=metrics, is_undone=is_undone)


def explodes(loss: float, factor: float | None, reference: float | None) -> bool:
    """True if a loss is at least `factor` times the reference, or not finite; False if factor or reference is None.

    >>> [explodes(loss, 3.0, 0.5) for loss in (1.4, 1.5, float("nan"))]
    [False, True, True]
    """
    if factor is None or reference is None:
        return False
    return not isfinite(loss) or (isfinite(reference) and loss >= factor * reference > 0)
