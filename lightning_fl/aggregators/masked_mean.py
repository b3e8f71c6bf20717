"""Mean over the clients that sent a coordinate (FedLDF; Wang et al., IEEE Communications Letters 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightning_fl.slots import SENT, Aggregator, Message, Upload
from lightning_fl.vectors.pieces import add_scaled, zeros_like
from lightning_fl.vectors.weighted_sums import means, weight_of


@dataclass(frozen=True)
class MaskedMean(Aggregator):
    """Σ_k s_k n_k Δ_k / Σ_k s_k n_k for every coordinate, s_k = 1 if client k sent it, else 0; accumulated in float64.

    A coordinate that no client sent gets 0: the server keeps its value. If all clients send everything, this is `WeightedMean`,
    which divides by the weights of all clients, even of those that sent nothing. The exchange defines s_k (`Upload.sent`): a
    number that a codec such as `TopK` left out counts as no change, as in every mean. Two vectors are kept for any number of
    clients.
    """

    keeps_uploads = False
    sums_suffice = True
    uses = frozenset({SENT})

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Add s_k n_k Δ_k to the sum and s_k n_k to the weight; an upload is 0 where nothing was sent."""
        for name, vector in upload.message.items():
            if name not in accumulator:
                accumulator[name] = zeros_like(vector, torch.float64)
                accumulator[weight_of(name)] = zeros_like(accumulator[name])
            sent = upload.sent.get(name)
            if sent is None:
                add_scaled(accumulator[name], vector, upload.result.weight)
                accumulator[weight_of(name)] += upload.result.weight
            elif sent.any():
                add_scaled(accumulator[name], vector, upload.result.weight)
                add_scaled(accumulator[weight_of(name)], sent, upload.result.weight)

    def weighs_equally(self, name: str) -> bool:
        """False: its weights are the clients' numbers of samples."""
        return False

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return sum / weight, and 0 where the weight is 0, in the memory of the sums."""
        return means(accumulator)
