"""`clients.csv`, beside metrics.csv: one row for each client and round with values of its own, complete at any moment."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fl.checks import is_whole
from lightning_fl.errors import UserError, require
from lightning_fl.outputs.csv_cells import as_cell
from lightning_fl.outputs.files import append, ends_of, replacing
from lightning_fl.outputs.metrics_csv import read_rows

OF_CLIENT = {"round", "client", "name", "samples"}
"""Columns that hold no values of a client."""


def add_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write further rows, which may have new columns; values of the same client and round share a row.

    Rows of later rounds are appended if they have no new columns; otherwise the file is written anew.
    """
    if columns := _columns_to_continue(path, rows):
        append(path, _as_text(columns, rows))
        return
    columns, earlier = read_rows(path)
    rows_by_key: dict[Any, Mapping[str, Any]] = {_key(row): row for row in earlier}
    for row in rows:
        rows_by_key[_key(row)] = {**rows_by_key.get(_key(row), {}), **row}
    _write(path, list(dict.fromkeys([*columns, *(name for row in rows for name in row)])), rows_by_key.values())


def _columns_to_continue(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns of the file if these rows have no others, and come after its last row, which is complete; else []."""
    try:
        first, last = (line.decode() for line in ends_of(path))
        ((*columns,), (*cells,)) = csv.reader([first, last])
        is_complete = last.endswith("\n") and len(cells) == len(columns)
        is_later = int(cells[columns.index("round")]) < min(int(row["round"]) for row in rows)
    except (OSError, ValueError, csv.Error):
        return []
    return columns if is_complete and is_later and not {name for row in rows for name in row} - {*columns} else []


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row["round"]), str(row["client"])


def own_values(client: int, values: Mapping[str, Any], num_clients: int) -> dict[str, float]:
    """Return the values that a callback logs of a client, as numbers.

    Args:
        client: index of the client.
        values: numbers, or tensors of one number, by column.
        num_clients: number of clients of the federation.

    Raises:
        UserError: there is no such client, a name is that of another column, or a value is no number.
    """
    require(
        is_whole(client) and 0 <= client < num_clients,
        f"log_client needs the index of a client, 0 to {num_clients - 1}, got {client!r}.",
    )
    checked = {}
    for name, value in values.items():
        require(
            name not in OF_CLIENT,
            f"log_client cannot log {name!r}, because clients.csv has another column of this name: give another name.",
        )
        try:
            checked[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"log_client logs numbers, got {name} {value!r}.") from None
    return checked


def keep_rows_before(round_index: int, source: Path, path: Path) -> None:
    """Write the rows of earlier rounds in `source`, if it exists, to `path`: a resumed run repeats the others."""
    if source.is_file():
        columns, rows = read_rows(source)
        _write(path, columns, [row for row in rows if row["round"].isdecimal() and int(row["round"]) < round_index])


def _write(path: Path, columns: list[str], rows: Iterable[Mapping[str, Any]]) -> None:
    header = {column: column for column in columns}
    with replacing(path, "w", encoding="utf-8", newline="") as file:
        file.write(_as_text(columns, [header, *rows]))


def _as_text(columns: list[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as lines of a CSV file."""
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns).writerows(
        {column: as_cell(value) if column == "name" else value for column, value in row.items()} for row in rows
    )
    return text.getvalue()
