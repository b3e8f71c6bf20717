"""Test that what a method measures or trains besides the clients' models leaves the user's own metrics alone."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection, MinMaxMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix
from toys import Perceptron, Served

from lightning_fl import FederatedTrainer, algorithms
from lightning_fl.callbacks import ClientEvaluation
from lightning_fl.evaluation.evaluation import as_loaders
from lightning_fl.features.loss_guard import LossGuard
from lightning_fl.rules import CorrectedMomentum, FrozenMomentum
from lightning_fl.steps import Apply, GradientMomentum

NUM_VALIDATED = 8  # held out by the clients
METHODS: dict[str, Callable[[], Any]] = {
    **{
        name: getattr(algorithms, name)
        for name in ("FedAvg", "FedDU", "FedDF", "SCAFFOLD", "Ditto", "APFL", "ServerM", "FedDA", "IMC")
    },
    "PruneFL": lambda: algorithms.PruneFL(initial_passes=2),
    "FedRep": lambda: algorithms.FedRep(["output"]),
    "PFedMe": lambda: algorithms.PFedMe(strength=1.0),
    "Mime": lambda: algorithms.Algorithm(rule=CorrectedMomentum(), steps=(Apply(), GradientMomentum())),
    "MimeLite": lambda: algorithms.Algorithm(rule=FrozenMomentum(), steps=(Apply(), GradientMomentum())),
}


class Metered(Perceptron):
    """Module that updates its own metrics, and computes and resets them at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, float]] = []
        self.table, self.least = MulticlassConfusionMatrix(2), MinMaxMetric(MeanMetric())
        self.both = MetricCollection([MulticlassAccuracy(2), MulticlassConfusionMatrix(2)])
        self.trained = MulticlassConfusionMatrix(2)

    def _classes(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        return self(x).argmax(1), y.argmax(1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained(*self._classes(batch))
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.seen.append(("train", float(self.trained.compute().sum())))
        self.trained.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.table.update(*self._classes(batch))
        self.both.update(*self._classes(batch))
        self.least.update(1.0)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(("table", float(self.table.compute().sum())))
        self.seen.append(("both", float(self.both.compute()["MulticlassConfusionMatrix"].sum())))
        self.table.reset()
        self.both.reset()


def seen_by(trainer: FederatedTrainer, method: Any) -> list[tuple[str, float]]:
    seen: list[tuple[str, float]] = []
    module, data = Metered(), Served(9)
    data.val_fraction = 0.2
    module.seen = seen
    trainer.fit(module, data, method)
    trainer.validate(module, data, verbose=False)
    return seen


@pytest.mark.parametrize("name", METHODS)
def test_metrics_see_each_sample_once(name: str, make_trainer: MakeTrainer) -> None:
    guard = LossGuard(rounds=1e6) if name == "FedAvg" else LossGuard()
    flags = {"local_epochs": 2, "client_optimizer": "sgd", "loss_guard": guard}
    trainer = make_trainer(**flags, callbacks=ClientEvaluation(every_n_rounds=1, finetune_epochs=1), logger=True)
    seen = seen_by(trainer, METHODS[name]())
    gradients = trainer.algorithm.gradients_per_step + trainer.algorithm.passes_at_received / 2  # of two passes
    trained = [row["clients/samples"] / gradients for row in trainer.fit_loop.rows]
    validated = [("table", NUM_VALIDATED), ("both", NUM_VALIDATED)]
    assert seen == [*validated, ("train", trained[0]), *validated, ("train", trained[1]), *validated]


def test_combined_loaders_print_nothing() -> None:
    """Lightning uses a class of torch that warns of its own end."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaders = as_loaders([DataLoader(range(4)), DataLoader(range(2))])  # type: ignore[arg-type]
        assert len(list(iter(loaders))) == 6
