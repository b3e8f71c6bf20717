"""Test the completion script as a shell uses it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fl.cli import main

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_shtab_lightning_fl
printf '%s\\n' "${COMPREPLY[@]}"
"""

OFFERED = {
    "commands": (["f"], {"fit"}),
    "every command": ([""], {"fit", "validate", "test", "predict", "list", "report", "init"}),
    "a flag of a command without a parser": (["report", "--t"], {"--target"}),
    "names for init": (["init", "--algorithm", "FedP"], {"FedProx"}),
    "a flag": (["fit", "--trainer.max_r"], {"--trainer.max_rounds"}),
    "algorithms": (["fit", "--algorithm", "FedP"], {"FedProx"}),
    "a parameter of an algorithm": (["fit", "--algorithm.mu"], {"--algorithm.mu"}),
    "parts": (["fit", "--algorithm.rule", "Prox"], {"Proximal"}),
    "a parameter of a base method": (["fit", "--algorithm.base.m"], {"--algorithm.base.mu"}),
    "the base of a base method": (["fit", "--algorithm.base.base", "FedP"], {"FedProx"}),
    "a parameter of a codec in a codec": (["fit", "--algorithm.uplink.codec.al"], {"--algorithm.uplink.codec.alpha"}),
    "a parameter of a part": (["fit", "--algorithm.rule.mu"], {"--algorithm.rule.mu"}),
    "networks": (["fit", "--model.network", "resnet"], {"resnet18", "resnet32"}),
    "data": (["test", "--data", "CIFAR"], {"CIFAR10", "CIFAR100"}),
    "partitions": (["fit", "--data.partition", ""], {"Dirichlet", "IID", "Shards"}),
    "a parameter that a base class takes": (["fit", "--data.num_cl"], {"--data.num_clients"}),
    "callbacks": (["fit", "--trainer.callbacks+", "EarlyS"], {"EarlyStopping"}),
    "choices": (["fit", "--trainer.precision", "bf16-"], {"bf16-mixed", "bf16-true"}),
    "literals": (["fit", "--model.lr_schedule", ""], {"constant", "cosine"}),
    "classes to be explained": (["fit", "--algorithm.help", "FedA"], {"FedAvg"}),
    "after other flags": (
        ["fit", "--algorithm", "FedProx", "--algorithm.mu", "0.1", "--trainer.runner", "a"],
        {"auto"},
    ),
}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the script that `lightning-fl` prints for bash."""
    pytest.importorskip("shtab", reason="needs shtab: pip install -e '.[completion]'")
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    path = tmp_path_factory.mktemp("completion") / "lightning-fl"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr(sys, "argv", ["lightning-fl", "--print_completion=shtab-bash"])
        patch.setattr(sys, "stdout", file)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0
    subprocess.run(["bash", "-n", str(path)], check=True)
    return path


@pytest.mark.process
@pytest.mark.parametrize(("words", "offered"), OFFERED.values(), ids=OFFERED.keys())
def test_bash_offers(script: Path, words: list[str], offered: set[str]) -> None:
    command = ["bash", "-c", ASK, "bash", str(script), "lightning-fl", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {word for word in done.stdout.split("\n") if word}
    assert offered <= found
    assert all(word.startswith(words[-1]) for word in found)


@pytest.mark.process
def test_whole_flags_are_offered_where_nothing_is_typed(script: Path) -> None:
    command = ["bash", "-c", ASK, "bash", str(script), "lightning-fl", "fit", "--"]
    flags = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {"--config", "--ckpt_path", "--trainer.devices", "--model", "--data.batch_size"} <= set(flags)
    assert len(flags) < 3000, "nested classes must not be followed endlessly"


def test_a_schema_that_would_refuse_configurations_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab", reason="needs shtab: pip install -e '.[completion]'")
    monkeypatch.setattr(sys, "argv", ["lightning-fl", "--print_completion=jsonschema"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "allowed: shtab-bash" in capsys.readouterr().err
