"""Federation whose server does not wait for the clients of a round: a round is an update after a few uploads.

Who trains when depends on the clients' clocks and on nothing that is trained, so that the events until the next update are known
before it. A client trains when its upload is taken, on the version of the model that it has received.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np

from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.engine.intake import Intake
from lightning_fl.engine.local_work import LocalWork
from lightning_fl.engine.planned_bits import planned_bits
from lightning_fl.engine.population import Cohort
from lightning_fl.engine.round import Federation
from lightning_fl.features.clock.client_devices import Bits, Computation
from lightning_fl.link.link import Link
from lightning_fl.slots import Draw, Message, Pace, RoundContext, State, Upload
from lightning_fl.state.arrivals import Arrival, Started, Update, never, next_update
from lightning_fl.state.outcome import Outcome, Proposal, added_by_client
from lightning_fl.state.run_state import CODEC, COHORT, Run

COUNTERS = "counters/"
"""Prefix of the integer buffers in a version of the model."""


@dataclass(frozen=True)
class TakenWork(LocalWork):
    """Count what the clients have done whose uploads an update takes, whichever are asked for.

    Attributes:
        taken: work of the round in which each has begun, and the client.
    """

    taken: Sequence[tuple[LocalWork, int]] = ()

    def num_batches(self, clients: Iterable[int]) -> int:
        """Return the number of batches of their training."""
        return sum(work.num_batches([client]) for work, client in self.taken)

    def num_steps(self, clients: Iterable[int]) -> int:
        """Return the number of optimiser steps of their training."""
        return sum(work.num_steps([client]) for work, client in self.taken)

    def num_samples(self, clients: Iterable[int]) -> int:
        """Return the number of samples in these batches."""
        return sum(work.num_samples([client]) for work, client in self.taken)

    def num_stragglers(self, clients: Iterable[int]) -> int | None:
        """Return the number of them that run out of time; None if clients never do."""
        if not self.schedule.straggler_rate:
            return None
        return sum(work.num_stragglers([client]) or 0 for work, client in self.taken)


@dataclass(frozen=True)
class TakenCohort(Cohort):
    """The clients that receive the model in a round, and those whose uploads its update takes.

    Attributes:
        num_lost: trainings that end without an upload.
    """

    num_lost: int = 0

    @property
    def num_dropped(self) -> int:
        """Trainings that end without an upload."""
        return self.num_lost


@dataclass(frozen=True)
class UpdateTimes:
    """Seconds between two updates of the server.

    Attributes:
        update: events of these seconds.
        num_places: clients that train at any time.
        bits: bits that clients have sent and received.
        version: updates before.
    """

    update: Update
    num_places: int
    bits: Mapping[int, Bits]
    version: int

    @property
    def seconds(self) -> float:
        """Seconds from the update before."""
        return self.update.seconds - self.update.begin

    def columns(self) -> dict[str, float]:
        """Return the columns of metrics.csv."""
        update, taken = self.update, self.update.taken
        staleness = [self.version - entry.version for entry in taken]
        places = (
            max(self.num_places, update.num_before) * self.seconds
        )  # more are busy if a resumed run has fewer places
        return {
            "time/slowest_client": max(entry.seconds - entry.start for entry in taken),
            "time/utilisation": update.busy_seconds / places if places else 1.0,
            "clients/late": 0,
            "async/staleness_mean": float(np.mean(staleness)),
            "async/staleness_max": max(staleness),
            "async/in_flight": len(update.in_flight),
        }


@dataclass
class WithoutBarrier(Federation):
    """Clients and server of a run in which a round is an update after a few uploads.

    Attributes:
        pace: uploads of an update, and which of them are too stale.
    """

    pace: Pace = field(default_factory=lambda: Pace(1))
    _planned: tuple[tuple[object, ...], Update] | None = field(default=None, init=False, repr=False)

    @property
    def update(self) -> Update:
        """Events until the next update, worked out once."""
        run = self.run
        planned_for: tuple[object, ...] = run.seed, run.round, self.schedule, self.network
        if self._planned is None or self._planned[0] != planned_for:
            fill, places, availability = self._filler(), self.population.cohort_size, self.population.availability
            next_start = never if availability is None else availability.next_start
            now, size = run.simulated_seconds, self.pace.buffer_size
            self._planned = planned_for, next_update(run.in_flight, now, run.round, places, size, fill, next_start)
        return self._planned[1]

    @property
    def cohort(self) -> Cohort:
        """Clients that receive the model, and those whose uploads the next update takes; a client may be there twice."""
        update = self.update
        started, taken = ([entry.client for entry in entries] for entries in (update.started, update.taken))
        return TakenCohort(started, taken, taken, begin=update.begin, num_lost=len(update.lost))

    @property
    def work(self) -> LocalWork:
        """Length of the local training of the clients whose uploads the next update takes."""
        run, context = self.run, self.context
        now = self._work_in(run, context)
        taken = [
            (self._work_in(run.as_of(entry.version, entry.again), context), entry.client) for entry in self.update.taken
        ]
        return TakenWork(**vars(now), taken=taken)

    def _work_in(self, run: Run, present: RoundContext) -> LocalWork:
        """Return the length of the local training of clients that begin in a round, given the facts about the present one."""
        return self._work_of(self._schedule_of(run.round), run, self._context_of(run.round, present))

    def _schedule_of(self, version: int) -> LocalSchedule:
        """Return the schedule of the round in which a version was sent: callbacks, or a resumption, may have changed it."""
        saved = self.run.schedules.get(version)
        return self.schedule if version == self.run.round or saved is None else LocalSchedule(**saved)

    def _context_of(self, version: int, context: RoundContext) -> RoundContext:
        """Return the facts about the run for the training on a version, given those about the present round."""
        if version == context.round:
            return context
        draw = Draw((self.run.seed, version, CODEC), self.population.everyone[-1] + 1)
        epochs, optimizer = self._schedule_of(version).epochs, self.flat_module.optimizer
        rate, momentum = optimizer.largest_rate, optimizer.momentum
        return replace(context, round=version, draw=draw, local_epochs=epochs, learning_rate=rate, momentum=momentum)

    def _filler(self) -> Callable[[float, set[int], int, Sequence[Arrival]], tuple[float, list[Started]]]:
        """Return the function that draws clients for idle places in the present round."""
        run, population, context, num_fills = self.run, self.population, self.context, 0

        @cache
        def bits() -> Bits:
            """Return what a client sends and receives, the same for all."""
            client = int(population.eligible[0])
            shared, work = self.algorithm.share(run.server), self._work_in(run, context)
            broadcast = partial(super(WithoutBarrier, self)._broadcast, selected=[client], shared=shared, work=work)
            return planned_bits(self.flat_module, self.algorithm, run, context, [client], broadcast)[client]

        def fill(
            now: float, busy: set[int], num_places: int, started: Sequence[Arrival]
        ) -> tuple[float, list[Started]]:
            nonlocal num_fills
            there = population.eligible
            if population.availability is not None:
                now, there = population.availability.begin(now, 0 if busy else 1)
            idle = without(there, busy)
            if not len(idle):
                return now, []
            chosen = run.random(COHORT, num_fills).choice(idle, min(num_places, len(idle)), replace=False)
            num_fills += 1
            new = []
            for client in map(int, chosen):
                again = sum(entry.client == client for entry in started)
                work = self._work_in(run.as_of(run.round, again), context)
                seconds = self.time.of_client(client, self.time.computation(work, self.network), bits())
                new.append(Started(client, again, seconds, not population.answering(work.run, [client])))
            return now, new

        return fill

    def _broadcast(self, link: Link, selected: Sequence[int], shared: Message, work: LocalWork) -> ClientJob:
        """Send the model to the clients that begin, and keep it until the last of them has trained."""
        run, method = self.run, self.algorithm
        if not selected:
            received = {"model": run.params, "buffers": run.buffers}
            return ClientJob(method.rule, link.context, received, work.schedule, run, personal=method.personal)
        job = super()._broadcast(link, selected, shared, work)
        counters = {f"{COUNTERS}{name}": entry for name, entry in run.counters.items()}
        run.versions[run.round] = {**job.received, **counters}
        run.schedules[run.round] = asdict(self.schedule)
        schedules = self.flat_module.optimizer.schedules
        schedules.adopt()  # what callbacks have set since the last training
        run.rates[run.round] = deepcopy(schedules.state_dict())
        return job

    def _uploads(self, job: ClientJob, clients: Sequence[int], link: Link, outcome: Outcome) -> Iterator[Upload]:
        """Train the clients whose uploads arrive, each on the version that it has received, and yield their uploads."""
        # A client may send a second upload before the update, and goes on from what it keeps of the first.
        link.client_memory = _overlaid(outcome.memory, link.client_memory)
        for entry in self.update.taken:
            yield from self._uploads_of(entry, job, link, outcome)

    def _uploads_of(self, entry: Arrival, job: ClientJob, link: Link, outcome: Outcome) -> Iterator[Upload]:
        """Train one of the clients, and yield what it uploads."""
        run = self.run
        version, past = run.versions[entry.version], run.as_of(entry.version, entry.again)
        past.clients = _overlaid(outcome.states, run.clients)
        past.counters = {
            name.removeprefix(COUNTERS): value for name, value in version.items() if name.startswith(COUNTERS)
        }
        received = {name: value for name, value in version.items() if not name.startswith(COUNTERS)}
        with self._rates_of(entry.version):
            context = self._context_of(entry.version, job.context)
            schedule = self._schedule_of(entry.version).in_round(job.rule, context)
            its = replace(job, run=past, context=context, received=received, schedule=schedule)
            results = self.roles.train(its, [entry.client])
            for upload in self.algorithm.exchange.collect(results, link):
                upload.staleness = run.round - entry.version
                if self.pace.counts_from == "present":
                    upload.message = self._from_present(upload.message, received)
                yield upload

    def _from_present(self, message: Message, received: Message) -> Message:
        """Return the change of an upload from the server's present model in place of that from the received one."""
        present = {"model": self.run.params, "buffers": self.run.buffers}
        return {
            name: vector + (received[name] - present[name]) if name in present else vector
            for name, vector in message.items()
        }

    @contextmanager
    def _rates_of(self, version: int) -> Iterator[None]:
        """Train with the learning rates of the round in which a version was sent."""
        if version == self.run.round or version not in self.run.rates:
            yield
            return
        with self.flat_module.optimizer.schedules.as_of(self.run.rates[version], version, self.run.round):
            yield

    def _times(  # type: ignore[override]
        self, cohort: Cohort, computation: Computation, outcome: Outcome, link: Link
    ) -> UpdateTimes:
        bits = added_by_client(link.broadcast_bits_by_client, outcome.bits_by_client)
        return UpdateTimes(self.update, self.population.cohort_size, bits, self.run.round)

    def _commit(self, proposal: Proposal | None, outcome: Outcome, intake: Intake) -> None:
        """End the round, and forget the versions on which nobody trains any more."""
        run, update = self.run, self.update
        # The sum over the rounds is rounded, so that uploads of one instant would seem to be of two.
        run.simulated_seconds = update.seconds
        run.in_flight = update.in_flight
        needed = {entry.version for entry in run.in_flight}
        run.versions = {version: model for version, model in run.versions.items() if version in needed}
        run.rates = {version: rates for version, rates in run.rates.items() if version in needed}
        run.schedules = {version: schedule for version, schedule in run.schedules.items() if version in needed}
        super()._commit(proposal, outcome, intake)

    def _selected(self) -> Sequence[int]:
        """Return the clients that begin until the next update."""
        return [entry.client for entry in self.update.started]

    def _send_ahead(self, link: Link) -> None:
        """Let nobody wait: what is sent between two updates goes beside the clients' own messages."""


def without(clients: np.ndarray, busy: set[int]) -> np.ndarray:
    """Return clients, in ascending order, without those that are busy.

    >>> without(np.array([1, 4, 7]), {4, 5, 9}).tolist()
    [1, 7]
    """
    wanted = np.array(sorted(busy), dtype=np.int64)
    places = np.searchsorted(clients, wanted)
    found = places < len(clients)
    found[found] = clients[places[found]] == wanted[found]
    return np.delete(clients, places[found])


def _overlaid(new: Mapping[int, State], old: Mapping[int, State]) -> Any:
    """Return a mapping with the new entries, which may still come, over the old ones."""
    return ChainMap(new, old)  # type: ignore[arg-type]
