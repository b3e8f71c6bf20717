"""Clients in a report: distribution of the metric over the clients of runs that evaluated them, from `clients.csv`."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from lightning_fl.outputs.clients.distribution import distribution
from lightning_fl.outputs.figures import Look, in_picture, line_style
from lightning_fl.outputs.metric import is_accuracy
from lightning_fl.outputs.run_folder import CLIENTS
from lightning_fl.report.comparison import Group, Metric, mean_and_spread
from lightning_fl.report.document import Table
from lightning_fl.report.layout import add_legend
from lightning_fl.report.plots import gaps_over
from lightning_fl.report.records import Record
from lightning_fl.report.smoothing import Floats
from lightning_fl.report.tables import Column, Row, table

NUM_BINS = 20
KINDS = {"": "", "_tuned": ", fine-tuned"}
"""Suffixes of the columns of clients.csv, and the suffixes of the names of their lines."""
SHOWN = {
    "weighted": "mean over samples",
    "mean": "mean over clients",
    "std": "std",
    "worst10": "worst 10 %",
    "best10": "best 10 %",
    "jain": "Jain",
}


class Clients(NamedTuple):
    """Values of a run's clients in the last round that evaluated them.

    Attributes:
        round: index of the round.
        values: finite values of the clients (K,).
        samples: samples of each (K,).
    """

    round: int
    values: Floats
    samples: Floats


def read_clients(record: Record, column: str) -> Clients | None:
    """Return a column of a run's clients.csv in its last round; None without the file or without a finite value."""
    try:
        rows = _read_rows(record)
        samples_and_values = np.array(
            [(row["round"], row.get(column) or "nan", row["samples"]) for row in rows], dtype=float
        ).reshape(-1, 3)
    except ValueError:
        return None
    samples_and_values = samples_and_values[np.isfinite(samples_and_values).all(axis=1)]
    if not len(samples_and_values):
        return None
    last = samples_and_values[samples_and_values[:, 0] == samples_and_values[:, 0].max()]
    return Clients(int(last[0, 0]), last[:, 1], last[:, 2])


def unreadable(groups: Sequence[Group]) -> list[str]:
    """Return a remark for each run whose clients.csv is damaged."""
    records = [curve.record for group in groups for curve in group.curves]
    return [
        f"{record.folder}: its {CLIENTS} cannot be read and is ignored." for record in records if _is_damaged(record)
    ]


def _is_damaged(record: Record) -> bool:
    try:
        _read_rows(record)
    except ValueError:
        return True
    return False


def _read_rows(record: Record) -> list[dict[str, str]]:
    """Return the rows of a run's clients.csv; [] if there is none.

    Raises:
        ValueError: it is not a table of clients.
    """
    path = record.folder / CLIENTS
    if not os.path.lexists(path):
        return []
    try:
        if not path.is_file():
            raise ValueError(f"{path} is not a file")
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
        is_table = {"round", "client"} <= {*(reader.fieldnames or ())}
        rows = [row for row in rows if row.get("samples") != "" and "samples" in row]  # others were not evaluated
        is_table &= all(float(row["round"]) >= 0 and float(row["samples"]) > 0 for row in rows)
    except (OSError, KeyError, TypeError, csv.Error) as error:
        raise ValueError(f"{path} is not a table of clients") from error
    if not is_table:
        raise ValueError(f"{path} has no rounds and samples, or a client without any")
    return rows


def _lines(groups: Sequence[Group], metric: Metric) -> list[tuple[str, list[Clients]]]:
    """Return the name of each line and the clients of its runs."""
    lines = []
    for group in groups:
        for end, more in KINDS.items():
            read = [read_clients(curve.record, f"{metric.name}{end}") for curve in group.curves]
            if readable := [clients for clients in read if clients is not None]:
                lines.append((group.label + more, readable))
    return lines


def clients_table(groups: Sequence[Group], metric: Metric) -> Table:
    """Return the statistics over clients of each group, before and after fine-tuning; several seeds as mean ± deviation."""
    kind: Literal["share", "figures"] = "share" if is_accuracy(metric.name) else "figures"
    columns = {"rounds": Column("rounds", "count"), "clients": Column("clients", "count")}
    columns |= {name: Column(title, "share" if name == "jain" else kind) for name, title in SHOWN.items()}
    rows: list[Row] = []
    for label, runs in _lines(groups, metric):
        statistics = [
            {"rounds": run.round + 1, "clients": len(run.values)}
            | _rounded(distribution(run.values.tolist(), run.samples.tolist(), metric.falls))
            for run in runs
        ]
        rows.append(
            ([label], {name: mean_and_spread([run_values.get(name) for run_values in statistics]) for name in columns})
        )
    return table(["method"], columns, rows)


def _rounded(statistics: Mapping[str, float]) -> dict[str, float]:
    """Return statistics rounded to five digits. Clients log in float32, so equal values would otherwise show a tiny spread."""
    return {name: float(f"{value:.5g}") for name, value in statistics.items()}


def draw_clients(groups: Sequence[Group], metric: Metric, look: Look = Look()) -> Figure | None:  # noqa: B008
    """Draw the histogram of the clients' values of each group, dotted after fine-tuning; None if no run has evaluated them."""
    lines = _lines(groups, metric)
    if not lines:
        return None
    pooled = {label: np.concatenate([run.values for run in runs]) for label, runs in lines}
    low, high = min(x.min() for x in pooled.values()), max(x.max() for x in pooled.values())
    margin = 0.0 if high > low else 0.01 * max(1.0, abs(low))  # of the only bar
    edges = np.linspace(low - margin, high + margin, 2 if margin else NUM_BINS + 1)
    order = {group.label: index for index, group in enumerate(groups)}
    with matplotlib.rc_context(look.style):
        figure = Figure(figsize=look.size, layout="constrained")
        axes = figure.subplots()
        drawn: list[bytes] = []
        for label, values in pooled.items():
            is_tuned = label not in order
            style = line_style(order[label.removesuffix(KINDS["_tuned"])]) | ({"linestyle": ":"} if is_tuned else {})
            style = {name: style[name] for name in ("color", "linestyle")}  # steps have no markers
            shares = np.histogram(values, edges)[0] / len(values)
            style |= gaps_over(shares.tobytes(), drawn)
            axes.stairs(shares, edges, label=in_picture(label), linewidth=1.8, **style)
        axes.set_xlabel(f"{in_picture(metric.short)} on a client's own samples")
        axes.set_ylabel("share of clients")
        add_legend(figure, look)
    return figure
