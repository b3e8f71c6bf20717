"""Reservation of a run's folder: one process at a time writes to it, and a process that dies holds nothing.

The process that writes locks a file in the folder. The operating system keeps the lock and drops it with the process, also on
NFS and between containers that share the folder. The file's text names the process.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from weakref import WeakSet

from filelock import lock_descriptor
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fl.errors import FileError, UserError, require
from lightning_fl.outputs.files import reason_of, remove_leftovers, writing
from lightning_fl.outputs.losses import say_lost
from lightning_fl.outputs.run_folder import (
    LAST,
    WRITTEN,
    bring_earlier_run_back,
    remove_empty,
    require_writable,
)

LOCK = ".run.lock"
CANNOT_LOCK = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of file systems without locks."""
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
"""Flag that refuses a link in the place of the file: the run would write its text to what the link leads to."""
_RESERVATIONS: WeakSet[Reservation] = WeakSet()


class Reservation:
    """Folder that one run reserves, from before its first round until it ends."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)
        self._made: list[Path] = []
        self._descriptor: int | None = None
        _RESERVATIONS.add(self)

    def begin(self) -> None:
        """Create and lock the folder, check that the run can write its files, and remove what a killed run left.

        Raises:
            UserError: the folder cannot be written to, or another run uses it.
        """
        self._made = require_writable(str(self._root))
        lock = self._root / LOCK
        require(not lock.is_symlink(), f"{lock} is a link, but the run locks a file of this name: move it away.")
        try:
            holder = self._lock()
        except OSError as error:
            raise UserError(
                f"the folder {self._root} cannot be written to ({reason_of(error)}): use another default_root_dir."
            ) from error
        require(
            holder is None,
            f"the folder {self._root} is in use by another run ({holder}): wait until it ends, stop it, or use another "
            "default_root_dir.",
        )
        bring_earlier_run_back(str(self._root))
        checkpoints = self._root / LAST.parent
        for folder in (self._root.resolve(), checkpoints):
            remove_leftovers(folder)
        if os.path.lexists(checkpoints):
            require_writable(str(checkpoints))
        for name in WRITTEN:
            path = self._root / name
            require(not path.is_dir(), f"{path} is a folder, but the run writes a file of this name: move it away.")

    def renew(self) -> bool:
        """Make the folder again if it was deleted or moved since, and say so; return True if it was.

        Raises:
            FileError: another run uses the folder now, or it cannot be written to.
        """
        if self._descriptor is None or _same_file(self._descriptor, self._root / LOCK):
            return False
        os.close(self._descriptor)
        self._descriptor = None
        with writing(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            is_empty = not any(self._root.iterdir())
            holder = self._lock()
        if holder is not None:
            raise FileError(
                f"{self._root} cannot be written (it was deleted or moved during the run, and another run uses it now: {holder})"
            )
        if is_empty:
            say_lost(
                f"The folder {self._root} was deleted or moved during the run; it is made again, but without the files that "
                "a run writes once, such as config.yaml, and without earlier checkpoints."
            )
        return is_empty

    def end(self) -> None:
        """Unlock the folder, and remove it if it was created for a run that has written nothing."""
        if self._descriptor is not None:
            if _same_file(self._descriptor, self._root / LOCK):
                with suppress(OSError):
                    (self._root / LOCK).unlink()
            os.close(self._descriptor)
            self._descriptor = None
        remove_empty(self._made)
        self._made = []

    def _lock(self) -> str | None:
        """Lock the folder; return a description of the process that holds it, None if that is this one."""
        _close_in_forked_processes()
        path = self._root / LOCK
        while self._descriptor is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
            try:
                is_free = lock_descriptor(descriptor, blocking=False)
            except OSError as error:
                os.close(descriptor)
                if error.errno not in CANNOT_LOCK:
                    raise
                path.unlink()
                rank_zero_warn(
                    f"The folder {self._root} cannot be locked ({error.strerror}): start no other run in it while this one runs."
                )
                return None
            if not is_free:
                holder = b""
                with suppress(OSError):  # Windows locks the text too
                    holder = os.read(descriptor, 1000)
                os.close(descriptor)
                return holder.decode(errors="replace").strip() or "another process"
            if _same_file(descriptor, path):
                self._descriptor = descriptor
            else:  # the run that held the lock has just ended and removed the file
                os.close(descriptor)
        since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
        return None

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor, self._made = None, []


def _same_file(descriptor: int, path: Path) -> bool:
    """True if the open file is the one that stands at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


@cache
def _close_in_forked_processes() -> None:
    """Let processes that are forked from now on drop their copies of locks: workers of loaders may outlive a killed run."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for reservation in _RESERVATIONS:
        reservation._forget()
