"""Test verdicts on claims against scipy's paired t-test."""

from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lightning_fl.report.comparison import Curve, Group, Metric
from lightning_fl.report.records import Record
from lightning_fl.study.claims import Claim, Verdict, claims_table, corrected, floors, legend
from lightning_fl.study.pairs import Pair
from lightning_fl.study.statistics import adjusted

ACCURACY, LOSS = Metric("val/accuracy"), Metric("val/loss")
ALIKE = "undecided, all seeds have the same difference, which gives no interval"


def judged(
    claim: Claim, ours: dict[int, float | None], theirs: dict[int, float | None], falls: bool = False
) -> Verdict:
    """Return the verdict on runs that have only the claim's number."""
    pairs = [Pair(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    return claim.judge(pairs, LOSS if falls else ACCURACY)


def run(values: list[float], bytes_of_round: float, name: str = "val/accuracy") -> Curve:
    """Return a run with a value after each round."""
    rounds = np.arange(len(values), dtype=float)
    columns = {"round": rounds, name: np.array(values), "comm/total_uplink_bytes": bytes_of_round * (rounds + 1)}
    return Curve(Record(Path("run"), columns, {}, "FedAvg", None, ()), Metric(name, window=1))


def claim(number: str = "final", paper: float = 0.1) -> Claim:
    return Claim("a is better", "a", "b", number, paper)


accuracies = st.lists(st.floats(0.01, 0.99).map(lambda x: round(x, 3)), min_size=2, max_size=6)


@given(ours=accuracies, seed=st.integers(0, 99))
def test_the_interval_is_that_of_a_paired_t_test(ours: list[float], seed: int) -> None:
    theirs = np.random.default_rng(seed).uniform(0.01, 0.99, len(ours))
    found = dict(enumerate(ours)), dict(enumerate(theirs.tolist()))
    verdict = judged(claim(), *found)
    interval = stats.ttest_rel(ours, theirs).confidence_interval()
    assert (verdict.low, verdict.high) == pytest.approx((interval.low, interval.high), abs=1e-9)
    assert verdict.mean == pytest.approx(np.mean(np.array(ours) - theirs))
    ratio = judged(claim("target_uplink", paper=0.5), *found)
    interval = stats.ttest_rel(np.log(ours), np.log(theirs)).confidence_interval()
    assert (ratio.low, ratio.high) == pytest.approx((np.exp(interval.low), np.exp(interval.high)), rel=1e-6)


@pytest.mark.parametrize(
    ("ours", "paper", "outcome"),
    [
        ([0.60, 0.61, 0.59], 0.1, "reproduced in size"),
        (
            [0.63, 0.57, 0.64],
            0.1,
            "reproduced in sign",
        ),  # the interval contains the paper's value, and is wider than it
        ([0.60, 0.61, 0.59], 0.3, "reproduced in sign"),
        ([0.60, 0.60, 0.605], 0.1, f"not reproduced: {ALIKE}"),
        ([0.60, 0.61, 0.59], -0.1, "not reproduced: the other sign"),
        ([0.60, 0.40, 0.59], 0.1, "not reproduced: undecided, as the interval contains 0"),
        ([0.60, 0.40, 0.59], 0.49, "not reproduced: undecided, as the interval contains 0, and not the paper's value"),
        ([0.60, 0.40, 0.59], 0.6, "ceiling effect: b leaves 0.498"),
        ([0.60, 0.61, 0.59], 0.6, "ceiling effect: b leaves 0.498"),
        ([0.40, 0.41, 0.39], 0.6, "not reproduced: the other sign"),
        ([0.60], 0.6, "ceiling effect: b leaves 0.500"),
        ([0.60], 0.1, "one seed: ahead"),
        ([0.40], 0.1, "one seed: behind"),
        ([0.50], 0.1, "one seed: level"),
        ([], 0.1, "not run yet"),
    ],
)
def test_verdicts_on_differences(ours: list[float], paper: float, outcome: str) -> None:
    assert judged(claim(paper=paper), dict(enumerate(ours)), {0: 0.50, 1: 0.50, 2: 0.505}).outcome == outcome


@pytest.mark.parametrize(
    ("ours", "outcome"),
    [
        ([0.50, 0.495, 0.50], "within the margin; the paper's sign is not seen"),
        ([0.60, 0.60, 0.61], "within the margin; the paper's sign is not seen"),
        ([0.495, 0.494, 0.50], "reproduced in sign"),
        ([0.50, 0.50, 0.505], "within the margin; the paper's sign is not seen"),  # the same runs
        ([0.49, 0.49, 0.495], f"not reproduced: {ALIKE}"),
        ([0.50, 0.48, 0.50], "not reproduced: undecided, as the interval contains -0.02"),
        ([0.40, 0.41, 0.40], "not reproduced: the other sign"),
        ([0.49], "one seed: within the margin"),
        ([0.47], "one seed: beyond the margin"),
    ],
)
def test_verdicts_on_small_losses(ours: list[float], outcome: str) -> None:
    little = Claim("a loses little", "a", "b", "final", -0.001, margin=0.02)
    assert judged(little, dict(enumerate(ours)), {0: 0.50, 1: 0.50, 2: 0.505}).outcome == outcome


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
    ours: dict[int, float | None] = {seed: factor * (theirs[seed] or 0) for seed, factor in enumerate(factors)}
    assert judged(claim("target_uplink", paper), ours, theirs).outcome == outcome


@pytest.mark.parametrize(
    ("number", "falls", "margin", "ours", "outcome"),
    [
        ("final", False, 0.0, [0.60, 0.61, 0.59], "holds"),
        ("final", False, 0.0, [0.40, 0.41, 0.39], "does not hold: the other sign"),
        ("final", False, 0.0, [0.60, 0.40, 0.59], "does not hold: undecided, as the interval contains 0"),
        ("final", False, 0.0, [0.60], "one seed: ahead"),
        ("final", False, 0.0, [0.40], "one seed: behind"),
        ("final", False, 0.02, [0.49, 0.488, 0.495], "holds"),
        ("last", True, 0.0, [0.40, 0.41, 0.39], "holds"),
        ("last", True, 0.02, [0.51, 0.51, 0.514], "holds"),
        ("last", True, 0.0, [0.60, 0.61, 0.59], "does not hold: the other sign"),
        ("last", True, 0.0, [0.60], "one seed: behind"),
        ("last", True, 0.02, [0.51], "one seed: within the margin"),
        ("target_rounds", False, 0.0, [0.40], "one seed: ahead"),
        ("target_rounds", False, 0.0, [None], "one seed: the target was not reached by a in 1 of 1"),
        ("target_rounds", False, 0.0, [0.40, 0.41, 0.39], "holds"),
        ("target_rounds", True, 0.0, [0.60, 0.61, 0.59], "does not hold: the other sign"),
        ("target_rounds", False, 0.0, [0.60, 0.40, 0.50], "does not hold: undecided, as the interval contains 1"),
        ("target_rounds", False, 0.0, [0.40, None], "does not hold: the target was not reached by a in 1 of 2"),
    ],
)
def test_a_claim_without_a_papers_value_is_that_one_is_better(
    number: str, falls: bool, margin: float, ours: list[float | None], outcome: str
) -> None:
    own = Claim("a is better", "a", "b", number, margin=margin)
    assert judged(own, dict(enumerate(ours)), {0: 0.50, 1: 0.50, 2: 0.505}, falls).outcome == outcome


@pytest.mark.parametrize(("ours", "outcome"), [(0.51, "reproduced in size"), (0.60, "not reproduced: the other sign")])
def test_a_small_loss_of_a_metric_that_falls_is_a_rise(ours: float, outcome: str) -> None:
    found = {0: ours, 1: ours, 2: ours + 0.001}, {0: 0.50, 1: 0.50, 2: 0.50}
    little = Claim("a loses little", "a", "b", "final", 0.0103, margin=0.05)
    assert judged(little, *found, falls=True).outcome == outcome


def test_a_target_that_is_not_reached_is_said() -> None:
    verdict = judged(claim("target_rounds", 0.5), {0: 5.0, 1: None}, {0: None, 1: None})
    assert verdict.outcome == "not reproduced: the target was not reached by a in 1 of 2, b in 2 of 2"


def test_only_seeds_of_both_cells_are_compared() -> None:
    curves = {"a": {0: run([0.6], 1), 1: run([0.7], 1)}, "b": {1: run([0.6], 1), 2: run([0.1], 1)}}
    assert claim().pairs(curves) == [Pair(pytest.approx(0.7), pytest.approx(0.6))]


def test_a_small_room_of_a_loss_hides_a_fall() -> None:
    wide = Claim("a falls", "a", "b", "last", paper=-0.5)
    assert judged(wide, {0: 0.39, 1: 0.40}, {0: 0.40, 1: 0.40}, falls=True).outcome == "ceiling effect: b leaves 0.400"
    narrow = Claim("a falls", "a", "b", "last", paper=-0.01)
    assert judged(narrow, {0: 0.39, 1: 0.3902}, {0: 0.40, 1: 0.40}, falls=True).outcome == "reproduced in size"


@pytest.mark.parametrize(("name", "paper", "value"), [("val_acc", 2.0, 60.0), ("val_nll", -0.5, -1.0)])
def test_values_beyond_a_bound_have_none(name: str, paper: float, value: float) -> None:
    """Test an accuracy in per cent, which may exceed 1, and a loss that may fall below 0."""
    gain = Claim("a gains", "a", "b", "last", paper=paper)
    pairs = [Pair(value + factor * paper, value) for factor in (0.9, 1.0, 1.1)]
    assert gain.judge(pairs, Metric(name)).outcome == "reproduced in size"


def test_a_run_that_has_diverged_is_not_judged_by_what_it_had_before() -> None:
    columns = {"round": np.arange(3.0), "val/loss": np.array([0.4, 0.1, np.nan])}
    not_finite = {"val/loss": np.array([False, False, True])}
    record = Record(Path("run"), columns, {}, "FedAvg", None, (), not_finite)
    diverged, whole = Curve(record, LOSS), run([0.5, 0.3, 0.2], 1.0, "val/loss")
    gains = Claim("a gains", "a", "b", "final")
    verdict = gains.judge(gains.pairs({"a": {0: diverged, 1: whole}, "b": {0: whole, 1: whole}}), LOSS)
    assert verdict.outcome == "does not hold: there is no finite value at the end of a in 1 of 2"
    for number, between, lacks in (
        ("mean", (1, 3), "not all rounds from 1 to 3 are finite of"),
        ("rise", None, "not all rounds are finite of"),
    ):
        gains = Claim("a gains", "a", "b", number, between=between)
        verdict = gains.judge(gains.pairs({"a": {0: diverged, 1: whole}, "b": {0: whole, 1: whole}}), LOSS)
        assert verdict.outcome == f"does not hold: {lacks} a in 1 of 2"
    early = Claim("a gains", "a", "b", "mean", between=(1, 2))
    assert early.pairs({"a": {0: diverged}, "b": {0: whole}}) == [Pair(0.25, 0.4)]
    assert Group("a", (diverged, whole)).spread("last") == (None, None, 0), "no mean over the others"
    assert Group("a", (whole, whole)).spread("last") == (0.2, 0.0, 2)


@pytest.mark.parametrize("sign", [1, -1])
def test_bests_within_the_same_bytes(sign: int) -> None:
    """Compare a cheap run of six rounds with a run whose rounds cost twice as much: it has three within the same bytes."""
    name, offset = ("val/accuracy", 0.0) if sign == 1 else ("val/loss", 1.0)
    cheap = run([offset + sign * x for x in (0.1, 0.2, 0.5, 0.4, 0.6, 0.5)], 10, name)
    dear = run([offset + sign * x for x in (0.2, 0.3, 0.4, 0.9)], 20, name)
    (pair,) = Claim("a", "a", "b", "at_uplink").pairs({"a": {0: cheap}, "b": {0: dear}})
    assert (pair.better, pair.than) == (pytest.approx(offset + sign * 0.6), pytest.approx(offset + sign * 0.4))
    steps = [
        (20, 30, 0.0),
        (30, 40, 0.3),
        (40, 50, 0.2),
        (50, 60, 0.3),
    ]  # bytes, and how far the cheap one is ahead between them
    area = sum(log(high / low) * ahead for low, high, ahead in steps) / log(60 / 20)
    assert pair.area == pytest.approx(sign * area)
    (pair,) = Claim("a", "a", "b", "at_uplink", rounds=2).pairs({"a": {0: cheap}, "b": {0: dear}})
    assert (pair.better, pair.than) == (pytest.approx(offset + sign * 0.2), pytest.approx(offset + sign * 0.2))


def test_bytes_that_pay_for_no_evaluation_are_said() -> None:
    cheap, dear = run([0.1, 0.2], 10), run([0.2], 50)
    own = Claim("a", "a", "b", "at_uplink", paper=0.1)
    verdict = own.judge(own.pairs({"a": {0: cheap, 1: cheap}, "b": {0: dear, 1: dear}}), ACCURACY)
    assert verdict.outcome == "not reproduced: the bytes pay for no evaluation of b in 2 of 2"


def test_means_are_those_of_the_named_rounds_and_rises_those_between_halves() -> None:
    ours, theirs = every(1, [0.1, 0.2, 0.4, 0.6, 0.9], 5), every(2, [0.3, 0.5], 5)
    curves = {"a": {0: ours}, "b": {0: theirs}}
    (pair,) = Claim("a", "a", "b", "mean", between=(3, 4)).pairs(curves)
    assert (pair.better, pair.than) == pytest.approx((0.5, 0.5))
    (pair,) = Claim("a", "a", "b", "rise").pairs(curves)
    assert (pair.better, pair.than) == pytest.approx(((0.4 + 0.6 + 0.9) / 3 - 0.15, 0.5 - 0.3))
    late = Claim("a", "a", "b", "mean", between=(4, 6))
    outcome = late.judge(late.pairs(curves), ACCURACY).outcome
    assert outcome == "one seed: not all rounds from 4 to 6 are there of a in 1 of 1, b in 1 of 1"


def test_a_method_against_itself_is_the_floor() -> None:
    """Test a floor of 0.03 in the mean of two runs of the same method, and two claims about others on either side of it."""
    finals = {
        "first": [0.50, 0.52, 0.51],
        "second": [0.51, 0.51, 0.50],
        "near": [0.53, 0.53, 0.53],
        "far": [0.6, 0.61, 0.6],
    }
    curves = {name: {seed: run([value], 1) for seed, value in enumerate(of)} for name, of in finals.items()}
    same = Claim("", "first", "second", "final")
    interval = stats.ttest_rel(finals["first"], finals["second"]).confidence_interval()
    floor = same.floor([("first", "second")], curves)
    assert floor == pytest.approx(max(abs(interval.low), abs(interval.high)))
    claims = [Claim("", name, "second", "final") for name in ("near", "far")]
    near, far = (claim.judge(claim.pairs(curves), ACCURACY, floor) for claim in claims)
    assert (near.outcome, far.outcome) == (f"does not hold: below the floor of {floor:.3f}", "holds")
    assert (near.p is None, far.p is None) == (True, False)  # there is nothing to correct
    assert same.floor([("first", "absent")], curves) is None


@pytest.mark.parametrize(
    ("number", "ours", "theirs"),
    [
        (
            "last",
            [902, 852],
            [900, 850],
        ),  # right answers of 1,000: differences of their shares in single precision vary a little
        ("target_rounds", [10, 9, 14], [11, 10, 15]),
        ("target_rounds", [10, 9], [11, 10]),
    ],
)
def test_the_same_difference_in_all_seeds_decides_no_claim(number: str, ours: list[int], theirs: list[int]) -> None:
    of = 1 if number == "target_rounds" else 1000
    found = ({seed: float(np.float32(n / of)) for seed, n in enumerate(counts)} for counts in (ours, theirs))
    verdict = judged(Claim("", "a", "b", number), *found)
    assert (verdict.outcome, verdict.p) == (f"does not hold: {ALIKE}", 1.0)


def test_equal_accuracies_in_single_precision_differ_by_nothing() -> None:
    found = ({seed: float(np.float32(0.9) + noise) for seed in range(3)} for noise in (3e-8, 0.0))
    verdict = judged(claim(paper=-0.1), *found)
    assert (verdict.outcome.partition(",")[0], verdict.mean) == ("not reproduced: undecided", 0)
    curves = {name: {seed: run([0.9 + noise], 1) for seed in range(2)} for name, noise in (("a", 3e-8), ("b", 0.0))}
    assert claim().floor([("a", "b")], curves) == 0


def test_claims_with_a_ceiling_effect_count_in_the_correction() -> None:
    """Test that a claim that is lost is not corrected alone, although none of the others could be reproduced."""
    theirs: dict[int, float | None] = {0: 0.95, 1: 0.96, 2: 0.95}
    lost = judged(claim(), {0: 0.94, 1: 0.948, 2: 0.939}, theirs)
    near = judged(claim(), {0: 0.95, 1: 0.95, 2: 0.96}, theirs)
    assert (lost.outcome, near.outcome) == ("not reproduced: the other sign", "ceiling effect: b leaves 0.047")
    assert corrected([lost])[0].startswith("stands (q 0.00")
    assert corrected([lost, *[near] * 20]) == [f"undecided (q {21 * (lost.p or 0):.2g})", *[""] * 20]


def test_a_sign_within_a_margin_has_its_own_test_and_the_floor() -> None:
    found = {0: 0.5022, 1: 0.5033, 2: 0.5018}, {0: 0.50, 1: 0.50, 2: 0.50}
    pairs = [Pair(found[0][seed], found[1][seed]) for seed in range(3)]
    little = Claim("a loses little", "a", "b", "final", 0.004, margin=0.02)
    verdict, below = little.judge(pairs, ACCURACY), little.judge(pairs, ACCURACY, floor=0.003)
    of_sign, of_margin = (stats.ttest_1samp([0.0022, 0.0033, 0.0018], border).pvalue for border in (0, -0.02))
    assert (verdict.outcome, verdict.p) == ("reproduced in size", pytest.approx(of_sign))
    assert (below.outcome, below.p) == ("within the margin; the paper's sign is not seen", pytest.approx(of_margin))
    lost = little.judge([Pair(0.47, 0.50), Pair(0.471, 0.50), Pair(0.469, 0.50)], ACCURACY, floor=0.05)
    assert lost.outcome == "not reproduced: below the floor of 0.050"


def test_the_floor_is_told_for_each_value_that_claims_compare() -> None:
    """Test differences, and factors of a cost of which a method needs 1, 1.1 and 1.2 times as much as itself."""
    factors = [1.0, 1.1, 1.2]
    curves = {
        "first": {seed: run([0.1, 0.9], 2000) for seed in range(3)},
        "again": {seed: run([0.1, 0.9 - 0.01 * seed], 2000 * factors[seed]) for seed in range(3)},
        "lone": {0: run([0.1, 0.9], 1000)},
    }
    compared = [Claim("", "a", "b", number) for number in ("final", "uplink", "final", "never_reached")]
    high = stats.ttest_1samp([0.0, 0.01, 0.02], 0).confidence_interval().high
    factor = np.exp(stats.ttest_1samp(np.log(factors), 0).confidence_interval().high)
    assert floors(compared, [("first", "again")], curves) == (
        f"The floor, first from again: {high:.3f} in final, a factor of {factor:.3g} in uplink."
    )
    assert floors([compared[-1]], [("first", "again")], curves) == floors(compared, [], curves) == ""
    assert floors(compared, [("first", "lone")], curves) == "The floor, first from lone, is not run yet."
    same = {"first": curves["first"], "same": curves["first"]}
    assert floors(compared, [("first", "same")], same) == "The floor, first from same: 0."
    unmet = Claim("", "a", "b", "target_rounds", target=0.5)
    assert floors([unmet, replace(unmet, number="target_uplink")], [("first", "again")], curves) == (
        "The floor, first from again: unknown in rounds to 0.5 and uplink to 0.5, "
        "as the target was not reached by first in 3 of 3, again in 3 of 3."
    )


def test_the_floor_within_bytes_is_measured_within_the_bytes_of_the_claim() -> None:
    """Test two runs that part after the 60 bytes that the compared method sends."""
    curves = {
        "cheap": {seed: run([0.1, 0.5, 0.6, 0.7, 0.8, 0.9], 10) for seed in range(3)},
        "first": {seed: run([0.2, 0.3, 0.4, 0.9], 20) for seed in range(3)},
        "again": {seed: run([0.2, 0.3, 0.4 - 0.01 * seed, 0.5], 20) for seed in range(3)},
    }
    high = stats.ttest_1samp([0.0, 0.01, 0.02], 0).confidence_interval().high
    claim = Claim("", "cheap", "first", "at_uplink")
    assert claim.floor([("first", "again")], curves) == pytest.approx(high)
    assert replace(claim, num_bytes=40).floor([("first", "again")], curves) == pytest.approx(0)
    assert replace(claim, rounds=2).floor([("first", "again")], curves) == pytest.approx(0)
    del curves["cheap"][2]
    assert floors([claim], [("first", "again")], curves) == (
        "The floor, first from again: unknown in best within the uplink of cheap, "
        "as the bytes are unknown for first in 1 of 3, again in 1 of 3."
    )


def test_a_target_that_the_paper_says_is_never_reached() -> None:
    def outcome(values: list[float], source: str = "table 1") -> str:
        curves = {seed: every(1, [value], 1, target=0.5) for seed, value in enumerate(values)}
        never = Claim("b never reaches it", "a", "b", "never_reached", source=source, target=0.5)
        return never.judge(never.pairs({"a": curves, "b": curves}), ACCURACY).outcome

    assert outcome([0.4, 0.3]) == "reproduced: b reaches the target in 0 of 2"
    assert outcome([0.4, 0.6]) == "not reproduced: b reaches the target in 1 of 2"
    assert outcome([0.4, 0.3], source="") == "holds: b reaches the target in 0 of 2"
    assert outcome([0.4]) == "one seed: b does not reach the target"

    never = Claim("b never reaches it", "a", "b", "never_reached", target=0.5)
    curves = {"a": {0: None, 1: None}, "b": {seed: every(1, [0.4], 1, target=0.5) for seed in range(2)}}
    assert never.judge(never.pairs(curves), ACCURACY).outcome == "holds: b reaches the target in 0 of 2"
    assert never.pairs({"b": curves["b"]}) == never.pairs(curves)


def test_a_claim_may_be_about_a_column_that_each_run_has_under_its_own_name() -> None:
    curves = {"a": {0: run([0.9], 1, "val/accuracy_local")}, "b": {0: run([0.3], 1, "val/accuracy_clients_mean")}}
    own = Claim("a", "a", "b", "final", metrics=("val/accuracy_local", "val/accuracy_clients_mean"))
    assert own.pairs(curves) == [Pair(0.9, 0.3)]


@pytest.mark.parametrize("of_run", [False, True])
def test_a_claim_s_own_column_has_the_mode_of_the_run(of_run: bool) -> None:
    """Test a score that falls by the mode of the study's metric, or by that of the runs' own metric alone."""
    name, mode = "val/score", {"name": "val/score", "mode": "min"}

    def scored(value: float) -> Curve:
        record = replace(run([value], 1, name).record, metric=mode)
        record.columns["val/accuracy"] = np.array([0.5])
        return Curve(record, Metric(window=1) if of_run else Metric(name, window=1, mode="min"))

    curves = {"a": {0: scored(0.5), 1: scored(0.6)}, "b": {0: scored(1.0), 1: scored(1.2)}}
    falls = Claim("a falls", "a", "b", "final", metrics=(name,))
    metric = falls.metric_in(curves, ACCURACY)
    assert (metric.name, metric.falls) == (name, True)
    assert falls.judge(falls.pairs(curves), metric).mean == pytest.approx(-0.55)
    assert replace(falls, metrics=()).metric_in({}, ACCURACY) == ACCURACY


def test_a_column_that_a_run_lacks_costs_only_the_claim() -> None:
    curves = {"a": {0: run([0.9], 1), 1: run([0.9], 1)}, "b": {0: run([0.3], 1, "val/accuracy"), 1: run([0.3], 1)}}
    curves["b"][0].record.columns["val/own"] = np.array([0.3])
    own = Claim("a", "a", "b", "final", metrics=("val/own",))
    outcome = own.judge(own.pairs(curves), ACCURACY).outcome
    assert outcome == "does not hold: there is no finite val/own of a in 2 of 2, b in 1 of 2"


def test_the_rise_of_a_loss_may_exceed_the_loss() -> None:
    rise = Claim("a falls more", "a", "b", "rise", paper=-0.2)
    pairs = [Pair(-0.19, 0.01), Pair(-0.2, 0.01), Pair(-0.18, 0.01)]
    assert rise.judge(pairs, LOSS).outcome == "reproduced in size"


@pytest.mark.parametrize("num_bytes", [15.0, 1000.0])
def test_named_bytes_take_the_place_of_those_that_are_spent(num_bytes: float) -> None:
    cheap, dear = run([0.1, 0.2], 10), run([0.3, 0.6, 0.9], 5)
    (pair,) = Claim("a", "a", "b", "at_uplink", num_bytes=num_bytes).pairs({"a": {0: cheap}, "b": {0: dear}})
    assert (pair.better, pair.than) == ((0.1, 0.9) if num_bytes == 15 else (0.2, 0.9))


def test_a_cost_that_nothing_varies_has_no_test_and_the_papers_size_if_its_figures_agree() -> None:
    less = judged(claim("uplink", 0.2), {0: 20.01, 1: 40.02}, {0: 100.0, 1: 200.0})
    assert (less.outcome, less.p) == ("reproduced in size", None)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=9))
def test_corrected_values_are_those_of_scipy(values: list[float | None]) -> None:
    found = adjusted(values)
    assert [q is None for q in found] == [p is None for p in values]
    tested = [p for p in values if p is not None]
    if tested:
        expected = stats.false_discovery_control(tested)
        assert [q for q in found if q is not None] == pytest.approx(expected.tolist())


@pytest.mark.parametrize("free", ["a", "b"])
def test_a_cost_of_nothing_has_no_ratio(free: str) -> None:
    """Test a bound, which sends no byte, on either side."""
    costs = {"a": {0: 3.0, 1: 4.0}, "b": {0: 6.0, 1: 8.0}, free: {0: 0.0, 1: 0.0}}
    verdict = judged(claim("target_uplink", paper=0.5), costs["a"], costs["b"])
    assert verdict.outcome == f"not reproduced: there is no ratio, as {free} costs nothing"
    assert verdict.mean is None


def every(n: int, values: list[float], num_rounds: int, target: float | None = None) -> Curve:
    """Return a run of rounds of ten bytes that is evaluated after every n-th."""
    accuracy = np.full(num_rounds, np.nan)
    accuracy[n - 1 : n * len(values) : n] = values
    rounds = np.arange(num_rounds, dtype=float)
    columns = {"round": rounds, "val/accuracy": accuracy, "comm/total_uplink_bytes": 10 * (rounds + 1)}
    return Curve(Record(Path("run"), columns, {}, "FedAvg", None, ()), Metric("val/accuracy", target, window=1))


def test_a_cost_that_is_not_counted_is_no_missed_target() -> None:
    runs = {seed: every(1, [0.4, 0.6], 2, target=0.5) for seed in (0, 1)}
    one = Claim("a costs less", "a", "b", "target_joules")
    outcome = one.judge(one.pairs({"a": runs, "b": runs}), ACCURACY).outcome
    assert outcome == "does not hold: no joules are counted by a in 2 of 2, b in 2 of 2"


@pytest.mark.parametrize(("rounds", "num_rounds", "best"), [(15, 20, 0.15), (None, 27, 0.27)])
def test_bytes_are_those_of_the_rounds_and_not_of_the_last_evaluation(
    rounds: int | None, num_rounds: int, best: float
) -> None:
    ours, theirs = every(10, [0.1, 0.9], num_rounds), every(1, [i / 100 for i in range(1, 31)], 30)
    (pair,) = Claim("a", "a", "b", "at_uplink", rounds=rounds).pairs({"a": {0: ours}, "b": {0: theirs}})
    assert pair.than == best
    short = Claim("a", "a", "b", "at_uplink", rounds=40)
    verdict = short.judge(short.pairs({"a": {0: ours}, "b": {0: theirs}}), ACCURACY)
    assert verdict.outcome == "one seed: there are no 40 rounds of a in 1 of 1"


def test_the_table_has_a_row_for_each_claim() -> None:
    claims = [claim(), claim("target_uplink", 0.5), Claim("a is better", "a", "b", "last")]
    verdicts = [judged(each, {0: 4.0, 1: 5.0}, {0: 2.0, 1: 2.5}) for each in claims]
    first, second, third = claims_table(claims, verdicts).rows
    assert first[:2] == ["a is better", "final: a − b"]
    assert first[4:6] == ["0.1", "2.250"]
    assert second == [
        *("a is better", "uplink: a / b", f"not reproduced: {ALIKE}", "undecided (q 1)"),
        *("0.5", "2.0", "2.0 to 2.0", "2"),
    ]
    assert third[4] == ""
    assert legend(claims) == legend(claims[:1])


def test_the_table_says_where_a_paper_has_its_figure_and_the_area() -> None:
    claims = [
        Claim("a is better", "a", "b", "at_uplink", 0.1, rounds=2, source="figure 2"),
        Claim("a is worse", "b", "a", "final"),
    ]
    curves = {"a": {0: run([0.1, 0.4, 0.6], 10)}, "b": {0: run([0.1, 0.2, 0.3], 10)}}
    table = claims_table(claims, [each.judge(each.pairs(curves), ACCURACY) for each in claims])
    assert [dict(zip(table.header, row, strict=True)) for row in table.rows] == [
        {
            "claim": "a is better",
            "compared": "best within the uplink of a after 2 rounds: a − b",
            "in the paper": "figure 2",
            "verdict": "one seed: ahead",
            "after correction": "",
            "paper": "0.1",
            "here": "0.200",
            "95 % interval": "–",
            "over log bytes": "0",
            "seeds": "1",
        },
        {
            "claim": "a is worse",
            "compared": "final: b − a",
            "in the paper": "",
            "verdict": "one seed: behind",
            "after correction": "",
            "paper": "",
            "here": "-0.300",
            "95 % interval": "–",
            "over log bytes": "",
            "seeds": "1",
        },
    ]
    assert len(legend(claims)) == 2
