"""Test the callbacks in every way in which a stock `L.Trainer` trains: they work, or refuse before training.

The ways are accumulation, mixed precision, manual optimisation with one optimiser and with two, a resumed training, and DDP.
"""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import processes
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from zoo import NUM_CLASSES, ZOO, ZooModule

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

MakeStock = Callable[..., L.Trainer]

CALLBACKS: dict[str, Callable[[], L.Callback]] = {
    "FilterPruning": lambda: FilterPruning(0.4, prune_epoch=1, num_batches=1, batch_size=2),
    "AdaptivePruning": lambda: AdaptivePruning(
        prune_epoch=1, rate_mode="fixed", rate=0.5, batch_size=2, rank_samples=2
    ),
    "MagnitudePruning": lambda: MagnitudePruning(0.5, prune_epoch=1),
    "AdaptiveRate": lambda: MagnitudePruning(AdaptiveRate(batch_size=2, lanczos_steps=2), prune_epoch=1),
    "SparseUpdates": lambda: SparseUpdates(alpha=0.1),
    "CommunicationMeter": lambda: CommunicationMeter(),
    "DynamicGates": lambda: DynamicGates(keep=0.5, penalty=0),
    "TargetReached": lambda: TargetReached(1e6, monitor="train/loss", mode="min", stop=False),
}
WAYS = ("accumulation", "bf16-mixed", "manual optimisation", "two optimisers", "resumed")
NO_FILTERS = "can lose filters"
NO_SECOND_DERIVATIVE = "cannot be differentiated twice"
REFUSED = {
    **{
        (callback, network): NO_FILTERS
        for callback in ("FilterPruning", "AdaptivePruning")
        for network in ("LSTM", "ViT")
    },
    ("AdaptiveRate", "ViT"): NO_SECOND_DERIVATIVE,
    ("DynamicGates", "LSTM"): "no convolution to gate",
}
REFUSED_UNDER_MANUAL_OPTIMISATION = {"AdaptiveRate": "steps its optimisers itself"}
REFUSED_UNDER_DDP = dict.fromkeys(["FilterPruning", "AdaptivePruning"], "which needs constant shapes")
NETWORKS = ["U-Net", *(pytest.param(name, marks=pytest.mark.slow) for name in ("LSTM", "ViT"))]
NUM_BATCHES = 4
"""Batches of each of two epochs; half as many steps with accumulation."""


class Logged(ZooModule):
    """Module that logs its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        return loss


class Manual(Logged):
    """Module that steps its optimisers itself; each has its share of the parameters."""

    def __init__(self, build: Callable[[], torch.nn.Module], num_optimizers: int) -> None:
        super().__init__(build)
        self.automatic_optimization = False
        self.num_optimizers = num_optimizers

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [torch.optim.Adam(parameters[i :: self.num_optimizers], lr=1e-3) for i in range(self.num_optimizers)]


class Counts(L.Callback):
    """Callback that counts the batches, and keeps the most numbers that a batch has changed."""

    def __init__(self) -> None:
        self.num_batches, self.most_changed = 0, 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        self.before = vector(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        self.num_batches += 1
        self.most_changed = max(self.most_changed, int((vector(pl_module) != self.before).sum()))


def vector(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def loader(network: str) -> DataLoader:
    height, num_samples = ZOO[network][1], 2 * NUM_BATCHES
    x = torch.randn(num_samples, 3, height, height, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(x, torch.arange(num_samples) % NUM_CLASSES), batch_size=2)


def train_anew(
    callback: str, network: str, way: str, make: MakeStock, folder: Path
) -> tuple[L.Trainer, L.LightningModule]:
    """Train for two epochs in one of the ways."""
    build = ZOO[network][0]
    flags: dict[str, Any] = {"callbacks": [CALLBACKS[callback](), Counts()]}
    if way in ("manual optimisation", "two optimisers"):
        module: L.LightningModule = Manual(build, 1 + (way == "two optimisers"))
    else:
        module = Logged(build)
        flags |= {"accumulation": {"accumulate_grad_batches": 2}, "bf16-mixed": {"precision": way}}.get(way, {})
    path = None
    if way == "resumed":
        first = make(max_epochs=1, callbacks=CALLBACKS[callback]())
        first.fit(Logged(build), loader(network))
        first.save_checkpoint(path := folder / "first.ckpt")
    trainer = make(**flags)
    trainer.fit(module, loader(network), ckpt_path=path)
    return trainer, module


def check(callback: str, network: str, trainer: L.Trainer, module: L.LightningModule, num_steps: int) -> None:
    """Check that training goes on with what the callback is for, on finite weights."""
    found, before = trainer.callbacks[0], Logged(ZOO[network][0])
    params, size = vector(module), len(vector(before))
    shares = [sum(p.numel() for g in o.param_groups for p in g["params"]) for o in trainer.optimizers]
    assert params.isfinite().all()
    if callback in ("FilterPruning", "AdaptivePruning"):
        assert len(params) < size
    elif isinstance(found, MagnitudePruning):
        pruned = size - int(trainer.callback_metrics["prune/kept"])
        assert 0 < pruned <= int((params == 0).sum())
    elif isinstance(found, SparseUpdates):
        kept = [int(0.1 * share) for share in shares]
        step_batches = [96 * k + positions_bits(k, share) for k, share in zip(kept, shares, strict=True)]
        assert found.sent_bits == num_steps * sum(step_batches)
        assert 0 < trainer.callbacks[1].most_changed <= sum(kept)
    elif isinstance(found, CommunicationMeter):
        assert found.sent_bits == num_steps * 32 * size * trainer.world_size
    elif callback == "DynamicGates":
        assert gates_of(module)
    else:
        assert isinstance(found, TargetReached)
        assert found.reached is not None
        assert found.reached["epoch"] == 0
    assert not torch.equal(params, vector(before))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("callback", CALLBACKS)
@pytest.mark.sampled(4)
def test_every_way_of_training(
    callback: str, way: str, network: str, make_stock_trainer: MakeStock, tmp_path: Path
) -> None:
    reason = REFUSED_UNDER_MANUAL_OPTIMISATION.get(callback) if "optimis" in way else None
    reason = reason or REFUSED.get((callback, network))
    if reason is not None:
        with pytest.raises(UserError, match=reason):
            train_anew(callback, network, way, make_stock_trainer, tmp_path)
        return
    trainer, module = train_anew(callback, network, way, make_stock_trainer, tmp_path)
    num_resumed = NUM_BATCHES if way == "resumed" else 0
    assert trainer.callbacks[1].num_batches == 2 * NUM_BATCHES - num_resumed
    check(callback, network, trainer, module, NUM_BATCHES if way == "accumulation" else 2 * NUM_BATCHES)
    if way == "resumed":
        _, whole = train_anew(callback, network, "whole", make_stock_trainer, tmp_path)
        torch.testing.assert_close(vector(module), vector(whole), rtol=0, atol=0)


TOGETHER: list[Callable[[], L.Callback]] = [
    CALLBACKS["FilterPruning"],
    lambda: MagnitudePruning(0.3, prune_epoch=0),
    lambda: SparseUpdates(0.2, error_feedback=True),
]


@pytest.mark.parametrize(
    "makers",
    [
        *([CALLBACKS[name]] for name in ("FilterPruning", "AdaptivePruning", "MagnitudePruning", "AdaptiveRate")),
        TOGETHER,
    ],
    ids=["FilterPruning", "AdaptivePruning", "MagnitudePruning", "AdaptiveRate", "together"],
)
def test_prunes_in_a_training_that_is_resumed_at_the_last_step_of_the_epoch_before(
    makers: list[Callable[[], L.Callback]], make_stock_trainer: MakeStock, tmp_path: Path
) -> None:
    # Lightning then begins the next epoch without `on_train_epoch_start`.
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=NUM_BATCHES, save_top_k=-1)
    first = make_stock_trainer(callbacks=[*(make() for make in makers), saving], enable_checkpointing=True)
    whole, module = (Logged(ZOO["U-Net"][0]) for _ in range(2))
    first.fit(whole, loader("U-Net"))
    trainer = make_stock_trainer(callbacks=[make() for make in makers])
    trainer.fit(module, loader("U-Net"), ckpt_path=tmp_path / f"step={NUM_BATCHES}.ckpt")
    assert trainer.callback_metrics["prune/rate"] == first.callback_metrics["prune/rate"] > 0
    torch.testing.assert_close(vector(module), vector(whole), rtol=0, atol=0)


def test_a_checkpoint_within_an_epoch_has_masks_that_filter_pruning_has_cut(
    make_stock_trainer: MakeStock, tmp_path: Path
) -> None:
    def callbacks() -> list[L.Callback]:
        return [MagnitudePruning(0.3, prune_epoch=0), FilterPruning(0.4, prune_epoch=1, importance="magnitude")]

    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    first = make_stock_trainer(callbacks=[*callbacks(), saving], enable_checkpointing=True)
    first.fit(Logged(ZOO["U-Net"][0]), loader("U-Net"))
    module, trainer = Logged(ZOO["U-Net"][0]), make_stock_trainer(callbacks=callbacks())
    trainer.fit(module, loader("U-Net"), ckpt_path=tmp_path / f"step={NUM_BATCHES + 2}.ckpt")
    assert trainer.callback_metrics["prune/kept"] == first.callback_metrics["prune/kept"] < len(vector(module))


def train_in_two_processes(folder: Path) -> None:
    """Train with every callback and network in one of two processes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    make = functools.partial(
        L.Trainer, max_epochs=2, devices=2, strategy="ddp", enable_checkpointing=False, default_root_dir=folder, **quiet
    )
    for callback in CALLBACKS:
        for network in ("U-Net", "LSTM", "ViT"):
            reason = REFUSED_UNDER_DDP.get(callback) or REFUSED.get((callback, network))
            if reason is not None:
                with pytest.raises(UserError, match=reason):
                    train_anew(callback, network, "in processes", make, folder)
                continue
            trainer, module = train_anew(callback, network, "in processes", make, folder)
            check(callback, network, trainer, module, NUM_BATCHES)
            copies = [torch.empty_like(vector(module)) for _ in range(2)]
            torch.distributed.all_gather(copies, vector(module))
            assert torch.equal(*copies), (callback, network)


@pytest.mark.process
def test_two_processes_stay_alike(tmp_path: Path) -> None:
    processes.run(train_in_two_processes, tmp_path, num_processes=2)
