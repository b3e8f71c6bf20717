"""When the server makes its next model: after a round's clients, or after any few uploads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_fl.checks import check_choice, check_whole


@dataclass(frozen=True)
class Pace:
    """Update the server's model after `buffer_size` uploads, of whichever clients, while others go on training.

    `clients_per_round` clients train at any time. A client whose upload has come is idle; another one, or the same, takes its
    place with the model of that moment. An upload's staleness is the number of updates since its client received the model. A
    round is an update.

    Attributes:
        buffer_size: uploads of an update, K.
        max_staleness: uploads that are staler are rejected: they count as uploads of the update, not in its mean; None for none.
        counts_from: an upload's change is that from the model that the client has `received`, or from the server's `present` one.
    """

    buffer_size: int
    max_staleness: int | None = None
    counts_from: Literal["received", "present"] = "received"

    def __post_init__(self) -> None:
        check_whole("buffer_size", self.buffer_size, 1)
        if self.max_staleness is not None:
            check_whole("max_staleness", self.max_staleness, 0)
        check_choice("counts_from", self.counts_from, ("received", "present"))

    def takes(self, staleness: int) -> bool:
        """True if an upload is not too stale."""
        return self.max_staleness is None or staleness <= self.max_staleness
