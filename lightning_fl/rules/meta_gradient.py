"""Per-FedAvg's local rule (Fallah et al., Personalized Federated Learning, NeurIPS 2020), first-order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt
from lightning.pytorch.utilities.rank_zero import WarningCache

from lightning_fl.slots import LocalTraining, Message, Rule
from lightning_fl.vectors.pieces import subtract_scaled

WARNINGS = WarningCache()


@dataclass(frozen=True)
class MetaGradient(Rule):
    """ŷ = y − β∇f(y; minibatch 1);  y ← y − η∇f(ŷ; minibatch 2), the second step by the module's own optimiser;  sends y − w.

    Each pair of minibatches is a step of y, and counts as two optimiser steps. A single last minibatch is left out; a client
    with only one minibatch sends no change, with a warning. This is the first-order gradient: the exact one is (I −
    β∇²f(y))∇f(ŷ). Where a group has η = 0, or the optimiser lacks a parameter, ŷ is y. Both gradients are clipped if the
    trainer clips, and only the second includes weight decay.

    Attributes:
        beta: learning rate β > 0 of the step to ŷ.
    """

    changeable = frozenset({"beta"})
    beta: Annotated[float, Gt(0)] = 0.01

    def start(self, local: LocalTraining) -> None:
        """Begin with y = w."""
        local.memory["model"] = local.params.clone()

    def step(self, local: LocalTraining) -> None:
        """Step to ŷ, or step y by the gradient at ŷ."""
        model = local.memory["model"]
        if local.num_steps % 2 == 0:
            model.copy_(local.params)
            subtract_scaled(local.params, local.gradient, local.where_it_learns(self.beta))
        else:
            local.params.copy_(model)
            local.optimizer_step()

    def finish(self, local: LocalTraining) -> Message:
        """Return y − w."""
        if local.num_steps % 2:
            local.params.copy_(local.memory["model"])
        if local.num_steps == 1:
            WARNINGS.warn(
                "A client has read one minibatch in a round, and a step of MetaGradient takes two, so its upload changes "
                "nothing: more local_epochs, more local_steps or a smaller batch_size make two. This is said once."
            )
        return super().finish(local)
