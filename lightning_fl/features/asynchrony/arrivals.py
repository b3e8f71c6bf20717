"""Order of events in asynchronous rounds: which clients train, and when their uploads arrive."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf, isclose
from typing import NamedTuple


class Arrival(NamedTuple):
    """Training of a client, ordered by the time at which its upload arrives; ties are ordered by their start.

    Attributes:
        seconds: simulated seconds at which its upload arrives.
        sequence: its place among the trainings that go on, in the order of their start.
        client: index of the client.
        version: updates of the server's model that the client received.
        again: trainings of the client on the same version before it.
        is_lost: True if the client drops out, so that nothing arrives, and its place is free from then on.
        start: simulated seconds at which the client received the model.
    """

    seconds: float
    sequence: int
    client: int
    version: int
    again: int
    is_lost: bool
    start: float


class Started(NamedTuple):
    """A training that begins: client, trainings of it on the same version before, its seconds, and whether it drops out."""

    client: int
    again: int
    seconds: float
    is_lost: bool


Fill = Callable[[float, set[int], int, Sequence[Arrival]], tuple[float, list[Started]]]
"""Given the time, the busy clients, the number of idle places and the trainings begun since the last update: when further ones
begin, which is later than now only if nobody is busy, and these."""


@dataclass(frozen=True)
class Update:
    """Events until the server's next update.

    Attributes:
        started: trainings that begin, in their order.
        taken: trainings whose uploads arrive, in their order.
        lost: trainings that end without an upload.
        in_flight: trainings that go on.
        begin: simulated seconds of the update before.
        seconds: simulated seconds of the update.
    """

    started: list[Arrival]
    taken: list[Arrival]
    lost: list[Arrival]
    in_flight: list[Arrival]
    begin: float
    seconds: float

    @property
    def num_before(self) -> int:
        """Number of trainings that went on at the update before."""
        return len(self.taken) + len(self.lost) + len(self.in_flight) - len(self.started)

    @property
    def busy_seconds(self) -> float:
        """Seconds that clients have spent since the update before, all of them together."""
        trainings = [*self.taken, *self.lost, *self.in_flight]
        return sum(max(0.0, min(entry.seconds, self.seconds) - max(entry.start, self.begin)) for entry in trainings)


def never(now: float) -> float:
    """Return the time at which further clients come where all are always there."""
    return inf


def next_update(
    in_flight: Sequence[Arrival],
    now: float,
    version: int,
    num_places: int,
    buffer_size: int,
    fill: Fill,
    next_start: Callable[[float], float] = never,
) -> Update:
    """Return the events until `buffer_size` uploads have arrived.

    The server takes all uploads of an instant, and makes its updates, before it fills idle places. A place stays idle until a
    client is available. Times that differ only by rounding, such as 0.7 + 0.7 + 0.7 and 2.1, are one instant.

    Args:
        in_flight: trainings that go on.
        now: simulated seconds of the last update.
        version: updates so far.
        num_places: clients that train at any time, M.
        buffer_size: uploads of an update, K.
        fill: draws clients for idle places.
        next_start: returns the first time after another one at which a client comes; inf if all are always there.
    """
    queue, begin = list(in_flight), now
    heapify(queue)
    instants = sorted(entry.seconds for entry in in_flight)
    started, taken, lost = list[Arrival](), list[Arrival](), list[Arrival]()
    sequence = 1 + max((entry.sequence for entry in in_flight), default=-1)
    while len(taken) < buffer_size:
        if len(queue) < num_places and not (queue and queue[0].seconds <= now):
            now, new = fill(now, {entry.client for entry in queue}, num_places - len(queue), started)
            for client, again, seconds, is_lost in new:
                arrival = _instant(now + seconds, instants)
                entry = Arrival(arrival, sequence, client, version, again, is_lost, now)
                sequence += 1
                started.append(entry)
                heappush(queue, entry)
            coming, first = next_start(now) if len(queue) < num_places else inf, queue[0].seconds
            if now < coming < first and not isclose(coming, first):
                now = coming
                continue
        entry = heappop(queue)
        now = entry.seconds
        (lost if entry.is_lost else taken).append(entry)
    return Update(started, taken, lost, sorted(queue), begin, now)


def _instant(seconds: float, instants: list[float]) -> float:
    """Return the instant in an ascending list that differs from a time by rounding alone; a new one is added to the list."""
    place = bisect_left(instants, seconds)
    for instant in instants[max(0, place - 1) : place + 1]:
        if isclose(instant, seconds):
            return instant
    instants.insert(place, seconds)
    return seconds
