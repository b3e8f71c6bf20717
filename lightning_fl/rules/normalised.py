"""FedNova's local rule (Wang et al., Tackling the Objective Inconsistency Problem, NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.errors import require
from lightning_fl.slots import LocalTraining, Message, RoundContext, Rule
from lightning_fl.vectors.pieces import add_difference

NORMALISER = "scalars/normaliser"


@dataclass(frozen=True)
class Normalised(Rule):
    """Train with the module's own optimiser, and send y − w and a_k, the total length of the steps in units of η.

    a_k is the distance of y from w, in units of η, if every gradient were 1:

        v ← ρv + 1 − ημ a;  a ← a + v

    τ_k for plain SGD, [τ_k − ρ(1 − ρ^τ_k)/(1 − ρ)]/(1 − ρ) with heavy-ball momentum ρ, a ← (1 − ημ)a + 1 with the proximal term.
    ρ is that of the module's `torch.optim.SGD`; with any other optimiser, such as Adam, a_k counts the steps. Schedules inside a
    round do not change a_k where μ = 0: y − w includes the learning rates, and equal schedules cancel.

    A client whose a_k is not positive, because it made no step or ημ is far too large, sends NaN: its upload is rejected.

    Attributes:
        mu: μ ≥ 0, adds μ(y − w) to the gradient as FedProx does. If parameters have different learning rates, a_k uses the
            largest.
    """

    changeable = frozenset({"mu"})
    provides = frozenset({NORMALISER})
    mu: Annotated[float, Ge(0), Called("mu, the weight of the proximal term,")] = 0.0

    def check(self, context: RoundContext) -> None:
        """Raise `UserError` if a_k is not known for the module's momentum."""
        require(
            context.momentum is not None,
            "FedNova's normaliser is known for torch.optim.SGD with one momentum, without dampening and nesterov; the "
            "module's SGD has dampening, nesterov, parameter groups of different momentum, or a scheduler that moves it "
            "(cycle_momentum=False keeps it).",
        )

    def start(self, local: LocalTraining) -> None:
        """Set v = a = 0; the clients of a stack step together, so they share v and a."""
        local.memory["velocity"] = local.memory["normaliser"] = torch.zeros(1, dtype=torch.float64)

    def correct(self, local: LocalTraining) -> None:
        """Add the proximal term: g ← g + μ(y − w)."""
        if self.mu:
            add_difference(local.gradient, local.params, local.received["model"], self.mu)

    def step(self, local: LocalTraining) -> None:
        """Take the optimiser's step, and add its length to a."""
        local.optimizer_step()
        pull = 0.0
        if self.mu:
            rate = local.learning_rate
            pull = self.mu * float(rate.max() if isinstance(rate, Tensor) else rate)
        velocity, normaliser = local.memory["velocity"], local.memory["normaliser"]
        velocity = (local.context.momentum or 0.0) * velocity + 1 - pull * normaliser
        local.memory |= {"velocity": velocity, "normaliser": normaliser + velocity}

    def finish(self, local: LocalTraining) -> Message:
        """Return y − w and a_k (1,), which has at least 32 bits, enough for a count of steps."""
        normaliser = local.memory["normaliser"]
        normaliser = torch.where(normaliser > 0, normaliser, nan)
        normaliser = normaliser.to(local.params.device, torch.promote_types(local.params.dtype, torch.float32))
        return {**super().finish(local), NORMALISER: normaliser.expand(*local.params.shape[:-1], 1)}
