"""The mean of the uploads, weighted by samples (FedAvg; McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from lightning_fl.slots import Aggregator, Message, Upload


@dataclass(frozen=True)
class WeightedMean(Aggregator):
    """Σ_k n_k Δ_k / Σ_k n_k for every vector of the uploads, accumulated in float64 and returned in the vector's dtype.

    Attributes:
        uniform: names averaged with equal weights (1/K) instead, for instance control variates.
    """

    reduction: ClassVar[Literal["sum", "members"]] = "sum"
    uniform: tuple[str, ...] = ()

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Sum += n_k Δ_k, weight += n_k."""
        for name, vector in upload.message.items():
            weight = 1.0 if name in self.uniform else upload.result.weight
            if name not in accumulator:
                accumulator[name] = [torch.zeros_like(vector, dtype=torch.float64), 0.0, vector.dtype]
            entry = accumulator[name]
            entry[0].add_(vector, alpha=weight)
            entry[1] += weight

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Sum / weight."""
        return {name: (total / weight).to(dtype) for name, (total, weight, dtype) in accumulator.items()}
