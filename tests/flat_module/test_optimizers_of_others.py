"""Test optimisers as other packages write them: around others, with copies of the model, counters and arrays of their own."""

import copy
import random
from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from toys import Perceptron, samples, vector

from lightning_fl import UserError
from lightning_fl.data import Arrays, GivenIndices
from lightning_fl.flat_module.optimizers.fresh_state import FreshState

PARTS, EPOCHS, ROUNDS = [[0, 1, 2, 3], [4, 5, 6, 7]], 4, 2


class Wrapper(Optimizer):
    """Base of optimisers around another, which do not call torch's constructor."""

    def __init__(self) -> None:
        self._optimizer_step_pre_hooks: dict[int, Any] = {}
        self._optimizer_step_post_hooks: dict[int, Any] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad = None


class Lookahead(Wrapper):
    """Optimiser around another that copies the model when it is made."""

    def __init__(self, optimizer: Optimizer, k: int = 3) -> None:
        super().__init__()
        self.optimizer, self.k = optimizer, k
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.state = {p: {"slow": p.detach().clone()} for p in parameters}  # type: ignore[assignment]
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            group["counter"] += 1
            if group["counter"] % self.k == 0:
                for p in group["params"]:
                    self.state[p]["slow"].lerp_(p, 0.5)
                    p.copy_(self.state[p]["slow"])
        return loss


class Around(Wrapper):
    """Optimiser that shows the groups and states of another as its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self.inner, self.defaults = [optimizer], optimizer.defaults

    param_groups = property(lambda self: self.inner[0].param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner[0].state)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        return self.inner[0].step(closure)


class Counting(SGD):
    """Optimiser that counts its steps, sums gradients and draws numbers in attributes."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.state["others"] = 0  # type: ignore[index]
        self.first, self.num_steps, self.random = self.param_groups[0]["params"][0], 0, random.Random(0)
        self.sums: dict[int, Tensor] = {}
        self.scale = np.ones(1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.num_steps += 1
        self.state["others"] += 1  # type: ignore[index, operator]
        assert self.state["others"] == self.num_steps  # type: ignore[index]
        self.scale *= 0.9
        self.largest = max(getattr(self, "largest", 0.0), float(self.first.abs().max()))
        for group in self.param_groups:
            for position, p in enumerate(group["params"]):
                total = self.sums.setdefault(position, torch.zeros_like(p)).add_(p.grad)
                rate = group["lr"] * float(self.scale[0]) * self.random.random() * self.largest / self.num_steps
                p.add_(total, alpha=-rate)


class Replacing(SGD):
    """Optimiser whose steps give parameters other data."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for p in self.param_groups[0]["params"]:
            p.data = p.data - 0.1 * p.grad


class SAM(Optimizer):
    """Sharpness-aware minimisation as it is mostly written: it steps another optimiser, and gives parameters other data."""

    def __init__(self, parameters: Any, base: Callable[..., Optimizer], **options: Any) -> None:
        super().__init__(parameters, dict(rho=0.05, **options))
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=0.05 / float(norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base_optimizer.step()
        self.zero_grad()


class BySAM(Perceptron):
    """Module that makes both steps of SAM by hand."""

    def __init__(self, configure: Callable[[L.LightningModule], Any]) -> None:
        super().__init__(configure=configure)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.first_step()
        self.manual_backward(self.loss(batch))
        optimizer.second_step()


def step(module: Perceptron, optimizer: Any, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    module.loss(batch).backward()
    if isinstance(optimizer, SAM):
        optimizer.first_step()
        module.loss(batch).backward()
        optimizer.second_step()
    else:
        optimizer.step()


def trained_with_optimizers_made_anew(module: Perceptron) -> np.ndarray:
    """Return the mean of two clients' models after each round, trained by plain loops."""
    inputs, targets = samples(8)
    for _ in range(ROUNDS):
        clients = [copy.deepcopy(module) for _ in PARTS]
        for client, part in zip(clients, PARTS, strict=True):
            optimizer = client.configure_optimizers()
            for _ in range(EPOCHS):
                step(client, optimizer, (inputs[part], targets[part]))
        with torch.no_grad():
            for p, *of_clients in zip(*(one.parameters() for one in (module, *clients)), strict=True):
                p.copy_(torch.stack(of_clients).mean(0))
    return vector(module)


OPTIMIZERS: dict[str, tuple[type[Perceptron], Callable[[Any], Any]]] = {
    "Lookahead": (Perceptron, lambda module: Lookahead(Adam(module.parameters(), lr=0.05))),
    "Around": (Perceptron, lambda module: Around(SGD(module.parameters(), lr=0.1, momentum=0.9))),
    "both": (Perceptron, lambda module: Around(Lookahead(Adam(module.parameters(), lr=0.05)))),
    "Counting": (Perceptron, lambda module: Counting(module.parameters(), lr=0.1)),
    "Replacing": (Perceptron, lambda module: Replacing(module.parameters())),
    "SAM": (BySAM, lambda module: SAM(module.parameters(), SGD, lr=0.1, momentum=0.9)),
}


def data() -> Arrays:
    return Arrays(train=samples(8), test=samples(4), num_clients=2, batch_size=4, partition=GivenIndices(PARTS))


@pytest.mark.parametrize("runner", ["auto", "lightning"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_client_begins_with_an_optimiser_made_anew(
    name: str, runner: str, make_trainer: MakeTrainer, recwarn: pytest.WarningsRecorder
) -> None:
    kind, make = OPTIMIZERS[name]
    module = kind(configure=make)  # type: ignore[call-arg]
    expected = trained_with_optimizers_made_anew(copy.deepcopy(module))
    trainer = make_trainer(max_rounds=ROUNDS, clients_per_round=2, local_epochs=EPOCHS, runner=runner)
    trainer.fit(module, data())
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-5)
    assert not [warning for warning in recwarn if "nothing was trained" in str(warning.message)]


def test_what_a_hook_changes_between_rounds_stays(make_trainer: MakeTrainer) -> None:
    """Test an attribute of an optimiser that clients change as well."""
    seen: list[tuple[int, float]] = []

    class Watched(Counting):
        rho = 0.0

        def step(self, closure: Any = None) -> Any:
            seen.append((self.num_steps, self.rho))
            return super().step(closure)

    class SetsAttribute(Perceptron):
        def on_train_epoch_start(self) -> None:
            optimizer: Any = self.optimizers()
            optimizer.optimizer.rho = 1.0 + self.current_epoch

    module = SetsAttribute(configure=lambda module: Watched(module.parameters(), lr=0.1))
    make_trainer(max_rounds=2, clients_per_round=2, local_epochs=2).fit(module, data())
    assert seen == [(0, 1.0), (1, 1.0)] * 2 + [(0, 2.0), (1, 2.0)] * 2


class ByEval(SGD):
    """Optimiser whose `eval` puts other numbers into the parameters, from its state, as schedule-free ones do."""

    @torch.no_grad()
    def eval(self) -> None:
        for p in self.param_groups[0]["params"]:
            if "first" in self.state[p]:
                p.copy_(self.state[p]["first"])

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("first", p.detach().clone())
        return super().step(closure)


class Evaluates(Perceptron):
    def on_validation_epoch_start(self) -> None:
        self.optimizers().eval()  # type: ignore[union-attr]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)


@pytest.mark.parametrize("runner", ["auto", "lightning"])
def test_no_clients_state_is_left_for_hooks_between_rounds(runner: str, make_trainer: MakeTrainer) -> None:
    module = Evaluates(configure=lambda module: ByEval(module.parameters(), lr=0.1))
    plain = Perceptron(configure=lambda module: SGD(module.parameters(), lr=0.1))
    plain.load_state_dict(module.state_dict())
    for one in (module, plain):
        trainer = make_trainer(max_rounds=2, clients_per_round=2, local_epochs=2, runner=runner)
        trainer.fit(one, data())
    np.testing.assert_allclose(vector(module), vector(plain), rtol=0, atol=1e-6)


def test_an_optimiser_around_another_is_refused_for_personal_parameters(make_trainer: MakeTrainer) -> None:
    module = Perceptron(configure=lambda module: Around(SGD(module.parameters(), lr=0.1)))
    method = {"class_path": "FedAvg", "init_args": {"personal": ["output"]}}
    with pytest.raises(
        UserError, match=r"^Around wraps SGD, and cannot step personal parameters apart from the others"
    ):
        make_trainer(max_rounds=1, clients_per_round=2).fit(module, data(), method)


def test_personal_parameters_have_counters_of_their_own(make_trainer: MakeTrainer) -> None:
    """Test that attributes of the optimiser of personal parameters begin anew, too, and are not those of the module's."""
    counts: list[int] = []

    class Watched(Counting):
        def step(self, closure: Any = None) -> Any:
            counts.append(self.num_steps)
            return super().step(closure)

    module = Perceptron(configure=lambda module: Watched(module.parameters(), lr=0.1))
    method = {"class_path": "FedAvg", "init_args": {"personal": ["output"]}}
    make_trainer(max_rounds=2, clients_per_round=2, local_epochs=2).fit(module, data(), method)
    assert counts == [0, 0, 1, 1] * 4


@pytest.mark.parametrize("is_manual", [False, True])
def test_an_optimiser_without_a_learning_rate_is_refused(is_manual: bool, make_trainer: MakeTrainer) -> None:
    class Rateless(Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

    kind = BySAM if is_manual else Perceptron
    module = kind(configure=lambda module: Rateless(module.parameters()))  # type: ignore[call-arg]
    with pytest.raises(UserError, match=r"^Rateless has no learning rate lr in its parameter groups"):
        make_trainer(max_rounds=1, clients_per_round=2).fit(module, data())


def test_optimisers_of_torch_have_nothing_to_restore() -> None:
    """Test that no attribute of theirs is copied for each client."""
    layer = nn.Linear(2, 2)
    optimizer = Adam(layer.parameters())
    fresh = FreshState([optimizer])
    optimizer.note = 1  # type: ignore[attr-defined]
    fresh.begin()
    optimizer.note = 2  # type: ignore[attr-defined]
    fresh.end()
    assert optimizer.note == 2  # type: ignore[attr-defined]
