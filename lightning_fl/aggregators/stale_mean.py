"""Mean of uploads with weights that fall with staleness (FedBuff; Nguyen et al., AISTATS 2022. FedAsync; Xie et al., 2019).

Δ = α Σ_i a_i ρ(s_i) Δ_i / Σ_i a_i,  a_i = 1 or n_i
ρ(s) = (1 + s)^−decay;   constant: 1;   polynomial: (1 + s)^−½;   hinge: 1 if s ≤ 4, else 1 / (10 (s − 4) + 1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval

from lightning_fl.slots import Aggregator, Message, Upload
from lightning_fl.vectors.weighted_sums import add_weight, add_weighted, means, weight_of

Decay = Annotated[float, Ge(0)] | Literal["constant", "polynomial", "hinge"]
HINGE_SLOPE, HINGE_DELAY = 10, 4


@dataclass(frozen=True)
class StaleMean(Aggregator):
    """Mean of the uploads, each times ρ of its staleness, accumulated in float64. The divisor does not include ρ.

    In rounds that wait for their clients no upload is stale, and the result is the mean.

    Attributes:
        decay: exponent of 1/(1 + s), at least 0, or `constant`, `polynomial` (0.5) or `hinge`, which waits for four updates.
        weighting: a_i = 1 (`uniform`), or the client's number of `samples`.
        alpha: α in (0, 1], the factor of an upload that is not stale.
    """

    keeps_uploads = False
    sums_suffice = True
    uses = frozenset[str]()
    decay: Decay = 0.5
    weighting: Literal["uniform", "samples"] = "uniform"
    alpha: Annotated[float, Interval(gt=0, le=1)] = 1.0

    def factor(self, staleness: int) -> float:
        """Return α ρ of a staleness.

        >>> [StaleMean("hinge").factor(staleness) for staleness in (0, 4, 5)], StaleMean(alpha=0.5).factor(3)
        ([1.0, 1.0, 0.09090909090909091], 0.25)
        """
        if self.decay == "hinge":
            return self.alpha / (HINGE_SLOPE * max(0, staleness - HINGE_DELAY) + 1)
        exponent = {"constant": 0.0, "polynomial": 0.5}[self.decay] if isinstance(self.decay, str) else self.decay
        return self.alpha * (1 + staleness) ** -exponent

    def weighs_equally(self, name: str) -> bool:
        """True if the client's number of samples does not count."""
        return self.weighting == "uniform"

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Add a α ρ(s) Δ to the sum and a to the weight."""
        weight = 1.0 if self.weighting == "uniform" else upload.result.weight
        for name, vector in upload.message.items():
            add_weighted(accumulator, name, vector, weight * self.factor(upload.staleness))
            add_weight(accumulator, weight_of(name), weight, vector.device)

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return sum / weight, in the memory of the sums."""
        return means(accumulator)
