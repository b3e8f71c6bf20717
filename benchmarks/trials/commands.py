"""Commands in forked processes, and the comparison of what two runs have left."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_fl.cli import main
from lightning_fl.flat_module import graph

PATIENCE_S = 240.0
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
EXACT = ("round", "step", "comm", "clients", "model")
"""Columns of metrics.csv that are the same for any number of processes; the others may differ by rounding."""
KILLED = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, 128 + signal.SIGTERM, 128 + signal.SIGHUP)


IGNORED = re.compile(r"^Exception ignored in.*?^KeyboardInterrupt: ?$", re.MULTILINE | re.DOTALL)
"""Python's own report of an interrupt inside one of its callbacks, such as those of the import lock, which it swallows."""


class FindingError(Exception):
    """Something that did not end as it should."""


@dataclass
class Command:
    """One command of `lightning-fl` in a process of its own.

    Attributes:
        name: its first word, such as `fit`.
        process: its number.
        folder: folder of its output.
    """

    name: str
    process: int
    folder: Path
    _status: int | None = field(default=None, init=False)

    @classmethod
    def start(cls, flags: Sequence[str], folder: Path, prepare: Callable[[], None] | None = None) -> Command:
        """Fork a process that runs a command.

        Args:
            flags: the command with its flags.
            folder: folder for its output.
            prepare: called in the new process before the command, for instance to limit the size of files.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("stdout", "stderr"):
            (folder / name).write_bytes(b"")  # the process may be killed before it opens them
        sys.stdout.flush()
        process = os.fork()
        if process:
            return cls(flags[0], process, folder)
        code = 70
        try:
            os.setsid()
            for name, stream in (("stdout", 1), ("stderr", 2)):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            sys.argv = ["lightning-fl", *flags]
            graph.BACKEND = "eager"  # torch's compiler would take up to minutes
            if prepare is not None:
                prepare()
            code = _exit_code()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def is_running(self) -> bool:
        """True until the process has ended."""
        if self._status is None:
            done, status = os.waitpid(self.process, os.WNOHANG)
            self._status = status if done else None
        return self._status is None

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds or the process has ended.

        Raises:
            FindingError: neither happens in four minutes; the process is killed.
        """
        end = time.monotonic() + PATIENCE_S
        while self.is_running() and not condition():
            if time.monotonic() > end:
                self.kill()
                raise FindingError(f"it did not end within {PATIENCE_S:.0f} s")
            time.sleep(0.003)

    def kill(self, by: int = signal.SIGKILL) -> None:
        """Send a signal to the process if it still runs."""
        if self.is_running():
            os.kill(self.process, by)

    def kill_after(self, seconds: float, by: int = signal.SIGKILL) -> None:
        """Let the process run for some seconds, and then send it a signal."""
        end = time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() > end)
        self.kill(by)

    def end(self) -> str:
        """Wait for the end, and return how the command ended: completed, refused, stopped or killed.

        Raises:
            FindingError: it ended in another way than with exit code 0, one sentence and exit code 2, 1 or 130, or a signal of
                ours. A study may also end with exit code 1 and the list of the runs that are left.
        """
        self.wait_until(lambda: False)
        assert self._status is not None
        code = os.waitstatus_to_exitcode(self._status)
        errors = (self.folder / "stderr").read_text(errors="replace")
        if code in KILLED:
            return "killed"
        if "Traceback" in IGNORED.sub("", errors) or code not in (0, 1, 2, INTERRUPTED):
            raise FindingError(f"exit code {code}: {_tail(errors)}")
        if code == 0:
            return "completed"
        if self.name == "study" and code == 1 and ", seed " in (self.folder / "stdout").read_text(errors="replace"):
            return "stopped"
        sentences = [line for line in errors.splitlines() if line.startswith("lightning-fl")]
        if len(sentences) != 1 or len(sentences[0]) > 1200:
            raise FindingError(f"exit code {code} with {len(sentences)} sentences: {_tail(errors)}")
        return "refused" if code == 2 else "stopped"


def _exit_code() -> int:
    try:
        main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 70
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # from here on it would only stop this program's own lines
    return 0


def _tail(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return " / ".join(lines[-2:])[-400:]


def run_anew(flags: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a command in a new interpreter, which may start further processes."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "lightning_fl_command.py"  # a file, because the further processes run it again
    script.write_text("from lightning_fl.cli import main\n\nmain()\n")
    program = [sys.executable, str(script), *flags]
    with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as errors:
        return subprocess.Popen(program, stdout=out, stderr=errors, start_new_session=True)


def require_same(whole: Path, other: Path, tolerance: float = 0.0) -> None:
    """Compare two runs' rows but for times, their bits sent and their weights.

    Args:
        whole: folder of a run.
        other: folder of another one.
        tolerance: distance of averages and weights, relative to the larger one or to 1, that counts as equal; counts are exact.

    Raises:
        FindingError: they differ.
    """
    expected, found = rows(whole / "metrics.csv"), rows(other / "metrics.csv")
    differing = [
        f"round {a.get('round')}: {key} {a.get(key)} and {b.get(key)}"
        for a, b in zip(expected, found, strict=False)
        for key in {**a, **b}
        if not _same_value(a.get(key), b.get(key), 0.0 if key.startswith(EXACT) else tolerance)
    ]
    if differing or len(expected) != len(found):
        raise FindingError(f"rows differ ({len(expected)} and {len(found)}): {'; '.join(differing[:3])}")
    if _bits(whole) != _bits(other):
        raise FindingError("communication.json differs")
    weights, others = (torch.load(folder / "model.ckpt", weights_only=True)["state_dict"] for folder in (whole, other))
    if weights.keys() != others.keys() or any(not _equal(weights[name], others[name], tolerance) for name in weights):
        raise FindingError("the weights differ")


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv without the columns of times."""
    if not path.is_file():
        return []
    with open(path, newline="") as file:
        return [{k: v for k, v in row.items() if not k.startswith("time/round")} for row in csv.DictReader(file)]


def _bits(folder: Path) -> Any:
    path = folder / "communication.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _same_value(a: str | None, b: str | None, tolerance: float) -> bool:
    if a == b or not tolerance or not a or not b:
        return a == b
    return math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=tolerance)


def _equal(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))
