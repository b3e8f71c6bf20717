"""Let every client take part once before any takes part twice, as in the passes of a centralised training over its samples."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.engine.population import place_in_pass
from lightning_fl.features.selection.selection import ClientSelection, SelectionTurn


@dataclass(frozen=True)
class InTurn(ClientSelection):
    """Select every client once before any twice; the last round of a pass has fewer clients if K does not divide N.

    The draws are those of `privacy.sampling: passes`.

    Attributes:
        shuffled: draw a new order for each pass; else clients come in the order of their indices.
    """

    needs_everyone = True
    shuffled: bool = True

    def draw(self, turn: SelectionTurn) -> list[int]:
        """Return the next clients of the pass."""
        number, place = place_in_pass(turn.round, len(turn.clients), turn.num_clients)
        order = turn.random(number).permutation(turn.clients) if self.shuffled else turn.clients
        return order[place].tolist()
