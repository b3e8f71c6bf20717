"""Mishaps of runs in two processes, which start anew and so take seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from trials.commands import PATIENCE_S, FindingError, require_same, run_anew
from trials.trial import LAST, Trial

TOLERANCE = 1e-6
"""Distance of averages and weights that the order of summation may leave, in float64."""


def process_dies(trial: Trial) -> None:
    """Kill one of its two processes: the other ends as well, and the run resumes."""
    trial.draw_accepted()
    trial.flags += _processes(2)
    if _end(trial, run_anew(trial.command("whole"), trial.folder / "whole-output"), (0, 2)):
        return
    command = _run_until_saved(trial, "killed")
    pids = [command.pid, *_children(command.pid)]
    with suppress(ProcessLookupError):
        os.kill(pids[trial.whole_numbers(len(pids))], signal.SIGKILL)
    _end(trial, command)
    require_gone(pids)
    _end(trial, run_anew(trial.command("killed", "--ckpt_path=last"), trial.folder / "killed-output"), (0,))
    require_same(trial.folder / "whole", trial.folder / "killed")
    trial.outcomes["resumed identically"] += 1


def other_processes(trial: Trial) -> None:
    """End it with SIGTERM, and resume it with another number of processes: the same but for the order of summation."""
    trial.flags += [
        "--trainer.precision=64-true"
    ]  # in which rounding changes no choice, such as that of the largest numbers
    whole = trial.whole()
    if whole is None:
        return
    first = 1 + trial.whole_numbers(2)
    command = _run_until_saved(trial, "killed", *_processes(first))
    pids = [command.pid, *_children(command.pid)]
    with suppress(ProcessLookupError):
        os.killpg(command.pid, signal.SIGTERM) if trial.whole_numbers(2) else os.kill(command.pid, signal.SIGTERM)
    _end(trial, command)
    require_gone(pids)
    resumed = trial.command("killed", *_processes(3 - first), "--ckpt_path=last")
    _end(trial, run_anew(resumed, trial.folder / "killed-output"), (0,))
    require_same(whole, trial.folder / "killed", TOLERANCE)
    trial.outcomes["resumed identically"] += 1


def require_gone(pids: Sequence[int], patience_s: float = 30.0) -> None:
    """Wait until processes have ended.

    Raises:
        FindingError: some have not after `patience_s`; they are killed.
    """
    end = time.monotonic() + patience_s
    while any(map(_lives, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    if left := [pid for pid in pids if _lives(pid)]:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise FindingError(f"{len(left)} processes lived on after the end of another")


def _processes(number: int) -> list[str]:
    return [f"--trainer.devices={number}", f"--trainer.strategy={'ddp' if number > 1 else 'auto'}"]


def _run_until_saved(trial: Trial, name: str, *more: str) -> subprocess.Popen[bytes]:
    """Start the command in a new interpreter, and wait until it has saved its first checkpoint, or has ended."""
    command = run_anew(trial.command(name, *more), trial.folder / f"{name}-output")
    end = time.monotonic() + PATIENCE_S
    while command.poll() is None and not (trial.folder / name / LAST).is_file() and time.monotonic() < end:
        time.sleep(0.01)
    return command


def _children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return list(map(int, found.stdout.split()))


def _end(trial: Trial, command: subprocess.Popen[bytes], allowed: Sequence[int] = ()) -> int:
    """Wait for the end of a command, count it, and return its exit code.

    Raises:
        FindingError: it takes too long, or the exit code is not an allowed one; none given: it is another than 0, 1, or that of
            a signal of ours.
    """
    try:
        code = command.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(command.pid, signal.SIGKILL)
        raise FindingError(f"a run in new interpreters did not end within {PATIENCE_S:.0f} s") from None
    trial.outcomes["completed" if code == 0 else "refused" if code == 2 else "stopped" if code > 0 else "killed"] += 1
    if allowed and code not in allowed:
        names = sorted(trial.folder.glob("*-output/stderr"), key=lambda path: path.stat().st_mtime)
        raise FindingError(f"exit code {code}: {names[-1].read_text(errors='replace')[-300:]}")
    return code


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
