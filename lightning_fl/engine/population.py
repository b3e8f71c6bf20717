"""Selection of a round's clients: a function of seed and round, and of the simulated time if clients are not always there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
        asked: selected clients that do not drop out and say how large their loss at the received model is, before some of them
            are chosen to train, and the number of samples on which each computes it, once for each model; {} if nobody is asked.
    """

    selected: list[int]
    answering: list[int]
    mine: list[int]
    late: Sequence[int] = ()
    begin: float = 0.0
    asked: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_dropped(self) -> int:
        """Selected clients that drop out."""
        return len(self.selected) - (len(self.asked) or len(self.answering) + len(self.late))

    @property
    def passed_over(self) -> list[int]:
        """Asked clients that are not chosen to train."""
        chosen = {*self.answering, *self.late}
        return [client for client in self.asked if client not in chosen]

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
        begin, there = self.there(run)
        return self.cohort_of(run, self._drawn(run, there), begin)

    def cohort_of(self, run: Run, selected: list[int], begin: float) -> Cohort:
        """Return the cohort of selected clients, of which some may drop out, in a round that begins at a simulated second."""
        answering = self.answering(run, selected)
        return Cohort(selected, answering, self.mine(answering), begin=begin)

    def mine(self, answering: list[int]) -> list[int]:
        """Return those of the answering clients that this process trains."""
        return share_of(answering, self.sizes, self.rank, self.num_ranks)

    def select(self, run: Run) -> list[int]:
        """Draw the clients that receive the broadcast of the run's present round."""
        return self._drawn(run, self.there(run)[1])

    @property
    def num_needed(self) -> int:
        """Clients that must be there for a round to begin."""
        return min(self.cohort_size, 1) if self.if_too_few == "fewer" else self.cohort_size

    @property
    def num_selected(self) -> int:
        """Clients that a round selects of all that have samples, if it draws a fixed number."""
        return num_to_select(self.cohort_size, self.over_selection, len(self.eligible))

    def there(self, run: Run) -> tuple[float, np.ndarray]:
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
            number, place = place_in_pass(run.round, len(there), self.cohort_size)
            return run.random(COHORT, in_round=number).permutation(there)[place].tolist()
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


def num_to_select(cohort_size: int, over_selection: float, num_eligible: int) -> int:
    """Return the number of clients that a round selects, of which the first K to answer count, all if these are fewer.

    >>> num_to_select(10, 1.1, num_eligible=100), num_to_select(10, 1.1, num_eligible=10)
    (11, 10)
    """
    # Without rounding error: 1.1 times 10 is above 11 in floats.
    return min(ceil(over_selection * cohort_size - 1e-9), num_eligible)


def place_in_pass(index: int, num_clients: int, cohort_size: int) -> tuple[int, slice]:
    """Return the number of a round's pass over all clients, from 0, and the places of the round's clients in its order.

    The last round of a pass may be smaller.

    >>> [place_in_pass(index, num_clients=5, cohort_size=2) for index in (0, 2, 3)]
    [(0, slice(0, 2, None)), (0, slice(4, 6, None)), (1, slice(0, 2, None))]
    """
    number, position = divmod(index, ceil(num_clients / cohort_size))
    return number, slice(position * cohort_size, (position + 1) * cohort_size)
