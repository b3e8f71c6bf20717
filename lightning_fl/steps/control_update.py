"""The server's control variate (SCAFFOLD; Karimireddy et al., ICML 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.slots import Message, ServerTurn, State, Step


@dataclass(frozen=True)
class ControlUpdate(Step):
    """c ← c + (1/N) Σ_k (c_k⁺ − c_k) over the accepted clients; c goes down with the model, and c = 0 before the first round.

    N is the number of all clients, not of the cohort's, so that c remains the mean of all c_k. The aggregator gives the mean of
    the changes with equal weights, as `WeightedMean()` does.
    """

    shares = frozenset({"moments/control"})
    consumes = frozenset({"moments/control"})

    def proposes(self) -> bool:
        """It keeps c."""
        return False

    def init(self, params: Tensor) -> State:
        """c = 0."""
        return {"control": torch.zeros_like(params)}

    def share(self, state: State) -> Message:
        """c."""
        return {"moments/control": state["control"]}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Take the clients' changes; the model is left as proposed."""
        share = len(turn.clients) / turn.setting.num_clients
        return {"control": state["control"] + share * turn.merged["moments/control"]}
