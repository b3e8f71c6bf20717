"""Runs side by side: which are the same but for their seeds, what each has reached, and what that cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

import numpy as np

from lightning_fl.checks import reaches
from lightning_fl.errors import UserError, nearest, require
from lightning_fl.outputs.units import KINDS
from lightning_fl.report.labels import identity, labels
from lightning_fl.report.records import Record
from lightning_fl.report.smoothing import ORDER, WINDOW, Floats, fitting_window, smooth

AXES = {
    "uplink": "comm/total_uplink_bytes",
    "downlink": "comm/total_downlink_bytes",
    "simulated_seconds": "time/simulated_seconds",
}


@dataclass(frozen=True)
class Metric:
    """What is compared.

    Attributes:
        name: the column of `metrics.csv`.
        target: the value whose price is asked for, if any.
        window: values that smoothing reaches over.

    Raises:
        UserError: a target that no accuracy can have, or a window that no filter has.
    """

    name: str = "val/accuracy"
    target: float | None = None
    window: int = WINDOW

    def __post_init__(self) -> None:
        require(
            self.target is None or "accuracy" not in self.name or 0 < self.target <= 1,
            f"target is an accuracy in (0, 1], got {self.target}; 60 % is written 0.6.",
        )
        require(
            self.window == 1 or (self.window > ORDER and self.window % 2 == 1),
            f"window must be 1, for no smoothing, or an odd number above {ORDER}, got {self.window}.",
        )

    @property
    def short(self) -> str:
        """Its name for people."""
        return self.name.removeprefix("val/").replace("/", " ")

    @property
    def falls(self) -> bool:
        """Whether less is better."""
        return any(word in self.name for word in ("loss", "error"))

    def reached(self, values: Floats) -> int | None:
        """The first place at which the target is reached, to within rounding; None if it is not."""
        assert self.target is not None
        positions = np.flatnonzero(reaches(values, self.target, self.falls))
        return int(positions[0]) if len(positions) else None

    def best(self, values: Floats) -> float:
        """The best of some values."""
        return float(values.min() if self.falls else values.max())


@dataclass(frozen=True)
class Curve:
    """What a run has reached, round by round.

    Attributes:
        record: the run.
        metric: what was evaluated.
    """

    record: Record
    metric: Metric

    def __post_init__(self) -> None:
        columns = self.record.columns
        if self.metric.name not in columns or np.isnan(columns[self.metric.name]).all():
            require(
                not self.record.not_finite.get(self.metric.name),
                f"{self.metric.name} of the run in {self.record.folder} is nowhere finite; --metric names another column.",
            )
            names = sorted(name for name in columns if name.startswith(("val/", "train/")))
            raise UserError(
                f"the run in {self.record.folder} has no {self.metric.name}: "
                f"{nearest(self.metric.name, names)}; --metric says which."
            )

    @cached_property
    def positions(self) -> Any:
        """The rows with an evaluation (n,)."""
        return np.flatnonzero(~np.isnan(self.record.columns[self.metric.name]))

    @cached_property
    def raw(self) -> Floats:
        """The values as they were logged (n,)."""
        return self.record.columns[self.metric.name][self.positions]

    @cached_property
    def smoothed(self) -> Floats:
        """The curve that results are read off (n,)."""
        return smooth(self.raw, 3 if "accuracy" in self.metric.name else None, self.metric.window)

    @property
    def is_smoothed(self) -> bool:
        """Whether smoothing reaches over more than one value."""
        return fitting_window(len(self.raw), self.metric.window) > 1

    @cached_property
    def rounds(self) -> Floats:
        """Rounds done at each value (n,), the first is 1."""
        return self.record.columns["round"][self.positions] + 1

    def axis(self, name: str) -> Floats:
        """What had been spent at each value (n,): `rounds`, `wall_seconds` or one of `AXES`."""
        if name == "rounds":
            return self.rounds
        spent = self.record.wall_seconds if name == "wall_seconds" else self.record.column(AXES[name])
        return spent[self.positions]

    @cached_property
    def numbers(self) -> dict[str, float | None]:
        """Everything that the tables say of the run; None is unknown, or a target that was not reached."""
        record = self.record
        found = {
            "final": self.metric.best(self.smoothed),
            "last": self.raw[-1],
            "rounds": record.num_rounds,
            **{name: record.column(column)[-1] for name, column in AXES.items()},
            "wall_seconds": record.wall_seconds[-1],
            "mflops": record.column("model/macs")[-1] / 1e6,
            "parameters": record.column("model/parameters")[-1],
        }
        if self.metric.target is not None:
            found |= {f"target_{name}": value for name, value in self.price(self.metric).items()}
        return {name: None if value is None or np.isnan(value) else float(value) for name, value in found.items()}

    def price(self, metric: Metric) -> dict[str, float | None]:
        """What had been spent when a target was first reached; None everywhere if it was not."""
        position = metric.reached(self.smoothed)
        names = ("rounds", *AXES, "wall_seconds")
        return {name: None if position is None else float(self.axis(name)[position]) for name in names}


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seeds.

    Attributes:
        label: its name in tables and pictures.
        curves: one for each run.
    """

    label: str
    curves: tuple[Curve, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """What its runs have in common."""
        return self.curves[0].record.settings

    @property
    def algorithm(self) -> str:
        """The method."""
        return self.curves[0].record.algorithm

    def spread(self, name: str) -> tuple[float | None, float | None, int]:
        """Mean and sample standard deviation of a number over the runs that have it, and how many these are."""
        return mean_and_spread([curve.numbers.get(name) for curve in self.curves])

    def mean_curve(self, axis: str) -> tuple[Floats, Floats, Floats]:
        """The curve over the rounds that all runs have: mean of `axis`, mean and standard deviation of the smoothed values."""
        rounds = self.curves[0].rounds
        for curve in self.curves[1:]:
            rounds = np.intersect1d(rounds, curve.rounds)
        positions = [np.isin(curve.rounds, rounds) for curve in self.curves]
        pairs = list(zip(self.curves, positions, strict=True))
        x = np.mean([curve.axis(axis)[position] for curve, position in pairs], axis=0)
        y = np.array([curve.smoothed[position] for curve, position in pairs])
        return x, y.mean(axis=0), y.std(axis=0, ddof=1) if len(y) > 1 else np.zeros(len(rounds))

    def mean_bytes(self) -> dict[str, dict[str, float]] | None:
        """Bytes of the whole run by direction and kind, over the runs whose checkpoints know; None if none does."""
        found = [curve.record.bits for curve in self.curves if curve.record.bits]
        if not found:
            return None
        return {
            way: {kind: fmean(bits[way].get(kind, 0) for bits in found) / 8 for kind in KINDS} for way in ("up", "down")
        }


def mean_and_spread(values: Sequence[float | None]) -> tuple[float | None, float | None, int]:
    """Mean, sample standard deviation (None of one value) and number of the values that are there.

    >>> mean_and_spread([1.0, None, 3.0])
    (2.0, 1.4142135623730951, 2)
    """
    known = [value for value in values if value is not None]
    return fmean(known) if known else None, stdev(known) if len(known) > 1 else None, len(known)


def group_runs(records: Sequence[Record], metric: Metric) -> list[Group]:
    """Put the runs that differ in nothing but their seeds together, in the order in which they were given.

    A run without a configuration stands alone: nothing says what it has in common with another.
    """
    members: dict[Any, list[Record]] = {}
    for record in records:
        known = "trainer.max_rounds" in record.settings
        members.setdefault(identity(record) if known else record.folder, []).append(record)
    groups = list(members.values())
    return [
        Group(label, tuple(Curve(record, metric) for record in group))
        for label, group in zip(labels([group[0] for group in groups]), groups, strict=True)
    ]
