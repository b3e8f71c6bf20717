"""Mean of the uploads, extrapolated further the more they disagree (FedExP; Jhunjhunwala et al., ICLR 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Gt
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.errors import require
from lightning_fl.slots import Aggregator, Merging, Message, Upload, check_inner, forwards
from lightning_fl.vectors.pieces import pieces

SQUARES, WEIGHT = "squared norms", "weight of the squared norms"


@forwards("inner", "check in_common is_median keeps_uploads merges_none needs provides uses weighs_equally")
@dataclass(frozen=True)
class ExtrapolatedMean(Aggregator):
    """η_g Δ for the model,  η_g = max(1, Σ_k p_k‖Δ_k‖² / (2(‖Δ‖² + ε))),  Δ = Σ_k p_k Δ_k, the inner aggregator's mean.

    The norms are over all parameters, in float64. Everything else is the inner aggregator's. Memory does not grow with the
    cohort. Reports `fedexp/server_learning_rate`, which is η_g.

    Attributes:
        inner: aggregator that takes the mean, for instance `WeightedMean("uniform")`, whose weights p_k are 1/K.
        eps: ε > 0, which bounds η_g near the optimum, where the mean of the deltas vanishes but the deltas do not.
    """

    is_mean = sums_suffice = False
    inner: Aggregator
    eps: Annotated[float, Gt(0), Called("eps, which bounds FedExP's server learning rate,")] = 1e-3

    def __post_init__(self) -> None:
        check_inner(self, "inner", Aggregator, "WeightedMean()")
        require(
            self.inner.is_mean, f"ExtrapolatedMean extrapolates a mean, got inner={self.inner!r}: use WeightedMean()."
        )

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Add the upload to the mean, and n_k‖Δ_k‖² and n_k to their sums, n_k being 1 with equal weights."""
        self.inner.add(accumulator, upload)
        square = _squared_norm(upload.message["model"])
        weight = 1.0 if self.weighs_equally("model") else upload.result.weight
        accumulator[SQUARES] = accumulator.get(SQUARES, torch.zeros_like(square)) + weight * square
        accumulator[WEIGHT] = accumulator.get(WEIGHT, torch.zeros_like(square)) + weight

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return the mean, that of the model times η_g."""
        return self._extrapolated(self.inner.finish(_without_norms(accumulator)), accumulator)[0]

    def combine(self, accumulator: dict[str, Any], merging: Merging) -> Message:
        """Return the same, and report η_g."""
        message = self.inner.combine(_without_norms(accumulator), merging)
        message, rate = self._extrapolated(message, accumulator)
        merging.metrics["fedexp/server_learning_rate"] = float(rate)
        return message

    def _extrapolated(self, message: Message, accumulator: dict[str, Any]) -> tuple[Message, Tensor]:
        squares = accumulator[SQUARES] / accumulator[WEIGHT]
        rate = (squares / (2 * (_squared_norm(message["model"]) + self.eps))).clamp(min=1.0)
        message["model"].mul_(rate)
        return message, rate


def _without_norms(accumulator: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in accumulator.items() if name not in (SQUARES, WEIGHT)}


def _squared_norm(vector: Tensor) -> Tensor:
    """Return ‖Δ‖² (1,) of a vector (d,) in float64."""
    return torch.stack([part.double().square().sum() for (part,) in pieces(vector)]).sum(0, keepdim=True)
