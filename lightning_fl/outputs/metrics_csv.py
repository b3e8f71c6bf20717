"""`metrics.csv`: Lightning's CSVLogger with one row for each round, kept complete when a run is killed or resumed."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_fl.outputs.files import append, replacing, writing
from lightning_fl.outputs.losses import say_lost

UNREADABLE = "\ufffd"
"""Character that stands for bytes that are not UTF-8."""


class _RoundWriter(ExperimentWriter):
    """Writer that appends rows, and writes the whole file again if a row has a new column or another program changed the file.

    Attributes:
        lines: rows of the file as text, some 300 bytes a round, so that the file can always be written again.
        last_row: values of the last row that was written.
    """

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir=log_dir)
        self.begin([], [])

    def _check_log_dir_exists(self) -> None:
        """Do nothing: the trainer moves an earlier run's files aside, and a resumed run keeps its rows."""

    def begin(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        """Begin with these rows, which `rewrite` writes."""
        self.metrics, self.metrics_keys = [], columns
        self.last_row: dict[str, Any] = {}
        self.lines = [_as_line(row[key] for key in columns) for row in rows]
        self._size: int | None = None

    def save(self) -> None:
        """Write the recorded rows to disk."""
        rows: list[dict[str, Any]] = list(self.metrics)
        self.metrics = []  # rows that cannot be written are not tried again when the run ends
        if not rows:
            return
        self.last_row = dict(rows[-1])
        new_columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in self.metrics_keys]
        self.metrics_keys += new_columns
        lines = [_as_line(row.get(key, "") for key in self.metrics_keys) for row in rows]
        self.lines = [line + "," * len(new_columns) for line in self.lines] if new_columns else self.lines
        self.lines += lines
        path = Path(self.metrics_file_path)
        present = path.stat().st_size if path.is_file() else None
        if self._size is not None and present != self._size:
            say_lost(
                f"{path} was changed or deleted by another program; it is written again with all of the run's rows."
            )
        if new_columns or self._size is None or present != self._size:
            self.rewrite()
        else:
            append(path, "".join(f"{line}\r\n" for line in lines))
            self._size = path.stat().st_size

    def rewrite(self) -> None:
        """Write the whole file."""
        path = Path(self.metrics_file_path)
        with replacing(path, "w", encoding="utf-8", newline="") as file:
            file.writelines(f"{line}\r\n" for line in (_as_line(self.metrics_keys), *self.lines))
        self._size = path.stat().st_size


class RoundCSVLogger(CSVLogger):
    """Logger that writes `metrics.csv` into the run's folder itself, with columns in order of first appearance.

    Attributes:
        last_row: values of the last row; {} before the first, and in processes that write nothing.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(save_dir=os.fspath(root), name="", version="", flush_logs_every_n_steps=1)
        self._logged_by_callbacks: dict[str, float] = {}
        self._hyperparameters: list[Any] = []
        self.last_row: dict[str, Any] = {}

    @property
    def log_dir(self) -> str:
        """Folder of the run."""
        return self.save_dir

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Writer, created on first use."""
        if self._experiment is None:
            self._experiment = _RoundWriter(log_dir=self.log_dir)
        return self._experiment

    @rank_zero_only
    def log_hyperparams(self, params: Any = None) -> None:
        """Record hyper-parameters; they are written with the first row, because until then the folder may hold an earlier run."""
        self._hyperparameters.append(params)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Record a round; values that callbacks log during a round become part of its row."""
        self._logged_by_callbacks |= metrics
        if "round" in metrics:
            for params in self._hyperparameters:
                with writing(path := Path(self.log_dir, ExperimentWriter.NAME_HPARAMS_FILE)):
                    if path.is_symlink():
                        path.unlink()  # Lightning would write to what the link leads to
                    super().log_hyperparams(params)
            super().log_metrics({**metrics, **self._logged_by_callbacks}, step)
            self._hyperparameters, self._logged_by_callbacks = [], {}
            self.last_row = self.experiment.last_row

    @rank_zero_only
    def begin(self) -> None:
        """Begin a new run."""
        self.experiment.begin([], [])

    @rank_zero_only
    def resume(self, path: Path, round_index: int) -> int:
        """Take over rows of a resumed run, without those of rounds that it repeats; return their number.

        Args:
            path: metrics.csv of the run.
            round_index: first round of the resumed run.
        """
        columns, rows = rows_before(round_index, path)
        self.experiment.begin(columns if rows else [], rows)
        return len(rows)

    @property
    def num_rows(self) -> int:
        """Number of rows that the run has written."""
        return len(self.experiment.lines) if self._experiment is not None else 0

    @rank_zero_only
    def rewrite(self) -> None:
        """Write the rows taken over from a resumed run."""
        if self.experiment.lines:
            self.experiment.rewrite()


def rows_before(round_index: int, path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return columns and rows of a metrics.csv, those of rounds before `round_index` in their order, one a round."""
    columns, rows = read_rows(path)
    numbered = {int(row["round"]): row for row in rows if (row.get("round") or "").isdecimal()}
    return columns, [row for number, row in sorted(numbered.items()) if number < round_index]


def read_rows(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return columns and complete rows of a CSV file, none if it cannot be read; incomplete and unreadable rows are left out."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            reader = csv.DictReader(line.replace("\0", UNREADABLE) for line in file)
            rows = [row for row in reader if None not in row.values() and None not in row]
            columns = list(reader.fieldnames or [])
    except (OSError, csv.Error):
        return [], []
    return columns, [row for row in rows if not any(UNREADABLE in value for value in row.values())]


def _as_line(values: Iterable[Any]) -> str:
    """Return values as a line, True as 1 and False as 0."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(int(value) if isinstance(value, bool) else value for value in values)
    return text.getvalue()
