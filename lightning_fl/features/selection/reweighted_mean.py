"""Mean of uploads that count by weights of the selection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fl.slots import Aggregator, Merging, Message, Upload, kind_of
from lightning_fl.vectors.weighted_sums import add_weight, add_weighted, weight_of

SAMPLES, CLIENTS = "samples of all", "clients of all"
"""Sums of the weights of all clients that have trained, also of those that send nothing, by their samples and alike."""


@dataclass(frozen=True)
class ReweightedMean(Aggregator):
    """Σ_k f_k w_k x_k / Σ_k f_k w_k over the clients that send, or Σ_k f_k w_k x_k / Σ_j w_j over all that have trained.

    w_k is the weight of the method's aggregator. Buffers are always divided by the weights that came, since a variance could
    become negative otherwise.

    Attributes:
        given: the method's aggregator, a mean.
        factors: f_k of each client that does not count once; may be filled as long as uploads come.
        device: device of the vectors.
        counts_alike: w_k = 1 for all entries.
        of_all: divide by the weights of all clients that have trained.
    """

    keeps_uploads = False
    sums_suffice = True
    uses = frozenset[str]()
    given: Aggregator
    factors: Mapping[int, float]
    device: torch.device
    counts_alike: bool = False
    of_all: bool = False

    def weighs_equally(self, name: str) -> bool:
        """True if clients count alike."""
        return self.counts_alike or self.given.weighs_equally(name)

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Add f_k w_k x_k to the sums; an upload without entries is that of a client that does not send."""
        samples, factor = upload.result.weight, self.factors.get(upload.result.client, 1.0)
        add_weight(accumulator, SAMPLES, samples, self.device)
        add_weight(accumulator, CLIENTS, 1.0, self.device)
        for name, vector in upload.message.items():
            weight = factor * (1.0 if self.weighs_equally(name) else samples)
            add_weighted(accumulator, name, vector, weight)
            add_weight(accumulator, weight_of(name), weight, self.device)

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return the means, in the memory of the sums; {} if nobody has sent."""
        names = [name for name in accumulator if weight_of(name) in accumulator]
        return {name: accumulator[name].div_(self._divisor(accumulator, name)) for name in names}

    def combine(self, accumulator: dict[str, Any], merging: Merging) -> Message:
        """Return the means; the model stays as it is if nobody has sent."""
        message = self.finish(accumulator)
        merging.is_skipped = not message
        return message

    def _divisor(self, accumulator: dict[str, Any], name: str) -> Tensor:
        if not self.of_all or kind_of(name) == "buffers":
            return accumulator[weight_of(name)]
        return accumulator[CLIENTS if self.weighs_equally(name) else SAMPLES]
