"""Selection of a round's clients: a function of seed and round, and of the simulated time if clients are not always there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Literal, Protocol

import numpy as np

from lightning_fl.engine.local_work import LocalWork
from lightning_fl.processes import share_of
from lightning_fl.state.run_state import COHORT, DROPOUT, Run


@dataclass(frozen=True)
class Cohort:
    """The clients of one round.

    Attributes:
        selected: clients that receive the broadcast.
        answering: selected clients that do not drop out, and are in time.
        mine: answering clients that this process trains, alone or with the others of its group.
        late: selected clients that do not drop out, but would answer after the round is closed.
        begin: simulated seconds at which the round begins.
    """

    selected: list[int]
    answering: list[int]
    mine: list[int]
    late: Sequence[int] = ()
    begin: float = 0.0

    @property
    def num_dropped(self) -> int:
        """Selected clients that drop out."""
        return len(self.selected) - len(self.answering) - len(self.late)

    def work(self, present: LocalWork) -> LocalWork:
        """Return the length of these clients' training, given that of clients that begin in the present round."""
        return present


class Availability(Protocol):
    """Times at which clients are there."""

    def begin(self, now: float, num_needed: int) -> tuple[float, np.ndarray]:
        """Return the first time from `now` on at which so many clients are there, and these clients in ascending order."""

    def next_start(self, now: float) -> float:
        """Return the first time after `now` at which a client comes back."""


@dataclass(frozen=True)
class Population:
    """All clients of the federation, from which each round draws its cohort.

    Attributes:
        sizes: number of samples of each client (N,).
        cohort_size: clients of a round, K; 0 for an algorithm that does all its work before the first round.
        dropout_rate: probability that a selected client never answers.
        rank: index of this process, or of its group of processes, from 0.
        num_ranks: number of processes, or of groups of them, that share the clients.
        over_selection: how many times K clients are selected, of which the first K to answer count.
        availability: times at which clients are there; None if all always are.
        if_too_few: `wait` until K clients are there, or go on with `fewer`, but at least one.
        sampling: `fixed` draws exactly K clients, `poisson` each by its own coin, K on average, and `passes` goes through all in
            a random order, K at a time, before it begins anew.
    """

    sizes: np.ndarray
    cohort_size: int
    dropout_rate: float = 0.0
    rank: int = 0
    num_ranks: int = 1
    over_selection: float = 1.0
    availability: Availability | None = None
    if_too_few: Literal["wait", "fewer"] = "wait"
    sampling: Literal["fixed", "poisson", "passes"] = "fixed"

    def cohort(self, run: Run) -> Cohort:
        """Draw the cohort of the run's present round."""
        begin, there = self._there(run)
        selected = self._drawn(run, there)
        answering = self.answering(run, selected)
        return Cohort(selected, answering, self.mine(answering), begin=begin)

    def mine(self, answering: list[int]) -> list[int]:
        """Return those of the answering clients that this process trains."""
        return share_of(answering, self.sizes, self.rank, self.num_ranks)

    def select(self, run: Run) -> list[int]:
        """Draw the clients that receive the broadcast of the run's present round."""
        return self._drawn(run, self._there(run)[1])

    @property
    def num_needed(self) -> int:
        """Clients that must be there for a round to begin."""
        return min(self.cohort_size, 1) if self.if_too_few == "fewer" else self.cohort_size

    @property
    def num_selected(self) -> int:
        """Clients that a round selects of all that have samples, if it draws a fixed number."""
        # Without rounding error: 1.1 times 10 is above 11 in floats.
        return min(ceil(self.over_selection * self.cohort_size - 1e-9), len(self.eligible))

    def _there(self, run: Run) -> tuple[float, np.ndarray]:
        """Return the time at which the present round begins, and the clients with samples that are there then."""
        if self.availability is None:
            return run.simulated_seconds, self.eligible
        return self.availability.begin(run.simulated_seconds, self.num_needed)

    def _drawn(self, run: Run, there: np.ndarray) -> list[int]:
        """Draw K clients of those that are there, or more, uniformly without replacement; or each with probability K/N."""
        if self.sampling == "poisson":
            return [
                int(client) for client in there[run.random(COHORT).random(len(there)) < self.cohort_size / len(there)]
            ]
        if self.sampling == "passes":
            number, position = divmod(run.round, ceil(len(there) / self.cohort_size))
            order = run.random(COHORT, in_round=number).permutation(there)
            return [int(client) for client in order[position * self.cohort_size :][: self.cohort_size]]
        chosen = run.random(COHORT).choice(there, min(self.num_selected, len(there)), replace=False)
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

    @cached_property
    def everyone(self) -> Sequence[int]:
        """The clients that have samples, ascending; a range if all have."""
        return range(len(self.sizes)) if len(self.eligible) == len(self.sizes) else self.eligible.tolist()
