"""Mean of deltas divided by the length of each client's training (FedNova; Wang et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fl.slots import Aggregator, Message, Upload, kind_of
from lightning_fl.vectors.pieces import empty_like, pieces

NORMALISER = "scalars/normaliser"


@dataclass(frozen=True)
class NormalisedMean(Aggregator):
    """τ_eff Σ_k p_k Δ_k/a_k for the model, p_k = n_k / Σ_j n_j; Σ_k p_k Δ_k for everything else; accumulated in float64.

    Attributes:
        effective: τ_eff is the mean of the a_k (`normaliser`) or of the clients' numbers of steps τ_k (`steps`), which the
            server can compute from n_k.
    """

    needs = uses = frozenset({NORMALISER})
    keeps_uploads = False
    sums_suffice = True  # a client divides by its a_k, and sends n_k a_k or n_k τ_k, itself
    effective: Literal["normaliser", "steps"] = "normaliser"

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Add n_k Δ_k/a_k to the sum, n_k to the weight, and n_k a_k or n_k τ_k to the length."""
        weight, normaliser = upload.result.weight, upload.message[NORMALISER].double()
        length = normaliser if self.effective == "normaliser" else torch.full_like(normaliser, upload.result.num_steps)
        _add(accumulator, "weight", torch.full_like(length, weight))
        _add(accumulator, "length", length, weight)
        for name, vector in upload.message.items():
            if kind_of(name) != "scalars":
                _add(accumulator, name, vector, weight / normaliser if name == "model" else weight)

    def weighs_equally(self, name: str) -> bool:
        """False: its weights are the clients' numbers of samples."""
        return False

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return sum / weight, for the model times τ_eff = length / weight, in the memory of the sums."""
        sums = dict(accumulator)
        weight, length = sums.pop("weight"), sums.pop("length")
        means = {name: total.div_(weight) for name, total in sums.items()}
        means["model"].mul_(length / weight)
        return means


def _add(accumulator: dict[str, Any], name: str, vector: Tensor, factor: Any = 1.0) -> None:
    """Add factor · vector (d,) to a sum in float64; the factor is a number or a tensor of one."""
    is_first = name not in accumulator
    if is_first:
        accumulator[name] = empty_like(vector, torch.float64)
    for total, piece in pieces(accumulator[name], vector):
        term = piece.double() * factor
        if is_first:
            total.copy_(term)
        else:
            total.add_(term)
