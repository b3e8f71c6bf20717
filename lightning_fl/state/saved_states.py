"""Clients' states of `last.ckpt`: in files of rows beside it, so that a checkpoint writes only the states that have changed.

A run that begins or resumes has a folder of files of its own, `client_states/1` (2, 3 …) beside `last.ckpt`. A row that a
checkpoint does not need any more is written to again only after the next checkpoint, because the checkpoint before it, now
`previous.ckpt`, still refers to it. The checkpoint contains a checksum of each row, so that damaged rows are noticed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fl.errors import UserError
from lightning_fl.outputs import checkpoint_file
from lightning_fl.outputs.files import writing
from lightning_fl.outputs.run_folder import LAST
from lightning_fl.outputs.tensor_bytes import checksum
from lightning_fl.slots import State
from lightning_fl.state.client_states import ClientStates, ClientStatesOnDisk, Column
from lightning_fl.vectors.personal import OWN

FOLDER = "client_states"
KINDS = ("clients", "client_memory")
"""Entries of a run's state that are clients' states."""
GENERATIONS = 2
"""Checkpoints to which a row that was replaced belongs before it is written to again."""
EARLIER_OWN = "companion/"
"""`OWN` in checkpoints of version 0.2."""


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
        self._files: dict[str, _StateFiles] = {}

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
            earlier = [int(path.name) for path in self._parent.glob(f"{FOLDER}/*") if path.name.isdecimal()]
            self._own = self._parent / FOLDER / str(max(earlier, default=0) + 1)
            self._previous = _files_of(self._parent / LAST.name, self._weights_only)
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
        for path in (self._parent / FOLDER).iterdir():
            if path not in (self._own, self._previous):
                shutil.rmtree(path, ignore_errors=True)
        self._previous = self._own


class _StateFiles:
    """Files of one kind of clients' states."""

    def __init__(self, folder: Path) -> None:
        self._rows = ClientStatesOnDisk(folder, generations=GENERATIONS)
        self._versions: dict[int, int] = {}
        self._checksums: dict[int, dict[str, int]] = {}

    def write(self, states: ClientStates | ClientStatesOnDisk) -> dict[str, Any]:
        """Write the states that have changed, and return references to all."""
        for client in self._versions.keys() - states.keys():
            del self._rows[client], self._versions[client], self._checksums[client]
        for client in states:
            if self._versions.get(client) != states.versions[client]:
                state = states[client]
                self._rows[client] = state
                self._checksums[client] = {name: checksum(entry) for name, entry in state.items()}
                self._versions[client] = states.versions[client]
        self._rows.sync()
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
                self._entries[client].append((_present_name(column["name"]), file, row, expected))

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
        if "clients" not in run_state:
            return run_state
        clients = {k: {_present_name(n): x for n, x in entries.items()} for k, entries in run_state["clients"].items()}
        return {**run_state, "clients": clients}
    folder = checkpoint.parent / run_state["client_files"]
    return {**run_state, **{kind: StatesInFiles(folder / kind, run_state[kind], checkpoint) for kind in KINDS}}


def _present_name(name: str) -> str:
    """Return the name of an entry of a client's state, which in version 0.2 began otherwise for a model of its own."""
    return OWN + name.removeprefix(EARLIER_OWN) if name.startswith(EARLIER_OWN) else name


def _files_of(path: Path, weights_only: bool) -> Path | None:
    """Return the folder of client states that the checkpoint at `path` refers to; None if there is none."""
    with suppress(UserError):
        run_state = checkpoint_file.load(path, weights_only, whole=False).get("federation", {}).get("run", {})
        if "client_files" in run_state:
            return path.parent / str(run_state["client_files"])
    return None
