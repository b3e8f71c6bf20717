"""What a method sees of a structured pruning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fl.slots.exchange import Channel
from lightning_fl.slots.setting import Setting

if TYPE_CHECKING:
    from lightning_fl.pruning import Plan


@dataclass
class PruningTurn:
    """A structured pruning that callbacks have made; what crosses because of it is booked in the round that comes next.

    Attributes:
        plan: which filters stay.
        channel: to and from the clients; numbers cross whole, whatever the codecs of the rounds.
        setting: of the run before it.
        cohort: clients of the round that comes next, who receive the model in any case.
        params: the model before it (d,).
        buffers: its float buffers (d_b,).
    """

    plan: Plan
    channel: Channel
    setting: Setting
    cohort: Sequence[int]
    params: Tensor
    buffers: Tensor

    @property
    def units(self) -> Tensor:
        """Which filters of the prunable layers stay, layer after layer, bools (Σ_l c_l,)."""
        kept = []
        for layer, width in self.plan.widths.items():
            mask = torch.ones(width, dtype=torch.bool)
            if layer in self.plan.filters:
                mask = torch.zeros(width, dtype=torch.bool).index_fill_(0, self.plan.filters[layer].cpu(), True)
            kept.append(mask)
        return torch.cat(kept) if kept else torch.zeros(0, dtype=torch.bool)
