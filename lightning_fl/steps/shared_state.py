"""State that the server keeps from the clients' uploads, and sends down with the model.

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

from lightning_fl.checks import check_between
from lightning_fl.slots import MEAN_GRADIENT, Message, ServerTurn, State, Step


@dataclass(frozen=True)
class ControlUpdate(Step):
    """c ← c + (1/N) Σ_k (c_k⁺ − c_k) over the accepted clients; c goes down with the model, and c = 0 before the first round.

    N is the number of all clients, not of the cohort, so that c remains the mean of all c_k. The aggregator must average the
    changes with equal weights, as `WeightedMean()` does.
    """

    shares = frozenset({"moments/control"})
    consumes = frozenset({"moments/control"})

    def changes_model(self) -> bool:
        """False: it keeps c."""
        return False

    def init(self, params: Tensor) -> State:
        """Return c = 0."""
        return {"control": torch.zeros_like(params)}

    def share(self, state: State) -> Message:
        """Return c."""
        return {"moments/control": state["control"]}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Add the clients' changes to c; the proposal stays as it is."""
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
        check_between("the momentum beta", self.beta, 0, 1, "[)")

    def changes_model(self) -> bool:
        """False: it keeps m."""
        return False

    def init(self, params: Tensor) -> State:
        """Return m = 0."""
        return {"momentum": torch.zeros_like(params)}

    def share(self, state: State) -> Message:
        """Return m."""
        return {"moments/momentum": state["momentum"]}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Update m with the mean gradient; the proposal stays as it is."""
        return {"momentum": self.beta * state["momentum"] + (1 - self.beta) * turn.merged[MEAN_GRADIENT]}


@dataclass(frozen=True)
class Moments(Step):
    """M ← M + ΔM;  V ← max(V + ΔV, 0); both are zero at first and go down with the model.

    V + ΔV is negative only by rounding; `moments/clamped` reports the number of such coordinates.
    """

    shares = frozenset({"moments/first", "moments/second"})
    consumes = frozenset({"moments/first", "moments/second"})

    def changes_model(self) -> bool:
        """False: it keeps M and V."""
        return False

    def init(self, params: Tensor) -> State:
        """Return M = V = 0."""
        return {"first": torch.zeros_like(params), "second": torch.zeros_like(params)}

    def share(self, state: State) -> Message:
        """Return M and V."""
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
        """False: it keeps m."""
        return False

    def init(self, params: Tensor) -> State:
        """Return m = 0."""
        return {"momentum": torch.zeros_like(params)}

    def share(self, state: State) -> Message:
        """Return m."""
        return {"moments/momentum": state["momentum"]}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Add the clients' change of m; the proposal stays as it is."""
        return {"momentum": state["momentum"] + turn.merged["moments/momentum"]}
