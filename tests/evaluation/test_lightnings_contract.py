"""Test that measurements call all hooks, loaders and names as `lightning.Trainer` does."""

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from toys import Perceptron, Served, federation, samples

from lightning_fl import algorithms
from lightning_fl.callbacks import ClientEvaluation
from lightning_fl.data import Federated

METHODS = ("FedAvg", "FedBN", "Ditto", "APFL", "LocalOnly", "FedRep", "PFedMe")


class AtBatchEnd(Perceptron):
    """Module that logs the values of a step in the hook after it."""

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # type: ignore[override]
        return batch[0]

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


class InLists(Perceptron):
    """Module that collects its losses from `on_validation_start` on, and logs them at the end of the epoch."""

    def on_validation_start(self) -> None:
        self.kept: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept += [self.loss((x[None], y[None])) for x, y in zip(*batch, strict=True)]

    def on_validation_epoch_end(self) -> None:
        self.log("val/loss", torch.stack(self.kept).mean())


class NamesItsLoader(Perceptron):
    """Module whose own data module has several loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        super().validation_step(batch, batch_idx)


def algorithm(name: str) -> Any:
    arguments = {"FedRep": {"personal": ["output"]}, "PFedMe": {"strength": 1.0}}.get(name, {})
    return getattr(algorithms, name)(**arguments)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [AtBatchEnd, InLists, NamesItsLoader])
def test_values_do_not_depend_on_the_hook_that_logs_them(
    kind: type[Perceptron], method: str, make_trainer: MakeTrainer
) -> None:
    def values(module: Perceptron) -> dict[str, float]:
        data = federation(sizes=(8, 12, 10))
        data.val_fraction = 0.5
        L.seed_everything(0, verbose=False)
        module.load_state_dict(Perceptron().state_dict())
        trainer = make_trainer(
            max_rounds=2, clients_per_round=2, local_epochs=2, callbacks=ClientEvaluation(every_n_rounds=1, file=False)
        )
        trainer.fit(module, data, algorithm(method))
        return {name: float(x) for name, x in trainer.callback_metrics.items() if name.startswith("val/loss")}

    expected = values(Perceptron())
    assert len(expected) > 1
    assert values(kind()) == pytest.approx(expected, rel=1e-5)


def test_feddu_measures_with_all_hooks(make_trainer: MakeTrainer) -> None:
    class Late(Perceptron):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.last = batch

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

    def accuracies(module: Perceptron) -> list[float]:
        L.seed_everything(0, verbose=False)
        module.load_state_dict(Perceptron().state_dict())
        trainer = make_trainer(max_rounds=3)
        trainer.fit(module, Served(8), algorithms.FedDU())
        return [row["feddu/accuracy"] for row in trainer.fit_loop.rows]

    assert accuracies(Late()) == pytest.approx(accuracies(Perceptron()))


@pytest.mark.parametrize("method", ["Ditto", "LocalOnly", "APFL"])
def test_each_of_several_loaders_is_measured_with_personal_values_of_clients(
    method: str, make_trainer: MakeTrainer
) -> None:
    def fitted(several: bool) -> dict[str, float]:
        data = federation(sizes=(8, 12))
        single = data.val_dataloader
        if several:
            data.val_dataloader = lambda: [single(), single()]  # type: ignore[method-assign]
        L.seed_everything(0, verbose=False)
        trainer = make_trainer(max_rounds=2, clients_per_round=2)
        trainer.fit(TakesLoader(), data, algorithm(method))
        return {name: float(x) for name, x in trainer.callback_metrics.items() if name.startswith("val/loss")}

    one, two = fitted(several=False), fitted(several=True)
    assert one["val/loss"] != pytest.approx(one["val/loss_server"])
    for index in (0, 1):
        assert two[f"val/loss/dataloader_idx_{index}"] == pytest.approx(one["val/loss"])


class TakesLoader(Perceptron):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


class Reads(Callback):
    """Callback that keeps what it finds in `callback_metrics` in the hooks after an evaluation, and logs by itself."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, float]]] = []

    def _read(self, hook: str, trainer: Any) -> None:
        metrics = {name: float(x) for name, x in trainer.callback_metrics.items() if name.startswith(("val", "mine"))}
        self.seen.append((hook, {name: round(x, 5) for name, x in metrics.items()}))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("mine", float(trainer.current_epoch))
        self._read("epoch end", trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._read("end", trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._read("train epoch end", trainer)


def test_callbacks_log_and_read_metrics_as_in_lightning(
    make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    weights = Perceptron().state_dict()
    reads = {}
    for kind in ("ours", "stock"):
        module, read = Perceptron(), Reads()
        module.load_state_dict(weights)
        if kind == "ours":
            data = Federated(Given(), num_clients=1)
            make_trainer(max_rounds=3, clients_per_round=1, callbacks=read, num_sanity_val_steps=2).fit(module, data)
        else:
            stock = make_stock_trainer(max_epochs=3, callbacks=read, num_sanity_val_steps=2)
            stock.fit(module, datamodule=Given())
        reads[kind] = read.seen
    assert reads["ours"] == reads["stock"]


class Given(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*samples(12)), batch_size=12)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*samples(10, seed=1)), batch_size=4)


class Board(Logger):
    """Logger that keeps metrics and pictures, as TensorBoard's or W&B's does."""

    name, version = "board", 0

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.pictures: list[str] = []

    @property
    def experiment(self) -> Any:
        return self

    def add_histogram(self, tag: str, values: Any, step: int) -> None:
        self.pictures.append(tag)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.metrics.append(dict(metrics))

    def log_hyperparams(self, params: Any, *arguments: Any, **options: Any) -> None:
        pass


def test_the_users_logger_is_the_modules(make_trainer: MakeTrainer) -> None:
    class Shows(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.logger.log_metrics({"mine": 1.0}, step=self.global_step)  # type: ignore[union-attr]
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            self.logger.experiment.add_histogram("weights", self.output.weight, self.current_epoch)  # type: ignore[union-attr]

    board = Board()
    trainer = make_trainer(max_rounds=2, clients_per_round=1, logger=board)
    trainer.fit(Shows(), federation(sizes=(8,), batch_size=4))
    assert trainer.logger is board
    assert sum("mine" in row for row in board.metrics) == 4
    assert board.pictures == ["weights", "weights"]


def test_a_metric_logged_in_training_is_read_at_the_end_of_the_epoch(make_trainer: MakeTrainer) -> None:
    class Metered(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.read = MeanMetric(), list[float]()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.count(float(self.current_epoch + 1))
            self.log("step", self.count, on_step=True, on_epoch=False)
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            self.read.append(float(self.count.compute()))
            self.log("epoch", self.count)

    module = Metered()
    trainer = make_trainer(max_rounds=3, clients_per_round=2)
    trainer.fit(module, federation())
    assert module.read == [1, 2, 3]
    assert trainer.callback_metrics["epoch"] == 3
