"""A published split, given as index lists."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fl.data.partitions.client_indices import ClientIndices
from lightning_fl.data.partitions.partition import Partition, Pool
from lightning_fl.errors import UserError, require

COLUMNS = ("client", "index")
"""Columns of a CSV file."""


@dataclass(frozen=True)
class GivenIndices(Partition):
    """Give each client the samples of an index list, for example of a published split.

    An index is the position of a sample in the training set, from 0, in the order of the data set. A JSON file has a list of
    lists, or an object with a list for each client. A CSV file has the columns client and index, and a row for each sample.
    Clients whose names are numbers come in ascending order, others in the order of the file. `num_clients` may be None.

    Args:
        lists: an index list for each client, or the path of a JSON or CSV file (`.json`, `.csv`).
        leave_out: True to leave out samples that are in no list; otherwise they are refused.
    """

    needs_labels = False
    knows_num_clients = True
    divides_all = True

    lists: Sequence[Sequence[int]] | str | os.PathLike[str]
    leave_out: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.lists, (str, os.PathLike)):
            object.__setattr__(self, "lists", joined(self.lists, "lists"))

    def __call__(self, labels: np.ndarray, num_clients: int | None, rng: np.random.Generator) -> ClientIndices:
        """Return the lists, if they fit: see `Partition`."""
        parts, source = self._read()
        total = len(labels)
        check_parts(parts, num_clients, total, source)
        missing = np.flatnonzero(np.bincount(parts.joined, minlength=total) == 0)
        require(
            self.leave_out or not len(missing),
            f"{len(missing):,} of the {total:,} training samples are in no index list, the first of which is {missing[:1].sum()} "
            f"({source}): add them, or set leave_out to True.",
        )
        return parts

    def divide(self, pool: Pool, num_clients: int | None, rng: np.random.Generator) -> ClientIndices:
        """Return the lists for samples in the order of the data set: see `Partition`."""
        return self(pool.labels, num_clients, rng)

    def _read(self) -> tuple[ClientIndices, str]:
        """Return the lists, and what they come from."""
        if isinstance(self.lists, ClientIndices):
            return self.lists, "given as lists"
        assert isinstance(self.lists, (str, os.PathLike))
        path = Path(self.lists)
        readers = {".json": _from_json, ".csv": _from_csv}
        require(
            path.suffix.lower() in readers,
            f"lists={str(path)!r} is neither a .json nor a .csv file: give such a file, or lists of indices.",
        )
        try:
            return joined(readers[path.suffix.lower()](path), str(path)), str(path)
        except OSError as error:
            raise UserError(f"the index lists {path} cannot be read ({error.strerror or error}).") from error


def check_parts(parts: ClientIndices, num_clients: int | None, total: int, source: str) -> None:
    """Raise `UserError` unless index lists give each client other samples, and each list is one of a client's.

    Args:
        parts: index list of each client.
        num_clients: number of clients; None: as many as there are lists.
        total: number of samples to divide.
        source: origin of the lists, for error messages.
    """
    require(
        num_clients in (None, len(parts)),
        f"num_clients={num_clients}, but the number of index lists is {len(parts):,} ({source}): give the same number.",
    )
    indices = parts.joined
    beyond = np.flatnonzero((indices < 0) | (indices >= total))
    if len(beyond):
        raise UserError(
            f"the index list of client {_owner(parts, beyond[0])} has the index {indices[beyond[0]]} ({source}), but there "
            f"are {total:,} training samples to divide, 0 to {total - 1}."
        )
    if len(twice := np.flatnonzero(np.bincount(indices, minlength=total) > 1)):
        first, second = (_owner(parts, place) for place in np.flatnonzero(indices == twice[0])[:2])
        where = (
            f"twice in the index list of client {first}"
            if first == second
            else f"in the index lists of clients {first} and {second}"
        )
        raise UserError(f"sample {twice[0]} is {where} ({source}): a sample belongs to one client, once.")


def joined(lists: Any, source: str) -> ClientIndices:
    """Return index lists as whole numbers.

    Args:
        lists: an index list for each client.
        source: origin of the lists, for error messages.

    Raises:
        UserError: an entry is no list of whole numbers.
    """
    require(
        isinstance(lists, (Sequence, np.ndarray)) and len(lists) > 0,
        f"{source} must have an index list for each client, got {_short(lists)}.",
    )
    parts = []
    for client, given in enumerate(lists):
        try:
            part = np.asarray(given)
        except ValueError:  # lists in the list
            part = np.zeros((0, 0))
        require(
            part.ndim == 1 and (part.dtype.kind in "iu" or not len(part)),
            f"{source} must have a list of whole numbers for client {client}, got {_short(given)}.",
        )
        parts.append(part.astype(np.int64))
    return ClientIndices.of(parts)


def _from_json(path: Path) -> list[Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"the index lists {path} are no JSON: {error}.") from error
    if isinstance(content, dict):
        return _in_order(content)
    require(isinstance(content, list), f"{path} must have a list or an object of index lists, got {_short(content)}.")
    return content


def _from_csv(path: Path) -> list[Any]:
    lists = dict[str, list[int]]()
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            require(
                set(COLUMNS) <= set(reader.fieldnames or ()),
                f"the index lists {path} need the columns {' and '.join(COLUMNS)}, and have {_short(reader.fieldnames)}.",
            )
            for row in reader:
                client, index = (row[column] or "" for column in COLUMNS)
                require(
                    client != "" and index.strip().isdecimal(),
                    f"line {reader.line_num} of {path} must have a client and an index, got {client!r} and {index!r}.",
                )
                lists.setdefault(client.strip(), []).append(int(index))
    except (UnicodeDecodeError, csv.Error, OverflowError) as error:
        raise UserError(f"the index lists {path} are no CSV: {error}.") from error
    return _in_order(lists)


def _in_order(lists: Mapping[str, Any]) -> list[Any]:
    """Return the lists of clients with numbers in ascending order, others in their own."""
    names: Iterable[str] = lists
    if all(name.isdecimal() for name in lists):
        names = sorted(lists, key=int)
    return [lists[name] for name in names]


def _owner(parts: ClientIndices, place: int) -> int:
    """Return the client to whose list a place in the joined lists belongs."""
    return int(np.searchsorted(parts.starts, place, side="right")) - 1


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
