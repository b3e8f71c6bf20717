"""Test the metric that a run is about: found or given, and the same wherever a run shows or uses it."""

import csv
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch.loggers import WandbLogger
from torch.utils.data import DataLoader, TensorDataset
from toys import Perceptron, Served, federation, samples

from lightning_fl import UserError
from lightning_fl.algorithms import FedAvg, FedDU, PruneFL
from lightning_fl.callbacks import TargetReached
from lightning_fl.outputs.final_table import final_lines
from lightning_fl.outputs.metric import falls, find_metric
from lightning_fl.report import report

LOGGER = "lightning.pytorch.utilities.rank_zero"


class Own(Perceptron):
    """Module that logs under names of its own, in each round the next of its values."""

    def __init__(self, **values: list[float]) -> None:
        super().__init__()
        self.values = {name.replace("__", "/"): of_name for name, of_name in values.items()}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._log(batch, "train")
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log(batch, "val")

    def _log(self, batch: Any, stage: str) -> None:
        for name, values in self.values.items():
            if name.startswith("train") == (stage == "train"):
                self.log(name, values[self.trainer.current_epoch % len(values)], batch_size=len(batch[0]))


def own() -> Own:
    return Own(val_acc=[0.1, 0.5, 0.3], val_loss=[3.0, 2.0, 1.0], train_loss=[3.0, 2.0, 1.0])


@pytest.mark.parametrize(
    ("logged", "found"),
    [
        (["val/loss", "val/accuracy"], "val/accuracy"),
        (["val/accuracy", "val/accuracy_gated", "feddu/accuracy"], "val/accuracy"),
        (["val_loss", "val_acc"], "val_acc"),
        (["valid_accuracy", "train_acc", "train/loss"], "valid_accuracy"),
        (["test_acc"], "test_acc"),
        (["val_MulticlassAccuracy", "val_loss"], "val_MulticlassAccuracy"),
        (["val_acc", "val_top5_acc", "val_loss"], "val_loss"),  # two accuracies: which one is meant is unknown
        (["val_accrued", "vaccine", "val_loss"], "val_loss"),
        (["val_loss", "val_recon_loss", "train_acc"], "val_loss"),
        (["val_mse_loss", "train/loss"], "val_mse_loss"),
        (["val_f1", "train/loss", "train_loss"], "val_f1"),
        (["val_mse", "train_acc", "train/loss"], "val_mse"),
        (["val_f1", "val_auc", "train/loss"], "train/loss"),  # which one is meant is unknown
        (["f1", "train/loss"], "train/loss"),  # it may be no result
        (["train/loss", "train_acc"], "train_acc"),
        (["val_f1"], "val_f1"),
        (["f1"], None),
        ([], None),
    ],
)
def test_one_accuracy_is_found_or_else_the_loss(logged: list[str], found: str | None) -> None:
    assert find_metric(logged) == found
    assert find_metric(reversed(logged)) == found


@pytest.mark.parametrize("name", ["val/loss", "val_mse", "valid_error", "testRMSE", "val/lossless", "val_perplexity"])
def test_less_is_better_of_losses_and_errors(name: str) -> None:
    assert falls(name)


@pytest.mark.parametrize("name", ["val/accuracy", "val_acc", "val_f1", "auroc", "val_closest"])
def test_more_is_better_of_all_others(name: str) -> None:
    assert not falls(name)


# ------------------------------------------------------------------------------------------- the same everywhere


@pytest.mark.parametrize("sanity", [0, 2])
def test_the_metric_is_the_same_in_table_bar_and_target(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], sanity: int
) -> None:
    target = TargetReached(0.5)
    trainer = make_trainer(
        max_rounds=3, logger=True, enable_progress_bar=True, callbacks=target, num_sanity_val_steps=sanity
    )
    with caplog.at_level("INFO", LOGGER):
        trainer.fit(own(), federation())
    assert trainer.metric == "val_acc"
    said = [message for message in caplog.messages if message.startswith("The run's metric is")]
    assert said == [
        "The run's metric is val_acc (table, bar, report, targets); higher is better; trainer.metric sets another."
    ]
    assert target.reached is not None
    assert target.reached["epoch"] == 1
    assert ("val_acc", "0.5000 (best 0.5000 after round 2)") in final_lines(trainer, trainer.fit_loop.rows)
    assert "val_acc=0.5" in capsys.readouterr().err


def test_the_table_leaves_out_val_only_where_a_name_begins_with_it(make_trainer: MakeTrainer) -> None:
    for name, shown in (("val__accuracy", "accuracy"), ("eval__accuracy", "eval/accuracy")):
        trainer = make_trainer(max_rounds=1, logger=True)
        trainer.fit(Own(**{name: [0.5]}), federation())
        assert final_lines(trainer, trainer.fit_loop.rows)[0][0] == shown


@pytest.mark.parametrize("sanity", [0, 2])
def test_the_only_value_of_a_validation_is_taken_and_its_direction_said(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, sanity: int
) -> None:
    trainer = make_trainer(max_rounds=3, logger=True, num_sanity_val_steps=sanity)
    with caplog.at_level("INFO", LOGGER):
        trainer.fit(Own(val_score=[0.1, 0.5, 0.3]), federation())
    assert ("val_score", "0.3000 (best 0.5000 after round 2)") in final_lines(trainer, trainer.fit_loop.rows)
    (said,) = [message for message in caplog.messages if message.startswith("The run's metric is")]
    assert said == (
        "The run's metric is val_score (table, bar, report, targets); higher is better, because its name says neither loss "
        "nor error; trainer.metric val_score with trainer.metric_mode min reverses that."
    )


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("name", ["mae", "score"])
def test_the_only_value_of_a_validation_wins_over_the_training_loss(
    make_trainer: MakeTrainer, name: str, sanity: int
) -> None:
    class Plain(Perceptron):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log(name, 1.0, batch_size=1)

    trainer = make_trainer(num_sanity_val_steps=sanity)
    trainer.fit(Plain(), Served(9), FedAvg())
    assert trainer.metric == name
    assert trainer.metric_falls == (name == "mae")


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("names", [["mae", "r2"], ["val_f1", "val_auc"], ["score", "mae"]])
def test_the_first_of_several_values_of_a_validation_wins_over_the_training_loss(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, names: list[str], sanity: int
) -> None:
    class Plain(Perceptron):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            for name in names:
                self.log(name, 1.0, batch_size=1)

    trainer = make_trainer(num_sanity_val_steps=sanity)
    with caplog.at_level("INFO", LOGGER):
        trainer.fit(Plain(), Served(9), FedAvg())
    assert trainer.metric == names[0]
    assert trainer.metric_falls == (names[0] == "mae")
    (said,) = [message for message in caplog.messages if message.startswith("The run's metric is")]
    assert said.endswith("it is the first of 2 values of the validation, none of them its accuracy or loss.")


def test_the_shipped_names_are_taken_silently(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer()
    with caplog.at_level("INFO", LOGGER):
        trainer.fit(Perceptron(), federation())
    assert trainer.metric == "val/accuracy"
    assert not [message for message in caplog.messages if "is about" in message]


def test_a_given_metric_goes_before_what_is_found(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    target = TargetReached(2.0, stop=False)
    trainer = make_trainer(max_rounds=3, logger=True, metric="val_loss", callbacks=target)
    with caplog.at_level("INFO", LOGGER):
        trainer.fit(own(), federation())
    assert "The run's metric is val_loss (table, bar, report, targets); lower is better." in caplog.messages
    assert ("val_loss", "1.0000 (best 1.0000 after round 3)") in final_lines(trainer, trainer.fit_loop.rows)
    assert target.reached is not None
    assert target.reached["epoch"] == 1


@pytest.mark.parametrize(("mode", "best"), [(None, "9.0000 after round 1"), ("min", "2.0000 after round 2")])
def test_the_mode_says_what_is_better_where_the_name_does_not(
    make_trainer: MakeTrainer, mode: str | None, best: str
) -> None:
    trainer = make_trainer(max_rounds=3, logger=True, metric="val_bits", metric_mode=mode)
    trainer.fit(Own(val_bits=[9.0, 2.0, 3.0]), federation())
    assert ("val_bits", f"3.0000 (best {best})") in final_lines(trainer, trainer.fit_loop.rows)


def test_without_validation_the_run_is_about_the_training_loss(make_trainer: MakeTrainer) -> None:
    for algorithm in (FedAvg(), FedDU()):  # FedDU logs an accuracy of its own
        trainer = make_trainer(limit_val_batches=0)
        trainer.fit(Perceptron(), Served(9), algorithm)
        assert trainer.metric == "train/loss"


def test_a_name_of_the_sanity_check_alone_is_not_kept(make_trainer: MakeTrainer) -> None:
    class Named(Perceptron):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("sanity_check_loss" if self.trainer.sanity_checking else "val_loss", self.loss(batch))

    trainer = make_trainer(num_sanity_val_steps=1)
    trainer.fit(Named(), federation())
    assert trainer.metric == "val_loss"


def test_each_fit_finds_its_own_metric(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1)
    for module, name in ((own(), "val_acc"), (Perceptron(), "val/accuracy")):
        trainer.fit(module, federation())
        assert trainer.metric == name


class Recorder(WandbLogger):
    """W&B logger that starts no W&B, and records the calls of its run."""

    def __init__(self) -> None:
        super().__init__(offline=True)
        self.run = MagicMock(id="1")

    experiment = property(lambda self: self.run)  # type: ignore[assignment]


def test_wandb_shows_results_by_bytes_and_the_best(make_trainer: MakeTrainer) -> None:
    logger = Recorder()
    values = {"val_acc": [0.1, 0.5, 0.3], "train_loss": [1.0], "val_loss": [1.0], "clients_seen": [1.0]}
    make_trainer(max_rounds=3, metric="dice", logger=logger).fit(Own(**values, dice=[0.1, 0.9, 0.2]), federation())
    axes = {call.args[0]: call.kwargs["step_metric"] for call in logger.run.define_metric.call_args_list if call.kwargs}
    for name in ("val_acc", "val_loss", "train_loss", "train/loss", "dice"):
        assert axes[name] == "comm/total_uplink_bytes"
    assert axes["clients_seen"] == axes["clients/accepted"] == "round"
    logger.run.summary.update.assert_called_with(
        {
            "metric": "dice",
            "final": pytest.approx(0.2),
            "last": pytest.approx(0.2),
            "best": pytest.approx(0.9),
            "best_round": 2,
        }
    )


# ------------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize("sanity", [0, 2])
def test_a_name_that_is_never_logged_is_refused(make_trainer: MakeTrainer, sanity: int) -> None:
    trainer = make_trainer(metric="val_accc", num_sanity_val_steps=sanity)
    with pytest.raises(UserError, match=r"trainer.metric is 'val_accc', which is not logged; did you mean 'val_acc'"):
        trainer.fit(own(), federation())
    assert trainer.run.round == (0 if sanity else 1)


@pytest.mark.parametrize("limit", [0, None])
def test_a_name_unlike_all_others_is_refused_after_the_first_round(
    make_trainer: MakeTrainer, limit: int | None
) -> None:
    trainer = make_trainer(metric="dice", num_sanity_val_steps=2, limit_val_batches=limit)
    with pytest.raises(UserError, match=r"trainer\.metric is 'dice', which is not logged"):
        trainer.fit(own(), federation())
    assert trainer.run.round == 1


def test_a_name_that_only_training_logs_may_be_given(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(metric="train_loss", num_sanity_val_steps=2)
    trainer.fit(own(), federation())
    assert trainer.metric == "train_loss"


def test_a_mode_alone_or_unknown_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"metric_mode 'min' needs trainer\.metric"):
        make_trainer(metric_mode="min")
    with pytest.raises(UserError, match="metric_mode 'most' is unknown"):
        make_trainer(metric="val_acc", metric_mode="most")
    with pytest.raises(UserError, match="metric must be the name of a logged value, got ''"):
        make_trainer(metric="")


# --------------------------------------------------------------------------------------- methods that need an accuracy


@pytest.mark.parametrize("algorithm", [FedDU, partial(PruneFL, initial_passes=2)], ids=["FedDU", "PruneFL"])
def test_methods_take_the_accuracy_by_its_own_name(make_trainer: MakeTrainer, algorithm: Any) -> None:
    trainer = make_trainer(max_rounds=1)
    trainer.fit(Own(val_acc=[0.5], val_loss=[1.0]), Served(9), algorithm())
    given = make_trainer(max_rounds=1, metric="val_top5")
    given.fit(Own(val_acc=[0.5], val_top5=[0.75]), Served(9), algorithm())
    if algorithm is FedDU:
        assert trainer.callback_metrics["feddu/accuracy"] == 0.5
        assert given.callback_metrics["feddu/accuracy"] == 0.75


@pytest.mark.parametrize(
    ("flags", "values", "said"),
    [
        (
            {"metric": "val_loss"},
            {"val_acc": [0.5], "val_loss": [0.5]},
            "trainer.metric is 'val_loss', a loss or error",
        ),
        ({"metric": "val_bits"}, {"val_acc": [0.5], "val_bits": [9.0]}, r"must be in \[0, 1\], .* logs 9"),
        ({"metric": "val_ac"}, {"val_acc": [0.5]}, "'val_ac', which is not logged; did you mean 'val_acc'"),
        ({}, {"val_acc": [0.5], "val_top5_acc": [0.9]}, "'val_acc', 'val_top5_acc'.*trainer.metric"),
    ],
)
def test_what_is_no_accuracy_is_refused_by_methods_that_need_one(
    make_trainer: MakeTrainer, flags: dict[str, Any], values: dict[str, list[float]], said: str
) -> None:
    trainer = make_trainer(**flags)
    with pytest.raises(UserError, match=said):
        trainer.fit(Own(**values), Served(9), FedDU())
    assert "run" not in vars(trainer) or trainer.run.round == 0


# ------------------------------------------------------------------------------------------------ resumed and reported


def test_the_checkpoint_keeps_a_given_metric(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> None:
    make_trainer(metric="val_bits", metric_mode="min", **keeps_files).fit(
        Own(val_bits=[9.0, 2.0, 3.0], val_acc=[0.5]), federation()
    )
    resumed = make_trainer(max_rounds=3, num_sanity_val_steps=2, **keeps_files)
    resumed.fit(Own(val_bits=[9.0, 2.0, 3.0], val_acc=[0.5]), federation(), ckpt_path="last")
    assert resumed.metric == "val_bits"
    assert ("val_bits", "3.0000 (best 2.0000 after round 2)") in final_lines(resumed, resumed.fit_loop.rows)
    other = make_trainer(max_rounds=4, metric="val_acc", **keeps_files)
    other.fit(Own(val_bits=[9.0, 2.0, 3.0], val_acc=[0.5]), federation(), ckpt_path="last")
    assert other.metric == "val_acc"


def test_a_resumed_method_goes_on_with_the_given_accuracy(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any]
) -> None:
    module = Own(val_acc=[0.5], val_top5=[0.75])
    make_trainer(metric="val_top5", **keeps_files).fit(module, Served(9), FedDU())
    resumed = make_trainer(max_rounds=3, **keeps_files)
    resumed.fit(module, Served(9), FedDU(), ckpt_path="last")
    assert resumed.callback_metrics["feddu/accuracy"] == 0.75


@pytest.mark.matrix
def test_a_report_reads_the_metric_that_the_run_kept(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    # The name alone would say that more is better, and the other column is an accuracy.
    module = Own(val_bits=[9.0, 2.0, 3.0], val_acc=[0.5])
    make_trainer(max_rounds=3, metric="val_bits", metric_mode="min", **keeps_files).fit(module, federation())
    assert json.loads((tmp_path / "communication.json").read_text())["metric"] == {"name": "val_bits", "mode": "min"}
    report([str(tmp_path), "--out", str(tmp_path / "report")])
    text = (tmp_path / "report" / "report.md").read_text()
    assert "final val_bits" in text
    with (tmp_path / "report" / "runs.csv").open() as file:
        assert [(float(row["final"]), float(row["best"])) for row in csv.DictReader(file)] == [(3.0, 2.0)]


def test_a_report_finds_the_metric_of_a_run_that_names_none(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(max_rounds=3, **keeps_files).fit(own(), federation())
    (tmp_path / "communication.json").unlink()
    assert "final val_acc" in report([str(tmp_path), "--out", str(tmp_path / "report")])


@pytest.mark.matrix
def test_runs_about_different_metrics_need_a_choice(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    for name, module in (("a", own()), ("b", Perceptron())):
        make_trainer(default_root_dir=tmp_path / name, **keeps_files).fit(module, federation())
    both = [str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "report")]
    with pytest.raises(
        UserError, match=r"val_acc in .*a, val/accuracy in .*b; name the folders of runs to compare, or choose"
    ):
        report(both)
    assert "final train loss" in report([*both, "--metric", "train/loss"])


# ------------------------------------------------------------------------------------------------ in a stock trainer


@pytest.mark.parametrize("every", [1, 2])
def test_a_target_finds_its_metric_in_a_stock_trainer(make_stock_trainer: Callable[..., L.Trainer], every: int) -> None:
    loader = DataLoader(TensorDataset(*samples(8)), batch_size=4)
    target = TargetReached(0.5)
    trainer = make_stock_trainer(max_epochs=4, callbacks=target, check_val_every_n_epoch=every)
    trainer.fit(own(), loader, loader)
    assert target.reached is not None
    assert target.reached["epoch"] == 1
    assert trainer.current_epoch == 2


def test_a_target_that_finds_nothing_says_so(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    loader = DataLoader(TensorDataset(*samples(8)), batch_size=4)
    with pytest.raises(
        UserError, match=r"TargetReached finds neither a single accuracy nor a loss .* 'val_f1': set its monitor"
    ):
        make_stock_trainer(callbacks=TargetReached(0.5)).fit(Own(val_auc=[0.5], val_f1=[0.5]), loader, loader)
