"""Test runs under mishaps: a short part of benchmarks/torture.py with a fixed seed, and that the program can find something."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MISHAPS = ("none", "kill -9", "SIGTERM", "limited files", "flipped bit", "two runs")


def test_nothing_is_found(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "torture.py"), "--trials", "12", "--seed", "3", "--only", *MISHAPS]
    done = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 trials, seed 3" in done.stdout
    assert list(tmp_path.iterdir()) == [], "the folders of trials without a finding are removed"


@pytest.mark.parametrize("difference", ["row", "weight", "bits"])
def test_runs_that_differ_are_found(difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import torch

    commands = importlib.import_module("trials.commands")
    for name in ("whole", "other"):
        changed = difference if name == "other" else None
        folder = tmp_path / name
        folder.mkdir()
        loss = 2 if changed == "row" else 1
        (folder / "metrics.csv").write_text(f"round,loss,time/round_seconds\n0,{loss},{len(name) / 3}\n")
        (folder / "communication.json").write_text(f'{{"up": {7 if changed == "bits" else 8}}}')
        torch.save({"state_dict": {"weight": torch.full((2,), float(changed == "weight"))}}, folder / "model.ckpt")
    with pytest.raises(commands.FindingError, match="differ"):
        commands.require_same(tmp_path / "whole", tmp_path / "other")
    commands.require_same(tmp_path / "whole", tmp_path / "whole")
