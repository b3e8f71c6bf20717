"""Several of Krum's choices, trimmed coordinate by coordinate (El Mhamdi et al., The Hidden Vulnerability of Distributed Learning
in Byzantium, ICML 2018, arXiv:1802.07927).

    choose θ = K − 2f uploads, each by Krum among those that are left
    Δ_j = mean of the θ − 2f chosen Δ_kj nearest to their median
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from torch import Tensor

from lightning_fl.aggregators._robust import Robust, Rows
from lightning_fl.slots import Message
from lightning_fl.vectors.order_statistics import krum_scores, nearest_shares, nearest_to_middle, squared_distances


@dataclass(frozen=True)
class Bulyan(Robust):
    """For every number, mean of the values nearest to the median, over uploads that Krum has chosen one after the other.

    Needs K ≥ 4f + 3 uploads, of which f may be attackers'.

    Attributes:
        f: number of attackers to tolerate, at least 0.
        by: Krum's distances between the models, or between `all` that clients send, side by side.
    """

    f: Annotated[int, Ge(0)] = 1
    by: Literal["model", "all"] = "model"

    @property
    def least_uploads(self) -> int:
        """Return 4f + 3."""
        return 4 * self.f + 3

    def merge(self, rows: Rows) -> tuple[Message, Tensor | None]:
        """Return the means, and the mean share of each upload in a number of the model."""
        distances = squared_distances(rows.measured(self.by))
        left, chosen = list(range(len(rows))), list[int]()
        while len(chosen) < len(rows) - 2 * self.f:
            scores = krum_scores(distances[left][:, left], self.f) if len(left) > 1 else distances.new_zeros(1)
            chosen.append(left.pop(int(scores.argmin())))
        chosen.sort()
        count = len(chosen) - 2 * self.f
        merged = {name: nearest_to_middle(vectors[chosen], count) for name, vectors in rows.vectors.items()}
        if not rows.has_adversary:
            return merged, None
        shares = distances.new_zeros(len(rows))
        shares[chosen] = nearest_shares(rows.vectors[rows.main][chosen], count)
        return merged, shares
