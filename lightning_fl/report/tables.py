"""The tables of a report: what each method reached, the price of a target, and the published numbers beside one's own."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_fl.quantities import in_bytes
from lightning_fl.report.comparison import SEEDS, Group, Metric, mean_and_spread
from lightning_fl.report.document import Table
from lightning_fl.report.published import PublishedRow, PublishedTable, measured
from lightning_fl.slots import KINDS

Format = Callable[[float], str]
NONE = "–"


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def _three(value: float) -> str:
    return f"{value:.3f}"


def _two(value: float) -> str:
    return f"{value:,.2f}"


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:,.1f} s"


COSTS: dict[str, tuple[str, Format]] = {
    "rounds": ("rounds", _whole),
    "uplink": ("uplink", in_bytes),
    "downlink": ("downlink", in_bytes),
    "simulated_seconds": ("simulated time", _seconds),
    "wall_seconds": ("time here", _seconds),
}
SIZES: dict[str, tuple[str, Format]] = {"mflops": ("MFLOPs", _two), "parameters": ("parameters", _whole)}
PUBLISHED: dict[str, tuple[str, Format]] = {
    "final_accuracy": ("final accuracy", _three),
    "simulated_seconds": ("simulated time", _seconds),
    "rounds": ("rounds", _whole),
    "uplink_mbit_per_client": ("Mbit up a client", _two),
    "mflops": ("MFLOPs", _two),
}


def _cell(found: tuple[float | None, float | None, int], form: Format) -> str:
    """Mean ± standard deviation."""
    mean, spread, _ = found
    if mean is None:
        return NONE
    if mean == float("inf"):
        return "never"
    return form(mean) if spread is None else f"{form(mean)} ± {form(spread)}"


def results(groups: Sequence[Group], metric: Metric) -> Table:
    """What each group has reached in all its rounds, and what that took."""
    columns = {"final": (f"final {metric.short}", _three), "last": ("last", _three), **COSTS, **SIZES}
    return Table(
        ["method", "runs", *(title for title, _ in columns.values())],
        [
            [g.label, str(len(g.curves)), *(_cell(g.spread(name), form) for name, (_, form) in columns.items())]
            for g in groups
        ],
    )


def prices(groups: Sequence[Group]) -> Table:
    """What each group had spent when it reached the target; the means are over the runs that did."""
    rows = []
    for group in groups:
        count = group.spread("target_rounds")[2]
        cells = [_cell(group.spread(f"target_{name}"), form) for name, (_, form) in COSTS.items()]
        rows.append([group.label, f"{count} of {len(group.curves)}", *cells])
    return Table(["method", "reached it", *(title for title, _ in COSTS.values())], rows)


def beside(published: PublishedTable, groups: Sequence[Group]) -> Table:
    """A line for each published row, and one under it for each group that is of its method and setting.

    Only the networks and data sets of the groups are shown, if any of them is in the table.
    """
    networks = {str(g.settings.get("model.network")) for g in groups} & {row.network for row in published.rows}
    rows = [row for row in published.rows if not networks or row.network in networks]
    columns = {name: of for name, of in PUBLISHED.items() if any(name in row.numbers for row in rows)}
    header = ["method", "setting", "target", *(title for title, _ in columns.values())]
    return Table(header, [line for row in rows for line in _lines(row, groups, columns)])


def _lines(row: PublishedRow, groups: Sequence[Group], columns: dict[str, tuple[str, Format]]) -> Iterable[list[str]]:
    setting = ", ".join(filter(None, (row.dataset, row.network, row.setting)))
    target = NONE if row.target is None else f"{row.target:g}"
    printed = {name: mean_and_spread([row.numbers.get(name)]) for name in columns}
    yield [row.method, setting, target, *(_cell(printed[name], form) for name, (_, form) in columns.items())]
    for group in groups:
        if row.is_of(group):
            own = measured(row, group)
            cells = [_cell(own[name], form) if name in own else NONE for name, (_, form) in columns.items()]
            yield [f"  here: {group.label}", f"{group.curves[0].record.num_rounds} rounds", target, *cells]


def bytes_by_kind(groups: Sequence[Group]) -> Table:
    """Bytes of the whole run by direction and kind, as means over the runs whose checkpoints know."""
    known = [(group.label, bits) for group in groups if (bits := group.mean_bytes())]
    columns = [(way, kind) for way in ("up", "down") for kind in KINDS if any(bits[way][kind] for _, bits in known)]
    header = ["method", *(f"{way}: {kind}" for way, kind in columns)]
    return Table(header, [[label, *(_whole(bits[way][kind]) for way, kind in columns)] for label, bits in known])


def write_runs(path: Path, groups: Sequence[Group]) -> None:
    """A line for each run with all its numbers: bytes, seconds and values as they are, an empty cell where there is none."""
    rows: list[dict[str, Any]] = [
        {
            "method": group.label,
            "folder": str(curve.record.folder),
            **{seed: curve.record.settings.get(seed) for seed in SEEDS},
            **curve.numbers,
        }
        for group in groups
        for curve in group.curves
    ]
    _write(path, rows)


def write_curves(path: Path, groups: Sequence[Group], metric: Metric) -> None:
    """A line for each value of each run's curve."""
    axes = list(COSTS)
    rows = [
        {"method": group.label, "folder": str(curve.record.folder), **dict(zip(axes, spent, strict=True))}
        | {metric.name: raw, f"{metric.name} smoothed": smoothed}
        for group in groups
        for curve in group.curves
        for raw, smoothed, *spent in zip(curve.raw, curve.smoothed, *(curve.axis(name) for name in axes), strict=True)
    ]
    _write(path, rows)


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
