"""Select the clients that are expected to answer first (FedCS: Nishio, Yonetani, Client Selection for Federated Learning with
Heterogeneous Resources in Mobile Edge, ICC 2019).

FedCS asks candidates for their resources, and selects those that fit into a deadline. Here the clock of clients knows the
resources, and K are selected; `trainer.deadline` closes a round besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from lightning_fl.features.selection.selection import ClientSelection, Reads, SelectionTurn, check_candidates, uniformly


@dataclass(frozen=True)
class Fastest(ClientSelection):
    """Draw candidates uniformly, and select those that the clock of clients expects first.

    The clock expects a client to be as fast as usual and to make all its steps. The mean is biased towards fast clients, and
    towards those with few samples.

    Attributes:
        candidates: clients that are drawn in a round, from K to N.
    """

    reads = Reads.SECONDS
    candidates: Annotated[int, Ge(1)]

    def check(self, num_clients: int, num_eligible: int) -> None:
        """Raise `UserError` unless K ≤ candidates ≤ N."""
        check_candidates(self, self.candidates, num_clients, num_eligible)

    def draw(self, turn: SelectionTurn) -> list[int]:
        """Return the K fastest candidates, in the order of the draw."""
        drawn = uniformly(turn, self.candidates)
        seconds = turn.seconds(drawn)
        chosen = set(sorted(drawn, key=lambda client: seconds[client])[: turn.num_clients])
        return [client for client in drawn if client in chosen]
