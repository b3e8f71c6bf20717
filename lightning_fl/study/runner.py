"""Run the fits of a study side by side, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, BinaryIO

from tqdm import tqdm

from lightning_fl.outputs.files import replacing
from lightning_fl.outputs.run_folder import LAST, METRICS
from lightning_fl.study.study_file import PlannedRun

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

DONE, FAILED, LOCK, OUTPUT = "done.json", "failed.json", ".study.lock", "output.txt"
PROGRAM = "from lightning_fl.cli import main; main()"
QUIET = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")
POLL_SECONDS = 0.5
PATIENCE_SECONDS = 60.0


@dataclass
class Outcome:
    """Runs of a study by how they ended.

    Attributes:
        done: runs that are complete, in the study's order.
        failed: last line that each failed run printed.
        elsewhere: runs that another process trains.
    """

    done: list[PlannedRun] = field(default_factory=list)
    failed: dict[PlannedRun, str] = field(default_factory=dict)
    elsewhere: list[PlannedRun] = field(default_factory=list)


@dataclass
class _Fit:
    """Fit that is under way."""

    run: PlannedRun
    slot: int
    process: subprocess.Popen[bytes]
    lock: BinaryIO
    began: float


class _Pace:
    """Rounds by second of the runs that are to be trained."""

    def __init__(self, runs: Sequence[PlannedRun]) -> None:
        self.runs, self.known, self.began = tuple(runs), sum(map(_rounds_done, runs)), time.monotonic()

    def left(self, runs: Sequence[PlannedRun]) -> str:
        """Return in words how many runs are left, and how long they take at this pace; empty if none are."""
        if not runs:
            return ""
        trained = sum(map(_rounds_done, self.runs)) - self.known
        rounds = sum(run.num_rounds - _rounds_done(run) for run in runs)
        seconds = (time.monotonic() - self.began) * rounds / trained if trained else None
        return f" ({len(runs)} of {len(self.runs)} left{'' if seconds is None else f', about {_duration(seconds)}'})"


def train(runs: Sequence[PlannedRun], jobs: int, threads: int, retry: bool, num_accelerators: int = 0) -> Outcome:
    """Train all runs that are not done, `jobs` at once, and show the progress.

    A run that was stopped is resumed. Ctrl-C stops the fits, which can be resumed by the same call.

    Args:
        runs: runs in the order in which they begin.
        jobs: number of processes.
        threads: threads of each, which decide the last bits of its numbers.
        retry: try runs again that failed before.
        num_accelerators: the processes get GPUs in turn if there are several.
    """
    outcome, waiting, active = Outcome(), list[PlannedRun](), list[_Fit]()
    for run in runs:
        if (run.folder / DONE).is_file():
            continue
        if (run.folder / FAILED).is_file() and not retry:
            outcome.failed[run] = json.loads((run.folder / FAILED).read_text())["said"]
            continue
        waiting.append(run)
    pace = _Pace(waiting)
    slots: SimpleQueue[int] = SimpleQueue()
    for slot in range(jobs):
        slots.put(slot)
    with _progress(runs, waiting) as bar, _stopping(active):
        while waiting or active:
            while waiting and not slots.empty():
                run, slot = waiting.pop(0), slots.get()
                fit = _begin(run, slot, threads, slot % num_accelerators if num_accelerators > 1 else None)
                if fit is None:
                    outcome.elsewhere.append(run)
                    slots.put(slot)
                else:
                    active.append(fit)
            for fit in [fit for fit in active if fit.process.poll() is not None]:
                active.remove(fit)
                slots.put(fit.slot)
                _end(fit, outcome, bar, pace.left([*waiting, *(other.run for other in active)]))
            bar.update(sum(map(_rounds_done, runs)) - bar.n)
            if active:
                time.sleep(POLL_SECONDS)
    outcome.done = [run for run in runs if (run.folder / DONE).is_file()]
    outcome.elsewhere = [run for run in outcome.elsewhere if run not in outcome.done]
    return outcome


def command(run: PlannedRun, threads: int) -> list[str]:
    """Return the arguments of a run's fit."""
    resumed = ["--ckpt_path=last"] if (run.folder / LAST).is_file() else []
    return [
        "fit",
        f"--trainer.threads={threads}",  # first, so that the study's own value wins
        *run.arguments,
        f"--trainer.default_root_dir={run.folder}",
        *QUIET,
        *resumed,
    ]


def _begin(run: PlannedRun, slot: int, threads: int, device: int | None) -> _Fit | None:
    """Start a fit; None if another process trains this run, or has trained it since this study began."""
    run.folder.mkdir(parents=True, exist_ok=True)
    lock = (run.folder / LOCK).open("ab")
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
    if (run.folder / DONE).is_file():
        lock.close()
        return None
    (run.folder / FAILED).unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
    with (run.folder / OUTPUT).open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *command(run, threads)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            # The fit holds the lock too: a study that is killed and begun again does not train its run a second time.
            pass_fds=(lock.fileno(),) if fcntl is not None else (),
        )
    return _Fit(run, slot, process, lock, time.monotonic())


def _end(fit: _Fit, outcome: Outcome, bar: tqdm[Any], left: str) -> None:
    """Note how a fit ended, and print a line about it and about what is left."""
    run, seconds = fit.run, time.monotonic() - fit.began
    name = f"{run.cell}, seed {run.seed}"
    if fit.process.returncode == 0:
        with replacing(run.folder / DONE, "w") as file:
            file.write(json.dumps({"arguments": run.arguments, "seconds": round(seconds, 1)}, indent=1) + "\n")
        bar.write(f"{name}: done in {_duration(seconds)}{left}", file=sys.stderr)
    else:
        lines = (run.folder / OUTPUT).read_text(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {fit.process.returncode}")
        with replacing(run.folder / FAILED, "w") as file:
            file.write(json.dumps({"exit_code": fit.process.returncode, "said": said}, indent=1) + "\n")
        outcome.failed[run] = said
        bar.write(f"{name}: failed{left}: {said}", file=sys.stderr)
    fit.lock.close()


@contextmanager
def _progress(runs: Sequence[PlannedRun], waiting: Sequence[PlannedRun]) -> Iterator[tqdm[Any]]:
    """Show the rounds of all runs, and the time left."""
    total, known = sum(run.num_rounds for run in runs), sum(map(_rounds_done, runs))
    hidden = not waiting or not sys.stderr.isatty()
    about = f"{len(waiting)} of {len(runs)} runs to train"
    with tqdm(total=total, initial=known, desc=about, unit="round", dynamic_ncols=True, disable=hidden) as bar:
        yield bar


@contextmanager
def _stopping(active: list[_Fit]) -> Iterator[None]:
    """Let the fits end in order if this process is interrupted or told to end; each keeps its last complete round."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for fit in active:
            with suppress(ProcessLookupError):
                fit.process.terminate()  # a program that runs in the background may ignore SIGINT
        for fit in active:
            try:
                fit.process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                fit.process.kill()
            fit.lock.close()


def _rounds_done(run: PlannedRun) -> int:
    """Return the number of rounds that a run has logged."""
    if (run.folder / DONE).is_file():
        return run.num_rounds
    try:
        with (run.folder / METRICS).open("rb") as file:
            return min(max(sum(1 for _ in file) - 1, 0), run.num_rounds)
    except OSError:
        return 0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
