"""Roles of a round, which features of a run wrap, so that the round need not know a feature by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from lightning_fl.clients.client_job import ClientJob
from lightning_fl.engine.local_work import LocalWork
from lightning_fl.engine.population import Cohort
from lightning_fl.link.link import Link
from lightning_fl.slots import Aggregator, Result, RoundContext, Server, ServerTurn, State, Step, Upload
from lightning_fl.state.outcome import Costs, Outcome, Proposal
from lightning_fl.state.run_state import Run

Broadcast = Callable[[Link, Cohort], ClientJob]
"""Send a round's model through its link, and return the job of its clients; what else they need to know is sent before it."""

Train = Callable[[ClientJob, Sequence[int]], Iterator[Result]]
"""Train clients of this process on a job, and yield the result of each as soon as it has trained.

A wrapper must exhaust what it wraps, because processes exchange values in it, and hold no result while the next client trains, so
that memory stays that of one model: `map` holds none, a loop with `yield` does. A job without `data` is that of a dry round, in
which nobody trains, and random numbers are sent to learn how many bits messages have.
"""

Collect = Callable[[Iterable[Result], Link], Iterator[Upload]]
"""Send the results of clients to the server, and yield each upload before the next result is read; see `Exchange.collect`."""

TakeStep = Callable[[int, Step, ServerTurn, State], tuple[ServerTurn, State]]
"""Take a step of the server, given its position in the chain from 0 and its state; return turn and state afterwards."""


class Sampler(Protocol):
    """Draws the clients of a run's present round."""

    def select(self, run: Run) -> Sequence[int]:
        """Return the clients that receive the broadcast; may be called between two rounds, before the model is final."""

    def cohort(self, run: Run) -> Cohort:
        """Return the clients of the round, the same whenever it is called in a round."""


@dataclass(frozen=True)
class Round:
    """Record of a round, before the run takes it over.

    Attributes:
        run: the run as it was before the round, but for what the round has cost.
        cohort: clients of the round.
        link: link over which they have sent.
        outcome: outcome of the clients of all processes.
        work: length of the clients' local training.
        averages: averages of what the module logged, by name.
        merging: values that the aggregator reports, by column.
        proposal: what the server proposes; None if there was nothing to merge, and before the server's steps.
    """

    run: Run
    cohort: Cohort
    link: Link
    outcome: Outcome
    work: LocalWork
    averages: Mapping[str, float] = field(default_factory=dict)
    merging: Mapping[str, float] = field(default_factory=dict)
    proposal: Proposal | None = None

    @property
    def number(self) -> int:
        """Number of the round, from 1."""
        return self.run.round + 1


def costs_of(finished: Round) -> Costs:
    """Return what a round has cost on a link on which nothing takes time."""
    link, outcome = finished.link, finished.outcome
    return Costs(
        link.broadcast_bits,
        outcome.bits,
        outcome.num_uploads,
        outcome.num_uploads - outcome.num_accepted,
        outcome.num_steps,
        outcome.most_steps,
    )


class Observer:
    """Watches the rounds of a run; this base class sees nothing."""

    public: frozenset[str] = frozenset()
    """Columns of `end_round` that tell nothing of a round's clients; all others are left out where nothing may."""

    def begin_round(self, run: Run, server: Server) -> None:
        """See the run before a round, and the server's samples."""

    def trained(self, job: ClientJob) -> None:
        """See the job of a round's clients after all of them have trained; nobody keeps it any longer."""

    def end_round(self, finished: Round) -> dict[str, float]:
        """See a whole round; return columns of its row in metrics.csv."""
        return {}

    def asked(self, client: int) -> None:
        """See that a callback has asked a client about the model, before its answer is sent; may refuse it."""

    def sent_between(self, link: Link) -> None:
        """See a link that messages have crossed between two rounds, such as queries of callbacks."""


@dataclass(frozen=True)
class Roles:
    """Roles of a round.

    Attributes:
        sample: draws the clients.
        broadcast: sends the model to them.
        train: trains clients.
        collect: lets clients send what they have trained.
        accept: returns why the server rejects an upload that is finite, in a word or two; "" if it takes it.
        aggregator: merges the uploads of a round.
        reveal: returns the turn of the server's first step with no more than the server may know.
        take_step: takes a step of the server.
        conclude: returns the server's proposal, given the turn after its last step and what the steps propose.
        costs: says what a round has cost, whatever becomes of it.
        counts_each: True if the bits of each client are counted, too.
        observers: watch the round, in this order.
    """

    sample: Sampler
    broadcast: Broadcast
    train: Train
    collect: Collect
    aggregator: Callable[[RoundContext], Aggregator]
    accept: Callable[[Upload], str] = lambda upload: ""
    reveal: Callable[[ServerTurn], ServerTurn] = lambda turn: turn
    take_step: TakeStep = lambda position, step, turn, state: (turn, step(turn, state))
    conclude: Callable[[ServerTurn, Proposal], Proposal] = lambda turn, proposal: proposal
    costs: Callable[[Round], Costs] = costs_of
    counts_each: bool = False
    observers: tuple[Observer, ...] = ()

    def watched_by(self, observer: Observer) -> Roles:
        """Return the roles with one more observer."""
        return replace(self, observers=(*self.observers, observer))
