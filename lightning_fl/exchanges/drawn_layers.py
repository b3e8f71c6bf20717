"""Random layers, a baseline of FedLDF (Wang et al., IEEE Communications Letters 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.exchanges.base import LayerChoice
from lightning_fl.slots import Channel, Result, Setting
from lightning_fl.vectors.layer_groups import Group, Groups, check_choice, resolve


@dataclass(frozen=True)
class DrawnLayers(LayerChoice):
    """Draw n of the round's clients uniformly for each layer on the server; clients send nothing for it.

    The draw is among the clients that return from training. Each has its own random number for every layer, so neither their
    order nor drop-outs change the numbers of the others.

    Attributes:
        groups: definition of a layer: `layer`, `tensor`, or a map from layers to names of parameters (`lightning_fl.groups`).
    """

    groups: Groups = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.groups)

    def layers(self, setting: Setting) -> tuple[Group, ...]:
        """Return the layers that `groups` defines."""
        return resolve(self.groups, setting.groups, setting.layout, setting.buffer_layout)

    def score(self, result: Result, layers: tuple[Group, ...], channel: Channel) -> Tensor:
        """Draw uniform random numbers on the server."""
        return torch.from_numpy(channel.random(result.client).random(len(layers)))
