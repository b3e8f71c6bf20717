from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_fl.errors import UserError
from lightning_fl.modules import ImageClassifier
from lightning_fl.modules.classifier import cosine_factor

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

NUM_IMAGES = 23
IMAGES = torch.randn(NUM_IMAGES, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 4, (NUM_IMAGES,), generator=torch.Generator().manual_seed(1))


def loader(batch_size: int = 5) -> DataLoader:
    return DataLoader(TensorDataset(IMAGES, LABELS), batch_size=batch_size)


def classifier(**kwargs: Any) -> ImageClassifier:
    return ImageClassifier(**{"network": "linear", "num_classes": 4, "in_channels": 1, "image_size": 8, **kwargs})


def trainer(path: Path, **kwargs: Any) -> L.Trainer:
    defaults = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "default_root_dir": path,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{**defaults, **kwargs})


class LearningRates(L.Callback):
    """Callback that records the learning rate of every optimiser step, epoch by epoch."""

    def __init__(self) -> None:
        self.epochs: list[list[float]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.epochs.append([])

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.epochs[-1].append(optimizer.param_groups[0]["lr"])


def learning_rates(path: Path, model: ImageClassifier, **kwargs: Any) -> list[list[float]]:
    rates = LearningRates()
    trainer(path, callbacks=[rates], **kwargs).fit(model, loader())
    return rates.epochs


@pytest.mark.parametrize("accumulate_grad_batches", [1, 2])
@pytest.mark.parametrize("lr_schedule", ["constant", "cosine"])
@pytest.mark.parametrize("lr_decay", [1.0, 0.8])
def test_schedules_in_a_stock_trainer(
    tmp_path: Path, lr_decay: float, lr_schedule: str, accumulate_grad_batches: int
) -> None:
    model = classifier(learning_rate=0.4, lr_decay=lr_decay, lr_schedule=lr_schedule)
    epochs = learning_rates(tmp_path, model, max_epochs=4, accumulate_grad_batches=accumulate_grad_batches)
    steps_per_epoch = {1: 5, 2: 3}[accumulate_grad_batches]
    assert len(epochs) == 4
    for epoch, rates in enumerate(epochs):
        cosine = (1 + math.cos(math.pi * epoch / 4)) / 2 if lr_schedule == "cosine" else 1
        assert rates == pytest.approx([0.4 * lr_decay**epoch * cosine] * steps_per_epoch, rel=1e-12)


def test_cosine_over_a_training_that_max_steps_cuts_short(tmp_path: Path) -> None:
    epochs = learning_rates(tmp_path, classifier(lr_schedule="cosine"), max_epochs=9, max_steps=12)
    assert [len(rates) for rates in epochs] == [5, 5, 2]
    assert [rates[0] for rates in epochs] == pytest.approx([0.1 * cosine_factor(epoch, 3) for epoch in range(3)])


def test_cosine_asks_the_trainer_anew_for_every_training() -> None:
    """Test a trainer that runs many trainings with one optimiser: each restarts the scheduler and has its own length."""

    class Trainings:
        estimated_stepping_batches = num_training_batches = accumulate_grad_batches = 1

    model = classifier(lr_schedule="cosine", lr_decay=0.5)
    model._trainer = Trainings()  # type: ignore[assignment]
    configured: Any = model.configure_optimizers()
    (optimizer,), (decay, cosine) = configured
    assert (decay["interval"], cosine["interval"]) == ("epoch", "step")
    scheduler = cosine["scheduler"]
    start = scheduler.state_dict()
    for num_batches, num_epochs, round_rate in [(3, 2, 0.1), (1, 4, 0.05), (2, 1, 0.025)]:
        Trainings.num_training_batches = num_batches
        Trainings.estimated_stepping_batches = num_batches * num_epochs
        scheduler.load_state_dict(dict(start))
        optimizer.param_groups[0]["lr"] = round_rate
        rates = []
        for _ in range(num_batches * num_epochs):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        expected = [
            round_rate * cosine_factor(epoch, num_epochs) for epoch in range(num_epochs) for _ in range(num_batches)
        ]
        assert rates == pytest.approx(expected, rel=1e-12)


@pytest.mark.long
def test_schedules_continue_from_a_checkpoint(tmp_path: Path) -> None:
    options = {"learning_rate": 0.4, "lr_decay": 0.8, "lr_schedule": "cosine", "momentum": 0.9}
    torch.manual_seed(0)
    whole = classifier(**options)
    start = {key: value.clone() for key, value in whole.state_dict().items()}
    expected = learning_rates(tmp_path, whole, max_epochs=4)

    class StopAfterTwo(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.should_stop = trainer.current_epoch == 1

    half = classifier(**options)
    half.load_state_dict(start)
    first = trainer(tmp_path, max_epochs=4, callbacks=[StopAfterTwo()])
    first.fit(half, loader())
    first.save_checkpoint(tmp_path / "half.ckpt")
    rest = classifier(**options)
    rates = LearningRates()
    second = trainer(tmp_path, max_epochs=4, callbacks=[rates])
    second.fit(rest, loader(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert rates.epochs == expected[2:]
    for key, value in whole.state_dict().items():
        assert torch.equal(rest.state_dict()[key], value)


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(zip(IMAGES, LABELS, strict=True))


@pytest.mark.parametrize(
    ("data", "length"),
    [(TensorDataset(IMAGES, LABELS), {"max_epochs": -1}), (Endless(), {"max_epochs": 2})],
    ids=["no end", "no length"],
)
def test_cosine_without_a_known_length_is_refused(tmp_path: Path, data: Any, length: dict[str, int]) -> None:
    with pytest.raises(UserError, match="needs the length of the training"):
        trainer(tmp_path, **length).fit(classifier(lr_schedule="cosine"), DataLoader(data, batch_size=5))


@pytest.mark.long
@pytest.mark.parametrize("network", ["lenet5", "resnet32"])
def test_fit_lowers_the_loss(tmp_path: Path, network: str) -> None:
    torch.manual_seed(0)
    model = ImageClassifier(network, num_classes=2, in_channels=1, image_size=16, learning_rate=0.05, momentum=0.5)
    labels = torch.arange(16) % 2
    images = 0.5 * torch.randn(16, 1, 16, 16) + (labels * 2.0 - 1.0)[:, None, None, None]
    batches = DataLoader(TensorDataset(images, labels), batch_size=4)
    engine = trainer(tmp_path, max_epochs=2)
    (before,) = engine.validate(model, batches, verbose=False)
    engine.fit(model, batches)
    assert engine.callback_metrics["train/loss"] < before["val/loss"]


@pytest.mark.parametrize("stage", ["val", "test"])
def test_evaluation_averages_over_samples_not_batches(tmp_path: Path, stage: str) -> None:
    model = classifier()
    engine = trainer(tmp_path)
    evaluate = engine.validate if stage == "val" else engine.test
    (metrics,) = evaluate(model, loader(batch_size=20), verbose=False)  # batches of 20 and 3
    with torch.no_grad():
        logits = model(IMAGES)
    correct = int((logits.argmax(dim=1) == LABELS).sum())
    assert metrics == {
        f"{stage}/loss": pytest.approx(F.cross_entropy(logits, LABELS).item(), rel=1e-6),
        f"{stage}/accuracy": pytest.approx(correct / NUM_IMAGES, rel=1e-6),
    }


def test_predict_gives_probabilities_with_and_without_labels(tmp_path: Path) -> None:
    model = classifier()
    probabilities = torch.cat(trainer(tmp_path).predict(model, loader()))  # type: ignore[arg-type]
    assert probabilities.shape == (NUM_IMAGES, 4)
    torch.testing.assert_close(probabilities, model(IMAGES).softmax(dim=1))
    torch.testing.assert_close(model.predict_step(IMAGES, 0), probabilities)


def test_optimizer_is_sgd_as_pytorch_defines_it() -> None:
    model = classifier(learning_rate=0.3, momentum=0.9, weight_decay=0.01)
    configured: Any = model.configure_optimizers()
    (optimizer,), schedulers = configured
    assert schedulers == []
    assert isinstance(optimizer, torch.optim.SGD)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.3, 0.9, 0.01)
    assert len(group["params"]) == len(list(model.parameters()))


@pytest.mark.long
def test_checkpoint_round_trip(tmp_path: Path) -> None:
    model = ImageClassifier(
        "resnet32", num_classes=5, learning_rate=0.02, lr_decay=0.9, network_options={"shortcut": "B"}
    )
    engine = trainer(tmp_path, limit_train_batches=1, max_epochs=1)
    engine.fit(model, DataLoader(TensorDataset(torch.randn(4, 3, 32, 32), torch.arange(4)), batch_size=4))
    engine.save_checkpoint(tmp_path / "model.ckpt")
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert loaded.hparams == model.hparams
    assert loaded.hparams["learning_rate"] == 0.02
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
    assert ImageClassifier.load_from_checkpoint(tmp_path / "model.ckpt", learning_rate=0.5).learning_rate == 0.5


@pytest.mark.long
def test_a_module_as_network_is_no_hyperparameter(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    model = ImageClassifier(net, num_classes=4, learning_rate=0.02)
    assert model.hparams["network"] is None
    assert not any(isinstance(value, nn.Module) for value in model.hparams_initial.values())
    engine = trainer(tmp_path)
    engine.fit(model, loader())
    engine.save_checkpoint(tmp_path / "model.ckpt")
    twin = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "model.ckpt", network=twin)
    assert loaded.network is twin
    assert loaded.learning_rate == 0.02
    assert torch.equal(loaded(IMAGES), model(IMAGES))
    with pytest.raises(UserError, match="needs it again"):
        ImageClassifier.load_from_checkpoint(tmp_path / "model.ckpt")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_a_network_configured_by_class_path_loads_from_its_checkpoint(tmp_path: Path) -> None:
    arguments = {
        "network": {
            "class_path": "lightning_fl.modules.networks.resnet32",
            "init_args": {"num_classes": 4, "in_channels": 1, "image_size": 8, "shortcut": "B"},
        }
    }
    cli = LightningCLI(
        ImageClassifier,
        run=False,
        args={"model": arguments},
        seed_everything_default=False,
        trainer_defaults={"logger": False},
        save_config_callback=None,
    )
    model = cli.model
    engine = trainer(tmp_path, max_epochs=1)
    engine.fit(model, loader())
    engine.save_checkpoint(tmp_path / "model.ckpt")
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert torch.equal(loaded.eval()(IMAGES), model.eval()(IMAGES))


@pytest.mark.long
def test_a_subclass_may_fix_the_arguments(tmp_path: Path) -> None:
    class Digits(ImageClassifier):
        def __init__(self, learning_rate: float = 0.2) -> None:
            super().__init__("linear", 4, in_channels=1, image_size=8, learning_rate=learning_rate)

    engine = trainer(tmp_path)
    engine.fit(Digits(0.3), loader())
    engine.save_checkpoint(tmp_path / "model.ckpt")
    assert Digits.load_from_checkpoint(tmp_path / "model.ckpt").learning_rate == 0.3


@pytest.mark.parametrize(
    ("network", "shape"), [("cnn", (1, 3, 32, 32)), ("cnn_mnist", (1, 1, 28, 28)), ("linear", (1, 3, 32, 32))]
)
def test_example_input_has_the_usual_shape(network: str, shape: tuple[int, ...]) -> None:
    assert ImageClassifier(network).example_input_array.shape == shape  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"network": "lenet"}, "unknown network 'lenet': did you mean 'lenet5'"),
        ({"network": 3}, "network must be a name or an nn.Module, got 3"),
        (
            {"network": nn.Flatten(), "network_options": {"dropout": 0.1}},
            "network_options is for networks given by name",
        ),
        ({"network_options": {"dropout": 0.1}}, "network 'linear' has no option 'dropout'"),
        ({"network": "cnn", "image_size": 8}, "'cnn' needs images of at least 18×18, got 8×8"),
        ({"image_size": 0}, "image_size must be a whole number of at least 1, got 0"),
        ({"num_classes": 1}, "num_classes must be a whole number of at least 2, got 1"),
        ({"learning_rate": 0.0}, "learning_rate must be positive, got 0.0"),
        ({"learning_rate": math.nan}, "learning_rate must be positive, got nan"),
        ({"learning_rate": math.inf}, "learning_rate must be positive, from .* to .*, got inf"),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1.0"),
        ({"momentum": -0.1}, r"momentum must lie in \[0, 1\), got -0.1"),
        ({"weight_decay": -1e-4}, "weight_decay must be at least 0, got -0.0001"),
        ({"lr_decay": 0.0}, r"lr_decay must lie in \(0, 1\], got 0.0"),
        ({"lr_decay": 1.1}, r"lr_decay must lie in \(0, 1\], got 1.1"),
        ({"lr_schedule": "cosin"}, "lr_schedule 'cosin' is unknown; did you mean 'cosine'"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        classifier(**arguments)
