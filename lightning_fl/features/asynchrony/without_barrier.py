"""Asynchronous rounds: a round is a server update after a few uploads.

The order of trainings depends only on the clients' clocks, not on their results. So the events until the next update are known
in advance. A client's training is computed when the server takes its upload, on the version of the model that the client
received.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any, Protocol

import numpy as np

from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.local_work import LocalWork
from lightning_fl.engine.network import Network
from lightning_fl.engine.population import Cohort
from lightning_fl.engine.roles import Observer, Roles, Round
from lightning_fl.features.asynchrony.arrivals import Arrival, Started, Update, never, next_update
from lightning_fl.link.link import Link
from lightning_fl.outputs.losses import TOO_STALE
from lightning_fl.slots import Draw, Message, Pace, Result, RoundContext, Upload
from lightning_fl.state.outcome import Costs, Outcome, added_by_client
from lightning_fl.state.run_state import CODEC, COHORT, Run

Bits = tuple[int, int]
"""Bits that a client sends, and those that it receives."""
ASYNCHRONY, KEPT = "asynchrony", ("versions", "rates", "schedules")
"""Name of the state in a run, and what it has of each version."""
COUNTERS = "counters/"
"""Prefix of the integer buffers in a version of the model."""


@dataclass(frozen=True)
class UpdateWork(LocalWork):
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
class UpdateCohort(Cohort):
    """The clients that receive the model in a round, and those whose uploads its update takes; a client may be there twice.

    Attributes:
        update: events until the update.
        work_on: returns the length of the training of clients that began with an arrival's.
    """

    update: Update = field(kw_only=True)
    work_on: Callable[[Arrival], LocalWork] = field(kw_only=True)

    @property
    def num_dropped(self) -> int:
        """Trainings that end without an upload."""
        return len(self.update.lost)

    def work(self, present: LocalWork) -> LocalWork:
        """Return the length of the training of the clients whose uploads are taken."""
        return UpdateWork(**vars(present), taken=[(self.work_on(entry), entry.client) for entry in self.update.taken])


class Clock(Protocol):
    """Clock of clients, each of which needs its own time."""

    def seconds_of(self, client: int, work: LocalWork, network: Network, bits: Bits) -> float:
        """Return the seconds of a client's training and messages."""

    def keep_radio_seconds(self, bits_by_client: Mapping[int, Bits], costs: Costs) -> None:
        """Keep for how long the clients of a round have sent and received, given the bits of each, and all costs."""


@dataclass(frozen=True)
class WithoutBarrier:
    """Let the server update the model after the first few uploads that arrive.

    Attributes:
        pace: uploads of an update, and which of them are too stale.
        clock: clock of the clients.
    """

    pace: Pace
    clock: Clock

    def around(self, roles: Roles, engine: Engine) -> Roles:
        """Return the roles of rounds that are updates."""
        updates = Updates(self, roles, engine)
        return replace(
            roles.watched_by(updates),
            sample=updates,
            broadcast=updates.broadcast,
            train=updates.train,
            collect=updates.collect,
            accept=updates.accept,
            costs=updates.costs,
            counts_each=True,
        )


@dataclass(frozen=True)
class Updates(Observer):
    """Updates of the server, as the rounds of a run.

    Attributes:
        settings: pace and clock.
        roles: roles that this object wraps.
        engine: engine of the run.
    """

    settings: WithoutBarrier
    roles: Roles
    engine: Engine

    # -- who trains when ----------------------------------------------------------------------------------------------------

    def select(self, run: Run) -> Sequence[int]:
        """Return the clients that begin until the next update."""
        return self.engine.cohort.selected

    def cohort(self, run: Run) -> UpdateCohort:
        """Return the clients that receive the model, and those whose uploads the next update takes."""
        population, pace = self.engine.population, self.settings.pace
        next_start = never if population.availability is None else population.availability.next_start
        update = next_update(
            [Arrival(*entry) for entry in self._state["in_flight"]],
            run.simulated_seconds,
            run.round,
            population.cohort_size,
            pace.buffer_size,
            self._filler(),
            next_start,
        )
        started, taken = ([entry.client for entry in entries] for entries in (update.started, update.taken))
        return UpdateCohort(started, taken, taken, begin=update.begin, update=update, work_on=self._work_on)

    @property
    def _state(self) -> dict[str, Any]:
        """State in the run, by name.

        `in_flight` has the trainings that go on. The others have an entry for each version on which clients train, by the number
        of updates before it: `versions` what was sent, `rates` the learning rates, `schedules` the length of the training.
        """
        return self.engine.run.features.setdefault(ASYNCHRONY, {"in_flight": [], **{kind: {} for kind in KEPT}})

    @property
    def update(self) -> Update:
        """Events until the next update."""
        cohort = self.engine.cohort
        assert isinstance(cohort, UpdateCohort)
        return cohort.update

    def _filler(self) -> Callable[[float, set[int], int, Sequence[Arrival]], tuple[float, list[Started]]]:
        """Return the function that draws clients for idle places in the present round."""
        engine, num_fills = self.engine, 0
        run, population = engine.run, engine.population

        @cache
        def bits() -> Bits:
            """Return what a client sends and receives, the same for all."""
            client = int(population.eligible[0])
            return engine.planned_bits([client])[client]

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
                work = self._work_in(run.as_of(run.round, again))
                seconds = self.settings.clock.seconds_of(client, work, engine.network, bits())
                new.append(Started(client, again, seconds, not population.answering(work.run, [client])))
            return now, new

        return fill

    # -- versions -----------------------------------------------------------------------------------------------------------

    def _work_on(self, entry: Arrival) -> LocalWork:
        return self._work_in(self.engine.run.as_of(entry.version, entry.again))

    def _work_in(self, run: Run) -> LocalWork:
        """Return the length of the local training of clients that begin in a round."""
        context = self._context_of(run.round, self.engine.context)
        return self.engine.work_of(self._schedule_of(run.round), run, context)

    def _schedule_of(self, version: int) -> LocalSchedule:
        """Return the schedule of the round in which a version was sent: callbacks, or a resumption, may have changed it."""
        run = self.engine.run
        saved = self._state["schedules"].get(version)
        return self.engine.schedule if version == run.round or saved is None else LocalSchedule(**saved)

    def _context_of(self, version: int, context: RoundContext) -> RoundContext:
        """Return the facts about the run for the training on a version, given those about the present round."""
        if version == context.round:
            return context
        engine = self.engine
        draw = Draw((engine.run.seed, version, CODEC), engine.population.everyone[-1] + 1)
        epochs, optimizer = self._schedule_of(version).epochs, engine.flat_module.optimizer
        rate, momentum = optimizer.largest_rate, optimizer.momentum
        return replace(context, round=version, draw=draw, local_epochs=epochs, learning_rate=rate, momentum=momentum)

    @contextmanager
    def _rates_of(self, version: int) -> Iterator[None]:
        """Train with the learning rates of the round in which a version was sent."""
        run, rates = self.engine.run, self._state["rates"]
        if version == run.round or version not in rates:
            yield
            return
        with self.engine.flat_module.optimizer.schedules.as_of(rates[version], version, run.round):
            yield

    def _keep_version(self, job: ClientJob) -> None:
        """Keep the model that clients have received, until the last of them has trained."""
        run, state = self.engine.run, self._state
        counters = {f"{COUNTERS}{name}": entry for name, entry in run.counters.items()}
        state["versions"][run.round] = {**job.received, **counters}
        state["schedules"][run.round] = asdict(self.engine.schedule)
        schedules = self.engine.flat_module.optimizer.schedules
        schedules.adopt()  # what callbacks have set since the last training
        state["rates"][run.round] = deepcopy(schedules.state_dict())

    def _received(self, version: int) -> Message:
        """Return what clients have received with a version."""
        kept = self._state["versions"][version]
        return {name: entry for name, entry in kept.items() if not name.startswith(COUNTERS)}

    # -- the round ----------------------------------------------------------------------------------------------------------

    def broadcast(self, link: Link, cohort: Cohort) -> ClientJob:
        """Send the model to the clients that begin, if there are any."""
        run, method = self.engine.run, self.engine.algorithm
        if cohort.selected:
            return self.roles.broadcast(link, cohort)
        received = {"model": run.params, "buffers": run.buffers}
        schedule = self._work_in(run).schedule
        return ClientJob(method.rule, link.context, received, schedule, run, personal=method.personal)

    def train(self, job: ClientJob, clients: Sequence[int]) -> Iterator[Result]:
        """Train the clients whose uploads arrive, each on the version that it has received."""
        if job.accepted is None:  # a dry round
            yield from self.roles.train(job, clients)
            return
        if job.selected:
            self._keep_version(job)
        for entry in self.update.taken:
            with self._rates_of(entry.version):
                its, staleness = self._job_of(entry, job, job.accepted), job.run.round - entry.version
                yield from map(partial(_stale, staleness), self.roles.train(its, [entry.client]))

    def _job_of(self, entry: Arrival, job: ClientJob, accepted: Outcome) -> ClientJob:
        """Return the job of one of the clients; if it sends its second upload before the update, it goes on from the first."""
        run = self.engine.run
        past = run.as_of(entry.version, entry.again)
        past.clients = ChainMap(accepted.states, run.clients)  # type: ignore[assignment]
        past.counters = {
            name.removeprefix(COUNTERS): value
            for name, value in self._state["versions"][entry.version].items()
            if name.startswith(COUNTERS)
        }
        context = self._context_of(entry.version, job.context)
        schedule = self._schedule_of(entry.version).in_round(job.rule, context)
        return replace(job, run=past, context=context, received=self._received(entry.version), schedule=schedule)

    def collect(self, results: Iterable[Result], link: Link) -> Iterator[Upload]:
        """Let clients send what they have trained, and read it as changes of the server's present model if the pace says so."""
        uploads = self.roles.collect(results, link)
        return uploads if self.settings.pace.counts_from == "received" else map(self._from_present, uploads)

    def _from_present(self, upload: Upload) -> Upload:
        """Return an upload with the change from the server's present model in place of that from the received one."""
        run = self.engine.run
        version, present = run.round - upload.staleness, {"model": run.params, "buffers": run.buffers}
        if version not in self._state["versions"]:  # in a dry round
            return upload
        received = self._received(version)
        upload.message = {
            name: vector + (received[name] - present[name]) if name in present else vector
            for name, vector in upload.message.items()
        }
        return upload

    def accept(self, upload: Upload) -> str:
        """Return why an upload is rejected."""
        return self.roles.accept(upload) if self.settings.pace.takes(upload.staleness) else TOO_STALE

    def costs(self, finished: Round) -> Costs:
        """Return what an update has cost, with the seconds until it."""
        costs, begin, seconds = self.roles.costs(finished), self.update.begin, self.update.seconds
        bits = added_by_client(finished.link.broadcast_bits_by_client, finished.outcome.bits_by_client)
        self.settings.clock.keep_radio_seconds(bits, costs)
        return replace(costs, seconds=(begin - self.engine.run.simulated_seconds) + (seconds - begin))

    def end_round(self, finished: Round) -> dict[str, float]:
        """Forget the versions on which nobody trains any more, and return the columns of the update."""
        run, update = self.engine.run, self.update
        columns = self._columns(update)
        # The sum over the rounds is rounded, so that uploads of one instant would seem to be of two.
        run.simulated_seconds = update.seconds
        needed = {entry.version for entry in update.in_flight}
        kept = {
            kind: {version: entry for version, entry in self._state[kind].items() if version in needed} for kind in KEPT
        }
        run.features[ASYNCHRONY] = {"in_flight": [list(entry) for entry in update.in_flight], **kept}
        return columns

    def _columns(self, update: Update) -> dict[str, float]:
        """Return the columns of metrics.csv."""
        seconds, version = update.seconds - update.begin, self.engine.run.round
        staleness = [version - entry.version for entry in update.taken]
        # More are busy if a resumed run has fewer places.
        places = max(self.engine.population.cohort_size, update.num_before) * seconds
        return {
            "time/slowest_client": max(entry.seconds - entry.start for entry in update.taken),
            "time/utilisation": update.busy_seconds / places if places else 1.0,
            "clients/late": 0,
            "async/staleness_mean": float(np.mean(staleness)),
            "async/staleness_max": max(staleness),
            "async/in_flight": len(update.in_flight),
        }


def _stale(staleness: int, result: Result) -> Result:
    """Return a result of a training on a model that is so many updates old."""
    result.staleness = staleness
    return result


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
