"""Test that hooks run in the order of Lightning's own trainer, a round being an epoch."""

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from toys import Perceptron, federation

from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import DeviceM
from lightning_fl.data import Federated

MakeTrainer = Callable[..., FederatedTrainer]

WITHIN_A_ROUND = ("batch", "backward", "zero_grad", "optimizer_step", "checkpoint")
"""Hooks inside an epoch, which differ because a federation trains several clients in it."""


def is_recorded(name: str) -> bool:
    return (name.startswith("on_") or name in ("setup", "teardown")) and not any(x in name for x in WITHIN_A_ROUND)


class Recorder(Callback):
    """Callback that records every hook with the epoch and the trainer's state."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []


def _recording(name: str) -> Callable[..., None]:
    def hook(self: Recorder, trainer: Any, pl_module: Any, *arguments: Any, **options: Any) -> None:
        stage = trainer.state.stage
        flags = (trainer.training, trainer.validating, trainer.sanity_checking, trainer.testing, trainer.predicting)
        self.notes.append((name, trainer.current_epoch, str(stage), flags, pl_module.training))

    return hook


for _name in filter(is_recorded, dir(Callback)):
    setattr(Recorder, _name, _recording(_name))


class Predicts(BoringModel):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch)


@pytest.fixture
def recorders(make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]) -> tuple[Recorder, Recorder]:
    """Return the records of a stock trainer and ours in two epochs of fit, then validate, test and predict."""
    stock, ours = Recorder(), Recorder()
    trainer = make_stock_trainer(num_sanity_val_steps=2, callbacks=stock)
    federated = make_trainer(max_rounds=2, num_sanity_val_steps=2, callbacks=ours)
    for any_trainer, data in ((trainer, BoringDataModule()), (federated, Federated(BoringDataModule(), num_clients=4))):
        module = Predicts()
        any_trainer.fit(module, datamodule=data)
        any_trainer.validate(module, datamodule=data, verbose=False)
        any_trainer.test(module, datamodule=data, verbose=False)
        any_trainer.predict(module, datamodule=data)
    return stock, ours


def test_the_names_come_in_the_same_order(recorders: tuple[Recorder, Recorder]) -> None:
    stock, ours = ([note[0] for note in recorder.notes] for recorder in recorders)
    assert ours == stock


def test_what_the_trainer_says_of_itself_is_the_same(recorders: tuple[Recorder, Recorder]) -> None:
    stock, ours = recorders
    differing = [(a, b) for a, b in zip(ours.notes, stock.notes, strict=True) if a != b]
    assert differing == []


def test_the_epoch_after_fit_is_the_number_of_rounds(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=3)
    trainer.fit(Perceptron(), federation())
    assert trainer.current_epoch == 3


def test_the_modules_hooks_are_called_too(make_trainer: MakeTrainer) -> None:
    class Module(Perceptron):
        called: list[str] = []  # noqa: RUF012

    names = (
        "on_fit_start",
        "on_train_start",
        "on_train_epoch_start",
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
    )
    for name in names:
        setattr(Module, name, lambda self, name=name: self.called.append(name))
    make_trainer(max_rounds=1).fit(Module(), federation())
    assert tuple(Module.called) == names


def test_clients_are_announced(make_trainer: MakeTrainer) -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.downloads: list[int] = []
            self.uploads: list[tuple[int, int, int]] = []

        def on_client_download(self, trainer: Any, pl_module: Any, client: int) -> None:
            self.downloads.append(client)

        def on_client_upload(self, trainer: Any, pl_module: Any, client: int, position: int, total: int) -> None:
            self.uploads.append((client, position, total))

    watch = Watch()
    make_trainer(max_rounds=1, callbacks=watch).fit(Perceptron(), federation())
    assert watch.uploads == [(client, place, 3) for place, client in enumerate(watch.downloads, start=1)]
    in_turns = Watch()
    make_trainer(max_rounds=1, callbacks=in_turns).fit(Perceptron(), federation(), DeviceM(variant="mime"))
    assert in_turns.downloads == watch.downloads * 2, (
        "each client is announced before its gradient and before its training"
    )
    assert in_turns.uploads == watch.uploads


def test_data_modules_are_torn_down(make_trainer: MakeTrainer) -> None:
    stages: list[str] = []
    data = federation()
    data.teardown = stages.append  # type: ignore[assignment]
    trainer = make_trainer()
    trainer.fit(Perceptron(), data)
    trainer.test(Perceptron(), data, verbose=False)
    assert stages == ["fit", "test"]


def test_batch_hooks_change_training_and_validation_batches(make_trainer: MakeTrainer) -> None:
    class Shifted(Perceptron):
        seen: list[float] = []  # noqa: RUF012

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] + 100, batch[1]

        def loss(self, batch: Any) -> Any:
            self.seen.append(float(batch[0].min()))
            return super().loss(batch)

    make_trainer(max_rounds=1).fit(Shifted(), federation())
    assert min(Shifted.seen) > 90
