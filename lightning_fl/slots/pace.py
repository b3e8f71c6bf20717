"""When the server makes its next model: after a round's clients, or after any few uploads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from lightning_fl.checks import Checked


@dataclass(frozen=True)
class Pace(Checked):
    """Update the server's model after `buffer_size` uploads, of whichever clients, while others go on training.

    `clients_per_round` clients train at any time. A client whose upload has come is idle; another one, or the same, takes its
    place with the model of that moment. An upload's staleness is the number of updates since its client received the model. A
    round is an update.

    Attributes:
        buffer_size: uploads of an update, K.
        max_staleness: uploads that are staler are rejected: they count as uploads of the update, not in its mean; None for none.
        counts_from: an upload's change is that from the model that the client has `received`, or from the server's `present` one.
    """

    buffer_size: Annotated[int, Ge(1)]
    max_staleness: Annotated[int, Ge(0)] | None = None
    counts_from: Literal["received", "present"] = "received"

    def takes(self, staleness: int) -> bool:
        """True if an upload is not too stale."""
        return self.max_staleness is None or staleness <= self.max_staleness
