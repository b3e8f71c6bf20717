"""Mishaps of studies of two runs, whose fits start anew and so take seconds."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from pathlib import Path

import yaml

from trials.commands import Command, FindingError, require_same
from trials.processes import require_gone
from trials.trial import Trial, grow, size_of

HERE = ("folder", "wall_seconds")
"""Columns of the report that another run of the same study does not have in common."""


def study_killed(trial: Trial) -> None:
    """End a study in any way at any moment: none of its fits lives on, and the same command gives the same report."""
    whole = _whole(trial)
    if whole is None:
        return
    command = _start(trial, "killed")
    by = trial.one_of(signal.SIGKILL, signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
    command.kill_after(trial.moment(), by)
    trial.end(command)
    require_gone(processes_of(trial.folder / "killed"))
    _finish(trial, "killed", whole)


def study_on_full_disk(trial: Trial) -> None:
    """Run a study on a small file system, and again after that has grown; only root can make one."""
    whole = _whole(trial)
    if whole is None:
        return
    with trial.small_disk("full", trial.whole_numbers(int(1.2 * size_of(whole)))) as disk:
        if disk is not None:
            trial.end(_start(trial, "full"))
            grow(disk)
            _finish(trial, "full", whole)


def two_studies(trial: Trial) -> None:
    """Run a study twice at once in one folder: each run is trained once, and the report is that of one study."""
    whole = _whole(trial)
    if whole is None:
        return
    first = _start(trial, "shared")
    end = time.monotonic() + trial.moment()
    first.wait_until(lambda: time.monotonic() > end)
    second = _start(trial, "shared", "second-output")
    outcomes = trial.end(first), trial.end(second)
    if not {"completed", "stopped"}.issuperset(outcomes):
        raise FindingError(f"the first study was {outcomes[0]}, the second {outcomes[1]}")
    if earlier := list((trial.folder / "shared").rglob("earlier-*")):
        raise FindingError(f"{earlier[0].parent.relative_to(trial.folder)} was trained twice")
    _finish(trial, "shared", whole)


def _start(trial: Trial, name: str, output: str | None = None, *more: str) -> Command:
    """Start the study in a folder of that name."""
    path = trial.folder / "study.yaml"
    faster = ["--model.learning_rate=0.3"]
    path.write_text(
        yaml.safe_dump({"base": trial.flags[1:], "seeds": [3], "grid": {"rate": {"slow": [], "fast": faster}}})
    )

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background programs ignore it

    words = ["study", str(path), f"--out={trial.folder / name}", "--jobs=2", *more]
    return Command.start(words, trial.folder / (output or f"{name}-output"), prepare)


def _whole(trial: Trial) -> Path | None:
    """Run the study without a mishap; return its folder, or None if it or one of its runs is refused."""
    trial.draw_accepted()
    started = time.monotonic()
    outcome = trial.end(_start(trial, "whole"))
    trial.seconds = time.monotonic() - started
    for failed in (trial.folder / "whole").rglob("failed.json"):
        said = json.loads(failed.read_text())
        if said["exit_code"] != 2 or not said["said"].startswith("lightning-fl"):
            raise FindingError(f"a run of a study ended with exit code {said['exit_code']}: {said['said'][:300]}")
    return trial.folder / "whole" if outcome == "completed" else None


def _finish(trial: Trial, name: str, whole: Path) -> None:
    """Give the study's command again, and compare its runs and its report with those of the unbroken one."""
    if trial.end(_start(trial, name, None, "--retry")) != "completed":
        said = (trial.folder / f"{name}-output" / "stdout").read_text(errors="replace")[-300:]
        raise FindingError(f"the study does not go on: {said} {trial.errors(f'{name}-output')}")
    folder = trial.folder / name
    for run in sorted(path.parent.relative_to(whole) for path in whole.rglob("done.json")):
        require_same(whole / run, folder / run)
    if _numbers(whole) != _numbers(folder):
        raise FindingError("the reports differ")
    trial.outcomes["resumed identically"] += 1


def _numbers(folder: Path) -> list[dict[str, str]]:
    """Return the rows of the report without what belongs to these runs alone."""
    with open(folder / "report" / "runs.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k not in HERE} for row in csv.DictReader(file)]


def processes_of(folder: Path) -> list[int]:
    """Return the processes that have this folder in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"{folder}/".encode() in words:
                found.append(int(entry.name))
    return found
