"""State that the server keeps from the clients' uploads, and sends down with the model.

- `ControlUpdate`: the server's control variate; SCAFFOLD: Karimireddy et al., ICML 2020.
- `GradientMomentum`: the server of Mime and MimeLite; Karimireddy et al., Breaking the Centralized Barrier for Cross-Device
  Federated Learning, 2021.
- `Moments`: the server's copies of Adam's moments; FedAdam, and FedAdam-SSM's section III-A.
- `SharedMomentum`: the momentum that server and clients share; FedDA: Jin et al., ICML 2022; MimeLite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.slots import MEAN_GRADIENT, Message, ServerTurn, State, Step
from lightning_fl.vectors.pieces import by_pieces, pieces, sum_of


@dataclass(frozen=True)
class SharedState(Step):
    """Keep vectors (d,) that start at 0 and go down with the model; the proposal stays as it is.

    A subclass lists them in `provides`, as `moments/NAME`, and returns their new values by NAME when it is called.
    """

    changes_model = False

    @property
    def uses(self) -> frozenset[str]:
        """The entries that it needs, without the model."""
        return self.needs

    def init(self, params: Tensor) -> State:
        """Return 0 for each vector."""
        return {name.removeprefix("moments/"): torch.zeros_like(params) for name in sorted(self.provides)}

    def share(self, state: State) -> Message:
        """Return the vectors."""
        return {f"moments/{name}": vector for name, vector in state.items()}


@dataclass(frozen=True)
class ControlUpdate(SharedState):
    """c ← c + (1/N) Σ_k (c_k⁺ − c_k) over the accepted clients; c goes down with the model, and c = 0 before the first round.

    N is the number of all clients that have samples, not of the cohort, so that c remains the mean of all c_k. The aggregator
    must average the changes with equal weights, as `WeightedMean()` does.
    """

    sums_suffice = True
    needs = provides = needs_equal_weights = frozenset({"moments/control"})

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Add the clients' changes to c."""
        share = len(turn.clients) / turn.context.num_clients

        def moved(control: Tensor, change: Tensor) -> Tensor:
            return control + share * change

        return {"control": by_pieces(moved, state["control"], turn.merged["moments/control"])}


@dataclass(frozen=True)
class GradientMomentum(SharedState):
    """m ← βm + (1 − β) Σ_k n_k ∇F_k(w) / Σ_k n_k;  m goes down with the model, and m = 0 before the first round.

    Attributes:
        beta: β in [0, 1).
    """

    sums_suffice = True
    changeable = frozenset({"beta"})
    needs = frozenset({MEAN_GRADIENT})
    provides = frozenset({"moments/momentum"})
    beta: Annotated[float, Interval(ge=0, lt=1), Called("the momentum beta")] = 0.9

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Update m with the mean gradient."""
        return {"momentum": by_pieces(self._next, state["momentum"], turn.merged[MEAN_GRADIENT])}

    def _next(self, momentum: Tensor, gradient: Tensor) -> Tensor:
        return self.beta * momentum + (1 - self.beta) * gradient


@dataclass(frozen=True)
class Moments(SharedState):
    """M ← M + ΔM;  V ← max(V + ΔV, 0); both are zero at first and go down with the model.

    V + ΔV is negative only by rounding; `moments/clamped` reports the number of such coordinates.
    """

    sums_suffice = True
    needs = provides = frozenset({"moments/first", "moments/second"})

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Add the merged changes."""
        second = sum_of(state["second"], turn.merged["moments/second"])
        turn.metrics["moments/clamped"] = sum(int((part < 0).sum()) for (part,) in pieces(second))
        return {"first": sum_of(state["first"], turn.merged["moments/first"]), "second": second.clamp_(min=0.0)}


@dataclass(frozen=True)
class SharedMomentum(SharedState):
    """m ← m + Σ_k n_k (v_k − m) / Σ_k n_k;  m goes down with the model, and m = 0 before the first round."""

    sums_suffice = True
    needs = provides = frozenset({"moments/momentum"})

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Add the clients' change of m."""
        return {"momentum": sum_of(state["momentum"], turn.merged["moments/momentum"])}
