"""`Schedule`: the epochs in which to prune."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.checks import check_whole


@dataclass(frozen=True)
class Schedule:
    """Prune once, or at regular intervals.

    Attributes:
        first: epoch (from 0) before whose training the network is first pruned, at least 0; FedAP's round T.
        every: number of epochs between prunings, at least 1; None: prune once.

    >>> [epoch for epoch in range(9) if Schedule(first=2, every=3).due(epoch)]
    [2, 5, 8]
    """

    first: int = 30
    every: int | None = None

    def __post_init__(self) -> None:
        check_whole("prune_epoch, the epoch before which the network is pruned,", self.first, 0)
        if self.every is not None:
            check_whole("every_n_epochs, unless it is None to prune once,", self.every, 1)

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
