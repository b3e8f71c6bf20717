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
    """For each layer the server draws n of the round's clients uniformly; nothing is reported before.

    The draw is among the clients that come back from training, each with a random number of its own for every layer, so that
    neither their order nor who dropped out changes the others' numbers.

    Attributes:
        groups: what a layer is: `layer`, `tensor`, or names of parameters by the layer's name (`lightning_fl.groups`).
    """

    groups: Groups = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.groups)

    def layers(self, setting: Setting) -> tuple[Group, ...]:
        """As `groups` says."""
        return resolve(self.groups, setting.groups, setting.layout, setting.buffer_layout)

    def score(self, result: Result, layers: tuple[Group, ...], channel: Channel) -> Tensor:
        """Uniform random numbers of the server's."""
        return torch.from_numpy(channel.random(result.client).random(len(layers)))
