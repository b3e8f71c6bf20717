"""Pictures of a study: accuracy within a budget with the front, the areas of a grid of two axes, and searches by trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from lightning_fl.outputs.figures import COLOURS, Look, in_picture, line_style
from lightning_fl.report.plots import scale_axis
from lightning_fl.study.budget import Found, on_front

MARKERS = "osD^vP*X<>hp"
Choices = Mapping[str, Sequence[str]]
"""Names of the choices of each cell, one for each axis of the grid."""


def draw_front(cells: Found, choices: Choices, short: str, look: Look = Look()) -> Figure:  # noqa: B008
    """Draw the best accuracy within the budget over the bytes sent for it, with deviations over seeds, and the means' front.

    The first axis of the grid has colours, the others have markers.
    """
    spent = {name: [run.spent for run in runs.values()] for name, runs in cells.items()}
    best = {name: [run.best for run in runs.values()] for name, runs in cells.items()}
    colours, markers = _looks(choices, 0), _looks(choices, 1)
    with matplotlib.rc_context(look.style):
        figure = Figure(figsize=look.size, layout="constrained")
        axes = figure.subplots()
        means = np.array([[fmean(spent[name]), fmean(best[name])] for name in cells])
        sent = means[means[:, 0] > 0, 0]
        if len(sent):
            # A logarithmic axis has few ticks between numbers of the same size.
            scale_axis(axes, "uplink", sent, replace(look, xscale="log" if sent.max() > 4 * sent.min() else "linear"))
        for name in cells:
            axes.errorbar(
                fmean(spent[name]),
                fmean(best[name]),
                yerr=stdev(best[name]) if len(best[name]) > 1 else None,
                **_colour(colours[choices[name][0]]),
                marker=MARKERS[markers[choices[name][1:]] % len(MARKERS)],
                linestyle="",
                capsize=2,
            )
        front = means[on_front(means[:, 0], means[:, 1])]
        front = front[front[:, 0].argsort()]
        axes.plot(front[:, 0], front[:, 1], color="0.6", linewidth=1, zorder=0, drawstyle="steps-post")
        axes.set_xlabel(axes.get_xlabel().replace("clients", "clients within the budget"))
        axes.set_ylabel(f"best {in_picture(short)} within the budget")
        entries = [
            Line2D([], [], linestyle="", marker="o", **_colour(index), label=in_picture(name))
            for name, index in colours.items()
        ]
        entries += [
            Line2D(
                [],
                [],
                linestyle="",
                marker=MARKERS[index % len(MARKERS)],
                color="0.4",
                label=in_picture("-".join(names)),
            )
            for names, index in markers.items()
            if names
        ]
        entries.append(Line2D([], [], color="0.6", linewidth=1, label="front"))
        longest = max(len(str(entry.get_label())) for entry in entries) + 6
        figure.legend(
            handles=entries, loc="outside lower center", ncols=max(1, look.line_length // longest), frameon=False
        )
    return figure


def draw_areas(cells: Found, choices: Choices, look: Look = Look()) -> Figure | None:  # noqa: B008
    """Draw the mean areas as a map of the first axis of the grid by the second; None unless the grid has two axes."""
    if any(len(names) != 2 for names in choices.values()):
        return None
    rows, columns = (list(dict.fromkeys(names[axis] for names in choices.values())) for axis in (0, 1))
    if min(len(rows), len(columns)) < 2:
        return None
    areas = np.full((len(rows), len(columns)), np.nan)
    for name, runs in cells.items():
        areas[rows.index(choices[name][0]), columns.index(choices[name][1])] = fmean(run.area for run in runs.values())
    with matplotlib.rc_context(look.style):
        figure = Figure(figsize=(look.size[0], 1.2 + 0.5 * len(rows)), layout="constrained")
        axes = figure.subplots()
        shown = axes.imshow(areas, cmap="viridis", aspect="auto")
        middle = (np.nanmin(areas) + np.nanmax(areas)) / 2
        for (row, column), area in np.ndenumerate(areas):
            if not np.isnan(area):
                colour = "black" if area > middle else "white"
                axes.text(column, row, f"{area:.3f}", ha="center", va="center", color=colour)
        axes.set_xticks(
            range(len(columns)), [*map(in_picture, columns)], rotation=30 if sum(map(len, columns)) > 40 else 0
        )
        axes.set_yticks(range(len(rows)), [*map(in_picture, rows)])
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        figure.colorbar(shown, label="area")
    return figure


def draw_trials(
    best: Mapping[str, Mapping[int, float]],
    values: Mapping[str, Mapping[int, float]],
    short: str,
    look: Look = Look(),  # noqa: B008
) -> Figure | None:
    """Draw the best value so far of each search, and those of the single trials; None if no trial has a value.

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
        for index, name in enumerate(best):
            style = line_style(index)
            axes.step([*best[name]], [*best[name].values()], where="post", label=in_picture(name), **style)
            axes.plot([*values[name]], [*values[name].values()], ".", color=style["color"], alpha=0.4)
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.set_xlabel("trials")
        axes.set_ylabel(in_picture(f"best {short} on held-out samples"))
        longest = max(map(len, best)) + 12
        figure.legend(loc="outside lower center", ncols=max(1, look.line_length // longest), frameon=False)
    return figure


def _colour(index: int) -> dict[str, Any]:
    """Return the colour of the index-th choice, hollow in every second pass through the colours."""
    colour = COLOURS[index % len(COLOURS)]
    return {"color": colour, "markerfacecolor": "white" if index // len(COLOURS) % 2 else colour}


def _looks(choices: Choices, axis: int) -> dict[Any, int]:
    """Return a number for each choice of the first axis, or for the choices of all other axes."""
    names = [chosen[0] if axis == 0 else chosen[1:] for chosen in choices.values()]
    return {name: index for index, name in enumerate(dict.fromkeys(names))}
