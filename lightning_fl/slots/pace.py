"""Pace of the server in asynchronous runs: updates after a number of uploads, not after all clients of a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from lightning_fl.checks import Checked


@dataclass(frozen=True)
class Pace(Checked):
    """Update the server's model after `buffer_size` uploads from any clients, while other clients go on training.

    `clients_per_round` clients train at any time. When a client's upload arrives, another client, or the same one, takes its
    place and starts from the model of that moment. An upload's staleness is the number of updates since its client received the
    model. A round is one update.

    Attributes:
        buffer_size: uploads of an update, K.
        max_staleness: largest staleness of an accepted upload; None for no limit. A rejected upload counts towards
            `buffer_size`, but not in the mean.
        counts_from: model from which an upload's change is measured: the one that the client `received`, or the server's
            `present` one.
    """

    buffer_size: Annotated[int, Ge(1)]
    max_staleness: Annotated[int, Ge(0)] | None = None
    counts_from: Literal["received", "present"] = "received"

    def takes(self, staleness: int) -> bool:
        """True if an upload is not too stale."""
        return self.max_staleness is None or staleness <= self.max_staleness
