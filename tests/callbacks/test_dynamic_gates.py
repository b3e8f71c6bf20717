"""Test dynamic gates in a stock `L.Trainer`, against a hand-written loop; saved, loaded, resumed; and in a federation."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.callbacks import DynamicGates
from lightning_fl.data import Arrays
from lightning_fl.gates import add_gates, gates_of, lasso, observed, remove_gates

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
}


class Classifier(L.LightningModule):
    """Module from images (B, 2, 6, 6) to 3 classes."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(2, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 6, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(24, 3),
        )
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


class WithDictionary(Classifier):
    """Module that returns its loss in a dictionary."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "more": 1}


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 2, 6, 6, generator=generator)
    return x, torch.arange(24) % 3


def loader(batch_size: int = 6) -> DataLoader:
    return DataLoader(TensorDataset(*samples()), batch_size=batch_size)


def by_hand(module: Classifier, penalty: float, epochs: int, accumulate: int = 1, **options: Any) -> dict[str, Tensor]:
    """Train a plain loop whose loss includes the lasso."""
    gates = add_gates(module, **options)
    optimizer = module.configure_optimizers()
    for _ in range(epochs):
        for index, (x, y) in enumerate(loader()):
            with observed(gates.values()) as outputs:
                loss = F.cross_entropy(module.net(x), y)
            ((loss + penalty * lasso(outputs)) / accumulate).backward()
            if (index + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return module.state_dict()


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", [Classifier, WithDictionary])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_matches_a_loop_written_by_hand(
    optimizer: str, kind: type[Classifier], accumulate: int, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    module = kind(optimizer)
    expected = by_hand(Classifier(optimizer), 0.05, epochs=3, accumulate=accumulate, keep=0.5)
    other = by_hand(Classifier(optimizer), 0.0, epochs=3, accumulate=accumulate, keep=0.5)
    callback = DynamicGates(keep=0.5, penalty=0.05)
    trainer = make_stock_trainer(max_epochs=3, callbacks=callback, accumulate_grad_batches=accumulate)
    trainer.fit(module, loader())
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
    assert not torch.allclose(expected["net.0.gate.weight"], other["net.0.gate.weight"], atol=1e-3), "the lasso counts"
    assert "training_step" not in vars(module)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_equals_uninterrupted(
    optimizer: str, make_stock_trainer: Callable[..., L.Trainer], tmp_path: Path
) -> None:
    whole = Classifier(optimizer)
    make_stock_trainer(max_epochs=4, callbacks=DynamicGates(0.5)).fit(whole, loader())
    first = make_stock_trainer(max_epochs=2, callbacks=DynamicGates(0.5))
    first.fit(Classifier(optimizer), loader())
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Classifier(optimizer)
    # The gates start with other numbers: those of the checkpoint must replace them.
    trainer = make_stock_trainer(max_epochs=4, callbacks=DynamicGates(0.5, seed=9))
    trainer.fit(resumed, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert same(resumed.state_dict(), whole.state_dict())


def test_checkpoints_hold_the_gates(make_stock_trainer: Callable[..., L.Trainer], tmp_path: Path) -> None:
    module, path = Classifier(), tmp_path / "gated.ckpt"
    trainer = make_stock_trainer(callbacks=DynamicGates(0.5))
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    loss = trainer.test(module, loader(), verbose=False)
    elsewhere = make_stock_trainer(callbacks=DynamicGates(0.5, seed=9))
    assert elsewhere.test(Classifier(), loader(), ckpt_path=path, verbose=False) == loss
    with pytest.raises(RuntimeError, match=r"net\.0\.gate\.weight"):
        Classifier.load_from_checkpoint(path)
    plain = Classifier.load_from_checkpoint(path, strict=False)
    remove_gates(module)
    assert same(plain.state_dict(), module.state_dict())


def test_keeping_all_is_training_without_it(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    gated, dense = Classifier(), Classifier()
    make_stock_trainer(callbacks=DynamicGates(keep=1.0)).fit(gated, loader())
    make_stock_trainer().fit(dense, loader())
    assert same(gated.state_dict(), dense.state_dict())


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_in_a_federation_of_one_it_is_the_stock_trainer(
    runner: str, make_trainer: Callable[..., FederatedTrainer], make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    """Check that without FedDP the gates are ordinary parameters: shared, averaged, and counted when they are sent."""
    stock, federated = Classifier(), Classifier()
    make_stock_trainer(max_epochs=1, callbacks=DynamicGates(0.5, penalty=0.05)).fit(stock, loader(24))
    x, y = samples()
    data = Arrays(train=(x, y), test=(x, y), num_clients=1, batch_size=24)
    callback = DynamicGates(0.5, penalty=0.05)
    trainer = make_trainer(max_rounds=1, clients_per_round=1, callbacks=callback, runner=runner)
    trainer.fit(federated, data)
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(federated.state_dict()[name], value, rtol=0, atol=1e-6)
    numbers = sum(p.numel() for p in federated.parameters()) + 16
    assert trainer.callback_metrics["comm/uplink_bits"] == 32 * numbers


def test_a_module_may_be_copied_while_it_trains(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    copies = []

    class Copies(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
            pl_module.trainer, own = None, pl_module.trainer
            copies.append(copy.deepcopy(pl_module))
            pl_module.trainer = own

    module = Classifier()
    make_stock_trainer(callbacks=[DynamicGates(0.5), Copies()]).fit(module, loader())
    assert same(copies[-1].state_dict(), module.state_dict())
    gates, twins = (list(gates_of(m).values()) for m in (module, copies[-1]))
    assert not any(a is b for a in gates for b in twins)
    assert copies[-1].training_step.gates == twins


@pytest.mark.parametrize("penalty", [0.0, 0.05])
def test_a_training_step_that_is_set_on_the_module_trains_and_stays(
    penalty: float, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    module, batches = Classifier(), []
    own = module.training_step

    def step(batch: Any, batch_idx: int) -> Tensor:
        batches.append(batch_idx)
        return own(batch, batch_idx)

    module.training_step = step  # type: ignore[method-assign]
    for _ in range(2):
        make_stock_trainer(max_epochs=1, callbacks=DynamicGates(0.5, penalty)).fit(module, loader())
    assert batches == 2 * [0, 1, 2, 3]
    assert vars(module)["training_step"] is step


class OfOneArgument(Classifier):
    """Module whose training step does not ask for the batch's index."""

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)


def test_a_compiled_step_of_one_argument_trains(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    plain, compiled = OfOneArgument(), OfOneArgument()
    compiled.load_state_dict(plain.state_dict())
    compiled.training_step = torch.compile(compiled.training_step, backend="eager")  # type: ignore[method-assign]
    for module in (plain, compiled):
        make_stock_trainer(max_steps=2, callbacks=DynamicGates(0.5, penalty=0.1)).fit(module, loader())
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict())


@pytest.mark.parametrize("average", [EMAWeightAveraging, lambda: StochasticWeightAveraging(0.1, swa_epoch_start=1)])
def test_averages_that_begin_before_the_gates_are_refused(
    average: Callable[[], L.Callback], make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    wrong = make_stock_trainer(callbacks=[average(), DynamicGates(0.5)])
    with pytest.raises(UserError, match=r"put DynamicGates before \w+WeightAveraging in the callbacks"):
        wrong.fit(Classifier(), loader())
    make_stock_trainer(max_epochs=1, callbacks=[average(), DynamicGates(1.0)]).fit(Classifier(), loader())


class Recomputed(Classifier):
    """Module that computes its network again in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(checkpoint(self.net, x.requires_grad_(), use_reentrant=self.use_reentrant), y)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_penalty_without_gradient_is_said(
    use_reentrant: bool, make_stock_trainer: Callable[..., L.Trainer], recwarn: pytest.WarningsRecorder
) -> None:
    module = Recomputed(use_reentrant)
    make_stock_trainer(max_steps=1, callbacks=DynamicGates(0.5, penalty=1.0, mode="index")).fit(module, loader())
    assert any("give it use_reentrant=False" in str(warning.message) for warning in recwarn) == use_reentrant
    assert all((gate.weight.grad is None) == use_reentrant for gate in gates_of(module).values())


class Manual(Classifier):
    """Module that steps its optimiser itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda fit: DynamicGates(keep=0), ["(0, 1]", "got 0"]),
        (lambda fit: DynamicGates(penalty=-1.0), ["penalty", "got -1.0"]),
        (lambda fit: DynamicGates(mode="multipl"), ["did you mean 'multiply'"]),  # type: ignore[arg-type]
        (lambda fit: fit(BoringModel()), ["BoringModel has no convolution"]),
        (lambda fit: add_gates(Classifier(), skip="nett"), ["skip='nett'", "did you mean 'net'"]),
        (lambda fit: fit(Manual()), ["Manual", "automatic_optimization", "penalty=0"]),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    mistake: Callable[[Any], Any], words: list[str], make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    def fit(module: L.LightningModule) -> None:
        make_stock_trainer(callbacks=DynamicGates()).fit(module, loader())

    with pytest.raises(UserError) as error:
        mistake(fit)
    assert [word for word in words if word not in str(error.value)] == []


def test_a_fit_says_what_share_of_the_network_is_gated(
    make_stock_trainer: Callable[..., L.Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    module = Classifier()
    held = sum(p.numel() for layer in module.modules() if isinstance(layer, nn.Conv2d) for p in layer.parameters())
    share = held / sum(p.numel() for p in module.parameters())
    with caplog.at_level("INFO", "lightning.pytorch"):
        make_stock_trainer(max_epochs=1, callbacks=DynamicGates(0.5)).fit(module, loader())
    assert re.search(
        rf"gates (\d) of \1 convolutions, which hold {share:.1%} of the parameters of Classifier\.", caplog.text
    )


class Late(BoringModel):
    """Module that makes its convolutions after the callbacks' setup."""

    def configure_model(self) -> None:
        self.convolution = nn.Conv2d(1, 4, 3)


def test_layers_that_are_made_too_late_are_named(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    with pytest.raises(UserError, match="before configure_model is called: make the layers in __init__"):
        make_stock_trainer(callbacks=DynamicGates()).fit(Late())
