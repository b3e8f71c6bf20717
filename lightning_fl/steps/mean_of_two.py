"""Evaluate the mean of the last two models (FedExP; Jhunjhunwala et al., ICLR 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fl.slots import PROPOSAL, ServerTurn, State, Step


@dataclass(frozen=True)
class MeanOfTwo(Step):
    """Keep the model before each round, and validate and test (x_t + x_{t−1})/2 instead of x_t.

    Clients receive x_t, and checkpoints hold it; the run's messages and bits do not change. Running statistics are those of x_t.
    """

    sums_suffice = True
    needs = uses = frozenset({PROPOSAL})
    changes_model = False

    def init(self, params: Tensor) -> State:
        """Return x_0 as the model before."""
        return {"previous": params}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Keep the model with which the round began; the proposal stays as it is."""
        return {"previous": turn.params}

    def evaluated(self, params: Tensor, state: State) -> Tensor:
        """Return the mean of the server's model and the one before."""
        return state["previous"].lerp(params, 0.5)
