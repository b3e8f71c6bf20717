"""Files that are complete at any moment, and errors of writing as sentences."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from lightning_fl.errors import FileError

LEFTOVER = re.compile(r"\..+\.[0-9]+\.(writing|linking)")
"""Names of temporary files, with the number of the process, that a killed process leaves behind."""


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an error of the operating system in the block into a FileError with the path and the reason."""
    try:
        yield
    except FileError:
        raise
    except (OSError, RuntimeError) as error:  # torch.save hides the system's error behind a RuntimeError
        reason = reason_of(error)
        if reason is None:
            raise
        raise FileError(f"{os.fspath(path)} cannot be written ({reason})") from error


def reason_of(error: BaseException | None) -> str | None:
    """Return the operating system's words about an error or its causes, such as "No space left on device"; None without."""
    while error is not None:
        if isinstance(error, OSError):
            return error.strerror or str(error)
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def replacing(
    path: str | os.PathLike[str], mode: str = "wb", sync: bool = True, keep_as: str | None = None, **options: Any
) -> Iterator[IO[Any]]:
    """Open a temporary file that replaces `path` when the block ends, so that `path` is always the old file or the new one.

    Args:
        path: file to replace; missing folders are created.
        mode: mode of the temporary file.
        sync: True to wait until the disk has the content, so that it outlives a power failure.
        keep_as: name under which the old file stays in its folder; None to drop it.
        **options: further arguments of `open`.

    Raises:
        FileError: the file cannot be written; the temporary file is removed, as after any other error.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name[:100]}.{os.getpid()}.writing")
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(aside, mode, **options) as file:
                yield file
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            if keep_as is not None and path.exists():
                _keep(path, keep_as)
            os.replace(aside, path)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise


def _keep(path: Path, name: str) -> None:
    """Give a file a second name by a link, so that the file itself is never missing."""
    linked = path.with_name(f".{name}.{os.getpid()}.linking")
    linked.unlink(missing_ok=True)
    os.link(os.path.realpath(path), linked)  # of a link, which may point to a file that goes
    os.replace(linked, path.with_name(name))


Stamp = tuple[int, int, int] | None
"""Inode, size and time of change in nanoseconds of a file, which differ once another program has written or replaced it."""


def stamp_of(path: Path) -> Stamp:
    """Return the stamp of a file; None if it cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def ends_of(path: Path) -> tuple[bytes, bytes]:
    """Return the first line of a file and the last one after it, empty if there is none; the lines between are not read."""
    with path.open("rb") as file:
        first = file.readline()
        begin, end = file.tell(), file.seek(0, os.SEEK_END)
        size = 4096
        while True:
            start = file.seek(max(begin, end - size))
            lines = file.readlines()
            if len(lines) > 1 or start == begin:
                return first, lines[-1] if lines else b""
            size *= 2


def append(path: Path, text: str) -> None:
    """Append text to a file, which stays as it is if that fails.

    Raises:
        FileError: the file cannot be written.
    """
    with writing(path):
        size = path.stat().st_size
        try:
            with path.open("a", encoding="utf-8", newline="") as file:
                file.write(text)
        except OSError:
            with suppress(OSError):
                os.truncate(path, size)
            raise


def copy(source: Path, path: Path) -> None:
    """Copy a file; a link at `path` is replaced, and what it leads to stays as it is."""
    with source.open("rb") as content, replacing(path, sync=False) as file:
        shutil.copyfileobj(content, file)


def is_own_folder(path: Path) -> bool:
    """True for a folder that stands at `path` itself, and not for a link to one."""
    return path.is_dir() and not path.is_symlink()


def is_own_file(path: Path) -> bool:
    """True for a file that stands at `path` itself, and not for a link to one."""
    return path.is_file() and not path.is_symlink()


def link_on_the_way(path: Path) -> Path | None:
    """Return the path, or the folder that it is in, if it is a link; None if neither is one."""
    return next(filter(Path.is_symlink, (path.parent, path)), None)


def remove_files(paths: Iterable[Path]) -> None:
    """Remove the paths that are files; links, folders and files that cannot be removed stay."""
    for path in paths:
        if is_own_file(path):
            with suppress(OSError):
                path.unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of processes that died; only for the one process that writes to the folder."""
    if is_own_folder(folder):
        remove_files([path for path in folder.iterdir() if LEFTOVER.fullmatch(path.name)])
