"""Pictures: one style for all of them, and the labels of a partition.

Drawing needs no display. matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_fl.checks import check_between, check_choice
from lightning_fl.errors import nearest, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision can distinguish, without the yellow, too pale for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# A second cue besides colour: each pass through the colours has its own dashes.
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)))
MARKERS = "os^DvP*X"
"""A third cue."""
STYLE: Any = {  # matplotlib's own type lists every possible key
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 150,
    "font.size": 10,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "pdf.fonttype": 42,  # text as text in PDF and SVG, which journals ask for and editors can change
    "svg.fonttype": "none",
}
FORMATS = ("png", "svg", "pdf")


@dataclass(frozen=True)
class Look:
    """Look of a report's pictures.

    Attributes:
        formats: formats of the files, of `FORMATS`; none for pictures that are in pages only.
        size: width and height in inches.
        dpi: dots per inch of PNG files.
        font_size: size of the text in points.
        xscale: `log` or `linear`; None for a logarithmic axis of bytes and linear axes of everything else.
        yscale: `log` or `linear`.
        ylabel: name of the curves' vertical axis, without `(smoothed)`; None for the metric's.
        font: font of the text and its formulas, one that is installed or a family such as `serif`; None for matplotlib's.
        is_sized: True if the user has chosen the size, so that no picture is larger.
    """

    formats: tuple[str, ...] = ("png", "svg")
    size: tuple[float, float] = (7.5, 4.2)
    dpi: int = STYLE["figure.dpi"]
    font_size: float = STYLE["font.size"]
    xscale: str | None = None
    yscale: str = "linear"
    ylabel: str | None = None
    font: str | None = None
    is_sized: bool = False

    def __post_init__(self) -> None:
        for name in self.formats:
            check_choice("format", name, FORMATS)
        for length in self.size:
            check_between("size in inches", length, 1, 100)
        check_between("dpi", self.dpi, 10, 2400)
        check_between("font_size in points", self.font_size, 1, 100)
        check_choice("xscale", self.xscale, (None, "log", "linear"))
        check_choice("yscale", self.yscale, ("log", "linear"))
        if self.font is not None:
            installed = fonts()
            require(self.font in installed, f"there is no font {self.font!r}: {nearest(self.font, installed)}.")

    @property
    def style(self) -> Any:
        """Settings of matplotlib."""
        style = STYLE | {"figure.dpi": self.dpi, "font.size": self.font_size}
        if self.font is None:
            return style
        slants = {"it": ":italic", "bf": ":bold", "bfit": ":italic:bold"}
        formulas = {f"mathtext.{kind}": self.font + slants.get(kind, "") for kind in ("rm", "cal", "sf", "tt", *slants)}
        return style | {"font.family": [self.font], "mathtext.fontset": "custom", **formulas}

    @property
    def line_length(self) -> int:
        """Characters of a line of text across a picture."""
        return int(120 * self.size[0] / self.font_size)


def fonts() -> list[str]:
    """Return the names of the installed fonts, and of families, for each of which matplotlib finds one of them."""
    from matplotlib.font_manager import get_font_names

    return sorted({*get_font_names(), "serif", "sans-serif", "monospace"})


def in_picture(text: str) -> str:
    r"""Return a text as matplotlib shows it: it hides labels that begin with `_`, and fails on a `$` that begins no formula.

    >>> in_picture("_a"), in_picture("$5, $x_{$"), in_picture(r"$\mu$ = 0.1")
    (' _a', '\\$5, \\$x_{\\$', '$\\mu$ = 0.1')
    """
    from matplotlib.mathtext import MathTextParser

    text = "".join(each if each.isprintable() else " " for each in text)
    try:
        MathTextParser("path").parse(text)
    except ValueError:
        text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def line_style(index: int) -> dict[str, Any]:
    """Return colour and dashes of the index-th line of a picture, and markers where these would repeat.

    >>> line_style(0)["color"] == line_style(7)["color"], line_style(0) == line_style(7)
    (True, False)
    >>> line_style(27), line_style(28)["marker"], line_style(56)["marker"]
    ({'color': '#000000', 'linestyle': (0, (6, 2, 1, 2))}, 'o', 's')
    """
    cycle = index // len(COLOURS)
    style = {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[cycle % len(DASHES)]}
    repeats = cycle // len(DASHES)
    return style | (
        {"marker": MARKERS[(repeats - 1) % len(MARKERS)], "markersize": 4, "markevery": 0.1} if repeats else {}
    )


def curve_svg(rounds: Sequence[int], values: Sequence[float], name: str) -> str:
    """Return the curve of a metric as SVG for a notebook.

    Args:
        rounds: numbers of the rounds, from 1.
        values: value after each round.
        name: name of the metric.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawn = StringIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.5, 2.6), layout="constrained")
        axes = figure.subplots()
        axes.plot(rounds, values, linewidth=1.8, marker="o" if len(rounds) == 1 else "", **line_style(0))
        axes.set(xlabel="rounds", ylabel=name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue().partition("<svg")[1] + drawn.getvalue().partition("<svg")[2]


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
