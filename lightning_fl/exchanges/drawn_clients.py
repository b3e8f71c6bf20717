"""Random clients: HDFL as FedLDF uses it (Wang et al., IEEE Communications Letters 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.exchanges.layer_choice import LayerChoice
from lightning_fl.slots import Channel, Result, RoundContext
from lightning_fl.vectors.layer_groups import Group


@dataclass(frozen=True)
class DrawnClients(LayerChoice):
    """Draw n of the round's clients uniformly on the server; they send whole models, the others nothing.

    All clients train. At most n deltas are in memory at a time.
    """

    announces = False
    sums_suffice = True

    def layers(self, context: RoundContext) -> tuple[Group, ...]:
        """Return the whole model as one layer."""
        return (Group("model", context.layout.names, context.buffer_layout.names),)

    def score(self, result: Result, layers: tuple[Group, ...], channel: Channel) -> Tensor:
        """Draw a uniform random number on the server."""
        return torch.from_numpy(channel.random(result.client).random(1))
