"""Local rule of pFedMe (Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from lightning_fl.checks import Called
from lightning_fl.errors import require
from lightning_fl.slots import LocalTraining, Message, RoundContext, Rule


@dataclass(frozen=True)
class MoreauEnvelope(Rule):
    """θ ← θ − α(g(θ) + λ(θ − u)), K times on each minibatch, then u ← u − ηλ(u − θ);  sends u − w.

    The module trains θ; both begin a round at w. η is the learning rate of the module's optimiser. Where a group has η = 0, or
    the optimiser lacks a parameter, θ stays too.

    Attributes:
        strength: λ > 0, with ηλ ≤ 1.
        inner_steps: steps K ≥ 1 of θ on each minibatch.
        inner_learning_rate: α > 0.
    """

    changeable = frozenset({"strength", "inner_steps", "inner_learning_rate"})
    own_step = True
    strength: Annotated[
        float, Gt(0), Called("strength, the weight of the pull towards the client's copy of the server's model,")
    ] = 15.0
    inner_steps: Annotated[int, Ge(1)] = 5
    inner_learning_rate: Annotated[float, Gt(0)] = 0.01

    @property
    def repeats(self) -> int:
        """Steps on each minibatch, K."""
        return self.inner_steps

    def check(self, context: RoundContext) -> None:
        """Raise `UserError` if a step of u goes beyond θ."""
        require(
            context.learning_rate * self.strength <= 1,
            f"a client's copy of the server's model would step beyond its own model if learning rate times strength is above 1, "
            f"got {context.learning_rate:g} times {self.strength:g}: use a smaller one.",
        )

    def start(self, local: LocalTraining) -> None:
        """Begin with u = θ = w."""
        local.memory["copy"] = local.params.clone()

    def correct(self, local: LocalTraining) -> None:
        """Add the pull: g ← g + λ(θ − u)."""
        local.gradient.add_(local.params - local.memory["copy"], alpha=self.strength)

    def step(self, local: LocalTraining) -> None:
        """Step θ, and u after the last step on a minibatch."""
        local.params.sub_(local.where_it_learns(self.inner_learning_rate) * local.gradient)
        if (local.num_steps + 1) % self.inner_steps == 0:
            copy = local.memory["copy"]
            copy.sub_(local.learning_rate * self.strength * (copy - local.params))

    def finish(self, local: LocalTraining) -> Message:
        """Return u − w."""
        return {"model": local.memory["copy"] - local.received["model"]}
