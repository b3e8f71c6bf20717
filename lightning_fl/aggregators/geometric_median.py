"""Geometric median of the uploads (RFA: Pillutla et al., Robust Aggregation for Federated Learning, IEEE TSP 2022).

    v ← Σ_k β_k Δ_k / Σ_k β_k,  β_k = α_k / max(ν, ‖v − Δ_k‖),  a few times (smoothed Weiszfeld algorithm)

The first v is the coordinate-wise median. From the mean, a few passes could not remove a single upload of size 10⁹.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from lightning_fl.aggregators._robust import Robust, Rows
from lightning_fl.slots import Message
from lightning_fl.vectors.order_statistics import middle


@dataclass(frozen=True)
class GeometricMedian(Robust):
    """Approximate geometric median of the uploads. Tolerates attackers with less than half of the weight.

    Attributes:
        iterations: passes of the Weiszfeld algorithm, at least 1.
        smoothing: ν > 0, the least distance that counts.
        weighting: α_k = 1 (`uniform`), or the client's claimed number of `samples`, as in the paper.
        by: distances between the models, or between `all` that clients send; the weights β_k hold for every vector.
    """

    iterations: Annotated[int, Ge(1)] = 4
    smoothing: Annotated[float, Gt(0)] = 1e-6
    weighting: Literal["uniform", "samples"] = "uniform"
    by: Literal["model", "all"] = "model"

    def weighs_equally(self, name: str) -> bool:
        """True if the client's number of samples does not count."""
        return self.weighting == "uniform"

    def merge(self, rows: Rows) -> tuple[Message, Tensor | None]:
        """Return the median, and β_k / Σβ."""
        points = rows.measured(self.by)
        weights = torch.ones_like(rows.weights) if self.weighting == "uniform" else rows.weights
        weights = weights.to(points.device)
        centre = middle(points)
        for _ in range(self.iterations):
            nearness = weights / torch.linalg.vector_norm(points - centre, dim=1).clamp(min=self.smoothing)
            shares = nearness / nearness.sum()
            centre = shares @ points
        return rows.mixed(shares), shares
