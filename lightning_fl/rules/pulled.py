"""Rule of a client's own model in Ditto (Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from lightning_fl.checks import Called
from lightning_fl.errors import require
from lightning_fl.slots import LocalTraining, RoundContext, Rule
from lightning_fl.vectors.pieces import add_difference


@dataclass(frozen=True)
class Pulled(Rule):
    """Train by the module's own optimiser, with a pull (λ/2)‖v − w‖² of v towards the received model w.

    explicit:  v ← v − η(g + λ(v − w)), which diverges for ηλ ≥ 2
    implicit:  v ← (v − ηg + ηλw)/(1 + ηλ), which is stable for every λ

    Attributes:
        strength: λ ≥ 0; 0 is local training alone.
        solver: `explicit`, as in the paper, or `implicit`.
    """

    changeable = frozenset({"strength", "solver"})
    strength: Annotated[float, Ge(0), Called("strength, the weight of the pull towards the server's model,")] = 1.0
    solver: Literal["explicit", "implicit"] = "explicit"

    def check(self, context: RoundContext) -> None:
        """Raise `UserError` if explicit steps diverge."""
        product = self.strength * context.learning_rate
        require(
            self.solver == "implicit" or product < 2,
            f"explicit steps towards the server's model diverge if learning rate times strength is 2 or more, got "
            f"{context.learning_rate:g} times {self.strength:g}: use a smaller one, or solver='implicit'.",
        )

    def correct(self, local: LocalTraining) -> None:
        """Add the pull of the explicit solver: g ← g + λ(v − w)."""
        if self.solver == "explicit" and self.strength:
            add_difference(local.gradient, local.params, local.received["model"], self.strength)

    def step(self, local: LocalTraining) -> None:
        """Take the optimiser's step, and that of the implicit solver: v ← (v + ηλw)/(1 + ηλ)."""
        local.optimizer_step()
        if self.solver == "implicit":
            pull = local.learning_rate * self.strength
            local.params.add_(pull * local.received["model"]).div_(1 + pull)
