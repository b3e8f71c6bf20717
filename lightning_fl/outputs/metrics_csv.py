"""`metrics.csv`: Lightning's CSVLogger with one row for each round, kept complete when a run is killed or resumed."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class _RoundWriter(ExperimentWriter):
    """Writer that appends rows; if a row has a new column, the whole file is written aside and renamed."""

    def _check_log_dir_exists(self) -> None:
        """Do nothing: the trainer moves an earlier run's files aside, and a resumed run keeps its rows."""

    def save(self) -> None:
        """Write the recorded rows to disk."""
        if not self.metrics:
            return
        rows: list[dict[str, Any]] = list(self.metrics)
        path = Path(self.metrics_file_path)
        new_columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in self.metrics_keys]
        if path.is_file() and not new_columns:
            with path.open("a", newline="") as file:
                csv.DictWriter(file, self.metrics_keys).writerows(rows)
        else:
            self.metrics_keys += new_columns
            write_rows(path, self.metrics_keys, [*read_rows(path)[1], *rows])
        self.metrics = []


class RoundCSVLogger(CSVLogger):
    """Logger that writes `metrics.csv` into the run's folder itself, with columns in order of first appearance."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(save_dir=os.fspath(root), name="", version="", flush_logs_every_n_steps=1)
        self._logged_by_callbacks: dict[str, float] = {}
        self._hyperparameters: list[Any] = []

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
                super().log_hyperparams(params)
            super().log_metrics({**metrics, **self._logged_by_callbacks}, step)
            self._hyperparameters, self._logged_by_callbacks = [], {}

    @rank_zero_only
    def keep_rounds_before(self, round_index: int, home: Path) -> None:
        """Drop the rows of rounds that a resumed run repeats, and a last row that a kill cut short.

        Args:
            round_index: first round of the resumed run.
            home: folder of the run that is resumed, whose rows are kept.
        """
        columns, kept = rows_before(round_index, home)
        if columns:
            write_rows(Path(self.log_dir, ExperimentWriter.NAME_METRICS_FILE), columns, kept)
            self.experiment.metrics_keys = columns


def rows_before(round_index: int, home: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return columns and rows of the rounds before a round of the run in a folder."""
    columns, rows = read_rows(home / ExperimentWriter.NAME_METRICS_FILE)
    return columns, [row for row in rows if (row.get("round") or "").isdigit() and int(row["round"]) < round_index]


def read_rows(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return columns and complete rows of a CSV file (none if it does not exist); incomplete rows are left out."""
    if not path.is_file():
        return [], []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = [row for row in reader if None not in row.values() and None not in row]
        return list(reader.fieldnames or []), rows


def write_rows(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    """Write a CSV file aside and rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
