"""Folder of a report: a new report replaces the files of the previous one, and no others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

WRITTEN = ".report-files.json"
"""File with the names and digests of the report's files, which distinguish them from the user's own."""


def remove_earlier(folder: Path) -> None:
    """Remove the files of the previous report, except those that were changed since."""
    with suppress(FileNotFoundError, ValueError, AttributeError):  # no earlier report, or a record that was edited
        for name, digest in json.loads((folder / WRITTEN).read_text()).items():
            path = folder / Path(name).name
            if path.is_file() and _digest(path) == digest:
                path.unlink()


def note_written(folder: Path, names: Iterable[str]) -> None:
    """Record the names and digests of the files that this report has written."""
    (folder / WRITTEN).write_text(json.dumps({name: _digest(folder / name) for name in names}, indent=1) + "\n")


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
