"""Pictures of a report: accuracy against bytes, rounds, simulated time and energy, and bytes by kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import (
    EngFormatter,
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from lightning_fl.outputs.figures import COLOURS, Look, in_picture, line_style
from lightning_fl.outputs.metric import is_accuracy
from lightning_fl.outputs.neighbours import KINDS_OF_EPSILON
from lightning_fl.outputs.units import SECONDS, unit_of
from lightning_fl.report.comparison import Group, Metric
from lightning_fl.report.layout import add_legend, beside_axis
from lightning_fl.report.smoothing import Floats
from lightning_fl.vectors.kinds import KINDS

BYTES = {
    "uplink": "uplink of all clients",
    "downlink": "downlink of all clients",
    "total_traffic": "total traffic of all clients, uplink + downlink",
}
"""Horizontal axes in bytes; a picture has the axis of the metric's direction."""
AXES = {
    **BYTES,
    "rounds": "rounds",
    "simulated_seconds": "simulated time",
    "joules": "estimated energy",
    **{name: f"ε, the privacy loss ({neighbours})" for name, neighbours in KINDS_OF_EPSILON.items()},
}
PANELS = ("rounds", *BYTES, "simulated_seconds", "joules")
"""Horizontal axes of a picture with panels, from left to right; the picture has one of the axes in bytes."""
TIMES = {**SECONDS, "h": 3600.0, "days": 86400.0}
FEW_DECADES, MANY_DECADES = 0.8, 2.7
"""Range of a logarithmic axis, in powers of ten, below which it has the ticks of a linear axis, and above which it has ticks
only at powers of ten."""
FEW_TICKS = ((1.0,), (3.0,), (1.0, 3.0))
"""Multiples of powers of ten that are the ticks of a logarithmic axis with few; the first ones of which two lie on the axis."""
ALL_TICKS = (1.0, 2.0, 5.0)
BOUND: dict[str, Any] = {"linestyle": (0, (6, 2))}
"""Style of the lines of runs that upload nothing."""
BEHIND = 1.5  # z-order behind all curves, including curves of groups drawn earlier


def is_logarithmic(look: Look, axis: str) -> bool:
    """True if the horizontal axis is logarithmic; by default only axes in bytes are."""
    return axis in BYTES if look.xscale is None else look.xscale == "log"


def draw_curves(groups: Sequence[Group], metric: Metric, axis: str, look: Look = Look()) -> Figure | None:  # noqa: B008
    """Draw the smoothed curves over `uplink`, `downlink`, `total_traffic`, `rounds`, `simulated_seconds`, `joules`, or an ε.

    Several seeds are drawn as their mean with a band of one standard deviation. Return None if no run has that axis.
    """
    if not _has_axis(groups, axis):
        return None
    with matplotlib.rc_context(look.style):
        figure = Figure(figsize=look.size, layout="constrained")
        axes = figure.subplots()
        _draw_axes(axes, groups, metric, axis, look)
        axes.set_ylabel(_ylabel(groups, metric, look))
        add_legend(figure, look)
    return figure


def draw_panels(groups: Sequence[Group], metric: Metric, look: Look) -> Figure | None:
    """Draw the smoothed curves in one figure, side by side over rounds, bytes, simulated time and energy.

    An axis that no run has is left out; None if no run has any.
    """
    axes_with_values = panels_of(groups, metric)
    if not axes_with_values:
        return None
    panel_look = replace(look, size=(max(1.0, look.size[0] / len(axes_with_values)), look.size[1]))
    with matplotlib.rc_context(look.style):
        figure = Figure(figsize=look.size, layout="constrained")
        panels = np.atleast_1d(figure.subplots(1, len(axes_with_values), sharey=True))
        for axes, axis in zip(panels, axes_with_values, strict=True):
            _draw_axes(axes, groups, metric, axis, panel_look)
        panels[0].set_ylabel(_ylabel(groups, metric, look))
        add_legend(figure, look)
    return figure


def panels_of(groups: Sequence[Group], metric: Metric) -> list[str]:
    """Return the horizontal axes that some run has, from left to right in a picture with panels."""
    return [axis for axis in axes_of(metric, PANELS) if _has_axis(groups, axis)]


def axes_of(metric: Metric, axes: Iterable[str] = AXES) -> list[str]:
    """Return the horizontal axes, without the axes of bytes in other directions than the metric's."""
    return [axis for axis in axes if axis not in BYTES or axis == metric.bytes]


def _has_axis(groups: Sequence[Group], axis: str) -> bool:
    """True if a run has values above 0 on a horizontal axis."""
    return any((curve.axis(axis) > 0).any() for group in groups for curve in group.curves)


def _draw_axes(axes: Axes, groups: Sequence[Group], metric: Metric, axis: str, look: Look) -> None:
    """Draw the curves of all groups and the target over one horizontal axis. Gaps in a line show an equal line behind it."""
    curves = [group for group in groups if not is_line(group, groups, axis)]
    spent = np.concatenate([curve.axis(axis) for group in curves for curve in group.curves])
    unit = scale_axis(axes, axis, spent[spent > 0], look)
    values = np.concatenate([curve.raw for group in groups for curve in group.curves])
    if look.yscale == "log" and (values > 0).any():
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis, values, few=_decades(values) > MANY_DECADES)
    drawn: list[bytes] = []
    for index, group in enumerate(groups):
        if group.curves:  # the others keep their colours
            gaps = gaps_over(b"".join(values.tobytes() for values in group.mean_curve(axis)), drawn)
            draw_group(axes, group, axis, unit, line_style(index) | gaps, as_line=group not in curves)
    if metric.target is not None:
        axes.axhline(metric.target, color="0.4", linewidth=1, linestyle=":", label=f"target {metric.target:g}")


def gaps_over(line: bytes, drawn: list[bytes]) -> dict[str, Any]:
    """Return the style of a line that shows equal lines behind it, and note that it is drawn."""
    drawn.append(line)
    return {"linestyle": (0, (4, 4 * (drawn.count(line) - 1)))} if drawn.count(line) > 1 else {}


def is_line(group: Group, groups: Sequence[Group], axis: str) -> bool:
    """True if a group is drawn as a line across an axis of costs, because it is a bound and other groups are not."""
    return axis != "rounds" and group.is_bound and not all(other.is_bound for other in groups)


def _ylabel(groups: Sequence[Group], metric: Metric, look: Look) -> str:
    """Return the name of the vertical axis."""
    name = in_picture(metric.short if look.ylabel is None else look.ylabel)
    is_smoothed = any(curve.is_smoothed for group in groups for curve in group.curves)
    return name + " (smoothed)" * (is_smoothed and "smoothed" not in name)


def scale_axis(axes: Axes, axis: str, spent: Floats, look: Look) -> float:
    """Set the name, the scale and the ticks of the horizontal axis for the values on it, and return their unit."""
    unit, name, logarithmic = 1.0, AXES[axis], is_logarithmic(look, axis)
    if axis in BYTES:
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    elif axis == "simulated_seconds":
        time_unit = unit_of(spent.max() / 2 if len(spent) else 1.0, TIMES)
        unit, name = TIMES[time_unit], f"simulated time ({time_unit})"
    elif axis == "joules":
        axes.xaxis.set_major_formatter(EngFormatter(unit="J"))
    elif axis in KINDS_OF_EPSILON:
        name = f"ε ({KINDS_OF_EPSILON[axis]})"
    axes.set_xlabel(fill(name + " (logarithmic)" * logarithmic, look.line_length))
    if logarithmic:
        formatter = axes.xaxis.get_major_formatter()
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis, spent / unit, few=_decades(spent) > min(MANY_DECADES, look.line_length / 28))
        if _decades(spent) < FEW_DECADES:
            axes.xaxis.set_major_locator(MaxNLocator(max(2, look.line_length // 14)))
        if axis in (*BYTES, "joules"):
            axes.xaxis.set_major_formatter(formatter)
    elif axis == "rounds":
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if len(spent) and spent.min() == spent.max():  # one round
        axes.xaxis.set_major_locator(FixedLocator([spent.min() / unit]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(0.5 * spent.min() / unit, 1.5 * spent.max() / unit)
    return unit


def _ends(values: Floats) -> Floats:
    """Return the decimal logarithms of the smallest and the largest of the values above 0 (2,)."""
    positive = values[(values > 0) & np.isfinite(values)]
    return np.log10([positive.min(), positive.max()]) if len(positive) else np.zeros(2)


def _decades(values: Floats) -> float:
    """Return how many powers of ten lie between the smallest and the largest of the values above 0."""
    low, high = _ends(values)
    return float(high - low)


def _plain_ticks(axis: Axis, values: Floats, few: bool) -> None:
    """Write the ticks of a logarithmic axis as plain numbers, 1, 2 and 5 of each power of ten, or with `few` fewer."""

    def count(multiples: Sequence[float]) -> int:
        """Return how many multiples of powers of ten lie between the smallest and the largest value."""
        low, high = (end - np.log10(multiples) for end in _ends(values))
        return int((np.floor(high) - np.ceil(low) + 1).sum())

    enough = [multiples for multiples in FEW_TICKS if count(multiples) > 1] if few else []
    axis.set_major_locator(LogLocator(subs=[*enough, ALL_TICKS][0]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def draw_group(axes: Axes, group: Group, axis: str, unit: float, style: dict[str, Any], as_line: bool = False) -> None:
    """Draw the raw values, and mean and deviation of the smoothed curves; with `as_line`, a line at the end of the curves."""
    pale = {"color": style["color"], "zorder": BEHIND}
    style = style | (BOUND if group.is_bound else {})
    if as_line:
        _draw_line(axes, group, style, pale)
        return
    alpha = min(0.4, 1.2 / len(group.curves))  # more than three seeds would cover the means
    for curve in group.curves:
        if curve.is_smoothed or len(group.curves) > 1:
            axes.plot(curve.axis(axis) / unit, curve.raw, linewidth=0.9, alpha=alpha, **pale)
    measured = replace(group, curves=tuple(curve for curve in group.curves if (curve.axis(axis) > 0).any()))
    if not measured.curves:
        return
    spent, mean, spread = measured.mean_curve(axis)
    positive = spent > 0
    spent, mean, spread = spent[positive] / unit, mean[positive], spread[positive]
    if not len(spent):
        return
    style = {"marker": "o", **style} if len(spent) == 1 else style
    axes.plot(spent, mean, label=_label(measured), linewidth=1.8, **style)
    if spread.any():
        low, high = mean - spread, mean + spread
        if is_accuracy(measured.curves[0].metric.name) and mean.max() <= 1:  # in percent it may be above 1
            low, high = low.clip(0.0), high.clip(max=1.0)
        axes.fill_between(spent, low, high, alpha=0.18, linewidth=0, **pale)


def _draw_line(axes: Axes, group: Group, style: dict[str, Any], pale: dict[str, Any]) -> None:
    """Draw a line across the axes at the end of a group's curves."""
    mean, spread, _ = group.spread("final")
    if mean is None:  # a run has diverged
        return
    axes.axhline(mean, label=_label(group), linewidth=1.8, **style)
    if spread:
        axes.axhspan(mean - spread, mean + spread, alpha=0.18, linewidth=0, **pale)


def _label(group: Group) -> str:
    """Return the name of a line in the legend."""
    return in_picture(group.label + (f" ({len(group.curves)} seeds)" if len(group.curves) > 1 else ""))


def draw_bits(groups: Sequence[Group], look: Look = Look()) -> Figure | None:  # noqa: B008
    """Draw the mean bytes by direction and kind, over the runs that recorded them; None if none did."""
    recorded = [(group, bits) for group in groups if (bits := group.mean_bytes())]
    if not recorded:
        return None
    kinds = [kind for kind in KINDS if any(bits[way, kind] for _, bits in recorded for way in ("up", "down"))]
    with matplotlib.rc_context(look.style):
        lines = 0.017 * look.font_size * (10 + 1.9 * len(recorded))  # inches
        space = ConstrainedLayoutEngine(w_pad=0.7 * look.font_size / 72)  # so that the ticks of the panels stay apart
        figure = Figure(figsize=(look.size[0], lines), layout=space)
        both = figure.subplots(1, 2, sharex=True, sharey=True)  # same scale in both directions
        for axes, way in zip(both, ("up", "down"), strict=True):
            left = np.zeros(len(recorded))
            for kind, colour in zip(kinds, COLOURS, strict=False):
                width = np.array([bits[way, kind] for _, bits in recorded])
                axes.barh(range(len(recorded)), width, left=left, height=0.7, color=colour, label=kind)
                left += width
            axes.set_title(f"{way}link", fontsize="medium")
            axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
            axes.xaxis.set_major_locator(MaxNLocator(max(2, min(4, look.line_length // 22))))
            axes.grid(visible=False, axis="y")
        both[0].set_yticks(range(len(recorded)), [beside_axis(group.label, look) for group, _ in recorded])
        both[0].invert_yaxis()
        add_legend(figure, look)
    return figure
