"""Test that reports compare runs from Python like those of the command line."""

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, seed_everything
from made_runs import groups_of, rising, write_run
from torch import nn

from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import Algorithm, FedDU, FedProx
from lightning_fl.codecs import TopK
from lightning_fl.data import Digits, Dirichlet
from lightning_fl.modules import ImageClassifier
from lightning_fl.report import report
from lightning_fl.report.labels import experiment_settings
from lightning_fl.report.records import read_run
from lightning_fl.rules import Proximal
from lightning_fl.steps import Apply, Momentum

FLAGS = {"max_rounds": 1, "clients_per_round": 2, "accelerator": "cpu", "enable_progress_bar": False}
FLAGS |= {"enable_model_summary": False}
WORDS = ["fit", "--model=ImageClassifier", "--model.network=linear", "--data=Digits", "--data.num_clients=5"]
WORDS += [f"--trainer.{name}={str(value).lower()}" for name, value in FLAGS.items()]


def classifier(**options: Any) -> ImageClassifier:
    return ImageClassifier("linear", **{"num_classes": 10, "in_channels": 1, "image_size": 8, **options})


def fit(folder: Path, algorithm: Any = None, module: LightningModule | None = None, seed: int = 0, **given: Any) -> str:
    """Fit from Python, and return the folder."""
    data = given.pop("data", None) or Digits(num_clients=5)
    ckpt_path = given.pop("ckpt_path", None)
    trainer = FederatedTrainer(**{**FLAGS, "default_root_dir": folder, **given})
    seed_everything(seed)
    trainer.fit(module or classifier(), data, algorithm, ckpt_path=ckpt_path, verbose=False)
    return str(folder)


@pytest.fixture(autouse=True)
def _keeps_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the seed of the environment, which `seed_everything` sets."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ""),
        ({"algorithm": FedProx(0.1), "local_epochs": 1}, "--algorithm=FedProx --algorithm.mu=0.1"),
        ({"algorithm": "FedProx", "local_steps": 3}, "--algorithm=FedProx --trainer.local_steps=3"),
        (
            {"algorithm": FedDU(C=0.5), "data": Digits(num_clients=5, server_fraction=0.1, partition=Dirichlet(2.0))},
            "--algorithm=FedDU --algorithm.C=0.5 --data.server_fraction=0.1 --data.partition=Dirichlet "
            "--data.partition.alpha=2",
        ),
        (
            {
                "algorithm": Algorithm(
                    rule=Proximal(mu=0.5), uplink=TopK(alpha=0.1), steps=[Apply(), Momentum(beta=0.5)]
                ),
                "limit_train_batches": 2,
            },
            "--algorithm=Algorithm --algorithm.rule=Proximal --algorithm.rule.mu=0.5 --algorithm.uplink=TopK "
            "--algorithm.uplink.alpha=0.1 --trainer.limit_train_batches=2 "
            '--algorithm.steps=[{"class_path":"Apply"},{"class_path":"Momentum","init_args":{"beta":0.5}}]',
        ),
    ],
    ids=["defaults", "FedProx", "steps", "FedDU", "composed"],
)
def test_a_run_from_python_has_the_settings_of_the_same_command(
    given: dict[str, Any], words: str, run: Callable[..., tuple], tmp_path: Path
) -> None:
    fit(tmp_path / "python", **given)
    code, _, errors = run(*WORDS, f"--trainer.default_root_dir={tmp_path / 'command'}", *words.split())
    assert code == 0, errors
    assert not (tmp_path / "python" / "config.yaml").exists(), "it would look like a configuration to run"
    assert not (tmp_path / "command" / "settings.yaml").exists()
    found, expected = (experiment_settings(read_run(tmp_path / name).settings) for name in ("python", "command"))
    assert found == expected
    groups = groups_of(tmp_path / "python", tmp_path / "command")
    assert [len(group.curves) for group in groups] == [2], "they share a line"


@pytest.mark.matrix
def test_seeds_of_runs_from_python_share_a_line_and_settings_that_differ_are_listed(tmp_path: Path) -> None:
    folders = [fit(tmp_path / f"{mu}-{seed}", FedProx(mu), seed=seed) for mu in (0.1, 0.2) for seed in (0, 1)]
    printed = report([*folders, "--out", str(tmp_path / "report")])
    assert "| FedProx, mu=0.1 |    2 |" in printed
    assert "| FedProx, mu=0.2 |    2 |" in printed
    assert "unknown" not in printed
    assert read_run(folders[1]).settings["seed_everything"] == 1
    other = fit(tmp_path / "other", FedProx(0.1), classifier(learning_rate=0.2))
    assert (
        "learning_rate"
        in report([folders[0], other, "--out", str(tmp_path / "report")]).split("Settings that differ")[1]
    )


class Forgetful(LightningModule):
    """Module that keeps nothing of its arguments."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self._options = {"lr": rate}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), **self._options)


def test_a_run_with_an_argument_that_nothing_keeps_stands_alone_and_says_so(tmp_path: Path) -> None:
    folders = [fit(tmp_path / f"{rate}", module=Forgetful(rate)) for rate in (0.1, 0.2)]
    assert [len(group.curves) for group in groups_of(*map(Path, folders), name="val/loss")] == [1, 1]
    printed = report([*folders, "--out", str(tmp_path / "report")])
    assert f"{folders[0]}: `model.rate` unknown, so the run has its own line" in printed


def test_a_network_given_as_an_object_is_named_by_class_and_size(tmp_path: Path) -> None:
    nets = [
        nn.Sequential(nn.Flatten(), *layers) for layers in ([nn.Linear(64, 10)], [nn.Linear(64, 9), nn.Linear(9, 10)])
    ]
    folders = [fit(tmp_path / str(i), module=ImageClassifier(net, 10)) for i, net in enumerate([*nets, nets[0]])]
    assert [len(group.curves) for group in groups_of(*map(Path, folders))] == [2, 1]
    assert read_run(folders[0]).settings["model.network"] == "Sequential of 650 parameters"


class Cyclic:
    """Object that may contain itself."""

    def __init__(self, other: Any) -> None:
        self.other = other


def test_arguments_that_cannot_be_described_do_not_stop_a_run(tmp_path: Path) -> None:
    class Odd(Callback):
        def __init__(self, cycle: Any, generator: Any, kind: Any) -> None:
            self.cycle, self.generator, self.kind = cycle, generator, kind

    cycle = Cyclic(None)
    cycle.other = cycle
    folder = fit(tmp_path / "run", callbacks=[Odd(cycle, np.random.default_rng(0), nn.ReLU)])
    settings = read_run(folder).settings
    assert settings["trainer.callbacks.0.generator"] == "Generator"
    assert settings["trainer.callbacks.0.generator.settings"] == "unknown"
    assert settings["trainer.callbacks.0.cycle.other"] == "Cyclic"
    assert settings["trainer.callbacks.0.kind"] == "ReLU"


def test_constructors_keep_their_signatures() -> None:
    assert list(signature(FedProx).parameters) == ["mu", "slots"]
    assert "image_size" in signature(Digits).parameters
    given = FedProx(0.1).given_arguments
    assert {name: value for name, value in given.items() if value is not None} == {"mu": 0.1}


def test_a_resumed_run_has_the_settings_of_both_fits(tmp_path: Path) -> None:
    folder = fit(tmp_path / "run", FedProx(0.1))
    fit(tmp_path / "run", FedProx(0.1), max_rounds=2, clients_per_round=3, ckpt_path="last")
    assert sorted(path.name for path in (tmp_path / "run").glob("*.yaml")) == [
        "hparams.yaml",
        "settings-2.yaml",
        "settings.yaml",
    ]
    assert "settings changed when it was resumed: `trainer.clients_per_round` 2 → 3." in report(
        [folder, "--out", str(tmp_path / "report")]
    )


def test_a_setting_that_older_configurations_lack_does_not_separate_runs_if_it_is_null(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, rising(9)) for name in ("old", "new")]
    content = yaml.safe_load((folders[1] / "config.yaml").read_text())
    (folders[1] / "config.yaml").write_text(yaml.safe_dump({**content, "optimizer": None, "lr_scheduler": None}))
    assert [len(group.curves) for group in groups_of(*folders)] == [2]


def test_every_flag_that_decides_results_separates_runs_and_no_other(tmp_path: Path) -> None:
    one = fit(tmp_path / "one")
    assert len(groups_of(one, fit(tmp_path / "same", seed=1, limit_predict_batches=3, log_every_n_steps=7))) == 1
    for flag, value in {"limit_test_batches": 1, "float32_precision": "high", "plugins": [TorchCheckpointIO()]}.items():
        other = fit(tmp_path / flag, seed=1, **{flag: value})
        assert any(f"trainer.{flag}" in key for key in read_run(other).settings)
        assert len(groups_of(one, other)) == 2, flag
