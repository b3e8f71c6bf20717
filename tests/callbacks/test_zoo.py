"""Test the callbacks in a stock `L.Trainer` on a network of every family: each works, or refuses before training.

The whole networks of torchvision take minutes: `pytest -m slow`. Those of timm need it: `pytest -m thirdparty`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from zoo import NUM_CLASSES, SMALL, TIMM, WHOLE, ZOO, ZooModule

from lightning_fl import UserError
from lightning_fl.callbacks import (
    AdaptivePruning,
    CommunicationMeter,
    DynamicGates,
    FilterPruning,
    MagnitudePruning,
    SparseUpdates,
    TargetReached,
)
from lightning_fl.callbacks.pruning.adaptive_rate import AdaptiveRate
from lightning_fl.coding.top_k import positions_bits
from lightning_fl.gates import gates_of
from lightning_fl.pruning import load_pruned

NUM_STEPS = 4
"""Optimiser steps of a training: two in each of two epochs."""

NETWORKS = [pytest.param(name, marks=pytest.mark.slow if name in WHOLE else ()) for name in SMALL | WHOLE] + [
    pytest.param(name, marks=pytest.mark.thirdparty) for name in TIMM
]

NO_FILTERS = "no layer of ZooModule can lose filters"
NO_SECOND_DERIVATIVE = "the loss of ZooModule cannot be differentiated twice"
REFUSED = {  # all other callbacks work on all other networks
    "filters": dict.fromkeys(
        ["ConvNeXt", "Swin", "ViT", "LSTM", "convnext_tiny", "swin_t", "timm ConvNeXt", "timm ViT"], NO_FILTERS
    )
    | {"shufflenet_v2_x0_5": "torch-pruning cannot read the graph of ZooModule"},
    "adaptive rate": dict.fromkeys(["MobileNetV3", "ViT", "mobilenet_v3_small", "timm ViT"], NO_SECOND_DERIVATIVE),
    "gates": {"LSTM": "ZooModule has no convolution to gate"},
}


class Recorder(L.Callback):
    """Record the losses, and how many numbers each step changes."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.num_changed: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        self._before = [p.detach().clone() for p in pl_module.parameters()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *batch: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        changed = zip(self._before, pl_module.parameters(), strict=True)
        self.num_changed.append(sum(int((a != b).sum()) for a, b in changed if a.shape == b.shape))


def loader(name: str) -> DataLoader:
    x = torch.cat([images(name), images(name, seed=1)])
    return DataLoader(TensorDataset(x, torch.arange(4) % NUM_CLASSES), batch_size=2)


def images(name: str, seed: int = 2) -> Tensor:
    return torch.randn(2, 3, ZOO[name][1], ZOO[name][1], generator=torch.Generator().manual_seed(seed))


def module_of(name: str) -> ZooModule:
    return ZooModule(ZOO[name][0])


def size_of(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def train(trainer: L.Trainer, name: str, refused: str | None = None) -> ZooModule | None:
    """Train for two epochs and return the module; None if the callback refuses the module before the first step."""
    module, recorder = module_of(name), Recorder()
    trainer.callbacks.append(recorder)
    if refused is not None:
        with pytest.raises(UserError, match=refused):
            trainer.fit(module, loader(name))
        assert not recorder.losses
        return None
    trainer.fit(module, loader(name))
    assert len(recorder.losses) == NUM_STEPS
    assert all(abs(loss) < 1e6 for loss in recorder.losses)
    assert all(p.isfinite().all() for p in module.parameters())
    return module


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("importance", ["magnitude", pytest.param("feature_rank", marks=pytest.mark.slow)])
def test_networks_get_smaller_train_on_and_load_again(
    name: str, importance: Any, make_stock_trainer: Callable[..., L.Trainer], tmp_path: Path
) -> None:
    pruning = FilterPruning(0.4, prune_epoch=1, importance=importance, num_batches=1, batch_size=2)
    trainer = make_stock_trainer(callbacks=pruning)
    module = train(trainer, name, REFUSED["filters"].get(name))
    if module is not None:
        assert size_of(module) < size_of(module_of(name))
        assert_loads_again(trainer, module, name, tmp_path)


@pytest.mark.parametrize("name", NETWORKS)
def test_curvature_makes_networks_smaller(
    name: str, make_stock_trainer: Callable[..., L.Trainer], tmp_path: Path
) -> None:
    pruning = AdaptivePruning(prune_epoch=1, batch_size=2, lanczos_steps=2, rank_samples=2)
    trainer = make_stock_trainer(callbacks=pruning)
    refused = REFUSED["filters"].get(name) or REFUSED["adaptive rate"].get(name)
    module = train(trainer, name, refused)
    if module is not None:
        is_smaller = any(
            trainer.callback_metrics[x] > 0.5 for x in trainer.callback_metrics if x.startswith("prune/rate/")
        )
        assert size_of(module) < size_of(module_of(name)) or not is_smaller
        assert_loads_again(trainer, module, name, tmp_path)


def assert_loads_again(trainer: L.Trainer, module: ZooModule, name: str, folder: Path) -> None:
    trainer.save_checkpoint(folder / "pruned.ckpt", weights_only=True)
    loaded = load_pruned(ZooModule, folder / "pruned.ckpt", build=ZOO[name][0])
    assert size_of(loaded) == size_of(module)
    assert torch.equal(loaded.eval()(images(name)), module.eval()(images(name)))


ADAPTIVE = AdaptiveRate(batch_size=2, lanczos_steps=2)
"""Rate that a few small networks are enough for: `AdaptivePruning` above asks it of all."""


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        *(pytest.param(*name.values, 0.5, marks=name.marks) for name in NETWORKS),
        *(
            pytest.param(*name.values, ADAPTIVE, marks=name.marks)
            for name in NETWORKS
            if name.marks or name.values[0] in ("DenseNet", "MobileNetV3", "LSTM")
        ),
    ],
    ids=lambda given: None if isinstance(given, str) else "fixed" if given == 0.5 else "adaptive",
)
def test_weights_become_zero_and_stay_zero(name: str, rate: Any, make_stock_trainer: Callable[..., L.Trainer]) -> None:
    trainer = make_stock_trainer(callbacks=MagnitudePruning(rate, prune_epoch=1))
    module = train(trainer, name, REFUSED["adaptive rate"].get(name) if rate != 0.5 else None)
    if module is not None:
        num_zeros = sum(int((p == 0).sum()) for p in module.parameters())
        pruned = size_of(module) - int(trainer.callback_metrics["prune/kept"])
        assert pruned <= num_zeros + 1e-6 * size_of(module)  # Lightning keeps what is logged as float32
        assert pruned > 0 or rate != 0.5
        fresh = module_of(name)
        fresh.load_state_dict(module.state_dict())
        assert torch.equal(fresh.eval()(images(name)), module.eval()(images(name)))


@pytest.mark.parametrize("name", NETWORKS)
def test_updates_are_sparse_and_all_bytes_are_counted(name: str, make_stock_trainer: Callable[..., L.Trainer]) -> None:
    sparse, meter = SparseUpdates(alpha=0.1), CommunicationMeter()
    target = TargetReached(1e6, monitor="train/loss", mode="min", stop=False)
    trainer = make_stock_trainer(callbacks=[sparse, meter, target])
    module = train(trainer, name)
    assert module is not None
    size = size_of(module)
    kept = int(0.1 * size)
    changed = next(callback for callback in trainer.callbacks if isinstance(callback, Recorder)).num_changed
    assert 0 < max(changed) <= kept
    assert sparse.sent_bits == NUM_STEPS * (3 * 32 * kept + positions_bits(kept, size))
    gradients = sum(p.numel() for p in module.parameters() if p in trainer.optimizers[0].state)
    assert meter.sent_bits == NUM_STEPS * 32 * gradients
    assert target.reached is not None
    assert (target.reached["epoch"], target.reached["step"]) == (0, NUM_STEPS // 2)
    # The callback reads a logged value, which Lightning keeps as float32.
    assert target.reached["comm/total_uplink_bytes"] == pytest.approx(meter.sent_bits / 2 / 8, rel=1e-6)


@pytest.mark.parametrize("name", NETWORKS)
def test_gates_train_and_resume(name: str, make_stock_trainer: Callable[..., L.Trainer], tmp_path: Path) -> None:
    trainer = make_stock_trainer(callbacks=DynamicGates(keep=0.5))
    module = train(trainer, name, REFUSED["gates"].get(name))
    if module is not None:
        assert gates_of(module)
        trainer.save_checkpoint(tmp_path / "gated.ckpt")
        resumed, other = make_stock_trainer(max_epochs=3, callbacks=DynamicGates(keep=0.5)), module_of(name)
        resumed.fit(other, loader(name), ckpt_path=tmp_path / "gated.ckpt")
        assert resumed.global_step == NUM_STEPS + 2
        assert all(p.isfinite().all() for p in other.parameters())
