"""Selection of the clients of a round, a function of seed and round alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_fl.processes import share_of
from lightning_fl.state.run_state import COHORT, DROPOUT, Run


@dataclass(frozen=True)
class Cohort:
    """The clients of one round.

    Attributes:
        selected: clients that receive the broadcast.
        answering: selected clients that do not drop out.
        mine: answering clients that this process trains, alone or with the others of its group.
    """

    selected: list[int]
    answering: list[int]
    mine: list[int]


@dataclass(frozen=True)
class Population:
    """All clients of the federation, from which each round draws its cohort.

    Attributes:
        sizes: number of samples of each client (N,).
        cohort_size: clients of a round, K; 0 for an algorithm that does all its work before the first round.
        dropout_rate: probability that a selected client never answers.
        rank: index of this process, or of its group of processes, from 0.
        num_ranks: number of processes, or of groups of them, that share the clients.
    """

    sizes: np.ndarray
    cohort_size: int
    dropout_rate: float = 0.0
    rank: int = 0
    num_ranks: int = 1

    def cohort(self, run: Run) -> Cohort:
        """Draw the cohort of the run's present round."""
        selected = self.select(run)
        answering = self.answering(run, selected)
        return Cohort(selected, answering, share_of(answering, self.sizes, self.rank, self.num_ranks))

    def select(self, run: Run) -> list[int]:
        """Draw K clients that have samples, uniformly without replacement."""
        chosen = run.random(COHORT).choice(self.eligible, self.cohort_size, replace=False)
        return [int(client) for client in chosen]

    def answering(self, run: Run, selected: list[int]) -> list[int]:
        """Return the selected clients that answer; the others receive the model and drop out."""
        if not self.dropout_rate:
            return selected
        return [client for client in selected if run.random(DROPOUT, client).random() >= self.dropout_rate]

    @cached_property
    def eligible(self) -> np.ndarray:
        """Indices of the clients that have samples, int64."""
        return self.sizes.nonzero()[0]
