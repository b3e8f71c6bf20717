"""Where the states of clients live between rounds: in memory, or in files where there are too many of them.

Both are mappings from a client to its state. On disk each entry of a state (`control`, `moments/first` …) has one growing
file of rows of equal length, one row a client. Rows are written and read by ordinary file operations: a full disk is then an
error and not a crash, and what has been read does not count as the process's memory. Only for a checkpoint are the files
mapped, so that their rows stream into it.

A new state goes to a free row, and the row it replaces is used again one round later (`release_replaced`). So a state is
there whole or not at all, and what a round began with stays readable until the next one begins. A file without a row in use,
which a pruning leaves, is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fl.slots import State


class ClientStates(dict[int, State]):
    """States in memory."""

    def snapshot(self) -> ClientStates:
        """The states as they are now, whatever the round under way changes."""
        return ClientStates(self)

    def release_replaced(self) -> None:
        """Forget what has been replaced; in memory that goes by itself."""

    def as_saved(self) -> dict[int, State]:
        """Plain containers and tensors for `torch.save`."""
        return dict(self)


class ClientStatesOnDisk(MutableMapping[int, State]):
    """States in files; what is read is a copy.

    Several processes of one machine may share the files: all of them set the same states in the same order, and one writes.
    """

    def __init__(self, folder: Path, writes: bool = True) -> None:
        """Begin without a state.

        Args:
            folder: where the files go; made if it is not there.
            writes: whether this process writes the rows, or trusts another to have done so.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._writes = writes
        self._columns: dict[tuple[str, tuple[int, ...], torch.dtype], _Column] = {}
        self._positions: dict[int, dict[str, _Place]] = {}
        self._num_files = 0

    def __getitem__(self, client: int) -> State:
        return {name: column.read(row) for name, (column, row) in self._positions[client].items()}

    def __setitem__(self, client: int, state: State) -> None:
        positions = {name: self._write(name, x) for name, x in state.items()}
        self._replace(client)
        self._positions[client] = positions

    def __delitem__(self, client: int) -> None:
        self._replace(client)
        del self._positions[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def snapshot(self) -> ClientStatesOnDisk:
        """The states as they are now; readable until the second `release_replaced` from here."""
        taken = ClientStatesOnDisk(self._folder, writes=False)
        taken._columns, taken._positions = dict(self._columns), dict(self._positions)
        return taken

    def release_replaced(self) -> None:
        """Let the rows of states that have been replaced since the last call be written again."""
        for form, column in list(self._columns.items()):
            column.release_replaced()
            if not column.num_used:
                del self._columns[form]
                if self._writes:
                    column.delete()

    def as_saved(self) -> dict[int, State]:
        """Plain containers and tensors for `torch.save`: views of the mapped files, whose bytes it copies in passing."""
        rows = {column: column.mapped() for column in self._columns.values() if column.num_rows}
        return {
            client: {name: rows[column][row] for name, (column, row) in positions.items()}
            for client, positions in self._positions.items()
        }

    def _write(self, name: str, x: Tensor) -> _Place:
        form = (name, tuple(x.shape), x.dtype)
        if form not in self._columns:
            self._columns[form] = _Column(self._folder / f"{self._num_files}.rows", x.shape, x.dtype)
            self._num_files += 1
        column = self._columns[form]
        row = column.take_row()
        if self._writes:
            column.write(row, x)
        return _Place(column, row)

    def _replace(self, client: int) -> None:
        for column, row in self._positions.get(client, {}).values():
            column.replaced.append(row)


class _Column:
    """One entry of all clients' states: rows of one shape and dtype, one after the other in a file."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._path, self._shape, self._dtype = path, shape, dtype
        self._row_bytes = prod(shape) * dtype.itemsize
        self.num_rows = 0
        self.replaced: list[int] = []
        self._free: list[int] = []

    @property
    def num_used(self) -> int:
        """Rows that are not free."""
        return self.num_rows - len(self._free)

    def take_row(self) -> int:
        """A row that nobody reads."""
        if self._free:
            return self._free.pop()
        self.num_rows += 1
        return self.num_rows - 1

    def release_replaced(self) -> None:
        """Rows replaced before the last call are free now."""
        self._free += self.replaced
        self.replaced = []

    def delete(self) -> None:
        """Give the disk space back."""
        self._path.unlink(missing_ok=True)

    def write(self, row: int, x: Tensor) -> None:
        """Put `x` into a row."""
        with open(self._path, "r+b" if self._path.exists() else "wb") as file:
            file.seek(row * self._row_bytes)
            file.write(_bytes_of(x.detach().cpu().contiguous()))

    def read(self, row: int) -> Tensor:
        """A copy of a row."""
        x = torch.empty(self._shape, dtype=self._dtype)
        with open(self._path, "rb") as file:
            file.seek(row * self._row_bytes)
            if file.readinto(_bytes_of(x)) < self._row_bytes:
                raise OSError(f"{self._path} has lost a client's state: something else has written to it")
        return x

    def mapped(self) -> Tensor:
        """All rows (num_rows, *shape), not to be written to."""
        if not self._row_bytes:
            return torch.empty(self.num_rows, *self._shape, dtype=self._dtype)
        size = self.num_rows * prod(self._shape)
        # Shared, because the kernel would set memory aside for a private copy.
        return torch.from_file(str(self._path), shared=True, size=size, dtype=self._dtype).view(-1, *self._shape)


class _Place(NamedTuple):
    """Where one entry of a client's state is."""

    column: _Column
    row: int


def _bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return x.view(-1).view(torch.uint8).numpy().data
