"""Federate other people's modules and data, unchanged: `pip install -e '.[thirdparty]' && pytest -m thirdparty`."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from projects import BATCH_SIZE, PROJECTS, Loaders, Project
from quiet import QUIET
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import Algorithm, FedAdamSSM, FedAvg, FedLDF, FedProx
from lightning_fl.checks import overrides
from lightning_fl.coding.top_k import positions_bits
from lightning_fl.data import Federated
from lightning_fl.data.wrapped_datamodule import BATCH_HOOKS
from lightning_fl.groups import layer_groups

pytestmark = pytest.mark.thirdparty

ROUNDS, NUM_CLIENTS, COHORT, SENDERS, ALPHA = 2, 4, 3, 2, 0.05
ON_STEP = {"kl_weight", "train_loss", "train_loss_step", "train_loss_ssl"}
"""Values that modules log on step."""
METHODS: dict[str, tuple[Callable[[], Algorithm], str]] = {  # and the clients' optimiser
    "FedAvg": (FedAvg, "module"),
    "FedProx": (lambda: FedProx(mu=0.1), "module"),
    "FedLDF": (lambda: FedLDF(n=SENDERS), "module"),
    "FedAdamSSM": (lambda: FedAdamSSM(alpha=ALPHA), "sgd"),
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some packages write to the present folder."""
    monkeypatch.chdir(tmp_path)


class SameDraws(L.Callback):
    """Seed the random numbers of each batch alike in all trainers, and record the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *batch: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *loader: int) -> None:
        torch.manual_seed(batch_idx)

    def of(self, lightning: Any) -> Any:
        """Return this callback for a trainer of either name of Lightning."""
        if lightning is L:
            return self
        hooks = ("on_train_batch_start", "on_train_batch_end", "on_validation_batch_start")
        return type("SameDraws", (lightning.Callback,), {name: staticmethod(getattr(self, name)) for name in hooks})()


def in_order(data: Any, order: list[int], name: Any) -> Any:
    """Return the data of a project for the same name of Lightning, with the training samples in the given order."""

    class InOrder(name.LightningDataModule):
        def setup(self, stage: str) -> None:
            data.trainer = self.trainer
            data.setup(stage)

        def train_dataloader(self) -> DataLoader:
            given = data.train_dataloader()
            samples, batches = Subset(given.dataset, order), given.batch_sampler or given.sampler
            batches_in_order = BatchSampler(SequentialSampler(samples), batches.batch_size, batches.drop_last)
            if given.batch_sampler is None:
                return DataLoader(samples, batch_size=None, sampler=batches_in_order, collate_fn=given.collate_fn)
            return DataLoader(samples, batch_sampler=batches_in_order, collate_fn=given.collate_fn)

        def val_dataloader(self) -> Any:
            return data.val_dataloader()

    for hook in BATCH_HOOKS:
        if overrides(hook, data):
            setattr(InOrder, hook, staticmethod(getattr(data, hook)))
    return InOrder()


def name_of(module: Any) -> Any:
    """Return the package of Lightning whose name a module uses."""
    return L if isinstance(module, L.LightningModule) else pytest.importorskip("pytorch_lightning")


def made(name: str) -> Project:
    torch.manual_seed(0)
    return PROJECTS[name]()


def changes(module: L.LightningModule, before: dict[str, Tensor]) -> dict[str, int]:
    """Return for each trainable parameter how many of its numbers have changed."""
    return {name: int((p != before[name]).sum()) for name, p in module.named_parameters() if p.requires_grad}


@cache
def trained_parameters(name: str) -> frozenset[str]:
    """Return the parameters that Lightning's trainer changes in an epoch; some modules do not use all of theirs."""
    module, data = made(name)
    before = copy.deepcopy(module.state_dict())
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    name_of(module).Trainer(accelerator="cpu", max_epochs=1, limit_val_batches=1, **quiet).fit(module, data)
    return frozenset(name for name, count in changes(module, before).items() if count)


@pytest.mark.parametrize("name", PROJECTS)
def test_one_client_is_a_stock_trainer(name: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Compare a round of one client that has all samples with an epoch of Lightning's trainer."""
    ours, data = made(name)
    stock, before = copy.deepcopy(ours), copy.deepcopy(ours.state_dict())
    federated, (draws, expected_draws) = Federated(data, num_clients=1), (SameDraws(), SameDraws())
    trainer = make_trainer(max_rounds=1, clients_per_round=1, callbacks=draws, num_sanity_val_steps=1)
    trainer.fit(ours, federated)
    indices = federated.client_indices[0]
    problem = oracle.Problem([indices], [indices], federated.batch_size, cohort_size=1, rounds=1)
    order = [int(index) for batch, _ in problem.batches(0, 0) for index in batch]
    lightning = name_of(stock)
    flags = {**QUIET, "default_root_dir": tmp_path, "max_epochs": 1, "num_sanity_val_steps": 1}
    stock_trainer = lightning.Trainer(callbacks=expected_draws.of(lightning), **flags)
    stock_trainer.fit(stock, in_order(data, order, lightning))

    assert any(changes(stock, before).values())
    assert draws.losses == pytest.approx(expected_draws.losses, rel=1e-5)
    for key, value in stock.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=0, atol=1e-5)
    # Values that a module logs on step only are those of the last step there, and of all steps here; and the batches of anomalib
    # are of a class in which Lightning takes a number of channels for the number of samples.
    steps = {key for key in stock_trainer.callback_metrics if key in ON_STEP or key.startswith("train_")}
    for key in stock_trainer.callback_metrics.keys() - steps:
        assert float(trainer.callback_metrics[key]) == pytest.approx(
            float(stock_trainer.callback_metrics[key]), rel=1e-5
        )


def test_loaders_that_order_samples_are_refused() -> None:
    molecules = made("chemprop MPNN").data.train_dataloader().dataset
    loader = pytest.importorskip("chemprop").data.build_dataloader(molecules, BATCH_SIZE, seed=0)
    with pytest.raises(UserError, match="has a SeededSampler"):
        Federated(Loaders(loader, loader), num_clients=2).setup()


def expected_bits(method: str, module: L.LightningModule) -> tuple[int, int]:
    """Return the bits of a round, up and down."""
    d = sum(p.numel() for p in module.parameters() if p.requires_grad)
    sizes = {key: buffer.numel() for key, buffer in module.named_buffers() if buffer.is_floating_point()}
    b, layers = sum(sizes.values()), layer_groups(module)
    if method == "FedLDF":
        of_layers = sum(sizes[key] for layer in layers for key in layer.buffers)
        sent = SENDERS * (d + of_layers) + COHORT * (b - of_layers + len(layers))
        return 32 * sent, COHORT * (32 * (d + b) + len(layers))
    if method == "FedAdamSSM":
        k = int(ALPHA * d)
        return COHORT * (32 * (3 * k + b) + positions_bits(k, d)), COHORT * 32 * (3 * d + b)
    return COHORT * 32 * (d + b), COHORT * 32 * (d + b)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", PROJECTS)
def test_methods_train_other_peoples_modules(name: str, method: str, make_trainer: MakeTrainer) -> None:
    module, data = made(name)
    before = copy.deepcopy(module.state_dict())
    make_algorithm, client_optimizer = METHODS[method]
    trainer = make_trainer(max_rounds=ROUNDS, clients_per_round=COHORT, client_optimizer=client_optimizer)
    trainer.fit(module, Federated(data, num_clients=NUM_CLIENTS), make_algorithm())

    assert all(value.isfinite().all() for value in module.state_dict().values())
    assert np.isfinite([float(value) for value in trainer.callback_metrics.values()]).all()
    counts = changes(module, before)
    changed = {key for key, count in counts.items() if count}
    if method == "FedAdamSSM":
        assert 0 < sum(counts.values()) <= ROUNDS * COHORT * int(ALPHA * trainer.run.layout.numel)
        assert changed <= trained_parameters(name)
    else:
        assert changed == trained_parameters(name)
    up, down = expected_bits(method, module)
    assert trainer.run.ledger.total_bytes("up") == ROUNDS * up / 8
    assert trainer.run.ledger.total_bytes("down") == ROUNDS * down / 8


class Stop(L.Callback):
    """Stop after two rounds of a longer run, whose length schedules depend on."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = trainer.current_epoch == 1


@pytest.mark.parametrize("name", PROJECTS)
def test_runs_resume_and_checkpoints_load(
    name: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    def fit(writes: bool, callbacks: Any = None, **options: Any) -> tuple[FederatedTrainer, L.LightningModule]:
        module, data = made(name)
        flags = keeps_files if writes else {}
        trainer = make_trainer(max_rounds=3, clients_per_round=COHORT, callbacks=callbacks, **flags)
        trainer.fit(module, Federated(data, num_clients=NUM_CLIENTS), **options)
        return trainer, module

    _, whole = fit(writes=False)
    assert fit(writes=True, callbacks=Stop())[0].run.round == 2
    trainer, module = fit(writes=True, ckpt_path="last", weights_only=False)
    assert trainer.run.round == 3
    other = made(name).module
    other.load_state_dict(torch.load(tmp_path / "model.ckpt", weights_only=False)["state_dict"])
    for key, value in whole.state_dict().items():
        assert torch.equal(module.state_dict()[key], value)
        assert torch.equal(other.state_dict()[key], value)
