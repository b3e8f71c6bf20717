"""The configurations of the papers' experiments: all files parse, base with method, and every method makes its rounds."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lightning_fl.cli import main

FOLDER = Path(__file__).parents[1] / "configs" / "fedadam_ssm"
BASES = sorted(FOLDER.glob("*.yaml"))
METHODS = sorted((FOLDER / "methods").glob("*.yaml"))
# Each experiment's first round, made small: other images, fewer of everything.
SMALL = (
    "--data Digits --data.num_clients 3 --data.image_size {size} --data.partition IID --trainer.clients_per_round 3 "
    "--trainer.local_steps 1 --trainer.max_rounds 2 --trainer.limit_val_batches 1 --data.batch_size 2 --data.eval_batch_size 2 "
    "--trainer.enable_progress_bar false --trainer.enable_model_summary false --trainer.logger false "
    "--trainer.enable_checkpointing false"
)

Run = Callable[[str], str]


@pytest.fixture
def lightning_fl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command line in an empty folder; gives what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(command: str) -> str:
        monkeypatch.setattr(sys, "argv", ["lightning-fl", *command.split()])
        code: int | str | None = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        assert not code, printed.err
        return printed.out

    return run


def test_there_is_a_base_for_every_experiment_and_a_file_for_every_method() -> None:
    assert [path.stem for path in BASES] == [
        f"{task}_{split}"
        for task in ("cnn_fashionmnist", "resnet18_svhn", "vgg11_cifar10")
        for split in ("dirichlet", "iid")
    ]
    assert len(METHODS) == 8


# Method and base files set different keys, so that every file once stands for every pair.
PAIRS = [(base, METHODS[0]) for base in BASES] + [(BASES[0], method) for method in METHODS[1:]]


@pytest.mark.parametrize(("base", "method"), PAIRS, ids=lambda path: path.stem)
def test_every_file_parses(base: Path, method: Path, lightning_fl: Run) -> None:
    texts = yaml.safe_load(base.read_text()), yaml.safe_load(method.read_text())
    assert texts[0].keys() & texts[1].keys() == set()
    printed = yaml.safe_load(lightning_fl(f"fit --config {base} --config {method} --print_config"))
    assert printed["algorithm"]["class_path"].endswith(_name(texts[1]["algorithm"]))
    assert printed["algorithm"]["init_args"].get("alpha", 0.05) == 0.05
    assert printed["trainer"]["local_steps"] == 30
    assert printed["trainer"]["clients_per_round"] == printed["data"]["init_args"]["num_clients"] == 20
    assert printed["model"]["init_args"]["network"] == texts[0]["model"]["init_args"]["network"]
    partition = printed["data"]["init_args"]["partition"]
    assert partition["class_path"].endswith("Dirichlet" if "dirichlet" in base.stem else "IID")
    assert partition.get("init_args", {}).get("alpha", 0.1) == 0.1


def _name(algorithm: str | dict[str, str]) -> str:
    return algorithm if isinstance(algorithm, str) else algorithm["class_path"]


@pytest.mark.parametrize("method", METHODS, ids=lambda path: path.stem)
def test_every_method_makes_its_rounds(method: Path, lightning_fl: Run) -> None:
    base = FOLDER / "cnn_fashionmnist_iid.yaml"
    printed = lightning_fl(f"fit --config {base} --config {method} {SMALL.format(size=28)}")
    assert re.search(r"^rounds +2$", printed, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg11_cifar10_iid", "resnet18_svhn_iid"])
def test_every_network_makes_its_rounds(name: str, lightning_fl: Run) -> None:
    method = FOLDER / "methods" / "fedadam_ssm.yaml"
    printed = lightning_fl(f"fit --config {FOLDER / name}.yaml --config {method} {SMALL.format(size=32)}")
    assert re.search(r"^rounds +2$", printed, re.MULTILINE)
