"""The server's model with the lowest loss on a client's samples (IFCA; Ghosh et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from lightning_fl.slots import OwnSamples, Personal, several_models


@dataclass(frozen=True)
class BestOfModels(Personal):
    """Predict with whichever of the server's present models has the lowest loss on the client's training samples.

    Nothing is kept: a client chooses when it predicts. Of equal losses the first counts. Without a run there is only the first
    model, which it then uses.

    Attributes:
        models: models C ≥ 1 of the server.
    """

    adapts = True
    models: Annotated[int, Ge(1)] = 2

    def adapt(self, params: Tensor, own: OwnSamples) -> Tensor:
        """Return the parameters of the best model."""
        return self._present(params, own)[self._best(params, own)]

    def choice(self, params: Tensor, own: OwnSamples) -> int | None:
        """Return the number of the best model; None if a subclass makes another model of it."""
        return self._best(params, own) if type(self).adapt is BestOfModels.adapt else None

    def _best(self, params: Tensor, own: OwnSamples) -> int:
        return int(torch.stack([own.loss(model) for model in self._present(params, own)]).argmin())

    def _present(self, params: Tensor, own: OwnSamples) -> list[Tensor]:
        further = [own.shared[name] for name in several_models(self.models)[1:] if name in own.shared]
        return [params, *(model.to(params) for model in further)]
