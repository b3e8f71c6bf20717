"""Test the configurations: each parses and begins, and each method's file can be laid over those of its folder."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from command_line import Command
from sweeps import trial_command

from lightning_fl import data
from lightning_fl.report.records import flatten

FOLDER = Path(__file__).parents[1] / "configs"
METHODS = sorted(FOLDER.glob("*/methods/*.yaml"))
"""Files that contain only a method, to be laid over any configuration of the parent folder."""
SWEEPS = sorted((FOLDER / "sweeps").glob("*.yaml"))
"""W&B's sweep files, the input of `wandb sweep`."""
STUDIES = sorted((FOLDER / "studies").glob("*.yaml"))
BASES = [path for path in sorted(FOLDER.rglob("*.yaml")) if path not in METHODS + SWEEPS + STUDIES]
QUIET = (
    "--trainer.max_rounds 1 --trainer.enable_progress_bar false --trainer.enable_model_summary false "
    "--trainer.enable_checkpointing false"
)
SMALL = (
    f"{QUIET} --trainer.clients_per_round 2 --trainer.limit_train_batches 1 --trainer.limit_val_batches 1 "
    "--data.batch_size 4 --data.eval_batch_size 4"
)

Run = Callable[[str], str]


@pytest.fixture
def run(lightning_fl: Command) -> Run:
    """Return a function that runs a command line in an empty folder and returns its output."""

    def printed(command: str) -> str:
        ended = lightning_fl(*command.split())
        assert not ended.code, ended.err
        return ended.out

    return printed


@pytest.fixture
def _few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace data sets that would have to be downloaded by random images, equally many of each class."""

    def few(self: data.CIFAR10, train: bool, download: bool) -> tuple[np.ndarray, np.ndarray]:
        num = 2500 if train else self.num_classes
        rng = np.random.default_rng(num)
        images = rng.integers(256, size=(num, self.in_channels, self.image_size, self.image_size), dtype=np.uint8)
        return images, np.arange(num) % self.num_classes

    for kind in (data.CIFAR10, data.CIFAR100, data.FashionMNIST, data.SVHN):
        monkeypatch.setattr(kind, "open", few)


def name_of(path: Path) -> str:
    return str(path.relative_to(FOLDER))


TRAINED = {(base.parent, base.stem.partition("_")[0]): base for base in BASES}.values()
"""A configuration of each folder and network; the others stop before the first round, as their methods are trained elsewhere
(tests/algorithms/test_algorithms.py, tests/cli/test_first_config.py)."""
NO_ROUND = "--trainer.max_rounds 0"


def small(base: Path) -> str:
    given = base.read_text()
    flags = " --trainer.local_steps 1" if "local_steps" in given else " --trainer.local_epochs 1"
    # An uneven partition of few images leaves some clients with few samples.
    return SMALL + flags + (" --data.partition.min_samples 1" if "alpha: 0.1" in given else "")


def saved_config() -> dict[str, Any]:
    """Return the configuration that the only run below the current folder has written."""
    (path,) = Path().rglob("config.yaml")
    return yaml.safe_load(path.read_text())


@pytest.mark.process
@pytest.mark.usefixtures("_few_images")
@pytest.mark.parametrize("base", BASES, ids=name_of)
def test_every_configuration_begins_and_one_of_each_network_makes_a_round(base: Path, run: Run) -> None:
    flags = QUIET if base.parent == FOLDER else small(base)
    if base not in TRAINED:
        run(f"fit --config {base} {flags} {NO_ROUND}")
        assert saved_config()["algorithm"]["class_path"].startswith("lightning_fl.algorithms.")
        return
    assert re.search(r"^rounds +1$", run(f"fit --config {base} {flags}"), re.MULTILINE)


@pytest.mark.process
@pytest.mark.usefixtures("_few_images")
@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_every_method_goes_over_a_configuration(method: Path, run: Run) -> None:
    """Check that the files set different keys, so that one configuration represents all, and that the run begins."""
    bases = sorted(method.parents[1].glob("*.yaml"))
    asked = yaml.safe_load(method.read_text())
    given = flatten({name: part for name, part in asked.items() if name != "algorithm"}).keys()
    assert all(given & flatten(yaml.safe_load(base.read_text())).keys() <= {"trainer.local_steps"} for base in bases)
    files = f"fit --config {bases[0]} --config {method}"
    named = asked["algorithm"] if isinstance(asked["algorithm"], str) else asked["algorithm"]["class_path"]
    brief = {  # they train before the first round
        "fedkt": "--algorithm.epochs 1 --data.num_clients 5 --data.client_fraction 0.1",
        "prunefl": "--algorithm.initial_passes 2",
    }.get(method.stem, "")
    if "init_args: {n:" in method.read_text() or "    n: " in method.read_text():
        brief = "--algorithm.n 1"
    if method.parents[1].name == "fedldf":
        brief += " --model.network lenet5"  # VGG-9 is slow, and another test above covers it
    run(f"{files} {small(bases[0])} {brief} {NO_ROUND}")
    assert saved_config()["algorithm"]["class_path"].rpartition(".")[2] == named.rpartition(".")[2]


PAPERS = yaml.safe_load((Path(__file__).parent / "support" / "paper_values.yaml").read_text())
NO_VALUES = {"default_root_dir", "class_path", "download", "algorithm", "partition"}


@pytest.mark.parametrize("paper", PAPERS)
def test_each_value_of_a_paper_names_its_source(paper: str) -> None:
    """Check the values against the table, in both directions."""
    known = {
        (source, key, beginning): value
        for source, values in PAPERS[paper].items()
        for key, given in values.items()
        for beginning, value in (given if isinstance(given, dict) else {"": given}).items()
    }
    found = set()
    for path in (FOLDER / paper).rglob("*.yaml"):
        for line in path.read_text().splitlines():
            leaf = re.match(r" *(\w+): ([^#]+?)(?: # (printed|authors' code|ours)(:.*)?)?$", line)
            if leaf is None or leaf[1] in NO_VALUES:
                assert leaf or line.lstrip().startswith("#") or line.endswith(":"), f"{name_of(path)}: {line}"
                continue
            assert leaf[3], f"{name_of(path)}: {line.strip()!r} does not say where its value comes from"
            fits = [entry for entry in known if entry[:2] == (leaf[3], leaf[1]) and path.name.startswith(entry[2])]
            assert len(fits) == 1, f"{name_of(path)}: the table has {fits} for {line.strip()!r}"
            assert known[fits[0]] == yaml.safe_load(leaf[2]), f"{name_of(path)}: {line.strip()}"
            found.add(fits[0])
    assert found == known.keys()


@pytest.mark.process
@pytest.mark.usefixtures("_few_images")
@pytest.mark.parametrize("path", SWEEPS, ids=name_of)
def test_a_trial_of_every_sweep_runs(path: Path, run: Run, tmp_path: Path) -> None:
    sweep = yaml.safe_load(path.read_text())
    assert sweep["method"] in ("grid", "random", "bayes")
    assert sweep["metric"] == {"name": "val/accuracy", "goal": "maximize"}
    env, program, *words = trial_command(sweep, 0)
    assert (env, program, words[0]) == ("/usr/bin/env", "lightning-fl", "fit")
    (tmp_path / "configs").symlink_to(FOLDER)
    assert "--trainer.logger=WandbLogger" in words
    words[words.index("--trainer.logger=WandbLogger")] = (
        "--trainer.logger=true"  # tests/outputs/test_wandb_run.py starts W&B
    )
    base = Path(next(word for word in words if word.startswith("--config=")).removeprefix("--config="))
    command = " ".join(words)
    printed = yaml.safe_load(run(f"{command} --print_config"))
    for word in (word for word in words if word.startswith("--algorithm.")):
        name, _, value = word.removeprefix("--algorithm.").partition("=")
        assert printed["algorithm"]["init_args"][name] == yaml.safe_load(value)
    assert re.search(r"^rounds +1$", run(f"{command} {small(base)}"), re.MULTILINE)
