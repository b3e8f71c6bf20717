"""Random layers, a baseline of FedLDF (Wang et al., IEEE Communications Letters 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.exchanges.layer_choice import GroupChoice
from lightning_fl.slots import Channel, Result
from lightning_fl.vectors.layer_groups import Group


@dataclass(frozen=True)
class DrawnLayers(GroupChoice):
    """Draw n of the round's clients uniformly for each layer on the server; clients send nothing for it.

    The draw is among the clients that finish training. Each client has its own random number for every layer, so neither order
    nor drop-outs change other clients' numbers.
    """

    sums_suffice = True

    def score(self, result: Result, layers: tuple[Group, ...], channel: Channel) -> Tensor:
        """Draw uniform random numbers on the server."""
        return torch.from_numpy(channel.random(result.client).random(len(layers)))
