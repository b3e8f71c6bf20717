"""What parts may know of the run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_fl.vectors.layer_groups import Group
from lightning_fl.vectors.layout import Layout
from lightning_fl.vectors.submodel import Submodel


@dataclass(frozen=True)
class Setting:
    """What every part may know of the run it works in.

    Attributes:
        layout: which stretch of a vector (d,) is which parameter.
        buffer_layout: which stretch of a vector (d_b,) is which float buffer.
        num_clients: clients of the federation, N.
        groups: the layers of the network.
        round: index of the round under way, from 0.
        num_rounds: rounds of the run.
        momentum: ρ of the module's SGD, v ← ρv + g, and 0 for other optimisers; None for an SGD that has no one such ρ,
            or whose scheduler moves it.
        unpruned: the parameters that a pruning mask keeps, all others being 0; None if there is no mask.
    """

    layout: Layout
    buffer_layout: Layout
    num_clients: int
    groups: tuple[Group, ...] = ()
    round: int = 0
    num_rounds: int = 1
    momentum: float | None = 0.0
    unpruned: Submodel | None = None

    def within(self, submodel: Submodel) -> Setting:
        """Return the setting of a smaller model."""
        return replace(self, layout=submodel.layout, buffer_layout=submodel.buffer_layout, groups=(), unpruned=None)

    def num_rounds_of(self, share: int | float) -> int:
        """A number of rounds that was given as a count or as a fraction of the run, which is at least one."""
        return share if isinstance(share, int) else max(1, round(share * self.num_rounds))
