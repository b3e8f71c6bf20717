"""Test the comparison within a budget of bytes on curves made by hand."""

from math import inf, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lightning_fl.errors import UserError
from lightning_fl.report.comparison import Curve, Metric
from lightning_fl.report.records import Record
from lightning_fl.study.budget import (
    Budget,
    Efficiency,
    bytes_to_target,
    efficiency_table,
    front_shares,
    holm,
    on_front,
    read_budgets,
)


def curve(sent: list[float], values: list[float], target: float | None = None, name: str = "val/accuracy") -> Curve:
    columns = {"round": np.arange(len(sent)) + 0.0, "comm/total_uplink_bytes": np.array(sent), name: np.array(values)}
    return Curve(Record(Path("run"), columns, {}, "FedAvg", None, ()), Metric(name, target, window=1))


def run(spent: float, best: float, area: float = 0.0, **others: Any) -> Efficiency:
    return Efficiency(**{"is_whole": True, "sent": spent, "target": None, **others}, spent=spent, best=best, area=area)


def test_the_best_value_that_the_budget_paid_for() -> None:
    one = curve([10, 20, 40, 80], [0.3, 0.6, 0.5, 0.9])
    assert Budget(1, 79).measure(one).best == 0.6
    assert Budget(1, 79).measure(one).spent == 40
    assert Budget(1, 80).measure(one).best == 0.9
    assert Budget(1, 9, chance=0.1).measure(one).best == 0.1
    assert Budget(1, 9).measure(one).spent == 0
    assert Budget(1, 80).measure(one).is_whole
    assert not Budget(1, 81).measure(one).is_whole


def test_the_area_is_a_mean_over_the_logarithm_of_the_bytes() -> None:
    one = curve([10, 100, 1000], [0.4, 0.2, 0.8])
    # Chance from 1 to 10, 0.4 from 10 to 1000 (0.2 is no new best), then 0.8, also after the last round.
    assert Budget(1, 10_000, chance=0.1).measure(one).area == pytest.approx((0.1 + 2 * 0.4 + 0.8) / 4)
    assert Budget(100, 1000).measure(one).area == pytest.approx(0.4)
    assert Budget(20, 50).measure(one).area == pytest.approx(0.4)
    assert Budget(2000, 5000).measure(one).area == pytest.approx(0.8)
    assert Budget(2, 5, chance=0.2).measure(one).area == pytest.approx(0.2)


sizes = st.lists(st.tuples(st.floats(1, 50), st.floats(0, 1)), min_size=1, max_size=8)


@given(steps=sizes, low=st.floats(0.5, 100), factor=st.floats(1.1, 100), scale=st.floats(0.01, 100))
def test_the_area_does_not_depend_on_the_unit_and_is_a_sum_of_rectangles(
    steps: list[tuple[float, float]], low: float, factor: float, scale: float
) -> None:
    sent, values = np.cumsum([size for size, _ in steps]), [value for _, value in steps]
    area = Budget(low, low * factor, 0.1).measure(curve(sent.tolist(), values)).area
    scaled = Budget(scale * low, scale * low * factor, 0.1).measure(curve((scale * sent).tolist(), values)).area
    assert scaled == pytest.approx(area, abs=1e-6)
    assert Budget(low, low * factor, 0.1).measure(curve(sent.tolist(), values)).best >= area - 1e-9
    total, most, at = 0.0, 0.1, low
    for bytes_sent, value in zip(sent, values, strict=True):
        end = min(max(bytes_sent, low), low * factor)
        total += most * log(end / at)
        most, at = max(most, value), end
    assert area == pytest.approx((total + most * log(low * factor / at)) / log(factor), abs=1e-6)


def test_bytes_of_a_target_are_censored() -> None:
    reached = [Budget(1, 9).measure(curve([1e6, 4e6], [0.2, 0.5], target)).target for target in (0.2, 0.5, 0.6)]
    assert reached == [1e6, 4e6, inf]
    assert bytes_to_target([run(9e6, 1, target=1e6), run(9e6, 1, target=4e6)]).shown(1e6) == "2.50"
    some = [run(9e6, 1, target=1e6), run(9e6, 1, target=4e6), run(9e6, 1, target=inf)]
    assert bytes_to_target(some).shown(1e6) == "4.00 (2 of 3)"
    assert (
        bytes_to_target([*some, run(8e6, 1, target=inf)]).shown(1e3) == "> 6,000 (2 of 4)"
    )  # the median of 1, 4, more than 8 and more than 9 MB


def test_the_front_has_nobody_better() -> None:
    # The second of two equal points is as good as the first.
    assert on_front([1, 1, 2, 2, 3], [0.5, 0.5, 0.5, 0.7, 0.6]).tolist() == [True, True, False, True, False]


points = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=8)


@given(points)
def test_the_front_is_that_of_the_definition(given: list[tuple[int, int]]) -> None:
    def beats(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one != other and one[0] <= other[0] and one[1] >= other[1]

    expected = [not any(beats(other, point) for other in given) for point in given]
    assert on_front(*zip(*given, strict=True)).tolist() == expected


def test_shares_of_the_front_pair_the_seeds() -> None:
    better = {seed: run(1, 0.5 + seed / 10) for seed in range(3)}
    worse = {seed: run(1, 0.49 + seed / 10) for seed in range(3)}  # unpaired, it would often win
    assert front_shares({"a": better, "b": worse}) == {"a": 1.0, "b": 0.0}
    assert front_shares({"a": {0: run(1, 0.5)}, "b": {0: run(1, 0.6)}}) is None
    some = {0: run(1, 0.6), 1: run(1, 0.6), 2: run(1, 0.3)}
    same = {seed: run(1, 0.5) for seed in range(3)}
    shares = front_shares({"a": some, "b": same})
    assert shares is not None
    # 0.6 · m + 0.3 · (3 − m) > 1.5 for m = 3 of 3 draws from the first two seeds, and equal for m = 2.
    assert shares["a"] == pytest.approx((2 / 3) ** 3 + 3 * (2 / 3) ** 2 / 3, abs=0.05)


def test_an_area_is_larger_or_smaller_only_after_holm_s_correction() -> None:
    base = {0: 0.5, 1: 0.6, 2: 0.55}
    found = {
        "dense": {seed: run(2, area, area) for seed, area in base.items()},
        "better": {seed: run(1, area, area + 0.2 + seed / 1000) for seed, area in base.items()},
        "quantised": {seed: run(1, area, area + 0.01 + 1e-8 * seed) for seed, area in base.items()},
        "unclear": {seed: run(1, area, area + 0.2 * seed - 0.1) for seed, area in base.items()},
        "worse": {seed: run(3, area, area - 0.2 - seed / 1000) for seed, area in base.items()},
    }
    rows = {row[0]: row for row in efficiency_table(found, Budget(1, 9)).rows}
    assert [rows[name][1] for name in found] == ["", "larger", "undecided", "undecided", "smaller"]
    interval = stats.ttest_rel([0.7, 0.801, 0.752], [0.5, 0.6, 0.55]).confidence_interval()
    assert rows["better"][4] == f"+0.201 ({interval.low:+.3f} to {interval.high:+.3f})"
    assert [rows[name][5] for name in ("dense", "better", "worse")] == ["0 %", "100 %", "0 %"]


def test_one_seed_has_no_interval_and_no_winner() -> None:
    rows = efficiency_table({"a": {0: run(1, 0.5, 0.5)}, "b": {0: run(1, 0.6, 0.6, is_whole=False)}}, Budget(1, 9)).rows
    assert rows == [["a", "", "0.500", "0.500", "", "", "1"], ["b", "undecided", "0.600*", "0.600", "+0.100", "", "1"]]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_s_values_are_scipy_s(values: list[float]) -> None:
    ours = holm({str(place): value for place, value in enumerate(values)})
    ordered, most, expected = sorted(range(len(values)), key=values.__getitem__), 0.0, {}
    for rank, place in enumerate(ordered):
        most = max(most, min(1, values[place] * (len(values) - rank)))
        expected[str(place)] = most
    assert ours == pytest.approx(expected)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"budget": [2e6, 1e6]}, "the lower first"),
        ({"budget": 1e6}, "two numbers of bytes"),
        ({"budget": [0, 1e6]}, "two numbers of bytes"),
        ({"budget": ["many", 2e6]}, "two numbers of bytes"),
        ({"budget": [1e6, float("nan")]}, "two numbers of bytes"),
        ({"budget": [True, 2e6]}, "two numbers of bytes"),
        ({"budget": [1e6, 2e6], "chance": 1}, "chance must be an accuracy"),
        ({"chance": 0.1}, "chance belongs to a budget"),
        ({"budget": {"both": [1e6, 2e6]}}, "the direction of a budget 'both' is unknown; allowed: down, total, up"),
        ({"budget": {"up": [1e6, 2e6], "total": [2e6, 1e6]}}, "the lower first"),
        ({"budget": {}}, "two numbers of bytes"),
    ],
)
def test_what_is_no_budget_is_refused(content: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_budgets(content)


def test_numbers_may_have_an_exponent_without_a_sign() -> None:
    assert read_budgets(yaml.safe_load("budget: [1.0e6, 1e8]")) == (Budget(1e6, 1e8),)
    assert read_budgets(yaml.safe_load("{budget: [1e6, 1e8], chance: 1e-1}")) == (Budget(1e6, 1e8, 0.1),)
    assert read_budgets({}) == ()


def test_a_budget_has_the_direction_of_the_study_or_its_own() -> None:
    assert read_budgets({"budget": [1, 2]}, "total") == (Budget(1, 2, traffic="total"),)
    both = yaml.safe_load("budget: {up: [1, 2], total: [3, 4]}")
    assert read_budgets(both, "down") == (Budget(1, 2), Budget(3, 4, traffic="total"))


def test_a_method_that_sends_little_up_and_much_down_is_dear_in_total() -> None:
    """Check a front that turns: 10 up and 190 down for what another has for 100 up and none down."""
    ways = {"sparse": (10, 190), "cast": (100, 0)}
    curves = {}
    for name, (up, down) in ways.items():
        columns = {"round": np.array([0.0]), "val/accuracy": np.array([0.5])}
        columns |= {"comm/total_uplink_bytes": np.array([up]), "comm/total_downlink_bytes": np.array([down])}
        curves[name] = Curve(Record(Path(name), columns, {}, name, None, ()), Metric(target=0.5, window=1))
    found = {
        way: {name: {0: Budget(1, 400, traffic=way).measure(one)} for name, one in curves.items()}
        for way in ("up", "down", "total")
    }
    assert {way: [runs["sparse"][0].spent, runs["cast"][0].spent] for way, runs in found.items()} == {
        "up": [10, 100],
        "down": [190, 0],
        "total": [200, 100],
    }
    for way, cheap in (("up", "sparse"), ("total", "cast")):
        assert max(found[way], key=lambda name: found[way][name][0].area) == cheap
        assert [found[way][name][0].target for name in ways] == [found[way][name][0].spent for name in ways]
        table = efficiency_table(found[way], Budget(1, 400, traffic=way))
        assert table.header[2] == {"up": "uplink to target (B)", "total": "total traffic to target (B)"}[way]


def test_a_run_without_the_bytes_of_a_direction_is_no_run_of_a_budget() -> None:
    with pytest.raises(UserError, match="the run in run counts no total traffic"):
        Budget(1, 2, traffic="total").measure(curve([1], [0.5]))


def test_a_metric_that_falls_has_no_area() -> None:
    with pytest.raises(UserError, match="lower is better for val/loss"):
        Budget(1, 2).measure(curve([1], [0.5], name="val/loss"))
