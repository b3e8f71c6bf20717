"""Test what the command line says and writes when a run is resumed or a checkpoint is evaluated."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from lightning_fl.cli import main
from lightning_fl.report.command import report
from lightning_fl.report.records import read_run

Command = Callable[..., str]
CONFIGURATION = {
    "seed_everything": 3,
    "trainer": {
        "max_rounds": 1,
        "clients_per_round": 3,
        "default_root_dir": "run",
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
    "model": {"class_path": "ImageClassifier", "init_args": {"network": "linear", "learning_rate": 0.1}},
    "data": {"class_path": "Digits", "init_args": {"num_clients": 20}},
}
LAST = "run/checkpoints/last.ckpt"


@pytest.fixture
def command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Command:
    """Return a function that runs a command with a small configuration, and returns its messages."""
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(yaml.safe_dump(CONFIGURATION))

    def run(name: str, *words: str, fails: bool = False) -> str:
        monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
        monkeypatch.setattr(sys, "argv", ["lightning-fl", name, "--config", "small.yaml", *words])
        capsys.readouterr()
        caplog.clear()
        if fails:
            with pytest.raises(SystemExit):
                main()
        else:
            main()
        return "\n".join([capsys.readouterr().err, *caplog.messages])

    return run


def saved(name: str) -> dict:
    return yaml.safe_load(Path("run", name).read_text())


@pytest.mark.parametrize("checkpoint", ["last", LAST])
def test_a_learning_rate_on_the_command_line_is_used(command: Command, checkpoint: str) -> None:
    command("fit")
    words = ["--trainer.max_rounds", "2", "--model.learning_rate", "0.01", "--ckpt_path", checkpoint]
    said = command("fit", *words)
    assert "Changed since the checkpoint: trainer.max_rounds 1 → 2, model.learning_rate 0.1 → 0.01." in said
    rates = torch.load(LAST, weights_only=True)["federation"]["learning_rates"]["round_rates"]
    assert rates == [0.01]


@pytest.mark.parametrize("checkpoint", ["last", LAST])
def test_another_seed_on_the_command_line_is_refused(command: Command, checkpoint: str) -> None:
    command("fit")
    files = {path: path.read_bytes() for path in Path("run").rglob("*.*")}
    words = ["--trainer.max_rounds", "2", "--seed_everything", "4", "--ckpt_path", checkpoint]
    assert "seed_everything 3 → 4" in command("fit", *words, fails=True)
    assert {path: path.read_bytes() for path in Path("run").rglob("*.*")} == files


@pytest.mark.matrix
def test_each_leg_of_a_run_has_a_configuration_of_its_own(command: Command) -> None:
    command("fit")
    first = Path("run/config.yaml").read_text()
    for leg in (2, 3):
        command("fit", "--ckpt_path", "last", "--trainer.max_rounds", str(leg), "--model.learning_rate", f"0.0{leg}")
        assert saved(f"config-{leg}.yaml")["model"]["init_args"]["learning_rate"] == leg / 100
    command("fit", "--ckpt_path", "last", "--trainer.max_rounds", "3", "--model.learning_rate", "0.03")  # nothing to do
    command("fit", "--ckpt_path", "last", "--trainer.max_rounds", "4", "--data.seed", "1", fails=True)
    assert Path("run/config.yaml").read_text() == first
    assert sorted(path.name for path in Path("run").glob("config*")) == [
        "config-2.yaml",
        "config-3.yaml",
        "config.yaml",
    ]
    command("fit")
    assert sorted(path.name for path in Path("run").glob("config*")) == ["config.yaml"]
    assert Path("run/earlier-1/config-3.yaml").is_file()


def test_a_run_that_moves_to_another_folder_takes_its_history_along(command: Command) -> None:
    command("fit")
    command("fit", "--ckpt_path", LAST, "--trainer.max_rounds", "2", "--trainer.default_root_dir", "moved")
    assert Path("moved/config.yaml").read_text() == Path("run/config.yaml").read_text()
    assert yaml.safe_load(Path("moved/config-2.yaml").read_text())["trainer"]["max_rounds"] == 2


@pytest.mark.matrix
def test_the_report_reads_the_last_configuration_and_names_what_changed(command: Command) -> None:
    command("fit")
    command("fit", "--ckpt_path", "last", "--trainer.max_rounds", "2", "--trainer.local_epochs", "2")
    clipped = ["--trainer.gradient_clip_val", "1.5"]
    command("fit", "--ckpt_path", "last", "--trainer.max_rounds", "4", "--trainer.local_epochs", "3", *clipped)
    record = read_run("run")
    assert record.settings["trainer.max_rounds"] == 4
    assert record.gaps == ()
    shutil.copytree("run", "other")
    report(["run", "other", "--out", "report"])
    found = Path("report/report.md").read_text()
    assert "run: settings changed when it was resumed: `trainer.local_epochs` 1 → 2 → 3" in found
    assert "`trainer.gradient_clip_val` null → 1.5" in found


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
@pytest.mark.matrix
def test_an_evaluation_says_which_hyper_parameters_come_from_the_checkpoint(command: Command, name: str) -> None:
    command("fit")
    said = command(name, "--ckpt_path", LAST, "--model.momentum", "0.5", "--model.learning_rate", "0.2")
    expected = (
        r"of the checkpoint, not the configuration's: model\.learning_rate 0\.2 → 0\.1, model\.momentum 0\.5 → 0\.0\."
    )
    assert re.search(expected, said), said
    assert "of the checkpoint" not in command(name, "--ckpt_path", LAST)
