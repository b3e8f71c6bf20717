"""Draw the clients of a round uniformly without replacement (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.features.selection.selection import ClientSelection, SelectionTurn, uniformly


@dataclass(frozen=True)
class Uniform(ClientSelection):
    """Draw the clients of a round uniformly without replacement, as without a selection."""

    def draw(self, turn: SelectionTurn) -> list[int]:
        """Return K clients."""
        return uniformly(turn, turn.num_clients)
