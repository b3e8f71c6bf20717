"""Clients' states of `last.ckpt`: in files of rows beside it, so that a checkpoint writes only the states that have changed.

A run that begins or resumes has a folder of files of its own, `client_states/1` (2, 3 …) beside `last.ckpt`. A row that a
checkpoint does not need any more is written to again only after the next checkpoint, because the checkpoint before it, now
`previous.ckpt`, still refers to it. The checkpoint contains a checksum of each row, so that damaged rows are noticed.

A folder that neither checkpoint needs is deleted if one of them has referred to it, or if a file in it says that a run
made it at this place, as after a kill. Only the files of rows in such a folder are deleted, and nothing is deleted
through a link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.errors import UserError
from lightning_fl.outputs import checkpoint_file
from lightning_fl.outputs.files import (
    Stamp,
    is_own_file,
    is_own_folder,
    link_on_the_way,
    remove_files,
    stamp_of,
    writing,
)
from lightning_fl.outputs.run_folder import LAST, PREVIOUS, remove_empty
from lightning_fl.outputs.tensor_bytes import checksum
from lightning_fl.slots import State
from lightning_fl.state.client_states import ClientStates, ClientStatesOnDisk, Column

FOLDER = "client_states"
KINDS = ("clients", "client_memory")
"""Entries of a run's state that are clients' states."""
GENERATIONS = 2
"""Checkpoints to which a row that was replaced belongs before it is written to again."""
ROWS = re.compile(r"[0-9]+\.rows")
"""Names of files of rows."""
PLACE = ".place"
"""File in a folder that a run has made, whose text is the path of the folder."""


class LoadedRun(NamedTuple):
    """Facts about the run of a model.

    Attributes:
        states: personal values of the clients that have taken part, by client.
        run: the run's state in a checkpoint; None if the model comes from none.
        learning_rates: state of the module's schedulers in it.
    """

    states: Mapping[int, State] = MappingProxyType({})
    run: dict[str, Any] | None = None
    learning_rates: dict[str, Any] | None = None


class SavedStates:
    """Files of all clients' states, for the checkpoints that one fit writes to one place."""

    def __init__(self, parent: Path, weights_only: bool = True) -> None:
        """Write nothing yet.

        Args:
            parent: folder of the checkpoints.
            weights_only: False if the user trusts objects of any class in the checkpoint that the fit resumes.
        """
        self._parent = parent
        self._weights_only = weights_only
        self._own: Path | None = None
        self._previous: Path | None = None
        self._referred: set[Path | None] = set()
        self._files: dict[str, _StateFiles] = {}
        self._says_it_stays = True

    def write(self, run_state: dict[str, Any]) -> dict[str, Any]:
        """Write the clients' states that have changed since the last checkpoint.

        Args:
            run_state: result of `Run.state_dict`.

        Returns:
            `run_state` with references to the files, in plain containers and tensors.

        Raises:
            FileError: a file cannot be written.
        """
        with writing(self._parent / FOLDER):
            return self._write(run_state)

    def _write(self, run_state: dict[str, Any]) -> dict[str, Any]:
        if not self._files and not any(run_state[kind] for kind in KINDS):
            return {**run_state, **{kind: {} for kind in KINDS}}
        if self._own is None:
            self._own = _new_folder(self._parent / FOLDER)
            self._previous = _files_of(self._parent / LAST.name, self._weights_only)
            self._referred = {self._previous, _files_of(self._parent / PREVIOUS.name, self._weights_only)}
            self._files = {kind: _StateFiles(self._own / kind) for kind in KINDS}
        folder = self._own.relative_to(self._parent).as_posix()
        references = {kind: files.write(run_state[kind]) for kind, files in self._files.items()}
        return {**run_state, **references, "client_files": folder}

    def release(self) -> None:
        """Free what neither `last.ckpt` nor `previous.ckpt` needs, after a checkpoint has been written completely."""
        if self._own is None:
            return
        for files in self._files.values():
            files.release()
        unneeded = [path for path in (self._parent / FOLDER).iterdir() if path not in (self._own, self._previous)]
        written = [path for path in unneeded if path in self._referred or _is_written_here(path)]
        self._previous = self._own
        link = link_on_the_way(self._parent / FOLDER)
        if link is None:
            for path in written:
                _remove(path)
        elif written and self._says_it_stays:
            self._says_it_stays = False
            rank_zero_warn(
                f"{link} is a link, through which nothing is deleted: the clients' states in "
                f"{', '.join(sorted(path.name for path in written))} of {self._parent / FOLDER} stay, although neither "
                "last.ckpt nor previous.ckpt needs them any more."
            )


def _new_folder(parent: Path) -> Path:
    """Make the folder of a fit, with the next number, and note its place in it."""
    earlier = [int(path.name) for path in parent.glob("*") if path.name.isdecimal()]
    folder = parent / str(max(earlier, default=0) + 1)
    folder.mkdir(parents=True)
    (folder / PLACE).write_bytes(os.fsencode(os.path.abspath(folder)))
    return folder


def _is_written_here(folder: Path) -> bool:
    """True if a run has made this folder at this place; a copy, or a folder of another run's, names another one."""
    place = folder / PLACE
    if not (is_own_folder(folder) and is_own_file(place)):
        return False
    return place.read_bytes() == os.fsencode(os.path.abspath(folder))


def _remove(folder: Path) -> None:
    """Delete the files of rows in a folder, and the folder if it has no others."""
    if not is_own_folder(folder):
        return
    for kind in filter(is_own_folder, (folder / kind for kind in KINDS)):
        remove_files([path for path in kind.iterdir() if ROWS.fullmatch(path.name)])
        remove_empty([kind])
    remove_files([folder / PLACE])
    remove_empty([folder])


class _StateFiles:
    """Files of one kind of clients' states."""

    def __init__(self, folder: Path) -> None:
        self._rows = ClientStatesOnDisk(folder, generations=GENERATIONS)
        self._versions: dict[int, int] = {}
        self._checksums: dict[int, dict[str, int]] = {}
        self._stamps: dict[Path, Stamp] = {}

    def write(self, states: ClientStates | ClientStatesOnDisk) -> dict[str, Any]:
        """Write the states that have changed, and return references to all.

        All are written if another program has changed a file, so that no checkpoint refers to damaged rows.
        """
        if any(stamp_of(path) != stamp for path, stamp in self._stamps.items()):
            self._versions = dict.fromkeys(self._versions, -1)
        for client in self._versions.keys() - states.keys():
            del self._rows[client], self._versions[client], self._checksums[client]
        for client in states:
            if self._versions.get(client) != states.versions[client]:
                state = states[client]
                self._rows[client] = state
                self._checksums[client] = {name: checksum(entry) for name, entry in state.items()}
                self._versions[client] = states.versions[client]
        self._rows.sync()
        used = {column.path for places in self._rows.positions.values() for column, _ in places.values()}
        self._stamps = {path: stamp_of(path) for path in used}
        return self._references(list(states))

    def release(self) -> None:
        """Free the rows that only a checkpoint before the previous one refers to."""
        self._rows.release_replaced()

    def _references(self, clients: list[int]) -> dict[str, Any]:
        rows: dict[tuple[str, Column], list[tuple[int, int, int]]] = {}
        for client in clients:
            checksums = self._checksums[client]
            for name, (column, row) in self._rows.positions[client].items():
                rows.setdefault((name, column), []).append((client, row, checksums[name]))
        return {
            "clients": torch.tensor(clients, dtype=torch.int64),
            "columns": [
                {
                    "name": name,
                    "file": column.path.name,
                    "shape": list(column.shape),
                    "dtype": column.dtype,
                    "rows": torch.tensor(numbers, dtype=torch.int64),
                }
                for (name, column), numbers in rows.items()
            ],
        }


class StatesInFiles(Mapping[int, State]):
    """Clients' states that a checkpoint refers to; each is read, and its checksum compared, when it is asked for."""

    def __init__(self, folder: Path, saved: Mapping[str, Any], checkpoint: Path) -> None:
        """Read no state yet.

        Args:
            folder: folder of the files.
            saved: references to them, as a checkpoint contains them.
            checkpoint: path of the checkpoint, for error messages.
        """
        self._checkpoint = checkpoint
        self._entries: dict[int, list[tuple[str, Column, int, int]]] = {c: [] for c in saved["clients"].tolist()}
        for column in saved["columns"]:
            file = Column(folder / column["file"], tuple(column["shape"]), column["dtype"])
            for client, row, expected in column["rows"].tolist():
                self._entries[client].append((column["name"], file, row, expected))

    def __getitem__(self, client: int) -> State:
        return {name: self._read(file, row, expected) for name, file, row, expected in self._entries[client]}

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _read(self, file: Column, row: int, expected: int) -> Tensor:
        try:
            tensor = file.read(row)
        except OSError as error:
            reason = f"cannot be read ({error.strerror or error})"
        else:
            if checksum(tensor) == expected:
                return tensor
            reason = "is damaged: it is not what was written"
        raise UserError(
            f"the file {file.path} with client states of the checkpoint {self._checkpoint} {reason}; "
            "use another checkpoint, or begin a new run."
        )


def read_states(run_state: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return a saved state of a run with its clients' states as mappings, whether they are in files or in the checkpoint.

    Args:
        run_state: state of the run in the checkpoint.
        checkpoint: path of the checkpoint.
    """
    if "client_files" not in run_state:
        return run_state
    folder = checkpoint.parent / run_state["client_files"]
    return {**run_state, **{kind: StatesInFiles(folder / kind, run_state[kind], checkpoint) for kind in KINDS}}


def _files_of(path: Path, weights_only: bool) -> Path | None:
    """Return the folder of client states that the checkpoint at `path` refers to; None if there is none."""
    with suppress(UserError):
        run_state = checkpoint_file.load(path, weights_only, whole=False).get("federation", {}).get("run", {})
        if "client_files" in run_state:
            return path.parent / str(run_state["client_files"])
    return None
