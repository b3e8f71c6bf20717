"""State that the server keeps from what clients send, and sends down with the model.

- `ControlUpdate`: the server's control variate; SCAFFOLD: Karimireddy et al., ICML 2020.
- `GradientMomentum`: the server of Mime and MimeLite; Karimireddy et al., Breaking the Centralized Barrier for Cross-Device
  Federated Learning, 2021.
- `Moments`: the server's copies of Adam's moments; FedAdam, and FedAdam-SSM's section 2.
- `SharedMomentum`: the momentum that server and clients share; FedDA: Jin et al., ICML 2022; MimeLite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.errors import require
from lightning_fl.slots import MEAN_GRADIENT, Message, ServerTurn, State, Step


@dataclass(frozen=True)
class ControlUpdate(Step):
    """c ← c + (1/N) Σ_k (c_k⁺ − c_k) over the accepted clients; c goes down with the model, and c = 0 before the first round.

    N is the number of all clients, not of the cohort's, so that c remains the mean of all c_k. The aggregator gives the mean of
    the changes with equal weights, as `WeightedMean()` does.
    """

    shares = frozenset({"moments/control"})
    consumes = frozenset({"moments/control"})

    def changes_model(self) -> bool:
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

    def changes_model(self) -> bool:
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


@dataclass(frozen=True)
class Moments(Step):
    """M ← M + ΔM;  V ← max(V + ΔV, 0); both are zero at first and go down with the model.

    V cannot become negative but by rounding; how many coordinates would have is logged as `moments/clamped`.
    """

    shares = frozenset({"moments/first", "moments/second"})
    consumes = frozenset({"moments/first", "moments/second"})

    def changes_model(self) -> bool:
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


@dataclass(frozen=True)
class SharedMomentum(Step):
    """m ← m + Σ_k n_k (v_k − m) / Σ_k n_k;  m goes down with the model, and m = 0 before the first round."""

    shares = frozenset({"moments/momentum"})
    consumes = frozenset({"moments/momentum"})

    def changes_model(self) -> bool:
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
