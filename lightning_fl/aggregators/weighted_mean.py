"""Mean of the uploads, weighted by samples (FedAvg; McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_fl.slots import Aggregator, Message, Upload
from lightning_fl.vectors.weighted_sums import add_weight, add_weighted, means, weight_of


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
            add_weighted(accumulator, name, vector, weight)
            add_weight(accumulator, weight_of(name), weight, vector.device)

    def weighs_equally(self, name: str) -> bool:
        """True for the names in `uniform`, or for all of them."""
        return self.weighting == "uniform" or name in self.uniform

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return sum / weight, in the memory of the sums."""
        return means(accumulator)
