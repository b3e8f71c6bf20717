"""LaTeX table of a report's results, for the package booktabs: mean and deviation over seeds, the best in bold.

The best mean is in bold, and so is every mean whose deviation overlaps with the best one's: the runs do not distinguish them.
If all overlap, none is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from lightning_fl.outputs.figures import in_picture
from lightning_fl.outputs.metric import is_accuracy
from lightning_fl.outputs.units import counted
from lightning_fl.report.comparison import VALUES, Group, Metric
from lightning_fl.report.document import on_one_line
from lightning_fl.report.rendering import rendered
from lightning_fl.report.tables import COSTS, Column, Spread, averaged_values, table

SPECIAL = {
    **{character: f"\\{character}" for character in "&%#_{}"},
    "\\": r"\textbackslash{}",
    "$": r"\$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "−": r"$-$",
    "×": r"$\times$",
    "µ": r"\textmu{}",
    "–": "--",
    "…": r"\ldots{}",
}
FORMULA = re.compile(r"((?<!\\)\$.+?(?<!\\)\$)")


def results(groups: Sequence[Group], metric: Metric, comments: Sequence[str]) -> str:
    """Return a table with a row for each group: its values, and the cost of the run or of the target.

    Args:
        groups: rows of the table.
        metric: metric of the values. If it has a target, the table has the costs of reaching it, not the costs of the whole run.
        comments: lines on the origin of the numbers, for comments at the top.
    """
    columns = _columns(groups, metric)
    spreads = [{name: group.spread(name) for name in columns} for group in groups]
    shown = table(["method"], columns, [([group.label], of) for group, of in zip(groups, spreads, strict=True)])
    cells = [list(row) for row in shown.rows]
    compete = _compete(groups)
    for place, name in enumerate(columns, 1):
        column = [row[place] for row in cells]
        counts = [of[name][2] for of in spreads]
        whole = [count == len(group.curves) for count, group in zip(counts, groups, strict=True)]
        known = [of[name] if is_whole else (None, None, 0) for of, is_whole in zip(spreads, whole, strict=True)]
        is_best = _best(known, column, compete, falls=name not in VALUES or metric.falls)
        for row, group, count, bold in zip(cells, groups, counts, is_best, strict=True):
            text = escaped(row[place])
            if 0 < count < len(group.curves):
                text += f" ({count} of {len(group.curves)})"
            row[place] = rf"\textbf{{{text}}}" if bold else text
    return rendered(
        "results.tex",
        comments=[on_one_line(line) for line in [*comments, *_how(groups, metric)]],
        header=[_heading(title) for title in shown.header],
        costs=[place for place, name in enumerate(columns, 2) if name.startswith("target_")],
        target="" if metric.target is None else escaped(f"to {metric.short} {metric.target:g}".replace("_", " ")),
        rows=[([escaped(row[0]), *row[1:]], group.is_bound) for row, group in zip(cells, groups, strict=True)],
    )


def _columns(groups: Sequence[Group], metric: Metric) -> dict[str, Column]:
    """Return the columns of numbers that some group has."""
    kind: Literal["share", "figures"] = "share" if is_accuracy(metric.name) else "figures"
    columns = {"final": Column(metric.short, kind), "at_best_validation": Column(VALUES["at_best_validation"], kind)}
    if metric.target is None:
        columns |= {
            name: COSTS[name] for name in dict.fromkeys(("uplink", "downlink", metric.bytes, "simulated_seconds"))
        }
    else:
        columns |= {f"target_{name}": COSTS[name] for name in ("rounds", metric.bytes, "simulated_seconds")}
    is_known: Callable[[str], bool] = lambda name: any(group.spread(name)[2] for group in groups)  # noqa: E731
    return {name: column for name, column in columns.items() if is_known(name)}


def _compete(groups: Sequence[Group]) -> list[bool]:
    """Return True for each group that may be the best: every group that uploads something, or every group if none does."""
    return [all(other.is_bound for other in groups) or not group.is_bound for group in groups]


def _best(cells: Sequence[Spread], shown: Sequence[str], compete: Sequence[bool], falls: bool) -> list[bool]:
    """Return True for each competing cell that shows the same mean as the best one, or whose deviation overlaps with it.

    If there is only one cell, or all are equally good, all are False.
    """
    texts = [text.partition(" ± ")[0] for text in shown]
    sign = -1 if falls else 1
    known = {
        place: (sign * mean, deviation or 0.0)
        for place, (mean, deviation, _) in enumerate(cells)
        if mean is not None and compete[place]
    }
    if not known:
        return [False for _ in cells]
    best = max(known, key=lambda place: known[place][0])
    least = known[best][0] - known[best][1]
    is_best = [
        place in known and (text == texts[best] or sum(known[place]) >= least) for place, text in enumerate(texts)
    ]
    return [each and sum(is_best) < sum(compete) for each in is_best]


def _how(groups: Sequence[Group], metric: Metric) -> list[str]:
    """Return lines that explain the table."""
    counts = sorted({len(group.curves) for group in groups})
    runs = " to ".join(f"{count}" for count in dict.fromkeys((counts[0], counts[-1])))
    curves = [curve for group in groups for curve in group.curves]
    best = (
        f"in bold, unless {'all are equal' if counts == [1] else 'all overlap'}"
        + "; methods without uploads are not compared" * (not all(_compete(groups)))
    )
    values = f"{metric.short}: {averaged_values(curves)}"
    lines = [
        f"{values} of a run; mean and sample standard deviation over {runs} runs with different seeds. The best mean, and means "
        f"whose deviation overlaps with its deviation, are {best}."
        if counts != [1]
        else f"{values} of the only run; the best is {best}.",
        r"Needs \usepackage{booktabs}.",
    ]
    if metric.target is not None:
        lines.insert(1, f"Costs until a run first reaches {metric.target:g} ({counted(len(curves), 'run')}).")
    return lines


def _heading(title: str) -> str:
    return escaped(title[:1].upper() + title[1:].replace("_", " "))


def escaped(text: str) -> str:
    r"""Return a text for LaTeX, with the formulas that pictures show.

    >>> escaped("FedAdam_SSM 10 %"), escaped("0.93 ± 0.01"), escaped(r"$\mu$ = 0.1"), escaped("5 $")
    ('FedAdam\\_SSM 10 \\%', '0.93 $\\pm$ 0.01', '$\\mu$ = 0.1', '5 \\$')
    """
    text = on_one_line(text)
    parts = FORMULA.split(text) if r"\$" not in in_picture(text) else [text]
    return "".join(
        part if position % 2 else "".join(SPECIAL.get(each, each) for each in part)
        for position, part in enumerate(parts)
    )
