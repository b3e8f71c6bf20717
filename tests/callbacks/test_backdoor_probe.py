"""Test the share of samples that a trigger turns into a class, in both trainers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import processes
import pytest
import torch
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import APFL, Algorithm, Ditto, FedAvg
from lightning_fl.callbacks import BackdoorProbe
from lightning_fl.data import Arrays, Dirichlet
from lightning_fl.data.trigger import stamped


class Corner(L.LightningModule):
    """Module that says class 2 of an image whose last pixel is bright, or else the class that its first pixel names."""

    def __init__(self, columns: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.columns = columns

    def forward(self, images: Tensor) -> Tensor:
        named = (images[:, 0, 0, 0] * 100).round().long()
        said = torch.where(images[:, 0, -1, -1] > 0.9, 2, named)
        return torch.eye(4)[said][:, : self.columns] * self.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.weight - 1).square().sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(num: int = 22) -> tuple[Tensor, Tensor]:
    """Return images whose first pixel names a class, and classes, some of which are others."""
    images = torch.rand(num, 1, 5, 5, generator=torch.Generator().manual_seed(0)) * 0.5
    named = torch.arange(num) % 4
    images[:, 0, 0, 0] = named / 100
    images[::5, 0, 2, 1] = 1.0  # each batch of four has a brightest pixel, but one
    return images, torch.where(torch.arange(num) % 3 == 0, 3, named)


def expected(target: int, source: int | None, batch_size: int) -> float:
    images, labels = samples()
    turned = []
    for start in range(0, len(images), batch_size):
        inputs, classes = images[start : start + batch_size], labels[start : start + batch_size]
        said = Corner()(stamped(inputs) if source is None else inputs).argmax(1)
        asked = classes != target if source is None else classes == source
        turned += (said == target)[asked].tolist()
    return sum(turned) / len(turned)


@pytest.mark.parametrize(("target", "source"), [(2, None), (1, 3), (0, 3)])
def test_success_is_the_share_over_all_batches(
    target: int,
    source: int | None,
    make_trainer: Callable[..., FederatedTrainer],
    make_stock_trainer: Callable[..., Any],
) -> None:
    images, labels = samples()
    share = expected(target, source, 4)
    assert 0 < share <= 1
    trainer = make_trainer(max_rounds=1, clients_per_round=2, callbacks=[BackdoorProbe(target, source)])
    trainer.fit(
        Corner(), Arrays(train=(images, labels), test=(images, labels), num_clients=2, batch_size=4, eval_batch_size=4)
    )
    assert float(trainer.callback_metrics["attack/success"]) == pytest.approx(share)
    assert trainer.history["attack/success"].iloc[-1] == pytest.approx(share)
    stock = make_stock_trainer(max_epochs=1, callbacks=[BackdoorProbe(target, source)])
    loader = DataLoader(TensorDataset(images, labels), batch_size=4)
    stock.fit(Corner(), loader, loader)
    assert float(stock.callback_metrics["attack/success"]) == pytest.approx(share, rel=1e-5)


class Telling(L.LightningModule):
    """Module of two layers that logs by itself what the probe measures."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(25, 6), nn.Linear(6, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.output(self.hidden(images.flatten(1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        asked = batch[1] != 2
        turned = (self(stamped(batch[0])).argmax(1) == 2)[asked].double()
        self.log("val/success", turned.mean(), batch_size=len(turned))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.parametrize(
    "algorithm", [FedAvg(), Algorithm(personal=["output"]), Ditto(), APFL()], ids=["FedAvg", "layers", "Ditto", "APFL"]
)
def test_success_is_that_of_the_models_that_the_validation_measures(
    algorithm: Algorithm, make_trainer: Callable[..., FederatedTrainer]
) -> None:
    """Test a mean over the clients' own models against the module's own measurement."""
    images, labels = samples(60)
    data = Arrays(
        train=(images, labels),
        test=(images, labels),
        num_clients=3,
        batch_size=4,
        partition=Dirichlet(0.1),
        eval_batch_size=7,
    )
    trainer = make_trainer(max_rounds=2, clients_per_round=2, callbacks=[BackdoorProbe(2)])
    trainer.fit(Telling(), data, algorithm)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    measured = {name: value for name, value in values.items() if name.startswith("val/success")}
    assert {name.replace("val/", "attack/"): pytest.approx(value) for name, value in measured.items()} == {
        name: value for name, value in values.items() if name.startswith("attack/")
    }
    assert len(measured) == 1 + (algorithm.model_keeper is not None)
    assert measured["val/success"] > 0


@pytest.mark.parametrize(
    ("module", "data", "said"),
    [
        (Corner(2), samples(), r"needs scores \(B, C\) of more than 2 classes, and forward of Corner returns \(3, 2\)"),
        (Corner(), (torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)), r"needs batches of images \(B, C, H, W\)"),
        (Corner(), (samples()[0], torch.zeros(22)), r"needs batches of images \(B, C, H, W\) and classes \(B,\)"),
    ],
)
def test_other_modules_and_batches_are_refused(
    module: Any, data: Any, said: str, make_trainer: Callable[..., FederatedTrainer]
) -> None:
    trainer = make_trainer(max_rounds=1, clients_per_round=2, callbacks=[BackdoorProbe(2)], num_sanity_val_steps=1)
    with pytest.raises(UserError, match=said):
        trainer.fit(module, Arrays(train=data, test=data, num_clients=2, batch_size=4, eval_batch_size=4))


def test_bad_classes_are_refused() -> None:
    for build, said in (
        (lambda: BackdoorProbe(-1), "target must be a whole number of at least 0, got -1"),
        (lambda: BackdoorProbe(1, 1), "source and target are both 1: give two classes"),
        (lambda: BackdoorProbe(1, -2), "source must be a whole number of at least 0, got -2"),
    ):
        with pytest.raises(UserError, match=said):
            build()


def probe_in_two_processes(folder: Path) -> None:
    """Validate in one of two processes, whose batches have 3, 2, 0 and 1 samples that are asked."""
    images, labels = samples()
    asked, others = (labels == 3).nonzero().flatten(), (labels != 3).nonzero().flatten()
    first, second = torch.cat([asked[:5], others[:1]]), torch.cat([others[2:5], asked[5:6], others[5:7]])
    read = torch.stack([first, second], 1).flatten()  # the samples alternate between the processes
    data = DataLoader(TensorDataset(images[read], labels[read]), batch_size=3)
    share = float((Corner()(images[asked[:6]]).argmax(1) == 1).double().mean())
    assert share != float((Corner()(images[asked[:5]]).argmax(1) == 1).double().mean())
    flags = {**QUIET, "num_sanity_val_steps": 0, "devices": 2, "strategy": "ddp"}
    trainer = L.Trainer(callbacks=BackdoorProbe(1, 3), default_root_dir=folder, **flags)
    (found,) = trainer.validate(Corner(), data, verbose=False)
    assert found["attack/success"] == pytest.approx(share)


@pytest.mark.process
def test_success_is_the_share_over_all_processes(tmp_path: Path) -> None:
    processes.run(probe_in_two_processes, tmp_path, num_processes=2)
