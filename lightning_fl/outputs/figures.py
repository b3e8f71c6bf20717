"""Pictures: one style for all of them, and the labels of a partition.

Drawing needs no display. matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision can distinguish, without the yellow, too pale for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# A second cue besides colour: each pass through the colours has its own dashes.
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)))
STYLE: Any = {  # matplotlib's own type lists every possible key
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 150,
    "font.size": 10,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
}


def line_style(index: int) -> dict[str, Any]:
    """Return colour and dashes of the index-th line of a picture.

    >>> line_style(0)["color"] == line_style(7)["color"], line_style(0) == line_style(7)
    (True, False)
    """
    cycle = index // len(COLOURS)
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[cycle % len(DASHES)]}


def label_histogram(histograms: np.ndarray[Any, Any]) -> Figure:
    """Draw how many samples of each class each client holds.

    Args:
        histograms: samples per client and class (N, C), whole numbers.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(histograms.T, aspect="auto", interpolation="nearest", cmap="cividis", origin="lower")
        axes.grid(visible=False)
        axes.set(xlabel="client", ylabel="class", title=f"Samples of {len(histograms):,} clients by class")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, label="samples")
    return figure
