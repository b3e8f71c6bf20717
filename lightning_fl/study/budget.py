"""Accuracy per byte: the accuracy of a study's cells within a budget of bytes.

    budget: [1.0e6, 1.0e8]   # least and most bytes of all clients for which cells are compared, in the direction of `traffic`
    budget: {up: [1.0e6, 1.0e8], total: [2.0e6, 3.0e8]}   # or a range for each of several directions
    chance: 0.1              # accuracy of a guess, which counts before the first evaluation; 0 if not given

a*(B) is the best value of the smoothed curve up to the last evaluation after which at most B bytes had been sent. It is a step
function, constant after the last round. The area is ∫ a*(B) d log B / log(high / low), the mean accuracy over all budgets on a
logarithmic scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean, median
from typing import Any

import numpy as np

from lightning_fl.checks import as_number, check_choice, is_real
from lightning_fl.errors import require
from lightning_fl.outputs.metric import spend
from lightning_fl.outputs.traffic import COSTS, in_words
from lightning_fl.outputs.units import BYTES, common_unit, in_bytes, significant
from lightning_fl.report.comparison import Curve, Metric, mean_and_spread
from lightning_fl.report.document import Table
from lightning_fl.study.statistics import LEVEL, noise_of, student_interval, student_p

NUM_RESAMPLES = 2000
LEGEND = (
    "`within budget` is the best accuracy (smoothed) within the budget, chosen on the values that it reports. `area` is its mean "
    "over all budgets in the range, on a logarithmic scale; `*`: some runs end before the budget is spent, and keep their best "
    "value. `difference` is the area less the area of the first row, paired by seed, with its 95 % interval (Student's t); an "
    "area is larger or smaller if p < 0.05 after Holm's correction for all rows. `front` is the share of {resamples} resamples "
    "of the seeds in which no other row has more accuracy for as many bytes or fewer. If only some runs reach the target, its "
    "bytes are a median, or a lower bound (>)."
)


@dataclass(frozen=True)
class Efficiency:
    """Accuracy of a run within a budget.

    Attributes:
        best: a*(high); the accuracy of a guess if nothing was evaluated within the budget.
        spent: bytes at the last evaluation within the budget.
        area: mean of a* on the logarithmic scale.
        is_whole: True if the run spends the budget.
        sent: bytes of the whole run.
        target: bytes until the target is reached; infinite if it is not, None without a target.
    """

    best: float
    spent: float
    area: float
    is_whole: bool
    sent: float
    target: float | None


@dataclass(frozen=True)
class Budget:
    """Range of bytes within which runs are compared.

    Attributes:
        low: bytes from which the area counts.
        high: bytes that may be spent.
        chance: accuracy before the first evaluation.
        traffic: direction whose bytes count: up, down, or total for their sum.
    """

    low: float
    high: float
    chance: float = 0.0
    traffic: str = "up"

    @property
    def range(self) -> str:
        """Range in words."""
        return f"{in_bytes(self.low)} to {in_bytes(self.high)} of {in_words(self.traffic)}"

    def check(self, metric: Metric) -> None:
        """Raise `UserError` if lower values of the metric are better, because the area is only defined for higher ones."""
        require(
            not metric.falls,
            f"a budget compares the best accuracy, and lower is better for {metric.name}: give another metric.",
        )

    def measure(self, curve: Curve) -> Efficiency:
        """Return the accuracy of a run within the budget.

        Raises:
            UserError: lower values of the metric are better, or the run counts no bytes in this direction.
        """
        self.check(curve.metric)
        cost = COSTS[self.traffic]
        sent, whole = curve.axis(cost), float(curve.record.spent[cost][-1])
        require(not np.isnan(whole), f"the run in {curve.record.folder} counts no {in_words(self.traffic)}.")
        spending = spend(sent, curve.smoothed, self.low, self.high, self.chance)
        target = None
        if curve.metric.target is not None:
            price = curve.price(curve.metric)[cost]
            target = inf if price is None else price
        return Efficiency(
            best=spending.best,
            spent=spending.spent,
            area=spending.area,
            is_whole=whole >= self.high,
            sent=whole,
            target=target,
        )


def read_budgets(content: Mapping[str, Any], traffic: str = "up") -> tuple[Budget, ...]:
    """Return the budgets of a study file.

    Args:
        content: content of the file.
        traffic: direction of a range that names none.

    Raises:
        UserError: a budget is not a range of bytes, a direction is unknown, or `chance` is not a share.
    """
    if "budget" not in content:
        require("chance" not in content, "chance belongs to a budget: also give budget.")
        return ()
    given, chance = content["budget"], as_number(content.get("chance", 0.0))
    ranges = given if isinstance(given, dict) and given else {traffic: given}
    for way in ranges:
        check_choice("the direction of a budget", way, tuple(COSTS))
    require(is_real(chance) and 0 <= chance < 1, f"chance must be an accuracy in [0, 1), got {chance!r}.")
    return tuple(_budget(ends, float(chance), way) for way, ends in ranges.items())


def _budget(ends_given: Any, chance: float, traffic: str) -> Budget:
    """Return a budget of a study file."""
    ends = [as_number(end) for end in ends_given] if isinstance(ends_given, list) else []
    is_range = len(ends) == 2 and all(map(is_real, ends)) and 0 < ends[0] < ends[1] < inf
    require(
        is_range,
        f"budget must be two numbers of bytes, the lower first, such as [1.0e6, 1.0e8], got {ends_given!r}.",
    )
    return Budget(float(ends[0]), float(ends[1]), chance, traffic)


Found = Mapping[str, Mapping[int, Efficiency]]
"""Accuracy of the runs within a budget, by cell and seed; the others are compared with the first cell."""


def efficiency_table(cells: Found, budget: Budget) -> Table:
    """Return a row for each cell."""
    baseline = next(iter(cells))
    noise = noise_of(*(run.area for runs in cells.values() for run in runs.values()))
    adjusted = holm(
        {name: student_p(_differences(cells, name, baseline), 0.0, noise) for name in cells if name != baseline}
    )
    fronts = front_shares(cells)
    has_target = any(run.target is not None for runs in cells.values() for run in runs.values())
    costs = {name: bytes_to_target([*runs.values()]) for name, runs in cells.items()} if has_target else {}
    unit = common_unit((cost.bytes for cost in costs.values()), BYTES)
    rows = []
    for name, runs in cells.items():
        differences = _differences(cells, name, baseline) if name != baseline else []
        target = [costs[name].shown(BYTES[unit])] if has_target else []
        star = "*" * (not all(run.is_whole for run in runs.values()))
        rows.append(
            [
                name,
                _outcome(differences, adjusted.get(name)) if differences else "",
                *target,
                _spread([run.best for run in runs.values()]) + star,
                _spread([run.area for run in runs.values()]),
                _difference(differences),
                "" if fronts is None else f"{100 * fronts[name]:.0f} %",
                str(len(runs)),
            ]
        )
    target = [f"{in_words(budget.traffic)} to target ({unit})"] * has_target
    header = ["cell", f"area against {baseline}", *target, "within budget", "area", "difference", "front", "seeds"]
    return Table(header, rows, num_texts=2)


@dataclass(frozen=True)
class BytesToTarget:
    """Bytes until the target of some runs.

    Attributes:
        bytes: mean over the runs if all reach the target, otherwise the median; a lower bound of the median if too few runs reach
            it: the median if the others reached it with their last byte.
        reached: number of runs that reach it.
        count: number of runs.
        is_least: True if `bytes` is a lower bound.
    """

    bytes: float
    reached: int
    count: int
    is_least: bool = False

    def shown(self, unit: float) -> str:
        """Return the bytes in a unit, and the number of runs that reach the target unless all do."""
        of = f" ({self.reached} of {self.count})" * (self.reached < self.count)
        return f"{'> ' * self.is_least}{significant(self.bytes / unit)}{of}"


def bytes_to_target(runs: Sequence[Efficiency]) -> BytesToTarget:
    """Return the bytes of some runs until the target."""
    targets = [inf if run.target is None else run.target for run in runs]
    reached = sum(target < inf for target in targets)
    if reached == len(targets):
        return BytesToTarget(fmean(targets), reached, len(targets))
    middle = median(targets)
    least = median(run.sent if target == inf else target for run, target in zip(runs, targets, strict=True))
    return BytesToTarget(middle if middle < inf else least, reached, len(targets), is_least=middle == inf)


def on_front(spent: Any, reached: Any) -> Any:
    """Return True for each point (n,) on the front: no other point has as much for as little, and more or for less.

    >>> on_front([1.0, 2.0, 2.0, 3.0], [0.5, 0.8, 0.7, 0.8]).tolist()
    [True, True, False, False]
    """
    spent, reached = np.asarray(spent), np.asarray(reached)
    no_worse = (spent[:, None] <= spent) & (reached[:, None] >= reached)  # of i (row) than j (column)
    return ~(no_worse & ~no_worse.T).any(axis=0)


def front_shares(cells: Found) -> dict[str, float] | None:
    """Return the share of resamples of the seeds in which each cell is on the front; None for fewer than three common seeds."""
    seeds = sorted(set.intersection(*(set(runs) for runs in cells.values())))
    if len(seeds) < 3:
        return None
    points = np.array([[[runs[seed].spent, runs[seed].best] for seed in seeds] for runs in cells.values()])
    draws = np.random.default_rng(0).integers(len(seeds), size=(NUM_RESAMPLES, len(seeds)))
    means = points[:, draws].mean(axis=2)  # (cells, resamples, 2)
    counts = sum(on_front(means[:, draw, 0], means[:, draw, 1]).astype(int) for draw in range(NUM_RESAMPLES))
    return dict(zip(cells, (counts / NUM_RESAMPLES).tolist(), strict=True))


def holm(values: Mapping[str, float]) -> dict[str, float]:
    """Return the p-values after Holm's correction for their number.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    adjusted, most = {}, 0.0
    for position, (name, value) in enumerate(sorted(values.items(), key=lambda entry: entry[1])):
        most = max(most, min(1.0, (len(values) - position) * value))
        adjusted[name] = most
    return adjusted


def _differences(cells: Found, name: str, baseline: str) -> list[float]:
    """Return the differences of the areas, seed by seed."""
    seeds = sorted(cells[name].keys() & cells[baseline].keys())
    return [cells[name][seed].area - cells[baseline][seed].area for seed in seeds]


def _outcome(differences: Sequence[float], adjusted: float | None) -> str:
    """Return whether an area is larger or smaller than the first one."""
    if adjusted is None or adjusted >= LEVEL:
        return "undecided"
    return "larger" if fmean(differences) > 0 else "smaller"


def _difference(differences: Sequence[float]) -> str:
    if len(differences) < 2:
        return f"{differences[0]:+.3f}" if differences else ""
    low, high = student_interval(differences)
    return f"{fmean(differences):+.3f} ({low:+.3f} to {high:+.3f})"


def _spread(values: Sequence[float]) -> str:
    mean, deviation, _ = mean_and_spread(values)
    return f"{mean:.3f}" if deviation is None else f"{mean:.3f} ± {deviation:.3f}"
