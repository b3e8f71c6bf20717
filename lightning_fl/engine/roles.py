"""Roles of a round, which features of a run wrap, so that the round need not know a feature by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lightning_fl.clients.client_job import ClientJob
from lightning_fl.engine.local_work import LocalWork
from lightning_fl.engine.population import Cohort
from lightning_fl.link.link import Link
from lightning_fl.slots import Result, Server, ServerTurn, State, Step
from lightning_fl.state.outcome import Outcome, Proposal
from lightning_fl.state.run_state import Run

Train = Callable[[ClientJob, Sequence[int]], Iterator[Result]]
"""Train clients of this process on a job, and yield the result of each as soon as it has trained.

A wrapper must exhaust what it wraps, because processes exchange values in it, and hold no result while the next client trains, so
that memory stays that of one model: `map` holds none, a loop with `yield` does.
"""

TakeStep = Callable[[int, Step, ServerTurn, State], tuple[ServerTurn, State]]
"""Take a step of the server, given its position in the chain from 0 and its state; return turn and state afterwards."""


class Times(Protocol):
    """Seconds of a round and of its clients."""

    @property
    def seconds(self) -> float:
        """Simulated seconds that the round lasts."""

    def columns(self) -> dict[str, float]:
        """Return the columns of metrics.csv."""


@dataclass(frozen=True)
class Round:
    """Record of a round, before the run takes it over.

    Attributes:
        run: the run as it was before the round, but for what the round has cost.
        cohort: clients of the round.
        link: link over which they have sent.
        outcome: outcome of the clients of all processes.
        work: length of the clients' local training.
        times: seconds of the round and of its clients; None unless the clock is one of clients.
        averages: averages of what the module logged, by name.
        merging: values that the aggregator reports, by column.
        proposal: what the server proposes; None if there was nothing to merge.
    """

    run: Run
    cohort: Cohort
    link: Link
    outcome: Outcome
    work: LocalWork
    times: Times | None
    averages: Mapping[str, float]
    merging: Mapping[str, float]
    proposal: Proposal | None

    @property
    def number(self) -> int:
        """Number of the round, from 1."""
        return self.run.round + 1


class Observer:
    """Watches the rounds of a run; this base class sees nothing."""

    def begin_round(self, run: Run, server: Server) -> None:
        """See the run before a round, and the server's samples."""

    def trained(self, job: ClientJob) -> None:
        """See the job of a round's clients after all of them have trained; nobody keeps it any longer."""

    def end_round(self, finished: Round) -> dict[str, float]:
        """See a whole round; return columns of its row in metrics.csv."""
        return {}


@dataclass(frozen=True)
class Roles:
    """Roles of a round.

    Attributes:
        train: trains clients.
        accepts: True for a result that the server takes, if it is finite and not too stale.
        take_step: takes a step of the server.
        conclude: returns the server's proposal, given the turn after its last step and what the steps propose.
        observers: watch the round, in this order.
    """

    train: Train
    accepts: Callable[[Result], bool] = lambda result: True
    take_step: TakeStep = lambda position, step, turn, state: (turn, step(turn, state))
    conclude: Callable[[ServerTurn, Proposal], Proposal] = lambda turn, proposal: proposal
    observers: tuple[Observer, ...] = ()

    def watched_by(self, observer: Observer) -> Roles:
        """Return the roles with one more observer."""
        return replace(self, observers=(*self.observers, observer))


class Feature(Protocol):
    """Feature of a run, which stands around its rounds."""

    def around(self, roles: Roles) -> Roles:
        """Return the roles of a round with this feature around them."""
