"""Mean of the uploads of each of several models (IFCA; Ghosh et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge

from lightning_fl.slots import CHOSEN, Aggregator, Merging, Message, Upload, several_models
from lightning_fl.vectors.pieces import add_scaled, zeros_like
from lightning_fl.vectors.weighted_sums import add_weight, means, weight_of

COLUMN = "ifca/models"


@dataclass(frozen=True)
class MeanOfEach(Aggregator):
    """Σ_k n_k Δ_k / Σ_k n_k over the clients that have trained each model, and 0 for an untrained model; in float64.

    Reports `ifca/models`, the number of models that were trained in the round.

    Attributes:
        num_models: models C ≥ 1.
    """

    needs = uses = frozenset({CHOSEN})
    keeps_uploads = False
    num_models: Annotated[int, Ge(1)] = 2

    @property
    def provides(self) -> frozenset[str]:
        """The changes of the models besides the first."""
        return frozenset(several_models(self.num_models)[1:])

    def weighs_equally(self, name: str) -> bool:
        """False: its weights are the clients' numbers of samples."""
        return False

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Add n_k Δ_k to the sum and n_k to the weight of the model that the client has trained."""
        delta, weight = upload.message["model"], upload.result.weight
        chosen = int(upload.message[CHOSEN].long().argmax())
        names = several_models(self.num_models)
        for name in names:  # an untrained model has a sum, too
            add_weight(accumulator, weight_of(name), weight if name == names[chosen] else 0.0, delta.device)
            if name not in accumulator:
                accumulator[name] = zeros_like(delta, torch.float64)
        add_scaled(accumulator[names[chosen]], delta, weight)

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return sum / weight of each model, in the memory of the sums."""
        return means(accumulator)

    def combine(self, accumulator: dict[str, Any], merging: Merging) -> Message:
        """Return the means, and report the number of trained models."""
        weights = [accumulator[weight_of(name)] for name in several_models(self.num_models)]
        merging.metrics[COLUMN] = float(sum(bool(weight > 0) for weight in weights))
        return self.finish(accumulator)
