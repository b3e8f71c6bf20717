"""Storage of clients' states between rounds: in memory, or in files if there are too many.

Both are mappings from a client to its state. On disk each entry of a state (`control`, `moments/first` …) has one growing
file of rows of equal length, one row a client. Rows are written and read by ordinary file operations: a full disk is then an
error and not a crash, and rows that were read do not count as the process's memory. The files are mapped for a checkpoint
only, so that their rows stream into it.

A new state goes to a free row, and the row it replaces is used again one round later (`release_replaced`). So a state is
stored completely or not at all, and the states before a round stay readable until the next round begins. A file with no row
in use, as after a pruning, is deleted. A state may be written as soon as its client has trained and be set at the end of the
round (`ahead`), so that nobody holds the new states of a whole cohort.

Every state that is set gets a version, so that a checkpoint knows which states have changed (`saved_states`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from itertools import count
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fl.errors import FileError
from lightning_fl.outputs.files import writing
from lightning_fl.outputs.tensor_bytes import bytes_of
from lightning_fl.slots import State

_NEW_VERSION = count()


class ClientStates(dict[int, State]):
    """Clients' states in memory.

    Attributes:
        versions: number of each client's state, another one for every state that is set.
    """

    def __init__(self) -> None:
        """Begin without a state."""
        super().__init__()
        self.versions: dict[int, int] = {}

    def __setitem__(self, client: int, state: State) -> None:
        super().__setitem__(client, state)
        self.versions[client] = next(_NEW_VERSION)

    def snapshot(self) -> ClientStates:
        """Return a copy of the mapping, which later changes do not affect."""
        taken = ClientStates()
        taken.update(self)
        taken.versions = dict(self.versions)
        return taken

    def ahead(self, state: State) -> State:
        """Return a state that is going to be set at the end of a round: itself."""
        return state

    def drop_ahead(self) -> None:
        """Do nothing, as `release_replaced`."""

    def release_replaced(self) -> None:
        """Do nothing: memory is freed without it."""

    def as_saved(self) -> dict[int, State]:
        """Return plain containers and tensors for `torch.save`."""
        return dict(self)


class ClientStatesOnDisk(MutableMapping[int, State]):
    """Clients' states in files; reading returns a copy.

    Several processes of one machine may share the files: all set the same states in the same order, and one of them writes.

    Attributes:
        versions: number of each client's state, another one for every state that is set.
        positions: column and row of each entry of each client's state.
    """

    def __init__(self, folder: Path, writes: bool = True, generations: int = 1) -> None:
        """Begin without a state.

        Args:
            folder: folder of the files; created if missing.
            writes: True if this process writes the rows, False if another process does.
            generations: calls of `release_replaced` after which a replaced row is used again.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._writes = writes
        self._generations = generations
        self._columns: dict[tuple[str, tuple[int, ...], torch.dtype], Column] = {}
        self.positions: dict[int, dict[str, Place]] = {}
        self.versions: dict[int, int] = {}
        self._num_files = 0
        self._ahead: list[StateAhead] = []

    def __getitem__(self, client: int) -> State:
        try:
            return {name: column.read(row) for name, (column, row) in self.positions[client].items()}
        except OSError as error:
            raise FileError(f"{self._folder} cannot be read ({error.strerror or error})") from error

    def __setitem__(self, client: int, state: Mapping[str, Tensor]) -> None:
        if isinstance(state, StateAhead) and state in self._ahead:
            self._ahead.remove(state)
            positions = state.positions
        else:
            positions = {name: self._write(name, tensor) for name, tensor in state.items()}
        self._replace(client)
        self.positions[client] = positions
        self.versions[client] = next(_NEW_VERSION)

    def __delitem__(self, client: int) -> None:
        self._replace(client)
        del self.positions[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self.positions)

    def __len__(self) -> int:
        return len(self.positions)

    def ahead(self, state: State) -> State:
        """Write a state that is going to be set at the end of a round, so that nobody has to hold it until then.

        If several processes share the files, each writes its own clients' states, which the others do not know: call it with
        one process only.
        """
        self._ahead.append(written := StateAhead({name: self._write(name, tensor) for name, tensor in state.items()}))
        return written  # type: ignore[return-value]

    def drop_ahead(self) -> None:
        """Free the rows of states that were written ahead, but not set, as after a round that is undone."""
        for state in self._ahead:
            for column, row in state.positions.values():
                column.free(row)
        self._ahead = []

    def snapshot(self) -> ClientStatesOnDisk:
        """Return the current states, readable until the second `release_replaced` after this call."""
        taken = ClientStatesOnDisk(self._folder, writes=False)
        taken._columns, taken.positions, taken.versions = dict(self._columns), dict(self.positions), dict(self.versions)
        return taken

    def release_replaced(self) -> None:
        """Free the rows of states replaced since the last call (or the one before …); delete files without a row in use."""
        for form, column in list(self._columns.items()):
            column.release_replaced()
            if not column.num_used:
                del self._columns[form]
                if self._writes:
                    column.delete()

    def sync(self) -> None:
        """Wait until all rows written since the last call are on the disk."""
        for column in self._columns.values():
            column.sync()

    def as_saved(self) -> dict[int, State]:
        """Return plain containers and tensors for `torch.save`: views of the mapped files, from which it streams the rows."""
        rows = {column: column.mapped() for column in self._columns.values() if column.num_rows}
        return {
            client: {name: rows[column][row] for name, (column, row) in positions.items()}
            for client, positions in self.positions.items()
        }

    def _write(self, name: str, tensor: Tensor) -> Place:
        form = (name, tuple(tensor.shape), tensor.dtype)
        if form not in self._columns:
            self._columns[form] = Column(
                self._folder / f"{self._num_files}.rows", tensor.shape, tensor.dtype, self._generations
            )
            self._num_files += 1
        column = self._columns[form]
        row = column.take_row()
        if self._writes:
            column.write(row, tensor)
        return Place(column, row)

    def _replace(self, client: int) -> None:
        for column, row in self.positions.get(client, {}).values():
            column.replace(row)


class Column:
    """File of one entry of all clients' states: rows of one shape and dtype, one after the other."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: torch.dtype, generations: int = 1) -> None:
        self.path, self.shape, self.dtype = path, shape, dtype
        self._row_bytes = prod(shape) * dtype.itemsize
        self.num_rows = 0
        self._free: list[int] = []
        self._replaced: deque[list[int]] = deque([] for _ in range(generations))
        self._is_written = False

    @property
    def num_used(self) -> int:
        """Number of rows that are not free."""
        return self.num_rows - len(self._free)

    def take_row(self) -> int:
        """Return a free row, or a new one."""
        if self._free:
            return self._free.pop()
        self.num_rows += 1
        return self.num_rows - 1

    def free(self, row: int) -> None:
        """Let a row be used again at once."""
        self._free.append(row)

    def replace(self, row: int) -> None:
        """Note that a row is used no longer; `release_replaced` frees it."""
        self._replaced[-1].append(row)

    def release_replaced(self) -> None:
        """Free the oldest generation of replaced rows, and begin a new one."""
        self._free += self._replaced.popleft()
        self._replaced.append([])

    def delete(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)

    def write(self, row: int, tensor: Tensor) -> None:
        """Write `tensor` to a row."""
        with writing(self.path), open(self.path, "r+b" if self.path.exists() else "wb") as file:
            file.seek(row * self._row_bytes)
            file.write(bytes_of(tensor.detach().cpu().contiguous()))
        self._is_written = True

    def sync(self) -> None:
        """Wait until the rows written since the last call are on the disk."""
        if self._is_written:
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())
            self._is_written = False

    def read(self, row: int) -> Tensor:
        """Return a copy of a row."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        with open(self.path, "rb") as file:
            file.seek(row * self._row_bytes)
            if file.readinto(bytes_of(tensor)) < self._row_bytes:
                raise OSError(f"{self.path} is too short for a client's state: another program has changed it")
        return tensor

    def mapped(self) -> Tensor:
        """Return all rows (num_rows, *shape), which must not be written to."""
        if not self._row_bytes:
            return torch.empty(self.num_rows, *self.shape, dtype=self.dtype)
        size = self.num_rows * prod(self.shape)
        # Shared, because the kernel reserves memory for a private copy.
        return torch.from_file(str(self.path), shared=True, size=size, dtype=self.dtype).view(-1, *self.shape)


class Place(NamedTuple):
    """Column and row of one entry of a client's state."""

    column: Column
    row: int


class StateAhead(Mapping[str, Tensor]):
    """State of a client that is in the files, but not yet the client's state; reading returns copies.

    Attributes:
        positions: column and row of each entry.
    """

    def __init__(self, positions: dict[str, Place]) -> None:
        self.positions = positions

    def __getitem__(self, name: str) -> Tensor:
        column, row = self.positions[name]
        return column.read(row)

    def __iter__(self) -> Iterator[str]:
        return iter(self.positions)

    def __len__(self) -> int:
        return len(self.positions)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__
