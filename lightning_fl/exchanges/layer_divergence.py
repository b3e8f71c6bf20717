"""Layer divergence feedback (FedLDF; Wang et al., IEEE Communications Letters 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_fl.errors import nearest, require
from lightning_fl.exchanges.base import LayerChoice
from lightning_fl.slots import Channel, Result, Setting
from lightning_fl.vectors.layer_groups import Group, Groups, check_choice, norms, resolve


@dataclass(frozen=True)
class LayerDivergence(LayerChoice):
    """δ_kl = ‖w_k^(l) − w^(l)‖ goes up (L numbers); of each layer the n clients with the largest δ_kl send it.

    Every client of the round trains, and its delta lives until all divergences are known.

    Attributes:
        groups: what a layer is: `layer`, `tensor`, or names of parameters by the layer's name (`lightning_fl.groups`).
        broadcast: to whom the model is charged, the K `selected` clients or `all` N of the federation, as the paper has it.
    """

    groups: Groups = "layer"
    broadcast: Literal["selected", "all"] = "selected"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.groups)
        allowed = ("selected", "all")
        require(
            self.broadcast in allowed, f"broadcast {self.broadcast!r} is unknown; {nearest(self.broadcast, allowed)}."
        )

    def recipients(self, cohort: Sequence[int], setting: Setting) -> Sequence[int]:
        """The cohort or everyone."""
        return cohort if self.broadcast == "selected" else range(setting.num_clients)

    def layers(self, setting: Setting) -> tuple[Group, ...]:
        """As `groups` says."""
        return resolve(self.groups, setting.groups, setting.layout, setting.buffer_layout)

    def score(self, result: Result, layers: tuple[Group, ...], channel: Channel) -> Tensor:
        """The divergences, which the client reports."""
        delta = result.message["model"]
        divergence = norms(layers, delta, channel.setting.layout).to(delta.dtype)
        return channel.send_up(result.client, {"scalars/divergence": divergence})["scalars/divergence"]
