"""Curves on the pages of the methods: keep the runs of the study `every_method`, and draw them at every build of the site.

lightning-fl study every_method
python docs/curves.py runs/studies/every_method
python docs/curves.py traffic    # bytes of each method in both directions, by a rehearsal of its first run
"""

from __future__ import annotations

import csv
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from markup import fenced, markdown
from matplotlib.figure import Figure

from lightning_fl.cli.planned_fit import plan
from lightning_fl.outputs.figures import Look, line_style
from lightning_fl.outputs.units import in_bytes
from lightning_fl.report.comparison import Curve, Group, Metric
from lightning_fl.report.plots import draw_group, is_line, scale_axis
from lightning_fl.report.records import Record, read_run, runs_below
from lightning_fl.study.study_file import read_study

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "configs" / "studies" / "every_method.yaml"
KEPT = ROOT / "docs" / "results" / "every_method.csv"
TRAFFIC = KEPT.with_name("every_method_traffic.csv")
METRIC = Metric("test/accuracy", window=1)
COLUMNS = ("round", "comm/total_uplink_bytes", METRIC.name)
AXES = ("rounds", "uplink")
PANEL = Look(size=(3.4, 2.9), font_size=11)
BASELINE = "FedAvg"
TEXT = """{task}. Mean accuracy on test images over {num_seeds} seeds, with a band of one standard deviation; thin pale lines are
single seeds{others}. {traffic} [The study](#config-studies/every_method) compares all methods. The command of the first seed:"""
ALIKE = 0.001
"""Relative difference up to which two methods send equally many bytes."""


def keep(folder: Path) -> None:
    """Write what the curves need of the runs below a study's folder; methods and seeds that have none there keep their lines."""
    rows = kept_rows()
    for path in runs_below(folder):
        columns = (read_run(path).columns[name] for name in COLUMNS)
        rows[path.parent.name, path.name.split("-")[1]] = [list(row) for row in zip(*columns, strict=True)]
    study = read_study(STUDY)
    with KEPT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("method", "seed", *COLUMNS))
        for method, seed in ((cell.name, str(seed)) for cell in study.cells for seed in study.seeds):
            for number, sent, accuracy in rows.get((method, seed), []):
                writer.writerow((method, seed, int(number), int(sent), f"{accuracy:.4f}"))


def kept_rows() -> dict[tuple[str, str], list[list[float]]]:
    """Return the lines that are kept by method and seed."""
    rows: dict[tuple[str, str], list[list[float]]] = {}
    with KEPT.open(newline="", encoding="utf-8") as file:
        for method, seed, *values in list(csv.reader(file))[1:]:
            rows.setdefault((method, seed), []).append([float(value) for value in values])
    return rows


def plan_traffic() -> None:
    """Write the bytes of each method's first run in both directions, by a rehearsal of the run."""
    study = read_study(STUDY)
    seed = study.seeds[0]
    with TRAFFIC.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("method", "uplink_bytes", "downlink_bytes", "is_fixed"))
        for cell in study.cells:
            costs = plan([*flags_of(cell.arguments), f"--seed_everything={seed}", f"--data.seed={seed}"])
            writer.writerow((cell.name, int(costs.uplink_bytes), int(costs.downlink_bytes), costs.is_fixed))


@cache
def planned_traffic() -> Mapping[str, tuple[int, int, bool]]:
    """Return the planned bytes up and down of each method, and whether they do not depend on what is trained."""
    with TRAFFIC.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    return {method: (int(up), int(down), fixed == "True") for method, up, down, fixed in rows}


def traffic_in_words(method: str) -> str:
    """Return the bytes of a method's first run in both directions, and whether the total turns its order with the baseline."""
    up, down, is_fixed = planned_traffic()[method]
    base_up, base_down, _ = planned_traffic()[BASELINE]
    about = "" if is_fixed else "about "
    said = f"In the first seed's run, all clients together upload {about}{in_bytes(up)} and download {about}{in_bytes(down)}."
    if compared(up, base_up) != compared(up + down, base_up + base_down):
        said += f" So the uplink is {compared(up, base_up)} {BASELINE}'s, but the total traffic is "
        said += f"{compared(up + down, base_up + base_down)} {BASELINE}'s."
    return said


def compared(sent: int, base: int) -> str:
    """Return in words how a count of bytes compares with another."""
    if abs(sent - base) <= ALIKE * base:
        return "as large as"
    return "larger than" if sent > base else "smaller than"


def flags_of(arguments: Sequence[str]) -> list[str]:
    """Return the flags of a cell, each once: a method's flag replaces that of all."""
    return list({word.partition("=")[0]: word for word in arguments}.values())


@cache
def kept_groups() -> Mapping[str, Group]:
    """Return the kept runs by their methods."""
    curves: dict[str, list[Curve]] = {}
    for (method, seed), rows in kept_rows().items():
        columns = dict(zip(COLUMNS, np.array(rows).T, strict=True))
        curves.setdefault(method, []).append(Curve(Record(Path(method, seed), columns, {}, method, None, ()), METRIC))
    return {method: Group(method, tuple(of)) for method, of in curves.items()}


def curve_block(method: str) -> str:
    """Return the picture of a method, what it shows, and the command whose run it shows."""
    study = read_study(STUDY)
    (cell,) = (cell for cell in study.cells if cell.name == method)
    task = STUDY.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# Every method on ").rstrip(".")
    others = "" if method == BASELINE else f"; {BASELINE} in grey"
    text = TEXT.format(
        task=markdown(task[0].upper() + task[1:]),
        num_seeds=len(kept_groups()[method].curves),
        others=others,
        traffic=traffic_in_words(method),
    )
    command = " \\\n  ".join(["lightning-fl fit", *map(shlex.quote, flags_of(cell.arguments))])
    return f"![Accuracy of {method} by rounds and by uplink bytes]({method}.svg)\n\n{text}\n\n{fenced(command, 'bash')}"


def draw(method: str) -> str:
    """Return the picture of a method as SVG: its curve by rounds and by bytes, with the baseline's behind it."""
    shown = [kept_groups()[name] for name in dict.fromkeys((BASELINE, method))]
    drawn = StringIO()
    with mpl.rc_context({**PANEL.style, "svg.hashsalt": method}):
        figure = Figure(figsize=(2 * PANEL.size[0], PANEL.size[1]), layout="constrained")
        for axes, axis in zip(figure.subplots(1, 2, sharey=True), AXES, strict=True):
            spent = np.concatenate([curve.axis(axis) for group in shown for curve in group.curves])
            unit = scale_axis(axes, axis, spent, PANEL)
            for group in shown:
                style, as_line = style_of(group.label, method), is_line(group, shown, axis)
                draw_group(axes, group, axis, unit, style, as_line)
            axes.set(ylim=(0, 1), ylabel=METRIC.short if axis == AXES[0] else "")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return re.sub(r"(\.\d)\d+", r"\1", drawn.getvalue())  # tenths of a point are fine enough


def style_of(name: str, method: str) -> dict[str, Any]:
    """Return colour and dashes of a line."""
    return line_style(0) if name == method else {"color": "0.5", "linestyle": "-"}


def main(arguments: Sequence[str]) -> None:
    """Keep the runs below the folder of a study, or plan the traffic."""
    (what,) = arguments
    if what == "traffic":
        plan_traffic()
    else:
        keep(Path(what))


if __name__ == "__main__":
    main(sys.argv[1:])
