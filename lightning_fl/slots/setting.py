"""Facts about a run that every part may use."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_fl.vectors.layer_groups import Group
from lightning_fl.vectors.layout import Layout
from lightning_fl.vectors.submodel import Submodel


@dataclass(frozen=True)
class Setting:
    """Facts about a run that every part may use, in the present round.

    Attributes:
        layout: position of each parameter in a vector (d,).
        buffer_layout: position of each float buffer in a vector (d_b,).
        num_clients: clients of the federation, N.
        groups: layers of the network, without personal parameters; () for a submodel.
        round: index of the present round, from 0.
        num_rounds: rounds of the run.
        momentum: ρ of the module's SGD, v ← ρv + g; 0 for other optimisers; None if the SGD has several values of ρ or a
            scheduler changes it.
        local_epochs: passes of a client over its samples in a round; None if the number of steps is given instead.
        learning_rate: largest learning rate of the module's optimiser in the present round.
        unpruned: submodel that the pruning mask keeps, all other parameters being 0; None if there is no mask.
    """

    layout: Layout
    buffer_layout: Layout
    num_clients: int
    groups: tuple[Group, ...] = ()
    round: int = 0
    num_rounds: int = 1
    momentum: float | None = 0.0
    unpruned: Submodel | None = None
    local_epochs: int | None = None
    learning_rate: float = 0.0

    def within(self, submodel: Submodel) -> Setting:
        """Return the setting of a submodel: its layouts, no layers, no mask."""
        return replace(self, layout=submodel.layout, buffer_layout=submodel.buffer_layout, groups=(), unpruned=None)

    def num_rounds_of(self, share: int | float) -> int:
        """Return a number of rounds, given as a count (int) or as a fraction of the run (float), which is at least 1 round."""
        return share if isinstance(share, int) else max(1, round(share * self.num_rounds))
