"""`clients.csv`, beside metrics.csv: one row for each client of each evaluation of the clients, complete at any moment."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fl.outputs.files import replacing
from lightning_fl.outputs.metrics_csv import read_rows


def add_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the file anew with further rows, which may have new columns."""
    columns, earlier = read_rows(path)
    _write(path, dict.fromkeys([*columns, *(name for row in rows for name in row)]), [*earlier, *rows])


def keep_rows_before(round_index: int, source: Path, path: Path) -> None:
    """Write the rows of earlier rounds in `source`, if it exists, to `path`: a resumed run repeats the others."""
    if source.is_file():
        columns, rows = read_rows(source)
        _write(path, columns, [row for row in rows if row["round"].isdecimal() and int(row["round"]) < round_index])


def _write(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    with replacing(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)
