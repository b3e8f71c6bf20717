"""Draw clients by their numbers of samples (Li et al., On the Convergence of FedAvg on Non-IID Data, ICLR 2020).

S ← K clients, P(k) = p_k = n_k / Σ_j n_j        `draw`
x ← x + (1/K) Σ_{k ∈ S} Δ_k                      `counts_alike`, with replacement: E = Σ_k p_k Δ_k
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.features.selection.selection import ClientSelection, Reads, SelectionTurn, by_size


@dataclass(frozen=True)
class BySize(ClientSelection):
    """Draw the clients of a round with probabilities in proportion to their numbers of samples.

    Attributes:
        replace: draw with replacement: a client that is drawn twice trains once and counts twice. Without it, each draw is among
            the clients that are left.
        unbiased: draw with replacement, and give each draw the same weight, 1/K, so that the expected mean is that of all
            clients weighted by their samples. Without it, large clients are drawn more often, and weigh more besides.
    """

    reads = Reads.SIZES
    replace: bool = False
    unbiased: bool = False

    @property
    def is_unbiased(self) -> bool:  # type: ignore[override]
        """True with `unbiased`."""
        return self.unbiased

    @property
    def counts_alike(self) -> bool:  # type: ignore[override]
        """True with `unbiased`."""
        return self.unbiased

    @property
    def repeats(self) -> bool:
        """True with replacement."""
        return self.replace or self.unbiased

    def draw(self, turn: SelectionTurn) -> list[int]:
        """Return the clients of K draws."""
        return by_size(turn, turn.num_clients, self.repeats)
