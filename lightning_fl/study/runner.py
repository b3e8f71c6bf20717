"""Run the fits of a study side by side, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, Protocol

from filelock import lock_descriptor
from tqdm import tqdm

from lightning_fl.checks import is_real
from lightning_fl.errors import UserError
from lightning_fl.outputs.files import Stamp, ends_of, reason_of, replacing, stamp_of
from lightning_fl.outputs.run_folder import LAST, METRICS, PREVIOUS
from lightning_fl.outputs.units import counted
from lightning_fl.report.records import read_run
from lightning_fl.study.own_files import changed_files, keep_digests
from lightning_fl.study.study_file import PlannedRun

DONE, FAILED, LOCK, OUTPUT = "done.json", "failed.json", ".study.lock", "output.txt"
PROGRAM = "from lightning_fl.cli import main; main()"
WATCH = """
import os, signal, threading
_study, _nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
os.dup2(_nothing, 0)
os.close(_nothing)
def _end():
    os.read(_study, 1)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=_end, daemon=True).start()
"""
"""First lines of a fit's program. They watch the pipe from the study, which the system closes however the study ends, and then
end the fit."""
QUIET = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")
KILLED = -9
"""Exit code of a process that SIGKILL ended, which cannot report it itself."""
OUT_OF_MEMORY = "SIGKILL ended it, which the system sends when memory runs out"
POLL_SECONDS = 0.5
PATIENCE_SECONDS = 60.0


@dataclass
class Outcome:
    """Runs of a study by their outcome.

    Attributes:
        done: runs that are complete, in the study's order.
        failed: last line that each failed run printed, or that it was killed.
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
    is_stopped: bool = False

    def close(self) -> None:
        """Release the lock and the pipe that the fit watches."""
        self.lock.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


class Supply(Protocol):
    """Runs to train; the next one may depend on the outcome of earlier ones."""

    def take(self) -> PlannedRun | None:
        """Return a run to begin now; None if there is none at this moment."""

    def is_over(self) -> bool:
        """True if no further run will come."""

    def should_stop(self, run: PlannedRun) -> bool:
        """True if a running fit should end after the round that it has logged."""

    def ended(self, run: PlannedRun, said: str | None) -> None:
        """Record the end of a run: the reason why it failed, or None if it is done or was stopped."""

    def elsewhere(self, run: PlannedRun) -> None:
        """Record that another process trains a run."""

    def left(self, active: Sequence[PlannedRun]) -> str:
        """Return the runs that are left, in words; empty if none is."""

    def rounds_done(self) -> int:
        """Return the number of finished rounds of all runs."""


class _Listed:
    """Supply of given runs.

    Args:
        runs: runs in the order in which they begin.
        retry: try runs again that failed before.
    """

    def __init__(self, runs: Sequence[PlannedRun], retry: bool) -> None:
        self.runs, self.outcome, self.waiting = runs, Outcome(), list[PlannedRun]()
        for run in runs:
            if is_done(run):
                continue
            if (run.folder / FAILED).is_file() and not retry:
                self.outcome.failed[run] = failure_of(run)
                continue
            self.waiting.append(run)
        self.to_train = tuple(self.waiting)
        self.known, self.began = sum(map(_rounds_logged, self.to_train)), time.monotonic()

    def take(self) -> PlannedRun | None:
        return self.waiting.pop(0) if self.waiting else None

    def is_over(self) -> bool:
        return not self.waiting

    def should_stop(self, run: PlannedRun) -> bool:
        return False

    def ended(self, run: PlannedRun, said: str | None) -> None:
        if said is not None:
            self.outcome.failed[run] = said

    def elsewhere(self, run: PlannedRun) -> None:
        self.outcome.elsewhere.append(run)

    def left(self, active: Sequence[PlannedRun]) -> str:
        """Return the number of runs left, and their time at the pace so far, in rounds per second."""
        runs = [*self.waiting, *active]
        if not runs:
            return ""
        trained = sum(map(_rounds_logged, self.to_train)) - self.known
        seconds = (time.monotonic() - self.began) * self.rounds_left(runs) / trained if trained > 0 else 0.0
        how = "at most" if self._may_end_early(runs) else "about"
        about = f", {how} {_duration(seconds)}" if round(seconds) else ""
        return f" ({len(runs)} of {len(self.to_train)} left{about})"

    def rounds_left(self, runs: Sequence[PlannedRun]) -> int:
        """Return the rounds left in these runs: as many as in the longest ended run of their combination, or as planned.

        A budget or a target may end runs before their last round.
        """
        ended = self._rounds_ended()
        return sum(max(0, max(ended[run.cell], default=run.num_rounds) - _rounds_logged(run)) for run in runs)

    def _rounds_ended(self) -> defaultdict[str, list[int]]:
        """Return the rounds of the ended runs of each combination."""
        ended = defaultdict[str, list[int]](list)
        for run in self.runs:
            if (run.folder / DONE).is_file():
                ended[run.cell].append(_rounds_logged(run))
        return ended

    def _may_end_early(self, runs: Sequence[PlannedRun]) -> bool:
        """True if some of these runs, of combinations without an ended run, may end early, as another combination has."""
        ended, planned = self._rounds_ended(), {run.cell: run.num_rounds for run in self.runs}
        has_unknown = any(run.cell not in ended for run in runs)
        return has_unknown and any(max(rounds) < planned[cell] for cell, rounds in ended.items())

    def rounds_done(self) -> int:
        return sum(map(rounds_done, self.runs))


def train(runs: Sequence[PlannedRun], jobs: int, threads: int, retry: bool, num_accelerators: int = 0) -> Outcome:
    """Train all runs that are not done, `jobs` at once, and show the progress.

    A stopped run is resumed, also if `max_time` stopped it and has been raised since. A finished run whose rows can no longer be
    read is trained again. Ctrl-C stops the fits; the same call resumes them.

    Args:
        runs: runs in the order in which they begin.
        jobs: number of processes.
        threads: threads of each, which decide the last bits of its numbers.
        retry: try runs that failed before again.
        num_accelerators: the processes get GPUs in turn if there are several.
    """
    supply = _Listed(runs, retry)
    about = f"{len(supply.waiting)} of {len(runs)} runs to train"
    total = sum(run.num_rounds for run in runs)
    train_all(supply, jobs, threads, num_accelerators, about if supply.waiting else "", total)
    outcome = supply.outcome
    outcome.done = [run for run in runs if run not in outcome.failed and is_done(run)]
    outcome.elsewhere = [run for run in outcome.elsewhere if run not in outcome.done]
    return outcome


def train_all(supply: Supply, jobs: int, threads: int, num_accelerators: int, about: str, num_rounds: int) -> None:
    """Train runs until their supply is over, `jobs` at once, and show the progress.

    Args:
        supply: runs; it is told how each ends.
        jobs: number of processes.
        threads: threads of each.
        num_accelerators: the processes get GPUs in turn if there are several.
        about: title of the progress bar; empty for no bar.
        num_rounds: rounds of all runs.
    """
    active = list[_Fit]()
    slots: SimpleQueue[int] = SimpleQueue()
    for slot in range(jobs):
        slots.put(slot)
    with _progress(supply, about, num_rounds) as bar, _stopping(active):
        while True:
            while not slots.empty() and (run := supply.take()) is not None:
                slot = slots.get()
                try:
                    if note := _beginning(run)[1]:
                        bar.write(f"{run.name}: {note}", file=sys.stderr)
                    fit = _begin(run, slot, threads, slot % num_accelerators if num_accelerators > 1 else None)
                except OSError as error:
                    supply.ended(run, f"{error.filename or run.folder} cannot be written ({reason_of(error)})")
                    slots.put(slot)
                    continue
                if fit is None:
                    supply.elsewhere(run)
                    slots.put(slot)
                else:
                    active.append(fit)
            finished = [fit for fit in active if fit.process.poll() is not None]
            for fit in finished:
                active.remove(fit)
                slots.put(fit.slot)
                _end(fit, supply, bar, [other.run for other in active])
            for fit in active:
                if not fit.is_stopped and supply.should_stop(fit.run):
                    fit.is_stopped = True
                    fit.process.terminate()
            bar.update(supply.rounds_done() - bar.n)
            if not active and supply.is_over():
                return
            if not finished:
                time.sleep(POLL_SECONDS)


def command(run: PlannedRun, threads: int) -> list[str]:
    """Return the arguments of a run's fit."""
    checkpoint = _beginning(run)[0]
    last = run.folder / LAST
    resumed = [] if checkpoint is None else [f"--ckpt_path={'last' if checkpoint == last else checkpoint}"]
    return [
        "fit",
        f"--trainer.threads={threads}",  # first, so that the study's own value wins
        *run.arguments,
        f"--trainer.default_root_dir={run.folder}",
        *QUIET,
        *resumed,
    ]


def _beginning(run: PlannedRun) -> tuple[Path | None, str | None]:
    """Return the checkpoint from which a run resumes, None for a new run, and a note on damaged files."""
    last, previous = run.folder / LAST, run.folder / PREVIOUS
    ends_well = is_done(run)
    has_ended = (run.folder / DONE).is_file() or _content(run, FAILED).get("exit_code") == 0
    if has_ended and not ends_well and (problem := _problem(run)) is not None:
        return None, f"it was done, and is trained again from the beginning: {problem}"
    if not last.is_file() or ends_well or _is_whole(last):
        return (last if last.is_file() else None), None
    if _is_whole(previous):
        return previous, f"{last} is damaged, so the run goes on from {previous}."
    return None, f"{last} is damaged, so the run begins again."


def _is_whole(checkpoint: Path) -> bool:
    """True if a checkpoint is a file of torch without damaged parts."""
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            return archive.testzip() is None
    except Exception:  # a damaged file raises any type of error
        return False


def _problem(run: PlannedRun) -> str | None:
    """Return the reason why the rows of a run cannot be read; None if they can."""
    try:
        read_run(run.folder)
    except UserError as error:
        return str(error)
    return None


def _content(run: PlannedRun, name: str) -> dict[str, Any]:
    """Return the content of done.json or failed.json; {} if there is none, or if it is damaged."""
    path = run.folder / name
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return content if isinstance(content, dict) else {}
    return {}


def failure_of(run: PlannedRun) -> str:
    """Return the reason why a run failed."""
    return str(_content(run, FAILED).get("said", f"{FAILED} cannot be read"))


def is_done(run: PlannedRun) -> bool:
    """True if a run has ended and its rows can be read, unless a time limit ended it that has been raised since."""
    if not (run.folder / DONE).is_file():
        return False
    try:
        record = read_run(run.folder)
    except UserError:
        return False
    limit = _content(run, DONE).get("max_seconds", 0)  # without it, any other time may let the run go on
    if limit is None or not is_real(limit) or record.num_rounds >= run.num_rounds:
        return True
    return run.max_seconds is not None and run.max_seconds <= limit


def is_locked(run: PlannedRun) -> bool:
    """True if a process trains a run."""
    path = run.folder / LOCK
    if not path.is_file():
        return False
    with path.open("ab") as lock:
        return not lock_descriptor(lock.fileno(), blocking=False)


def _begin(run: PlannedRun, slot: int, threads: int, device: int | None) -> _Fit | None:
    """Start a fit; None if another process trains this run, or has trained it since this study began.

    Raises:
        OSError: a file of the run's folder cannot be written.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        lock = stack.enter_context((run.folder / LOCK).open("ab"))
        if not lock_descriptor(lock.fileno(), blocking=False) or is_done(run):
            return None
        process = _start(run, threads, device, lock)
        stack.pop_all()
    return _Fit(run, slot, process, lock, time.monotonic())


def _start(run: PlannedRun, threads: int, device: int | None, lock: BinaryIO) -> subprocess.Popen[bytes]:
    """Start the fit of a run, which holds its lock too."""
    words = command(run, threads)
    if not words[-1].startswith("--ckpt_path="):  # a run that goes on keeps the digests with which it began
        keep_digests(run.folder, run.own_files)
    for name in (DONE, FAILED):
        (run.folder / name).unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = _name_of(device)
    with (run.folder / OUTPUT).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", WATCH + PROGRAM, *words],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            # The fit also holds the lock, so that a study that is killed and started again does not train the run twice.
            pass_fds=(lock.fileno(),) if os.name == "posix" else (),
        )


def _name_of(device: int) -> str:
    """Return the name of one of the GPUs that the study itself may use."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return names[device] if any(names) else str(device)


def _end(fit: _Fit, supply: Supply, bar: tqdm[Any], active: Sequence[PlannedRun]) -> None:
    """Record the end of a fit, and print a line about it and about the runs that are left."""
    run, seconds = fit.run, time.monotonic() - fit.began
    problem = _problem(run)
    if problem is None and (fit.process.returncode == 0 or fit.is_stopped):
        with replacing(run.folder / DONE, "w") as file:
            done = {"arguments": run.arguments, "seconds": round(seconds, 1), "max_seconds": run.max_seconds}
            file.write(json.dumps(done, indent=1) + "\n")
        supply.ended(run, None)
        how = "stopped early" if fit.is_stopped else "done"
        bar.write(f"{run.name}: {how} in {_duration(seconds)}{supply.left(active)}", file=sys.stderr)
    else:
        lines = (run.folder / OUTPUT).read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {fit.process.returncode}")
        last = OUT_OF_MEMORY if fit.process.returncode == KILLED else last
        said = last if problem is None or fit.process.returncode else problem
        with replacing(run.folder / FAILED, "w") as file:
            file.write(json.dumps({"exit_code": fit.process.returncode, "said": said}, indent=1) + "\n")
        supply.ended(run, said)
        bar.write(f"{run.name}: failed{supply.left(active)}: {said}", file=sys.stderr)
    fit.close()


@contextmanager
def _progress(supply: Supply, about: str, num_rounds: int) -> Iterator[tqdm[Any]]:
    """Show the rounds of all runs, and the time left."""
    done, hidden = supply.rounds_done(), not about or not sys.stderr.isatty()
    with tqdm(total=num_rounds, initial=done, desc=about, unit="round", dynamic_ncols=True, disable=hidden) as bar:
        yield bar


@contextmanager
def _stopping(active: list[_Fit]) -> Iterator[None]:
    """End the fits properly if this process is interrupted or terminated; each keeps its last complete round."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for fit in active:
            with suppress(ProcessLookupError):
                fit.process.terminate()  # a program that runs in the background may ignore SIGINT
        for fit in active:
            try:
                fit.process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                fit.process.kill()
            fit.close()


def changes_since(runs: Sequence[PlannedRun], out: Path) -> str | None:
    """Return the sentence about runs that began before one of the user's own files changed; None without such runs."""
    begun = [run for run in runs if (run.folder / METRICS).is_file()]
    changed = [(run.cell, names) for run in begun if (names := changed_files(run.folder, run.own_files))]
    if not changed:
        return None
    files, cells = sorted({name for _, names in changed for name in names}), dict.fromkeys(cell for cell, _ in changed)
    return (
        f"{', '.join(files)} {'has' if len(files) == 1 else 'have'} changed since {counted(len(changed), 'run')} of "
        f"{', '.join(cells)} began, whose results the study keeps: to train with the changed code, remove their folders in {out}."
    )


def rounds_done(run: PlannedRun) -> int:
    """Return the number of rounds that a run has logged, all of them if it has ended."""
    return run.num_rounds if (run.folder / DONE).is_file() else _rounds_logged(run)


def _rounds_logged(run: PlannedRun) -> int:
    """Return the number of rounds up to the last row of a run; some rounds may have no row."""
    path = run.folder / METRICS
    return min(_rounds_in(path, stamp_of(path)), run.num_rounds)


@lru_cache(10_000)
def _rounds_in(path: Path, stamp: Stamp) -> int:
    """Return the number of rounds up to the last row of a metrics.csv with this stamp."""
    try:
        columns, last = ends_of(path)
        return int(last.split(b",")[columns.strip().split(b",").index(b"round")]) + 1
    except (OSError, ValueError, IndexError):
        return 0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
