"""Test the clock of clients: their speeds, drawn or from a trace, and the seconds of each."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fl import UserError
from lightning_fl.features.clock import ClientClock, SimulatedClock
from lightning_fl.features.clock.client_clock import PRESETS, Training

SPEEDS = "macs_per_second,uplink_mebibytes_per_second,downlink_mebibytes_per_second"
WHOLE = Training(samples=10, measured=10, macs=1e6, share=1.0)


def in_order(count: int) -> np.ndarray:
    return np.arange(count)


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., ClientClock]:
    def write(*lines: str) -> ClientClock:
        path = tmp_path / "trace.csv"
        path.write_text("\n".join(lines) + "\n")
        return ClientClock(trace=path)

    return write


def test_seconds_of_a_client_add_up_by_hand() -> None:
    clock = ClientClock(macs_per_second=2e6, uplink_mebibytes_per_second=0.5, downlink_mebibytes_per_second=4.0)
    bits = 8 * 2**20
    assert clock.seconds_on(clock.median, bits, 2 * bits, WHOLE) == pytest.approx(1 / 0.5 + 2 / 4 + 3 * 1e6 * 10 / 2e6)


def test_measured_seconds_follow_speed_steps_and_size_of_the_network() -> None:
    clock = ClientClock(computation_seconds=8.0)
    slow = clock.median._replace(macs_per_second=clock.macs_per_second / 4)
    assert clock.seconds_on(slow, 0, 0, Training(samples=5, measured=10, macs=7.0, share=0.5)) == 8 * 4 * 0.5 * 0.5
    assert clock.seconds_on(slow, 0, 0, Training(samples=0, measured=0, macs=7.0, share=0.5)) == 0


@pytest.mark.long
@given(st.floats(0.01, 100), st.integers(0, 10**9), st.integers(0, 10**9))
def test_speeds_times_c_divide_the_seconds_by_c(factor: float, up: int, down: int) -> None:
    def seconds(scale: float) -> float:
        clock = ClientClock(
            macs_per_second=1e9 * scale,
            uplink_mebibytes_per_second=3 * scale,
            downlink_mebibytes_per_second=5 * scale,
            devices="phones",
        )
        return clock.seconds_on(clock.drawn(np.random.default_rng(0)), up, down, WHOLE)

    assert seconds(factor) == pytest.approx(seconds(1.0) / factor)


@pytest.mark.long
def test_the_clock_has_the_median_speeds_and_the_spreads_those_of_their_logarithms() -> None:
    clock = ClientClock(computation_sigma=0.5, uplink_sigma=1.0, downlink_sigma=2.0)
    drawn = np.log([clock.drawn(np.random.default_rng(seed))[:3] for seed in range(4000)])
    assert np.median(drawn, axis=0) == pytest.approx(np.log(clock.median[:3]), abs=0.15)
    assert drawn.std(axis=0) == pytest.approx([0.5, 1.0, 2.0], rel=0.06)
    assert ClientClock().drawn(np.random.default_rng(0)) == ClientClock().median


@pytest.mark.parametrize("name", PRESETS)
def test_a_spread_that_is_given_goes_over_the_presets(name: str) -> None:
    assert ClientClock(devices=name).sigmas == PRESETS[name]
    assert ClientClock(devices=name, uplink_sigma=0).sigmas == (PRESETS[name][0], 0, *PRESETS[name][2:])
    row = f"{name:<8} {PRESETS[name][0]:<18} {PRESETS[name][1]:<29} {PRESETS[name][3]}"
    assert row.split() in [line.split() for line in (ClientClock.__doc__ or "").splitlines()]


@pytest.mark.parametrize(
    ("settings", "is_of_clients"),
    [({}, False), ({"macs_per_second": 1.0}, False), ({"jitter_sigma": 0.0}, True), ({"devices": "silos"}, True)],
)
def test_a_setting_of_a_clock_of_clients_makes_one(settings: dict[str, float], is_of_clients: bool) -> None:
    clock = ClientClock.of(SimulatedClock(**settings))
    assert isinstance(clock, ClientClock) == is_of_clients
    assert all(getattr(clock, name) == value for name, value in settings.items())
    assert ClientClock.of(clock) is clock


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"devices": "phone"}, "devices 'phone' is unknown; did you mean 'phones'"),
        ({"uplink_sigma": -0.1}, r"uplink_sigma must lie in \[0, 10\], got -0.1"),
        ({"trace": "x.csv", "devices": "silos"}, "and devices would draw them"),
        ({"trace": "x.csv", "downlink_sigma": 0.5}, "and downlink_sigma would draw them"),
    ],
)
def test_impossible_clocks_of_clients_are_refused(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ClientClock(**settings)


def test_a_trace_names_the_rows_of_its_clients(trace: Callable[..., ClientClock]) -> None:
    device = trace(f"{SPEEDS},client", "1e9,1,2,1", "", "5e8,3,4,0").read_trace(2, in_order)
    assert [device(0), device(1)] == [(5e8, 3, 4, None), (1e9, 1, 2, None)]


def test_a_trace_without_clients_is_dealt_again_when_it_runs_out(trace: Callable[..., ClientClock]) -> None:
    device = trace(SPEEDS, "1,1,1", "2,2,2", "3,3,3").read_trace(8, lambda count: np.arange(count)[::-1])
    assert [device(client).macs_per_second for client in range(8)] == [3, 2, 1, 3, 2, 1, 3, 2]


def test_fedscales_trace_has_milliseconds_and_kilobits(trace: Callable[..., ClientClock]) -> None:
    clock = trace("computation,communication", "40,8000")
    seconds = clock.seconds_on(clock.read_trace(3, in_order)(2), 4_000_000, 2_000_000, WHOLE._replace(share=0.5))
    assert seconds == pytest.approx(3 * 10 * 0.04 * 0.5 + 0.5 + 0.25)
    with pytest.raises(UserError, match="leave computation_seconds out"):
        ClientClock(computation_seconds=1.0, trace=clock.trace).read_trace(3, in_order)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([""], "trace.csv.* must be"),
        ([SPEEDS], "trace.csv has no rows below its header"),
        (["speed,computation", "1,2"], "line 1: column 'speed' is unknown; "),
        (["computation", "1"], "line 1: the columns must be"),
        ([f"{SPEEDS},{SPEEDS}", "1,1,1,1,1,1"], "line 1: the columns must be"),
        ([SPEEDS, "1,1,1", "1,1"], "line 3: 2 values, but the header has 3"),
        ([SPEEDS, "1,1,1", "", "1,fast,1"], "line 4: uplink_mebibytes_per_second must be a number, got 'fast'"),
        ([SPEEDS, "1,1,nan"], "line 2: downlink_mebibytes_per_second must be a finite number, got 'nan'"),
        ([SPEEDS, "1,1,1", "0,1,1"], "line 3: macs_per_second must be positive, got 0"),
        (["computation,communication", "1,-3"], "line 2: communication must be positive, got -3"),
        (
            [SPEEDS, "1,1,1", "1,1e-320,1"],
            "line 3: uplink_mebibytes_per_second must be from 1.2e-38 to 3.4e.38, got 9.99989e-321",
        ),
        ([SPEEDS, "1e300,1,1"], "line 2: macs_per_second must be from 1.2e-38 to 3.4e.38, got 1e.300"),
        (
            [f"client,{SPEEDS}", "0,1,1,1", "2,1,1,1"],
            "line 3: client 2 is unknown: the federation has the clients 0 to 1",
        ),
        ([f"client,{SPEEDS}", "0.5,1,1,1"], "line 2: client 0.5 is unknown"),
        ([f"client,{SPEEDS}", "0,1,1,1", "1,1,1,1", "0,1,1,1"], "line 4: client 0 has a row on line 2 already"),
        ([f"client,{SPEEDS}", "1,1,1,1"], "has no row for 1 of the 2 clients, the first of which is 0"),
        ([SPEEDS, '1,1,"1'], "line 2: "),
    ],
)
def test_malformed_traces_are_refused_with_their_line(
    lines: list[str], sentence: str, trace: Callable[..., ClientClock]
) -> None:
    with pytest.raises(UserError, match=sentence) as refused:
        trace(*lines).read_trace(2, in_order)
    assert str(refused.value).count("\n") == 0


@pytest.mark.parametrize("content", [None, b"\xff\xfe1\x00"])
def test_a_trace_that_is_no_text_file_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"trace.csv (is not a file|cannot be read as text)"):
        ClientClock(trace=path).read_trace(2, in_order)


def test_jitter_has_its_spread() -> None:
    clock, random = ClientClock(jitter_sigma=0.2), np.random.default_rng(0)
    assert np.std([np.log(clock.jitter(random)) for _ in range(1000)]) == pytest.approx(0.2, rel=0.1)


def test_the_first_of_several_missing_clients_is_named(trace: Callable[..., ClientClock]) -> None:
    with pytest.raises(UserError, match="no row for 2 of the 4 clients, the first of which is 1:"):
        trace(f"client,{SPEEDS}", "0,1,1,1", "3,1,1,1").read_trace(4, in_order)


def test_a_trace_goes_with_jitter_and_with_spreads_of_nothing(tmp_path: Path) -> None:
    assert ClientClock(trace=tmp_path / "trace.csv", jitter_sigma=0.2, uplink_sigma=0.0).sigmas == (0, 0, 0, 0.2)
    with pytest.raises(UserError, match="uplink_sigma would draw them"):
        ClientClock(trace=tmp_path / "trace.csv", uplink_sigma=1.0)
