"""Test the times at which clients are there against a search through all moments."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_fl import UserError
from lightning_fl.features.clock.availability import Availability

HEADER = "client,start_seconds,end_seconds"
NUM_CLIENTS, PERIOD = 4, 12


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Availability]:
    def write(*lines: str, period: float | None = None, eligible: tuple[int, ...] = (0, 1, 2, 3)) -> Availability:
        path = tmp_path / "there.csv"
        path.write_text("\n".join((HEADER, *lines)) + "\n")
        return Availability.read(path, NUM_CLIENTS, np.array(eligible), period)

    return write


def clocks_of(client: int, borders: set[int]) -> list[tuple[int, int, int]]:
    """Return intervals of a client between every other pair of neighbouring borders."""
    ordered = sorted(borders)
    return [(client, start, end) for start, end in zip(ordered[::2], ordered[1::2], strict=False)]


intervals = st.tuples(*(st.sets(st.integers(0, PERIOD), max_size=6) for _ in range(NUM_CLIENTS))).map(
    lambda borders: [row for client, own in enumerate(borders) for row in clocks_of(client, own)]
)


@pytest.mark.long
@given(intervals, st.integers(0, 40), st.integers(1, NUM_CLIENTS))
def test_a_round_begins_at_the_first_moment_with_enough_clients(
    rows: list[tuple[int, int, int]], now: int, num_needed: int
) -> None:
    clients, starts, ends = np.array(rows or np.zeros((0, 3))).T
    there = Availability("there.csv", starts.astype(float), ends.astype(float), clients.astype(int), float(PERIOD))

    def at(moment: int) -> list[int]:
        return [client for client, start, end in rows if start <= moment % PERIOD < end]

    first = next((moment for moment in range(now, now + PERIOD + 1) if len(at(moment)) >= num_needed), None)
    if first is None:
        with pytest.raises(UserError, match=f"needs {num_needed} clients at once"):
            there.check(num_needed)
    else:
        there.check(num_needed)
        begin, found = there.begin(float(now), num_needed)
        assert (begin, found.tolist()) == (first, at(first))


@pytest.mark.long
@given(intervals.filter(bool), st.integers(0, 40))
def test_the_next_to_come_comes_at_the_first_start_after_now(rows: list[tuple[int, int, int]], now: int) -> None:
    clients, starts, ends = np.array(rows).T
    there = Availability("there.csv", starts.astype(float), ends.astype(float), clients.astype(int), float(PERIOD))
    comes = {start for _, start, _ in rows}
    assert there.next_start(float(now)) == next(t for t in range(now + 1, now + PERIOD + 1) if t % PERIOD in comes)


@pytest.mark.long
@example([0.5, 1e-12], 0.0, 3.0)
@given(
    st.lists(st.floats(0, 0.99), min_size=1, max_size=4, unique_by=lambda x: round(x, 6)),
    st.floats(0, 1e6),
    st.floats(1e-3, 1e5),
)
def test_whoever_comes_is_there_whatever_the_rounding(starts: list[float], now: float, period: float) -> None:
    times = np.array(sorted(starts)) * period
    there = Availability("there.csv", times, times + 1e-9 * period, np.arange(len(times)), period)
    for _ in range(2 * len(times)):
        before, now = now, there.next_start(now)
        assert now >= before
        if period > 1e-6 * now:  # else an interval is shorter than the rounding
            assert len(there.begin(now, 0)[1])


def test_a_file_may_be_in_any_order_and_ends_are_not_included(read: Callable[..., Availability]) -> None:
    there = read("2,5,9", "0,0,10", "2,0,5", "1,9,10")
    assert there.period == 10
    assert [there.begin(now, 1)[1].tolist() for now in (0.0, 5.0, 9.0, 19.5)] == [[0, 2], [0, 2], [0, 1], [0, 1]]
    assert read("2,5,9", "0,0,10", eligible=(2,)).begin(0.0, 1)[0] == 5


@pytest.mark.parametrize(
    ("lines", "period", "sentence"),
    [
        (["0,1,2", "0,3,3"], None, "line 3: end_seconds must be after start_seconds, 3, got 3"),
        (["0,-1,2"], None, "line 2: start_seconds must be at least 0, got -1"),
        (["4,0,2"], None, "line 2: client 4 is unknown: the federation has the clients 0 to 3"),
        (["0,5,9", "1,0,9", "0,2,6"], None, "line 4: the interval of client 0 overlaps with that of line 2"),
        (["0,5,9", "0,5,9"], None, "line 3: the interval of client 0 overlaps with that of line 2"),
        (["0,0,9", "1,0,5", "1,4,9"], None, "line 4: the interval of client 1 overlaps with that of line 3"),
        (["0,1,2", "0,3,20"], 10, "line 3: end_seconds must be at most availability_period, 10, got 20"),
        (["0,1,soon"], None, "line 2: end_seconds must be a number, got 'soon'"),
    ],
)
def test_malformed_intervals_are_refused_with_their_line(
    lines: list[str], period: float | None, sentence: str, read: Callable[..., Availability]
) -> None:
    with pytest.raises(UserError, match=sentence):
        read(*lines, period=period)


def test_a_refusal_says_when_most_clients_are_there(read: Callable[..., Availability]) -> None:
    with pytest.raises(UserError, match=r"never more than 2, at second 4: give clients_per_round at most 2"):
        read("0,0,5", "1,4,6", "2,6,7").check(3)
    with pytest.raises(UserError, match="give intervals of clients with samples"):
        read("0,0,5", eligible=(1,)).check(1)
