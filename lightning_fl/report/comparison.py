"""Comparison of runs: groups that differ only in their seeds, with results and costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, reduce
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fl.checks import reaches
from lightning_fl.errors import UserError, collecting, nearest, require
from lightning_fl.outputs.clients.distribution import without_statistic
from lightning_fl.outputs.metric import (
    ACCURACY,
    AT_BEST_VALIDATION,
    falls,
    final,
    find_metric,
    is_accuracy,
    num_final,
    validated_and_tested,
)
from lightning_fl.outputs.traffic import COSTS as BYTES
from lightning_fl.report.labels import identity, labels, unknown_settings
from lightning_fl.report.records import Record
from lightning_fl.report.smoothing import DECIMALS, ORDER, WINDOW, Floats, fitting_window, smooth, suitable_window

VALUES = {
    "final": "final",
    "last": "last",
    "best": "best (smoothed)",
    "at_best_validation": AT_BEST_VALIDATION,
}
"""Headings of tables for the results of a run, by their names in `runs.csv` and in claims."""
DEVIATIONS = ("_std", "_jain", "_gini", "_gain_mean")
"""Ends of statistics over clients that may fall where their metric rises."""
ENDS = ("final", "last")
"""Results that every run has, unless it ends in values that are not finite."""


@dataclass(frozen=True)
class Metric:
    """Metric that is compared.

    Attributes:
        name: column of `metrics.csv`.
        target: value whose cost is reported, or None.
        window: length of the smoothing window in values; None: `WINDOW`, or less for a curve of fewer than twice as many values.
        mode: `max` if higher is better, `min` if lower is; None to infer it from the name.
        traffic: direction whose bytes are the cost: up, down, or total for their sum.

    Raises:
        UserError: the target is not a possible accuracy, or the window is not allowed.
    """

    name: str = ACCURACY
    target: float | None = None
    window: int | None = WINDOW
    mode: str | None = None
    traffic: str = "up"

    def __post_init__(self) -> None:
        require(
            self.target is None or "accuracy" not in self.name or 0 < self.target <= 1,
            f"target must be an accuracy in (0, 1], got {self.target}; write 60 % as 0.6.",
        )
        require(
            self.window in (None, 1) or (self.window > ORDER and self.window % 2 == 1),
            f"window must be 1 (no smoothing) or an odd number from {ORDER + 2} on, got {self.window}: the filter fits a cubic "
            f"to the window, and a cubic passes through any {ORDER + 1} values or fewer, so nothing would be smoothed.",
        )

    @property
    def short(self) -> str:
        """Name for display."""
        return self.name.removeprefix("val/").replace("/", " ")

    @property
    def bytes(self) -> str:
        """Name of the cost in bytes, of `Record.spent`."""
        return BYTES[self.traffic]

    @property
    def falls(self) -> bool:
        """True if lower is better."""
        return falls(self.name, self.mode)

    @property
    def decimals(self) -> int | None:
        """Decimals of smoothed values: three for an accuracy, or as many as the target if it has more; None for no rounding."""
        if not is_accuracy(self.name):
            return None
        exponent = Decimal(str(self.target or 0)).normalize().as_tuple().exponent
        return max(DECIMALS, -int(exponent))

    @property
    def over_clients(self) -> Metric:
        """Metric of single clients, if this one is a statistic over clients; otherwise this metric."""
        name = without_statistic(self.name)
        if name == self.name:
            return self
        is_deviation = self.name.endswith(DEVIATIONS)
        return Metric(name, mode=None if is_deviation else self.mode)

    def reached(self, values: Floats) -> int | None:
        """Return the first position that reaches the target, to within rounding; None if none does."""
        assert self.target is not None
        positions = np.flatnonzero(reaches(values, self.target, self.falls))
        return int(positions[0]) if len(positions) else None


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
                self.metric.name not in self.record.not_finite,
                f"{self.metric.name} of the run in {self.record.folder} has no finite value; choose another with --metric.",
            )
            names = [name for name, values in columns.items() if not np.isnan(values).all()]
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
        """Smoothed values (n,). Reports take the best value and the reaching of targets from them."""
        return smooth(self.raw, self.metric.decimals, self.window)

    @property
    def window(self) -> int:
        """Length of the smoothing window in values; 1: the curve is not smoothed."""
        window = self.metric.window
        return suitable_window(len(self.raw)) if window is None else fitting_window(len(self.raw), window)

    @property
    def is_smoothed(self) -> bool:
        """True if the smoothing window holds more than one value."""
        return self.window > 1

    def axis(self, name: str) -> Floats:
        """Return one of the costs in `Record.spent` at each value (n,); NaN if the run does not have this cost."""
        return self.record.spent.get(name, np.full(len(self.record.columns["round"]), np.nan))[self.positions]

    @property
    def num_final(self) -> int:
        """Number of last values that `final` averages."""
        return num_final(len(self.raw))

    @property
    def tested(self) -> str | None:
        """Name of the test value at the best validation; None if the run has not validated and tested in the same round."""
        names = validated_and_tested(self.metric.name, self.record.columns)
        both = names and np.isfinite([self.record.columns[name] for name in names]).all(axis=0).any()
        return names[1] if names and both else None

    @cached_property
    def at_best_validation(self) -> float | None:
        """Test value of the tested round with the best validation value, the first if several are; None as for `tested`."""
        names = validated_and_tested(self.metric.name, self.record.columns)
        if names is None or self.tested is None:
            return None
        validated, tested = (self.record.columns[name] for name in names)
        validated_where_tested = np.where(np.isnan(tested), np.nan, validated)
        return float(
            tested[np.nanargmin(validated_where_tested) if self.metric.falls else np.nanargmax(validated_where_tested)]
        )

    @property
    def _is_finite(self) -> NDArray[np.bool_]:
        """False where an evaluation gave a value that is not finite (evaluations,)."""
        is_finite = ~np.isnan(self.record.columns[self.metric.name])
        return is_finite[is_finite | self.record.not_finite.get(self.metric.name, False)]

    @cached_property
    def numbers(self) -> dict[str, float | None]:
        """All numbers that the tables show of the run; None if unknown, not finite, or if the target was not reached."""
        record, is_finite = self.record, self._is_finite
        # Values that are not finite are not gaps: a run that ends in them has diverged, and the value before is not its end.
        numbers = {
            "final": final(self.raw) if is_finite[-num_final(len(is_finite)) :].all() else None,
            "last": self.raw[-1] if is_finite[-1] else None,
            "best": self.smoothed.min() if self.metric.falls else self.smoothed.max(),
            "at_best_validation": self.at_best_validation,
            **{name: spent[-1] for name, spent in record.spent.items()},
            "mflops": record.column("model/macs")[-1] / 1e6,
            "parameters": record.column("model/parameters")[-1],
        }
        if self.metric.target is not None:
            numbers |= {f"target_{name}": value for name, value in self.price(self.metric).items()}
        return {name: None if value is None or np.isnan(value) else float(value) for name, value in numbers.items()}

    def price(self, metric: Metric) -> dict[str, float | None]:
        """Return the cost of first reaching a target; all values are None if it was not reached."""
        smoothed = (
            self.smoothed if metric.decimals == self.metric.decimals else smooth(self.raw, metric.decimals, self.window)
        )
        position = metric.reached(smoothed)
        return {name: None if position is None else float(self.axis(name)[position]) for name in self.record.spent}


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

    @property
    def is_bound(self) -> bool:
        """True if its runs upload nothing, like centralised training, so that they are a bound for the others."""
        return all((curve.axis("uplink") == 0).all() for curve in self.curves)

    def spread(self, name: str) -> tuple[float | None, float | None, int]:
        """Return mean, sample standard deviation and count of a number over the runs that have it.

        `final` and `last` have no mean if a run lacks them, because only diverged runs do.
        """
        values = [curve.numbers.get(name) for curve in self.curves]
        return (None, None, 0) if name in ENDS and None in values else mean_and_spread(values)

    def mean_curve(self, axis: str) -> tuple[Floats, Floats, Floats]:
        """Return mean of `axis`, and mean and standard deviation of the smoothed values, at the rounds that all runs have."""
        rounds = reduce(np.intersect1d, [curve.axis("rounds") for curve in self.curves])
        shared = [(curve, np.isin(curve.axis("rounds"), rounds)) for curve in self.curves]
        spent = np.mean([curve.axis(axis)[is_shared] for curve, is_shared in shared], axis=0)
        values = np.array([curve.smoothed[is_shared] for curve, is_shared in shared])
        return spent, values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(rounds))

    def mean_bytes(self) -> dict[tuple[str, str], float]:
        """Return mean bytes of the whole run by direction and kind, over the runs that recorded them; {} if none did."""
        recorded = [curve.record.bytes for curve in self.curves if curve.record.bytes]
        return {key: fmean(of[key] for of in recorded) for key in recorded[0]} if recorded else {}


def mean_and_spread(values: Sequence[float | None]) -> tuple[float | None, float | None, int]:
    """Return mean, sample standard deviation (None for fewer than two values) and count of the values that are not None.

    >>> mean_and_spread([1.0, None, 3.0])
    (2.0, 1.4142135623730951, 2)
    """
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None, stdev(numbers) if len(numbers) > 1 else None, len(numbers)


def common_metric(
    records: Sequence[Record], chosen: str | None, target: float | None, window: int | None, traffic: str = "up"
) -> Metric:
    """Return the metric to compare: the given one, or the runs' own metric.

    Args:
        records: runs; if a run names no metric, it is found among its columns.
        chosen: name of the metric; None for the runs' own metric.
        target: value whose cost is reported, or None.
        window: length of the smoothing window in values; None for one that suits the curves.
        traffic: direction whose bytes are the cost.

    Raises:
        UserError: no metric is given, and the runs have different ones.
    """
    metrics = [
        (record.metric["name"], record.metric["mode"])
        if record.metric
        else (find_metric(record.columns) or ACCURACY, None)
        for record in records
    ]
    names = dict(zip((name for name, _ in metrics), records, strict=True))
    run_metrics = ", ".join(f"{name} in {record.folder}" for name, record in names.items())
    require(
        chosen is not None or len(names) == 1,
        f"the runs have different metrics, {run_metrics}; name the folders of runs to compare, or choose one with --metric.",
    )
    name = chosen or metrics[0][0]
    return Metric(name, target, window, next((mode for metric, mode in metrics if metric == name), None), traffic)


def curves_with(records: Sequence[Record], metric: Metric) -> tuple[dict[Path, Curve], list[str]]:
    """Return the curves of the runs that have a metric, by folder, and the reasons why the others have none.

    Raises:
        UserError: no run has the metric.
    """
    curves: dict[Path, Curve] = {}
    problems: list[str] = []
    for record in records:
        with collecting(problems):
            curves[record.folder] = Curve(record, metric)
    require(bool(curves), "".join(problems[:1]))
    return curves, problems


def group_runs(records: Sequence[Record], metric: Metric) -> list[Group]:
    """Group the runs that differ only in their seeds, in the given order.

    A run with unknown settings gets a group of its own.
    """
    members: dict[Any, list[Record]] = {}
    for record in records:
        has_settings = "trainer.max_rounds" in record.settings and not unknown_settings(record)
        members.setdefault(identity(record) if has_settings else record.folder, []).append(record)
    groups = list(members.values())
    return [
        Group(label, tuple(Curve(record, metric) for record in group))
        for label, group in zip(labels([group[0] for group in groups]), groups, strict=True)
    ]
