"""Upload nearest to the others, or the mean of several (Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017,
arXiv:1703.02757).

s_k = Σ ‖Δ_k − Δ_j‖² over the K − f − 2 nearest j ≠ k;   Krum: the Δ_k of least s_k;   Multi-Krum: the mean of the m of least s_k
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from lightning_fl.aggregators._robust import Robust, Rows
from lightning_fl.errors import require
from lightning_fl.slots import Message
from lightning_fl.vectors.order_statistics import krum_scores, squared_distances


@dataclass(frozen=True)
class MultiKrum(Robust):
    """Mean of the m uploads with the least sums of squared distances to their K − f − 2 nearest others; of equals the first.

    Needs K ≥ 2f + 3 uploads, of which f may be attackers'.

    Attributes:
        f: number of attackers to tolerate, at least 0.
        m: number of uploads to average, at least 1; None for all but f, K − f.
        by: distances between the models, or between `all` that clients send, side by side.
    """

    f: Annotated[int, Ge(0)] = 1
    m: Annotated[int, Ge(1)] | None = None
    by: Literal["model", "all"] = "model"

    @property
    def least_uploads(self) -> int:
        """Return the larger of 2f + 3 and m + f, of which m can be honest."""
        return max(2 * self.f + 3, (self.m or 1) + self.f)

    def check(self, cohort_size: int) -> None:
        """Raise `UserError` if a round has too few clients."""
        require(
            self.m is None or not cohort_size - self.f < self.m <= cohort_size,
            f"m={self.m} of {cohort_size} uploads include attackers' if f is {self.f}: give m of at most {cohort_size - self.f}.",
        )
        super().check(cohort_size)

    def merge(self, rows: Rows) -> tuple[Message, Tensor | None]:
        """Return the mean of the chosen uploads, and their shares."""
        scores = krum_scores(squared_distances(rows.measured(self.by)), self.f)
        chosen = scores.argsort(stable=True)[: len(rows) - self.f if self.m is None else self.m]
        shares = torch.zeros(len(rows), dtype=torch.float64, device=scores.device)
        shares[chosen] = 1 / len(chosen)
        return rows.mixed(shares), shares


@dataclass(frozen=True)
class Krum(MultiKrum):
    """The one upload with the least sum of squared distances to its K − f − 2 nearest others, as `MultiKrum` with m = 1."""

    m: int | None = 1
