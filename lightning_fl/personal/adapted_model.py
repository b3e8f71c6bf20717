"""The server's model after a gradient step on the client's samples (Per-FedAvg: Fallah et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt
from torch import Tensor

from lightning_fl.slots import OwnSamples, Personal


@dataclass(frozen=True)
class AdaptedModel(Personal):
    """Predict with w − β∇F_k(w; minibatch), w the server's present model, on the client's first minibatch in the stored order.

    Nothing is kept: a client takes the step when it predicts. It moves parameters that a pruning mask has set to 0, too, in the
    copy that the client predicts with.

    Attributes:
        beta: learning rate β > 0 of the step.
    """

    changeable = frozenset({"beta"})
    adapts = True
    beta: Annotated[float, Gt(0)] = 0.01

    def adapt(self, params: Tensor, own: OwnSamples) -> Tensor:
        """Take the step."""
        return params - self.beta * own.gradient(params)
