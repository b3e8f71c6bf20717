"""Test that Lightning's own modules, data modules, callbacks and loggers run unchanged."""

import copy
import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, equal_states
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader, TensorDataset
from toys import Normalised, Perceptron, Served, federation, read_rows, samples, vector

from lightning_fl import UserError
from lightning_fl.algorithms import Algorithm, FedDP, PruneFL
from lightning_fl.data import Digits, Federated
from lightning_fl.modules import ImageClassifier
from lightning_fl.steps import Apply, Momentum


def boring_data() -> Federated:
    return Federated(BoringDataModule(), num_clients=8)


def test_boring_model_on_boring_data(make_trainer: MakeTrainer) -> None:
    module = BoringModel()
    before = copy.deepcopy(module.state_dict())
    rates: list[float] = []

    class Rates(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer = make_trainer(max_rounds=4, clients_per_round=2, callbacks=Rates())
    data = boring_data()
    trainer.fit(module, data)
    assert not torch.equal(module.layer.weight, before["layer.weight"])
    assert rates == pytest.approx([0.1, 0.01, 0.001, 0.0001]), "its StepLR must step once a round"
    assert trainer.run.num_steps == 4 * 2 * 8
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)


def test_properties_of_lightnings_trainer_are_those_of_the_run(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    stops, saves = EarlyStopping("val/loss"), ModelCheckpoint(save_top_k=0)
    trainer = make_trainer(callbacks=[stops, saves])
    stages = ("training", "validating", "testing", "predicting", "evaluating", "sanity_checking", "interrupted")
    assert [stage for stage in stages if getattr(trainer, stage)] == []
    assert isinstance(trainer.accelerator, CPUAccelerator)
    assert trainer.precision_plugin.precision == "32-true"
    trainer.print("printed")
    assert capsys.readouterr().out == "printed\n"
    values = {
        "precision": "32-true",
        "scaler": None,
        "global_rank": 0,
        "local_rank": 0,
        "node_rank": 0,
        "world_size": 1,
        "num_nodes": 1,
        "is_global_zero": True,
        "logger": None,
    }
    assert {name: getattr(trainer, name) for name in values} == values
    assert trainer.progress_bar_callback is None
    assert trainer.early_stopping_callback is stops
    assert trainer.early_stopping_callbacks == [stops]
    assert trainer.checkpoint_callbacks == [saves]


def test_a_module_knows_its_device_in_setup_as_in_lightning(
    make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asks(Perceptron):
        def setup(self, stage: str) -> None:
            raise InterruptedError(self.device)

    monkeypatch.setattr(CPUAccelerator, "setup_device", lambda *arguments: None)  # which refuses others than the CPU
    for trainer, data in ((make_trainer(), federation()), (make_stock_trainer(), DataLoader(range(2)))):
        trainer.strategy._root_device = torch.device("meta")  # stands for an accelerator
        with pytest.raises(InterruptedError, match="meta"):
            trainer.fit(Asks(), data)


def test_predicting_needs_no_predict_step(make_trainer: MakeTrainer) -> None:
    """Compare with `L.Trainer`, whose default is `forward`."""
    outputs = make_trainer().predict(BoringModel(), boring_data())
    assert len(outputs) == 64
    assert outputs[0].shape == (1, 2)


def test_one_client_with_everything_is_a_stock_trainer(
    make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    """Check that one client and one batch a round give the result of `L.Trainer`."""
    ours = Perceptron(configure=lambda m: ([o := torch.optim.SGD(m.parameters(), lr=0.5)], [halving(o)]))
    stock = copy.deepcopy(ours)
    data = federation(sizes=(12,), batch_size=12)
    make_trainer(max_rounds=4, clients_per_round=1).fit(ours, data)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples(12)), batch_size=12)
    make_stock_trainer(max_epochs=4).fit(stock, loader)
    torch.testing.assert_close(torch.tensor(vector(ours)), torch.tensor(vector(stock)), rtol=0, atol=1e-6)


class SetsItsMode(Perceptron):
    """Module that chooses itself which of its parts are evaluated, as packages with layers for their targets' scale do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.noise = torch.nn.Dropout(0.5)
        self.modes: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modes.append(self.noise.training)
        return super().forward(self.noise(self.norm(x)))

    def on_validation_model_eval(self) -> None:
        self.eval()
        self.noise.train()


def test_a_module_that_sets_its_mode_trains_on_after_a_validation(
    make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    ours, stock = SetsItsMode(), SetsItsMode()
    make_trainer(max_rounds=3, clients_per_round=1).fit(ours, federation(sizes=(12,), batch_size=4))
    data = torch.utils.data.TensorDataset(*samples(12))
    make_stock_trainer(max_epochs=3).fit(
        stock, torch.utils.data.DataLoader(data, batch_size=4), torch.utils.data.DataLoader(data, batch_size=6)
    )
    assert stock.norm.num_batches_tracked == 9
    assert ours.norm.num_batches_tracked == 9
    assert all(ours.modes[-3:]), "its own choice holds in the three batches of the last validation"


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


class Rises(Perceptron):
    """Module whose validation loss falls until round 2 and then rises."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", abs(self.current_epoch - 2.0))

    def on_train_epoch_end(self) -> None:
        self.log("train/late", abs(self.current_epoch - 2.0))


def test_no_callback_notices_what_the_server_trains_before_the_first_round(make_trainer: MakeTrainer) -> None:
    noticed: list[str] = []

    class Notices(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            noticed.append("on_fit_start")

        def on_train_batch_start(self, *arguments: Any) -> None:
            noticed.append("on_train_batch_start")

        def on_before_zero_grad(self, *arguments: Any) -> None:
            noticed.append("on_before_zero_grad")

    trainer = make_trainer(max_rounds=1, enable_progress_bar=True, callbacks=[Notices(), TQDMProgressBar()])
    trainer.fit(Perceptron(), Served(20), PruneFL(initial_passes=2))
    assert noticed[0] == "on_fit_start"
    assert {*noticed[1:]} == {"on_train_batch_start", "on_before_zero_grad"}


@pytest.mark.parametrize("monitor", ["val/loss", "train/late"])
def test_early_stopping_stops(
    monitor: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    trainer = make_trainer(max_rounds=9, callbacks=EarlyStopping(monitor, patience=2), **keeps_files)
    trainer.fit(Rises(), federation())
    assert trainer.run.round == 5
    assert [row["round"] for row in read_rows(tmp_path)] == list("01234")
    assert (tmp_path / "model.ckpt").is_file()


def test_the_best_checkpoint_is_kept_and_found(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    models: list[dict[str, torch.Tensor]] = []

    class Keep(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            models.append(copy.deepcopy(pl_module.state_dict()))

    best = ModelCheckpoint(monitor="val/loss", filename="best")
    module = Rises()
    trainer = make_trainer(max_rounds=5, callbacks=[best, Keep()], **keeps_files)
    trainer.fit(module, federation())
    assert best.best_model_path == str(tmp_path / "checkpoints" / "best.ckpt")
    assert best.best_model_score == 0
    assert not torch.equal(models[2]["output.bias"], models[4]["output.bias"])
    assert trainer.checkpoint_callback is best

    for tester in (trainer, make_trainer(**keeps_files)):  # with the callback, and with only the run's folder
        for run in (tester.test, tester.validate):
            module = Perceptron()
            run(module, federation(), ckpt_path="best", verbose=False)
            assert all(torch.equal(value, models[2][name]) for name, value in module.state_dict().items())
    with pytest.raises(UserError, match="'best' needs a run with a ModelCheckpoint"):
        make_trainer(default_root_dir=tmp_path / "empty").test(module, federation(), ckpt_path="best")


def test_callbacks_that_need_nothing_special(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    called: list[str] = []
    timer = Timer(duration="00:01:00:00")
    callbacks = [
        timer,
        LearningRateMonitor(),
        LambdaCallback(on_train_epoch_end=lambda trainer, pl_module: called.append("epoch end")),
        OnExceptionCheckpoint(tmp_path),
        TQDMProgressBar(),
        ModelCheckpoint(save_last=True),
    ]
    trainer = make_trainer(max_rounds=3, callbacks=callbacks, enable_progress_bar=True, **keeps_files)
    trainer.fit(Perceptron(), federation())
    trainer.validate(verbose=False)
    trainer.test(verbose=False)
    trainer.predict()
    assert called == ["epoch end"] * 3
    assert 0 < timer.time_elapsed("train") < 60
    assert not (tmp_path / "on_exception.ckpt").exists()


def test_attributes_of_a_users_callback_may_have_names_of_the_packages(make_trainer: MakeTrainer) -> None:
    class Own(Callback):
        max_bytes, is_target = 1000, True

    trainer = make_trainer(max_rounds=1, callbacks=Own())
    trainer.fit(Perceptron(), federation())
    assert trainer.plan(Perceptron(), federation()).rounds == 1


def test_a_learning_rate_monitor_keeps_to_one_row_a_round(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(max_rounds=3, callbacks=LearningRateMonitor(), **keeps_files).fit(
        Perceptron(configure=lambda m: ([o := torch.optim.SGD(m.parameters(), lr=0.5)], [halving(o)])), federation()
    )
    rows = read_rows(tmp_path)
    assert [row["round"] for row in rows] == ["0", "1", "2"]
    assert [float(row["lr-SGD"]) for row in rows] == [0.5, 0.25, 0.125]


class StopsAfter(Callback):
    """End a fit as Ctrl-C does, when a number of rounds are done."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.rounds:
            raise KeyboardInterrupt


class EveryRound(EMAWeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


def test_weight_averaging_averages_the_servers_models(make_trainer: MakeTrainer) -> None:
    models: list[torch.Tensor] = []

    class Keep(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            models.append(pl_module.output.bias.detach().clone())

    average = EveryRound(decay=0.5)
    module = Perceptron()
    make_trainer(max_rounds=3, callbacks=[average, Keep()]).fit(module, federation())
    expected = models[0]
    for model in models[1:]:
        expected = 0.5 * expected + 0.5 * model
    torch.testing.assert_close(average._average_model.module.output.bias.detach(), expected, rtol=0, atol=1e-6)
    # As in L.Trainer, the module has the average at the end.
    torch.testing.assert_close(module.output.bias.detach(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", ["cos", "linear"])
def test_stochastic_weight_averaging_is_that_of_a_stock_trainer(
    strategy: Any, make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    """Compare one client with one batch a round."""
    ours = Perceptron()
    stock, plain = copy.deepcopy(ours), copy.deepcopy(ours)

    def swa() -> StochasticWeightAveraging:
        return StochasticWeightAveraging(0.3, swa_epoch_start=2, annealing_epochs=2, annealing_strategy=strategy)

    flags = {"max_rounds": 6, "clients_per_round": 1}
    make_trainer(callbacks=swa(), **flags).fit(ours, federation(sizes=(12,), batch_size=12))
    make_trainer(**flags).fit(plain, federation(sizes=(12,), batch_size=12))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples(12)), batch_size=12)
    make_stock_trainer(max_epochs=6, callbacks=swa()).fit(stock, loader)
    torch.testing.assert_close(torch.tensor(vector(ours)), torch.tensor(vector(stock)), rtol=0, atol=1e-6)
    assert np.abs(vector(plain) - vector(stock)).max() > 1e-3


class Replaces(Callback):
    """Give parameters other tensors in place of changing them."""

    def __init__(self, when: str) -> None:
        setattr(self, when, self.replace)

    def replace(self, trainer: Any, pl_module: L.LightningModule) -> None:
        for parameter in pl_module.parameters():
            parameter.data = 0.5 * parameter.data


@pytest.mark.parametrize("when", ["on_train_epoch_start", "on_train_epoch_end"])
def test_callbacks_that_replace_weights_do_as_in_a_stock_trainer(
    when: str, make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    """Compare one client with one batch a round, and what the server has of it."""
    ours = Perceptron()
    stock = copy.deepcopy(ours)
    trainer = make_trainer(max_rounds=3, clients_per_round=1, callbacks=Replaces(when))
    trainer.fit(ours, federation(sizes=(12,), batch_size=12))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples(12)), batch_size=12)
    make_stock_trainer(max_epochs=3, callbacks=Replaces(when)).fit(stock, loader)
    server = trainer.run.layout.views(trainer.run.params)
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=1e-6)
        torch.testing.assert_close(server[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stop", [1, 3, 4, 6], ids=lambda stop: f"after {stop}")
@pytest.mark.parametrize("configure", [None, lambda m: ([o := torch.optim.SGD(m.parameters(), lr=0.1)], [halving(o)])])
def test_stochastic_weight_averaging_goes_on_as_if_uninterrupted(
    stop: int, configure: Any, make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    first = Perceptron(configure=configure)
    found = {}
    for part, ends in {"whole": (6,), "resumed": (stop, 6)}.items():
        for number, end in enumerate(ends):
            module = copy.deepcopy(first)
            swa = StochasticWeightAveraging(0.3, swa_epoch_start=2, annealing_epochs=2)
            watch = StopsAfter(end) if end < 6 else Callback()
            trainer = make_trainer(
                max_rounds=6, callbacks=[swa, watch], default_root_dir=tmp_path / part, **keeps_files
            )
            with suppress(KeyboardInterrupt):
                trainer.fit(module, federation(), ckpt_path="last" if number else None)
        found[part] = vector(module), read_rows(tmp_path / part)
    np.testing.assert_array_equal(found["whole"][0], found["resumed"][0])
    assert equal_states(found["whole"][1], found["resumed"][1])


def test_averages_that_need_one_more_epoch_are_refused(make_trainer: MakeTrainer) -> None:
    class Late(Perceptron):
        def configure_model(self) -> None:
            self.norm = torch.nn.BatchNorm1d(3)

    for module in (Normalised(), Late()):
        with pytest.raises(UserError, match="use Lightning's WeightAveraging"):
            make_trainer(callbacks=StochasticWeightAveraging(0.3)).fit(module, federation())
    make_trainer(callbacks=WeightAveraging()).fit(module := Normalised(), federation())
    assert module.norm.running_mean.abs().max() > 0


@pytest.mark.parametrize("average", [WeightAveraging, EMAWeightAveraging, partial(StochasticWeightAveraging, 0.05)])
def test_averages_of_a_module_before_it_gets_gates_are_refused(
    average: Callable[[], Callback], make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(max_rounds=2, callbacks=average())
    with pytest.raises(UserError, match="such as the gates of FedDP, adds others"):
        trainer.fit(
            ImageClassifier("lenet5", in_channels=1, image_size=16), Digits(num_clients=3, image_size=16), FedDP()
        )


def test_weight_averaging_does_not_take_clients_for_the_model(make_trainer: MakeTrainer) -> None:
    """Use a server learning rate of (almost) 0: the model, and so every average of it, must not change."""
    still = Algorithm(steps=(Apply(), Momentum(beta=0, learning_rate=1e-12)))
    module = Perceptron()
    before = vector(module)
    average = EMAWeightAveraging(decay=0.5)
    make_trainer(max_rounds=2, callbacks=average).fit(module, federation(), still)
    torch.testing.assert_close(
        torch.tensor(vector(average._average_model.module)), torch.tensor(before), rtol=0, atol=1e-6
    )


def test_an_exception_leaves_a_checkpoint_of_the_round_before(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    class Breaks(Callback):
        def __init__(self, broken: bool) -> None:
            self.batches_left = 4 if broken else 10**9

        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            if trainer.current_epoch == 1:
                self.batches_left -= 1
                if not self.batches_left:
                    raise RuntimeError("simulated failure")

    module = Perceptron()
    whole, resumed = copy.deepcopy(module), Perceptron()
    make_trainer(max_rounds=3).fit(whole, federation())
    trainer = make_trainer(max_rounds=3, callbacks=[Breaks(True), OnExceptionCheckpoint(tmp_path)], **keeps_files)
    with pytest.raises(RuntimeError, match="simulated failure"):
        trainer.fit(module, federation())
    again = make_trainer(max_rounds=3, callbacks=[Breaks(False)], **keeps_files)
    again.fit(resumed, federation(), ckpt_path=tmp_path / "on_exception.ckpt")
    assert again.run.ledger.total_bytes("up") == 3 * 3 * 26 * 4
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items())


def test_a_refused_fit_has_no_run_to_save(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    told: list[str] = []

    class Notes(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            told.append(str(exception))

    trainer = make_trainer(callbacks=[OnExceptionCheckpoint(tmp_path), Notes()], **keeps_files)
    trainer.fit(Perceptron(), federation())
    for _ in range(2):
        with pytest.raises(UserError, match="server"):
            trainer.fit(Perceptron(), federation(), PruneFL(), ckpt_path=None)
        trainer.save_checkpoint(tmp_path / "without_run.ckpt", weights_only=True)
        trainer = make_trainer(callbacks=[OnExceptionCheckpoint(tmp_path), Notes()])
    assert len(told) == 2
    assert not (tmp_path / "on_exception.ckpt").exists()


def test_a_model_is_saved_without_a_fit_as_in_lightning(
    make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer], tmp_path: Path
) -> None:
    stock_data, path, progress = DataLoader(TensorDataset(*samples(4))), tmp_path / "model.ckpt", []
    for trainer, data in ((make_trainer(), federation()), (make_stock_trainer(), stock_data)):
        with pytest.raises((UserError, AttributeError), match="call"):  # fit or test first
            trainer.save_checkpoint(path, weights_only=True)
        module = Perceptron()
        trainer.test(module, data, verbose=False)
        trainer.save_checkpoint(path, weights_only=True)
        saved = torch.load(path, weights_only=True)
        assert equal_states(saved["state_dict"], module.state_dict())
        progress.append((saved["epoch"], saved["global_step"]))
    assert progress[0] == progress[1]


def test_after_an_exception_the_module_is_the_servers(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    class Breaks(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.current_epoch == 1 and batch_idx == 1:
                raise RuntimeError("simulated failure")
            return self.loss(batch)

    module = Breaks()
    one_round = copy.deepcopy(module)
    trainer = make_trainer(max_rounds=5)
    with pytest.raises(RuntimeError, match="simulated failure"):
        trainer.fit(module, federation())
    make_trainer(max_rounds=1).fit(one_round, federation())
    assert (vector(module) == vector(one_round)).all()
    assert "log" not in vars(module)
    trainer.save_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in one_round.state_dict().items())


def test_weights_and_biases_receives_the_rows(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(offline=True, save_dir=tmp_path, project="tests")
    received: list[tuple[int | None, dict[str, Any]]] = []
    log_metrics = logger.log_metrics

    def spy(metrics: dict[str, Any], step: int | None = None) -> None:
        received.append((step, dict(metrics)))
        log_metrics(metrics, step)

    monkeypatch.setattr(logger, "log_metrics", spy)
    make_trainer(max_rounds=2, logger=logger).fit(Perceptron(), federation())
    assert [step for step, _ in received] == [0, 1, None], "two rounds and the final table"
    rows = read_rows(tmp_path)
    for (_, metrics), row in zip(received[:2], rows, strict=True):
        assert metrics.keys() >= row.keys() - {"step"}
    logger.experiment.finish()
    assert list((tmp_path / "wandb").glob("offline-run-*"))


COLUMNS = {
    "round",
    "val/loss",
    "train/loss",
    "comm/uplink_bits",
    "comm/downlink_bits",
    "comm/total_uplink_bytes",
    "comm/total_downlink_bytes",
    "clients/selected",
    "clients/accepted",
    "clients/rejected",
    "clients/dropped",
    "clients/samples",
    "model/parameters",
    "model/macs",
    "time/simulated_seconds",
}


def test_the_columns_of_metrics_csv(make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]) -> None:
    class Accurate(Perceptron):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", self.loss(batch))
            self.log("val/accuracy", 0.5)

    make_trainer(max_rounds=3, **keeps_files).fit(Accurate(), federation())
    assert "time/round_seconds" in (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    rows = read_rows(tmp_path)
    assert set(rows[0]) - {"step"} == COLUMNS | {"val/accuracy"}
    assert [row["round"] for row in rows] == ["0", "1", "2"]
    for row in rows:
        assert all(row.values())
        counts = {name: int(row[f"clients/{name}"]) for name in ("selected", "accepted", "rejected", "dropped")}
        assert counts == {"selected": 3, "accepted": 3, "rejected": 0, "dropped": 0}
        assert (row["model/parameters"], row["model/macs"], row["val/accuracy"]) == ("26", "20", "0.5")


def test_evaluation_by_hand(make_trainer: MakeTrainer) -> None:
    module, data = Perceptron(), federation()
    data.setup("test")
    x, y = data.test._stored
    trainer = make_trainer()
    expected = pytest.approx(float(module.loss((x, y)).detach()), rel=1e-5)
    assert trainer.test(module, data, verbose=False) == [{"test/loss": expected}]
    right = (module(x).argmax(1) == y.argmax(1)).double().mean().item()
    validated = {"val/loss": expected, "val/accuracy": pytest.approx(right)}
    assert trainer.validate(module, data, verbose=False) == [validated]
    torch.testing.assert_close(torch.cat(trainer.predict(module, data)), module(x).detach())
    assert make_trainer().predict(module, data, return_predictions=False) is None
    with pytest.raises(UserError, match="no model"):
        make_trainer().test()


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_gradient_accumulation_scheduler_decides_for_each_round(runner: str, make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    always, scheduled = copy.deepcopy(module), copy.deepcopy(module)
    flags = {"max_rounds": 2, "local_epochs": 2, "runner": runner}
    make_trainer(**flags, accumulate_grad_batches=2).fit(always, federation())
    make_trainer(**flags, callbacks=GradientAccumulationScheduler({0: 2})).fit(scheduled, federation())
    make_trainer(**flags).fit(module, federation())
    np.testing.assert_array_equal(vector(always), vector(scheduled))
    assert not np.array_equal(vector(always), vector(module))


def test_a_callback_that_a_federation_would_change_in_silence_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match="belong to different clients"):
        make_trainer(callbacks=SpikeDetection()).fit(Perceptron(), federation())


class Writer(BasePredictionWriter):
    """Keeps what it is given to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[Any, Any]] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        self.batches.append((prediction, batch_indices))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.predictions, self.indices = list(predictions), list(batch_indices)


def test_predictions_are_written(make_trainer: MakeTrainer) -> None:
    """Compare with `L.Trainer` on the same ten samples in batches of four."""
    ours, theirs, module = Writer(), Writer(), Perceptron()
    returned = make_trainer(callbacks=ours).predict(module, federation())
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    loader = DataLoader(TensorDataset(*samples(10, seed=1)), batch_size=4)
    L.Trainer(accelerator="cpu", callbacks=theirs, **quiet).predict(module, loader)
    assert ours.indices == theirs.indices == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]
    assert [indices for _, indices in ours.batches] == [indices for _, indices in theirs.batches]
    for pairs in (zip(ours.predictions, theirs.predictions, strict=True), zip(returned, ours.predictions, strict=True)):
        for one, other in pairs:
            torch.testing.assert_close(one, other)


class OfWorkers(L.LightningDataModule):
    """Samples that worker processes load, which a loader keeps from pass to pass."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*samples(12)), batch_size=4, num_workers=1, persistent_workers=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*samples(10, seed=1)), batch_size=4, num_workers=1, persistent_workers=True)

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*samples(10, seed=1)), batch_size=4, num_workers=1)


@pytest.mark.parametrize("runner", ["serial", "lightning"])
def test_no_worker_is_left_after_a_stage(runner: str, make_trainer: MakeTrainer) -> None:
    own = Federated(OfWorkers(), num_clients=2, client_loaders=lambda client: OfWorkers().train_dataloader())
    data = Federated(OfWorkers(), num_clients=2) if runner == "serial" else own
    trainer, before = make_trainer(clients_per_round=2, runner=runner), set(multiprocessing.active_children())
    for stage in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        stage(Perceptron(), data)
        assert set(multiprocessing.active_children()) <= before, stage


class Keeps(DummyLogger):
    """Logger that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, Any]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.told.append(("metrics", metrics))

    def log_hyperparams(self, params: Any, *more: Any) -> None:
        self.told.append(("hyperparameters", params))

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self.told.append(("graph", model))


class Hides(Perceptron):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"hidden": 1.0, "both/hidden": 2.0}, logger=False)
        self.log("seen", 3.0)


def test_loggers_of_an_evaluation_do_not_get_what_is_hidden_from_them(make_trainer: MakeTrainer) -> None:
    logger = Keeps()
    (result,) = make_trainer(logger=logger).test(Hides(), federation(), verbose=False)
    assert result == {"hidden": 1, "both/hidden": 2, "seen": 3}
    assert logger.told == [("metrics", {"seen": 3, "epoch": 0})]


def test_a_logger_that_fails_costs_no_evaluation(make_trainer: MakeTrainer, says_lost: Callable[..., Any]) -> None:
    class Fails(Keeps):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            raise ConnectionResetError("the service is gone")

    logger = Keeps()
    with says_lost("Fails failed and is not used any more.*the service is gone"):
        (result,) = make_trainer(logger=[Fails(), logger]).test(Hides(), federation(), verbose=False)
    assert logger.told == [("metrics", {"seen": 3, "epoch": 0})]
    assert result["seen"] == 3


@pytest.mark.parametrize("logs", [True, False])
def test_hyperparameters_are_hidden_from_loggers_as_the_module_says(logs: bool, make_trainer: MakeTrainer) -> None:
    class Saves(Perceptron):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters(logger=logs)

    logger = Keeps()
    make_trainer(logger=logger, max_rounds=0).fit(Saves(), federation())
    assert dict(logger.told)["hyperparameters"] == ({"lr": 0.1, "width": 3} if logs else {}) | {"algorithm": "FedAvg"}


class SavesBatchSize(BoringDataModule):
    def __init__(self, batch_size: int = 4, shuffled: bool = True, logs: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["logs"], logger=logs)


class SavesBoth(BoringModel):
    def __init__(self, batch_size: int = 4, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_loggers_get_the_datamodule_s_hyperparameters_and_the_graph_as_in_lightning(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    logger, expected, module = Keeps(), Keeps(), SavesBoth()
    make_trainer(logger=logger, max_rounds=0).fit(module, Federated(SavesBatchSize(), num_clients=4))
    plain = L.Trainer(
        logger=expected, max_epochs=1, limit_train_batches=1, limit_val_batches=0, default_root_dir=tmp_path
    )
    plain.fit(SavesBoth(), datamodule=SavesBatchSize())
    told = dict(logger.told)
    assert told["hyperparameters"] == dict(expected.told)["hyperparameters"] | {"algorithm": "FedAvg"}
    assert told["hyperparameters"] == {"batch_size": 4, "width": 3, "shuffled": True, "algorithm": "FedAvg"}
    assert told["graph"] is module


def test_hyperparameters_that_differ_are_refused_as_in_lightning(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"module and datamodule both save a hyper-parameter 'batch_size'.*rename one"):
        make_trainer(max_rounds=0).fit(SavesBoth(batch_size=8), Federated(SavesBatchSize(), num_clients=4))
    make_trainer(max_rounds=0).fit(SavesBoth(batch_size=8), Federated(SavesBatchSize(logs=False), num_clients=4))
