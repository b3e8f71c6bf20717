"""The aggregator slot: merging the uploads of a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from lightning_fl.slots.exchange import Upload
from lightning_fl.slots.message import SENT, Message
from lightning_fl.slots.part import Part
from lightning_fl.slots.round_context import RoundContext


@dataclass
class Merging:
    """What an aggregator may know of the round whose uploads it merges, and what it says of it.

    Attributes:
        context: facts about the run, with the source of random draws.
        metrics: values that it reports, by the name under which they are logged with the round.
        is_skipped: set to True if too few uploads have come: the server's model then stays as it is.
    """

    context: RoundContext
    metrics: dict[str, float] = field(default_factory=dict)
    is_skipped: bool = False


class Aggregator(Part, ABC):
    """Merges the accepted uploads of a round into one message.

    If clients send parts of a model, the aggregator chooses the divisor of each coordinate: the weights of all clients, so that
    a coordinate that was not sent counts as no change, or the weights of the clients that sent it (`Upload.sent`).

    Every upload must contain the entries that it `needs`. It `provides` entries of the merged message that no upload has.
    It `uses` `SENT` unless it says otherwise; one that averages zeros where nothing was sent must not.
    """

    keeps_uploads = True
    """True if the accumulator keeps every upload; False if it holds only tensors, which are then summed over the processes."""

    sums_suffice = False
    """True if it reads only sums: of the clients' vectors, each times a number that its client knows, and of such numbers."""

    is_mean = False
    """True if it merges each entry into a mean whose weights depend on the client alone."""

    @property
    def uses(self) -> frozenset[str]:
        """Names of the entries that it reads; `SENT` for the masks of what each client sent."""
        return self.needs | {SENT}

    def weighs_equally(self, name: str) -> bool:
        """True if it averages an entry of that name with equal weights, whatever the clients' numbers of samples."""
        return True

    def check(self, cohort_size: int) -> None:
        """Raise `UserError` if the part needs more clients than a round has."""

    @abstractmethod
    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Add one accepted upload to the accumulator, in place.

        Args:
            accumulator: {} at the start of a round.
            upload: decoded upload; each is added once.
        """

    @abstractmethod
    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return the merged message, in any floating dtype; called after the last of at least one upload."""

    def combine(self, accumulator: dict[str, Any], merging: Merging) -> Message:
        """Return the merged message as `finish` does; for parts that draw numbers, report values or may skip a round."""
        return self.finish(accumulator)
