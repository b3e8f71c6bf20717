"""Facts about a run that every part may use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from lightning_fl.vectors.layer_groups import Group
from lightning_fl.vectors.layout import Layout
from lightning_fl.vectors.submodel import Submodel

DIRECTIONS = ("up", "down", "step")


@dataclass(frozen=True)
class Draw:
    """Source of the random draws of one message, the same in every process, runner and resumed run, and on both sides.

    Attributes:
        purpose: numbers that all messages of a round share: seed of the run, round, purpose.
        party: index of the client that sends or receives the message; for a message to all, one more than the last index.
        direction: `up`, `down`, or `step` for a message that a step of the server encodes.
        turn: number of earlier messages of the party in this direction and round.
    """

    purpose: tuple[int, ...] = (0, 0, 0)
    party: int = 0
    direction: Literal["up", "down", "step"] = "step"
    turn: int = 0

    def seed(self, name: str, common: bool = False) -> int:
        """Return a seed of 64 bits for an entry of the message, in [0, 2^63).

        Args:
            name: name of the entry.
            common: return the same seed to all parties.
        """
        party = () if common else (self.party,)
        entropy = [*self.purpose, *party, DIRECTIONS.index(self.direction), self.turn, crc32(name.encode())]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))

    def inside(self) -> Draw:
        """Return the source for a codec inside another one that also draws, so that their draws are independent."""
        return replace(self, purpose=(*self.purpose, 1))

    def generator(self, name: str) -> torch.Generator:
        """Return a new generator for an entry of the message, on the CPU, so that all devices draw the same numbers."""
        return torch.Generator().manual_seed(self.seed(name))


@dataclass(frozen=True)
class RoundContext:
    """Facts about a run that every part may use, in the present round.

    Attributes:
        layout: position of each parameter in a vector (d,).
        buffer_layout: position of each float buffer in a vector (d_b,).
        num_clients: clients of the federation that have samples, N; the others never take part.
        groups: layers of the network, without personal parameters; () for a submodel.
        round: index of the present round, from 0.
        num_rounds: rounds of the run.
        momentum: ρ of the module's SGD, v ← ρv + g; 0 for other optimisers; None if the SGD has several values of ρ or a
            scheduler changes it.
        local_epochs: passes of a client over its samples in a round; None if the number of steps is given instead.
        learning_rate: largest learning rate of the module's optimiser in the present round.
        dtype: dtype of the model.
        draw: source of the random draws of the message at hand.
        encoded: bits of the broadcast's entries that a step has encoded already, by name; see `Step.encoded`.
        unpruned: submodel that the pruning mask keeps, all other parameters being 0; None if there is no mask.
        clients: indices of the N clients, ascending; None if they are 0 to N - 1.
        level: returns the level of a client, if the exchange has `capacities`; else None.
        is_replaced: True if a callback has changed the server's parameters since the last round, so that clients cannot work
            them out.
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
    dtype: torch.dtype = torch.float32
    draw: Draw = Draw()
    encoded: Mapping[str, Tensor] = field(default_factory=dict)
    clients: Sequence[int] | None = None
    level: Callable[[int], float] | None = None
    is_replaced: bool = False

    @property
    def everyone(self) -> Sequence[int]:
        """The N clients that have samples."""
        return range(self.num_clients) if self.clients is None else self.clients

    def drawing(self, draw: Draw) -> RoundContext:
        """Return the context with another source of draws. Every message has its own, and `dataclasses.replace` is slow."""
        context = object.__new__(RoundContext)
        vars(context).update(vars(self), draw=draw)
        return context

    def within(self, submodel: Submodel) -> RoundContext:
        """Return the context of a submodel: its layouts, no layers, no mask."""
        return replace(self, layout=submodel.layout, buffer_layout=submodel.buffer_layout, groups=(), unpruned=None)

    def at(self, positions: Tensor) -> RoundContext:
        """Return the context of the submodel of some positions (k,)."""
        mask = torch.zeros(self.layout.numel, dtype=torch.bool, device=positions.device)
        mask[positions] = True
        return self.within(Submodel.from_masks(self.layout, self.buffer_layout, mask))

    def num_rounds_of(self, share: int | float) -> int:
        """Return a number of rounds, given as a count (int) or as a fraction of the run (float), which is at least 1 round."""
        return share if isinstance(share, int) else max(1, round(share * self.num_rounds))
