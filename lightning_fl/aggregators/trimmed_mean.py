"""Mean of each coordinate without its extremes (Yin et al., Byzantine-Robust Distributed Learning, ICML 2018, arXiv:1803.01498).

Δ_j = mean of the Δ_kj without the b largest and the b smallest
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Annotated

import torch
from annotated_types import Ge, Interval
from torch import Tensor

from lightning_fl.aggregators._robust import Robust, Rows
from lightning_fl.checks import Called, is_whole
from lightning_fl.errors import require
from lightning_fl.slots import SENT, Message
from lightning_fl.vectors.order_statistics import trimmed, trimmed_shares


@dataclass(frozen=True)
class TrimmedMean(Robust):
    """Mean of every number without its b largest and b smallest values, over the K clients that sent it; 0 if nothing is left.

    Tolerates b attackers.

    Attributes:
        trim: b, a count, or a share in [0, 1/2) of these clients: b = ⌈trim · K⌉, or less where this would leave none.
    """

    uses = frozenset({SENT})
    trim: (
        Annotated[int, Ge(0), Called("trim as a count")]
        | Annotated[float, Interval(ge=0, lt=0.5), Called("trim as a share")]
    ) = 0.1

    @property
    def least_uploads(self) -> int:
        """Return 2b + 1 for a count; 3 for a share, which leaves one of three."""
        if is_whole(self.trim):
            return 2 * int(self.trim) + 1
        return 3 if self.trim else 1

    def check(self, cohort_size: int) -> None:
        """Raise `UserError` if nothing would be left of a round's uploads."""
        super().check(cohort_size)
        require(
            2 * self._count(cohort_size) < cohort_size,
            f"trim {self.trim} leaves out {self._count(cohort_size)} of {cohort_size} uploads at each end, so that none is left: "
            "decrease it, or increase clients_per_round.",
        )

    def merge(self, rows: Rows) -> tuple[Message, Tensor | None]:
        """Return the means, and the mean share of each upload in a number of the model."""
        merged = {name: trimmed(vectors, self._counts, rows.sent.get(name)) for name, vectors in rows.vectors.items()}
        if not rows.has_adversary:
            return merged, None
        return merged, trimmed_shares(rows.vectors[rows.main], self._counts, rows.sent.get(rows.main))

    def _counts(self, num_uploads: Tensor) -> Tensor:
        """Return b for numbers that so many clients have sent (n,)."""
        if is_whole(self.trim):
            return torch.full_like(num_uploads, int(self.trim))
        counts = [min(self._count(number), max(0, number - 1) // 2) for number in range(int(num_uploads.max()) + 1)]
        return torch.tensor(counts, device=num_uploads.device)[num_uploads]

    def _count(self, num_uploads: int) -> int:
        """Return b for so many uploads."""
        return int(self.trim) if is_whole(self.trim) else ceil(self.trim * num_uploads - 1e-9)
