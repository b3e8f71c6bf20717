"""Majority vote of the clients' signs (signSGD with majority vote: Bernstein et al., ICML 2018).

    Δ = sgn(Σ_k w_k sgn(x̂_k))

Clients send signs with the uplink `OneBit("unit")`, one bit a number. A vote of ±1 for every number also fits one bit: with the
steps `Apply(η)` and `Compress(OneBit("l1", "global"))` and the downlink `Followed(OneBit("l1", "global"))`, the server's change
goes down as d + 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_fl.slots import Aggregator, Message, Upload
from lightning_fl.vectors.weighted_sums import add_weighted

WEIGHT, VOTERS = "weight", "voters"


@dataclass(frozen=True)
class MajorityVote(Aggregator):
    """Sign of Σ_k w_k sgn(x̂_k) for every number of the model, a tie being +1; Σ_k w_k x̂_k / Σ_k w_k for all other vectors.

    Every number moves by the server's learning rate, so give the step `Apply` a small one. An x̂_k of 0 is no vote. Without
    votes, for example under a pruning mask, the result is 0.

    Attributes:
        weighting: w_k = 1 (`uniform`, as in the paper), or the client's number of `samples`.
    """

    keeps_uploads = False
    needs = uses = frozenset({"model"})
    weighting: Literal["samples", "uniform"] = "uniform"

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Add the client's votes, the weights of its votes that are not 0, and its weighted other vectors."""
        votes = upload.message["model"].sign()
        weight = 1.0 if self.weighting == "uniform" else upload.result.weight
        terms = {**upload.message, "model": votes, VOTERS: votes.abs(), WEIGHT: torch.ones(1, device=votes.device)}
        for name, vector in terms.items():
            add_weighted(accumulator, name, vector, weight)

    def weighs_equally(self, name: str) -> bool:
        """True if every client has the same weight."""
        return self.weighting == "uniform"

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return the sign of the votes' sum, and the means of all other vectors."""
        sums = dict(accumulator)
        votes, voters, weight = sums.pop("model"), sums.pop(VOTERS).sign(), sums.pop(WEIGHT)
        return {"model": torch.where(votes < 0, -voters, voters)} | {name: x / weight for name, x in sums.items()}
