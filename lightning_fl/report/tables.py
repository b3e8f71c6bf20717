"""The tables of a report: what each method reached, the price of a target, and the published numbers beside one's own."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from lightning_fl.outputs.units import BYTES, KINDS, SECONDS, decimals, magnitude, significant, unit_of
from lightning_fl.report.comparison import Group, Metric, mean_and_spread
from lightning_fl.report.document import Table
from lightning_fl.report.labels import SEEDS, differing, is_of_method, setting, shown, telling
from lightning_fl.report.published import PublishedRow, PublishedTable, measured
from lightning_fl.report.published_settings import in_short
from lightning_fl.report.records import SOURCES

Spread = tuple[float | None, float | None, int]
"""Mean, standard deviation and count, as `mean_and_spread` gives them."""
NONE = "–"
MOST_SETTINGS = 8  # in one table
UNITS = {"bytes": BYTES, "seconds": SECONDS}


@dataclass(frozen=True)
class Column:
    """A column of numbers.

    Attributes:
        title: what they are.
        kind: how they are written: `share` with three decimals, `count` whole where they are, `figures` with three significant
            ones, `bytes` and `seconds` so too, in one unit for all such columns of a table.
    """

    title: str
    kind: Literal["share", "count", "figures", "bytes", "seconds"]


COSTS = {
    "rounds": Column("rounds", "count"),
    "uplink": Column("uplink", "bytes"),
    "downlink": Column("downlink", "bytes"),
    "simulated_seconds": Column("simulated time", "seconds"),
    "wall_seconds": Column("time here", "seconds"),
}
SIZES = {"mflops": Column("MFLOPs", "figures"), "parameters": Column("parameters", "count")}
PUBLISHED = {
    "final_accuracy": Column("final accuracy", "share"),
    "simulated_seconds": COSTS["simulated_seconds"],
    "rounds": COSTS["rounds"],
    "uplink_mbit_per_client": Column("Mbit up a client", "figures"),
    "mflops": SIZES["mflops"],
}


def table(
    names: Sequence[str],
    columns: Mapping[str, Column],
    rows: Sequence[tuple[Sequence[str], Mapping[str, Spread | str]]],
    num_texts: int = 1,
) -> Table:
    """A table of words and numbers.

    Args:
        names: titles of the columns of words.
        columns: those of numbers, which stand to their right.
        rows: of each the words, and by column the numbers, or how they are printed elsewhere; what has none is unknown.
        num_texts: how many of the columns of words are set from the left.
    """
    units = {kind: unit_of(_largest(kind, columns, rows), of) for kind, of in UNITS.items()}
    header = [c.title + (f" ({units[c.kind]})" if c.kind in units else "") for c in columns.values()]
    lines = []
    for words, found in rows:
        cells = []
        for name, column in columns.items():
            given = found.get(name, (None, None, 0))
            unit = UNITS[column.kind][units[column.kind]] if column.kind in UNITS else 1.0
            cells.append(given if isinstance(given, str) else _cell(given, column, unit))
        lines.append([*words, *cells])
    return Table([*names, *header], lines, num_texts)


def _largest(
    kind: str, columns: Mapping[str, Column], rows: Sequence[tuple[Sequence[str], Mapping[str, Spread | str]]]
) -> float:
    """The largest number that stands in a column of that kind."""
    cells = [found[name] for _, found in rows for name, of in columns.items() if of.kind == kind and name in found]
    means = [cell[0] for cell in cells if not isinstance(cell, str)]
    return max((mean for mean in means if mean is not None and isfinite(mean)), default=0.0)


def _cell(found: Spread, column: Column, unit: float) -> str:
    """Mean ± standard deviation if there is any, with the decimals of the mean, or those without which it would read as 0."""
    mean, spread, _ = found
    if mean is None:
        return NONE
    if not isfinite(mean):
        return "never"
    mean, spread = mean / unit, None if spread is None else spread / unit
    if column.kind == "share":
        num_decimals = 3
    elif column.kind == "count" or (unit == 1 and column.kind == "bytes"):
        num_decimals = 0 if mean == round(mean) else 1
    else:
        num_decimals = decimals(mean)
    if not spread:
        return _fixed(mean, num_decimals)
    if (
        -magnitude(spread, 1) > num_decimals + 1
    ):  # so small beside the mean that it would take digits which nobody reads
        return f"{_fixed(mean, num_decimals)} ± {significant(spread)}"
    num_decimals = max(num_decimals, -magnitude(spread, 1))
    return f"{_fixed(mean, num_decimals)} ± {_fixed(spread, num_decimals)}"


def _fixed(value: float, num_decimals: int) -> str:
    """With so many decimals, unless that would read as zero or be endless."""
    if value == 0:
        return "0"
    reads_as_zero = round(value, num_decimals) == 0
    return significant(value) if reads_as_zero or not 1e-4 <= abs(value) < 1e15 else f"{value:,.{num_decimals}f}"


def results(groups: Sequence[Group], metric: Metric) -> Table:
    """What each group has reached in all its rounds, and what that took."""
    kind: Literal["share", "figures"] = "share" if "accuracy" in metric.name else "figures"
    columns = {"final": Column(f"final {metric.short}", kind), "last": Column("last", kind), **COSTS, **SIZES}
    rows = [([g.label, str(len(g.curves))], {name: g.spread(name) for name in columns}) for g in groups]
    return table(["method", "runs"], columns, rows)


def prices(groups: Sequence[Group]) -> Table:
    """What each group had spent when it reached the target; the means are over the runs that did."""
    rows = []
    for group in groups:
        found = {name: group.spread(f"target_{name}") for name in COSTS}
        rows.append(([group.label, f"{found['rounds'][2]} of {len(group.curves)}"], found))
    return table(["method", "reached it"], COSTS, rows)


def beside(published: PublishedTable, groups: Sequence[Group]) -> Table:
    """A line for each published row, and one under it for each group whose method, network and settings are nearest to it.

    Only the networks of the groups are shown, if any of them is in the table.
    """
    networks = {group.settings.get("model.network") for group in groups} & {row.network for row in published.rows}
    shown = [row for row in published.rows if not networks or row.network in networks]
    nearest = [(group, published.nearest_rows(group)) for group in groups]
    columns = {name: of for name, of in PUBLISHED.items() if any(name in row.numbers for row in shown)}
    rows: list[tuple[list[str], dict[str, Spread | str]]] = []
    for row in shown:
        target = NONE if row.target is None else f"{row.target:g}"
        setting = ", ".join(filter(None, (row.dataset, row.network, row.setting)))
        rows.append(([row.method, setting, target], _printed(row)))
        rows += [
            ([f"↳ here: {group.label}", in_short(row.differences(group)), target], {**measured(row, group)})
            for group, found in nearest
            if row in found
        ]
    return table(["method", "setting", "target"], columns, rows, num_texts=2)


def _printed(row: PublishedRow) -> dict[str, Spread | str]:
    """A row's numbers, those that are rounded with as many figures as the paper gives them."""
    return {
        name: f"{value:,.10g}" if PUBLISHED[name].kind == "figures" and isfinite(value) else (value, None, 1)
        for name, value in row.numbers.items()
    }


def settings(groups: Sequence[Group]) -> list[Table]:
    """The settings besides the method that are not the same everywhere, and of methods those of their own that no label shows."""
    known = [group for group in groups if "data" in group.settings]
    keys = _outermost([key for key in differing([g.curves[0].record for g in known]) if not is_of_method(key)], known)
    for algorithm in dict.fromkeys(group.algorithm for group in known):
        peers = [group for group in known if group.algorithm == algorithm]
        records = [group.curves[0].record for group in peers]
        own = [key for key in differing(records) if is_of_method(key)]
        told = telling(algorithm, records)
        in_labels = all(setting(r, key) in g.label for key in told for r, g in zip(records, peers, strict=True))
        keys += _outermost([key for key in own if not (in_labels and key in told)], peers)
    keys = list(dict.fromkeys(keys))
    names = [key.partition(".")[2] or key for key in keys]
    return [
        Table(
            ["method", *names[start : start + MOST_SETTINGS]],
            [
                [g.label, *(_with_options(g.settings, key) for key in keys[start : start + MOST_SETTINGS])]
                for g in known
            ],
            num_texts=1 + MOST_SETTINGS,
        )
        for start in range(0, len(keys), MOST_SETTINGS)
    ]


def _outermost(keys: Sequence[str], groups: Sequence[Group]) -> list[str]:
    """Without the settings of a part where the part itself is another: they are said with it."""
    parts = [key for key in keys if len({str(group.settings.get(key)) for group in groups}) > 1]
    return [key for key in keys if not any(key.startswith(f"{part}.") for part in parts)]


def _with_options(given: Mapping[str, Any], key: str) -> str:
    """A value, with the options of the part that it names, such as `Shards(shards_per_client=2)`."""
    if key not in given:
        return NONE
    if key in SOURCES.values():
        return str(given[key])
    options = [f"{name[len(key) + 1 :]}={shown(value)}" for name, value in given.items() if name.startswith(f"{key}.")]
    return shown(given[key]) + (f"({', '.join(options)})" if options else "")


def bytes_by_kind(groups: Sequence[Group]) -> Table:
    """Bytes of the whole run by direction and kind, as means over the runs whose checkpoints know."""
    known = [(group.label, bits) for group in groups if (bits := group.mean_bytes())]
    names = [(way, kind) for way in ("up", "down") for kind in KINDS if any(bits[way][kind] for _, bits in known)]
    columns = {f"{way}: {kind}": Column(f"{way}: {kind}", "bytes") for way, kind in names}
    rows = [
        ([label], {f"{way}: {kind}": mean_and_spread([bits[way][kind]]) for way, kind in names})
        for label, bits in known
    ]
    return table(["method"], columns, rows)


def write_runs(path: Path, groups: Sequence[Group]) -> None:
    """A line for each run with all its numbers: bytes, seconds and values as they are, an empty cell where there is none."""
    curves = [(group.label, curve) for group in groups for curve in group.curves]
    bits = [curve.record.bits or {} for _, curve in curves]
    ways = {"up": "uplink", "down": "downlink"}
    kinds = [(way, kind) for way in ways for kind in KINDS if any(of.get(way, {}).get(kind) for of in bits)]
    rows: list[dict[str, Any]] = [
        {
            "method": label,
            "folder": str(curve.record.folder),
            **{seed: curve.record.settings.get(seed) for seed in SEEDS},
            **{name: _plain(value) for name, value in curve.numbers.items()},
            **{f"{ways[way]}_{kind}": _plain(of[way].get(kind, 0) / 8) if of else None for way, kind in kinds},
        }
        for (label, curve), of in zip(curves, bits, strict=True)
    ]
    _write(path, rows)


def write_curves(path: Path, groups: Sequence[Group], metric: Metric) -> None:
    """A line for each value of each run's curve."""
    axes = list(COSTS)
    rows = [
        {"method": group.label, "folder": str(curve.record.folder), **dict(zip(axes, map(_plain, spent), strict=True))}
        | {metric.name: raw, f"{metric.name} smoothed": smoothed}
        for group in groups
        for curve in group.curves
        for raw, smoothed, *spent in zip(curve.raw, curve.smoothed, *(curve.axis(name) for name in axes), strict=True)
    ]
    _write(path, rows)


def _plain(value: float | None) -> float | int | None:
    """Whole numbers without a point, and nothing for what is not known."""
    if value is None or not isfinite(value):
        return None
    return int(value) if value == round(value) else float(value)


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
