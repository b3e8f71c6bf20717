"""Median of each coordinate (Yin et al., Byzantine-Robust Distributed Learning, ICML 2018, arXiv:1803.01498).

Δ_j = median over the clients of Δ_kj,  of an even number the mean of the two in the middle
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fl.aggregators._robust import Robust, Rows
from lightning_fl.slots import SENT, Message
from lightning_fl.vectors.order_statistics import middle, middle_shares


@dataclass(frozen=True)
class CoordinateMedian(Robust):
    """Median of every number of every vector, over the clients that sent it; 0 where none did.

    Of K clients, fewer than K/2 can be attackers: the median of each number then lies between two honest values.
    """

    uses = frozenset({SENT})
    is_median = True

    def merge(self, rows: Rows) -> tuple[Message, Tensor | None]:
        """Return the medians, and for each upload the share of the model's numbers of which it is the median."""
        merged = {name: middle(vectors, rows.sent.get(name)) for name, vectors in rows.vectors.items()}
        shares = middle_shares(rows.vectors[rows.main], rows.sent.get(rows.main)) if rows.has_adversary else None
        return merged, shares
