"""Comparison of runs: groups that differ only in their seeds, with results and costs."""

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
    """Metric that is compared.

    Attributes:
        name: column of `metrics.csv`.
        target: value whose cost is reported, or None.
        window: length of the smoothing window in values.

    Raises:
        UserError: the target is not a possible accuracy, or the window is not allowed.
    """

    name: str = "val/accuracy"
    target: float | None = None
    window: int = WINDOW

    def __post_init__(self) -> None:
        require(
            self.target is None or "accuracy" not in self.name or 0 < self.target <= 1,
            f"target must be an accuracy in (0, 1], got {self.target}; write 60 % as 0.6.",
        )
        require(
            self.window == 1 or (self.window > ORDER and self.window % 2 == 1),
            f"window must be 1 (no smoothing) or an odd number above {ORDER}, got {self.window}.",
        )

    @property
    def short(self) -> str:
        """Name for display."""
        return self.name.removeprefix("val/").replace("/", " ")

    @property
    def falls(self) -> bool:
        """True if lower is better."""
        return any(word in self.name for word in ("loss", "error"))

    def reached(self, values: Floats) -> int | None:
        """Return the first position that reaches the target, to within rounding; None if none does."""
        assert self.target is not None
        positions = np.flatnonzero(reaches(values, self.target, self.falls))
        return int(positions[0]) if len(positions) else None

    def best(self, values: Floats) -> float:
        """Return the best value."""
        return float(values.min() if self.falls else values.max())


@dataclass(frozen=True)
class Curve:
    """Values of one metric of a run, round by round.

    Attributes:
        record: run.
        metric: metric of the values.
    """

    record: Record
    metric: Metric

    def __post_init__(self) -> None:
        columns = self.record.columns
        if self.metric.name not in columns or np.isnan(columns[self.metric.name]).all():
            require(
                not self.record.not_finite.get(self.metric.name),
                f"{self.metric.name} of the run in {self.record.folder} has no finite value; choose another with --metric.",
            )
            names = sorted(name for name in columns if name.startswith(("val/", "train/")))
            raise UserError(
                f"the run in {self.record.folder} has no {self.metric.name}: "
                f"{nearest(self.metric.name, names)}; choose one with --metric."
            )

    @cached_property
    def positions(self) -> Any:
        """Indices of the rows with an evaluation (n,)."""
        return np.flatnonzero(~np.isnan(self.record.columns[self.metric.name]))

    @cached_property
    def raw(self) -> Floats:
        """Values as logged (n,)."""
        return self.record.columns[self.metric.name][self.positions]

    @cached_property
    def smoothed(self) -> Floats:
        """Smoothed values, from which results are read (n,)."""
        return smooth(self.raw, 3 if "accuracy" in self.metric.name else None, self.metric.window)

    @property
    def is_smoothed(self) -> bool:
        """True if the smoothing window holds more than one value."""
        return fitting_window(len(self.raw), self.metric.window) > 1

    @cached_property
    def rounds(self) -> Floats:
        """Number of rounds done at each value (n,), at least 1."""
        return self.record.columns["round"][self.positions] + 1

    def axis(self, name: str) -> Floats:
        """Return the cost so far at each value (n,): `rounds`, `wall_seconds` or one of `AXES`."""
        if name == "rounds":
            return self.rounds
        spent = self.record.wall_seconds if name == "wall_seconds" else self.record.column(AXES[name])
        return spent[self.positions]

    @cached_property
    def numbers(self) -> dict[str, float | None]:
        """All numbers that the tables show of the run; None if unknown, or if the target was not reached."""
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
        """Return the cost of first reaching a target; all values are None if it was not reached."""
        position = metric.reached(self.smoothed)
        names = ("rounds", *AXES, "wall_seconds")
        return {name: None if position is None else float(self.axis(name)[position]) for name in names}


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seeds.

    Attributes:
        label: name in tables and pictures.
        curves: one curve for each run.
    """

    label: str
    curves: tuple[Curve, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of its first run; the others differ only in their seeds and in incidental flags."""
        return self.curves[0].record.settings

    @property
    def algorithm(self) -> str:
        """Name of the method."""
        return self.curves[0].record.algorithm

    def spread(self, name: str) -> tuple[float | None, float | None, int]:
        """Return mean, sample standard deviation and count of a number over the runs that have it."""
        return mean_and_spread([curve.numbers.get(name) for curve in self.curves])

    def mean_curve(self, axis: str) -> tuple[Floats, Floats, Floats]:
        """Return mean of `axis`, and mean and standard deviation of the smoothed values, at the rounds that all runs have."""
        rounds = self.curves[0].rounds
        for curve in self.curves[1:]:
            rounds = np.intersect1d(rounds, curve.rounds)
        positions = [np.isin(curve.rounds, rounds) for curve in self.curves]
        pairs = list(zip(self.curves, positions, strict=True))
        x = np.mean([curve.axis(axis)[position] for curve, position in pairs], axis=0)
        y = np.array([curve.smoothed[position] for curve, position in pairs])
        return x, y.mean(axis=0), y.std(axis=0, ddof=1) if len(y) > 1 else np.zeros(len(rounds))

    def mean_bytes(self) -> dict[str, dict[str, float]] | None:
        """Return mean bytes of the whole run by direction and kind, over the runs that recorded them; None if none did."""
        found = [curve.record.bits for curve in self.curves if curve.record.bits]
        if not found:
            return None
        return {
            direction: {kind: fmean(bits[direction].get(kind, 0) for bits in found) / 8 for kind in KINDS}
            for direction in ("up", "down")
        }


def mean_and_spread(values: Sequence[float | None]) -> tuple[float | None, float | None, int]:
    """Return mean, sample standard deviation (None for fewer than two values) and count of the values that are not None.

    >>> mean_and_spread([1.0, None, 3.0])
    (2.0, 1.4142135623730951, 2)
    """
    known = [value for value in values if value is not None]
    return fmean(known) if known else None, stdev(known) if len(known) > 1 else None, len(known)


def group_runs(records: Sequence[Record], metric: Metric) -> list[Group]:
    """Group the runs that differ only in their seeds, in the given order.

    A run without a configuration gets a group of its own, because its settings are unknown.
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
