"""Runs read from disk: `metrics.csv`, the configuration, and the bits by kind."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fl.checks import LARGEST, MOST, as_number, is_real
from lightning_fl.errors import UserError, collecting, nearest, require, shortened
from lightning_fl.outputs.communication_json import Bits, read_communication, read_metric
from lightning_fl.outputs.neighbours import EPSILON, kind_of_epsilon
from lightning_fl.outputs.run_folder import (
    COMMUNICATION,
    METRICS,
    UNKNOWN,
    configs_of_fits,
)
from lightning_fl.outputs.traffic import COLUMNS
from lightning_fl.outputs.yaml_files import read_written
from lightning_fl.report.smoothing import Floats
from lightning_fl.vectors.kinds import KINDS

ASIDE = re.compile(r"earlier-\d+(\.moving)?")
"""Names of folders below a run or a report into which earlier files were moved."""
BUDGET = re.compile(r"trainer\.callbacks\.(?:\d+\.)?max_(uplink|downlink|total)_bytes")
"""Settings of the `CommunicationMeter` that end a run."""
REPORT = "report.md"
MOST_NAMES = 20
ENERGY = "energy/total_joules"
"""Column of `EnergyMeter`."""
NUMBERS = (
    *(
        f"trainer.{flag}"
        for flag in ("clients_per_round", "local_epochs", "local_steps", "log_every_n_rounds", "max_rounds")
    ),
    *("trainer.clock.computation_seconds", "data.num_clients", "data.seed", "data.server_degree", "data.val_fraction"),
    "seed_everything",
)
"""Settings that are numbers in every run."""
NAMES = ("algorithm", "data", "model")
"""Settings that are names of classes."""


@dataclass(frozen=True)
class Record:
    """Run as read from its folder.

    Attributes:
        folder: folder of the run.
        columns: numbers of `metrics.csv` by column (n,); NaN where a row has none.
        settings: configuration with dotted keys and bare class names; {} if there is none.
        algorithm: name of the method; the folder's name if unknown.
        bits: bits of the whole run by direction and kind; None if no file contains them.
        gaps: remarks on missing parts.
        not_finite: True where a column has `nan` or `inf` (n,), for columns with such values; in `columns` they are NaN.
        settings_of_fits: settings of the fit that began the run, and of each that resumed it; the last are `settings`.
        metric: name and mode of the run's own metric; None if no file has them.
    """

    folder: Path
    columns: dict[str, Floats]
    settings: dict[str, Any]
    algorithm: str
    bits: Bits | None
    gaps: tuple[str, ...]
    not_finite: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    settings_of_fits: tuple[dict[str, Any], ...] = ()
    metric: Mapping[str, str] | None = None

    @cached_property
    def spent(self) -> dict[str, Floats]:
        """Costs of the run up to each row (n,): rounds, bytes of all clients, seconds, joules if they are estimated, and ε."""
        kind = kind_of_epsilon(self.settings)
        uplink, downlink = (self.column(COLUMNS[way]) for way in ("up", "down"))
        return {
            "rounds": self.columns["round"] + 1,
            "uplink": uplink,
            "downlink": downlink,
            "total_traffic": uplink + downlink,
            "simulated_seconds": self.column("time/simulated_seconds"),
            "wall_seconds": self.wall_seconds,
            "joules": self.column(ENERGY),
            **({kind: self.column(EPSILON)} if kind is not None and EPSILON in self.columns else {}),
        }

    @property
    def bytes(self) -> dict[tuple[str, str], float]:
        """Bytes of the whole run by direction and kind; {} if unknown."""
        return {(way, kind): bits.get(kind, 0) / 8 for way, bits in (self.bits or {}).items() for kind in KINDS}

    @property
    def num_rounds(self) -> int:
        """Number of rounds up to the last row."""
        return int(self.columns["round"][-1]) + 1

    @cached_property
    def wall_seconds(self) -> Floats:
        """Measured seconds of all rounds so far (n,); NaN from the first missing row on."""
        seconds = self.column("time/round_seconds")
        whole = self.columns["round"] == np.arange(len(seconds))
        return np.where(np.logical_and.accumulate(whole), np.cumsum(seconds), np.nan)

    def column(self, name: str) -> Floats:
        """Return a column; NaN in every row if the run does not have it."""
        return self.columns.get(name, np.full(len(self.columns["round"]), np.nan))


def read_run(path: str | Path) -> Record:
    """Read the run in a folder.

    Args:
        path: folder of the run (its `trainer.default_root_dir`), or the `metrics.csv` in it.

    Raises:
        UserError: there is no run, or no complete row.
    """
    folder = Path(path)
    if folder.name == METRICS and folder.is_file():
        folder = folder.parent
    if not (folder / METRICS).is_file():
        raise UserError(f"there is no run in {path}: {_where_runs_are(folder)}.")
    try:
        columns, not_finite, gaps = _read_metrics(folder / METRICS)
    except OSError as error:
        raise UserError(f"{folder / METRICS} cannot be read ({error.strerror}).") from error
    fits, problem = _read_settings(folder)
    settings = fits[-1] if fits else {}
    gaps += problem
    rounds = columns["round"]
    every = settings.get("trainer.log_every_n_rounds")
    num_rounds, every = int(rounds[-1]) + 1, max(1, int(every)) if every is not None and is_real(every) else 1
    if num_rounds > every * len(rounds):
        gaps.append(f"{num_rounds - every * len(rounds)} of its first {num_rounds} rounds have no row")
    planned = settings.get("trainer.max_rounds")
    if isinstance(planned, int) and num_rounds < planned and not _has_spent_its_budget(settings, columns):
        gaps.append(f"it ends after {num_rounds} of {planned} rounds")
    bits, problem = _read_bits(folder)
    algorithm = str(settings.get("algorithm") or folder.name)
    return Record(
        folder, columns, settings, algorithm, bits, tuple(gaps + problem), not_finite, tuple(fits), read_metric(folder)
    )


def _has_spent_its_budget(settings: Mapping[str, Any], columns: Mapping[str, Floats]) -> bool:
    """True if a `CommunicationMeter` ended the run when its bytes were sent."""
    up, down = (columns[COLUMNS[way]][-1] if COLUMNS[way] in columns else 0.0 for way in ("up", "down"))
    sent = {"uplink": up, "downlink": down, "total": up + down}
    budgets = [(way[1], value) for key, value in settings.items() if (way := BUDGET.fullmatch(key)) and is_real(value)]
    return any(sent[way] >= budget for way, budget in budgets)


def read_runs(paths: Sequence[str | Path]) -> tuple[list[Record], list[str]]:
    """Read the runs in these folders; if a folder is not a run, read the runs below it.

    Returns:
        The runs, each once, in the given order; runs below a folder are in the order of their names. And remarks on the runs that
        were found below a folder, and on the reasons why some were left out.

    Raises:
        UserError: a folder does not exist, or there is no run at all that can be read.
    """
    records: dict[Path, Record] = {}
    remarks: list[str] = []
    problems: list[str] = []
    for path in map(Path, paths):
        if not path.is_dir() and path.name != METRICS:
            read_run(path)  # raises the error
        is_run = not path.is_dir() or (path / METRICS).exists()
        folders = [path] if is_run else runs_below(path)
        if not folders:
            problems.append(f"there is no run in {path} or below it: no folder has a {METRICS}.")
            continue
        read, failed = _readable(folders)
        problems += failed
        if read and not is_run:
            names = [record.folder.relative_to(path).as_posix() for record in read.values()]
            more = f" and {len(names) - MOST_NAMES} more, which `runs.csv` lists" if len(names) > MOST_NAMES else ""
            remarks.append(f"Runs in {path}: {', '.join(names[:MOST_NAMES])}{more}.")
        records |= {record.folder.resolve(): record for record in read.values()}
    require(bool(records), "".join(problems[:1]))
    return list(records.values()), remarks + [f"Left out: {problem}" for problem in problems]


def readable(folders: Sequence[Path]) -> tuple[dict[Path, Record], list[str]]:
    """Return the runs in these folders that can be read, by folder, and the reasons why the others cannot.

    Raises:
        UserError: none can be read.
    """
    records, problems = _readable(folders)
    require(bool(records), "".join(problems[:1]))
    return records, problems


def _readable(folders: Sequence[Path]) -> tuple[dict[Path, Record], list[str]]:
    records: dict[Path, Record] = {}
    problems: list[str] = []
    for folder in folders:
        with collecting(problems):
            records[folder] = read_run(folder)
    return records, problems


def runs_below(folder: Path) -> list[Path]:
    """Return the folders of the runs below a folder by name, numbers by size, without runs that were moved aside or hidden.

    Links are followed, to each folder once.
    """
    found, seen = list[Path](), set[Path]()
    for root, names, files in os.walk(folder, followlinks=True):
        here = Path(root)
        if here.resolve() in seen:  # by a link
            names.clear()
            continue
        seen.add(here.resolve())
        if METRICS in (*files, *names):
            found.append(here)
        keeps_earlier = METRICS in files or REPORT in files
        names[:] = [name for name in names if name[0] != "." and not (keeps_earlier and ASIDE.fullmatch(name))]
        names.sort(key=lambda name: (here / name).is_symlink())  # a run is called by its own folder
    return sorted(found, key=lambda path: [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", path.as_posix())])


def _where_runs_are(folder: Path) -> str:
    """Return the reason why a folder has no `metrics.csv`, and the runs near it."""
    if folder.is_dir():
        return f"its {METRICS} is not a file" if os.path.lexists(folder / METRICS) else f"it has no {METRICS}"
    names = [path.parent.name for path in folder.parent.glob(f"*/{METRICS}")]
    what = "it is not a folder" if folder.exists() else "the folder does not exist"
    return what + (f"; {nearest(folder.name, names)}" if names else "")


def _read_metrics(path: Path) -> tuple[dict[str, Floats], dict[str, NDArray[np.bool_]], list[str]]:
    """Return the columns of the complete rows by round, where they are not finite, and remarks on other rows."""
    lines = path.read_text(encoding="utf-8", errors="replace").replace("\0", "").splitlines(keepends=True)
    names = _cells("".join(lines[:1]))
    require("round" in names, f"{path} is not from a run: its first line has no column round.")
    twice = [name for name in names if name and names.count(name) > 1]
    require(not twice, f"{path} is not from a run: its first line has the column {''.join(twice[:1])} twice.")
    position = names.index("round")
    rows: dict[float, tuple[list[float], list[bool]]] = {}
    num_broken = 0
    # A line that a kill cut short has no line ending, even if only its last cell is cut.
    cells_by_line = [_cells(line) if line.endswith(("\n", "\r")) else [] for line in lines[1:]]
    columns = zip(*(cells for cells in cells_by_line if len(cells) == len(names)), strict=True)
    # A callback may log texts.
    texts = {place for place, cells in enumerate(columns) if all(isinstance(as_number(cell), str) for cell in cells)}
    for cells in cells_by_line:
        cells = ["" if place in texts else cell for place, cell in enumerate(cells)]
        values = [as_number(cell or "0") for cell in cells]
        is_whole = len(values) == len(names) and bool(cells[position]) and str not in map(type, values)
        if is_whole and values[position].is_integer() and 0 <= values[position] < MOST:
            rows[values[position]] = values, [not cell for cell in cells]
        else:
            num_broken += 1
    require(bool(rows), f"{path} has no complete row: nothing was logged, or the file was cut short.")
    gaps = [f"incomplete or broken rows left out: {num_broken}"] if num_broken else []
    order = sorted(rows)
    table, is_empty = np.array([rows[index][0] for index in order]), np.array([rows[index][1] for index in order])
    broken = ~is_empty & ~(np.abs(table) <= LARGEST)
    table[broken | is_empty] = np.nan
    not_finite = {name: column for name, column in zip(names, broken.T, strict=True) if column.any()}
    return {name: column for name, column in zip(names, table.T, strict=True) if name}, not_finite, gaps


def _cells(line: str) -> list[str]:
    """Return the cells of a line; [] if it has a cell that is too long."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def _read_settings(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the configuration or settings of each fit of the run, and remarks on broken files."""
    settings: list[dict[str, Any]] = []
    problems: list[str] = []
    for path in configs_of_fits(folder):
        try:
            content = read_written(path)
        except UserError as error:
            problems.append(f"its {path.name} is ignored ({str(error).rstrip('.')})")
            continue
        if isinstance(content, dict):
            flat = flatten(content)
            if odd := [key for key in (*NUMBERS, *NAMES) if not _is_possible(key, flat.get(key))]:
                problems.append(f"its {path.name} is ignored: it has {odd[0]} {shortened(repr(flat[odd[0]]))}")
                continue
            if "trainer.local_epochs" in flat and not (flat["trainer.local_epochs"] or flat.get("trainer.local_steps")):
                flat["trainer.local_epochs"] = 1  # the trainer's default
            if any(key.startswith("trainer.secure_aggregation.") for key in flat):
                flat["trainer.secure_aggregation"] = "SecureAggregation"  # the command line writes no class
            settings.append(flat)
    return settings, problems


def _is_possible(key: str, value: Any) -> bool:
    """True if a setting that is a number or a name in every run has such a value here."""
    if value is None or value == UNKNOWN or isinstance(value, bool):
        return True
    return is_real(value) if key in NUMBERS else isinstance(value, str | int | float)


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return a configuration's values by dotted keys; keys omit `init_args`, and a class becomes its bare name.

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
    """Return the bits by kind from `communication.json`, and a remark if it is broken."""
    try:
        return read_communication(folder), []
    except (ValueError, OSError):
        return None, [f"its {COMMUNICATION} cannot be read, so its bits by kind are unknown"]


# Setting that names the files or the module from which a data module reads.
SOURCES = {
    "Arrays": "data.path",
    "CelebA": "data.root",
    "ImageFolder": "data.root",
    "Leaf": "data.train",
    "HuggingFace": "data.path",
    "Federated": "data.datamodule",
}


def require_same_data(settings: Mapping[str, Mapping[str, Any]], what: str = "report") -> None:
    """Raise unless all runs use the same data; accuracies on different tasks cannot be compared.

    Files of one name may lie in different folders on different machines; files of different names are different data.

    Args:
        settings: settings of each run by its folder or name.
        what: `report` or `study`; the error advises to make one for each data set.

    Raises:
        UserError: the runs use different data sets.
    """
    data_by_source: dict[tuple[str, str], str] = {}
    for name, run_settings in settings.items():
        if "data" in run_settings:
            data = str(run_settings["data"])
            source = run_settings.get(SOURCES.get(data, ""))
            named = data if source is None else f"{data} of {source}"
            data_by_source.setdefault((data, file_name(source or "")), f"{named} in {name}")
    require(
        len(data_by_source) < 2,
        "the runs use different data, so their accuracies cannot be compared: "
        f"{', '.join(data_by_source.values())}; make a {what} for each.",
    )


def file_name(path: object) -> str:
    """Return the last part of a POSIX or Windows path, or any other value as text."""
    return re.split(r"[\\/]", str(path).rstrip("\\/"))[-1] or str(path)
