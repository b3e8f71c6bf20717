"""Runs as they lie on the disk: `metrics.csv`, the configuration, and the bits by kind."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lightning_fl.errors import UserError, nearest, require
from lightning_fl.outputs.communication_json import Bits, read_communication
from lightning_fl.outputs.run_folder import COMMUNICATION, CONFIG, HPARAMS, LAST, METRICS
from lightning_fl.report.smoothing import Floats


@dataclass(frozen=True)
class Record:
    """One run.

    Attributes:
        folder: where it lies.
        columns: by name the numbers of `metrics.csv` (n,), NaN where a row has none.
        settings: the configuration with dots between the keys, classes by their bare names; {} if there is none.
        algorithm: name of the method; that of the folder if nothing says it.
        bits: of the whole run by direction and kind; None where no file says them.
        gaps: sentences about what is missing.
        not_finite: by name the cells of a column in which `nan` or `inf` stands; in `columns` they are NaN.
    """

    folder: Path
    columns: dict[str, Floats]
    settings: dict[str, Any]
    algorithm: str
    bits: Bits | None
    gaps: tuple[str, ...]
    not_finite: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_rounds(self) -> int:
        """Rounds until the last row."""
        return int(self.columns["round"][-1]) + 1

    @cached_property
    def wall_seconds(self) -> Floats:
        """Seconds that the rounds took here, so far (n,); NaN where rows between are missing."""
        seconds = self.columns.get("time/round_seconds", np.full(len(self.columns["round"]), np.nan))
        whole = self.columns["round"] == np.arange(len(seconds))
        return np.where(np.logical_and.accumulate(whole), np.cumsum(seconds), np.nan)

    def column(self, name: str) -> Floats:
        """A column, NaN where the run has none of that name."""
        return self.columns.get(name, np.full(len(self.columns["round"]), np.nan))


def read_run(path: str | Path) -> Record:
    """The run in a folder.

    Args:
        path: the folder that `trainer.default_root_dir` was, or the `metrics.csv` in it.

    Raises:
        UserError: there is no run, or no whole row of one.
    """
    folder = Path(path)
    if folder.name == METRICS and folder.is_file():
        folder = folder.parent
    if not (folder / METRICS).is_file():
        raise UserError(f"there is no run in {path}: {_where_runs_are(folder)}.")
    columns, not_finite, gaps = _read_metrics(folder / METRICS)
    settings, problem = _read_settings(folder)
    gaps += problem
    rounds = columns["round"]
    every = int(settings.get("trainer.log_every_n_rounds") or 1)
    missing = int(rounds[-1]) + 1 - every * len(rounds)
    if missing > 0:
        gaps.append(f"{missing} of its first {int(rounds[-1]) + 1} rounds have no row")
    planned = settings.get("trainer.max_rounds")
    if isinstance(planned, int) and rounds[-1] + 1 < planned:
        gaps.append(f"it ends after {int(rounds[-1]) + 1} of {planned} rounds")
    bits, problem = _read_bits(folder)
    algorithm = str(settings.get("algorithm") or folder.name)
    return Record(folder, columns, settings, algorithm, bits, tuple(gaps + problem), not_finite)


def _where_runs_are(folder: Path) -> str:
    """What to say of a folder without a `metrics.csv`."""
    if not folder.is_dir():
        parent = folder.parent
        names = [path.parent.name for path in parent.glob(f"*/{METRICS}")] if parent.is_dir() else []
        what = "it is no folder" if folder.exists() else "the folder does not exist"
        return what + (f"; {nearest(folder.name, names)}" if names else "")
    below = sorted(str(found.parent) for found in folder.glob(f"*/{METRICS}"))
    return f"it has no {METRICS}" + (f"; there are runs in {', '.join(below[:8])}" if below else "")


def _read_metrics(path: Path) -> tuple[dict[str, Floats], dict[str, int], list[str]]:
    """Columns of the rows that are whole, by round; how many of a column's cells are not finite; which rows are not whole."""
    lines = path.read_text(errors="replace").replace("\0", "").splitlines(keepends=True)
    names = next(csv.reader(lines[:1]), [])
    require("round" in names, f"{path} is no run's: its first line names no column round.")
    position = names.index("round")
    numbers: dict[float, list[float]] = {}
    empty: dict[float, list[bool]] = {}
    num_broken = 0
    for line in lines[1:]:
        cells = next(csv.reader([line]), [])
        try:
            values = [float(cell or "nan") for cell in cells]
        except ValueError:
            values = []
        # A line that a kill cut short has no end, even if the cut went through its last cell.
        if line.endswith(("\n", "\r")) and len(values) == len(names) and values[position].is_integer():
            numbers[values[position]] = values
            empty[values[position]] = [not cell for cell in cells]
        else:
            num_broken += 1
    require(bool(numbers), f"{path} has no whole row: nothing was logged, or it was cut short.")
    gaps = [f"{num_broken} of its rows cut short or broken and left out"] if num_broken else []
    table = np.array([numbers[index] for index in sorted(numbers)])
    broken = ~np.isfinite(table) & ~np.array([empty[index] for index in sorted(numbers)])
    table[broken] = np.nan
    not_finite = {name: int(count) for name, count in zip(names, broken.sum(axis=0), strict=True) if count}
    return dict(zip(names, table.T, strict=True)), not_finite, gaps


def _read_settings(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The configuration, or of a run from Python the little that its hyper-parameters say."""
    for name in (CONFIG, HPARAMS):
        if not (folder / name).is_file():
            continue
        try:
            content = yaml.safe_load((folder / name).read_text())
        except (yaml.YAMLError, UnicodeDecodeError):
            return {}, [f"its {name} is no YAML and left out"]
        if isinstance(content, dict):
            return flatten(content if name == CONFIG else {"algorithm": content.get("algorithm"), "model": content}), []
    return {}, []


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """A configuration's values by their keys with dots; `init_args` is left out of the keys, a class is its bare name.

    >>> flatten({"algorithm": {"class_path": "lightning_fl.algorithms.FedProx", "init_args": {"mu": 0.1}}})
    {'algorithm': 'FedProx', 'algorithm.mu': 0.1}
    >>> flatten({"steps": [{"class_path": "Apply"}, {"class_path": "Momentum", "init_args": {"beta": 0.9}}]})
    {'steps.0': 'Apply', 'steps.1': 'Momentum', 'steps.1.beta': 0.9}
    """
    if isinstance(node, list) and any(isinstance(item, dict) for item in node):
        node = {str(position): item for position, item in enumerate(node)}
    if not isinstance(node, dict):
        return {prefix: node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if key == "class_path":
            flat[prefix] = str(value).rpartition(".")[2]
        else:
            flat |= flatten(value, prefix if key == "init_args" else f"{prefix}.{key}" if prefix else str(key))
    return flat


def _read_bits(folder: Path) -> tuple[Bits | None, list[str]]:
    """Return the bits by kind from `communication.json`; runs of version 0.1 have them in the checkpoint alone."""
    try:
        bits = read_communication(folder)
    except ValueError:
        return None, [f"its {COMMUNICATION} cannot be read, so that its bits are not known by kind"]
    if bits is not None or not (folder / LAST).is_file():
        return bits, []
    from lightning_fl.outputs import checkpoint_file  # imports torch, which no later run needs

    try:
        bits = checkpoint_file.load(folder / LAST)["federation"]["run"]["ledger"]["total_bits"]
    except (UserError, KeyError):
        return None, [f"its {LAST} cannot be read, so that its bits are not known by kind"]
    return bits, []


# What says which data a module reads, for those that read any.
SOURCES = {"Arrays": "data.path", "ImageFolder": "data.root", "Federated": "data.datamodule"}


def require_same_data(records: Sequence[Record]) -> None:
    """Curves of different tasks have nothing to say to each other.

    Files of one name may lie in different places on different machines; those of different names are different data.

    Raises:
        UserError: the runs are of different data sets.
    """
    found: dict[tuple[str, ...], tuple[str, Path]] = {}
    for record in records:
        if "data" in record.settings:
            data = str(record.settings["data"])
            source = record.settings.get(SOURCES.get(data, ""))
            named = data if source is None else f"{data} of {source}"
            found.setdefault((data, file_name(source or "")), (named, record.folder))
    require(
        len(found) < 2,
        "the runs are of different data, whose accuracies cannot be compared: "
        f"{', '.join(f'{data} in {folder}' for data, folder in found.values())}; make a report of each.",
    )


def file_name(path: object) -> str:
    """The last part of a path, of any system's; anything else as it is."""
    return re.split(r"[\\/]", str(path).rstrip("\\/"))[-1] or str(path)
