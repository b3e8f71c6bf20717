"""Test steps in which some parameters have no gradient, or another one than autograd's: compare with `L.Trainer`."""

import copy
from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, equal_states
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toys import Perceptron, federation, samples, vector

from lightning_fl import UserError
from lightning_fl.algorithms import SCAFFOLD, DeviceM, FedAdam, FedAvg, FedDA, FedProx, ServerAdam, ServerM

PASSES = 5


class Branching(Perceptron):
    """Module that uses a layer in every second step of a training."""

    def __init__(self, configure: Callable[[L.LightningModule], Any]) -> None:
        super().__init__(configure=configure)
        self.rare = nn.Linear(3, 2)
        self.num_steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_steps += 1
        extra = self.rare(batch[0]).square().mean() if self.num_steps % 2 else 0.0
        return self.loss(batch) + extra


class Freezing(Perceptron):
    """Module that takes the gradient of a layer away in every second step."""

    num_steps = 0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            for parameter in self.hidden.parameters():
                parameter.grad = None


class Centring(Perceptron):
    """Module that puts another gradient in the place of autograd's."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.grad - parameter.grad.mean()


class Emptied(Centring):
    """Module that gives gradients to parameters that have none."""

    def on_after_backward(self) -> None:
        self.output.bias.grad = None

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.output.bias.grad = torch.ones_like(self.output.bias)


def decaying(module: L.LightningModule) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.5)


def with_momentum(module: L.LightningModule) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def adam(module: L.LightningModule) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.5)


def by_tensor(module: L.LightningModule) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(module.parameters(), lr=0.1, weight_decay=0.5)


def in_two_groups(module: L.LightningModule) -> torch.optim.Optimizer:
    parameters = list(module.parameters())
    return torch.optim.Adam([{"params": parameters[::2], "lr": 0.02}, {"params": parameters[1::2]}], lr=0.01)


def plain(module: L.LightningModule) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def by_lightning(module: L.LightningModule, **options: Any) -> np.ndarray:
    """Return the weights after `PASSES` steps on four samples."""
    trainer = L.Trainer(
        max_epochs=PASSES,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(TensorDataset(*samples(4)), batch_size=4))
    return vector(module)


@pytest.mark.parametrize("make", [Branching, Freezing, Centring, Emptied])
@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        (FedAvg(), adam),
        *((FedProx(mu=0), optimizer) for optimizer in (plain, decaying, with_momentum, adam, by_tensor, in_two_groups)),
        *(
            (algorithm, optimizer)
            for algorithm in (SCAFFOLD(), DeviceM(local_beta=0))
            for optimizer in (plain, decaying)
        ),
    ],
    ids=lambda part: getattr(part, "name", "") or part.__name__,
)
@pytest.mark.parametrize("runner", ["serial", "lightning"])
@pytest.mark.sampled(4)
def test_one_client_makes_the_steps_of_lightning(
    algorithm: Any, make: Any, optimizer: Any, runner: Any, make_trainer: MakeTrainer
) -> None:
    module = make(configure=optimizer)
    expected = by_lightning(copy.deepcopy(module))
    trainer = make_trainer(max_rounds=1, clients_per_round=1, local_epochs=PASSES, runner=runner)
    trainer.fit(module, federation(sizes=(4,), batch_size=4), algorithm)
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-6)


class KeepsZeros(Branching):
    """Module that uses a layer in the last step, and sets gradients to 0 in place of removing them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_steps += 1
        extra = 0.0 if self.num_steps % PASSES else self.rare(batch[0]).square().mean()
        return self.loss(batch) + extra

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class Halves(Branching):
    """Module that clips by putting other gradients in the place of the present ones, and takes one away."""

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *unused: Any, **named: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad = parameter.grad / 2
        if self.num_steps % 3 == 0:
            self.output.bias.grad = None


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [(FedProx(mu=0), with_momentum), (FedProx(mu=0), adam), (SCAFFOLD(), plain), (SCAFFOLD(), decaying)],
    ids=lambda part: getattr(part, "name", "") or part.__name__,
)
def test_gradients_that_the_clipping_replaces_make_the_step(
    method: Any, optimizer: Any, make_trainer: MakeTrainer
) -> None:
    module = Halves(configure=optimizer)
    expected = by_lightning(copy.deepcopy(module))
    trainer = make_trainer(max_rounds=1, clients_per_round=1, local_epochs=PASSES, runner="lightning")
    trainer.fit(module, federation(sizes=(4,), batch_size=4), method)
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer", [decaying, adam])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_layer_decays_from_its_first_gradient_on(optimizer: Any, clip: Any, make_trainer: MakeTrainer) -> None:
    module, steps = KeepsZeros(configure=optimizer), {"gradient_clip_val": clip}
    stock = copy.deepcopy(module)
    for _ in range(2):
        stock.zero_grad()
        expected = by_lightning(stock, **steps)
    trainer = make_trainer(max_rounds=2, clients_per_round=1, local_epochs=PASSES, runner="lightning", **steps)
    trainer.fit(module, federation(sizes=(4,), batch_size=4), FedProx(mu=0))
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("runner", ["serial", "lightning"])
@pytest.mark.parametrize("make", [Branching, Freezing])
def test_a_client_does_not_know_the_gradients_of_the_one_before(
    make: Any, runner: Any, make_trainer: MakeTrainer
) -> None:
    """Compare three clients with the same samples with three trainings of one, each from where the module left off."""
    moved = []
    for algorithm in (FedAvg(), FedProx(mu=0)):
        torch.manual_seed(0)
        module = make(configure=adam)
        data = federation(sizes=(4,) * 3, batch_size=4)
        make_trainer(max_rounds=2, clients_per_round=3, local_epochs=3, runner=runner).fit(module, data, algorithm)
        moved.append(vector(module))
    np.testing.assert_allclose(moved[0], moved[1], rtol=0, atol=1e-6)


class HalfTrained(Perceptron):
    """Module whose optimiser does not have the first layer, which has gradients all the same."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.output.parameters(), lr=0.1)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("runner", ["serial", "stacked", "lightning"])
@pytest.mark.parametrize("method", [FedAvg(), FedProx(mu=0)], ids=lambda a: a.name)
def test_clipping_measures_what_the_optimiser_steps(
    method: Any, runner: Any, algorithm: Any, make_trainer: MakeTrainer
) -> None:
    module = HalfTrained()
    clipping = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm}
    expected = by_lightning(copy.deepcopy(module), **clipping)
    trainer = make_trainer(max_rounds=1, clients_per_round=1, local_epochs=PASSES, runner=runner, **clipping)
    trainer.fit(module, federation(sizes=(4,), batch_size=4), method)
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-6)


class ByBatch(Perceptron):
    """Module that uses a layer for the first batch of an epoch only."""

    def __init__(self, configure: Callable[[L.LightningModule], Any]) -> None:
        super().__init__(configure=configure)
        self.rare = nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + (0.0 if batch_idx else self.rare(batch[0]).square().mean())


class BySize(ByBatch):
    """Module that uses a layer for large batches only."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + (self.rare(batch[0]).square().mean() if len(batch[0]) > 3 else 0.0)


@pytest.mark.parametrize("make", [ByBatch, BySize])
@pytest.mark.parametrize("sizes", [(8, 8), (8, 2), (2, 8, 8)])
@pytest.mark.parametrize("optimizer", [plain, decaying, with_momentum, adam])
def test_a_stack_makes_the_same_steps_or_refuses(
    optimizer: Any, sizes: tuple[int, ...], make: Any, make_trainer: MakeTrainer
) -> None:
    options = {"max_rounds": 2, "clients_per_round": len(sizes), "local_epochs": 2}
    if optimizer is not plain and (make, sizes) != (BySize, (8, 8)):
        with pytest.raises(UserError, match=r"rare\.weight.* has no gradient in some steps.*runner 'serial'"):
            make_trainer(runner="stacked", **options).fit(make(optimizer), federation(sizes, batch_size=4))
        return
    moved = []
    for runner in ("serial", "stacked"):
        torch.manual_seed(0)
        module = make(optimizer)
        make_trainer(runner=runner, **options).fit(module, federation(sizes, batch_size=4))
        moved.append(vector(module))
    np.testing.assert_allclose(moved[0], moved[1], rtol=0, atol=1e-6)


class Slowing(Perceptron):
    """Module that sets its learning rate by hand before each step."""

    num_steps = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.num_steps += 1
        self.optimizers().param_groups[0]["lr"] = 0.1 / self.num_steps


@pytest.mark.parametrize(
    "algorithm", [FedAvg(), FedProx(mu=0), SCAFFOLD(), DeviceM(local_beta=0)], ids=lambda a: a.name
)
@pytest.mark.parametrize("runner", ["serial", "lightning"])
def test_learning_rates_that_a_hook_sets_are_those_of_the_step(
    algorithm: Any, runner: Any, make_trainer: MakeTrainer
) -> None:
    module = Slowing()
    expected = by_lightning(copy.deepcopy(module))
    trainer = make_trainer(max_rounds=1, clients_per_round=1, local_epochs=PASSES, runner=runner)
    trainer.fit(module, federation(sizes=(4,), batch_size=4), algorithm)
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0)], ids=lambda a: a.name)
@pytest.mark.parametrize("runner", ["serial", "lightning"])
def test_hooks_of_the_optimiser_are_called(algorithm: Any, runner: Any, make_trainer: MakeTrainer) -> None:
    called: list[str] = []

    def configure(module: L.LightningModule) -> Any:
        optimizer = plain(module)
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        return optimizer

    trainer = make_trainer(max_rounds=1, clients_per_round=1, local_epochs=2, runner=runner)
    trainer.fit(Perceptron(configure=configure), federation(sizes=(4,), batch_size=4), algorithm)
    assert called == ["before", "after"] * 2


class FrozenLater(Perceptron):
    """Module that freezes its first layer before the second round; keeps the layer as it was then."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.hidden.requires_grad_(False)
            self.frozen = copy.deepcopy(self.hidden.state_dict())


@pytest.mark.parametrize("optimizer", [plain, decaying])
@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize(
    "method", [FedAvg(), SCAFFOLD(), FedAdam(), FedDA(), ServerM(), ServerAdam()], ids=lambda a: a.name
)
def test_a_layer_that_a_hook_freezes_stays_as_it_is(
    method: Any, runner: Any, optimizer: Any, make_trainer: MakeTrainer
) -> None:
    module = FrozenLater(configure=optimizer)
    start = module.output.weight.detach().clone()
    make_trainer(runner=runner, max_rounds=3).fit(module, federation(), method)
    assert equal_states(module.hidden.state_dict(), module.frozen)
    assert not torch.equal(module.output.weight, start)
