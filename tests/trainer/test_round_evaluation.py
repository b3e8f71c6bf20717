"""Test what a fit measures after its rounds: validation on held-out samples, and the test set beside it."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import SIZES, OnlyTrains, Perceptron, Pruning, Sizes, read_rows, samples, vector

from lightning_fl import UserError
from lightning_fl.algorithms import FedDP
from lightning_fl.callbacks import TargetReached
from lightning_fl.data import Arrays, Digits, Federated
from lightning_fl.modules import ImageClassifier
from lightning_fl.outputs.metrics_csv import read_rows as read_csv

TIMES = ("time/round_seconds",)


def held_out(**settings: Any) -> Arrays:
    """Return the data of `toys.federation` of which each client holds out a quarter."""
    defaults = {"num_clients": len(SIZES), "partition": Sizes(), "batch_size": 4, "val_fraction": 0.25}
    return Arrays(train=samples(sum(SIZES)), test=samples(10, seed=1), eval_batch_size=4, **{**defaults, **settings})


class Sampling(Perceptron):
    """Module with dropout and batch normalisation, whose test draws random numbers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
        self.modes: list[tuple[bool, bool]] = []

    def test_step(self, batch: Any, batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        self.modes.append((self.training, self.hidden[2].training))
        torch.rand(3), np.random.rand(3)  # noqa: NPY002


class RandomAtEnd(Callback):
    """Callback that draws random numbers after the evaluation of a round."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("noise/torch", float(torch.rand(())))
        pl_module.log("noise/numpy", float(np.random.rand()))  # noqa: NPY002


@pytest.mark.parametrize("callback", [None, WeightAveraging, Pruning], ids=lambda kind: getattr(kind, "__name__", "-"))
def test_the_test_columns_are_what_a_test_of_the_round_s_checkpoint_measures(
    callback: Any, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    saved = ModelCheckpoint(tmp_path / "rounds", filename="{epoch}", auto_insert_metric_name=False, save_top_k=-1)
    trainer = make_trainer(
        max_rounds=5,
        test_every_n_rounds=2,
        callbacks=[*([callback()] if callback else []), saved],
        precision="64-true",
        **keeps_files,
    )
    module = Sampling() if callback is WeightAveraging else Perceptron()
    trainer.fit(module, held_out())
    rows = {int(row["round"]): row for row in read_rows(tmp_path)}
    assert [number for number, row in rows.items() if row["test/loss"]] == [1, 3, 4]
    assert all(row["val/loss"] for row in rows.values())
    for number in (1, 3, 4):
        path = tmp_path / "rounds" / f"{number}.ckpt"
        (measured,) = make_trainer(precision="64-true").test(type(module)(), held_out(), ckpt_path=path, verbose=False)
        assert measured["test/loss"] == pytest.approx(float(rows[number]["test/loss"]), rel=1e-9)
        assert measured["test/loss"] != pytest.approx(float(rows[number]["val/loss"]), rel=1e-6)


def test_a_test_changes_no_other_number(make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]) -> None:
    first = Sampling()
    runs = {"without": (copy.deepcopy(first), {}), "with": (first, {"test_every_n_rounds": 1})}
    rows = {}
    for name, (module, flags) in runs.items():
        L.seed_everything(0)
        folder = tmp_path / name
        flags |= {"num_sanity_val_steps": 2, "val_every_n_rounds": 2, "default_root_dir": folder, **keeps_files}
        make_trainer(max_rounds=4, callbacks=RandomAtEnd(), **flags).fit(module, held_out())
        rows[name] = [{k: x for k, x in row.items() if k not in TIMES} for row in read_rows(folder)]
    assert (vector(runs["without"][0]) == vector(first)).all()
    assert all(row.pop("test/loss") for row in rows["with"])
    assert rows["with"] == rows["without"]


def test_a_module_is_tested_in_evaluation_mode_and_trains_on(make_trainer: MakeTrainer) -> None:
    module = Sampling()
    make_trainer(max_rounds=2, test_every_n_rounds=1).fit(module, held_out())
    assert module.modes == [(False, False)] * (2 * 3)
    assert module.training
    assert module.hidden[2].training


def test_batches_are_counted_whole_after_the_sanity_check(
    make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    read: list[Any] = []

    class Reads(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            read.append((trainer.num_sanity_val_batches, trainer.num_val_batches, trainer.num_test_batches))

    data = held_out()
    for steps in (1, -1):
        trainer = make_trainer(max_rounds=1, test_every_n_rounds=2, num_sanity_val_steps=steps, callbacks=Reads())
        trainer.fit(Perceptron(), data)
        stock = make_stock_trainer(max_epochs=1, num_sanity_val_steps=steps, callbacks=Reads())
        stock.fit(Perceptron(), DataLoader(TensorDataset(*samples(4))), data.val_dataloader())
        assert read[-2][:2] == read[-1][:2]
        assert read[-2][2] == [3]


def test_tests_of_a_resumed_run(make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]) -> None:
    """Test that a resumed run has the rows of one that was never interrupted, and may change the flag."""
    flags = {"test_every_n_rounds": 2, **keeps_files}
    for name, rounds in {"whole": (4,), "halves": (2, 4)}.items():
        for max_rounds in rounds:
            torch.manual_seed(0)
            trainer = make_trainer(max_rounds=max_rounds, default_root_dir=tmp_path / name, **flags)
            trainer.fit(Perceptron(), held_out(), ckpt_path="last" if max_rounds != rounds[0] else None)
    whole, halves = (
        [{k: x for k, x in row.items() if k not in TIMES} for row in read_rows(tmp_path / name)]
        for name in ("whole", "halves")
    )
    assert whole == halves
    again = make_trainer(max_rounds=6, default_root_dir=tmp_path / "halves", **{**flags, "test_every_n_rounds": 1})
    again.fit(Perceptron(), held_out(), ckpt_path="last")
    assert [row["round"] for row in read_rows(tmp_path / "halves") if row["test/loss"]] == ["1", "3", "4", "5"]


def test_clients_with_parameters_of_their_own_are_tested_one_by_one(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """Test that the values which the method adds are those of its test, and do not replace those of its validation."""
    model = ImageClassifier(network="lenet5", num_classes=10, in_channels=1, image_size=32)
    data = Digits(num_clients=4, image_size=32, val_fraction=0.2)
    method = FedDP()
    trainer = make_trainer(max_rounds=1, test_every_n_rounds=1, clients_per_round=2, **keeps_files)
    trainer.fit(model, data, method)
    (row,) = read_rows(tmp_path)
    (measured,) = make_trainer().test(
        copy.deepcopy(model), data, FedDP(), ckpt_path=tmp_path / "checkpoints" / "last.ckpt", verbose=False
    )
    of_test = {name: value for name, value in measured.items() if name.startswith("test/")}
    assert len(of_test) > 2
    for name, value in of_test.items():
        assert float(row[name]) == pytest.approx(value, rel=1e-5), name


class NoTest(Perceptron):
    """Module without a test step."""

    test_step = L.LightningModule.test_step  # type: ignore[assignment]


class OneName(Perceptron):
    """Module whose test logs under the names of its validation."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


class Mine(L.LightningDataModule):
    """Data module with three loaders."""

    def __init__(self, val_is_test: bool = False, with_test: bool = True) -> None:
        super().__init__()
        self.val_is_test, self.with_test = val_is_test, with_test
        self.held_out, self.tested = TensorDataset(*samples(6, seed=2)), TensorDataset(*samples(8, seed=3))

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*samples(24)), batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(self.tested if self.val_is_test else self.held_out, batch_size=4)

    def test_dataloader(self) -> Any:
        return DataLoader(self.tested, batch_size=4) if self.with_test else []


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any], str]] = {
    "no held-out part": (
        Perceptron,
        lambda: held_out(val_fraction=0.0),
        {},
        r"val/… is measured on the test data, too",
    ),
    "one data set of the user's": (
        Perceptron,
        lambda: Federated(Mine(val_is_test=True), num_clients=3),
        {},
        r"val/… is measured on the test data, too: hold out training samples for it, as with data\.val_fraction 0\.1",
    ),
    "no test step": (NoTest, held_out, {}, r"test_every_n_rounds is 2, but NoTest has no test_step"),
    "no test data": (
        Perceptron,
        lambda: Federated(Mine(with_test=False), num_clients=3),
        {},
        "there is no batch to test on: Federated has no test data",
    ),
    "no batch": (Perceptron, held_out, {"limit_test_batches": 0}, "limit_test_batches is 0"),
    "names of the validation": (
        OneName,
        held_out,
        {"num_sanity_val_steps": 1},
        r"OneName\.test_step logs 'val/loss', 'val/accuracy', which a round logs already",
    ),
    "names of the validation, without a sanity check": (OneName, held_out, {}, r"OneName\.test_step logs 'val/loss'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_test_that_cannot_be_is_refused(case: str, make_trainer: MakeTrainer) -> None:
    module, data, flags, sentence = REFUSED[case]
    with pytest.raises(UserError, match=sentence):
        make_trainer(test_every_n_rounds=2, **flags).fit(module(), data())


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_the_flag_is_a_number_of_rounds(every: Any, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"test_every_n_rounds must be a whole number"):
        make_trainer(test_every_n_rounds=every)


class NoValidation(Perceptron):
    """Module without a validation step."""

    validation_step = L.LightningModule.validation_step  # type: ignore[assignment]


SAID: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any], str]] = {
    "test set": (
        Perceptron,
        lambda: held_out(val_fraction=0.0),
        {},
        "val/… is measured on 10 test samples; set data.val_fraction to use held-out training samples instead.",
    ),
    "images": (
        lambda: ImageClassifier(network="linear", num_classes=10, in_channels=1, image_size=8),
        Digits,
        {},
        "val/… is measured on 360 test images; set data.val_fraction to use held-out training samples instead.",
    ),
    "held out": (Perceptron, held_out, {}, "val/… is measured on 10 held-out training samples."),
    "some batches": (
        Perceptron,
        held_out,
        {"limit_val_batches": 2},
        "val/… is measured on 8 held-out training samples.",
    ),
    "both": (
        Perceptron,
        held_out,
        {"test_every_n_rounds": 3},
        "val/… is measured on 10 held-out training samples, test/… on 10 test samples, every 3 rounds and after the last.",
    ),
    "loaders of the user's": (
        Perceptron,
        lambda: Federated(Mine(), num_clients=3),
        {"test_every_n_rounds": 1},
        "val/… is measured on 6 samples of Mine, test/… on 8 samples of Mine, every round.",
    ),
    "nothing": (
        NoValidation,
        held_out,
        {},
        "Nothing is measured as val/…, because NoValidation has no validation_step.",
    ),
    "no loader": (
        Perceptron,
        lambda: Federated(OnlyTrains(), num_clients=3),
        {},
        "Nothing is measured as val/…, because OnlyTrains has no val_dataloader.",
    ),
    "no batch": (
        Perceptron,
        held_out,
        {"limit_val_batches": 0},
        "Nothing is measured as val/…, because there is no batch to validate on.",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_a_run_says_what_it_measures_on(case: str, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    module, data, flags, sentence = SAID[case]
    with caplog.at_level(logging.INFO):
        make_trainer(max_rounds=1, **flags).fit(module(), data())
    assert [record.message for record in caplog.records if "measured" in record.message] == [sentence]


class OwnNames(Perceptron):
    """Module with one accuracy in validation and one in test."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_acc", float(batch_idx))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_acc", float(batch_idx))


class OnlyTest(NoValidation, OwnNames):
    """Module that is tested only."""


@pytest.mark.parametrize(("kind", "metric"), [(OwnNames, "val_acc"), (OnlyTest, "train/loss")])
def test_the_metric_is_never_one_of_the_test_by_itself(kind: Any, metric: str, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=2, test_every_n_rounds=1)
    trainer.fit(kind(), held_out())
    assert trainer.metric == metric
    assert "test_acc" in trainer.callback_metrics


def test_the_first_value_of_a_validation_comes_before_the_training_loss(make_trainer: MakeTrainer) -> None:
    class Unknown(Perceptron):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log_dict({"val_err": float(batch_idx), "val_bias": 1.0})  # neither is the only one

    trainer = make_trainer(max_rounds=3, num_sanity_val_steps=2)
    trainer.fit(Unknown(), held_out())
    assert trainer.metric == "val_err"


@pytest.mark.parametrize("steps", [0, 2])
def test_the_metric_of_the_test_can_be_given(steps: int, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=5, test_every_n_rounds=3, metric="test_acc", num_sanity_val_steps=steps)
    trainer.fit(OwnNames(), held_out())
    assert trainer.metric == "test_acc"
    wrong = make_trainer(max_rounds=5, test_every_n_rounds=3, metric="tost_acc", num_sanity_val_steps=steps)
    with pytest.raises(UserError, match=r"'tost_acc', which is not logged; did you mean 'test_acc'"):
        wrong.fit(OwnNames(), held_out())


def test_a_target_of_the_test_waits_for_the_first_test(make_trainer: MakeTrainer) -> None:
    target = TargetReached(0.0, monitor="test_acc", stop=False)
    make_trainer(max_rounds=5, test_every_n_rounds=3, callbacks=target).fit(OwnNames(), held_out())
    assert target.reached is not None
    assert target.reached["epoch"] == 2
    misspelt = TargetReached(0.0, monitor="test_accuracy")
    with pytest.raises(UserError, match="monitors 'test_accuracy', which is not logged; did you mean 'test_acc'"):
        make_trainer(max_rounds=5, test_every_n_rounds=3, callbacks=misspelt).fit(OwnNames(), held_out())


def test_the_best_checkpoint_is_chosen_on_held_out_samples(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """Test a held-out part and a test set that disagree on the best round."""

    class Disagreeing(Perceptron):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/accuracy", -float(self.trainer.current_epoch))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/accuracy", float(self.trainer.current_epoch))

    best = ModelCheckpoint(tmp_path / "best", monitor="val/accuracy", mode="max")
    trainer = make_trainer(max_rounds=3, test_every_n_rounds=1, callbacks=best, **keeps_files)
    trainer.fit(Disagreeing(), held_out())
    assert best.best_model_score == 0
    columns, rows = read_csv(tmp_path / "metrics.csv")
    assert {"val/accuracy", "test/accuracy"} <= set(columns)
    assert [(float(row["val/accuracy"]), float(row["test/accuracy"])) for row in rows] == [(0, 0), (-1, 1), (-2, 2)]
