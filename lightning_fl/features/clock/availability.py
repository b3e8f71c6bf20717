"""Times at which clients are available, from a CSV file, and the next time at which enough of them are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_fl.errors import require
from lightning_fl.features.clock.csv_table import CLIENT, read_csv

START, END = "start_seconds", "end_seconds"
ROUNDING = 1e-12
"""Largest share of a time by which a sum of seconds may miss it."""


@dataclass(frozen=True, eq=False)
class Availability:
    """Intervals [start, end) in which clients are available, repeated with a period; a client without one never is.

    Attributes:
        path: file that has them.
        starts: starts of the intervals (n,) in seconds, of clients with samples.
        ends: their ends (n,).
        clients: their clients (n,).
        period: seconds after which they repeat.
    """

    path: str
    starts: np.ndarray
    ends: np.ndarray
    clients: np.ndarray
    period: float

    @classmethod
    def read(
        cls, path: str | os.PathLike[str], num_clients: int, eligible: np.ndarray, period: float | None
    ) -> Availability:
        """Read a CSV file with the columns client, start_seconds and end_seconds.

        Args:
            path: path of the file.
            num_clients: clients of the federation, N.
            eligible: clients with samples; the others are left out.
            period: seconds after which the intervals repeat; None for the latest end.

        Raises:
            UserError: the file cannot be read or is malformed; the sentence names the line.
        """
        table = read_csv("the availability file", path, [(CLIENT, START, END)])
        clients, starts, ends = table.clients(num_clients), table.columns[START], table.columns[END]
        table.refuse_first(starts < 0, lambda row: f"{START} must be at least 0, got {starts[row]:g}.")
        table.refuse_first(
            ends <= starts, lambda row: f"{END} must be after {START}, {starts[row]:g}, got {ends[row]:g}."
        )
        period = float(ends.max()) if period is None else float(period)
        table.refuse_first(
            ends > period,
            lambda row: (
                f"{END} must be at most availability_period, {period:g}, got {ends[row]:g}: write an interval across "
                "the end of the period as two."
            ),
        )
        order = np.lexsort((starts, clients))
        before, after = order[:-1], order[1:]
        overlaps = (clients[before] == clients[after]) & (starts[after] < ends[before])
        if overlaps.any():
            one, other = sorted((before[overlaps.argmax()], after[overlaps.argmax()]))
            table.refuse(
                int(other), f"the interval of client {clients[other]} overlaps with that of line {table.lines[one]}."
            )
        has_samples = np.isin(clients, eligible)
        return cls(table.path, starts[has_samples], ends[has_samples], clients[has_samples], period)

    @cached_property
    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Times at which a client comes, in ascending order, and how many are there then: these counts fall in between."""
        moments = np.unique(self.starts)
        ended = np.searchsorted(np.sort(self.ends), moments, side="right")
        begun = np.searchsorted(np.sort(self.starts), moments, side="right")
        return moments, begun - ended

    def check(self, num_needed: int) -> None:
        """Raise `UserError` if this many clients are never available at once."""
        moments, counts = self._moments
        most = int(counts.max(initial=0))
        when = f", at second {moments[counts.argmax()]:g}" if most else ""
        remedy = (
            f"give clients_per_round at most {most}, or if_too_few fewer"
            if most
            else "give intervals of clients with samples"
        )
        require(
            most >= num_needed,
            f"a round needs {num_needed} clients at once, but in {self.path} there are never more than {most}{when}: {remedy}.",
        )

    def begin(self, now: float, num_needed: int) -> tuple[float, np.ndarray]:
        """Return the first time from `now` on at which this many clients are available, and these clients in ascending order.

        Args:
            now: seconds since the beginning of the run.
            num_needed: clients that are needed, no more than `check` has allowed.

        >>> there = Availability("", np.array([0.0, 5.0]), np.array([6.0, 8.0]), np.array([3, 1]), period=10.0)
        >>> [(begin, clients.tolist()) for begin, clients in (there.begin(4, 1), there.begin(4, 2), there.begin(8, 1))]
        [(4, [3]), (5.0, [1, 3]), (10.0, [3])]
        """
        phase, shift = self._phase(now)
        clients = self._at(phase)
        if len(clients) >= num_needed:
            return now, clients
        moments, counts = self._moments
        start, wait = self._next(moments[counts >= num_needed], phase)
        return now + (shift + wait), self._at(start)

    def next_start(self, now: float) -> float:
        """Return the first time after `now` at which a client comes.

        >>> there = Availability("", np.array([0.0, 5.0]), np.array([6.0, 8.0]), np.array([3, 1]), period=10.0)
        >>> there.next_start(4), there.next_start(5), there.next_start(18)
        (5.0, 10.0, 20.0)
        """
        phase, shift = self._phase(now)
        return now + (shift + self._next(self._moments[0], phase)[1])

    def _next(self, moments: np.ndarray, phase: float) -> tuple[float, float]:
        """Return the first of some moments of a period, in ascending order, after another one, and the seconds until then."""
        later = moments[moments > phase]
        if len(later):
            return float(later[0]), float(later[0] - phase)
        return float(moments[0]), float(moments[0] - phase + self.period)

    def _phase(self, now: float) -> tuple[float, float]:
        """Return the time in [0, period), that of a start if rounding has put it just before, and the seconds until then."""
        phase, starts = now % self.period, self._moments[0]
        if not len(starts):
            return phase, 0.0
        place = int(np.searchsorted(starts, phase))
        start = float(starts[place % len(starts)])
        wait = start - phase + (self.period if place == len(starts) else 0.0)
        return (start, wait) if wait <= ROUNDING * max(now, self.period) else (phase, 0.0)

    def _at(self, phase: float) -> np.ndarray:
        """Return the clients that are there at a time in [0, period)."""
        return np.sort(self.clients[(self.starts <= phase) & (phase < self.ends)])
