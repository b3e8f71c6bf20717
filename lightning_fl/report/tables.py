"""Tables of a report: results of each method, cost of a target, and published numbers next to your own."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from lightning_fl.outputs.csv_cells import as_cell
from lightning_fl.outputs.metric import is_accuracy
from lightning_fl.outputs.neighbours import KINDS_OF_EPSILON
from lightning_fl.outputs.traffic import COSTS as BYTES_OF
from lightning_fl.outputs.traffic import in_words
from lightning_fl.outputs.units import BYTES, JOULES, SECONDS, common_unit, decimals, in_bytes, magnitude, significant
from lightning_fl.report.comparison import VALUES, Curve, Group, Metric
from lightning_fl.report.document import Table
from lightning_fl.report.labels import SEEDS, differing, is_of_method, shown
from lightning_fl.report.published import PublishedRow, PublishedTable, measured
from lightning_fl.report.published_settings import in_short
from lightning_fl.report.records import SOURCES

Spread = tuple[float | None, float | None, int]
"""Mean, standard deviation and count, as `mean_and_spread` returns them."""
Row = tuple[Sequence[str], Mapping[str, Spread | str]]
"""Words of a row, and its numbers by column, or their text; a number that is missing is unknown."""
NONE = "–"
TOTAL = BYTES_OF["total"]
MOST_NAMES = 8
CLEARLY = 1.1
"""Least ratio at which one method clearly needs more bytes than another."""
MOST_SETTINGS = 8  # columns of one table
UNITS = {"bytes": BYTES, "seconds": SECONDS, "joules": JOULES}


@dataclass(frozen=True)
class Column:
    """Column of numbers.

    Attributes:
        title: heading of the column.
        kind: format of the numbers: `share` with three decimals, `count` without decimals if whole, `figures` with three
            significant figures, `bytes`, `seconds` and `joules` likewise, in one unit for all such columns of a table.
    """

    title: str
    kind: Literal["share", "count", "figures", "bytes", "seconds", "joules"]


COSTS = {
    "rounds": Column("rounds", "count"),
    "uplink": Column("uplink", "bytes"),
    "downlink": Column("downlink", "bytes"),
    "total_traffic": Column("total traffic", "bytes"),
    "simulated_seconds": Column("simulated time", "seconds"),
    "joules": Column("estimated energy", "joules"),
    "wall_seconds": Column("wall time", "seconds"),
    **{name: Column(f"ε ({neighbours})", "figures") for name, neighbours in KINDS_OF_EPSILON.items()},
}
SIZES = {"mflops": Column("MFLOPs", "figures"), "parameters": Column("parameters", "count")}
PUBLISHED = {
    "final_accuracy": Column(VALUES["best"], "share"),
    "simulated_seconds": COSTS["simulated_seconds"],
    "rounds": COSTS["rounds"],
    "uplink_mbit_per_client": Column("uplink Mbit per client", "figures"),
    "mflops": SIZES["mflops"],
}


def table(names: Sequence[str], columns: Mapping[str, Column], rows: Sequence[Row], num_texts: int = 1) -> Table:
    """Return a table of words and numbers, without the columns in which no row has a number.

    Args:
        names: titles of the columns of words.
        columns: columns of numbers, to the right of the words.
        rows: rows of the table.
        num_texts: number of columns of words that are aligned left.
    """
    columns = {name: of for name, of in columns.items() if any(_is_known(row.get(name)) for _, row in rows)}
    units = {kind: common_unit(_means(kind, columns, rows), of) for kind, of in UNITS.items()}
    header = [c.title + (f" ({units[c.kind]})" if c.kind in units else "") for c in columns.values()]
    lines = []
    for words, row in rows:
        cells = []
        for name, column in columns.items():
            cell = row.get(name, (None, None, 0))
            unit = UNITS[column.kind][units[column.kind]] if column.kind in UNITS else 1.0
            cells.append(cell if isinstance(cell, str) else _cell(cell, column, unit))
        lines.append([*words, *cells])
    return Table([*names, *header], lines, num_texts)


def _is_known(cell: Spread | str | None) -> bool:
    """True if a row has a number, or its text, in a column."""
    return cell is not None and (isinstance(cell, str) or cell[0] is not None)


def _means(kind: str, columns: Mapping[str, Column], rows: Sequence[Row]) -> list[float]:
    """Return the means in the columns of a kind."""
    cells = [row[name] for _, row in rows for name, of in columns.items() if of.kind == kind and name in row]
    return [cell[0] for cell in cells if not isinstance(cell, str) and cell[0] is not None]


def _cell(cell: Spread, column: Column, unit: float) -> str:
    """Return mean ± standard deviation, if any, with the decimals of the mean, or one more if the deviation would read as 0."""
    mean, spread, _ = cell
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
    if -magnitude(spread, 1) == num_decimals + 1:
        num_decimals += 1
    if round(spread, num_decimals) == 0 and abs(mean) >= 1e-4:  # its decimals would give the mean too many digits
        return f"{_fixed(mean, num_decimals)} ± <{10.0**-num_decimals:.{num_decimals}f}"
    return f"{_fixed(mean, num_decimals)} ± {_fixed(spread, num_decimals)}"


def _fixed(value: float, num_decimals: int) -> str:
    """Return a value with this number of decimals, unless it would read as zero or be too long."""
    if value == 0:
        return "0"
    reads_as_zero = round(value, num_decimals) == 0
    return significant(value) if reads_as_zero or not 1e-4 <= abs(value) < 1e15 else f"{value:,.{num_decimals}f}"


def results(groups: Sequence[Group], metric: Metric) -> Table:
    """Return the results of each group over all its rounds, and their cost."""
    kind: Literal["share", "figures"] = "share" if is_accuracy(metric.name) else "figures"
    curves = [curve for group in groups for curve in group.curves]
    columns = {
        "final": Column(f"{VALUES['final']} {metric.short} ({averaged_values(curves)})", kind),
        "last": Column(VALUES["last"], kind),
        "best": Column(VALUES["best"] if any(curve.is_smoothed for curve in curves) else "best", kind),
    }
    if tested := next((curve.tested for curve in curves if curve.tested), None):
        columns["at_best_validation"] = Column(f"{Metric(tested).short} {VALUES['at_best_validation']}", kind)
    columns |= _costs(groups, metric) | SIZES
    rows = [([g.label, str(len(g.curves))], {name: g.spread(name) for name in columns}) for g in groups]
    return table(["method", "runs"], columns, rows)


def _costs(groups: Sequence[Group], metric: Metric, prefix: str = "") -> dict[str, Column]:
    """Return the columns of costs, with total traffic only if it is requested or if it reverses the order of two groups."""
    shows_total = metric.bytes == TOTAL or _turned(groups, metric.bytes, TOTAL, prefix)
    return {name: column for name, column in COSTS.items() if name != TOTAL or shows_total}


def other_orders(groups: Sequence[Group], metric: Metric) -> list[str]:
    """Return a remark if the bytes of another direction than the metric's give the groups another order; [] otherwise."""
    prefix, what = ("", "of the whole run") if metric.target is None else ("target_", f"to {metric.target:g}")
    ways = ("up", "down") if metric.bytes == TOTAL else ("total",)
    said = []
    for way in ways:
        if _turned(groups, metric.bytes, BYTES_OF[way], prefix):
            means = [(group.spread(prefix + BYTES_OF[way])[0], group.label) for group in groups]
            costs = sorted((mean, label) for mean, label in means if mean is not None)
            more = f" and {len(costs) - MOST_NAMES} more" * (len(costs) > MOST_NAMES)
            said.append(
                f"The {in_words(way)} {what} gives another order than the {in_words(metric.traffic)}: "
                f"{', '.join(f'{label} {in_bytes(mean)}' for mean, label in costs[:MOST_NAMES])}{more}. "
                f"`--traffic {way}` compares by it."
            )
    return said


def _turned(groups: Sequence[Group], cost: str, other: str, prefix: str) -> bool:
    """True if one group has clearly less of a cost than another one, and clearly more of the other cost."""
    pairs = [
        (group.spread(prefix + cost)[0], group.spread(prefix + other)[0]) for group in groups if not group.is_bound
    ]
    known = [(first, second) for first, second in pairs if first is not None and second is not None]
    return any(a * CLEARLY < c and b > CLEARLY * d for a, b in known for c, d in known)


def averaged_values(curves: Sequence[Curve]) -> str:
    """Return the number of values that `final` averages, in words."""
    counts = sorted({curve.num_final for curve in curves})
    if counts == [1]:
        return "the last value"
    return f"mean of the last {' to '.join(dict.fromkeys((str(counts[0]), str(counts[-1]))))}"


def prices(groups: Sequence[Group], metric: Metric) -> Table:
    """Return the cost of reaching the target for each group, as means over the runs that did."""
    rows = []
    for group in groups:
        spreads = {name: group.spread(f"target_{name}") for name in COSTS}
        rows.append(([group.label, f"{spreads['rounds'][2]} of {len(group.curves)}"], spreads))
    return table(["method", "reached it"], _costs(groups, metric, "target_"), rows)


def beside(published: PublishedTable, groups: Sequence[Group]) -> Table:
    """Return a line for each published row, followed by the groups whose method, network and settings are nearest to it.

    If the published table has networks of the groups, only these are shown.
    """
    networks = {str(group.settings.get("model.network")) for group in groups} & {row.network for row in published.rows}
    shown = [row for row in published.rows if not networks or row.network in networks]
    nearest = [(group, published.nearest_rows(group)) for group in groups]
    columns = {name: of for name, of in PUBLISHED.items() if any(name in row.numbers for row in shown)}
    rows: list[Row] = []
    for row in shown:
        target = NONE if row.target is None else f"{row.target:g}"
        setting = ", ".join(filter(None, (row.dataset, row.network, row.setting)))
        rows.append(([row.method, setting, target], _printed(row)))
        rows += [
            ([f"↳ here: {group.label}", in_short(row.differences(group)), target], {**measured(row, group)})
            for group, nearest_rows in nearest
            if row in nearest_rows
        ]
    return table(["method", "setting", "target"], columns, rows, num_texts=2)


def _printed(row: PublishedRow) -> dict[str, Spread | str]:
    """Return a row's numbers; numbers of kind `figures` keep all the digits that the paper prints."""
    return {
        name: f"{value:,.10g}" if PUBLISHED[name].kind == "figures" and isfinite(value) else (value, None, 1)
        for name, value in row.numbers.items()
    }


def settings(groups: Sequence[Group]) -> list[Table]:
    """Return the settings that differ between the runs; a method's own only if they differ between this method's runs.

    The method is a column if some label does not name it, such as the label of a combination in a study.
    """
    with_settings = [group for group in groups if "data" in group.settings]
    keys = [key for key in _outermost(with_settings) if not is_of_method(key)]
    for algorithm in dict.fromkeys(group.algorithm for group in with_settings):
        keys += filter(is_of_method, _outermost([group for group in with_settings if group.algorithm == algorithm]))
    keys = list(dict.fromkeys(keys))
    methods = {group.algorithm for group in with_settings}
    if len(methods) > 1 and any(group.algorithm not in group.label for group in with_settings):
        keys.insert(0, "algorithm")
    pages = [keys[start : start + MOST_SETTINGS] for start in range(0, len(keys), MOST_SETTINGS)]
    return [
        Table(
            ["method", *(key.partition(".")[2] or key for key in page)],
            [[group.label, *(_shown_setting(group, key) for key in page)] for group in with_settings],
            num_texts=1 + len(page),
        )
        for page in pages
    ]


def _outermost(groups: Sequence[Group]) -> list[str]:
    """Return the settings that differ, without the options of a part that itself differs, which are shown with the part."""
    keys = differing([group.curves[0].record for group in groups])
    return [key for key in keys if not any(key.startswith(f"{part}.") for part in keys)]


def _shown_setting(group: Group, key: str) -> str:
    """Return the name of a group's method, or the value of one of its settings with its options."""
    return group.algorithm if key == "algorithm" else _with_options(group.settings, key)


def _with_options(values: Mapping[str, Any], key: str) -> str:
    """Return a value with the options of the part that it names, such as `Shards(shards_per_client=2)`.

    A number that a search has drawn has four significant figures; the commands beside the table have all.
    """
    if key not in values:
        return NONE
    if key in SOURCES.values():
        return str(values[key])
    options = [f"{name[len(key) + 1 :]}={shown(value)}" for name, value in values.items() if name.startswith(f"{key}.")]
    return shown(values[key]) + (f"({', '.join(options)})" if options else "")


def bytes_by_kind(groups: Sequence[Group]) -> Table:
    """Return bytes of the whole run by direction and kind, as means over the runs that recorded them."""
    recorded = [(group.label, bits) for group in groups if (bits := group.mean_bytes())]
    columns = {
        f"{way}: {kind}": Column(f"{way}: {kind}", "bytes")
        for way, kind in recorded[0][1]
        if any(bits[way, kind] for _, bits in recorded)
    }
    rows: list[Row] = [
        ([label], {f"{way}: {kind}": (value, None, 1) for (way, kind), value in bits.items()})
        for label, bits in recorded
    ]
    return table(["method"], columns, rows)


def write_runs(path: Path, groups: Sequence[Group]) -> None:
    """Write a line for each run with all its numbers: bytes, seconds and values in full, an empty cell for unknown ones."""
    rows = []
    for label, curve in _curves(groups):
        record = curve.record
        row = {"method": label, "folder": str(record.folder), **{seed: record.settings.get(seed) for seed in SEEDS}}
        rows.append({**row, **curve.numbers, **{f"{way}link_{kind}": n for (way, kind), n in record.bytes.items()}})
    _write(path, rows)


def write_curves(path: Path, groups: Sequence[Group], metric: Metric) -> None:
    """Write a line for each value of each run's curve."""
    curves = [curve for _, curve in _curves(groups)]
    costs = [name for name in COSTS if any(name in curve.record.spent for curve in curves)]
    names = [*costs, metric.name, f"{metric.name} smoothed"]
    rows: list[dict[str, Any]] = []
    for label, curve in _curves(groups):
        line = {"method": label, "folder": str(curve.record.folder)}
        columns = [*(curve.axis(name) for name in costs), curve.raw, curve.smoothed]
        rows += [line | dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    _write(path, rows)


def _curves(groups: Sequence[Group]) -> list[tuple[str, Curve]]:
    """Return the curves of all groups with the groups' labels."""
    return [(group.label, curve) for group in groups for curve in group.curves]


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to a CSV file; cells are empty where a row has no value."""
    with path.open("w", newline="", encoding="utf-8", errors="replace") as file:
        names = dict.fromkeys(name for row in rows for name in row)
        writer = csv.writer(file)
        writer.writerow(map(as_cell, names))
        writer.writerows([as_cell(_plain(row.get(name, ""))) for name in names] for row in rows)


def _plain(value: Any) -> Any:
    """Return a whole number as int, None for a number that is not finite, and any other value unchanged."""
    if not isinstance(value, float):
        return value
    return None if not isfinite(value) else int(value) if value.is_integer() else float(value)
