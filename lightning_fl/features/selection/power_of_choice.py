"""Train the clients with the largest losses (Cho, Wang, Joshi, Client Selection in Federated Learning, 2020: π_pow-d).

    A ← d candidates, P(k) ∝ n_k, without replacement        `draw`
    the server sends x to A, and each sends F_k(x)           `Reads.LOSSES`; of `loss_samples` samples alone (cpow-d)
    S ← the K of A with the largest F_k(x)                   `choose`

In the variant rpow-d the server takes the loss that it knows of a client, +∞ before it has trained, and asks nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from lightning_fl.errors import require
from lightning_fl.features.selection.selection import (
    ClientSelection,
    Reads,
    SelectionTurn,
    by_size,
    check_candidates,
    largest,
)


@dataclass(frozen=True)
class PowerOfChoice(ClientSelection):
    """Draw candidates by their numbers of samples, and let those with the largest losses train.

    The mean is biased towards clients with large losses. Losses that are not finite come last.

    Attributes:
        candidates: clients that are drawn in a round, the paper's d, from K to N. With K, nobody is asked, and it is `BySize`.
        reuse_losses: rank candidates by their mean training loss in the last pass of the last round in which they took part;
            those that have not come first. Nothing more is sent, and only the chosen ones receive the model.
        loss_samples: samples of each candidate, drawn anew in each round, on which it computes its loss (the paper's π_cpow-d);
            None for all.
    """

    candidates: Annotated[int, Ge(1)]
    reuse_losses: bool = False
    loss_samples: Annotated[int, Ge(1)] | None = None

    def __post_init__(self) -> None:
        require(
            self.loss_samples is None or not self.reuse_losses,
            "PowerOfChoice with reuse_losses computes no losses besides the training: leave out loss_samples, or reuse_losses.",
        )

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        """Numbers of samples, and losses: those of the last training, or at the round's model."""
        return Reads.SIZES | (Reads.LAST_LOSSES if self.reuse_losses else Reads.LOSSES)

    def check(self, num_clients: int, num_eligible: int) -> None:
        """Raise `UserError` unless K ≤ d ≤ N."""
        check_candidates(self, self.candidates, num_clients, num_eligible)

    def draw(self, turn: SelectionTurn) -> list[int]:
        """Return the candidates; with `reuse_losses` the K of them that train."""
        drawn = by_size(turn, self.candidates)
        if not self.reuse_losses:
            return drawn
        known = turn.last_losses
        new = [client for client in drawn if client not in known][: turn.num_clients]
        others = largest({k: known[k] for k in drawn if k in known}, turn.num_clients - len(new))
        chosen = {*new, *others}
        return [client for client in drawn if client in chosen]

    def choose(self, losses: Mapping[int, float], num_clients: int) -> list[int]:
        """Return the K clients with the largest losses."""
        return largest(losses, num_clients)
