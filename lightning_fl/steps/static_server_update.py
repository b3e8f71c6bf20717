"""A server update of constant size (FedDU-S of Liu et al., FedDUMAP, ACM TIST 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fl.errors import require
from lightning_fl.slots import Server, ServerTurn, State, Step


@dataclass(frozen=True)
class StaticServerUpdate(Step):
    """α = τ_eff/τ;  w ← w_h + α (w_s − w_h).

    w_h is the proposal and w_s what τ local steps on the server's samples make of it. Unlike `DynamicServerUpdate` it looks
    neither at the accuracy nor at labels. Float buffers move like the model. Reports `feddu/alpha` and `feddu/tau_eff`.

    Attributes:
        tau_eff: τ_eff ≥ 0, effective steps of the server, or `full` for all it makes (α = 1). The paper tries 5, 10, 20 and
            full. More than it makes goes beyond w_s, of which a warning tells.
    """

    tau_eff: float | Literal["full"] = 10

    def __post_init__(self) -> None:
        good = self.tau_eff == "full" or (not isinstance(self.tau_eff, str) and self.tau_eff >= 0)
        require(good, f"tau_eff is a number of steps of at least 0, or 'full', got {self.tau_eff!r}.")

    def check(self, server: Server) -> None:
        """There must be server data."""
        server.require_samples()

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Move the proposal towards what training on the server's samples makes of it."""
        turn.metrics |= {"feddu/alpha": 0.0, "feddu/tau_eff": 0.0}
        if self.tau_eff == 0:
            return state
        trained = turn.server.train({"model": turn.proposal, "buffers": turn.proposed_buffers})
        num_steps = trained.num_steps
        alpha = 1.0 if isinstance(self.tau_eff, str) else self.tau_eff / max(num_steps, 1)
        if alpha > 1:
            rank_zero_warn(
                f"tau_eff={self.tau_eff:g} is more than the {num_steps} steps that the server makes, so its update goes beyond "
                "what it trained."
            )
        turn.metrics |= {"feddu/alpha": alpha, "feddu/tau_eff": alpha * num_steps}
        turn.move(trained.message, alpha)
        return state
