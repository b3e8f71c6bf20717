"""Files that are complete at any moment, and errors of writing as sentences."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from lightning_fl.errors import FileError

LEFTOVERS = (".*.writing", ".*.linking")
"""Patterns of temporary files that a killed process leaves behind."""


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


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of processes that died; only for the one process that writes to the folder."""
    for pattern in LEFTOVERS:
        for path in folder.glob(pattern):
            with suppress(OSError):
                path.unlink()
