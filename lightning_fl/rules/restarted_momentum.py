"""Momentum on the client, restarted in every round (DeviceM; FedDUMAP: Liu et al., ACM TIST 2024, eq. 11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval

from lightning_fl.checks import Called
from lightning_fl.slots import LocalTraining, Rule


@dataclass(frozen=True)
class RestartedMomentum(Rule):
    """v ← βv + (1 − β)g;  y ← y − ηv;  v = 0 at the start of every round.

    Differs from `torch.optim.SGD(momentum=β, dampening=1 − β)`, whose first step sets v = g.

    Attributes:
        beta: β in [0, 1); 0 is plain SGD. The default is ours.
    """

    changeable = frozenset({"beta"})
    own_step = True
    beta: Annotated[float, Interval(ge=0, lt=1), Called("the client momentum")] = 0.9

    def start(self, local: LocalTraining) -> None:
        """Set v = 0."""
        local.memory["velocity"] = torch.zeros_like(local.params)

    def step(self, local: LocalTraining) -> None:
        """Take a step: v ← βv + (1 − β)g;  y ← y − ηv."""
        velocity = local.memory["velocity"].mul_(self.beta).add_(local.gradient, alpha=1 - self.beta)
        local.params.sub_(velocity * local.learning_rate)
