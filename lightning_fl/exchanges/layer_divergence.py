"""Layer divergence feedback (FedLDF; Wang et al., IEEE Communications Letters 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_fl.exchanges.layer_choice import GroupChoice
from lightning_fl.slots import Channel, Result, RoundContext
from lightning_fl.vectors.layer_groups import Group, norms
from lightning_fl.vectors.magnitudes import scale_dtype


@dataclass(frozen=True)
class LayerDivergence(GroupChoice):
    """Send δ_kl = ‖w_k^(l) − w^(l)‖ up (L numbers); the n clients with the largest (or smallest) δ_kl send layer l.

    Every client of the round trains, and its delta is kept until all divergences are known.

    Attributes:
        broadcast: clients that the model is charged to, the K `selected` or `all` N of the federation, as in the paper.
        choose: send each layer from the clients that diverged `most`, as in the paper, or `least`, as a control.
    """

    broadcast: Literal["selected", "all"] = "selected"
    choose: Literal["most", "least"] = "most"

    @property
    def prefers_large(self) -> bool:  # type: ignore[override]
        """True unless the least are chosen."""
        return self.choose == "most"

    def recipients(self, cohort: Sequence[int], context: RoundContext) -> Sequence[int]:
        """Return the cohort, or all clients."""
        return cohort if self.broadcast == "selected" else context.everyone

    def score(self, result: Result, layers: tuple[Group, ...], channel: Channel) -> Tensor:
        """Return the divergences, which the client sends; with the sign turned where the least are chosen."""
        delta = result.message["model"]
        divergence = norms(layers, delta, channel.context.layout).to(scale_dtype(delta.dtype))
        arrived = channel.send_up(result.client, {"scalars/divergence": divergence})["scalars/divergence"]
        return arrived if self.choose == "most" else -arrived
