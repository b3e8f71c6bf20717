"""Attacks in a report: the attackers' success, and the final metric against their share of the clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from lightning_fl.outputs.figures import Look, in_picture, line_style
from lightning_fl.report.comparison import Curve, Group, Metric, mean_and_spread
from lightning_fl.report.document import Part, Picture, Table
from lightning_fl.report.labels import experiment_settings, labels
from lightning_fl.report.layout import add_legend
from lightning_fl.report.plots import gaps_over
from lightning_fl.report.records import Record
from lightning_fl.report.tables import Column, Row, table

ADVERSARY, SHARE = "trainer.adversary", "trainer.adversary.attackers"
ATTACKERS, SUCCESS, KEPT = "attack/attackers", "attack/success", "robust/attackers_kept"
"""Columns of metrics.csv."""
ABOUT = (
    "`attackers` is the attackers' share of the answers, and `weight` their share of the weight in the aggregate; both are means "
    "over the rounds. `success` is the share of other classes' validation samples that the last model classifies as the "
    "attackers' target."
)


def attack_parts(groups: Sequence[Group], metric: Metric, look: Look) -> list[Part]:
    """Return the table and the picture of attacks; [] if no client attacked in any run."""
    attacked = [group for group in groups if any(_mean(curve, ATTACKERS) is not None for curve in group.curves)]
    if not attacked:
        return []
    parts: list[Part] = [ABOUT, attacks_table(attacked, metric)]
    if figure := draw_shares(groups, metric, look):
        caption = f"Final {metric.short} against the share of attackers"
        parts.append(Picture(f"{metric.short.replace(' ', '_')}_by_attackers", caption, figure, look))
    return parts


def attacks_table(groups: Sequence[Group], metric: Metric) -> Table:
    """Return a row for each group whose clients attacked, several seeds as mean ± deviation."""
    columns = {
        "final": Column(f"final {metric.short}", "share"),
        "success": Column("success", "share"),
        "attackers": Column("attackers", "share"),
        "kept": Column("weight", "share"),
    }
    rows: list[Row] = [
        (
            [group.label, str(group.settings.get(f"{ADVERSARY}.attack", "?"))],
            {
                "final": group.spread("final"),
                "success": mean_and_spread([_last(curve, SUCCESS) for curve in group.curves]),
                "attackers": mean_and_spread([attacking(curve) for curve in group.curves]),
                "kept": mean_and_spread([_mean(curve, KEPT) for curve in group.curves]),
            },
        )
        for group in groups
    ]
    return table(["method", "attack"], columns, rows, num_texts=2)


def draw_shares(groups: Sequence[Group], metric: Metric, look: Look) -> Figure | None:
    """Draw the final metric of runs that differ only in the share of attackers; None if no attack has two shares.

    Runs without an adversary count as share 0 of every attack.
    """
    lines: dict[tuple[Any, ...], list[Group]] = {}
    for group in groups:
        if _share(group) is not None:
            lines.setdefault(_but(group.settings, SHARE), []).append(group)
    clean = {_but(group.settings, ADVERSARY): group for group in groups if f"{ADVERSARY}.attack" not in group.settings}
    points: list[tuple[Record, list[tuple[float, float]]]] = []
    for members in lines.values():
        without = clean.get(_but(members[0].settings, ADVERSARY))
        places = [(_share(group) or 0.0, group) for group in members] + ([] if without is None else [(0.0, without)])
        if len({place for place, _ in places}) > 1:
            finals = [(place, group.spread("final")[0]) for place, group in places]
            values = sorted((place, final) for place, final in finals if final is not None)  # others have diverged
            if len({place for place, _ in values}) > 1:
                points.append((_without_share(members[0]), values))
    if not points:
        return None
    with matplotlib.rc_context(look.style):
        figure = Figure(figsize=look.size, layout="constrained")
        axes = figure.subplots()
        drawn: list[bytes] = []
        for index, (label, (_, values)) in enumerate(zip(labels([first for first, _ in points]), points, strict=True)):
            line = np.array(values)
            style = line_style(index) | gaps_over(line.tobytes(), drawn) | {"marker": "o"}
            axes.plot(*line.T, label=in_picture(label), linewidth=1.8, **style)
        axes.set_xlabel("share of attackers")
        axes.set_ylabel(in_picture(f"final {metric.short}" if look.ylabel is None else look.ylabel))
        add_legend(figure, look)
    return figure


def attacking(curve: Curve) -> float | None:
    """Return the share of attackers among the clients that answered, over all rounds; None if it is unknown."""
    record = curve.record
    answers = record.column("clients/accepted") + record.column("clients/rejected")
    shares = record.column(ATTACKERS) / np.where(answers > 0, answers, np.nan)
    return None if np.isnan(shares).all() else float(np.nanmean(shares))


def _without_share(group: Group) -> Record:
    """Return a group's first run without the setting that differs along its line."""
    record = group.curves[0].record
    return replace(record, settings={key: value for key, value in record.settings.items() if key != SHARE})


def _share(group: Group) -> float | None:
    """Return the share of attackers that a group's configuration names; None if it lists clients or has no adversary."""
    share = group.settings.get(SHARE)
    return float(share) if isinstance(share, int | float) else None


def _but(settings: Mapping[str, Any], left_out: str) -> tuple[Any, ...]:
    """Return a key that is equal for runs that differ only in the setting left out."""
    chosen = experiment_settings(settings).items()
    return tuple(sorted((key, str(value)) for key, value in chosen if not f"{key}.".startswith(f"{left_out}.")))


def _mean(curve: Curve, name: str) -> float | None:
    values = curve.record.column(name)
    return None if np.isnan(values).all() else float(np.nanmean(values))


def _last(curve: Curve, name: str) -> float | None:
    values = curve.record.column(name)
    measured = values[~np.isnan(values)]
    return float(measured[-1]) if len(measured) else None
