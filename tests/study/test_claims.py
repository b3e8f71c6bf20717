"""Test verdicts on claims against scipy's paired t-test."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lightning_fl.study.claims import Claim, claims_table


def numbers(number: str, found: dict[str, dict[int, float | None]]) -> dict[str, dict[int, dict[str, float | None]]]:
    """Return the numbers of runs that have only this one."""
    return {cell: {seed: {number: value} for seed, value in of.items()} for cell, of in found.items()}


def claim(number: str = "final", paper: float = 0.1) -> Claim:
    return Claim("a is better", "a", "b", number, paper)


accuracies = st.lists(st.floats(0.01, 0.99).map(lambda x: round(x, 3)), min_size=2, max_size=6)


@given(ours=accuracies, seed=st.integers(0, 99))
def test_the_interval_is_that_of_a_paired_t_test(ours: list[float], seed: int) -> None:
    theirs = np.random.default_rng(seed).uniform(0.01, 0.99, len(ours))
    found = {"a": dict(enumerate(ours)), "b": dict(enumerate(theirs.tolist()))}
    verdict = claim().judge(numbers("final", found))
    interval = stats.ttest_rel(ours, theirs).confidence_interval()
    assert (verdict.low, verdict.high) == pytest.approx((interval.low, interval.high), abs=1e-9)
    assert verdict.mean == pytest.approx(np.mean(np.array(ours) - theirs))
    ratio = claim("target_uplink", paper=0.5).judge(numbers("target_uplink", found))
    interval = stats.ttest_rel(np.log(ours), np.log(theirs)).confidence_interval()
    assert (ratio.low, ratio.high) == pytest.approx((np.exp(interval.low), np.exp(interval.high)), rel=1e-6)


@pytest.mark.parametrize(
    ("ours", "paper", "outcome"),
    [
        ([0.60, 0.61, 0.59], 0.1, "reproduced in size"),
        ([0.60, 0.61, 0.59], 0.3, "reproduced in sign"),
        ([0.60, 0.61, 0.59], -0.1, "not reproduced: the other sign"),
        ([0.60, 0.40, 0.59], 0.1, "not reproduced: undecided, as the interval contains 0"),
        ([0.60, 0.40, 0.59], 0.9, "not reproduced: undecided, as the interval contains 0, and not the paper's value"),
        ([0.60], 0.1, "reproduced in sign (one seed)"),
        ([0.40], 0.1, "not reproduced (one seed)"),
        ([], 0.1, "not tried"),
    ],
)
def test_verdicts_on_differences(ours: list[float], paper: float, outcome: str) -> None:
    theirs = {0: 0.50, 1: 0.50, 2: 0.505}
    assert claim(paper=paper).judge(numbers("final", {"a": dict(enumerate(ours)), "b": theirs})).outcome == outcome


@pytest.mark.parametrize(
    ("ours", "outcome"),
    [
        ([0.50, 0.495, 0.50], "reproduced in size"),
        ([0.60, 0.60, 0.61], "reproduced in sign"),
        ([0.50, 0.48, 0.50], "not reproduced: undecided, as the interval contains -0.02"),
        ([0.40, 0.41, 0.40], "not reproduced: the other sign"),
        ([0.49], "reproduced in sign (one seed)"),
        ([0.47], "not reproduced (one seed)"),
    ],
)
def test_verdicts_on_small_losses(ours: list[float], outcome: str) -> None:
    theirs = {0: 0.50, 1: 0.50, 2: 0.505}
    little = Claim("a loses little", "a", "b", "final", -0.001, margin=0.02)
    assert little.judge(numbers("final", {"a": dict(enumerate(ours)), "b": theirs})).outcome == outcome


@pytest.mark.parametrize(
    ("factors", "paper", "outcome"),
    [
        ([0.5, 0.52, 0.48], 0.5, "reproduced in size"),
        ([0.5, 0.52, 0.48], 0.1, "reproduced in sign"),
        ([0.5, 0.52, 0.48], 2.0, "not reproduced: the other sign"),
        ([2.1, 1.9, 2.0], 2.0, "reproduced in size"),
        ([0.5, 2.0, 1.0], 0.5, "not reproduced: undecided, as the interval contains 1"),
    ],
)
def test_verdicts_on_ratios_of_costs(factors: list[float], paper: float, outcome: str) -> None:
    theirs: dict[int, float | None] = {0: 10.0, 1: 20.0, 2: 30.0}
    ours = {seed: factor * (theirs[seed] or 0) for seed, factor in enumerate(factors)}
    assert claim("target_uplink", paper).judge(numbers("target_uplink", {"a": ours, "b": theirs})).outcome == outcome


@pytest.mark.parametrize(
    ("number", "falls", "margin", "ours", "outcome"),
    [
        ("final", False, 0.0, [0.60, 0.61, 0.59], "holds"),
        ("final", False, 0.0, [0.40, 0.41, 0.39], "does not hold: the other sign"),
        ("final", False, 0.0, [0.60, 0.40, 0.59], "does not hold: undecided, as the interval contains 0"),
        ("final", False, 0.0, [0.60], "holds (one seed)"),
        ("final", False, 0.0, [0.40], "does not hold (one seed)"),
        ("final", False, 0.02, [0.49, 0.49, 0.495], "holds"),
        ("last", True, 0.0, [0.40, 0.41, 0.39], "holds"),
        ("last", True, 0.02, [0.51, 0.51, 0.515], "holds"),
        ("last", True, 0.0, [0.60, 0.61, 0.59], "does not hold: the other sign"),
        ("target_rounds", False, 0.0, [0.40, 0.41, 0.39], "holds"),
        ("target_rounds", True, 0.0, [0.60, 0.61, 0.59], "does not hold: the other sign"),
        ("target_rounds", False, 0.0, [0.60, 0.40, 0.50], "does not hold: undecided, as the interval contains 1"),
        ("target_rounds", False, 0.0, [0.40, None], "does not hold: the target was not reached by a in 1 of 2"),
    ],
)
def test_a_claim_without_a_papers_value_is_that_one_is_better(
    number: str, falls: bool, margin: float, ours: list[float | None], outcome: str
) -> None:
    found = numbers(number, {"a": dict(enumerate(ours)), "b": {0: 0.50, 1: 0.50, 2: 0.505}})
    own = Claim("a is better", "a", "b", number, margin=margin)
    assert own.judge(found, falls).outcome == outcome


@pytest.mark.parametrize(("ours", "outcome"), [(0.51, "reproduced in size"), (0.60, "not reproduced: the other sign")])
def test_a_small_loss_of_a_metric_that_falls_is_a_rise(ours: float, outcome: str) -> None:
    found = {"a": {0: ours, 1: ours, 2: ours + 0.001}, "b": {0: 0.50, 1: 0.50, 2: 0.50}}
    little = Claim("a loses little", "a", "b", "final", 0.0103, margin=0.05)
    assert little.judge(numbers("final", found), falls=True).outcome == outcome


def test_a_target_that_is_not_reached_is_said() -> None:
    found = {"a": {0: 5.0, 1: None}, "b": {0: None, 1: None}}
    verdict = claim("target_rounds", 0.5).judge(numbers("target_rounds", found))
    assert verdict.outcome == "not reproduced: the target was not reached by a in 1 of 2, b in 2 of 2"


def test_only_seeds_of_both_cells_are_compared() -> None:
    assert claim().judge(numbers("final", {"a": {0: 0.6, 1: 0.7}, "b": {1: 0.6, 2: 0.1}})).num_seeds == 1


def test_the_table_has_a_row_for_each_claim() -> None:
    claims = [claim(), claim("target_uplink", 0.5), Claim("a is better", "a", "b", "last")]
    verdicts = [each.judge(numbers(each.number, {"a": {0: 4.0, 1: 5.0}, "b": {0: 2.0, 1: 2.5}})) for each in claims]
    first, second, third = claims_table(claims, verdicts).rows
    assert first[:2] == ["a is better", "final: a − b"]
    assert first[3:5] == ["0.1", "2.25"]
    assert second == [
        *("a is better", "target uplink: a / b", "not reproduced: the other sign"),
        *("0.5", "2", "2 to 2", "2"),
    ]
    assert third[3] == ""
