"""Rule of a client's own model in APFL (Deng et al., Adaptive Personalized Federated Learning, 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fl.checks import check_between
from lightning_fl.slots import LocalTraining, Rule, State

SHARE = "companion/share/scalars"
"""Entry of a client's state: share α (1,) of its own model in what it predicts with."""


@dataclass(frozen=True)
class Mixed(Rule):
    """v ← v − ηα g(αv + (1 − α)y), with each step of y, from the same minibatch.

    Adaptive: after the first step of a round α ← clip(α − η⟨v − y, g(αv + (1 − α)y)⟩, 0, 1), with v, y and g as before that step.

    Attributes:
        alpha: first share α of v, in [0, 1].
        adaptive: let each client adapt its α.
    """

    changeable = frozenset({"adaptive"})
    own_step = True
    alongside = True
    alpha: float = 0.5
    adaptive: bool = True

    def __post_init__(self) -> None:
        check_between("alpha, the first share of a client's own model,", self.alpha, 0, 1, "[]")

    def init(self, params: Tensor) -> State:
        """Return the first share."""
        return {SHARE: params.new_full((1,), self.alpha)}

    def point(self, local: LocalTraining) -> Tensor:
        """Return the mixture αv + (1 − α)y."""
        return local.memory["beside"].lerp(local.params, local.state[SHARE])

    def step(self, local: LocalTraining) -> None:
        """Step v, and in the first step of a round α."""
        share, move = local.state[SHARE], local.gradient * local.learning_rate
        if self.adaptive and local.num_steps == 0:
            slope = (local.params - local.memory["beside"]) @ move
            local.state[SHARE] = (share - slope).clamp(0, 1)
        local.params.sub_(share * move)
