"""The momentum that server and clients share (FedDA: Jin et al., ICML 2022; MimeLite: Karimireddy et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.slots import Message, ServerTurn, State, Step


@dataclass(frozen=True)
class SharedMomentum(Step):
    """m ← m + Σ_k n_k (v_k − m) / Σ_k n_k;  m goes down with the model, and m = 0 before the first round."""

    shares = frozenset({"moments/momentum"})
    consumes = frozenset({"moments/momentum"})

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
        """Take the clients' change of m; the model is left as proposed."""
        return {"momentum": state["momentum"] + turn.merged["moments/momentum"]}
