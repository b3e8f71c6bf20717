"""Selection by norm: clients with large updates send them more often (Chen, Horváth, Richtárik, Optimal Client Sampling for
Federated Learning, 2020).

    u_k = w_k ‖Δ_k‖                                  up: one number of each of n candidates, all of which have trained
    p_k = min(1, c u_k),  Σ_k p_k = m                down: p_k            Algorithm 1; c follows from u and m
    client k sends Δ_k with probability p_k, each by its own coin
    x ← x + Σ_{k sends} (w_k / p_k) Δ_k              E = Σ_k w_k Δ_k, and no other p has a smaller variance

Algorithm 2 needs only sums, so it works with secure aggregation. It finds c in at most four turns:

    p_k = min(1, m u_k / Σ_j u_j)                    down: Σ_j u_j
    I = number of p_k < 1,  P = their sum            up: (1, p_k) if p_k < 1, else (0, 0)
    C = (m − n + I) / P,  p_k ← min(1, C p_k)        down: C;  the last turn is the first with C ≤ 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge

from lightning_fl.features.selection.selection import ClientSelection, Reads, SelectionTurn, check_candidates, uniformly

MOST_TURNS = 4
"""Turns of Algorithm 2 at most, j_max, as in the paper's experiments."""


@dataclass(frozen=True)
class ByNorm(ClientSelection):
    """Let candidates train and report the norms of their updates; about K send theirs, mostly large ones.

    Candidates are drawn uniformly. The number of clients that send is random, K on average.

    Attributes:
        candidates: clients that train in a round, n, from K to N.
        unbiased: weigh each update by 1/p_k, so that the mean is unbiased over all candidates. Without it, updates have their
            usual weights, and the mean is biased towards large ones.
        approximate: find p_k by sums over the candidates (Algorithm 2), for `trainer.secure_aggregation`.
    """

    reads = Reads.NORMS
    candidates: Annotated[int, Ge(1)]
    unbiased: bool = True
    approximate: bool = False

    @property
    def is_unbiased(self) -> bool:  # type: ignore[override]
        """True with `unbiased`."""
        return self.unbiased

    @property
    def sums_suffice(self) -> bool:
        """True for Algorithm 2."""
        return self.approximate

    def check(self, num_clients: int, num_eligible: int) -> None:
        """Raise `UserError` unless K ≤ n ≤ N."""
        check_candidates(self, self.candidates, num_clients, num_eligible)

    def num_training(self, num_clients: int) -> int:
        """Return n."""
        return self.candidates

    def draw(self, turn: SelectionTurn) -> list[int]:
        """Return the candidates."""
        return uniformly(turn, turn.num_clients)

    def answers(self, norms: Mapping[int, float], num_clients: int) -> Sequence[tuple[int, int]]:
        """Return [(0, 1)] for p_k; of Algorithm 2 (0, 1) for Σ_j u_j, and (2, 1) for each of its turns."""
        if not self.approximate:
            return [(0, 1)]
        return [(0, 1), *[(2, 1)] * approximate(list(norms.values()), num_clients)[1]]

    def probabilities(self, norms: Mapping[int, float], num_clients: int) -> dict[int, float]:
        """Return p_k of each client."""
        values = list(norms.values())
        found = approximate(values, num_clients)[0] if self.approximate else optimal(values, num_clients)
        return dict(zip(norms, found, strict=True))

    def most_probable(self, norms: Mapping[int, float], num_clients: int) -> dict[int, float]:
        """Return p_k among these clients: with every further one c falls, and Algorithm 2 finds no larger c."""
        return dict(zip(norms, optimal(list(norms.values()), num_clients), strict=True))


def optimal(norms: Sequence[float], num_clients: int) -> list[float]:
    """Return min(1, c u) with the sum m, or 1 for all u > 0 if these are no more than m; 0 for u = 0 (the paper's equation 7).

    >>> optimal([1.0, 1.0, 1.0, 1.0], 2), optimal([1.0, 1.0, 8.0, 0.0], 2), optimal([0.0, 0.0], 1)
    ([0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 1.0, 0.0], [0.0, 0.0])
    """
    u = np.asarray(norms, dtype=np.float64)
    rising = np.sort(u[u > 0])
    if len(rising) <= num_clients:
        return (u > 0).astype(float).tolist()
    length = np.arange(1, len(rising) + 1)
    left = num_clients + length - len(rising)  # m + l − n: senders among the l smallest
    fits = (left > 0) & (left * rising <= np.cumsum(rising))
    last = int(np.flatnonzero(fits)[-1])
    return np.minimum(1.0, left[last] * u / rising[: last + 1].sum()).tolist()


def approximate(norms: Sequence[float], num_clients: int) -> tuple[list[float], int]:
    """Return the probabilities of Algorithm 2, and the number of its turns; all are 0 if all norms are.

    >>> approximate([1.0, 1.0, 8.0, 0.0], 2)
    ([0.5, 0.5, 1.0, 0.0], 2)
    """
    u = np.asarray(norms, dtype=np.float64)
    total = u.sum()
    p = np.minimum(1.0, num_clients * u / total) if total else np.zeros(len(u))
    for turn in range(1, MOST_TURNS + 1):
        below = p < 1
        if not p[below].sum():
            return p.tolist(), turn
        factor = (num_clients - len(u) + int(below.sum())) / p[below].sum()
        p = np.where(below, np.minimum(1.0, factor * p), p)
        if factor <= 1:
            return p.tolist(), turn
    return p.tolist(), MOST_TURNS
