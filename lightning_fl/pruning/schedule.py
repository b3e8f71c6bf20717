"""`Schedule`: the epochs in which to prune."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from lightning_fl.checks import Called, Checked


@dataclass(frozen=True)
class Schedule(Checked):
    """Prune once, or at regular intervals.

    Attributes:
        first: epoch (from 0) before whose training the network is first pruned, at least 0; FedAP's round T.
        every: number of epochs between prunings, at least 1; None: prune once.

    >>> [epoch for epoch in range(9) if Schedule(first=2, every=3).due(epoch)]
    [2, 5, 8]
    """

    first: Annotated[int, Ge(0), Called("prune_epoch, the epoch before which the network is pruned,")] = 30
    every: Annotated[int, Ge(1), Called("every_n_epochs, unless it is None to prune once,")] | None = None

    def due(self, epoch: int) -> bool:
        """True if the network is pruned before the training of `epoch`."""
        if self.every is None:
            return epoch == self.first
        return epoch >= self.first and (epoch - self.first) % self.every == 0

    def next_after(self, epoch: int) -> int | None:
        """Return the epoch of the first pruning from `epoch` on; None if there is none."""
        if epoch <= self.first:
            return self.first
        return None if self.every is None else epoch + (self.first - epoch) % self.every
