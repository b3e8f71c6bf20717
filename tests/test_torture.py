"""Test runs under mishaps: a short part of benchmarks/torture.py with a fixed seed, and that the program can find something."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Command

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MISHAPS = ("none", "kill -9", "SIGTERM", "Ctrl-C twice", "limited files", "flipped bit", "two runs")


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that imports a module of the program."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def left_by_run(folder: Path, loss: float = 1.0, bits: int = 8, weight: float = 0.0) -> Path:
    """Write what a run leaves of which the program compares something."""
    folder.mkdir()
    (folder / "metrics.csv").write_text(
        f"round,train/loss,comm/uplink_bits,time/round_seconds\n0,{loss},{bits},{len(folder.name) / 3}\n"
    )
    (folder / "communication.json").write_text(f'{{"up": {bits}}}')
    torch.save({"state_dict": {"weight": torch.full((2,), weight)}}, folder / "model.ckpt")
    return folder


@pytest.mark.process
def test_nothing_is_found(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "torture.py"), "--trials", "5", "--seed", "3", "--only", *MISHAPS]
    done = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 trials, seed 3" in done.stdout
    assert list(tmp_path.iterdir()) == [], "the folders of trials without a finding are removed"


@pytest.mark.process
def test_nothing_is_found_of_plans_and_side_channels(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "torture.py"), "--trials", "4", "--seed", "6", "--only"]
    done = subprocess.run(
        [*command, "planned", "side channels", "--folder", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("types_of_a_new_process")
@pytest.mark.parametrize("number", range(4))
@pytest.mark.matrix
def test_a_plan_of_any_configuration_says_what_the_fit_says(
    number: int, tmp_path: Path, part: Any, lightning_fl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that both are refused with one sentence, or neither, and that bytes that are called exact are those of the run."""
    configurations, images = part("trials.configurations"), tmp_path / "images.npz"
    configurations.write_images(images)
    flags = ["fit", *configurations.draw(np.random.default_rng([7, number]), images)]
    folder = f"--trainer.default_root_dir={tmp_path / 'run'}"
    plan, fit = lightning_fl(*flags, folder, "--dry_run"), lightning_fl(*flags, folder)
    sentences = [[line for line in ended.err.splitlines() if line.startswith("lightning-fl")] for ended in (plan, fit)]
    assert plan.code == fit.code
    assert sentences[0] == sentences[1]
    sizes = [
        {line.split()[0]: line.split("  ")[-1].strip() for line in ended.out.splitlines() if "link" in line[:8]}
        for ended in (plan, fit)
    ]
    is_whole = re.search(r"^rounds +3$", fit.out, re.MULTILINE)  # no callback has stopped it
    for way, size in sizes[0].items() if is_whole else ():
        assert "about" in size or size == sizes[1][way]


@pytest.mark.parametrize("difference", [{"loss": 2.0}, {"bits": 7}, {"weight": 1.0}])
def test_runs_that_differ_are_found(difference: dict[str, Any], tmp_path: Path, part: Any) -> None:
    commands = part("trials.commands")
    whole, other = left_by_run(tmp_path / "whole"), left_by_run(tmp_path / "other", **difference)
    for tolerance in (0.0, 1e-6):
        with pytest.raises(commands.FindingError, match="differ"):
            commands.require_same(whole, other, tolerance)
        commands.require_same(whole, whole, tolerance)


def test_a_tolerance_is_for_averages_and_weights_alone(tmp_path: Path, part: Any) -> None:
    commands = part("trials.commands")
    whole, rounded = left_by_run(tmp_path / "whole"), left_by_run(tmp_path / "rounded", loss=1 + 1e-8, weight=1e-8)
    commands.require_same(whole, rounded, 1e-6)
    with pytest.raises(commands.FindingError, match="rows differ"):
        commands.require_same(whole, rounded)
    with pytest.raises(commands.FindingError, match="comm/uplink_bits"):
        commands.require_same(whole, left_by_run(tmp_path / "more", bits=8_000_001), 1e9)


@pytest.mark.long
def test_draws_depend_on_their_seed_and_reach_everything(part: Any) -> None:
    draw = part("trials.configurations").draw
    drawn = [draw(np.random.default_rng([0, number]), Path("images.npz")) for number in range(400)]
    assert drawn[:9] == [draw(np.random.default_rng([0, number]), Path("images.npz")) for number in range(9)]
    flags = {flag for flags in drawn for flag in flags}
    for name in ("enable_model_summary", "enable_progress_bar"):
        assert {f"--trainer.{name}={value}" for value in ("true", "false")} <= flags
    assert {f"--trainer.precision={name}" for name in ("32-true", "64-true", "bf16-true", "bf16-mixed")} <= flags
    given = [json.loads(flag.partition("=")[2]) for flag in flags if flag.startswith("--trainer.callbacks=[{")]
    assert {"EarlyStopping", "TargetReached", "CommunicationMeter", "Timer", "RichProgressBar", "EnergyMeter"} <= {
        callback["class_path"] for callbacks in given for callback in callbacks
    }
    selections = [json.loads(flag.partition("=")[2]) for flag in flags if flag.startswith("--trainer.selection={")]
    assert {"ByNorm", "BySize", "Fastest", "InTurn", "PowerOfChoice", "Uniform"} == {
        selection["class_path"] for selection in selections
    }
    assert 100 < sum(any(flag.startswith("--trainer.selection=") for flag in flags) for flags in drawn) < 300
    assert 0 < sum("--trainer.compile=true" in flags for flags in drawn) < 40
    composed = [json.loads(flag.partition("=")[2])["init_args"] for flag in flags if flag.startswith("--algorithm={")]
    assert {"TwoTurns", "OneShot", "LayerDivergence"} <= {
        slots.get("exchange", {}).get("class_path") for slots in composed
    }
    assert {"ErrorFeedback", "EntropyCoded", "EDEN"} <= {
        slots.get("uplink", {}).get("class_path") for slots in composed
    }
    followed = [slots["downlink"]["init_args"] for slots in composed if "carrier" in str(slots.get("downlink"))]
    assert {True, False} <= {arguments.get("catch_up") for arguments in followed}


def test_a_thousand_trials_have_some_of_each_mishap(part: Any) -> None:
    mishaps = part("torture").MISHAPS.values()
    assert 1000 * min(mishap.weight for mishap in mishaps) / sum(mishap.weight for mishap in mishaps) > 3


@pytest.mark.process
def test_a_process_that_lives_on_is_found_and_ended(tmp_path: Path, part: Any) -> None:
    commands, processes, studies = (part(f"trials.{name}") for name in ("commands", "processes", "studies"))
    words = [sys.executable, "-S", "-c", "import time; time.sleep(60)", f"{tmp_path}/cell/seed-0"]  # a shell would fork
    orphan = subprocess.Popen(words)
    try:
        end = time.monotonic() + 10
        while not (found := studies.processes_of(tmp_path)) and time.monotonic() < end:
            time.sleep(0.01)  # its command line is not there at once
        assert found == [orphan.pid]
        with pytest.raises(commands.FindingError, match="1 processes lived on"):
            processes.require_gone(found, patience_s=0.1)
        assert orphan.wait(10) < 0
        processes.require_gone(found, patience_s=0.1)
    finally:
        orphan.kill()
        orphan.wait()


IN_A_CALLBACK = """Exception ignored in: <function cb at 0x7f>
Traceback (most recent call last):
  File "<frozen importlib._bootstrap>", line 199, in cb
KeyboardInterrupt:
"""


@pytest.mark.process
@pytest.mark.parametrize(("code", "text", "outcome"), [
    (0, "", "completed"),
    (2, "lightning-fl: error: no.", "refused"),
    (1, "lightning-fl: error: full.", "stopped"),
    (130, "lightning-fl: interrupted; resume.", "stopped"),
    (130, "", None),
    (130, IN_A_CALLBACK + "lightning-fl: interrupted; resume.", "stopped"),
    (1, "Traceback (most recent call last):", None),
    (70, "lightning-fl: error: no.", None),
])  # fmt: skip
def test_ends_are_told_apart(
    code: int, text: str, outcome: str | None, tmp_path: Path, part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = part("trials.commands")

    def main() -> None:
        os.write(2, f"{text}\n".encode())  # as pytest keeps sys.stderr for itself
        sys.exit(code)

    monkeypatch.setattr(commands, "main", main)
    command = commands.Command.start(["fit"], tmp_path / "output")
    if outcome is not None:
        assert command.end() == outcome
        return
    with pytest.raises(commands.FindingError, match=f"exit code {code}"):
        command.end()


@pytest.mark.process
def test_a_run_that_leaves_something_else_is_named(tmp_path: Path) -> None:
    def same_runs(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(BENCHMARKS / "same_runs.py"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    kept = tmp_path / "kept.json"
    assert "1 completed" in same_runs("record", str(kept), "--runs", "1").stdout
    (run,) = [run for run in json.loads(kept.read_text()) if run["left"]["ended"] == "completed"]
    model, run["left"]["model"] = run["left"]["model"], "0"
    run["left"]["rows"][-1]["comm/uplink_bits"] = "1"
    kept.write_text(json.dumps([run]))
    other = same_runs("compare", str(kept))
    assert other.returncode == 1
    differences, flags, total = other.stdout.splitlines()
    assert differences == f"run 0: model 0 -> {model}; columns comm/uplink_bits"
    assert shlex.split(flags) == run["flags"]
    assert total == "1 of 1 runs differ"
