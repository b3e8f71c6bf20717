"""Test that each command in examples/README.md runs, in a copy of the folder."""

import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_fl.cli import main

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("types_of_a_new_process")]
EXAMPLES = Path(__file__).parents[1] / "examples"
README = (EXAMPLES / "README.md").read_text()
COMMANDS = re.findall(r"^(?:python|lightning-fl) .+$", README, re.MULTILINE)

Run = Callable[[str], str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in a copy of the folder and return its output."""
    copied = tmp_path / "examples"
    shutil.copytree(EXAMPLES, copied, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    monkeypatch.chdir(copied)
    monkeypatch.syspath_prepend(copied)
    for example in EXAMPLES.glob("*.py"):  # an earlier test may have imported it from its own copy
        monkeypatch.delitem(sys.modules, example.stem, raising=False)

    def ran(command: str) -> str:
        program, *arguments = shlex.split(command)
        if program == "python":
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            monkeypatch.setattr(sys, "argv", [program, *arguments])
            main()
        return capsys.readouterr().out

    return ran


def accuracies(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"accuracy +([\d.]+)", printed)]


def test_the_readme_names_every_example() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml")}
    assert files == set(re.findall(r"\[`([\w.]+)`\]", README))
    assert files <= {word for command in COMMANDS for word in command.split()}


def test_stock_trainer(run: Run) -> None:
    printed = run("python stock_trainer.py")
    before, after, loaded = re.findall(r"([\d,]{5,}) (?:before|after|parameters)", printed)
    assert int(after.replace(",", "")) < int(before.replace(",", ""))
    assert loaded == after
    [accuracy] = accuracies(printed)
    assert accuracy > 0.85
    assert f"loaded      {accuracy:.4f}" in printed
    sent, unpruned = (float(found) for found in re.findall(r"([\d.]+) MB", printed))
    assert 0 < sent < unpruned


def test_own_module_is_the_same_from_python_and_from_yaml(run: Run) -> None:
    [from_python] = accuracies(run("python own_module.py"))
    [from_yaml] = accuracies(run("lightning-fl fit --config own_module.yaml"))
    assert from_python == from_yaml > 0.8


def test_own_method(run: Run) -> None:
    fedavg, feddyn = accuracies(run("python own_method.py"))
    assert feddyn > fedavg
    command = "lightning-fl fit --config own_module.yaml --algorithm own_method.FedDyn --algorithm.alpha 0.05"
    assert command in COMMANDS
    [accuracy] = accuracies(run(command))
    assert accuracy > 0.8


def test_a_misspelt_class_of_ones_own(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("lightning-fl fit --config own_module.yaml --algorithm own_method.FedDynn")
    assert "the module 'own_method' has no 'FedDynn'; did you mean 'FedDyn'?" in capsys.readouterr().err
