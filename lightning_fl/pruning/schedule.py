"""`Schedule`: the epochs in which to prune."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.errors import require


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
        whole = isinstance(self.first, int) and not isinstance(self.first, bool)
        require(
            whole and self.first >= 0,
            "prune_epoch is the epoch before which the network is pruned and must be a whole number of at least 0, "
            f"got {self.first}.",
        )
        whole = self.every is None or (isinstance(self.every, int) and not isinstance(self.every, bool))
        require(
            whole and (self.every is None or self.every >= 1),
            f"every_n_epochs must be a whole number of at least 1, or None to prune once, got {self.every}.",
        )

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
