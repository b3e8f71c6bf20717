"""What is thrown away because the loss explodes: uploads, server steps, rounds. Off unless asked for.

FedDUMAP's code (Liu et al., ACM TIST 2024) drops clients at 3 times the initial loss, server steps that triple the loss, and
rounds at 3 times the initial loss, measured on test data. Here it is the loss of training samples, the server's or the clients'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl.errors import require
from lightning_fl.slots import Result, Server, ServerTurn, State, Step
from lightning_fl.state.run_state import Run


@dataclass(frozen=True)
class LossGuard:
    """Factors by which a loss, which is positive, grows too much; one that is not finite has grown too much.

    The initial loss is that of the model with which the first round under the guard begins, on the server's samples. Without
    such it is the clients' mean training loss in that round, in which no client is judged then.

    Attributes:
        clients: an upload is rejected if the client's mean training loss in its last pass over its samples is at least so many
            times the initial loss; it counts in `clients/rejected`, and its bits stay charged. Above 1; None: never.
        server_steps: a step of the server after the first, such as FedDU's training on samples of its own, is undone if it makes
            the loss on these samples at least so many times what it was. Above 1; None: never. Reports `guard/undone_steps`.
        rounds: a round is undone if after it the loss on the server's samples is at least so many times the initial loss: the
            model and the states of server and clients stay as they were, while steps, bits and time count. Above 1; None:
            never. Reports `guard/loss`, which the round has led to, and `guard/undone`.
    """

    clients: float | None = None
    server_steps: float | None = None
    rounds: float | None = None

    def __post_init__(self) -> None:
        for name, factor in vars(self).items():
            require(
                factor is None or factor > 1,
                f"loss_guard.{name} is a factor by which a loss grows too much and must be above 1, got {factor}.",
            )

    @property
    def knows_initial_loss(self) -> bool:
        """Whether anything is compared with the initial loss."""
        return self.clients is not None or self.rounds is not None

    def initial_loss(self, run: Run, server: Server) -> float | None:
        """Return the loss to compare with: the run's, or before its first round that on the server's samples; None if unknown."""
        if run.initial_loss is None and self.knows_initial_loss and server.num_samples:
            return server.loss(run.params, run.buffers)
        return run.initial_loss

    def later_initial_loss(self, initial_loss: float | None, averages: Mapping[str, float]) -> float | None:
        """Return the loss to compare with from the next round on: without server data the clients' mean loss in the first."""
        unknown = initial_loss is None and self.knows_initial_loss
        return averages.get("train/loss") if unknown else initial_loss

    def check(self, server: Server, steps: Sequence[Step]) -> None:
        """Raise `UserError` where there is nothing to measure, or no step to guard."""
        for name, factor in (("server_steps", self.server_steps), ("rounds", self.rounds)):
            require(
                factor is None or server.num_samples > 0,
                f"loss_guard.{name} looks at the loss on the server's samples, and there are none: give --data.server_fraction, "
                "for instance 0.05, and a --data.client_fraction that leaves room for them, for instance 0.8.",
            )
        require(
            self.server_steps is None or any(step.changes_model() for step in steps[1:]),
            f"loss_guard.server_steps={self.server_steps} is for servers that change the model in a step after the first, as "
            f"FedDU's does; here there is none in {', '.join(type(step).__name__ for step in steps)}: guard rounds instead.",
        )

    def rejects(self, result: Result, initial_loss: float | None) -> bool:
        """Whether a client's loss has exploded."""
        return result.last_loss is not None and explodes(result.last_loss, self.clients, initial_loss)

    def take_step(self, position: int, step: Step, turn: ServerTurn, state: State) -> tuple[ServerTurn, State]:
        """A step of the server, unless it is undone.

        Args:
            position: in the chain, from 0.
            step: to take.
            turn: may be changed.
            state: the step's.

        Returns:
            The turn and the step's state after it.
        """
        if self.server_steps is None or not position or not step.changes_model():
            return turn, step(turn, state)
        before = turn.server.loss(turn.proposal, turn.proposed_buffers)
        tried = replace(turn, merged=dict(turn.merged), metrics=dict(turn.metrics), server=turn.server.branch())
        new = step(tried, state)
        loss = turn.server.loss(tried.proposal, tried.proposed_buffers)
        is_undone = explodes(loss, self.server_steps, before)
        turn, state = (turn, state) if is_undone else (tried, new)
        turn.metrics["guard/undone_steps"] = turn.metrics.get("guard/undone_steps", 0.0) + is_undone
        return turn, state

    def undoes(self, turn: ServerTurn, initial_loss: float | None) -> bool:
        """Whether what the server's steps propose is thrown away, with all else that the round has changed."""
        if self.rounds is None:
            return False
        loss = turn.server.loss(turn.proposal, turn.proposed_buffers)
        is_undone = explodes(loss, self.rounds, initial_loss)
        turn.metrics |= {"guard/loss": loss, "guard/undone": float(is_undone)}
        if is_undone:
            rank_zero_info(
                f"Round {turn.round} is undone: the loss on the server's samples would be {loss:.4g}, and was "
                f"{initial_loss:.4g} at first."
            )
        return is_undone


def explodes(loss: float, factor: float | None, reference: float | None) -> bool:
    """Whether a loss is at least `factor` times the reference, or not finite; never where either is not given.

    >>> [explodes(loss, 3.0, 0.5) for loss in (1.4, 1.5, float("nan"))]
    [False, True, True]
    """
    if factor is None or reference is None:
        return False
    return not isfinite(loss) or (isfinite(reference) and loss >= factor * reference > 0)
