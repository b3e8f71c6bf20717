"""Test `self.log` of a module in a federation: averages by samples over steps and clients."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError, Metric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryAveragePrecision
from toys import Perceptron, Served, federation, read_rows, samples

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import FedDU
from lightning_fl.trainer import fit_loop


class Diary(Perceptron):
    """Module that records its logs by client, to compute the averages by hand."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.notes: list[tuple[float, int]] = []
        self.noting = False

    def on_client_download(self, client: int) -> None:
        self.noting = True

    def on_train_epoch_start(self) -> None:
        self.notes.clear()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if self.noting:
            self.notes.append((float(loss.detach()), len(batch[0])))
        self.log("seen", loss, **self.options)
        return loss

    def average(self) -> float:
        return sum(value * num for value, num in self.notes) / sum(num for _, num in self.notes)


def fitted(module: Perceptron, make_trainer: MakeTrainer, **flags: Any) -> FederatedTrainer:
    trainer = make_trainer(local_epochs=2, **flags)
    trainer.fit(module, federation())
    return trainer


def test_means_are_by_samples_over_steps_and_clients(make_trainer: MakeTrainer) -> None:
    module = Diary()
    trainer = fitted(module, make_trainer)
    assert len({num for _, num in module.notes}) > 1, "batches must be unequal"
    assert trainer.callback_metrics["seen"] == pytest.approx(module.average(), rel=1e-6)


def test_the_loss_is_reported_even_if_the_module_logs_nothing(make_trainer: MakeTrainer) -> None:
    module = Diary()
    trainer = fitted(module, make_trainer)
    assert trainer.callback_metrics["train/loss"] == pytest.approx(module.average(), rel=1e-6)


def test_the_modules_own_train_loss_stands(make_trainer: MakeTrainer) -> None:
    class Own(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("train/loss", 5.0)
            return self.loss(batch)

    assert fitted(Own(), make_trainer).callback_metrics["train/loss"] == 5.0


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize("first", [0, 1])
def test_the_modules_own_train_loss_stands_if_it_is_not_logged_in_every_step(
    first: int, runner: str, make_trainer: MakeTrainer
) -> None:
    class Late(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx >= first:  # some clients have one batch only
                self.log("train/loss", 5.0)
            return self.loss(batch)

    metrics = fitted(Late(), make_trainer, runner=runner, clients_per_round=3).callback_metrics
    assert metrics["train/loss"] == 5.0
    assert not [name for name in metrics if "of steps" in name]


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_a_value_of_no_sample_counts_for_nothing(runner: str, make_trainer: MakeTrainer) -> None:
    class Unweighted(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("never", 5.0, batch_size=0)
            self.log("first", 5.0, batch_size=int(batch_idx == 0), on_epoch=True)
            return self.loss(batch)

    metrics = fitted(Unweighted(), make_trainer, runner=runner).callback_metrics
    assert "never" not in metrics
    assert metrics["first"] == 5.0


@pytest.mark.parametrize(
    "name", ["round", "comm/uplink_bits", "clients/selected", "time/simulated_seconds", "time/round_seconds"]
)
@pytest.mark.parametrize("hook", ["training_step", "validation_step", "on_train_epoch_end", "on_validation_epoch_end"])
def test_names_of_a_rounds_own_columns_are_refused(hook: str, name: str, make_trainer: MakeTrainer) -> None:
    class Same(Perceptron):
        pass

    def logging(self: Same, *arguments: Any) -> Any:
        self.log(name, 5.0)
        return getattr(Perceptron, hook)(self, *arguments)

    setattr(Same, hook, logging)
    with pytest.raises(UserError, match=f"{name}.*itself reports a column of this name"):
        make_trainer().fit(Same(), federation())


def test_one_name_in_training_and_validation_is_said_once(make_trainer: MakeTrainer) -> None:
    class Same(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("loss", 1.0)
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", 2.0)

    trainer = make_trainer(max_rounds=2)
    with pytest.warns(UserWarning, match="logs 'loss' in training and in validation") as said:
        trainer.fit(Same(), federation())
    assert sum("in training and in validation" in str(warning.message) for warning in said) == 1
    assert trainer.callback_metrics["loss"] == 2.0


@pytest.mark.parametrize(
    ("reduce_fx", "by_hand"), [("sum", sum), ("min", min), ("max", max), (torch.median, None), (torch.std, None)]
)
def test_other_reductions_see_all_values_of_the_round(reduce_fx: Any, by_hand: Any, make_trainer: MakeTrainer) -> None:
    module = Diary(reduce_fx=reduce_fx)
    trainer = fitted(module, make_trainer)
    values = [value for value, _ in module.notes]
    expected = by_hand(values) if by_hand else float(reduce_fx(torch.tensor(values)))
    assert trainer.callback_metrics["seen"] == pytest.approx(expected, rel=1e-5)


def test_a_batch_size_that_is_given_is_the_weight(make_trainer: MakeTrainer) -> None:
    module = Diary(batch_size=1)
    trainer = fitted(module, make_trainer)
    expected = sum(value for value, _ in module.notes) / len(module.notes)
    assert trainer.callback_metrics["seen"] == pytest.approx(expected, rel=1e-6)


def test_torchmetrics_objects_see_every_training_batch_once(make_trainer: MakeTrainer) -> None:
    class Measured(Diary):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.samples = MeanMetric(), SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.mean.update(loss.detach(), weight=len(batch[0]))
            self.samples.update(len(batch[0]))
            self.log("mean", self.mean)
            self.log("samples", self.samples)
            return loss

    by_round: list[tuple[float, float, float, int]] = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            metrics = trainer.callback_metrics
            num = sum(num for _, num in pl_module.notes)
            by_round.append((float(metrics["mean"]), pl_module.average(), float(metrics["samples"]), num))

    fitted(Measured(), make_trainer, max_rounds=3, callbacks=Watch())
    assert len(by_round) == 3
    for mean, expected_mean, num, expected_num in by_round:
        assert num == expected_num
        assert mean == pytest.approx(expected_mean, rel=1e-6)


def test_torchmetrics_in_validation(make_trainer: MakeTrainer) -> None:
    class Measured(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.scores = MetricCollection({"squared": MeanSquaredError(), "root": MeanSquaredError(squared=False)})

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.scores.update(self(batch[0]), batch[1])
            self.log_dict(self.scores)

    module = Measured()
    trainer = fitted(module, make_trainer, num_sanity_val_steps=1)
    x, y = trainer.datamodule.test._stored
    expected = float((module(x) - y).detach().square().mean())
    assert trainer.callback_metrics["squared"] == pytest.approx(expected, rel=1e-5)
    assert trainer.callback_metrics["root"] == pytest.approx(expected**0.5, rel=1e-5)


def test_a_metric_made_in_setup_is_logged_in_every_session(make_trainer: MakeTrainer) -> None:
    class Measured(Perceptron):
        def setup(self, stage: str) -> None:
            self.squared = MeanSquaredError()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.squared(self(batch[0]), batch[1])
            self.log("squared", self.squared)

    module = Measured()
    trainer = fitted(module, make_trainer)
    after_fit = float(trainer.callback_metrics["squared"])
    assert trainer.validate(module, verbose=False) == [{"squared": pytest.approx(after_fit, rel=1e-5)}]


def test_validation_is_averaged_by_samples(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    trainer = fitted(module, make_trainer)
    x, y = trainer.datamodule.test._stored
    assert len(x) % 4 != 0, "the last batch must be smaller"
    assert trainer.callback_metrics["val/loss"] == pytest.approx(float(module.loss((x, y)).detach()), rel=1e-5)


def test_several_validation_loaders_have_their_own_names(make_trainer: MakeTrainer) -> None:
    class Two(Perceptron):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("value", float(dataloader_idx))

    data = federation()
    single = data.val_dataloader
    data.val_dataloader = lambda: [single(), single()]  # type: ignore[method-assign]
    trainer = make_trainer()
    trainer.fit(Two(), data)
    assert trainer.callback_metrics["value/dataloader_idx_0"] == 0
    assert trainer.callback_metrics["value/dataloader_idx_1"] == 1


class Flags(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log_dict({"a": 1.0, "b": 3}, prog_bar=True)
        self.log("hidden", 2.0, logger=False)
        self.log("stepwise", torch.tensor([4.0]), on_step=True, on_epoch=False)
        return self.loss(batch)

    def on_train_epoch_start(self) -> None:
        self.log("at start", float(self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.log("at end", 10.0 + self.current_epoch)


class LogsInCallback(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("by callback", 20.0 + trainer.current_epoch, prog_bar=True)


def test_flags_of_log(make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]) -> None:
    trainer = fitted(Flags(), make_trainer, max_rounds=3, callbacks=LogsInCallback(), **keeps_files)
    assert set(trainer.progress_bar_metrics) == {"a", "b", "by callback"}
    assert trainer.callback_metrics["hidden"] == 2.0
    rows = read_rows(tmp_path)
    assert len(rows) == 3
    assert "hidden" not in rows[0]
    for t, row in enumerate(rows):
        expected = {"a": 1, "b": 3, "stepwise": 4, "at start": t, "at end": 10 + t, "by callback": 20 + t}
        assert {name: float(row[name]) for name in expected} == expected


class Synchronised(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for how in ("sum", "max", "mean"):
            pl_module.log(f"{how} of all", 3.0, sync_dist=True, reduce_fx=how)
            pl_module.log(f"{how} of process 0", 3.0, reduce_fx=how)


def test_values_of_callbacks_are_combined_over_processes_if_they_ask_for_it(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = fit_loop.gather_logs

    def with_another_process(*arguments: Any) -> tuple[list[Any], list[Any], list[Any]]:
        sums, knowledge, more = gathered(*arguments)
        if "sum of all" in sums[0]:
            logged = {name: ([5.0] if weight == 0 else 5.0 * weight, weight) for name, (_, weight) in sums[0].items()}
            sums = [*sums, logged]
        return sums, knowledge, more

    monkeypatch.setattr(fit_loop, "gather_logs", with_another_process)
    found = fitted(Perceptron(), make_trainer, callbacks=Synchronised()).callback_metrics
    assert {how: float(found[f"{how} of all"]) for how in ("sum", "max", "mean")} == {"sum": 8, "max": 5, "mean": 4}
    assert {float(found[f"{how} of process 0"]) for how in ("sum", "max", "mean")} == {3.0}


def test_a_rejected_client_does_not_spoil_the_averages(make_trainer: MakeTrainer) -> None:
    class OneIsNan(Diary):
        def on_client_download(self, client: int) -> None:
            super().on_client_download(client)
            self.client = client

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.noting and self.client == 2:
                self.notes.pop()
                return loss * torch.nan
            return loss

    module = OneIsNan()
    trainer = fitted(module, make_trainer, clients_per_round=6)
    assert trainer.callback_metrics["clients/rejected"] == 1
    assert trainer.callback_metrics["seen"] == pytest.approx(module.average(), rel=1e-6)
    assert trainer.callback_metrics["train/loss"] == pytest.approx(module.average(), rel=1e-6)


def classifiers() -> MetricCollection:
    """Return metrics of which the last two share the lists of all scores."""
    return MetricCollection(
        {"accuracy": BinaryAccuracy(), "auroc": BinaryAUROC(), "precision": BinaryAveragePrecision()}
    )


class Logs(Perceptron):
    """Module that logs in all forms, in training and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.val_scores, self.squared = classifiers(), classifiers(), MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("both", loss, on_epoch=True, prog_bar=True)
        self.log("asked", loss, on_step=True, on_epoch=True, batch_size=2)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        for name in ("sum", "min", "max"):
            self.log(name, loss, on_step=True, on_epoch=True, reduce_fx=name)
        self.log("whole", batch_idx, on_step=False, on_epoch=True)
        if batch_idx == 0:
            self.log("once", loss, on_step=True, on_epoch=True)
        self.squared(self(batch[0]), batch[1])
        self.log("squared", self.squared, on_step=True, on_epoch=True)
        self.log_dict(self.observe(self.scores, batch), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("val", loss)
        self.log("val both", loss, on_step=True, on_epoch=True)
        self.log("val on step", loss, on_step=True)
        self.log(f"val own {dataloader_idx}", loss, on_step=True, add_dataloader_idx=False)
        self.log("val max", loss, reduce_fx=max)
        if dataloader_idx == 0:
            scores = self.observe(self.val_scores, batch).items(keep_base=False, copy_state=False)
            self.log_dict({f"val {name}": score for name, score in scores}, add_dataloader_idx=False)

    def observe(self, scores: MetricCollection, batch: Any) -> MetricCollection:
        scores.update(self(batch[0])[:, 0].sigmoid(), (batch[1][:, 0] > 0).long())
        return scores

    def on_train_epoch_end(self) -> None:
        self.log("at end", 3.0)


class Ends(Callback):
    """Callback that keeps the metrics at the end of every epoch."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.mark.parametrize("num_loaders", [1, 2])
def test_all_forms_of_log_agree_with_a_stock_trainer(
    num_loaders: int, make_trainer: MakeTrainer, make_stock_trainer: Callable[..., Trainer]
) -> None:
    """Compare one client with all samples with `L.Trainer`, after one epoch; `reduce_fx=max` is Python's function."""
    ours, stock = Ends(), Ends()
    module, data = Logs(), federation(sizes=(10,))
    twin = copy.deepcopy(module)
    single = data.val_dataloader
    data.val_dataloader = lambda: [single(), single()][:num_loaders]  # type: ignore[method-assign]
    batches: list[Any] = []
    module.on_train_batch_start = lambda batch, batch_idx: batches.append(batch)  # type: ignore[method-assign]
    make_trainer(max_rounds=1, clients_per_round=1, callbacks=ours).fit(module, data)
    train = DataLoader(batches, batch_size=None)
    val = [DataLoader(TensorDataset(*samples(10, seed=1)), batch_size=4) for _ in range(num_loaders)]
    make_stock_trainer(max_epochs=1, callbacks=stock).fit(twin, train, val)
    assert len(stock.metrics[0]) > 30
    assert {name: ours.metrics[0].get(name) for name in stock.metrics[0]} == pytest.approx(stock.metrics[0], abs=1e-6)
    suffixed = [name for name in ours.metrics[0] if "_step" in name or "_epoch" in name]
    assert set(suffixed) <= set(stock.metrics[0]), "and no other names with suffix"


def test_metrics_that_share_their_states_start_anew_in_every_round(make_trainer: MakeTrainer) -> None:
    module, ends = Logs(), Ends()
    make_trainer(max_rounds=3, callbacks=ends, num_sanity_val_steps=-1).fit(module, federation())
    x, y = module.trainer.datamodule.test._stored
    expected = classifiers()(module(x)[:, 0].sigmoid().detach(), (y[:, 0] > 0).long())
    assert len(ends.metrics) == 3
    for name, value in expected.items():
        assert ends.metrics[-1][f"val {name}"] == pytest.approx(float(value), abs=1e-6)


class Index(Perceptron):
    """Module that logs the batch's index on step and on epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("index", loss * 0 + batch_idx, on_epoch=True)
        return loss


class Forked(Index):
    """Module that logs its largest value too, and a value under a name with suffix of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("largest", loss * 0 + batch_idx, on_epoch=True, reduce_fx="max")
        self.log("loss", loss, on_epoch=True)
        self.log("loss_epoch", loss * 0 + 7)
        return loss


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_names_with_suffix_of_several_clients(
    runner: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """Compare with the numbers of samples: 3 | 4, 1 | 4 | 4, 4, 1 | 4, 4, 4 | 4, 3."""
    ends = Ends()
    flags = {"clients_per_round": 6, "runner": runner, "max_rounds": 3, "callbacks": ends, **keeps_files}
    make_trainer(**flags).fit(Forked(), federation())
    mean = (1 + 4 + 2 + 4 + 8 + 3) / 40
    last = (0 * 3 + 1 * 1 + 0 * 4 + 2 * 1 + 2 * 4 + 1 * 3) / (3 + 1 + 4 + 1 + 4 + 3)
    for metrics in ends.metrics:
        values = {"index": mean, "index_epoch": mean, "index_step": last}
        values |= {"largest": 2, "largest_epoch": 2, "largest_step": last, "loss_epoch": 7}
        assert {name: metrics[name] for name in values} == pytest.approx(values)
    rows = read_rows(tmp_path)
    assert len(rows) == 3
    for row in rows:
        assert {name for name in row if name.partition("_")[0] in ("index", "largest", "loss")} == {
            *("index", "largest", "loss"),
            "loss_epoch",  # the module logs it itself
        }


def test_early_stopping_may_watch_a_name_with_suffix(make_trainer: MakeTrainer) -> None:
    class Constant(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("train_loss", 1.0, on_epoch=True)
            return self.loss(batch)

    for name in ("train_loss", "train_loss_epoch", "train_loss_step"):
        trainer = make_trainer(max_rounds=9, callbacks=EarlyStopping(name, patience=2))
        trainer.fit(Constant(), federation())
        assert trainer.run.round == 3


def fit_where_one_process_has_no_client(folder: str) -> None:
    ends = Ends()
    trainer = FederatedTrainer(
        max_rounds=9,
        clients_per_round=1,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[EarlyStopping("index_epoch", patience=2), ends],
    )
    trainer.fit(Index(), federation(sizes=(12,)))
    assert trainer.run.round == 3
    for metrics in ends.metrics:
        assert (metrics["index"], metrics["index_epoch"], metrics["index_step"]) == (1, 1, 2)


@pytest.mark.process
def test_a_process_without_a_client_has_all_names(tmp_path: Path) -> None:
    processes.run(fit_where_one_process_has_no_client, str(tmp_path), num_processes=2)


class OnOneProcess(Perceptron):
    """Module whose values only one of two processes logs, because there is one client and one validation batch."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scores = MeanMetric(), BinaryAUROC()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.mean.update(float(batch_idx))
        self.log("mean", self.mean)
        self.log("largest", float(batch_idx), reduce_fx="max")
        self.log("own reduction", float(batch_idx), reduce_fx=lambda values: values.sum() + 1)
        self.log("hidden", 1.0, logger=False, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.scores.update(torch.tensor([0.1, 0.4, 0.3]), torch.tensor([0, 0, 1]))
        self.log("val scores", self.scores)
        self.log("val smallest", 5.0, reduce_fx="min")


def fit_where_one_process_logs(folder: str) -> None:
    flags = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": "ddp",
        "enable_progress_bar": False,
        "limit_val_batches": 1,
    }
    trainer = FederatedTrainer(
        max_rounds=1, clients_per_round=1, default_root_dir=folder, num_sanity_val_steps=0, **flags
    )
    trainer.fit(OnOneProcess(), federation(sizes=(12,)))
    expected = {"mean": 1, "largest": 2, "own reduction": 4, "hidden": 1, "val scores": 0.5, "val smallest": 5}
    assert {name: float(trainer.callback_metrics[name]) for name in expected} == expected
    assert trainer.progress_bar_metrics == {"hidden": 1}
    assert "hidden" not in trainer.logged_metrics


@pytest.mark.process
def test_a_process_without_values_reduces_and_computes_them_too(tmp_path: Path) -> None:
    processes.run(fit_where_one_process_logs, str(tmp_path), num_processes=2)


def test_results_of_a_validation_have_each_value_once(make_trainer: MakeTrainer) -> None:
    class Twice(Perceptron):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.loss(batch), on_step=True)

    trainer = make_trainer()
    assert [*trainer.validate(Twice(), federation(), verbose=False)[0]] == ["loss"]
    assert set(trainer.callback_metrics) == {"loss", "loss_epoch"}


def test_methods_that_read_an_accuracy_find_it_once(make_trainer: MakeTrainer) -> None:
    class Twice(Perceptron):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_acc", 0.5, on_step=True)

    trainer = make_trainer()
    trainer.fit(Twice(), Served(20), FedDU())
    assert trainer.callback_metrics["feddu/accuracy"] == 0.5


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_a_logged_tensor_may_change_in_place(runner: str, make_trainer: MakeTrainer) -> None:
    """Test a running count in a buffer, and a value that is multiplied after it was logged."""

    class Changing(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor(0.0))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.count += 1
            self.log("count", self.count, batch_size=1)
            loss = self.loss(batch)
            value = torch.ones_like(loss)
            self.log("value", value)
            value.mul_(5.0)
            return loss

    trainer = make_trainer(max_rounds=1, clients_per_round=1, local_epochs=3, runner=runner)
    trainer.fit(Changing(), federation(sizes=(8,), batch_size=4))
    assert trainer.callback_metrics["count"] == 3.5  # the mean of 1 to 6
    assert trainer.callback_metrics["value"] == 1.0


@pytest.mark.parametrize(
    ("value", "options", "sentence"),
    [
        (torch.ones(2), {}, r"gets a tensor of shape \(2,\), .*a mean"),
        ({"a": 1.0}, {}, "gets a dict, .*log_dict"),
        ("text", {}, "gets a str"),
        (None, {}, "gets a NoneType"),
        (1.0, {"reduce_fx": "median"}, "reduce_fx='median'; allowed: mean, "),
    ],
)
def test_what_is_no_number_is_refused(
    value: Any, options: dict[str, Any], sentence: str, make_trainer: MakeTrainer
) -> None:
    class Logs(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("mistake", value, **options)
            return self.loss(batch)

    with pytest.raises(UserError, match=sentence):
        make_trainer(runner="serial").fit(Logs(), federation())

    class LogsInValidation(Perceptron):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("mistake", value, **options)

    with pytest.raises((ValueError, MisconfigurationException), match=r"mistake|reduce_fx"):
        make_trainer().validate(LogsInValidation(), federation())


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize(
    ("name", "several", "sentence"),
    [
        ("train/both", True, r"self.log\('train/both', …\) gets a tensor of shape \(2,\)"),
        (3, False, r"self.log\(3, …\) needs a text"),
    ],
)
def test_what_a_client_logs_wrongly_is_refused_with_every_runner(
    runner: str, name: Any, several: bool, sentence: str, make_trainer: MakeTrainer
) -> None:
    class Logs(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.log(name, torch.stack([loss, loss]) if several else loss)
            return loss

    with pytest.raises(UserError, match=sentence):
        make_trainer(max_rounds=1, clients_per_round=2, runner=runner).fit(Logs(), federation())


def test_names_of_reductions_may_be_capitals(make_trainer: MakeTrainer) -> None:
    class Logs(Perceptron):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("largest", float(batch_idx), reduce_fx="MAX")

    trainer = make_trainer()
    (result,) = trainer.validate(Logs(), federation(), verbose=False)
    assert result["largest"] == sum(trainer.num_val_batches) - 1


class ReturnsTwo(Metric):
    """Metric of two values."""

    def update(self) -> None:
        """Do nothing."""

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(()), torch.ones(())


def test_a_metric_of_several_values_is_refused_in_a_sentence(make_trainer: MakeTrainer) -> None:
    class LogsIt(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.two = ReturnsTwo()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("two", self.two)
            return self.loss(batch)

    with pytest.raises(
        UserError, match=r"compute\(\)` return of the metric logged as 'two' must be a tensor of one number"
    ):
        make_trainer().fit(LogsIt(), federation())


def test_logged_metrics_have_lightnings_names_with_suffix_too(make_trainer: MakeTrainer) -> None:
    seen: list[set[str]] = []

    class LogsBoth(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("both", 1.0, on_step=True, on_epoch=True)
            self.log("hidden", 1.0, on_step=True, on_epoch=True, logger=False)
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validated", 1.0, on_step=True, on_epoch=True)

        def on_train_epoch_end(self) -> None:
            seen.append(set(self.trainer.logged_metrics))

    trainer = make_trainer()
    trainer.fit(LogsBoth(), federation())
    for names in (*seen, set(trainer.logged_metrics)):
        assert {"both", "both_epoch", "both_step", "validated_epoch"} <= names
        assert not any(name.startswith("hidden") for name in names)
