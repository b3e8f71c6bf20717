"""Test what a run's values come to: `final`, `last`, `best` and `at best validation`, the same wherever shown."""

import csv
from collections.abc import Mapping
from math import inf, isinf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fl.callbacks import CommunicationMeter
from lightning_fl.errors import UserError
from lightning_fl.outputs.final_table import final_lines
from lightning_fl.outputs.metric import final, num_final, validated_and_tested
from lightning_fl.report import report
from lightning_fl.report.comparison import VALUES, Curve, Group, Metric
from lightning_fl.report.records import Record
from lightning_fl.report.tables import results
from lightning_fl.study.budget import LEGEND
from lightning_fl.study.claims import NUMBERS
from lightning_fl.study.claims_file import read_claims
from lightning_fl.trainer.run_metric import results_of

accuracies = st.lists(st.floats(0, 1), min_size=1, max_size=150)
METRICS = ("val/accuracy", "val/loss")

BYTES = ("comm/total_uplink_bytes", "comm/total_downlink_bytes")


def curve(
    values: list[float], name: str = METRICS[0], window: int = 39, others: Mapping[str, list[float]] | None = None
) -> Curve:
    """Return the curve of a run of 100 bytes a round, which has logged other columns, too."""
    rounds = np.arange(len(values)) + 0.0
    known = {"round": rounds, **dict.fromkeys(BYTES, 100 * (rounds + 1)), name: np.array(values)}
    known |= {other: np.array(of) for other, of in (others or {}).items()}
    return Curve(Record(Path("run"), known, {}, "FedAvg", None, ()), Metric(name, window=window))


def summary(
    values: list[float], name: str = METRICS[0], others: Mapping[str, list[float]] | None = None
) -> dict[str, Any]:
    """Return what W&B's summary has of the same run, with a budget of all bytes."""
    return results_of(trainer_of(name), rows_of(values, name, others))


def trainer_of(name: str) -> Any:
    meter = CommunicationMeter(max_uplink_bytes=10**9)
    return SimpleNamespace(metric=name, metric_falls="loss" in name, callbacks=[meter])


def rows_of(values: list[float], name: str, others: Mapping[str, list[float]] | None = None) -> list[dict[str, float]]:
    named = {name: values, **(others or {})}
    return [
        {"round": i, **dict.fromkeys(BYTES, 100.0 * (i + 1)), **{key: of[i] for key, of in named.items()}}
        for i in range(len(values))
    ]


# ------------------------------------------------------------------------------------------------------- final


@pytest.mark.long
@given(accuracies)
def test_final_is_the_mean_of_the_last_tenth(values: list[float]) -> None:
    count = num_final(len(values))
    assert count == max(1, min(10, len(values) // 10))
    last = values[-count:]
    assert min(last) - 1e-12 <= final(values) <= max(last) + 1e-12
    assert final(values) == pytest.approx(np.mean(last))
    if count == 1:
        assert final(values) == values[-1]


@pytest.mark.long
@given(values=accuracies, others=st.data(), window=st.sampled_from([1, 5, 39]))
def test_earlier_values_and_smoothing_do_not_change_it(values: list[float], others: st.DataObject, window: int) -> None:
    count = num_final(len(values))
    earlier = others.draw(st.lists(st.floats(0, 1), min_size=len(values) - count, max_size=len(values) - count))
    for name in METRICS:
        shown = curve(values, name).numbers["final"]
        assert shown == final(values)
        assert curve([*earlier, *values[-count:]], name, window).numbers["final"] == shown


def test_large_and_infinite_losses_do_not_end_a_run() -> None:
    assert final([1e308] * 30) == pytest.approx(1e308)
    assert isinf(final([0.5] * 29 + [inf]))
    assert np.isnan(final([inf] * 29 + [-inf]))


@pytest.mark.long
@given(accuracies)
def test_wandb_and_reports_show_the_same_numbers(values: list[float]) -> None:
    for name in METRICS:
        shown, sent = curve(values, name, window=1).numbers, summary(values, name)
        assert {key: sent[key] for key in ("final", "last", "best")} == {
            key: pytest.approx(shown[key]) for key in ("final", "last", "best")
        }


# --------------------------------------------------------------------------- what is chosen on the values themselves


def test_only_what_is_called_best_is_chosen_on_the_values_that_it_reports() -> None:
    """A single high value on the way changes the columns that are called best, a budget's too, and no other result or default."""
    plain, lucky = [0.5 + i / 1000 for i in range(100)], [0.5 + i / 1000 for i in range(100)]
    lucky[50] = 1.0
    group, high = (Group("a", (curve(values, "test/accuracy", window=1),)) for values in (plain, lucky))
    before, after = (results([shown], shown.curves[0].metric) for shown in (group, high))
    changed = {head for head, a, b in zip(before.header, before.rows[0], after.rows[0], strict=True) if a != b}
    assert changed == {"best"}
    assert "chosen on the values that it reports" in LEGEND, "the best within a budget"
    sent, more = summary(plain, "test/accuracy"), summary(lucky, "test/accuracy")
    changed = {key for key in sent if sent[key] != pytest.approx(more[key])}
    assert changed == {"best", "best_round", "accuracy_at_budget", "area"}, "those within a budget are best values, too"
    (claim,) = read_claims([{"text": "a claim", "better": "a", "than": "b"}], ["a", "b"], target=None)
    assert claim.number == "final"


def test_a_smoothed_best_is_called_so_and_final_says_of_how_many_values_it_is() -> None:
    def head(*lengths: int, window: int = 39) -> list[str]:
        curves = tuple(curve([0.5] * length, window=window) for length in lengths)
        return list(results([Group("a", curves)], curves[0].metric).header)[2:5]

    assert head(60) == ["final accuracy (mean of the last 6)", "last", "best (smoothed)"]
    assert head(60, 30) == ["final accuracy (mean of the last 3 to 6)", "last", "best (smoothed)"]
    assert head(19, window=1) == ["final accuracy (the last value)", "last", "best"]
    assert set(VALUES) < set(NUMBERS), "claims compare every value that tables show"


# ------------------------------------------------------------------------------------------- at best validation


@pytest.mark.parametrize(
    ("given", "logged", "found"),
    [
        ("val/accuracy", ["val/accuracy", "test/accuracy"], ("val/accuracy", "test/accuracy")),
        ("test/accuracy", ["val/accuracy", "test/accuracy"], ("val/accuracy", "test/accuracy")),
        ("valid_acc", ["valid_acc", "test_acc"], ("valid_acc", "test_acc")),
        ("test_acc", ["validation_acc", "test_acc"], ("validation_acc", "test_acc")),
        ("val/accuracy", ["val/accuracy"], None),
        ("test/accuracy", ["test/accuracy"], None),
        ("dice", ["dice", "test/dice"], None),
        ("interval", ["interval", "intertest"], None),
        ("train/loss", ["train/loss", "test/loss"], None),
    ],
)
def test_names_in_validation_and_test(given: str, logged: list[str], found: tuple[str, str] | None) -> None:
    assert validated_and_tested(given, logged) == found


@pytest.mark.long
@given(st.lists(st.tuples(st.floats(0, 1), st.one_of(st.just(nan), st.floats(0, 1))), min_size=1, max_size=30))
def test_at_best_validation_is_the_test_value_of_the_round_that_validation_chose(
    pairs: list[tuple[float, float]],
) -> None:
    for kind in ("accuracy", "loss"):
        choose = min if kind == "loss" else max
        both = [(held_out, tested) for held_out, tested in pairs if not np.isnan(tested)]
        expected = choose(both, key=lambda pair: pair[0])[1] if both else None
        validated, tested = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        shown = curve(validated, f"val/{kind}", others={f"test/{kind}": tested}).numbers
        assert shown["at_best_validation"] == expected
        sent = summary(validated, f"val/{kind}", others={f"test/{kind}": tested})
        assert sent.get("at_best_validation") == expected
        if both:  # the same if the test curve is compared
            other = curve(tested, f"test/{kind}", others={f"val/{kind}": validated}).numbers
            assert other["at_best_validation"] == expected


@pytest.mark.long
def test_at_best_validation_has_its_name_in_the_table_of_a_fit_in_reports_and_in_claims(tmp_path: Path) -> None:
    validated, tested = [0.2, 0.9, 0.4], [0.3, 0.6, 0.8]
    rows = rows_of(validated, "val/accuracy", {"test/accuracy": tested})
    ledger = SimpleNamespace(total_bytes=lambda way: 300)
    trainer = trainer_of("val/accuracy")
    trainer.adversary, trainer.privacy_in_words = None, ""
    trainer.run = SimpleNamespace(round=3, ledger=ledger, num_rejected=0)
    trainer.callback_metrics, trainer.loggers, trainer.enable_checkpointing = {"val/accuracy": 0.4}, [], False
    trainer.default_root_dir, trainer.stop = str(tmp_path), None
    lines = final_lines(trainer, rows)
    assert lines[:2] == [
        ("accuracy", "0.4000 (best 0.9000 after round 2)"),
        ("at best validation", "test/accuracy 0.6000 (after round 2)"),
    ]
    with (tmp_path / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    text = report([str(tmp_path), "--out", str(tmp_path / "report")])
    assert "test accuracy at best validation" in text
    assert "`at best validation` is the test value" in (tmp_path / "report" / "report.md").read_text()
    with (tmp_path / "report" / "runs.csv").open() as file:
        assert [row["at_best_validation"] for row in csv.DictReader(file)] == ["0.6"]
    given = [{"text": "a claim", "better": "a", "than": "b", "in": "at_best_validation"}]
    (claim,) = read_claims(given, ["a", "b"], target=None)
    ours, theirs = curve(validated, others={"test/accuracy": tested}), curve(validated)
    said = "one seed: there is no test value at the best validation of b in 1 of 1"
    assert claim.judge(claim.pairs({"a": {0: ours}, "b": {0: theirs}}), ours.metric).outcome == said
    theirs = curve(validated, others={"test/accuracy": [0.3, 0.5, 0.8]})
    assert claim.judge(claim.pairs({"a": {0: ours}, "b": {0: theirs}}), ours.metric).outcome == "one seed: ahead"
    with pytest.raises(UserError, match="at_best_validation"):
        read_claims([{**given[0], "in": "at_best"}], ["a", "b"], target=None)


def test_nothing_is_called_held_out_where_validation_is_on_test_samples() -> None:
    shown = curve([0.2, 0.9, 0.4])
    assert shown.numbers["at_best_validation"] is None
    assert not any("validation" in head for head in results([Group("a", (shown,))], shown.metric).header)
    assert "at_best_validation" not in summary([0.2, 0.9, 0.4])
