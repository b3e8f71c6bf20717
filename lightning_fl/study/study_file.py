"""Study files: a grid of choices and seeds, and the runs that it stands for.

base: [configs/quickstart.yaml]           # files and flags of every run
seeds: [0, 1, 2]
grid:                                     # a product of axes; a choice is files and flags under a name
  method: {FedAvg: [], FedProx: [--algorithm=FedProx, --algorithm.mu=0.1]}
  work: {short: [--trainer.local_epochs=1], long: [--trainer.local_epochs=5]}
exclude: [{method: FedProx, work: short}] # combinations to leave out
target: 0.9                               # also report the cost of reaching it
metric: val/accuracy                      # by default the one that the runs are about
window: 5                                 # smoothing window of the report
budget: [1.0e6, 1.0e8]                    # compare within these uplink bytes, see `lightning_fl.study.budget`
claims:                                   # see `lightning_fl.study.claims`
  - {text: FedProx sends less, better: FedProx, than: FedAvg, in: target_uplink, paper: 0.8}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from lightning_fl.errors import UserError, nearest, require
from lightning_fl.report.labels import what_is_done
from lightning_fl.report.records import flatten
from lightning_fl.study.budget import Budget, read_budget
from lightning_fl.study.claims import Claim, read_claims

KEYS = ("base", "seeds", "grid", "exclude", "target", "metric", "window", "budget", "chance", "claims")
NEEDED = ("seeds", "grid")
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
        folder: its folder, which contains a digest of its configuration: another configuration is another run.
        arguments: arguments of its fit, without the folder.
        num_rounds: rounds that it has.
    """

    cell: str
    seed: int
    folder: Path
    arguments: tuple[str, ...]
    num_rounds: int


@dataclass(frozen=True)
class StudyFile:
    """Content of a study file.

    Attributes:
        cells: combinations of choices that are not excluded.
        seeds: seeds of each cell.
        report_flags: flags of the report.
        claims: claims of a paper to be judged.
        budget: uplink bytes within which the cells are compared; None for no such comparison.
    """

    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    report_flags: tuple[str, ...]
    claims: tuple[Claim, ...]
    budget: Budget | None = None

    def runs(self, out: Path, resolve: Resolve) -> list[PlannedRun]:
        """Return all runs, seed by seed, so that a study that is stopped has whole comparisons.

        Args:
            out: folder of the study.
            resolve: function that checks arguments and returns the configuration.

        Raises:
            UserError: some cells do not fit, or two are the same; the message names them.
        """
        resolved, misfits = {}, dict[str, list[str]]()
        for cell in self.cells:  # the digest and the rounds are the same for all seeds
            try:
                config = resolve((*cell.arguments, *_seeded(self.seeds[0])))
            except UserError as error:
                misfits.setdefault(str(error).rstrip("."), []).append(cell.name)
                continue
            resolved[cell.name] = _digest(config), int(config["trainer"]["max_rounds"])
        same: dict[str, list[str]] = {}
        for name, (digest, _) in resolved.items():
            same.setdefault(digest, []).append(name)
        for names in same.values():
            require(
                len(names) == 1, f"{' and '.join(names)} have the same settings, apart from where and how they run."
            )
        require(not misfits, "; ".join(f"{', '.join(names)}: {why}" for why, names in misfits.items()) + ".")
        return [
            PlannedRun(
                cell.name,
                seed,
                out / cell.name / f"seed-{seed}-{resolved[cell.name][0]}",
                (*cell.arguments, *_seeded(seed)),
                resolved[cell.name][1],
            )
            for seed, cell in product(self.seeds, self.cells)
        ]


def read_study(path: Path) -> StudyFile:
    """Read a study file.

    Raises:
        UserError: there is no such file, or its content is not a study.
    """
    require(path.is_file(), f"there is no study file {path}.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    require(isinstance(content, dict), f"{path} must contain the keys of a study: {', '.join(KEYS)}.")
    for key in content:
        require(key in KEYS, f"{path} has the key {key!r}; {nearest(str(key), KEYS)}.")
    for key in NEEDED:
        require(bool(content.get(key)), f"{path} needs the key {key!r}.")
    seeds = content["seeds"]
    is_seeds = isinstance(seeds, list) and all(isinstance(seed, int) and not isinstance(seed, bool) for seed in seeds)
    require(is_seeds and len(set(seeds)) == len(seeds), f"seeds must be different whole numbers, got {seeds!r}.")
    base = _words(content.get("base", []), "base")
    cells = tuple(_cells(base, _grid(content["grid"]), content.get("exclude", [])))
    require(bool(cells), f"{path} excludes every combination of its grid.")
    names = [cell.name for cell in cells]
    flags = tuple(f"--{key}={content[key]}" for key in ("target", "metric", "window") if key in content)
    claims = read_claims(content.get("claims", []), names, has_target="target" in content)
    return StudyFile(cells, tuple(seeds), flags, claims, read_budget(content))


def _grid(given: Any) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the choices of each axis by name."""
    grid: dict[str, dict[str, tuple[str, ...]]] = {}
    require(isinstance(given, dict), f"grid must name axes, each with its choices, got {given!r}.")
    for axis, choices in given.items():
        require(
            isinstance(choices, dict) and bool(choices),
            f"the axis {axis!r} must name its choices, each a list of files and flags, got {choices!r}.",
        )
        grid[axis] = {str(name): _words(words, f"the choice {name!r} of {axis!r}") for name, words in choices.items()}
        for name in grid[axis]:
            is_name = bool(name) and not set(name) & set("/\\ \t") and not name.startswith(".")
            require(is_name, f"a choice names a folder, so it has no spaces or slashes; got {name!r}.")
    return grid


def _words(given: Any, what: str) -> tuple[str, ...]:
    """Return files as `--config` flags, and flags as they are, `--flag value` as `--flag=value`."""
    require(
        isinstance(given, list) and all(isinstance(word, str) for word in given),
        f"{what} must be a list of files and flags, got {given!r}.",
    )
    return tuple(BLANK.sub(r"\1=", word) if word.startswith("-") else f"--config={word}" for word in given)


def _cells(base: tuple[str, ...], grid: Mapping[str, Mapping[str, tuple[str, ...]]], exclude: Any) -> Iterator[Cell]:
    """Generate the combinations that are not excluded."""
    require(isinstance(exclude, list), f"exclude must be a list of combinations, got {exclude!r}.")
    for combination in exclude:
        require(isinstance(combination, dict), f"a combination to exclude names choices by axis, got {combination!r}.")
        for axis, name in combination.items():
            require(axis in grid, f"exclude names the axis {axis!r}; {nearest(str(axis), grid)}.")
            require(str(name) in grid[axis], f"exclude names the choice {name!r}; {nearest(str(name), grid[axis])}.")
    for names in product(*grid.values()):
        chosen = dict(zip(grid, names, strict=True))
        if any(all(chosen[axis] == str(name) for axis, name in left_out.items()) for left_out in exclude):
            continue
        words = [word for axis, name in chosen.items() for word in grid[axis][name]]
        yield Cell("-".join(names), (*base, *words), names)


def _seeded(seed: int) -> tuple[str, str]:
    """Return the flags of a seed, which decides the partition too."""
    return f"--seed_everything={seed}", f"--data.seed={seed}"


def _digest(config: Mapping[str, Any]) -> str:
    """Return eight characters for what a configuration does, whatever its seeds, paths, loggers and devices."""
    kept = what_is_done(flatten({key: value for key, value in config.items() if key != "config"}))
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:8]
