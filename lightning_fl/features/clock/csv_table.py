"""Tables of numbers in the user's CSV files; errors name the file and the line."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NoReturn

import numpy as np

from lightning_fl.checks import LARGEST, SMALLEST
from lightning_fl.errors import UserError, nearest, require

CLIENT = "client"


@dataclass(frozen=True)
class CsvTable:
    """Columns of numbers of a CSV file.

    Attributes:
        what: what the file is, for errors.
        path: path of the file.
        columns: numbers (n,) of each column by its name, float64.
        lines: line of the file (n,) on which each row ends.
    """

    what: str
    path: str
    columns: Mapping[str, np.ndarray]
    lines: np.ndarray

    def refuse(self, row: int, sentence: str) -> NoReturn:
        """Raise `UserError` about a row."""
        raise UserError(f"{self.what} {self.path}, line {self.lines[row]}: {sentence}")

    def refuse_first(self, wrong: np.ndarray, sentence: Callable[[int], str]) -> None:
        """Raise `UserError` about the first row for which the bools `wrong` (n,) are True, if there is one."""
        if wrong.any():
            row = int(wrong.argmax())
            self.refuse(row, sentence(row))

    def clients(self, num_clients: int) -> np.ndarray:
        """Return the column of clients (n,), int64.

        Raises:
            UserError: an entry is not the index of a client.
        """
        column = self.columns[CLIENT]
        unknown = (column != np.floor(column)) | (column < 0) | (column >= num_clients)
        self.refuse_first(
            unknown,
            lambda row: f"client {column[row]:.12g} is unknown: the federation has the clients 0 to {num_clients - 1}.",
        )
        return column.astype(np.int64)

    def check_positive(self, *names: str) -> None:
        """Raise `UserError` if a number of these columns is not above 0, or so small or large that its quotients overflow."""
        for name in names:
            values = self.columns[name]
            self.refuse_first(values <= 0, lambda row: f"{name} must be positive, got {values[row]:g}.")  # noqa: B023
            self.refuse_first(
                (values < SMALLEST) | (values > LARGEST),
                lambda row: f"{name} must be from {SMALLEST} to {LARGEST}, got {values[row]:g}.",  # noqa: B023
            )


def read_csv(what: str, path: str | os.PathLike[str], allowed: Sequence[Collection[str]]) -> CsvTable:
    """Read a CSV file with a header and finite numbers.

    Args:
        what: what the file is, for errors.
        path: path of the file.
        allowed: the sets of columns that it may have.

    Raises:
        UserError: the file cannot be read, or is malformed; the sentence names the line.
    """
    path = os.fspath(path)
    require(os.path.isfile(path), f"{what} {path} is not a file.")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header(what, path, header, allowed)
            rows, lines = list[list[float]](), list[int]()
            for cells in reader:
                if cells:
                    rows.append(_numbers(f"{what} {path}, line {reader.line_num}", header, cells))
                    lines.append(reader.line_num)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what} {path} cannot be read as text: {error}.") from error
    except csv.Error as error:
        raise UserError(f"{what} {path}, line {reader.line_num}: {error}.") from error
    require(bool(rows), f"{what} {path} has no rows below its header.")
    columns = np.array(rows, dtype=np.float64).T
    return CsvTable(what, path, dict(zip(header, columns, strict=True)), np.array(lines))


def _check_header(what: str, path: str, header: Sequence[str], allowed: Sequence[Collection[str]]) -> None:
    if any(set(header) == set(names) and len(header) == len(names) for names in allowed):
        return
    columns = {name for names in allowed for name in names}
    choices = "; or ".join(",".join(names) for names in allowed)
    unknown = next((name for name in header if name not in columns), None)
    wrong = (
        f"column {unknown!r} is unknown; {nearest(unknown, columns)}." if unknown else f"the columns must be {choices}."
    )
    raise UserError(
        f"{what} {path}, line 1: {wrong}" if header else f"{what} {path} is empty: it must begin with {choices}."
    )


def _numbers(where: str, header: Sequence[str], cells: Sequence[str]) -> list[float]:
    """Return the numbers in the cells of a row."""
    require(len(cells) == len(header), f"{where}: {len(cells)} values, but the header has {len(header)}.")
    numbers = []
    for name, cell in zip(header, cells, strict=True):
        try:
            number = float(cell)
        except ValueError:
            raise UserError(f"{where}: {name} must be a number, got {cell!r}.") from None
        require(isfinite(number), f"{where}: {name} must be a finite number, got {cell!r}.")
        numbers.append(number)
    return numbers
