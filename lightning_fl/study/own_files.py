"""Source files of the user's own classes: a run keeps their digests, because its configuration only names the classes."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pydoc import locate
from typing import Any

from lightning_fl.outputs.files import replacing

SOURCES = "sources.json"
INSTALLED, PYTHON = {"site-packages", "dist-packages"}, Path(os.__file__).parent
"""Names of folders of installed packages, and Python's own folder: files in them are not compared."""


def own_files(config: Any) -> tuple[Path, ...]:
    """Return the files that define the classes of a configuration and their bases, except those of installed packages."""
    files = set[Path]()
    for path in _class_paths(config):
        with suppress(Exception):  # a report may read runs on a machine that lacks the module
            named = locate(path)
            for kind in getattr(named, "__mro__", (named,)):
                file = getattr(sys.modules.get(kind.__module__), "__file__", None)
                if file is not None and kind.__module__.partition(".")[0] != "lightning_fl" and _is_own(Path(file)):
                    files.add(Path(file))
    return tuple(sorted(files))


def _is_own(file: Path) -> bool:
    return not INSTALLED & {*file.parts} and not file.is_relative_to(PYTHON)


def _class_paths(config: Any) -> Iterator[str]:
    if isinstance(config, Mapping) and isinstance(config.get("class_path"), str):
        yield config["class_path"]
    inner = config.values() if isinstance(config, Mapping) else config if isinstance(config, list) else ()
    for one in inner:
        yield from _class_paths(one)


def keep_digests(folder: Path, files: Sequence[Path]) -> None:
    """Write the digests of the files with which a run begins into its folder."""
    with replacing(folder / SOURCES, "w") as file:
        file.write(json.dumps(_digests(files), indent=1) + "\n")


def changed_files(folder: Path, files: Sequence[Path]) -> list[str]:
    """Return those of the files that have changed since the run in a folder began; none for a run without digests."""
    kept: Any = None
    with suppress(OSError, ValueError, RecursionError):
        kept = json.loads((folder / SOURCES).read_text(encoding="utf-8"))
    kept = kept if isinstance(kept, dict) else {}
    return [name for name, digest in _digests(files).items() if kept.get(name, digest) != digest]


def _digests(files: Sequence[Path]) -> dict[str, str]:
    """Return the digests of files by their paths, relative to the current folder for files in it."""
    here = Path.cwd()
    names = {file: file.relative_to(here) if file.is_relative_to(here) else file for file in files if file.is_file()}
    return {str(name): hashlib.sha256(file.read_bytes()).hexdigest() for file, name in names.items()}
