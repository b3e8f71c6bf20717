"""Mean of the uploads, weighted by samples (FedAvg; McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_fl.slots import Aggregator, Message, Upload
from lightning_fl.vectors.pieces import add_scaled, zeros_like


@dataclass(frozen=True)
class WeightedMean(Aggregator):
    """Σ_k n_k Δ_k / Σ_k n_k for every vector of the uploads, accumulated in float64.

    Attributes:
        weighting: weights by `samples`, or equal weights (`uniform`), Σ_k Δ_k / K.
        uniform: names that are always averaged with equal weights (1/K), as control variates should be, because the server's
            is the mean of the clients'.
    """

    keeps_uploads = False
    is_mean = sums_suffice = True
    uses = frozenset[str]()
    weighting: Literal["samples", "uniform"] = "samples"
    uniform: tuple[str, ...] = ("moments/control",)

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Add n_k Δ_k to the sum and n_k to the weight."""
        for name, vector in upload.message.items():
            weight = 1.0 if self.weighs_equally(name) else upload.result.weight
            if name not in accumulator:
                accumulator[name] = zeros_like(vector, torch.float64)
                accumulator[_weight(name)] = torch.zeros(1, dtype=torch.float64, device=vector.device)
            add_scaled(accumulator[name], vector, weight)
            accumulator[_weight(name)] += weight

    def weighs_equally(self, name: str) -> bool:
        """True for the names in `uniform`, or for all of them."""
        return self.weighting == "uniform" or name in self.uniform

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return sum / weight, in the memory of the sums."""
        names = [name for name in accumulator if _weight(name) in accumulator]
        return {name: accumulator[name].div_(accumulator[_weight(name)]) for name in names}


def _weight(name: str) -> str:
    return f"weight of {name}"
