"""Yogi on the server (Zaheer et al., Adaptive Methods for Nonconvex Optimization, NeurIPS 2018; Reddi et al., Adaptive Federated
Optimization, ICLR 2021).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.errors import require
from lightning_fl.slots import ServerTurn, State, Step


@dataclass(frozen=True)
class Yogi(Step):
    """G = proposal − w;  m ← βm + (1 − β)G;  u ← u − (1 − β₂) G² sign(u − G²);  w ← w + η_g m / (√u + ε).

    m = 0 and u = ε² at the start. Buffers are left as proposed.

    Attributes:
        beta: β in [0, 1).
        second_beta: β₂ in [0, 1).
        learning_rate: η_g > 0, the server's learning rate. As a step is about η_g in every coordinate, it is far smaller than
            that of `Momentum`, for instance 0.01.
        epsilon: ε > 0.
    """

    beta: float = 0.9
    second_beta: float = 0.99
    learning_rate: float = 1.0
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        require(0 <= self.beta < 1, f"the server momentum beta must lie in [0, 1), got {self.beta}.")
        require(0 <= self.second_beta < 1, f"Yogi's second_beta must lie in [0, 1), got {self.second_beta}.")
        require(self.learning_rate > 0, f"the server learning rate must be positive, got {self.learning_rate}.")
        require(self.epsilon > 0, f"Yogi's epsilon must be positive, got {self.epsilon}.")

    def proposes(self) -> bool:
        """It follows the change of the steps before."""
        return False

    def init(self, params: Tensor) -> State:
        """m = 0, u = ε²."""
        return {"momentum": torch.zeros_like(params), "second": torch.full_like(params, self.epsilon**2)}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Replace the proposal by w + η_g m / (√u + ε)."""
        change = turn.proposal - turn.params
        momentum = self.beta * state["momentum"] + (1 - self.beta) * change
        square, second = change.square(), state["second"]
        second = second - (1 - self.second_beta) * square * torch.sign(second - square)
        turn.proposal = turn.params + self.learning_rate * momentum / (second.sqrt() + self.epsilon)
        return {"momentum": momentum, "second": second}
