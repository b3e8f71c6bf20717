"""Pictures of a study: accuracy within a budget with the front, the areas of a grid of two axes, and searches by trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from statistics import fmean, stdev
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_fl.outputs.figures import COLOURS, Look, in_picture, line_style
from lightning_fl.outputs.traffic import COSTS, in_words
from lightning_fl.report.layout import add_legend
from lightning_fl.report.plots import BOUND, scale_axis
from lightning_fl.study.budget import Budget, Found, on_front

MARKERS = "osD^vP*X<>h"
"""Markers of combinations. Their number, 11, has no common divisor with the number of colours, 7."""
CELL, BESIDE_MAP = 6, 16
"""Characters of a cell of a map, and beside its cells and the names of its rows, for the bar of colours."""
MOST_PANELS = 3
"""Largest number of panels side by side."""
Choices = Mapping[str, Sequence[str]]
"""Names of the choices of each cell, one for each axis of the grid."""


def draw_front(cells: Found, choices: Choices, short: str, budget: Budget, look: Look = Look()) -> Figure:  # noqa: B008
    """Draw the best accuracy within the budget over the bytes sent for it, with deviations over seeds and the front of the means.

    A grid of several axes has a panel for each choice of its first axis; colours and markers show the other choices. A
    combination that sends nothing is a line, if others send something.
    """
    means = {
        name: (fmean(run.spent for run in runs.values()), fmean(run.best for run in runs.values()))
        for name, runs in cells.items()
    }
    sent = np.array([spent for spent, _ in means.values() if spent > 0])
    front = _front([*means.values()])
    if len(sent):
        front = front[front[:, 0] > 0]
    has_panels = any(names[1:] for names in choices.values())
    titles = list(dict.fromkeys(names[0] for names in choices.values())) if has_panels else [""]
    looks = {
        names: place for place, names in enumerate(dict.fromkeys(names[has_panels:] for names in choices.values()))
    }
    num_columns = min(len(titles), MOST_PANELS)
    num_rows = ceil(len(titles) / num_columns)
    panel = replace(look, size=(look.size[0] / num_columns, look.size[1]))
    with matplotlib.rc_context(look.style):
        figure = Figure(figsize=(look.size[0], look.size[1] * (1 + 0.7 * (num_rows - 1))), layout="constrained")
        panels = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).flatten()
        for axes, title in zip(panels, titles, strict=False):
            axes.set_title(in_picture(title), fontsize="medium")
            if len(front):
                axes.plot(*front.T, color="0.6", linewidth=1, zorder=0, drawstyle="steps-post", label="front")
            for name, names in choices.items():
                if not has_panels or names[0] == title:
                    best = [run.best for run in cells[name].values()]
                    deviation = stdev(best) if len(best) > 1 else None
                    style = _style(looks[names[has_panels:]]) | {"label": in_picture("-".join(names[has_panels:]))}
                    spent, mean = means[name]
                    if len(sent) and not spent:
                        _draw_line(axes, mean, deviation or 0.0, style)
                    else:
                        axes.errorbar(spent, mean, yerr=deviation, **style, linestyle="", capsize=2)
        for axes in panels[len(titles) :]:
            axes.remove()
        for axes in panels[len(titles) - num_columns : len(titles)]:
            axes.xaxis.set_tick_params(labelbottom=True)  # also where the last row has no panel
        if len(sent):
            # A logarithmic axis has few ticks between numbers of the same size.
            xscale = "log" if sent.max() > 4 * sent.min() else "linear"
            for axes in panels[: len(titles)]:
                scale_axis(axes, COSTS[budget.traffic], sent, replace(panel, xscale=xscale))
        for axes in panels[: len(titles) : num_columns]:
            axes.set_ylabel(f"best {in_picture(short)} within the budget")
        add_legend(figure, look)
    return figure


def _draw_line(axes: Axes, mean: float, deviation: float, style: Mapping[str, Any]) -> None:
    """Draw a combination that sends nothing as a line across the axes."""
    axes.axhline(mean, color=style["color"], label=style["label"], **BOUND)
    if deviation:
        axes.axhspan(mean - deviation, mean + deviation, color=style["color"], alpha=0.18, linewidth=0)


def _front(points: Sequence[tuple[float, float]]) -> Any:
    """Return the points on the front, in the order of their bytes (n, 2)."""
    means = np.array(points)
    front = means[on_front(means[:, 0], means[:, 1])]
    return front[front[:, 0].argsort()]


def draw_areas(cells: Found, choices: Choices, budget: Budget, look: Look) -> Figure | None:
    """Draw the mean areas as a map of the first axis of the grid by the second; None unless the grid has two axes."""
    if any(len(names) != 2 for names in choices.values()):
        return None
    rows, columns = (list(dict.fromkeys(names[axis] for names in choices.values())) for axis in (0, 1))
    if min(len(rows), len(columns)) < 2:
        return None
    areas = np.full((len(rows), len(columns)), np.nan)
    for name, runs in cells.items():
        areas[rows.index(choices[name][0]), columns.index(choices[name][1])] = fmean(run.area for run in runs.values())
    width = 0.6 * look.font_size / 72 * (CELL * len(columns) + max(map(len, rows)) + BESIDE_MAP)
    has_room = width <= look.size[0] or not look.is_sized
    with matplotlib.rc_context(look.style):
        figure = Figure(figsize=(max(look.size[0], width * has_room), 1.2 + 0.5 * len(rows)), layout="constrained")
        axes = figure.subplots()
        shown = axes.imshow(areas, cmap="viridis", aspect="auto")
        middle = (np.nanmin(areas) + np.nanmax(areas)) / 2
        for (row, column), area in np.ndenumerate(areas):
            if has_room and not np.isnan(area):
                colour = "black" if area > middle else "white"
                axes.text(column, row, f"{area:.3f}", ha="center", va="center", color=colour)
        axes.set_xticks(range(len(columns)), [*map(in_picture, columns)])
        if sum(map(len, columns)) > 40:
            for label in axes.get_xticklabels():
                label.set(rotation=30, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(rows)), [*map(in_picture, rows)])
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        figure.colorbar(shown, label=f"area over {in_words(budget.traffic)}")
    return figure


def draw_trials(
    best: Mapping[str, Mapping[int, float]],
    values: Mapping[str, Mapping[int, float]],
    short: str,
    look: Look = Look(),  # noqa: B008
) -> Figure | None:
    """Draw the best value so far of each search, and the values of single trials; None if no trial has a value.

    Args:
        best: best value by cell and number of trials.
        values: values of the trials by cell and number.
        short: name of the metric.
        look: look of the picture.
    """
    if not any(best.values()):
        return None
    with matplotlib.rc_context(look.style):
        figure = Figure(figsize=look.size, layout="constrained")
        axes = figure.subplots()
        for index, (name, found) in enumerate(best.items()):
            if found:  # the others keep their colours
                style = line_style(index) | ({"marker": "o"} if len(found) == 1 else {})
                axes.step([*found], [*found.values()], where="post", label=in_picture(name), **style)
                axes.plot([*values[name]], [*values[name].values()], ".", color=style["color"], alpha=0.4)
        numbers = np.array([float(number) for found in best.values() for number in found])
        scale_axis(axes, "rounds", numbers, replace(look, xscale="linear"))
        axes.set_xlabel("trials")
        axes.set_ylabel(in_picture(f"best {short} on held-out samples"))
        add_legend(figure, look)
    return figure


def _style(index: int) -> dict[str, Any]:
    """Return colour and marker of the index-th combination; the first 77 differ."""
    marker = MARKERS[index % len(MARKERS)]
    return {"color": COLOURS[index % len(COLOURS)], "marker": marker}
