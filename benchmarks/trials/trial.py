"""One trial: a random configuration, its runs, and what must be left of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from trials.commands import Command, FindingError, require_same, rows
from trials.configurations import draw, write_images

LAST = Path("checkpoints") / "last.ckpt"


class Trial:
    """One random configuration, with the folder of its runs.

    Attributes:
        random: random numbers of the trial.
        folder: folder for everything that the trial writes.
        flags: the command whose run is tried.
        outcomes: number of commands by how they ended.
        seconds: time that the unbroken run took.
    """

    def __init__(self, random: np.random.Generator, folder: Path) -> None:
        self.random, self.folder = random, folder
        self.outcomes: Counter[str] = Counter()
        folder.mkdir(parents=True)
        write_images(folder / "images.npz")
        self.flags = ["fit", *draw(random, folder / "images.npz")]
        self.seconds = 0.0

    def command(self, name: str, *more: str) -> list[str]:
        """Return the trial's command for a run in a folder of that name."""
        return [*self.flags, *more, f"--trainer.default_root_dir={self.folder / name}"]

    def start(self, name: str, *more: str, prepare: Callable[[], None] | None = None) -> Command:
        """Start the command for a run in a folder of that name."""
        return Command.start(self.command(name, *more), self.folder / f"{name}-output", prepare)

    def end(self, command: Command) -> str:
        """Wait for the end of a command, and count it."""
        outcome = command.end()
        self.outcomes[outcome] += 1
        return outcome

    def whole(self) -> Path | None:
        """Run the command without a mishap; return its folder, or None if it is refused."""
        started = time.monotonic()
        outcome = self.end(self.start("whole"))
        self.seconds = time.monotonic() - started
        if outcome == "stopped":
            raise FindingError("it ended with exit code 1, though nothing happened to it")
        return self.folder / "whole" if outcome == "completed" else None

    def draw_accepted(self, *more: str) -> None:
        """Draw configurations until a run completes with these further flags, for trials that are too dear to be refused."""
        self.flags += more
        for turn in range(20):
            if self.end(self.start(f"tried-{turn}")) == "completed":
                return
            self.flags = ["fit", *draw(self.random, self.folder / "images.npz"), *more]

    def resume(self, name: str, whole: Path) -> None:
        """Resume a run, and compare it with the unbroken one."""
        if self.end(self.start(name, "--ckpt_path=last")) != "completed":
            raise FindingError(f"it does not resume: {self.errors(f'{name}-output')}")
        require_same(whole, self.folder / name)
        self.outcomes["resumed identically"] += 1

    def until_saved(self, command: Command, name: str) -> None:
        """Wait until a run has saved its first checkpoint, or has ended."""
        command.wait_until((self.folder / name / LAST).is_file)

    def moment(self) -> float:
        """Draw a number of seconds within the time of the unbroken run."""
        return float(self.random.uniform(0, self.seconds))

    def whole_numbers(self, high: int) -> int:
        """Draw a number from 0 to `high` - 1."""
        return int(self.random.integers(max(high, 1)))

    def one_of(self, *values: int) -> int:
        """Draw one of the values."""
        return values[self.whole_numbers(len(values))]

    def sentence(self, name: str) -> str:
        """Return the sentence with which a command was refused; empty if it was not. Folders of runs are left out."""
        lines = (self.folder / f"{name}-output" / "stderr").read_text(errors="replace").splitlines()
        said = [line for line in lines if line.startswith("lightning-fl")]
        return " ".join(said).replace(str(self.folder / name), "…")

    def errors(self, name: str) -> str:
        """Return the end of what a command printed on standard error."""
        return (self.folder / name / "stderr").read_text(errors="replace")[-300:]

    @contextmanager
    def small_disk(self, name: str, num_bytes: int) -> Iterator[Path | None]:
        """Mount a file system of this size in memory, which the body may `grow`; None without the rights to mount it."""
        disk = self.folder / name
        disk.mkdir()
        size = f"size={max(1, num_bytes // 4096) * 4}k"
        mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)]
        if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
            shutil.rmtree(disk)
            yield None
            return
        try:
            yield disk
        finally:
            subprocess.run(["umount", "-l", disk], check=False)


def grow(disk: Path) -> None:
    """Make a file system of `Trial.small_disk` large enough for everything."""
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def require_tidy(folder: Path) -> None:
    """Raise `FindingError` if temporary files are left, or rows that are not whole."""
    left = [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.name.endswith((".writing", ".linking", ".tmp"))
    ]
    if left:
        raise FindingError(f"temporary files are left: {', '.join(left)}")
    rows(folder / "metrics.csv")
