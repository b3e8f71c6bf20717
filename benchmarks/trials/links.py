"""Links in the folder of a run, and files of others beside its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from trials.commands import FindingError
from trials.trial import LAST, Trial

PLACES = ("checkpoints", "checkpoints/client_states", "checkpoints/frozen", ".")
"""Folders of a run that its user may have moved elsewhere; `.` stands for none."""
NAMES = (
    "7/clients/0.rows",
    "9",
    "notes.txt",
    "0123456789abcdef.pt",
    ".last.ckpt.7.writing.txt",
    "old/1/clients/0.rows",
)
"""Names of other people's files, some as a run's own."""


def linked(trial: Trial) -> None:
    """Stop it, move a folder of it elsewhere, put a link in its place and other people's files beside, and resume it."""
    whole = trial.whole()
    if whole is None:
        return
    command = trial.start("linked")
    trial.until_saved(command, "linked")
    command.kill()
    trial.end(command)
    folder, elsewhere = trial.folder / "linked", trial.folder / "elsewhere"
    if not (folder / LAST).is_file():
        return
    place = folder / PLACES[trial.whole_numbers(len(PLACES))]
    if place != folder and place.is_dir():
        shutil.move(place, elsewhere)
        place.symlink_to(elsewhere)
    before = {}
    for parent in (folder / "checkpoints", folder / "checkpoints" / "client_states", folder / "checkpoints" / "frozen"):
        if parent.is_dir():
            before |= _put(parent)
    before |= _put(trial.folder / "strangers")
    (folder / LAST.parent / "linked").symlink_to(trial.folder / "strangers")
    trial.resume("linked", whole)
    lost = [str(path) for path, content in before.items() if not path.is_file() or path.read_text() != content]
    if lost:
        raise FindingError(f"files of others are gone or changed: {', '.join(lost)}")
    trial.outcomes["other people's files are left"] += 1


def _put(folder: Path) -> dict[Path, str]:
    """Write other people's files where there are none, and return their content."""
    written = {}
    for name in NAMES:
        path = folder / name
        if not path.exists() and not any(parent.is_file() for parent in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(path))
            written[path] = str(path)
    return written
