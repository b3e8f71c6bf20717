"""Test the runner `lightning`: a round of one client is an epoch of `lightning.Trainer`, and several train as by `serial`."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from toys import Perceptron, federation, samples, stepped_by_hand, vector

from lightning_fl import UserError, algorithms
from lightning_fl.algorithms import Algorithm
from lightning_fl.clients.choose_runner import describe_runner
from lightning_fl.codecs import TopK
from lightning_fl.data import Federated

BATCHES = 3


class Given(L.LightningDataModule):
    """Three batches in a fixed order."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*samples(12)), batch_size=4)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*samples(10, seed=1)), batch_size=5)


class WarmsUp(Perceptron):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (batch_idx + 1) / BATCHES
        optimizer.step(closure=optimizer_closure)


class Clips(Perceptron):
    def configure_gradient_clipping(self, optimizer: Any, *arguments: Any, **options: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class ScalesBackward(Perceptron):
    def backward(self, loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        (2 * loss).backward()


class KeepsGradients(Perceptron):
    """Module that sets gradients to zero in every second step only."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class StepsSchedulers(Perceptron):
    """Module that steps its scheduler itself, as Lightning's recipe for timm's schedulers does."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": self.interval}]

    interval = "step"

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        scheduler.step()


class StepsSchedulersByEpoch(StepsSchedulers):
    interval = "epoch"


class BySecondOrder(Perceptron):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class SkipsTheRest(Perceptron):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


MODULES = (
    Perceptron,
    WarmsUp,
    Clips,
    ScalesBackward,
    KeepsGradients,
    StepsSchedulers,
    StepsSchedulersByEpoch,
    BySecondOrder,
    SkipsTheRest,
)


class Unshuffled(Callback):
    """Callback that keeps the names of the hooks in a client's training, in their order."""

    def __init__(self) -> None:
        self.hooks: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("on_train_batch", "on_before", "on_after")):
            object.__getattribute__(self, "hooks").append(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_a_round_of_one_client_is_an_epoch_of_lightnings_trainer(
    kind: type[Perceptron], make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    ours = kind()
    stock, data = copy.deepcopy(ours), Given()
    hooks, stock_hooks = Unshuffled(), Unshuffled()
    flags = {"runner": "lightning", "clients_per_round": 1}
    # One batch is one client's: a federation shuffles, so all batches have the same samples.
    same = TensorDataset(*(x[:1].repeat(12, 1) for x in samples(12)))
    data.train_dataloader = lambda: DataLoader(same, batch_size=4)  # type: ignore[method-assign]
    rounds = 1 if kind in (BySecondOrder, StepsSchedulers) else 2  # whose state begins anew with each round
    make_trainer(max_rounds=rounds, callbacks=hooks, **flags).fit(ours, Federated(data, num_clients=1))
    make_stock_trainer(max_epochs=rounds, callbacks=stock_hooks).fit(stock, datamodule=data)
    assert hooks.hooks == stock_hooks.hooks
    torch.testing.assert_close(torch.tensor(vector(ours)), torch.tensor(vector(stock)), rtol=0, atol=1e-6)


class One(Given):
    """Three batches of the same samples, because a federation shuffles."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*(x[:1].repeat(12, 1) for x in samples(12))), batch_size=4)


def test_callbacks_that_save_or_average_see_the_steps_of_the_only_client(
    make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer], tmp_path: Path
) -> None:
    ours = Perceptron()
    stock = copy.deepcopy(ours)

    def callbacks(folder: str) -> list[Callback]:
        saves = ModelCheckpoint(tmp_path / folder, save_top_k=-1, every_n_train_steps=2)
        return [EMAWeightAveraging(decay=0.5), saves]

    flags = {"runner": "lightning", "clients_per_round": 1, "enable_checkpointing": True}
    make_trainer(callbacks=callbacks("ours"), **flags).fit(ours, Federated(One(), num_clients=1))
    make_stock_trainer(callbacks=callbacks("stock"), enable_checkpointing=True).fit(stock, datamodule=One())
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert names == {"epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt", "epoch=1-step=6.ckpt"}
    assert names == {path.name for path in (tmp_path / "stock").iterdir()}
    for name in names:
        mine, theirs = (torch.load(tmp_path / kind / name, weights_only=True) for kind in ("ours", "stock"))
        assert mine["global_step"] == theirs["global_step"]
        for key in ("state_dict", "current_model_state"):  # the average and the model in training
            torch.testing.assert_close(mine[key], theirs[key], rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.tensor(vector(ours)), torch.tensor(vector(stock)), rtol=0, atol=1e-6)


class Rises(Perceptron):
    """Module whose logged value rises with each step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("risen", float(self.global_step))
        return self.loss(batch)


def test_a_checkpoint_of_each_step_reads_the_values_of_that_step(
    make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer], tmp_path: Path
) -> None:
    def saves(folder: str) -> ModelCheckpoint:
        every = {"every_n_train_steps": 1, "every_n_epochs": 0, "save_on_train_epoch_end": False}
        return ModelCheckpoint(tmp_path / folder, monitor="risen", mode="max", save_top_k=-1, **every)

    ours, stock = saves("ours"), saves("stock")
    flags = {"enable_checkpointing": True, "limit_val_batches": 0}
    make_trainer(callbacks=ours, runner="lightning", clients_per_round=1, **flags).fit(
        Rises(), Federated(One(), num_clients=1)
    )
    make_stock_trainer(callbacks=stock, **flags).fit(Rises(), datamodule=One())
    scores = [{Path(path).name: float(score) for path, score in each.best_k_models.items()} for each in (ours, stock)]
    assert scores[0] == scores[1]
    assert sorted(scores[0].values()) == [0, 1, 2, 3, 4, 5]


class KeepsSteps(DummyLogger):
    """Logger that keeps the step of each value logged in a single step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int | None] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "drawn_step" in metrics:
            self.steps.append(step)


@pytest.mark.parametrize("step", [2, 4, 6])
@pytest.mark.parametrize("averages", [False, True], ids=["", "averages"])
def test_a_run_saved_within_a_round_resumes_at_its_beginning_to_the_same_bits(
    step: int, averages: bool, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Step 6 is the last of a round, which lacks its validation and hooks then."""
    start = Draws(configure=lambda m: torch.optim.Adam(m.parameters(), lr=0.1))
    flags = {"runner": "lightning", "clients_per_round": 1, "max_rounds": 3, "log_every_n_steps": 1}

    def fitted(ckpt_path: Path | None = None, saves: Any = (), **more: Any) -> tuple[Any, list[int | None]]:
        L.seed_everything(0, verbose=False)
        module, logger = copy.deepcopy(start), KeepsSteps()
        callbacks = [*saves, *([EMAWeightAveraging(decay=0.5)] if averages else [])]
        trainer = make_trainer(logger=logger, callbacks=callbacks, **flags, **more)
        trainer.fit(module, Federated(Given(), num_clients=1), ckpt_path=ckpt_path)
        return vector(module), logger.steps

    saves = ModelCheckpoint(tmp_path / "kept", filename="{step}", save_top_k=-1, every_n_train_steps=2)
    whole, steps = fitted(saves=[saves], enable_checkpointing=True, default_root_dir=tmp_path / "whole")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        resumed, later = fitted(tmp_path / "kept" / f"step={step}.ckpt", default_root_dir=tmp_path / "resumed")
    assert (resumed == whole).all()
    assert steps == list(range(9))
    assert later == steps[(step - 1) // BATCHES * BATCHES :]
    assert any("resuming from a checkpoint that ended within round" in str(warning.message) for warning in said)


def test_a_checkpoint_within_a_round_keeps_the_states_of_all_callbacks(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            trainer.save_checkpoint(tmp_path / "now.ckpt")
            self.found = trainer.checkpoint_callback

    for runner in ("serial", "lightning"):
        saves, best = Saves(), ModelCheckpoint(tmp_path, monitor="val/loss")
        flags = {"callbacks": [saves, best], "enable_checkpointing": True, "runner": runner}
        make_trainer(max_rounds=1, clients_per_round=2, **flags).fit(Perceptron(), federation())
        assert best.state_key in torch.load(tmp_path / "now.ckpt", weights_only=True)["callbacks"], runner
        assert saves.found is best


METHODS: dict[str, Callable[[], Any]] = {
    "FedAvg": algorithms.FedAvg,
    "FedLDF": lambda: algorithms.FedLDF(n=1),
    "ServerAdam": algorithms.ServerAdam,
    "TopK": lambda: Algorithm(uplink=TopK(0.3)),
}


class Draws(Perceptron):
    """Module that draws random numbers in its step, and logs."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = self.loss((x * (torch.rand_like(x) > 0.3), y))
        self.log("drawn", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", loss, reduce_fx="max")
        return loss


class ByHand(Draws):
    """Module with two optimisers, which it steps itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.hidden.parameters(), 0.1), torch.optim.Adam(self.output.parameters(), 0.01)]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return stepped_by_hand(self, super().training_step(batch, batch_idx))


def test_modules_that_step_by_hand_train_as_one_after_the_other(make_trainer: MakeTrainer) -> None:
    def fitted(runner: str) -> tuple[dict[str, float], list[float], int]:
        L.seed_everything(0, verbose=False)
        module = ByHand()
        trainer = make_trainer(max_rounds=3, clients_per_round=2, runner=runner)
        trainer.fit(module, federation(sizes=(8, 5, 11)))
        logged = {
            name: float(trainer.callback_metrics[name]) for name in ("drawn", "largest", "train/loss", "val/loss")
        }
        return logged, vector(module).tolist(), trainer.global_step

    serial, lightning = fitted("serial"), fitted("lightning")
    assert lightning[0] == pytest.approx(serial[0], rel=1e-6)
    assert lightning[1] == pytest.approx(serial[1], abs=1e-7)
    assert lightning[2] == serial[2]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("flags", [{}, {"local_epochs": 2, "accumulate_grad_batches": 2}, {"local_steps": 5}], ids=str)
def test_several_clients_train_as_one_after_the_other(
    method: str, flags: dict[str, Any], make_trainer: MakeTrainer
) -> None:
    def fitted(runner: str) -> tuple[dict[str, float], list[float], int]:
        L.seed_everything(0, verbose=False)
        module = Draws(configure=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
        trainer = make_trainer(max_rounds=3, clients_per_round=2, runner=runner, straggler_rate=0.3, **flags)
        trainer.fit(module, federation(sizes=(8, 5, 11)), METHODS[method]())
        logged = {
            name: float(trainer.callback_metrics[name]) for name in ("drawn", "largest", "train/loss", "val/loss")
        }
        return logged, vector(module).tolist(), trainer.global_step

    serial, lightning = fitted("serial"), fitted("lightning")
    assert lightning[0] == pytest.approx(serial[0], rel=1e-6)
    assert lightning[1] == pytest.approx(serial[1], abs=1e-7)
    assert lightning[2] == serial[2]


def test_auto_takes_it_for_modules_that_change_their_steps(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    def fitted(runner: str) -> list[float]:
        L.seed_everything(0, verbose=False)
        module = WarmsUp()
        make_trainer(max_rounds=2, clients_per_round=2, runner=runner).fit(module, federation())
        return vector(module).tolist()

    assert fitted("auto") == fitted("lightning")
    assert "WarmsUp overrides optimizer_step, which only runner 'lightning' calls" in caplog.text


def test_auto_chooses_again_for_the_module_of_a_resumed_run(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    for number, modules in enumerate([(Perceptron(), WarmsUp()), (WarmsUp(), Perceptron())]):
        for rounds, module in enumerate(modules, start=1):
            folder = tmp_path / str(number)
            trainer = make_trainer(max_rounds=rounds, enable_checkpointing=True, default_root_dir=folder)
            trainer.fit(module, federation(), ckpt_path="last" if rounds == 2 else None)
            by_lightning = describe_runner(trainer.fit_loop.engine.runner)["wanted"] == "lightning"
            assert by_lightning == trainer.by_lightning == isinstance(module, WarmsUp)


@pytest.mark.parametrize(
    ("runner", "module", "method", "sentence"),
    [
        (
            "lightning",
            Perceptron(),
            "FedSAM",
            r"runner 'lightning' leaves the steps .*FedSAM \(.*\) needs others",
        ),
        (
            "auto",
            WarmsUp(),
            "FedSAM",
            r"WarmsUp overrides optimizer_step, which only runner 'lightning' calls, .* but FedSAM",
        ),
        ("lightning", Perceptron(), "FedBN", None),
        ("serial", WarmsUp(), "FedAvg", "overrides optimizer_step, which only runner 'lightning' calls"),
        ("serial", BySecondOrder(), "FedAvg", "use runner 'lightning'"),
    ],
)
def test_what_it_cannot_train_is_refused(
    runner: str, module: Perceptron, method: str, sentence: str | None, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(max_rounds=1, clients_per_round=2, runner=runner)
    if sentence is None:  # no batch norm, so that clients keep nothing
        trainer.fit(module, federation(), method)
        return
    with pytest.raises(UserError, match=sentence):
        trainer.fit(module, federation(), method)


class Keeps(Logger):
    """Logger that keeps what it gets."""

    name, version = "keeps", 0

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append(dict(metrics))

    def log_hyperparams(self, params: Any, *arguments: Any, **options: Any) -> None:
        pass


def test_single_steps_reach_loggers_and_callbacks(make_trainer: MakeTrainer) -> None:
    class Reads(Callback):
        def __init__(self) -> None:
            self.steps: list[float] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.steps.append(float(trainer.callback_metrics["drawn_step"]))

    logger, reads = Keeps(), Reads()
    flags = {"runner": "lightning", "logger": logger, "log_every_n_steps": 1}
    trainer = make_trainer(max_rounds=1, clients_per_round=1, callbacks=reads, **flags)
    trainer.fit(Draws(), federation(sizes=(12,), batch_size=4))
    logged = [row["drawn_step"] for row in logger.rows if "drawn_step" in row]
    assert len(logged) == len(reads.steps) == 3
    assert logged == pytest.approx(reads.steps)
    assert trainer.callback_metrics["drawn"] == pytest.approx(sum(reads.steps) / 3)


def test_optimisers_and_schedulers_stay_after_the_fit(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1, clients_per_round=2, runner="lightning")
    module = StepsSchedulers()
    trainer.fit(module, federation())
    (optimizer,), (config,) = trainer.optimizers, trainer.lr_scheduler_configs
    assert optimizer.param_groups[0]["params"] == list(module.parameters())
    assert config.scheduler.optimizer is optimizer


class Weighted(Perceptron):
    """Weights its loss by a tensor that it computes in each validation."""

    weight = torch.ones(())

    def on_validation_epoch_end(self) -> None:
        self.weight = self.hidden.weight.detach().norm()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) * self.weight


@pytest.mark.parametrize("runner", ["lightning", "serial"])
def test_a_tensor_of_a_validation_may_train(
    runner: str, make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    """Lightning validates in a fit without `inference_mode`, whose tensors gradients cannot use."""
    ours = Weighted()
    stock = copy.deepcopy(ours)
    make_trainer(max_rounds=3, clients_per_round=1, runner=runner).fit(ours, federation(sizes=(12,), batch_size=12))
    data = TensorDataset(*samples(12)), TensorDataset(*samples(10, seed=1))
    make_stock_trainer(max_epochs=3, limit_val_batches=1.0).fit(stock, *(DataLoader(each, 12) for each in data))
    torch.testing.assert_close(torch.tensor(vector(ours)), torch.tensor(vector(stock)), rtol=0, atol=1e-6)


def test_callbacks_that_log_steps_work(make_trainer: MakeTrainer) -> None:
    def callbacks() -> list[Callback]:
        return [
            LearningRateMonitor("step"),
            ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2),
        ]

    with pytest.raises(UserError, match="ThroughputMonitor logs every step, which only runner 'lightning' does"):
        make_trainer(runner="serial", callbacks=callbacks())
    with pytest.raises(UserError, match=r"^ThroughputMonitor needs runner 'lightning', .* but FedSAM"):
        make_trainer(callbacks=callbacks()).fit(Perceptron(), federation(), "FedSAM")
    logger = Keeps()
    flags = {"runner": "auto", "logger": logger, "log_every_n_steps": 1}
    trainer = make_trainer(max_rounds=1, clients_per_round=1, callbacks=callbacks(), **flags)
    trainer.fit(Perceptron(), federation(sizes=(12,), batch_size=4))
    assert [row["lr-SGD"] for row in logger.rows if "lr-SGD" in row] == [0.1, 0.1, 0.1]
    assert [row["train/samples"] for row in logger.rows if "train/samples" in row] == [4, 8, 12]


def test_a_resumed_run_is_the_whole_run(make_trainer: MakeTrainer, tmp_path: Any) -> None:
    def fitted(folder: str, *rounds: int) -> list[float]:
        L.seed_everything(0, verbose=False)
        initial = Draws().state_dict()
        for last in rounds:
            module = Draws()
            module.load_state_dict(initial)
            trainer = make_trainer(
                max_rounds=last, clients_per_round=2, runner="lightning", enable_checkpointing=True,
                default_root_dir=tmp_path / folder,
            )  # fmt: skip
            trainer.fit(module, federation(), ckpt_path="last" if last != rounds[0] else None)
        return vector(module).tolist()

    assert fitted("resumed", 2, 4) == fitted("whole", 4)
