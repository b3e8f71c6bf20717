"""Pictures of a report: accuracy against bytes, rounds and simulated time, and bytes by kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from lightning_fl.outputs.figures import COLOURS, STYLE, line_style
from lightning_fl.outputs.units import KINDS, SECONDS, unit_of
from lightning_fl.report.comparison import Group, Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AXES = {
    "uplink": "uplink of all clients",
    "rounds": "rounds",
    "simulated_seconds": "simulated time",
}
HOUR, DAY = 3600, 86400
BEHIND = 1.5  # z-order behind all curves, including those of groups drawn earlier


def draw_curves(groups: Sequence[Group], metric: Metric, axis: str) -> Figure | None:
    """Draw the smoothed curves over `uplink` (bytes, logarithmic), `rounds` or `simulated_seconds`.

    Several seeds are drawn as their mean with a band of one standard deviation. Return None if no run has that axis.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        axes = figure.subplots()
        drawn = [_draw_group(axes, group, axis, index) for index, group in enumerate(groups)]
        if not any(drawn):
            return None
        is_smoothed = any(curve.is_smoothed for group in groups for curve in group.curves)
        axes.set_ylabel(metric.short + " (smoothed)" * is_smoothed)
        _scale(axes, axis)
        if metric.target is not None:
            axes.axhline(metric.target, color="0.4", linewidth=1, linestyle=":", label=f"target {metric.target:g}")
        # Outside the axes the legend cannot cover a curve.
        figure.legend(loc="outside lower center", ncols=_legend_columns(groups), frameon=False)
    return figure


def _draw_group(axes: Axes, group: Group, axis: str, index: int) -> bool:
    x, mean, spread = group.mean_curve(axis)
    known = ~np.isnan(x) & (x > 0)
    if not known.any():
        return False
    x, mean, spread = x[known], mean[known], spread[known]
    number = f" ({len(group.curves)} seeds)" if len(group.curves) > 1 else ""
    for curve in group.curves:
        if curve.is_smoothed or len(group.curves) > 1:
            raw = {"color": line_style(index)["color"], "linewidth": 0.9, "alpha": 0.4, "zorder": BEHIND}
            axes.plot(curve.axis(axis), curve.raw, **raw)
    axes.plot(x, mean, label=group.label + number, linewidth=1.8, marker="o" * (len(x) == 1), **line_style(index))
    if spread.any():
        axes.fill_between(
            x, mean - spread, mean + spread, color=line_style(index)["color"], alpha=0.18, linewidth=0, zorder=BEHIND
        )
    return True


def _scale(axes: Axes, axis: str) -> None:
    """Set the unit and readable ticks of the horizontal axis."""
    label = AXES[axis]
    if axis == "uplink":
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        subs = (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)
        axes.xaxis.set_major_locator(LogLocator(subs=subs))
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        label += " (logarithmic)"
    elif axis == "simulated_seconds":
        longest = axes.get_xlim()[1]
        name = unit_of(longest, SECONDS) if longest < 2 * HOUR else "h" if longest < 4 * DAY else "days"
        unit = SECONDS.get(name) or {"h": HOUR, "days": DAY}[name]
        axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds / unit:,.4g}")
        label += f" ({name})"
        if unit > 1:
            axes.xaxis.set_major_locator(matplotlib.ticker.MultipleLocator(_step(longest / unit) * unit))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(label)


def _step(longest: float) -> float:
    """Return a round number that fits five to twelve times into `longest`.

    >>> _step(33), _step(8)
    (5.0, 1.0)
    """
    magnitude = 10 ** np.floor(np.log10(longest / 5))
    return float(max(step for step in (1, 2, 5) if step * magnitude <= longest / 5) * magnitude)


def _legend_columns(groups: Sequence[Group]) -> int:
    longest = max(len(group.label) for group in groups) + 12
    return max(1, min(4, 90 // longest))


def draw_bits(groups: Sequence[Group]) -> Figure | None:
    """Draw the mean bytes by direction and kind, over the runs that recorded them; None if none did."""
    known = [(group, bits) for group in groups if (bits := group.mean_bytes())]
    if not known:
        return None
    kinds = [kind for kind in KINDS if any(bits[d][kind] for _, bits in known for d in ("up", "down"))]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 1.7 + 0.32 * len(known)), layout="constrained")
        both = figure.subplots(1, 2, sharex=True, sharey=True)  # same scale in both directions
        for axes, direction in zip(both, ("up", "down"), strict=True):
            left = np.zeros(len(known))
            for kind, colour in zip(kinds, COLOURS, strict=False):
                width = np.array([bits[direction][kind] for _, bits in known])
                axes.barh(range(len(known)), width, left=left, height=0.7, color=colour, label=kind)
                left += width
            axes.set_title(f"{direction}link", fontsize="medium")
            axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.grid(visible=False, axis="y")
        both[0].set_yticks(range(len(known)), [group.label for group, _ in known])
        both[0].invert_yaxis()
        handles, labels = both[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(kinds), frameon=False)
    return figure
