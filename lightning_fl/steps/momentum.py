"""Momentum on the server (ServerM; FedDUMAP: Liu et al., ACM TIST 2024, eq. 7-8; FedAvgM: Hsu et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_fl.errors import nearest, require
from lightning_fl.slots import ServerTurn, State, Step


@dataclass(frozen=True)
class Momentum(Step):
    """G = proposal − w;  m ← βm + (1 − β)G;  w ← w + η_g m.

    The paper's G has the opposite sign and is subtracted. Buffers are left as proposed.

    Attributes:
        beta: β in [0, 1); 0 with `learning_rate` 1 leaves the proposal as it is. Default of the paper's code: 0.9.
        learning_rate: η_g > 0, the server's learning rate.
        init_with: `zero` starts from m = 0, the formula to the letter; `first` from m = G of the first round, as the paper's
            code does, which applies that G about 1/(1 − β) times in all.
        dampening: False drops the factor (1 − β), as FedAvgM has it.
    """

    beta: float = 0.9
    learning_rate: float = 1.0
    init_with: Literal["zero", "first"] = "zero"
    dampening: bool = True

    def __post_init__(self) -> None:
        require(0 <= self.beta < 1, f"the server momentum beta must lie in [0, 1), got {self.beta}.")
        require(self.learning_rate > 0, f"the server learning rate must be positive, got {self.learning_rate}.")
        allowed = ("zero", "first")
        given = self.init_with
        require(
            given in allowed, f"the momentum starts from {given!r}, which is unknown; {nearest(str(given), allowed)}."
        )

    def proposes(self) -> bool:
        """It follows the change of the steps before."""
        return False

    def init(self, params: Tensor) -> State:
        """m = 0; with `first`, m is taken from the first round."""
        return {"momentum": torch.zeros_like(params)} if self.init_with == "zero" else {}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Replace the proposal by w + η_g m."""
        change = turn.proposal - turn.params
        if "momentum" in state:
            momentum = self.beta * state["momentum"] + (1 - self.beta if self.dampening else 1.0) * change
        else:
            momentum = change
        turn.proposal = turn.params + self.learning_rate * momentum
        return {"momentum": momentum}
