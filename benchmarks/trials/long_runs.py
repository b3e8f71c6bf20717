"""Mishaps that only long runs meet. Their rounds are short: one client, one step, and no validation."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from statistics import median

from trials.commands import Command, FindingError, rows
from trials.configurations import Draws
from trials.trial import Trial

METRICS = "metrics.csv"
SHORT = (
    "--data=Arrays",
    "--data.num_clients=30",
    "--model=ImageClassifier",
    "--model.network=linear",
    "--trainer.accelerator=cpu",
    "--trainer.clients_per_round=1",
    "--trainer.local_steps=1",
    "--trainer.enable_progress_bar=false",
)
ROUNDS, EVERY = 3000, 500
MOST_MEGABYTES = 8.0
"""Growth that counts as noise: 4 kB for each round in between, the size of the model."""
STC = {"class_path": "STC", "init_args": {"alpha": 0.05}}
CATCHING_UP = {
    "steps": [{"class_path": "Apply"}, {"class_path": "Compress", "init_args": {"codec": STC}}],
    "downlink": {"class_path": "Followed", "init_args": {"codec": STC, "catch_up": True}},
}
PAGE = os.sysconf("SC_PAGE_SIZE")


def catches_up(trial: Trial) -> None:
    """Kill a run in which clients catch up after its 1,000th round: it resumes, and nobody loads more than the model."""
    rounds = 1000 + 20 * trial.whole_numbers(6)
    _lengthen(trial, rounds, {"class_path": "Algorithm", "init_args": CATCHING_UP}, log=1, checkpoint=20)
    whole = trial.whole()
    if whole is None:
        raise FindingError(f"a run in which clients catch up is refused: {trial.errors('whole-output')}")
    bits = [float(row["comm/downlink_bits"]) for row in rows(whole / METRICS)]
    if max(bits) > bits[0] or min(bits) <= 0:
        raise FindingError(
            f"clients load {min(bits):.0f} to {max(bits):.0f} bits, and the whole model has {bits[0]:.0f}"
        )
    command = trial.start("killed")
    last = trial.whole_numbers(rounds - 990)
    command.wait_until(lambda: _num_lines(trial.folder / "killed" / METRICS) > 990 + last)
    command.kill()
    trial.end(command)
    trial.resume("killed", whole)


def keeps_memory(trial: Trial) -> None:
    """Run 3,000 rounds: after the 500th the memory does not grow."""
    draws, outcome = Draws(trial.random), "refused"
    pages: dict[int, list[int]] = {}
    while outcome == "refused":
        _lengthen(trial, ROUNDS, draws.composed())
        command = trial.start("long")
        pages = _pages(command, trial.folder / "long" / METRICS)
        outcome = trial.end(command)
    rounds = {lines - 1: median(found) for lines, found in pages.items() if lines}
    if outcome != "completed" or not {1, ROUNDS // EVERY - 1} <= rounds.keys():
        raise FindingError(f"{ROUNDS} rounds: {outcome}, {trial.errors('long-output')}")
    grown = (rounds[ROUNDS // EVERY - 1] - rounds[1]) * PAGE / 1e6
    if grown > MOST_MEGABYTES:
        raise FindingError(f"memory grows by {grown:.1f} MB from round {EVERY} to {ROUNDS - EVERY}")


def _lengthen(trial: Trial, rounds: int, algorithm: object, log: int = EVERY, checkpoint: int = EVERY) -> None:
    """Make the trial's run a long one of short rounds."""
    every = {"val": rounds, "log": log, "checkpoint": checkpoint}
    given = [f"--algorithm={json.dumps(algorithm)}", f"--data.path={trial.folder / 'images.npz'}"]
    seed = next(flag for flag in trial.flags if flag.startswith("--seed_everything="))
    trial.flags = ["fit", *SHORT, *given, seed, f"--trainer.max_rounds={rounds}"]
    trial.flags += [f"--trainer.{name}_every_n_rounds={number}" for name, number in every.items()]


def _pages(command: Command, metrics: Path) -> dict[int, list[int]]:
    """Return the pages of memory that a process held until its end, by the number of lines of its metrics then."""
    pages: dict[int, list[int]] = {}

    def note() -> bool:
        with suppress(OSError, IndexError):
            held = int(Path(f"/proc/{command.process}/statm").read_text().split()[1])
            pages.setdefault(_num_lines(metrics), []).append(held)
        return False

    command.wait_until(note)
    return pages


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0
