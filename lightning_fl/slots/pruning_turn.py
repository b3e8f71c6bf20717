"""A structured pruning, as an algorithm sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fl.slots.exchange import Channel
from lightning_fl.slots.round_context import RoundContext

if TYPE_CHECKING:
    from lightning_fl.pruning import Plan


@dataclass
class PruningTurn:
    """A structured pruning that callbacks have made. Messages that the algorithm sends because of it count in the next round.

    Attributes:
        plan: filters that remain, by layer.
        channel: connection to the clients; it sends numbers uncompressed, not through the algorithm's codecs.
        context: facts about the run before the pruning.
        cohort: clients of the next round, which receive the model anyway.
        params: model before the pruning (d,).
        buffers: its float buffers (d_b,).
    """

    plan: Plan
    channel: Channel
    context: RoundContext
    cohort: Sequence[int]
    params: Tensor
    buffers: Tensor

    @property
    def units(self) -> Tensor:
        """Mask of the filters that remain, layer after layer: bools (Σ_l c_l,), c_l filters in prunable layer l."""
        kept = []
        for layer, width in self.plan.widths.items():
            mask = torch.ones(width, dtype=torch.bool)
            if layer in self.plan.filters:
                mask = torch.zeros(width, dtype=torch.bool).index_fill_(0, self.plan.filters[layer].cpu(), True)
            kept.append(mask)
        return torch.cat(kept) if kept else torch.zeros(0, dtype=torch.bool)
