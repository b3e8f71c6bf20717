"""FedProx's local rule (Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from lightning_fl.checks import Called
from lightning_fl.slots import LocalTraining, Rule
from lightning_fl.vectors.pieces import add_difference


@dataclass(frozen=True)
class Proximal(Rule):
    """Add μ(y − w) to the gradient, that is (μ/2)‖y − w‖² to the loss, before each step of the module's own optimiser.

    Attributes:
        mu: weight μ ≥ 0 of the proximal term; 0 is FedAvg. Default of the authors' code: 0.001.
    """

    changeable = frozenset({"mu"})
    mu: Annotated[float, Ge(0), Called("mu, the weight of FedProx's proximal term,")] = 0.001

    def correct(self, local: LocalTraining) -> None:
        """Add the proximal term: g ← g + μ(y − w)."""
        add_difference(local.gradient, local.params, local.received["model"], self.mu)
