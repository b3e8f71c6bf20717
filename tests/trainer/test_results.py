"""Test the results of a run, which a sweep optimises, on rows made by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_fl.callbacks import CommunicationMeter, TargetReached
from lightning_fl.trainer.run_metric import results_of

nan = float("nan")


def results(callbacks: list[Any], values: list[float], name: str = "val/accuracy") -> dict[str, Any]:
    """Return the results of a run that sends ten times as much in each round, from 10 bytes on, and as much again down."""
    ways = ("comm/total_uplink_bytes", "comm/total_downlink_bytes")
    rows = [{"round": i, **dict.fromkeys(ways, 10.0 ** (i + 1)), name: x} for i, x in enumerate(values)]
    trainer: Any = SimpleNamespace(metric=name, metric_falls="loss" in name, callbacks=callbacks)
    return results_of(trainer, rows)


def target(value: float, name: str, reached: dict[str, float] | None = None) -> TargetReached:
    callback = TargetReached(value)
    callback.watched, callback.watched_falls, callback.reached = name, "loss" in name, reached
    return callback


def test_a_target_that_is_missed_costs_more_the_further_away_the_run_stays() -> None:
    found = results([target(0.8, "val/accuracy")], [0.2, 0.6, nan, 0.4])
    assert found["bytes_to_target_penalised"] == pytest.approx(10_000 * (1 + 0.2 / 0.8))
    assert not {"bytes_to_target", "rounds_to_target"} & found.keys()
    loss = results([target(0.5, "val/loss")], [4.0, 1.5, 2.0], "val/loss")
    assert loss["bytes_to_target_penalised"] == pytest.approx(1000 * (1 + 1.0 / 0.5))
    zero = results([target(0.0, "val/loss")], [4.0, 1.5], "val/loss")
    assert zero["bytes_to_target_penalised"] == pytest.approx(100 * 2.5)
    assert "bytes_to_target_penalised" not in results([target(0.8, "val/accuracy")], [nan, nan])


def test_a_target_that_is_reached_costs_what_was_sent_until_then() -> None:
    spent = {"comm/total_uplink_bytes": 100.0, "comm/total_downlink_bytes": 300.0, "comm/total_bytes": 400.0}
    reached = target(0.5, "val/accuracy", {"epoch": 1, "value": 0.6, **spent})
    found = results([reached, target(0.9, "val/accuracy")], [0.2, 0.6, 0.4])
    assert found["bytes_to_target"] == found["bytes_to_target_penalised"] == 100
    assert found["downlink_bytes_to_target"] == found["downlink_bytes_to_target_penalised"] == 300
    assert found["total_bytes_to_target"] == found["total_bytes_to_target_penalised"] == 400
    assert found["rounds_to_target"] == 2


def test_the_area_begins_at_a_hundredth_of_the_budget() -> None:
    found = results([CommunicationMeter(), CommunicationMeter(max_uplink_bytes=1000)], [0.4, nan, 0.3, 0.9])
    assert found["accuracy_at_budget"] == 0.4
    assert found["area"] == pytest.approx(0.4)
    found = results([CommunicationMeter(max_uplink_bytes=10_000)], [nan, 0.2, 0.6, 0.5])
    assert found["accuracy_at_budget"] == 0.6
    assert found["area"] == pytest.approx((0.2 + 0.6) / 2)
    both = results([CommunicationMeter(max_total_bytes=199)], [0.2, 0.6])
    assert both["accuracy_at_budget"] == 0.2, "the second round has cost 100 bytes in each direction"
    dear = results([CommunicationMeter(max_uplink_bytes=9)], [0.2, 0.6])
    assert dear["accuracy_at_budget"] == dear["area"] == 0, "a number to optimise, although nothing was affordable"
    loss = results([CommunicationMeter(max_uplink_bytes=100)], [4.0, 1.5, 1.0], "val/loss")
    assert loss["metric_at_budget"] == 1.5
    assert "area" not in loss, "there is no area under values of which lower ones are better"


def test_a_run_that_has_diverged_has_no_end() -> None:
    found = results([], [0.4, 0.1, nan], "val/loss")
    assert found == {"metric": "val/loss", "best": 0.1, "best_round": 2}
    assert results([], [0.4, nan, 0.1], "val/loss")["last"] == 0.1


def test_a_metric_below_zero_has_its_own_best_value_within_a_budget() -> None:
    found = results([CommunicationMeter(max_uplink_bytes=100)], [-2.0, nan, -1.0], "val/log_likelihood")
    assert found["metric_at_budget"] == -2.0
    assert "area" not in found, "before the first evaluation it would be 0, which is better than all values"
    assert "metric_at_budget" not in results([CommunicationMeter(max_uplink_bytes=9)], [-2.0], "val/log_likelihood")
    found = results([CommunicationMeter(max_uplink_bytes=100)], [-0.4, -0.2, 0.5], "val/r2")
    assert (found["metric_at_budget"], found["area"]) == (-0.2, 0.0)
