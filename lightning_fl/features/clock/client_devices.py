"""Devices of a federation's clients, and the seconds that each client needs in a round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from lightning_fl.engine.local_work import LocalWork
from lightning_fl.engine.population import Cohort
from lightning_fl.features.clock.client_clock import ClientClock, Device, Training
from lightning_fl.state.run_state import CLOCK, JITTER, Run

Bits = tuple[int, int]
"""Bits that a client sends, and those that it receives."""
GRADIENT_PASSES = 3
"""Forward passes that take as long as a gradient."""


@dataclass(frozen=True)
class Computation:
    """What the clients of a round compute.

    Attributes:
        work: length of their local training.
        macs: multiply-accumulates of a sample's forward pass of the whole network.
        share: these as a fraction of those when the run began.
        growth: samples of a client's training, as a multiple of those that the clock's `computation_seconds` are for.
        asked: clients that compute their loss at the received model first, in a forward pass over so many samples.
        passed_over: those of them that do not train then.
    """

    work: LocalWork
    macs: float
    share: float
    growth: float
    asked: Mapping[int, int] = field(default_factory=dict)
    passed_over: Collection[int] = ()

    def of_client(self, client: int) -> Training:
        """Return what a client computes, as far as it gets."""
        trains = client not in self.passed_over
        samples = self.work.num_samples([client]) + self._of_losses(client) if trains else 0.0
        if client in self.asked:
            samples += self.asked[client] / GRADIENT_PASSES
        return self.whole(client)._replace(samples=samples)

    def whole(self, client: int) -> Training:
        """Return the local training of a client that does not stop early."""
        planned, part = self.work.planned_samples(client), self.work.share_of(client)
        samples = planned + self._of_losses(client)
        return Training(samples, planned / self.growth, self.macs * part, self.share * part)

    def _of_losses(self, client: int) -> float:
        """Return the samples whose gradients take as long as the losses that a client computes before its steps."""
        return self.work.loss_samples(client) / GRADIENT_PASSES


class ClientDevices:
    """Speeds of all clients of a run; those of a client are drawn when it takes part for the first time."""

    def __init__(self, clock: ClientClock, run: Run, sizes: np.ndarray, differ: bool) -> None:
        """Read the clock's trace, if it has one.

        Args:
            clock: clock of the clients.
            run: run whose seed decides the draws.
            sizes: number of samples of each client of the federation.
            differ: False if all samples are in one place, whose speeds are the clock's own.

        Raises:
            UserError: the trace cannot be read, is malformed or lacks a client.
        """
        self.clock = clock
        self._run = run
        self._differ = differ
        self._devices: dict[int, Device] = {}
        self._of_trace: Callable[[int], Device] | None = None
        if clock.trace is not None:
            beyond = int(np.max(np.flatnonzero(sizes))) + 1  # no client's own stream
            order = cache(lambda count: self._run.random(CLOCK, beyond, in_round=0).permutation(count))
            self._of_trace = clock.read_trace(len(sizes), order)

    def device(self, client: int) -> Device:
        """Return the speeds of a client."""
        if client not in self._devices:
            if not self._differ:
                self._devices[client] = self.clock.median
            elif self._of_trace is not None:
                self._devices[client] = self._of_trace(client)
            else:
                self._devices[client] = self.clock.drawn(self._run.random(CLOCK, client, in_round=0))
        return self._devices[client]

    def seconds(self, client: int, computation: Computation, bits: Bits) -> float:
        """Return the seconds in a round of a client that sends and receives so many bits."""
        seconds = self.clock.seconds_on(self.device(client), *bits, computation.of_client(client))
        return seconds / self.jitter(client, computation.work.run)

    def expected_seconds(self, client: int, computation: Computation, bits: Bits) -> float:
        """Return the seconds in a round of a client that is as fast as usual and does not stop early."""
        return self.clock.seconds_on(self.device(client), *bits, computation.whole(client))

    def jitter(self, client: int, run: Run) -> float:
        """Return how many times as fast as usual a client is in the present round of the run."""
        return self.clock.jitter(run.random(JITTER, client)) if self._differ and self.clock.sigmas[3] else 1.0

    def slowest_transfer(self, bits_by_client: Mapping[int, Bits]) -> float:
        """Return the seconds of the client that sends and receives for the longest time."""
        return max((sum(self._transfer(client, bits)) for client, bits in bits_by_client.items()), default=0.0)

    def radio_seconds(self, bits_by_client: Mapping[int, Bits], total: Bits) -> dict[str, float]:
        """Return the seconds in which clients send (`up`) and receive (`down`), all of them together.

        Args:
            bits_by_client: bits of each client of a round.
            total: bits of all clients; those of clients that are not in the round take the time that the clock's own speeds need.
        """
        times = [self._transfer(client, bits) for client, bits in bits_by_client.items()]
        up, down = (all_bits - sum(bits[way] for bits in bits_by_client.values()) for way, all_bits in enumerate(total))
        times.append(self.clock.transfer_seconds(self.clock.median, up, down))
        return {"up": sum(up for up, _ in times), "down": sum(down for _, down in times)}

    def _transfer(self, client: int, bits: Bits) -> tuple[float, float]:
        return self.clock.transfer_seconds(self.device(client), *bits)


def in_time(seconds: Mapping[int, float], num_places: int, deadline: float | None) -> list[int]:
    """Return the clients that answer before a round closes, in the order of the draw.

    Args:
        seconds: seconds of each client that answers, in the order of the draw, which decides ties.
        num_places: number of answers after which the round closes, K.
        deadline: seconds after which it closes; None for never.

    >>> in_time({7: 3.0, 2: 1.0, 4: 1.0, 9: 0.5}, num_places=2, deadline=None), in_time({7: 3.0, 2: 1.0}, 2, deadline=2.0)
    ([2, 9], [2])
    """
    first = sorted(seconds, key=lambda client: seconds[client])[:num_places]
    accepted = {client for client in first if deadline is None or seconds[client] <= deadline}
    return [client for client in seconds if client in accepted]


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of a round.

    Attributes:
        cohort: cohort of the round.
        num_places: answers after which it closes, K.
        deadline: seconds after which it closes; None for never.
        clients: seconds of each client that does not drop out; of a late one as they were planned.
        bits: bits that each selected client has sent and received.
    """

    cohort: Cohort
    num_places: int
    deadline: float | None
    clients: Mapping[int, float]
    bits: Mapping[int, Bits]

    @property
    def seconds(self) -> float:
        """Seconds until the round closes: with its K-th answer, or the last one if fewer come, or else at the deadline."""
        answering: Sequence[int] = self.cohort.answering
        is_short = self.cohort.late and len(answering) < self.num_places
        if self.deadline is not None and self.cohort.selected and (not answering or is_short):
            return self.deadline
        last = max((self.clients[client] for client in (*answering, *self.cohort.passed_over)), default=0.0)
        # Messages whose size depends on what is trained may take longer than was planned.
        return last if self.deadline is None else min(last, self.deadline)

    def columns(self) -> dict[str, float]:
        """Return the columns of metrics.csv."""
        busy = np.minimum(list(self.clients.values()), self.seconds).sum()
        places = len(self.cohort.selected) * self.seconds
        return {
            "time/slowest_client": max(self.clients.values(), default=0.0),
            "time/utilisation": float(busy / places) if places else 0.0,
            "clients/late": len(self.cohort.late),
        }
