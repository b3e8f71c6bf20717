"""Layout of pictures: a legend below the axes, and room for the curves, or an error if a size leaves none."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from math import ceil
from textwrap import fill
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from lightning_fl.errors import UserError
from lightning_fl.outputs.figures import Look, in_picture

LEAST_LINES, LEAST_CHARACTERS = 8.0, 9.0
"""Least height of axes, in lines of text, and least width, in characters."""
MOST_COLUMNS = 4
MARGIN = 12
"""Characters of a legend's entry beside its text: the line, and space."""
MOST_GROWTHS = 4
STEP = 0.1
"""Inches to which sizes are rounded up."""


def add_legend(figure: Figure, look: Look, entries: Mapping[str, Any] | None = None) -> None:
    """Name the lines of all axes below them, where no legend covers a curve; break names that are too long into lines.

    Args:
        figure: figure with labelled lines.
        look: its look.
        entries: handles by label; None for the handles of the axes.
    """
    handles, labels = ([], []) if entries is None else ([*entries.values()], [*entries])
    for axes in figure.axes if entries is None else ():
        lines, names = axes.get_legend_handles_labels()
        new = [place for place, name in enumerate(names) if name not in labels]  # two lines may have one name
        handles += [lines[place] for place in new]
        labels += [names[place] for place in new]
    if not labels:
        return
    longest = max(map(len, labels)) + MARGIN
    num_rows = ceil(len(labels) / max(1, min(MOST_COLUMNS, look.line_length // longest)))
    num_columns = ceil(len(labels) / num_rows)
    wrapped = [fill(label, max(MARGIN, look.line_length - MARGIN)) for label in labels]
    figure.legend(handles, wrapped, loc="outside lower center", ncols=num_columns, frameon=False)


def beside_axis(label: str, look: Look) -> str:
    """Return the name of a row of bars, in several lines if it would take more than a third of the picture's width."""
    return fill(in_picture(label), max(MARGIN, look.line_length // 3))


def lay_out(figure: Figure, look: Look, name: str) -> None:
    """Fix the layout of a figure, and enlarge the figure beyond its look if the curves have no room.

    Args:
        figure: figure with a layout engine.
        look: look that it was drawn with.
        name: name of the picture, for the error.

    Raises:
        UserError: the size that the user has chosen is too small to read the picture.
    """
    before = figure.get_size_inches()
    for _ in range(MOST_GROWTHS):
        with rc_context(look.style):  # the fonts of formulas are read here
            missing = _missing(figure, look)
        if not any(missing):
            break
        width, height = (_rounded_up(old + new) for old, new in zip(figure.get_size_inches(), missing, strict=True))
        figure.set_size_inches(width, height)
    after = figure.get_size_inches()
    # The height of a picture of bars follows from its bars.
    is_short = [old == size < new for old, size, new in zip(before, look.size, after, strict=True)]
    if look.is_sized and any(is_short):
        width, height = (new if short else size for new, size, short in zip(after, look.size, is_short, strict=True))
        count = sum(len(legend.get_texts()) for legend in figure.legends)
        named = f", whose {count} lines are named in a legend" * (count > 1)
        raise UserError(
            f"--size {look.size[0]:g}x{look.size[1]:g} leaves no room for the curves of {name}{named}: give at least "
            f"--size {width:g}x{height:g}, a smaller --font-size, or fewer runs."
        )
    figure.set_layout_engine("none")  # all files share this layout


def _missing(figure: Figure, look: Look) -> tuple[float, float]:
    """Return the inches of width and height that a figure lacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*layout not applied.*")  # no room at all, which is measured below
        figure.draw_without_rendering()
    boxes = [axes.get_window_extent() for axes in figure.axes if axes.get_label() != "<colorbar>"]
    inch = look.font_size / 72
    width = LEAST_CHARACTERS * 0.6 * inch - min(box.width for box in boxes) / figure.dpi
    height = LEAST_LINES * 1.2 * inch - min(box.height for box in boxes) / figure.dpi
    legends = [legend.get_window_extent() for legend in figure.legends]
    for legend in legends:
        height = max(height, -legend.y0 / figure.dpi, (legend.y1 - min(box.y0 for box in boxes)) / figure.dpi)
        width = max(width, legend.width / figure.dpi - figure.get_size_inches()[0])
    floor = max((legend.y1 for legend in legends), default=0.0)
    names = [axes.yaxis.label.get_window_extent() for axes in figure.axes if axes.get_ylabel()]
    for label in names:  # centred, so that it moves by half of what is added
        height = max(height, 2 * (label.y1 - figure.bbox.y1) / figure.dpi, 2 * (floor - label.y0) / figure.dpi)
    return max(0.0, width), max(0.0, height)


def _rounded_up(inches: float) -> float:
    """Return a length in tenths of an inch.

    >>> _rounded_up(2.41), _rounded_up(2.4)
    (2.5, 2.4)
    """
    return round(ceil(round(inches / STEP, 6)) * STEP, 6)
