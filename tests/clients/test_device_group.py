"""Test clients that several processes train together: the answer is that of one process, up to rounding."""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import processes
import pytest
import torch
from compared_runs import MakeTrainer
from hypothesis import given
from hypothesis import strategies as st
from roster import ROSTER, WHOLE, problem
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from toys import BATCH_SIZE, Normalised, Perceptron, Sizes, Statistics, federation, samples, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import SCAFFOLD
from lightning_fl.clients.device_group import DeviceGroup
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.data import Federated
from lightning_fl.features.loss_guard import LossGuard
from lightning_fl.features.privacy import AdaptiveClip, ClientPrivacy
from lightning_fl.trainer.build_runner import device_group


@pytest.mark.long
@given(st.integers(0, 40), st.integers(1, 7), st.integers(1, 2))
def test_shares_of_a_batch_are_a_partition_and_nearly_equal(num_samples: int, size: int, least: int) -> None:
    groups = [DeviceGroup(0, 1, rank, size, least) for rank in range(size)]
    shares = [list(range(num_samples))[group.rows(num_samples)] for group in groups]
    assert list(chain.from_iterable(shares)) == list(range(num_samples))
    lengths = [len(share) for share in shares]
    assert lengths == [group.num_rows(num_samples) for group in groups]
    sharing = [length for length in lengths if length]
    assert lengths == sharing + [0] * (size - len(sharing))
    assert max(sharing, default=0) - min(sharing, default=0) <= 1
    assert min(sharing, default=least) >= min(least, num_samples or least)
    assert len(sharing) == min(size, num_samples // least) or num_samples < least


def test_the_first_process_draws_as_one_alone_and_others_differ() -> None:
    first, *others = (DeviceGroup(0, 1, rank, 3).seeds([5, 7]) for rank in range(3))
    assert first == [5, 7]
    assert {order for order, _ in others} == {5}
    assert len({draws for _, draws in (first, *others)}) == 3


def trainer_of(folder: str, num_processes: int, together: int, **flags: Any) -> FederatedTrainer:
    """Return a trainer of several processes, of which some train each client together."""
    settings: dict[str, Any] = {
        "max_rounds": 3,
        "clients_per_round": 3,
        "local_epochs": 2,
        "accelerator": "cpu",
        "devices": num_processes,
        "devices_per_client": together,
        "default_root_dir": folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "runner": "serial",
        "precision": "64-true",
    }
    return FederatedTrainer(**settings | flags)


def fit_methods(folder: str, num_processes: int, together: int, names: Sequence[str]) -> None:
    """Fit methods of the roster; write how far their weights are from the oracles', and their bits and steps."""
    found = {}
    for name, entry in ((name, ROSTER[name]) for name in names):
        torch.manual_seed(0)
        module = Perceptron()
        expected = entry.oracle(problem(rounds=3, epochs=2, num_server=entry.num_server), vector(module))
        trainer = trainer_of(folder, num_processes, together, logger=False, enable_checkpointing=False)
        trainer.fit(module, entry.federation(), algorithm=entry.algorithm())
        bits = {way: trainer.run.ledger.bits(way) for way in ("up", "down")}
        found[name] = float(np.abs(vector(module) - expected).max()), bits, trainer.run.num_steps
    Path(folder, f"{trainer.global_rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("num_processes", "together", "names"),
    [
        pytest.param(2, 2, WHOLE, marks=pytest.mark.process),
        pytest.param(
            2, 1, [name for name in ROSTER if not ROSTER[name].algorithm().exchange.cuts], marks=pytest.mark.slow
        ),
        pytest.param(
            2, 2, [name for name in ROSTER if not ROSTER[name].algorithm().exchange.cuts], marks=pytest.mark.slow
        ),
        pytest.param(
            4, 2, [name for name in ROSTER if not ROSTER[name].algorithm().exchange.cuts], marks=pytest.mark.slow
        ),
    ],
)
def test_methods_match_their_oracles(num_processes: int, together: int, names: Sequence[str], tmp_path: Path) -> None:
    """Test divided clients, divided batches, and both; the toy's last batches have fewer samples than a group processes."""
    alone, several = tmp_path / "alone", tmp_path / "several"
    for folder, number, size in ((alone, 1, 1), (several, num_processes, together)):
        folder.mkdir()
        processes.run(fit_methods, str(folder), number, size, names, num_processes=number)
    expected = json.loads((alone / "0.json").read_text())
    for path in several.glob("*.json"):
        found = json.loads(path.read_text())
        assert list(found) == list(names)
        for name, (distance, *bits_and_steps) in found.items():
            assert distance < 1e-10, (name, path.name)
            assert bits_and_steps == expected[name][1:], (name, path.name)


class Logging(Statistics):
    """Module with buffers that logs means, a maximum, a sum, and values of a name of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/largest", batch[0].abs().amax(), reduce_fx="max")
        self.log("train/norm", batch[0].square().sum(1).mean())
        return loss


class Loaders(L.LightningDataModule):
    """Data module whose samples are read by a loader, one by one."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*samples(40)), batch_size=BATCH_SIZE, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*samples(10, seed=1)), batch_size=BATCH_SIZE)


FITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
    "stragglers": {"straggler_rate": 0.5, "loss_guard": LossGuard(clients=1.02)},
}


def fit_with_flags(folder: str, num_processes: int) -> None:
    """Fit with each of `FITS`, from tensors and from a dataset; write metrics and weights."""
    found = {}
    for name, flags in FITS.items():
        for data in (federation(), Federated(Loaders(), num_clients=6, partition=Sizes())):
            torch.manual_seed(0)
            module, kind = Logging(True).double(), type(data).__name__
            trainer = trainer_of(f"{folder}/{num_processes}/{name}/{kind}", num_processes, num_processes, **flags)
            trainer.fit(module, data, algorithm=SCAFFOLD())
            times = ("time/round_seconds",)
            metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k not in times}
            found[f"{name} {kind}"] = metrics, vector(module).tolist()
    unlogged: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    torch.manual_seed(0)
    module = Perceptron().double()
    private = ClientPrivacy(clip=AdaptiveClip(), noise_multiplier=0, sampling="every")
    trainer = trainer_of(folder, num_processes, num_processes, privacy=private, clients_per_round=6, **unlogged)
    trainer.fit(module, federation())
    bits = {f"{kind} {way}": x for way, kinds in trainer.run.ledger.total_bits.items() for kind, x in kinds.items()}
    found["adaptive clip"] = bits, vector(module).tolist()
    torch.manual_seed(0)
    module = Normalised().double()
    trainer = trainer_of(folder, num_processes, num_processes, **unlogged)
    trainer.fit(module, federation())
    found["batch normalisation"] = {}, [*vector(module).tolist(), *trainer.run.buffers.tolist()]
    Path(folder, f"{num_processes}-{trainer.global_rank}.json").write_text(json.dumps(found))


@pytest.mark.process
def test_clipping_accumulation_stragglers_logs_and_bits_are_those_of_one_process(tmp_path: Path) -> None:
    for num_processes in (1, 2):
        processes.run(fit_with_flags, str(tmp_path), num_processes, num_processes=num_processes)
    alone, *together = (json.loads((tmp_path / name).read_text()) for name in ("1-0.json", "2-0.json", "2-1.json"))
    normalised = [found.pop("batch normalisation")[1] for found in (alone, *together)]
    assert normalised[1] == normalised[2]
    assert np.abs(np.array(normalised[1]) - np.array(normalised[0])).max() > 1e-4, "each share is normalised by itself"
    assert normalised[1] == pytest.approx(normalised[0], abs=0.2)
    for found in together:
        assert found.keys() == alone.keys()
        for name, (metrics, weights) in found.items():
            assert metrics == pytest.approx(alone[name][0], rel=1e-9), name
            assert weights == pytest.approx(alone[name][1], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"devices_per_client": 3}, "devices_per_client is 3, which does not divide the run's processes, .* are 4"),
        ({"batch_size": 1}, "is 2, more than the 1 of data.batch_size, the samples that a group would share"),
        ({"runner": "stacked"}, "is 2, and runner 'stacked' trains several clients on one device: use one"),
        ({"is_manual": True}, r"is 2, but Perceptron makes its steps itself \(automatic_optimization is False\)"),
    ],
)
def test_groups_that_cannot_be_are_refused(flags: dict[str, Any], said: str) -> None:
    given = {"devices_per_client": 2, "world_size": 4, "runner": "auto", "batch_size": 4, "is_manual": False} | flags
    trainer: Any = SimpleNamespace(**given, active_module=SimpleNamespace(**given), lightning_module=Perceptron())
    with pytest.raises(UserError, match=said):
        device_group(trainer, LocalSchedule(given["batch_size"], 1, None))


def test_more_processes_for_a_client_than_there_are_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"does not divide the run's processes, of which .* are 1"):
        make_trainer(devices_per_client=2).fit(Perceptron(), federation())


def plan_and_fit(folder: str, num_processes: int) -> None:
    """Write the bytes and steps of a plan and of the run."""
    trainer = trainer_of(folder, num_processes, num_processes, logger=False, enable_checkpointing=False)
    plan = trainer.plan(Perceptron(), federation(), SCAFFOLD())
    trainer.fit(Perceptron(), federation(), SCAFFOLD())
    done = trainer.run.ledger.total_bytes("up"), trainer.run.num_steps
    Path(folder, f"{trainer.global_rank}.json").write_text(json.dumps([(plan.uplink_bytes, plan.steps), done]))


@pytest.mark.process
def test_a_plan_counts_each_client_once(tmp_path: Path) -> None:
    processes.run(plan_and_fit, str(tmp_path), 2, num_processes=2)
    planned, done = json.loads((tmp_path / "0.json").read_text())
    assert planned == done
