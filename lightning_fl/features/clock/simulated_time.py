"""Simulated seconds of a run's rounds and clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.local_work import LocalWork
from lightning_fl.engine.network import Network
from lightning_fl.engine.population import Cohort
from lightning_fl.engine.roles import Observer, Roles, Round, Sampler
from lightning_fl.features.clock.client_devices import (
    GRADIENT_PASSES,
    Bits,
    ClientDevices,
    Computation,
    RoundTimes,
    in_time,
)
from lightning_fl.features.clock.simulated_clock import SimulatedClock
from lightning_fl.link.link import DIRECTIONS, Link
from lightning_fl.outputs.losses import say_lost
from lightning_fl.state.outcome import Costs, added_by_client
from lightning_fl.state.run_state import Run

CLOCK, EARLY, RADIO = "clock", "early_seconds", "radio_seconds"
"""Name of the state in a run, and in it: seconds of messages since the last round, which count with the next, and those in which
clients sent (`up`) and received (`down`) in the last round, all of them together."""


@dataclass
class SimulatedTime(Observer):
    """Compute the simulated seconds of a run's rounds.

    Attributes:
        clock: simulates the time of a round.
        run: the run, whose time it is.
        sizes: number of samples of each client (N,).
        measured_work: local training that the clock's `computation_seconds` are for: by the flags, on the clients' own samples.
        devices: devices of the clients, if the clock is one of clients; else None.
        deadline: seconds after which a round closes; None for never.
        planned: seconds of each client that could have answered in the round planned last.
        times: seconds of the last round and of its clients; None unless the clock is one of clients.
    """

    clock: SimulatedClock
    run: Run
    sizes: np.ndarray
    measured_work: LocalWork
    devices: ClientDevices | None = None
    deadline: float | None = None
    planned: dict[int, float] = field(default_factory=dict, init=False)
    times: RoundTimes | None = field(default=None, init=False)
    _says_late: bool = field(default=False, init=False, repr=False)
    _growths: dict[LocalSchedule, float] = field(default_factory=dict, init=False, repr=False)

    def around(self, roles: Roles, engine: Engine) -> Roles:
        """Return the roles of a round whose time this object simulates, and which closes at the deadline."""
        roles = replace(roles.watched_by(self), costs=partial(self._costs, engine, roles.costs))
        if self.devices is not None:
            roles = replace(roles, counts_each=True)
        if self.deadline is not None or engine.population.over_selection > 1:
            roles = replace(roles, sample=InTime(self, roles.sample, engine))
        return roles

    def _costs(self, engine: Engine, costs_of: Callable[[Round], Costs], finished: Round) -> Costs:
        """Return what a round has cost, with its seconds.

        With a clock of clients the round lasts until it closes, and begins when enough clients are there.
        """
        costs, cohort, run = costs_of(finished), finished.cohort, self.run
        computation = self.computation(finished.work, engine.network, cohort)
        if self.devices is None:
            return replace(costs, seconds=self._seconds(cohort, computation, *self._bits(costs)))
        bits = added_by_client(finished.link.broadcast_bits_by_client, finished.outcome.bits_by_client)
        times = self.times = self.of_round(cohort, engine.population.cohort_size, computation, bits)
        early = run.features.get(CLOCK, {}).get(EARLY, 0.0)
        self.keep_radio_seconds(times.bits, costs)
        return replace(costs, seconds=(cohort.begin - run.simulated_seconds) + early + times.seconds)

    def keep_radio_seconds(self, bits_by_client: Mapping[int, Bits], costs: Costs) -> None:
        """Keep for how long the clients of a round have sent and received, with a clock of clients.

        Args:
            bits_by_client: bits that each of them has sent and received.
            costs: what the round has cost, all clients together.
        """
        assert self.devices is not None
        self.run.features[CLOCK] = {RADIO: self.devices.radio_seconds(bits_by_client, self._bits(costs))}

    def _bits(self, costs: Costs) -> Bits:
        """Return the bits of a round in each direction, with those that were booked for it in advance."""
        up, down = (self.run.ledger.bits_of_next(way, costs.broadcast_bits, costs.bits) for way in DIRECTIONS)
        return up, down

    def end_round(self, finished: Round) -> dict[str, float]:
        """Return the columns about the clients' times; say once that nobody answers before the deadline."""
        late = finished.cohort.late
        if late and not finished.cohort.answering and not self._says_late:
            self._says_late, fastest = True, min(self.planned[client] for client in late)
            say_lost(
                f"Round {finished.number}: none of the {len(late)} clients that answer does so before the deadline of "
                f"{self.deadline:g} simulated seconds, so the model did not change; the fastest would need {fastest:.3g}."
            )
        return {} if self.times is None else self.times.columns()

    def computation(self, work: LocalWork, network: Network, cohort: Cohort | None = None) -> Computation:
        """Return what clients compute in a round.

        Args:
            work: length of their local training.
            network: module as they train it.
            cohort: clients of the round, which says who is asked before the training; None if nobody is.
        """
        macs, at_start = network.macs or 0, self.run.macs_at_start or 0
        share, growth = macs / at_start if macs and at_start else 1.0, self._growth(work)
        if cohort is None or not cohort.asked:
            return Computation(work, macs, share, growth)
        return Computation(work, macs, share, growth, cohort.asked, frozenset(cohort.passed_over))

    def plan(self, clients: Iterable[int], computation: Computation, bits: Mapping[int, Bits]) -> dict[int, float]:
        """Work out and keep the seconds that clients are going to need, in their order, with a clock of clients.

        Args:
            clients: clients that do not drop out of the present round.
            computation: what they are going to compute.
            bits: bits that each of them is going to send and receive.
        """
        self.planned = {client: self._seconds_of(client, computation, bits[client]) for client in clients}
        return self.planned

    def expected_seconds(self, clients: Sequence[int], engine: Engine) -> dict[int, float]:
        """Return the seconds that clients are expected to need in the present round; all processes must call it.

        With a clock of clients, each of them as fast as usual and with all its steps.
        """
        assert self.devices is not None
        work = engine.work_of(engine.schedule, engine.run, engine.context)
        bits, computation = engine.planned_bits(clients), self.computation(work, engine.network)
        return {client: self.devices.expected_seconds(client, computation, bits[client]) for client in clients}

    def seconds_of(self, client: int, work: LocalWork, network: Network, bits: Bits) -> float:
        """Return the seconds of a client in a round, with a clock of clients."""
        return self._seconds_of(client, self.computation(work, network), bits)

    def _seconds_of(self, client: int, computation: Computation, bits: Bits) -> float:
        assert self.devices is not None
        return self.devices.seconds(client, computation, bits)

    def of_round(
        self, cohort: Cohort, num_places: int, computation: Computation, bits: Mapping[int, Bits]
    ) -> RoundTimes:
        """Return the seconds of a round and of its clients, with a clock of clients.

        Args:
            cohort: cohort of the round.
            num_places: answers after which it closes, K.
            computation: what its clients have computed.
            bits: bits that each selected client has sent and received.
        """
        here = (*cohort.answering, *cohort.passed_over)
        seconds = {client: self._seconds_of(client, computation, bits[client]) for client in here}
        seconds |= {client: self.planned[client] for client in cohort.late}
        return RoundTimes(cohort, num_places, self.deadline, seconds, bits)

    def _seconds(self, cohort: Cohort, computation: Computation, uplink_bits: int, downlink_bits: int) -> float:
        """Return the seconds of a round without a clock of clients: as long as the client that computes most needs.

        That client has the most samples × share of the network.
        """
        if not cohort.answering:
            return self.clock.seconds(uplink_bits, downlink_bits, macs=0.0, work=0.0)
        work = computation.work
        most = max(cohort.answering, key=lambda client: self.sizes[client] * work.share_of(client))
        num_samples: float = work.planned_samples(most)
        growth, part = computation.growth, work.share_of(most)
        if num_samples:
            passed = work.loss_samples(most) + max(cohort.asked.values(), default=0)
            growth *= 1 + passed / GRADIENT_PASSES / num_samples
            num_samples += passed / GRADIENT_PASSES
        return self.clock.seconds(
            uplink_bits, downlink_bits, computation.macs * num_samples * part, computation.share * growth * part
        )

    def sent_between(self, link: Link) -> None:
        """Let the next round begin once the slowest of a link's clients has its messages, if the clock is one of clients."""
        if self.devices is not None:
            state = self.run.features.setdefault(CLOCK, {})
            state[EARLY] = state.get(EARLY, 0.0) + self.devices.slowest_transfer(link.bits_by_client)

    def _growth(self, work: LocalWork) -> float:
        """Return the samples of a client's training, as a multiple of those that the clock's `computation_seconds` are for."""
        if self.clock.computation_seconds is None:
            return 1.0
        if work.schedule not in self._growths:
            measured = self.measured_work.mean_samples()
            self._growths[work.schedule] = float(work.mean_samples() / measured) if measured else 1.0
        return self._growths[work.schedule]


@dataclass(frozen=True)
class InTime:
    """Sampler of clients that answer before the round closes, by the bits that they are going to send and receive.

    Attributes:
        time: seconds that clients need.
        inner: sampler of those that are selected and do not drop out.
        engine: engine of the run.
    """

    time: SimulatedTime
    inner: Sampler
    engine: Engine

    def select(self, run: Run) -> Sequence[int]:
        """Return the clients that receive the broadcast."""
        return self.inner.select(run)

    def cohort(self, run: Run) -> Cohort:
        """Return the clients of the round, of which some may be late."""
        engine, cohort = self.engine, self.inner.cohort(run)
        work = engine.work_of(engine.schedule, run, engine.context)
        bits = engine.planned_bits(cohort.selected)
        planned = self.time.plan(cohort.answering, self.time.computation(work, engine.network, cohort), bits)
        answering = in_time(planned, engine.population.cohort_size, self.time.deadline)
        accepted = set(answering)
        late = [client for client in cohort.answering if client not in accepted]
        return replace(cohort, answering=answering, mine=engine.population.mine(answering), late=late)
