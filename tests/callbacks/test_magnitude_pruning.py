"""Test unstructured pruning in an ordinary Trainer: which weights are pruned, that they stay 0, and checkpoints."""

import copy
from collections.abc import Callable
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import reordered

from lightning_fl import UserError
from lightning_fl.callbacks import MagnitudePruning
from lightning_fl.modules.networks import resnet18
from lightning_fl.pruning import largest, masks_of, prunable

MakeTrainer = Callable[..., L.Trainer]
Configure = Callable[[Any], torch.optim.Optimizer]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


class Net(L.LightningModule):
    def __init__(self, optimizer: Configure = momentum) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.seen.append(nonzero(self))
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def nonzero(module: Net) -> int:
    """Return the number of nonzero parameters of the linear layers."""
    return sum(int((p != 0).sum()) for layer in (module.net[0], module.net[3]) for p in layer.parameters())


def loader(num: int = 40) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, 6, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :2].tanh()), batch_size=8)


NUMBERS = 8 * 6 + 8 + 2 * 8 + 2  # of the linear layers; batch normalisation has 16 more


@pytest.mark.parametrize("optimizer", [momentum, adam])
@pytest.mark.parametrize("flags", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_the_smallest_go_and_stay_away(
    optimizer: Configure, flags: dict[str, Any], make_stock_trainer: MakeTrainer
) -> None:
    torch.manual_seed(0)
    module = Net(optimizer)
    trainer = make_stock_trainer(max_epochs=5, callbacks=MagnitudePruning(rate=0.6, prune_epoch=2), **flags)
    trainer.fit(module, loader())
    kept = NUMBERS - ceil(Fraction(6, 10) * NUMBERS) - 1
    assert set(module.seen[:10]) == {NUMBERS}
    assert set(module.seen[10:]) == {kept}
    assert nonzero(module) == kept
    assert trainer.callback_metrics["prune/kept"] == kept + 16
    assert trainer.callback_metrics["prune/rate"] == pytest.approx(1 - kept / NUMBERS)
    assert masks_of(module) == {}
    state = trainer.optimizers[0].state
    for parameter in module.parameters():
        for value in state[parameter].values():
            assert value.shape != parameter.shape or parameter.dim() < 2 or not value[parameter == 0].any()


@pytest.mark.parametrize("optimizer", [momentum, adam])
def test_resumed_equals_uninterrupted(optimizer: Configure, make_stock_trainer: MakeTrainer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    start = Net(optimizer)
    saves = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole = copy.deepcopy(start)
    make_stock_trainer(max_epochs=5, callbacks=[MagnitudePruning(prune_epoch=1), saves], enable_checkpointing=True).fit(
        whole, loader()
    )
    saved = torch.load(tmp_path / "epoch=2.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == start.state_dict().keys()
    for epoch in (0, 2):
        resumed = Net(optimizer)
        trainer = make_stock_trainer(max_epochs=5, callbacks=MagnitudePruning(prune_epoch=1))
        trainer.fit(resumed, loader(), ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
        for name, value in whole.state_dict().items():
            assert torch.equal(value, resumed.state_dict()[name]), (epoch, name)
    assert nonzero(whole) == 36


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_training_resumed_in_the_middle_of_an_epoch_stays_pruned(
    epoch: int, make_stock_trainer: MakeTrainer, tmp_path: Path
) -> None:
    saves = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    pruning = MagnitudePruning(rate=0.6, prune_epoch=epoch)
    make_stock_trainer(callbacks=[pruning, saves], enable_checkpointing=True).fit(Net(), loader())
    resumed, done = Net(), 5 * epoch + 2
    trainer = make_stock_trainer(callbacks=MagnitudePruning(rate=0.6, prune_epoch=epoch))
    trainer.fit(resumed, loader(), ckpt_path=tmp_path / f"step={done}.ckpt")
    assert len(resumed.seen) == 10 - done
    assert {*resumed.seen, nonzero(resumed)} == {NUMBERS - ceil(Fraction(6, 10) * NUMBERS) - 1}


def test_an_interrupted_training_leaves_an_ordinary_module(make_stock_trainer: MakeTrainer) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.current_epoch == 1:
                raise RuntimeError("simulated failure")
            return super().training_step(batch, batch_idx)

    module, pruning = Fails(), MagnitudePruning(prune_epoch=0)
    with pytest.raises(RuntimeError, match="simulated failure"):
        make_stock_trainer(callbacks=pruning).fit(module, loader())
    module.net(torch.randn(4, 6)).sum().backward()
    assert all((p.grad != 0).any() for p in module.parameters() if p.dim() > 1)
    assert (module.net[0].weight.grad[module.net[0].weight == 0] != 0).any()
    # The same callback starts afresh with another module.
    other = Net()
    make_stock_trainer(max_epochs=1, callbacks=pruning).fit(other, loader())
    assert nonzero(other) == NUMBERS - NUMBERS // 2 - 1


def test_a_weight_that_two_layers_share_is_pruned_and_counted_once(make_stock_trainer: MakeTrainer) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net.append(nn.Linear(2, 2, bias=False))
            self.net.append(nn.Linear(2, 2, bias=False))
            self.net[5].weight = self.net[4].weight

    module = Tied()
    trainer = make_stock_trainer(max_epochs=1, callbacks=MagnitudePruning(rate=0.5, prune_epoch=0))
    trainer.fit(module, loader())
    numbers = NUMBERS + 4
    assert nonzero(module) + int((module.net[4].weight != 0).sum()) == numbers - numbers // 2 - 1
    assert trainer.callback_metrics["prune/rate"] == pytest.approx((numbers // 2 + 1) / numbers)
    assert list(prunable(module, ["4"])) == ["net.0", "net.3"], "what one excluded layer has stays whole"


@pytest.mark.parametrize("frozen", [[0], [0, 3]])
def test_pruned_layers_may_be_frozen_later(frozen: list[int], make_stock_trainer: MakeTrainer) -> None:
    class Freezes(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
            for layer in frozen if trainer.current_epoch == 1 else []:
                pl_module.net[layer].requires_grad_(False)

    module = Net()
    pruning = MagnitudePruning(rate=0.5, prune_epoch=0, every_n_epochs=2)
    trainer = make_stock_trainer(max_epochs=4, callbacks=[Freezes(), pruning])
    trainer.fit(module, loader())
    left = {layer: sum(int((p != 0).sum()) for p in module.net[layer].parameters()) for layer in (0, 3)}
    assert nonzero(module) <= NUMBERS - NUMBERS // 2 - 1
    assert trainer.callback_metrics["prune/rate"] == pytest.approx(1 - nonzero(module) / NUMBERS)
    assert trainer.callback_metrics["prune/kept"] == 16 + sum(left[layer] for layer in (0, 3) if layer not in frozen)


def test_pruning_again_takes_a_share_of_what_is_left(make_stock_trainer: MakeTrainer) -> None:
    module = Net()
    pruning = MagnitudePruning(rate=0.5, prune_epoch=1, every_n_epochs=2)
    make_stock_trainer(max_epochs=6, callbacks=pruning).fit(module, loader())
    left = NUMBERS
    for epoch in range(6):
        if epoch in (1, 3, 5):
            left -= ceil(left / 2) + 1
        assert set(module.seen[5 * epoch : 5 * epoch + 5]) == {left}


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 2, 2)])
def test_a_mask_of_weights_in_another_order_is_that_of_the_same_numbers(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for rate in (0.5, 0.99):  # the second leaves one number
        plain, other = (largest({"weight": x}, rate)["weight"] for x in (weight, reordered({"": weight})[""]))
        assert torch.equal(other, plain)


def test_scopes() -> None:
    tensors = {"small": torch.tensor([[0.1, 0.2, 0.3, 0.4]]), "large": torch.tensor([[10.0, 20.0], [30.0, 40.0]])}
    assert {name: int(mask.sum()) for name, mask in largest(tensors, 0.5).items()} == {"small": 1, "large": 3}
    assert {name: int(largest({name: x}, 0.5)[name].sum()) for name, x in tensors.items()} == {"small": 1, "large": 1}


def test_ties_that_prune_more_than_the_rate_are_said(recwarn: pytest.WarningsRecorder) -> None:
    trained = torch.arange(1.0, 11.0).view(1, -1)
    largest({"weight": trained}, 0.5)
    assert not [one for one in recwarn if "are pruned instead of" in str(one.message)]
    with pytest.warns(
        UserWarning, match=r"45.0% of the weights are pruned instead of 10.0%, .* same magnitude 0: exclude"
    ):
        largest({"weight": trained, "lora": torch.zeros(1, 10)}, 0.1)


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=30), st.integers(0, 99))
def test_keeps_what_is_above_the_threshold_and_one_at_least(values: list[int], percent: int) -> None:
    x = torch.tensor(values, dtype=torch.float32).view(1, -1)
    mask = largest({"weight": x}, percent / 100)["weight"]
    magnitudes = sorted(abs(value) for value in values)
    threshold = magnitudes[min(ceil(Fraction(percent, 100) * len(values)), len(values) - 1)]
    above = [abs(value) > threshold for value in values]
    if percent == 0:
        assert mask.all()
    elif any(above):
        assert mask.flatten().tolist() == above
    else:
        assert int(mask.sum()) == 1
        assert abs(x[mask].item()) == magnitudes[-1]


def test_normalisation_and_the_convolutions_beside_residual_blocks_stay_whole() -> None:
    layers = prunable(resnet18(), ("shortcut", "downsample"))
    names = [name for own in layers.values() for name in own]
    assert len(layers) == 18, "seventeen convolutions and the last layer"
    assert not any("bn" in name or "shortcut" in name for name in names)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate": 1.0}, r"\[0, 1\), got 1.0"),
        ({"rate": -0.1}, r"\[0, 1\), got -0.1"),
        ({"prune_epoch": -1}, "got -1"),
        ({"every_n_epochs": 0}, "None to prune once, must be a whole number of at least 1, got 0"),
        ({"scope": "globl"}, "did you mean 'global'"),
    ],
)
def test_values_outside_their_range_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MagnitudePruning(**given)


def test_layers_are_excluded_by_whole_parts_of_their_names(make_stock_trainer: MakeTrainer) -> None:
    module = Net()
    make_stock_trainer(max_epochs=1, callbacks=MagnitudePruning(prune_epoch=0, exclude="3")).fit(module, loader())
    assert bool((module.net[0].weight == 0).any())
    assert all(bool((p != 0).all()) for p in module.net[3].parameters())
    with pytest.raises(
        UserError, match=r"exclude='nett' is a whole part of no layer's name in Net; did you mean 'net'"
    ):
        make_stock_trainer(callbacks=MagnitudePruning(exclude=["3", "nett"])).fit(Net(), loader())


def averaged(averaging: L.Callback, make_stock_trainer: MakeTrainer, first: bool = False, **given: Any) -> int:
    """Return the number of nonzero parameters of a network whose averaged weights are pruned; an epoch has 5 steps."""
    module = Net()
    module.net[1] = nn.Identity()
    pruning = MagnitudePruning(**{"rate": 0.5, "prune_epoch": 1, **given})
    callbacks = [averaging, pruning] if first else [pruning, averaging]
    make_stock_trainer(max_epochs=3, callbacks=callbacks).fit(module, loader())
    return nonzero(module)


@pytest.mark.parametrize(
    ("averaging", "given"),
    [
        (lambda: WeightAveraging(), {}),
        (lambda: EMAWeightAveraging(), {"prune_epoch": 0, "every_n_epochs": 1}),
        (lambda: EMAWeightAveraging(update_starting_at_step=4), {}),
        (lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1), {}),
        (lambda: StochasticWeightAveraging(0.01, swa_epoch_start=2), {"first": True}),
    ],
)
def test_averages_of_weights_from_before_the_pruning_are_refused(
    averaging: Callable[[], L.Callback], given: dict[str, Any], make_stock_trainer: MakeTrainer
) -> None:
    name = type(averaging()).__name__
    with pytest.raises(UserError, match=f"MagnitudePruning cannot prune the averaged weights that {name} keeps"):
        averaged(averaging(), make_stock_trainer, **given)


@pytest.mark.parametrize(
    ("averaging", "given"),
    [
        (lambda: WeightAveraging(), {"prune_epoch": 0}),
        (lambda: EMAWeightAveraging(update_starting_at_step=5), {}),
        (lambda: StochasticWeightAveraging(0.01, swa_epoch_start=2), {}),
        (lambda: StochasticWeightAveraging(0.01, swa_epoch_start=3), {"first": True}),
    ],
)
def test_averages_from_the_pruning_on_are_pruned(
    averaging: Callable[[], L.Callback], given: dict[str, Any], make_stock_trainer: MakeTrainer
) -> None:
    assert averaged(averaging(), make_stock_trainer, **given) == NUMBERS - NUMBERS // 2 - 1


@pytest.mark.parametrize("given", [{"rate": 0.0}, {"prune_epoch": 3}])
def test_averages_of_a_network_that_is_not_pruned_are_allowed(
    given: dict[str, Any], make_stock_trainer: MakeTrainer
) -> None:
    assert averaged(EMAWeightAveraging(), make_stock_trainer, **given) == NUMBERS


def test_a_pruning_that_never_comes_and_one_of_nothing(make_stock_trainer: MakeTrainer) -> None:
    with pytest.warns(
        UserWarning, match="MagnitudePruning would prune after 30 epochs, but the run ends after 1 epochs"
    ):
        make_stock_trainer(max_epochs=1, callbacks=MagnitudePruning()).fit(Net(), loader())
    with pytest.raises(UserError, match="Net has no weight to prune"):
        make_stock_trainer(callbacks=MagnitudePruning(exclude=["net"])).fit(Net(), loader())
