"""Mishaps of `torture.py`: what happens to a run, and what must be left of it."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trials.commands import PATIENCE_S, Command, FindingError, require_same, rows, run_anew
from trials.configurations import draw, write_images

LAST = Path("checkpoints") / "last.ckpt"


class Trial:
    """One random configuration, with the folder of its runs.

    Attributes:
        random: random numbers of the trial.
        folder: folder for everything that the trial writes.
        flags: the command whose run is tried.
        outcomes: number of commands by how they ended.
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
        return [*self.flags, f"--trainer.default_root_dir={self.folder / name}", *more]

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

    def resume(self, name: str, whole: Path) -> None:
        """Resume a run, and compare it with the unbroken one."""
        if self.end(self.start(name, "--ckpt_path=last")) != "completed":
            raise FindingError(f"it does not resume: {(self.folder / f'{name}-output' / 'stderr').read_text()[-300:]}")
        require_same(whole, self.folder / name)
        self.outcomes["resumed identically"] += 1

    def until_saved(self, command: Command, name: str) -> None:
        """Wait until a run has saved its first checkpoint, or has ended."""
        command.wait_until((self.folder / name / LAST).is_file)

    def whole_numbers(self, high: int) -> int:
        """Draw a number from 0 to `high` - 1."""
        return int(self.random.integers(max(high, 1)))


def nothing(trial: Trial) -> None:
    """Run it, and go on with it after its end, which changes nothing."""
    whole = trial.whole()
    if whole is not None:
        shutil.copytree(whole, trial.folder / "again")
        trial.resume("again", whole)


def killed(trial: Trial, by: int = signal.SIGKILL) -> None:
    """Kill it at any moment, perhaps twice, and resume it."""
    whole = trial.whole()
    if whole is None:
        return
    for turn in range(1 + trial.whole_numbers(2)):
        command = trial.start("killed", *(["--ckpt_path=last"] if turn else []))
        end = time.monotonic() + trial.random.uniform(0, trial.seconds)
        command.wait_until(lambda end=end: time.monotonic() > end)  # type: ignore[misc]
        command.kill(by)
        trial.end(command)
    trial.resume("killed", whole)


def terminated(trial: Trial) -> None:
    """End it with SIGTERM, as batch systems do."""
    killed(trial, signal.SIGTERM)


def small_files(trial: Trial) -> None:
    """Limit the size of files, as a full disk does, and resume it without the limit."""
    whole = trial.whole()
    if whole is None:
        return
    largest = max(path.stat().st_size for path in whole.rglob("*") if path.is_file())
    limit = int(trial.random.uniform(4096, 1.2 * largest))  # the limit holds for the command's output, too

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    trial.end(trial.start("limited", prepare=prepare))
    _require_tidy(trial.folder / "limited")
    trial.resume("limited", whole)


def full_disk(trial: Trial) -> None:
    """Run it on a small file system in memory, and resume it after that has grown; only root can make one."""
    whole = trial.whole()
    if whole is None or os.geteuid() != 0:
        return
    size = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file())
    disk = trial.folder / "full"
    disk.mkdir()
    pages = 1 + trial.whole_numbers(1 + int(1.2 * size / 4096))
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={pages * 4}k", "tmpfs", disk], check=False).returncode:
        return
    try:
        trial.end(trial.start("full"))
        _require_tidy(disk)
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        trial.resume("full", whole)
    finally:
        subprocess.run(["umount", "-l", disk], check=False)


def flipped_bit(trial: Trial) -> None:
    """Flip a bit in a file of its checkpoints, and resume it: that is refused, or harmless."""
    whole = trial.whole()
    if whole is None:
        return
    command = trial.start("flipped")
    trial.until_saved(command, "flipped")
    command.kill()
    trial.end(command)
    files = sorted(path for path in (trial.folder / "flipped" / "checkpoints").rglob("*") if path.stat().st_size)
    files = [path for path in files if path.is_file()]
    if not files:
        return
    path = files[trial.whole_numbers(len(files))]
    content = bytearray(path.read_bytes())
    content[trial.whole_numbers(len(content))] ^= 1 << trial.whole_numbers(8)
    path.write_bytes(content)
    if trial.end(trial.start("flipped", "--ckpt_path=last")) == "completed":
        require_same(whole, trial.folder / "flipped")
        trial.outcomes["resumed identically"] += 1


def two_in_one_folder(trial: Trial) -> None:
    """Start it a second time in the same folder while it runs: the second is refused, and the first not disturbed."""
    whole = trial.whole()
    if whole is None:
        return
    first = trial.start("shared")
    end = time.monotonic() + trial.random.uniform(0, trial.seconds)
    first.wait_until(lambda: time.monotonic() > end)
    ended_before = not first.is_running()
    second = Command.start(trial.command("shared"), trial.folder / "second-output")
    outcome, other = trial.end(second), trial.end(first)
    if other != "completed" and outcome != "completed":
        raise FindingError(f"the first run was {other}, the second {outcome}")
    if other == outcome == "completed" and not ended_before and not list((trial.folder / "shared").glob("earlier-*")):
        raise FindingError("both runs wrote into one folder")
    require_same(whole, trial.folder / "shared")


def process_dies(trial: Trial) -> None:
    """Kill one of its two processes: the other ends as well, and the run resumes."""
    trial.flags += ["--trainer.devices=2", "--trainer.strategy=ddp"]
    code = _end_of_two(trial, run_anew(trial.command("whole"), trial.folder / "whole-output"))
    if code not in (0, 2):
        raise FindingError(f"a run of two processes ended with exit code {code}")
    if code:
        return
    command = run_anew(trial.command("killed"), trial.folder / "killed-output")
    end = time.monotonic() + PATIENCE_S
    while command.poll() is None and not (trial.folder / "killed" / LAST).is_file() and time.monotonic() < end:
        time.sleep(0.01)
    children = subprocess.run(
        ["pgrep", "-P", str(command.pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    victims = [command.pid, *map(int, children)]
    with suppress(ProcessLookupError):
        os.kill(victims[trial.whole_numbers(len(victims))], signal.SIGKILL)
    _end_of_two(trial, command)
    end = time.monotonic() + 30
    while any(map(_lives, victims)) and time.monotonic() < end:
        time.sleep(0.1)
    if left := [pid for pid in victims if _lives(pid)]:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        raise FindingError("a process lived on after the other had died")
    if _end_of_two(trial, run_anew(trial.command("killed", "--ckpt_path=last"), trial.folder / "killed-output")) != 0:
        raise FindingError("the run of two processes does not resume")
    require_same(trial.folder / "whole", trial.folder / "killed")
    trial.outcomes["resumed identically"] += 1


def _end_of_two(trial: Trial, command: subprocess.Popen[bytes]) -> int:
    try:
        code = command.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(command.pid, signal.SIGKILL)
        raise FindingError(f"two processes did not end within {PATIENCE_S:.0f} s") from None
    trial.outcomes["completed" if code == 0 else "refused" if code == 2 else "stopped" if code > 0 else "killed"] += 1
    return code


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _require_tidy(folder: Path) -> None:
    """Raise `FindingError` if temporary files are left, or rows that are not whole."""
    left = [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.name.endswith((".writing", ".linking", ".tmp"))
    ]
    if left:
        raise FindingError(f"temporary files are left: {', '.join(left)}")
    rows(folder / "metrics.csv")


class Mishap(NamedTuple):
    """Mishap, and how often it is drawn in relation to others."""

    happen: Callable[[Trial], None]
    weight: float


MISHAPS = {
    "none": Mishap(nothing, 4),
    "kill -9": Mishap(killed, 3),
    "SIGTERM": Mishap(terminated, 1),
    "limited files": Mishap(small_files, 1),
    "full disk": Mishap(full_disk, 1),
    "flipped bit": Mishap(flipped_bit, 2),
    "two runs": Mishap(two_in_one_folder, 1),
    "dead process": Mishap(process_dies, 0.1),
}
