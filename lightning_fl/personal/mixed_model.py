"""A client's own model that is mixed with the server's: APFL (Deng et al., Adaptive Personalized Federated Learning, 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.slots import Gradients, OwnModel, OwnTraining, Personal, State

SHARE = "share/scalars"
"""Entry with the share α (1,) of the client's own model in what it predicts with."""


@dataclass(frozen=True)
class MixedModel(Personal):
    """v ← v − ηα g(αv + (1 − α)y), with each step of the client's model y, from the same minibatch; predicts with αv + (1 − α)w.

    Adaptive: after the first step of a round α ← clip(α − η⟨v − y, g(αv + (1 − α)y)⟩, 0, 1), with v, y and g as before that step.

    Attributes:
        alpha: first share α of v, in [0, 1].
        adaptive: let each client adapt its α.
    """

    changeable = frozenset({"adaptive"})
    keeps_model = True
    num_models = 2
    reads = Gradients.MINIBATCH
    own_step = True
    steps_beside = True
    alpha: Annotated[float, Interval(ge=0, le=1), Called("alpha, the first share of a client's own model,")] = 0.5
    adaptive: bool = True

    def init(self, received: Tensor) -> State:
        """Return the first share."""
        return {SHARE: received.new_full((1,), self.alpha)}

    def beside(self, training: OwnTraining) -> None:
        """Step v, and in the first step of a round α."""
        local, own = training.local, training.own
        share = own.state[SHARE]
        move = training.gradient(local.params.lerp(own.params, share)) * local.learning_rate
        if self.adaptive and local.num_steps == 0:
            slope = (own.params - local.params) @ move
            own.state[SHARE] = (share - slope).clamp(0, 1)
        own.params.sub_(share * move)

    def prediction(self, own: OwnModel, params: Tensor) -> Tensor:
        """Return αv + (1 − α)w."""
        return params.lerp(own.params.to(params), own.state[SHARE].to(params))
