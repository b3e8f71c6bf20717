"""The server of Mime and MimeLite (Karimireddy et al., Breaking the Centralized Barrier for Cross-Device Federated Learning,
2021).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.errors import require
from lightning_fl.slots import MEAN_GRADIENT, Message, ServerTurn, State, Step


@dataclass(frozen=True)
class GradientMomentum(Step):
    """m ← βm + (1 − β) Σ_k n_k ∇F_k(w) / Σ_k n_k;  m goes down with the model, and m = 0 before the first round.

    Attributes:
        beta: β in [0, 1).
    """

    shares = frozenset({"moments/momentum"})
    consumes = frozenset({MEAN_GRADIENT})
    beta: float = 0.9

    def __post_init__(self) -> None:
        require(0 <= self.beta < 1, f"the momentum beta must lie in [0, 1), got {self.beta}.")

    def proposes(self) -> bool:
        """It keeps m."""
        return False

    def init(self, params: Tensor) -> State:
        """m = 0."""
        return {"momentum": torch.zeros_like(params)}

    def share(self, state: State) -> Message:
        """m."""
        return {"moments/momentum": state["momentum"]}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Take the mean gradient into m; the model is left as proposed."""
        return {"momentum": self.beta * state["momentum"] + (1 - self.beta) * turn.merged[MEAN_GRADIENT]}
