"""The mean of the uploads, weighted by samples (FedAvg; McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightning_fl.slots import Aggregator, Message, Upload


@dataclass(frozen=True)
class WeightedMean(Aggregator):
    """Σ_k n_k Δ_k / Σ_k n_k for every vector of the uploads, accumulated in float64.

    Attributes:
        uniform: names averaged with equal weights (1/K) instead; control variates always should be, because the server's is
            the mean of the clients'.
    """

    reduction = "sum"
    uniform: tuple[str, ...] = ("moments/control",)

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Sum += n_k Δ_k, weight += n_k."""
        for name, vector in upload.message.items():
            weight = 1.0 if name in self.uniform else upload.result.weight
            if name not in accumulator:
                accumulator[name] = torch.zeros_like(vector, dtype=torch.float64)
                accumulator[_weight(name)] = torch.zeros(1, dtype=torch.float64, device=vector.device)
            accumulator[name].add_(vector, alpha=weight)
            accumulator[_weight(name)] += weight

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Sum / weight."""
        names = [name for name in accumulator if _weight(name) in accumulator]
        return {name: accumulator[name] / accumulator[_weight(name)] for name in names}


def _weight(name: str) -> str:
    return f"weight of {name}"
