"""Study files: a grid of choices and seeds, and the runs that it stands for.

base: [configs/quickstart.yaml]           # files and flags of every run
seeds: [0, 1, 2]
grid:                                     # a product of axes; a choice is files and flags under a name
  method: {FedAvg: [], FedProx: [--algorithm=FedProx, --algorithm.mu=0.1]}
  work: {short: [--trainer.local_epochs=1], long: [--trainer.local_epochs=5]}
exclude: [{method: FedProx, work: short}] # combinations to leave out
target: 0.9                               # also report the cost of reaching it
metric: val/accuracy                      # by default the runs' own metric
window: 5                                 # smoothing window of the report
traffic: up                               # bytes that count: up (the default), down, or total for their sum
budget: [1.0e6, 1.0e8]                    # compare within these bytes, see `lightning_fl.study.budget`
takes: two minutes of one core            # time of all runs, in words
regime:                                   # network, data, clients and rounds behind a paper's figures, and of these runs
  paper: CNN, CIFAR-10, 100 clients, 500 rounds
  here: LeNet-5, digits, 100 clients, 30 rounds
  alike: false                            # true if the runs are in the paper's own regime (false if not given)
search: {trials: 20, …}                   # choose flags of every combination first, see `lightning_fl.study.search_file`
floor: [[short, again]]                   # cells with the same method, such as with other threads: its difference from itself
claims:                                   # see `lightning_fl.study.claims_file`
  - {text: FedProx sends less, better: FedProx, than: FedAvg, in: target_uplink, paper: 0.8}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lightning_fl.checks import LARGEST_SEED, as_number, check_choice, check_whole, is_real, is_whole
from lightning_fl.errors import UserError, nearest, require
from lightning_fl.outputs.metric import ACCURACY
from lightning_fl.outputs.traffic import COSTS
from lightning_fl.outputs.yaml_files import read_strictly
from lightning_fl.report.comparison import Metric
from lightning_fl.report.labels import experiment_settings
from lightning_fl.report.records import flatten, require_same_data
from lightning_fl.study.budget import Budget, read_budgets
from lightning_fl.study.claims import Claim
from lightning_fl.study.claims_file import read_claims
from lightning_fl.study.own_files import own_files
from lightning_fl.study.search_file import SearchFile, read_search

KEYS = (
    *("base", "seeds", "grid", "exclude", "target", "metric", "window", "traffic", "budget", "chance"),
    *("takes", "regime", "search", "floor", "claims"),
)
NEEDED = ("seeds", "grid")
MOST_COMBINATIONS, MOST_RUNS = 10_000, 100_000
"""Largest numbers of combinations of a grid and of runs of a study; a check of one combination takes most of a second."""
LONGEST_NAME = 200
"""Largest length of a cell's name in bytes, because it names a folder."""
SET = ("--seed_everything", "--data.seed", "--trainer.default_root_dir")
"""Flags that a study sets for each run."""
BLANK = re.compile(r"^([^\s=]+)\s+")
"""Flag, and the blank before its value."""
Resolve = Callable[[Sequence[str]], Mapping[str, Any]]
"""Function from the arguments of a fit to its whole configuration; raises `UserError` if they do not fit."""


@dataclass(frozen=True)
class Cell:
    """Combination of choices.

    Attributes:
        name: names of the choices, joined by `-`.
        arguments: files and flags of its runs, without the seed.
        choices: names of the choices, one for each axis.
    """

    name: str
    arguments: tuple[str, ...]
    choices: tuple[str, ...]


@dataclass(frozen=True)
class PlannedRun:
    """Run of a study.

    Attributes:
        cell: name of its cell.
        seed: seed of everything in it, the partition included.
        folder: its folder. The name contains a digest of the configuration, so another configuration is another run.
        arguments: arguments of its fit, without the folder.
        num_rounds: number of its rounds.
        max_seconds: seconds after which it ends before its last round; None for no limit.
        trial: number of the trial of a search; None for a run that the study compares.
        own_files: files that define the user's own classes.
    """

    cell: str
    seed: int
    folder: Path
    arguments: tuple[str, ...]
    num_rounds: int
    max_seconds: float | None = None
    trial: int | None = None
    own_files: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.cell}, seed {self.seed}" if self.trial is None else f"{self.cell}, trial {self.trial}"


@dataclass(frozen=True)
class Regime:
    """Network, data, clients and rounds, in words.

    Attributes:
        paper: regime of the paper's figures.
        here: regime of the study's runs.
        is_alike: True if the runs are in the paper's own regime, as far as the paper prints it.
    """

    paper: str
    here: str
    is_alike: bool = False


@dataclass(frozen=True)
class StudyFile:
    """Content of a study file.

    Attributes:
        cells: combinations of choices that are not excluded; with a search, their runs end at its budget.
        seeds: seeds of each cell.
        target: value whose cost is reported, or None.
        metric: metric to compare; None for the runs' own metric.
        window: length of the smoothing window in values; None for one that suits the curves.
        claims: claims of a paper to be judged.
        budgets: ranges of bytes within which the cells are compared.
        regime: regimes of the paper and of the runs; None if the file does not give them.
        takes: time of all runs, in words; empty if the file does not give it.
        floor: pairs of cells that are the same method.
        search: flags to choose for each cell before its runs are trained; None for no search.
        traffic: direction whose bytes are the cost: up, down, or total for their sum.
    """

    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    claims: tuple[Claim, ...]
    budgets: tuple[Budget, ...] = ()
    target: float | None = None
    metric: str | None = None
    window: int | None = None
    regime: Regime | None = None
    takes: str = ""
    floor: tuple[tuple[str, str], ...] = ()
    search: SearchFile | None = None
    traffic: str = "up"

    @property
    def budget(self) -> Budget | None:
        """Return the first of the budgets; None without any."""
        return next(iter(self.budgets), None)

    @property
    def report_flags(self) -> list[str]:
        """Flags of the report."""
        flags = {"target": self.target, "metric": self.metric, "window": self.window, "traffic": self.traffic}
        return [f"--{name}={value}" for name, value in flags.items() if value is not None]

    def floor_pairs(self, claim: Claim) -> tuple[tuple[str, str], ...]:
        """Return the pairs of `floor` that have the claim's settings, such as its clients; all pairs if none has.

        A setting of a pair is a choice that both of its cells share. The claim has it if one of the compared cells does.
        """
        choices = {cell.name: cell.choices for cell in self.cells}
        compared = list(zip(choices[claim.better], choices[claim.than], strict=True))

        def has_settings_of_claim(pair: tuple[str, str]) -> bool:
            both = zip(choices[pair[0]], choices[pair[1]], compared, strict=True)
            return all(first != second or first in claimed for first, second, claimed in both)

        return tuple(filter(has_settings_of_claim, self.floor)) or self.floor

    def with_flags(self, flags: Mapping[str, Sequence[str]]) -> StudyFile:
        """Return the study with more arguments for the named cells."""
        cells = [replace(cell, arguments=(*cell.arguments, *flags.get(cell.name, ()))) for cell in self.cells]
        return replace(self, cells=tuple(cells))

    def runs(self, out: Path, resolve: Resolve) -> list[PlannedRun]:
        """Return all runs, seed by seed, so that a stopped study has complete comparisons.

        Args:
            out: folder of the study.
            resolve: function that checks arguments and returns the configuration.

        Raises:
            UserError: some cells do not fit, two are the same, or they cannot be compared; the message names them.
        """
        resolved, incompatible = dict[str, Mapping[str, Any]](), dict[str, list[str]]()
        # The digest and the rounds are the same for all seeds. The bar shows on a terminal.
        for cell in tqdm(self.cells, desc="Checking", unit="cell", leave=False, disable=None):
            try:
                config = resolve((*cell.arguments, *seeded(self.seeds[0])))
                self._check_metric(config)
            except UserError as error:
                incompatible.setdefault(str(error).rstrip("."), []).append(cell.name)
                continue
            resolved[cell.name] = config
        digests = {name: digest_of(config) for name, config in resolved.items()}
        same: dict[str, list[str]] = {}
        for name, digest in digests.items():
            same.setdefault(digest, []).append(name)
        for names in same.values():
            require(
                len(names) == 1 or any(set(names) == set(pair) for pair in self.floor),
                f"{' and '.join(names)} have the same settings, apart from where and how they run.",
            )
        require(not incompatible, "; ".join(f"{', '.join(names)}: {why}" for why, names in incompatible.items()) + ".")
        require_same_data({name: flatten(config) for name, config in resolved.items()}, "study")
        files = {name: own_files(config) for name, config in resolved.items()}
        return [
            PlannedRun(
                cell.name,
                seed,
                out / cell.name / f"seed-{seed}-{digests[cell.name]}",
                (*cell.arguments, *seeded(seed)),
                int(resolved[cell.name]["trainer"]["max_rounds"]),
                seconds_of(resolved[cell.name]["trainer"].get("max_time")),
                own_files=files[cell.name],
            )
            for seed, cell in product(self.seeds, self.cells)
        ]

    def _check_metric(self, config: Mapping[str, Any]) -> None:
        """Raise `UserError` unless the target and the budget fit the metric of a run, if its configuration names one."""
        trainer, model = config["trainer"], config.get("model")
        name = self.metric or trainer.get("metric")
        mode = trainer.get("metric_mode") if name == trainer.get("metric") else None
        path = model.get("class_path", "") if isinstance(model, Mapping) else ""
        if name is None and path.startswith("lightning_fl.modules."):
            name = ACCURACY
        metric = Metric(name or "", self.target, self.window, mode)
        if self.budget is not None:
            self.budget.check(metric)


def read_study(path: Path) -> StudyFile:
    """Read a study file.

    Raises:
        UserError: there is no such file, or its content is not a study.
    """
    require(path.is_file(), f"there is no study file {path}.")
    content = read_strictly(path, f"a study is YAML with the keys {', '.join(KEYS)}")
    require(isinstance(content, dict), f"{path} must contain the keys of a study: {', '.join(KEYS)}.")
    for key in content:
        require(key in KEYS, f"{path} has the key {key!r}; {nearest(str(key), KEYS)}.")
    for key in NEEDED:
        require(bool(content.get(key)), f"{path} needs the key {key!r}.")
    seeds = content["seeds"]
    is_seeds = isinstance(seeds, list) and all(is_whole(seed) for seed in seeds)
    require(is_seeds and len(set(seeds)) == len(seeds), f"seeds must be different whole numbers, got {seeds!r}.")
    for seed in seeds:
        check_whole("a seed", seed, 0, LARGEST_SEED)
    base = _words(content.get("base", []), "base")
    cells = tuple(_cells(base, _grid(content["grid"]), content.get("exclude", [])))
    require(bool(cells), f"{path} excludes every combination of its grid.")
    _check_names(cells)
    require(
        len(cells) * len(seeds) <= MOST_RUNS,
        f"{path} has {len(cells) * len(seeds):,} runs, but a study has {MOST_RUNS:,} at most: make several studies.",
    )
    target, metric, window = _comparison(content)
    names = [cell.name for cell in cells]
    claims = read_claims(content.get("claims", []), names, target)
    takes = content.get("takes", "")
    require(isinstance(takes, str), f"takes must be words, got {takes!r}.")
    regime = _regime(content.get("regime"))
    floor, traffic = _floor(content.get("floor", []), names), content.get("traffic", "up")
    check_choice("traffic", traffic, tuple(COSTS))
    budgets = read_budgets(content, traffic)
    search = read_search(content.get("search"), {cell.name: cell.choices for cell in cells}, seeds, metric)
    file = StudyFile(
        cells, tuple(seeds), claims, budgets, target, metric, window, regime, takes, floor, search, traffic
    )
    return file if search is None else file.with_flags(dict.fromkeys(names, search.arguments))


def _floor(content: Any, cells: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of cells that are the same method."""
    require(
        isinstance(content, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in content),
        f"floor must be a list of pairs of cells that are the same method, got {content!r}.",
    )
    pairs = [(str(first), str(second)) for first, second in content]
    for name in (name for pair in pairs for name in pair):
        require(name in cells, f"floor names {name!r}; {nearest(name, cells)}.")
    require(all(first != second for first, second in pairs), f"floor must pair different cells, got {content!r}.")
    return tuple(pairs)


def _regime(content: Any) -> Regime | None:
    """Return the regimes of the paper and of the runs; None if none are given."""
    if content is None:
        return None
    is_regime = isinstance(content, dict) and {"paper", "here"} <= content.keys() <= {"paper", "here", "alike"}
    require(
        is_regime
        and all(isinstance(content[key], str) and content[key] for key in ("paper", "here"))
        and isinstance(content.get("alike", False), bool),
        f"regime has the words paper and here, and alike, true or false, got {content!r}.",
    )
    return Regime(content["paper"], content["here"], content.get("alike", False))


def _comparison(content: Mapping[str, Any]) -> tuple[float | None, str | None, int | None]:
    """Return target, metric and window of a study file."""
    target, metric, window = as_number(content.get("target")), content.get("metric"), content.get("window")
    require("target" not in content or is_real(target), f"target must be a number, got {content.get('target')!r}.")
    is_name = isinstance(metric, str) and bool(metric.strip())
    require("metric" not in content or is_name, f"metric must be the name of a column of metrics.csv, got {metric!r}.")
    if "window" in content:
        check_whole("window", window, 1)
    Metric(metric or "", None if target is None else float(target), window)
    return None if target is None else float(target), metric, window


def _check_names(cells: Sequence[Cell]) -> None:
    """Raise `UserError` if two combinations have the same name, or if a name is too long for a folder."""
    cells_by_name: dict[str, Cell] = {}
    for cell in cells:
        other = cells_by_name.setdefault(cell.name, cell)
        require(
            other is cell,
            f"the combinations {' and '.join(other.choices)}, and {' and '.join(cell.choices)}, are both called {cell.name}: "
            "rename a choice.",
        )
        require(
            len(cell.name.encode()) <= LONGEST_NAME,
            f"the combination {cell.name} names a folder, but is longer than {LONGEST_NAME} bytes: shorten its choices.",
        )


def _grid(content: Any) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the choices of each axis by name."""
    grid: dict[str, dict[str, tuple[str, ...]]] = {}
    require(isinstance(content, dict), f"grid must name axes, each with its choices, got {content!r}.")
    for name, choices in content.items():
        axis = str(name)
        require(axis not in grid, f"grid has the axis {axis!r} twice.")
        require(
            isinstance(choices, dict) and bool(choices),
            f"the axis {axis!r} must name its choices, each a list of files and flags, got {choices!r}.",
        )
        names = [str(name) for name in choices]
        for name in names:
            is_name = name.isprintable() and bool(name) and not set(name) & set("/\\ ") and not name.startswith(".")
            require(
                is_name,
                f"a choice names a folder, so it has no dot in front, no spaces or slashes; got {name!r}.",
            )
            require(names.count(name) == 1, f"the axis {axis!r} has the choice {name!r} twice.")
        grid[axis] = {str(name): _words(words, f"the choice {name!r} of {axis!r}") for name, words in choices.items()}
    num_combinations = prod(map(len, grid.values()))
    require(
        num_combinations <= MOST_COMBINATIONS,
        f"the grid has {num_combinations:,} combinations, but a study has {MOST_COMBINATIONS:,} at most: make several studies.",
    )
    return grid


def _words(content: Any, what: str) -> tuple[str, ...]:
    """Return files as `--config` flags, and flags as they are, `--flag value` as `--flag=value`."""
    require(
        isinstance(content, list) and all(isinstance(word, str) for word in content),
        f"{what} must be a list of files and flags, got {content!r}.",
    )
    words = [BLANK.sub(r"\1=", word) if word.startswith("-") else f"--config={word}" for word in content]
    for word in words:
        path = os.path.expanduser(word.removeprefix("--config="))
        flag = word.partition("=")[0]
        require(flag not in SET, f"{what} has {flag}, but the study sets it for each run: leave it out.")
        is_pipe = word.startswith("--config=") and os.path.exists(path) and not os.path.isfile(path)
        require(
            not is_pipe or os.path.isdir(path),
            f"{what} names {path}, which is not a file that every run can read again.",
        )
    return tuple(words)


def _cells(base: tuple[str, ...], grid: Mapping[str, Mapping[str, tuple[str, ...]]], exclude: Any) -> Iterator[Cell]:
    """Generate the combinations that are not excluded."""
    require(isinstance(exclude, list), f"exclude must be a list of combinations, got {exclude!r}.")
    left_out: list[dict[str, str]] = []
    for combination in exclude:
        require(isinstance(combination, dict), f"a combination to exclude names choices by axis, got {combination!r}.")
        named = {str(axis): str(name) for axis, name in combination.items()}
        for axis, name in named.items():
            require(axis in grid, f"exclude names the axis {axis!r}; {nearest(axis, grid)}.")
            require(name in grid[axis], f"exclude names the choice {name!r}; {nearest(name, grid[axis])}.")
        left_out.append(named)
    for names in product(*grid.values()):
        chosen = dict(zip(grid, names, strict=True))
        if any(named.items() <= chosen.items() for named in left_out):
            continue
        words = [word for axis, name in chosen.items() for word in grid[axis][name]]
        yield Cell("-".join(names), (*base, *words), names)


def seeded(seed: int) -> tuple[str, str]:
    """Return the flags of a seed, which decides the partition too."""
    return f"--seed_everything={seed}", f"--data.seed={seed}"


def seconds_of(max_time: Any) -> float | None:
    """Return a `trainer.max_time` in seconds; None if there is no limit.

    >>> seconds_of("01:00:00:30"), seconds_of({"hours": 1}), seconds_of("1 day, 0:00:30"), seconds_of(None)
    (86430.0, 3600.0, 86430.0, None)
    """
    if isinstance(max_time, Mapping):
        with suppress(TypeError):
            return timedelta(**max_time).total_seconds()
    parts = re.fullmatch(r"(?:(\d+)(?: days?, |:))?(\d+):(\d+):(\d+(?:\.\d+)?)", str(max_time))
    if parts is None:
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in parts.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def digest_of(config: Mapping[str, Any]) -> str:
    """Return eight characters that identify a configuration, without its seeds, paths, loggers and devices."""
    settings = experiment_settings(flatten({key: value for key, value in config.items() if key != "config"}))
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]
