"""IFCA's local rule (Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge

from lightning_fl.errors import require
from lightning_fl.slots import CHOSEN, LocalTraining, Message, RoundContext, Rule, several_models
from lightning_fl.vectors.pieces import difference


@dataclass(frozen=True)
class BestModel(Rule):
    """j = argmin_j F_k(w_j), y ← w_j, then y ← y − η g by the module's own optimiser;  sends y − w_j, and j as a mask of C bits.

    F_k is the mean loss on all of the client's samples, in evaluation mode; of equal losses the first counts.

    Attributes:
        num_models: models C ≥ 1 that a client receives.
    """

    num_models: Annotated[int, Ge(1)] = 2

    @property
    def num_losses(self) -> int:  # type: ignore[override]
        """The losses of all models."""
        return self.num_models

    @property
    def needs(self) -> frozenset[str]:
        """The models besides the first."""
        return frozenset(several_models(self.num_models)[1:])

    @property
    def provides(self) -> frozenset[str]:
        """The mask that tells which model a client has trained."""
        return frozenset({CHOSEN})

    def check(self, context: RoundContext) -> None:
        """Raise `UserError` if the module has float buffers, of which there would be one set for all models."""
        require(
            not context.buffer_layout.names,
            f"the clients of {self.num_models} models would average buffers such as "
            f"{''.join(context.buffer_layout.names[:1])!r} of all models together: use a network without them, with GroupNorm "
            "in place of BatchNorm.",
        )

    def start(self, local: LocalTraining) -> None:
        """Begin with the model of the least loss."""
        models = [local.received[name] for name in several_models(self.num_models)]
        losses = torch.stack([local.full_loss(model) for model in models])
        best = int(losses.argmin())
        local.memory["best"] = torch.arange(self.num_models) == best
        local.params.copy_(models[best])

    def finish(self, local: LocalTraining) -> Message:
        """Return y − w_j and the mask."""
        chosen = local.memory["best"]
        model = local.received[several_models(self.num_models)[int(chosen.long().argmax())]]
        return {"model": difference(local.params, model), CHOSEN: chosen.to(local.params.device)}
