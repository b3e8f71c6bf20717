"""JSON content of a report: all numbers of each run, and their means over the runs of a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_fl.report.comparison import Group, Metric
from lightning_fl.report.labels import SEEDS


def content_of(groups: Sequence[Group], metric: Metric) -> dict[str, Any]:
    """Return metric, direction of the bytes, and the lines of a report."""
    return {
        "metric": metric.name,
        "lower_is_better": metric.falls,
        "target": metric.target,
        "traffic": metric.traffic,
        "lines": [_line(group) for group in groups],
    }


def _line(group: Group) -> dict[str, Any]:
    """Return a line with its runs."""
    names = dict.fromkeys(name for curve in group.curves for name in curve.numbers)
    means = {name: dict(zip(("mean", "deviation", "count"), group.spread(name), strict=True)) for name in names}
    runs = [
        {
            "folder": str(curve.record.folder),
            "seeds": {seed: curve.record.settings.get(seed) for seed in SEEDS},
            "numbers": curve.numbers,
        }
        for curve in group.curves
    ]
    return {"name": group.label, "algorithm": group.algorithm, "means": means, "runs": runs}
