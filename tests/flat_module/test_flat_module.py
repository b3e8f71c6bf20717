"""Test the working module on flat storage: views, optimisers, buffers, and restoring the module."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, equal_states
from lightning.fabric import Fabric
from torch import Tensor, nn
from toys import Convolved, Perceptron, Statistics, Tied, federation, samples, vector

from lightning_fl import UserError
from lightning_fl.algorithms import DeviceM, FedAvg, FedProx
from lightning_fl.callbacks import FilterPruning
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.hooks import Hooks
from lightning_fl.flat_module.optimizers.module_optimizer import ELEMENTWISE


class Convolutions(L.LightningModule):
    """Two convolutions and a linear layer; `configure` creates the optimiser."""

    def __init__(self, configure: Callable[[L.LightningModule], Any]) -> None:
        super().__init__()
        self.configure = configure
        self.first = nn.Conv2d(2, 5, 3)
        self.second = nn.Conv2d(5, 4, 2)
        self.last = nn.Linear(4 * 9, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(batch)))).flatten(1)).square().mean()

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def flat_module_of(module: L.LightningModule) -> FlatModule:
    hooks = Hooks(None, module, L.LightningDataModule(), ())
    return FlatModule(module, Fabric(accelerator="cpu", devices=1), hooks, channels_last=False)


def two_groups(cls: type[torch.optim.Optimizer]) -> Callable[[L.LightningModule], Any]:
    """Return interleaved parameters in two groups with different learning rates and weight decay."""

    def configure(module: L.LightningModule) -> torch.optim.Optimizer:
        parameters = list(module.parameters())
        groups = [
            {"params": parameters[::-2], "lr": 0.02, "weight_decay": 0.1},
            {"params": parameters[-2::-2], "lr": 0.005},
        ]
        if cls is torch.optim.Rprop:  # without weight decay
            groups[0].pop("weight_decay")
        return cls(groups, lr=0.01)  # type: ignore[call-arg]

    return configure


@pytest.mark.parametrize("flat_gradient", [False, True])
@pytest.mark.parametrize("cls", ELEMENTWISE, ids=lambda cls: cls.__name__)
def test_the_optimiser_steps_flat_storage_as_it_steps_an_ordinary_module(
    cls: type[torch.optim.Optimizer], flat_gradient: bool
) -> None:
    ordinary = Convolutions(two_groups(cls))
    module = copy.deepcopy(ordinary)
    optimizer = ordinary.configure_optimizers()
    flat_module = flat_module_of(module)
    flat_module.configure_optimizer(flat_gradient)
    for _ in range(4):
        batch = torch.randn(3, 2, 6, 6)
        optimizer.zero_grad()
        ordinary.training_step(batch, 0).backward()
        optimizer.step()
        module.training_step(batch, 0).backward()
        flat_module.after_backward()
        flat_module.optimizer.step()
        flat_module.gradient.zero()
    for ours, theirs in zip(module.parameters(), ordinary.parameters(), strict=True):
        # Adaptive methods may divide by tiny numbers, which amplifies the last bits of a gradient.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_learning_rate_and_weight_decay_by_coordinate() -> None:
    module = Convolutions(two_groups(torch.optim.SGD))
    flat_module = flat_module_of(module)
    flat_module.configure_optimizer(flat_gradient=True)
    module.training_step(torch.randn(3, 2, 6, 6), 0).backward()
    flat_module.after_backward()
    rates = flat_module.layout.views(flat_module.optimizer.learning_rate)
    decays = flat_module.layout.views(flat_module.optimizer.weight_decay)
    for place, name in enumerate(reversed(flat_module.layout.names)):
        assert rates[name].unique().tolist() == pytest.approx([0.02 if place % 2 == 0 else 0.005])
        assert decays[name].unique().tolist() == pytest.approx([0.1 if place % 2 == 0 else 0.0])


def test_parameters_are_views_until_released() -> None:
    module = Convolutions(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    before = copy.deepcopy(module.state_dict())
    flat_module = flat_module_of(module)
    storage = flat_module.params.untyped_storage().data_ptr()
    assert {p.untyped_storage().data_ptr() for p in module.parameters()} == {storage}
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    flat_module.params.add_(1.0)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name] + 1)
    flat_module.configure_optimizer(flat_gradient=True)
    flat_module.release()
    assert len({p.untyped_storage().data_ptr() for p in module.parameters()}) == len(before)
    flat_module.params.zero_()
    for name, value in module.named_parameters():
        assert torch.equal(value, before[name] + 1)
        assert value.is_contiguous()
        assert value.grad is None


def test_fit_leaves_an_ordinary_module(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    make_trainer().fit(module, federation(), FedProx())
    assert len({p.untyped_storage().data_ptr() for p in module.parameters()}) == 4
    assert "log" not in vars(module)
    module.loss(samples(4)).backward()
    torch.optim.Adam(module.parameters()).step()
    copy.deepcopy(module)


def test_buffers_put_in_place_of_others_count_as_buffers_written_to(make_trainer: MakeTrainer) -> None:
    written, replaced = Statistics(in_place=True), Statistics(in_place=False)
    replaced.load_state_dict(written.state_dict())
    for module in (written, replaced):
        make_trainer(max_rounds=3).fit(module, federation())
    for name, value in written.state_dict().items():
        torch.testing.assert_close(replaced.state_dict()[name], value, rtol=0, atol=1e-6, msg=name)
    assert written.batches > 0
    assert written.precise.dtype == torch.float64


@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_are_averaged_from_the_value_they_started_with(in_place: bool, make_trainer: MakeTrainer) -> None:
    """Check that nothing before the first round changes them."""
    data = federation(sizes=(4, 2))
    module = Statistics(in_place)
    make_trainer(max_rounds=1, clients_per_round=2).fit(module, data)
    x = data._given[0][0]
    expected = sum(len(rows) * 0.5 * x[rows].mean(0) for rows in data.client_indices) / 6
    torch.testing.assert_close(module.mean, expected, rtol=0, atol=1e-6)
    assert module.batches == 1


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0), DeviceM(local_beta=0)], ids=lambda a: a.name)
def test_tied_parameters_stay_tied_and_are_sent_once(algorithm: Any, make_trainer: MakeTrainer) -> None:
    module = Tied()
    by_hand = copy.deepcopy(module)
    trainer = make_trainer(max_rounds=1, clients_per_round=1)
    trainer.fit(module, federation(sizes=(4,)), algorithm)
    assert module.output.weight is module.hidden.weight
    assert trainer.callback_metrics["comm/uplink_bits"] == 32 * (4 * 3 + 4)
    by_hand.loss(samples(4)).backward()
    torch.optim.SGD(by_hand.parameters(), lr=0.1).step()
    np.testing.assert_allclose(vector(module), vector(by_hand), rtol=0, atol=1e-6)


def test_checkpoints_hold_tied_parameters_once(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    module = Tied()
    trainer = make_trainer(max_rounds=1, **keeps_files)
    trainer.fit(module, federation(), FedAvg())
    for name in ("checkpoints/last.ckpt", "model.ckpt"):
        state = torch.load(tmp_path / name, weights_only=True)["state_dict"]
        assert state["output.weight"].data_ptr() == state["hidden.weight"].data_ptr(), name
    first, last = Tied(), Tied()
    first.load_state_dict(state)
    assert equal_states(first.state_dict(), module.state_dict())
    make_trainer(max_rounds=2, **keeps_files).fit(last, federation(), FedAvg(), ckpt_path="last")
    assert last.output.weight is last.hidden.weight


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(), DeviceM()], ids=lambda a: a.name)
def test_frozen_parameters_are_neither_trained_nor_sent(algorithm: Any, make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    module.hidden.requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    trainer = make_trainer()
    trainer.fit(module, federation(), algorithm)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("hidden"), name
    assert trainer.callback_metrics["comm/uplink_bits"] == 3 * 32 * (4 * 2 + 2)
    assert trainer.callback_metrics["model/parameters"] == 26


FROZEN = (torch.uint8, torch.int8, torch.int64, torch.bool, torch.float16, torch.complex64)


def with_frozen(dtype: torch.dtype, module: Perceptron, optimizer: Callable[..., Any]) -> Perceptron:
    """Return the module with a frozen parameter of a dtype, as quantised layers pack their weights, in its optimiser, too."""
    module.register_parameter("packed", nn.Parameter(torch.tensor([0, 1]).to(dtype), requires_grad=False))
    module.configure = lambda m: optimizer(m.parameters(), lr=0.1)
    return module


@pytest.mark.parametrize(
    ("runner", "optimizer"),
    [("serial", torch.optim.SGD), ("stacked", torch.optim.SGD), ("serial", torch.optim.Adagrad)],
)
@pytest.mark.parametrize("dtype", FROZEN, ids=str)
def test_frozen_parameters_of_any_dtype_change_nothing(
    dtype: torch.dtype, runner: str, optimizer: Callable[..., Any], make_trainer: MakeTrainer
) -> None:
    plain, packed = (Perceptron(configure=lambda m: optimizer(m.parameters(), lr=0.1)) for _ in range(2))
    packed.load_state_dict(plain.state_dict())
    packed = with_frozen(dtype, packed, optimizer)
    before = packed.packed.clone()
    for module in (plain, packed):
        make_trainer(max_rounds=1, runner=runner).fit(module, federation())
    assert torch.equal(packed.packed, before)
    assert packed.packed.dtype == dtype
    for name, value in plain.state_dict().items():
        assert torch.equal(packed.state_dict()[name], value), name


@pytest.mark.parametrize("dtype", FROZEN[:4], ids=str)
def test_filters_of_a_module_with_packed_parameters_are_pruned(dtype: torch.dtype, make_trainer: MakeTrainer) -> None:
    module = with_frozen(dtype, Convolved(), torch.optim.SGD)
    trainer = make_trainer(callbacks=FilterPruning(rate=0.5, prune_epoch=1, importance="magnitude"))
    trainer.fit(module, federation())
    assert module.hidden.weight.shape == (2, 3, 1, 1)
    assert module.packed.dtype == dtype


class HalfUsed(Perceptron):
    """Module with a layer outside the loss."""

    def __init__(self) -> None:
        super().__init__(configure=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.5))
        self.unused = nn.Linear(2, 2)


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0), DeviceM(local_beta=0)], ids=lambda a: a.name)
def test_parameters_outside_the_loss_are_left_alone(algorithm: Any, make_trainer: MakeTrainer) -> None:
    """Compare with torch's optimisers, which skip parameters without a gradient, with or without weight decay."""
    module = HalfUsed()
    before = copy.deepcopy(module.unused.state_dict())
    make_trainer().fit(module, federation(), algorithm)
    for name, value in module.unused.state_dict().items():
        assert torch.equal(value, before[name])


class SometimesUsed(Perceptron):
    """Module that uses one layer only for large batches: on another client, or later in the round."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(3, 2)

    def loss(self, batch: Any) -> Tensor:
        extra = self.rare(batch[0]).square().mean() if len(batch[0]) > 2 else 0.0
        return super().loss(batch) + extra


@pytest.mark.parametrize("algorithm", [FedProx(mu=0), DeviceM(local_beta=0)], ids=lambda a: a.name)
@pytest.mark.parametrize("sizes", [(2, 4), (1, 2, 3, 6), (6, 2)])
def test_parameters_that_enter_the_loss_later_are_trained(
    sizes: tuple[int, ...], algorithm: Any, make_trainer: MakeTrainer
) -> None:
    average = SometimesUsed()
    other = copy.deepcopy(average)
    make_trainer(clients_per_round=len(sizes), max_rounds=3).fit(average, federation(sizes), FedAvg())
    make_trainer(clients_per_round=len(sizes), max_rounds=3).fit(other, federation(sizes), algorithm)
    np.testing.assert_allclose(vector(other), vector(average), rtol=0, atol=1e-6)


def test_frozen_parts_that_evaluate_keep_evaluating(make_trainer: MakeTrainer) -> None:
    """Compare with `L.Trainer`, which keeps the mode that the user gave each part."""

    class Backbone(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.BatchNorm1d(3).eval().requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert self.training
            assert not self.frozen.training
            return self.loss((self.frozen(batch[0]), batch[1]))

    make_trainer().fit(Backbone(), federation())


class Elsewhere(Perceptron):
    """Module whose optimiser has a parameter that is not the module's."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)


def test_what_no_message_would_carry_does_not_train(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"of shape \(3,\) that the"):
        make_trainer(max_rounds=3).fit(Elsewhere(), federation())


class Nothing(Perceptron):
    def __init__(self) -> None:
        super().__init__(configure=lambda m: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
        self.requires_grad_(False)


def two_optimizers(module: L.LightningModule) -> Any:
    return [torch.optim.SGD(p.parameters(), lr=0.1) for p in (module.hidden, module.output)], []


def test_modules_that_cannot_be_federated_are_refused(make_trainer: MakeTrainer) -> None:
    class Old(Perceptron):
        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Tensor:  # type: ignore[override]
            return self.loss(batch)

    with pytest.raises(UserError, match="its training_step takes optimizer_idx, which Lightning passed before 2"):
        make_trainer().fit(Old(), federation())

    class Manual(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def optimizer_step(self, *arguments: Any, **options: Any) -> None:
            pass

        def backward(self, loss: Tensor) -> None:
            loss.backward()

    with pytest.raises(UserError, match=r"Manual.*overrides backward, .*; it overrides optimizer_step"):
        make_trainer(runner="serial").fit(Manual(), federation())
    with pytest.raises(UserError, match="nothing to federate"):
        make_trainer().fit(Nothing(), federation())
    with pytest.raises(UserError, match=r"one optimizer.*got 2"):
        make_trainer().fit(Perceptron(configure=two_optimizers), federation())
    with pytest.raises(UserError, match=r"one optimizer.*got 0"):
        make_trainer().fit(Perceptron(configure=lambda m: None), federation())
    momentum = Perceptron(configure=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(UserError, match=r"DeviceM.*SGD with momentum 0\.9.*momentum 0"):
        make_trainer().fit(momentum, federation(), DeviceM())
    with pytest.raises(UserError, match=r"LightningModule, got Linear"):
        make_trainer().fit(nn.Linear(1, 1), federation())
    with pytest.raises(UserError, match=r"FederatedDataModule.*Federated"):
        make_trainer().fit(Perceptron(), L.LightningDataModule())


def test_parameters_of_several_dtypes_are_refused(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    module.output.double()
    with pytest.raises(
        UserError, match=r"parameters of one dtype, got torch.float32, torch.float64; .* module\.float\(\)"
    ):
        make_trainer().fit(module, federation())


def test_a_refused_second_fit_leaves_its_module_alone(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.fit(Perceptron(), federation())
    for refused in (Perceptron(configure=two_optimizers), Tied()):
        refused.configure = two_optimizers
        before = copy.deepcopy(refused.state_dict())
        with pytest.raises(UserError, match=r"one optimizer"):
            trainer.fit(refused, federation())
        assert all(torch.equal(value, before[name]) for name, value in refused.state_dict().items())


@pytest.mark.parametrize("cls", ELEMENTWISE, ids=lambda cls: cls.__name__)
def test_every_client_starts_with_a_fresh_optimiser(
    cls: type[torch.optim.Optimizer], make_trainer: MakeTrainer
) -> None:
    """Check that three clients with the same samples, one after the other, give the same model as one."""
    x, y = samples(1)
    moved = []
    for num_clients in (1, 3):
        torch.manual_seed(0)
        module = Perceptron(configure=lambda m: cls(m.parameters(), lr=0.01))  # type: ignore[call-arg]
        equal = x.repeat(4 * num_clients, 1), y.repeat(4 * num_clients, 1)
        data = federation(sizes=(4,) * num_clients, train=equal, batch_size=4)
        make_trainer(max_rounds=1, clients_per_round=num_clients, local_epochs=3).fit(module, data)
        moved.append(vector(module))
    np.testing.assert_allclose(moved[0], moved[1], rtol=0, atol=1e-6)


class Buffered(Perceptron):
    """Perceptron with one more buffer, which `training_step` replaces by `change(buffer)`."""

    def __init__(self, buffer: Tensor, change: Callable[[Tensor], Tensor | None] | None = None) -> None:
        super().__init__()
        self.register_buffer("seen", buffer)
        self.change = change

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.change is not None:
            self.seen = self.change(self.seen)  # type: ignore[assignment]
        return super().training_step(batch, batch_idx)


def longer(buffer: Tensor) -> Tensor:
    return torch.cat([buffer, buffer[:1]])


@pytest.mark.parametrize(
    ("buffer", "change", "now"),
    [
        (torch.zeros(2), longer, r"changed its shape to \(3,\)"),
        (torch.zeros(2), lambda buffer: buffer.resize_(3), r"changed its shape to \(3,\)"),
        (torch.zeros(2, dtype=torch.int64), longer, r"changed its shape to \(3,\)"),
        (torch.zeros(2), lambda buffer: None, "became None"),
    ],
    ids=["float", "in place", "integer", "none"],
)
def test_a_buffer_that_changes_its_shape_is_refused_by_name(
    make_trainer: MakeTrainer, buffer: Tensor, change: Any, now: str
) -> None:
    module = Buffered(buffer.clone(), change)
    data = federation(sizes=(4,), batch_size=4)
    with pytest.raises(UserError, match=rf"the buffer 'seen' of Buffered of shape \(2,\) {now}, but clients exchange"):
        make_trainer(runner="serial", clients_per_round=1).fit(module, data)
    assert torch.equal(module.seen, buffer)  # the server's, in its own memory again
    assert "log" not in vars(module)


@pytest.mark.parametrize("change", [None, lambda buffer: buffer + 1j])
def test_a_complex_buffer_is_refused_before_training(make_trainer: MakeTrainer, change: Any) -> None:
    steps = []
    module = Buffered(torch.zeros(2, dtype=torch.complex64), change)
    module.on_train_batch_start = lambda *batch: steps.append(1)  # type: ignore[method-assign,assignment]
    with pytest.raises(
        UserError, match=r"'seen' of Buffered is torch.complex64, but .*: keep torch.view_as_real of it"
    ):
        make_trainer().fit(module, federation())
    assert not steps


def test_a_lazy_layer_is_refused_until_it_has_run(make_trainer: MakeTrainer) -> None:
    module, data = Perceptron(), federation()
    module.lazy = nn.LazyLinear(3)  # type: ignore[assignment]
    with pytest.raises(
        UserError, match=r"'lazy.weight', 'lazy.bias' of Perceptron belong to lazy layers .*: call the module"
    ):
        make_trainer().fit(module, data)
    module.lazy(torch.zeros(1, 2))
    make_trainer().fit(module, data)
