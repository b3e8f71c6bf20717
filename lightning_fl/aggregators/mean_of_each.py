"""Mean of the uploads of each of several models (IFCA; Ghosh et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge

from lightning_fl.slots import CHOSEN, Aggregator, Merging, Message, Upload, several_models
from lightning_fl.vectors.pieces import add_scaled, zeros_like

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
        for name in several_models(self.num_models):
            if name not in accumulator:
                accumulator[name] = zeros_like(delta, torch.float64)
                accumulator[_weight(name)] = torch.zeros(1, dtype=torch.float64, device=delta.device)
        name = several_models(self.num_models)[chosen]
        add_scaled(accumulator[name], delta, weight)
        accumulator[_weight(name)] += weight

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return sum / weight of each model, in the memory of the sums."""
        weights = {name: accumulator[_weight(name)] for name in several_models(self.num_models)}
        return {name: accumulator[name].div_(weight.masked_fill(weight == 0, 1)) for name, weight in weights.items()}

    def combine(self, accumulator: dict[str, Any], merging: Merging) -> Message:
        """Return the means, and report the number of trained models."""
        weights = [accumulator[_weight(name)] for name in several_models(self.num_models)]
        merging.metrics[COLUMN] = float(sum(bool(weight > 0) for weight in weights))
        return self.finish(accumulator)


def _weight(name: str) -> str:
    return f"weight of {name}"
