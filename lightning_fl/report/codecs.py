"""Codecs in a report: errors of the uplink codec, by `CodecError`, and bytes of each layer, by `CommunicationMeter`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from lightning_fl.outputs.figures import COLOURS, Look, in_picture, line_style
from lightning_fl.report.comparison import Curve, Group, Metric, mean_and_spread
from lightning_fl.report.document import Part, Picture, Table
from lightning_fl.report.layout import add_legend, beside_axis
from lightning_fl.report.plots import draw_curves
from lightning_fl.report.records import Record
from lightning_fl.report.tables import Column, Row, table

ERROR, LAST, RATIO = "codec/error", "codec/drift", "comm/uplink_ratio"
SHOWN = {
    ERROR: "error",
    "codec/mean_error": "error of the mean",
    "codec/cosine": "cosine",
    "codec/scale": "scale",
    "codec/residual": "residual",
    LAST: "drift",
    RATIO: "ratio",
}
ERRORS, BITS = f"{ERROR}/", "comm/uplink_bits/layer/"
"""Prefixes of the columns of layers."""
SHARED = "shared"
HATCHES = ("", "///", "...", "xxx")
"""Patterns of bars, one for each pass through the colours."""
WIDE = 50
"""Ratio of the largest error to the smallest from which their axis is logarithmic."""
ABOUT = (
    "`error` is the relative square error of a client's upload, ‖x̂ − x‖² / ‖x‖². `error of the mean` is the same error of the "
    "mean over clients. `scale` is ⟨x̂, x⟩ / ‖x‖². `residual` is the memory of error feedback, ‖e‖ / ‖x‖. `ratio` is the "
    "compression: 32 bits per number divided by the bits sent. These are means over the measured rounds. `drift` adds up over "
    "the rounds, so the table shows its last value."
)


def codec_parts(groups: Sequence[Group], look: Look) -> list[Part]:
    """Return the table and the pictures of the codecs' columns; [] if no run has logged any."""
    parts: list[Part] = []
    if shown := codec_table(groups):
        parts += [ABOUT, shown]
    if figure := draw_errors(groups, look):
        parts.append(Picture("codec_error_by_rounds", "Error of the uplink codec against rounds", figure, look))
    if figure := draw_layers(groups, look):
        caption = "Error of the uplink codec and bytes of a round's uploads by layer, means over the rounds"
        parts.append(Picture("codecs_by_layer", caption, figure, look))
    return parts


def codec_table(groups: Sequence[Group]) -> Table | None:
    """Return a row for each group with the means over its rounds, several seeds as mean ± deviation; None if none has any."""
    columns = {name: [[_number(curve.record, name) for curve in group.curves] for group in groups] for name in SHOWN}
    measured = {name: of for name, of in columns.items() if any(x is not None for values in of for x in values)}
    if ERROR not in measured:
        return None
    rows: list[Row] = [
        ([group.label], {name: mean_and_spread(of[place]) for name, of in measured.items()})
        for place, group in enumerate(groups)
        if any(x is not None for of in measured.values() for x in of[place])
    ]
    return table(["method"], {name: Column(SHOWN[name], "figures") for name in measured}, rows)


def draw_errors(groups: Sequence[Group], look: Look) -> Figure | None:
    """Draw the error of each group over rounds; None if no run has measured it."""
    metric = Metric(ERROR, window=1)
    measured = [
        replace(
            group,
            curves=tuple(
                Curve(curve.record, metric) for curve in group.curves if _number(curve.record, ERROR) is not None
            ),
        )
        for group in groups
    ]
    values = [x for group in measured for curve in group.curves for x in curve.raw.tolist()]
    if not values:
        return None
    is_wide = min(values) > 0 and max(values) > WIDE * min(values)
    return draw_curves(measured, metric, "rounds", replace(look, yscale="log" if is_wide else look.yscale, ylabel=None))


def draw_layers(groups: Sequence[Group], look: Look) -> Figure | None:
    """Draw the error and the bytes of each layer side by side, with a bar for each group; None if no run has any."""
    panels = {"error": (ERRORS, 1.0), "uplink": (BITS, 1 / 8)}
    bars_by_title = {
        title: [(i, values) for i, group in enumerate(groups) if (values := _by_layer(group, start, unit))]
        for title, (start, unit) in panels.items()
    }
    bars_by_title = {title: bars for title, bars in bars_by_title.items() if bars}
    names = dict.fromkeys(name for bars in bars_by_title.values() for _, values in bars for name in values)
    layers = sorted(names, key=lambda name: name == SHARED)  # last, the others in the network's order
    if not layers:
        return None
    order = sorted({i for bars in bars_by_title.values() for i, _ in bars})
    with matplotlib.rc_context(look.style):
        lines = 10 + len(layers) * max(1.6, 0.9 * len(order))
        figure = Figure(figsize=(look.size[0], 0.017 * look.font_size * lines), layout="constrained")
        both = np.atleast_1d(figure.subplots(1, len(bars_by_title), sharey=True))
        for axes, (title, bars) in zip(both, bars_by_title.items(), strict=True):
            height = 0.8 / len(order)
            for i, values in bars:
                hatch = HATCHES[i // len(COLOURS) % len(HATCHES)]
                style = {"facecolor": line_style(i)["color"], "hatch": hatch, "edgecolor": "white", "linewidth": 0}
                offset = (order.index(i) - (len(order) - 1) / 2) * height
                places = np.array([layers.index(name) for name in values]) + offset
                axes.barh(places, [*values.values()], height=height, label=in_picture(groups[i].label), **style)
            _scale(axes, title, len(bars_by_title), look)
        both[0].set_yticks(range(len(layers)), [beside_axis(layer, look) for layer in layers])
        both[0].set_ylim(len(layers) - 0.4, -0.6)
        entries = {
            label: handle for axes in both for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        handles = {label: entries[label] for i in order if (label := in_picture(groups[i].label))}
        add_legend(figure, look, handles)
    return figure


def _scale(axes: Axes, title: str, num_panels: int, look: Look) -> None:
    """Set title and ticks of a panel."""
    axes.set_title(title, fontsize="medium")
    if title == "uplink":
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.xaxis.set_major_locator(MaxNLocator(max(2, min(5, look.line_length // (11 * num_panels)))))
    axes.grid(visible=False, axis="y")


def _by_layer(group: Group, start: str, unit: float) -> dict[str, float]:
    """Return the mean of a column over rounds and runs for each layer, for the columns that begin with `start`."""
    names = dict.fromkeys(name for curve in group.curves for name in curve.record.columns if name.startswith(start))
    columns = {name: [_number(curve.record, name) for curve in group.curves] for name in names}
    measured = {name: [x for x in values if x is not None] for name, values in columns.items()}
    return {name.removeprefix(start): unit * fmean(values) for name, values in measured.items() if values}


def _number(record: Record, name: str) -> float | None:
    """Return the mean of a column over the rounds, or the last value of the drift; None without a value."""
    values = record.column(name)
    values = values[~np.isnan(values)]
    return None if not len(values) else float(values[-1] if name == LAST else values.mean())
