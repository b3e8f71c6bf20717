"""The server's copies of Adam's moments (FedAdam; FedAdam-SSM's section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.slots import Message, ServerTurn, State, Step


@dataclass(frozen=True)
class Moments(Step):
    """M ← M + ΔM;  V ← max(V + ΔV, 0); both are zero at first and go down with the model.

    V cannot become negative but by rounding; how many coordinates would have is logged as `moments/clamped`.
    """

    shares = frozenset({"moments/first", "moments/second"})
    consumes = frozenset({"moments/first", "moments/second"})

    def proposes(self) -> bool:
        """It keeps M and V."""
        return False

    def init(self, params: Tensor) -> State:
        """M = V = 0."""
        return {"first": torch.zeros_like(params), "second": torch.zeros_like(params)}

    def share(self, state: State) -> Message:
        """M and V."""
        return {"moments/first": state["first"], "moments/second": state["second"]}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Add the merged changes; the proposal stays as it is."""
        second = state["second"] + turn.merged["moments/second"]
        turn.metrics["moments/clamped"] = int((second < 0).sum())
        return {"first": state["first"] + turn.merged["moments/first"], "second": second.clamp_(min=0.0)}
