"""Pictures of the results about clients: draw them from the runs that are kept.

python docs/client_figures.py
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_fl.outputs.clients.distribution import distribution
from lightning_fl.outputs.figures import COLOURS, Look, line_style
from lightning_fl.report.clients import Clients, read_clients
from lightning_fl.report.comparison import Curve, Group, Metric
from lightning_fl.report.plots import draw_group, scale_axis
from lightning_fl.report.records import Record, read_run
from lightning_fl.study.study_file import read_study

ROOT = Path(__file__).parents[1]
RUNS, IMAGES = ROOT / "docs" / "results" / "runs", ROOT / "docs" / "images"
ACCURACY = "val/accuracy"
TURNS = 4
"""Angles of `Rotation`; client k has angle k mod 4."""
PANEL = Look(size=(3.7, 3.2), font_size=10)


def kept_runs(study: str, folder: Path) -> dict[str, list[Record]]:
    """Unpack the runs of a study and return them by method, in the order of the study file, without the repeats of its floor."""
    with tarfile.open(RUNS / f"{study}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    file = read_study(ROOT / "configs" / "studies" / f"{study}.yaml")
    names = [cell.name for cell in file.cells if cell.name not in {again for _, again in file.floor}]
    found = {
        name: [read_run(path.parent) for path in sorted(folder.glob(f"{study}/{name}/*/metrics.csv"))] for name in names
    }
    return {name: records for name, records in found.items() if records}


def clients_of(records: Sequence[Record], column: str = ACCURACY) -> list[Clients]:
    """Return the clients of each seed in the last round."""
    read = [read_clients(record, column) for record in records]
    return [clients for clients in read if clients is not None]


def over_clients(records: Sequence[Record], statistic: str, column: str = ACCURACY) -> list[float]:
    """Return a statistic over clients for each seed."""
    return [
        distribution(clients.values.tolist(), clients.samples.tolist(), lower_is_better=False)[statistic]
        for clients in clients_of(records, column)
    ]


def draw_dots(axes: Axes, found: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw the values of the seeds as dots and their mean as a bar, for each method and kind of value."""
    for row, values in enumerate(found.values()):
        for kind, (name, of_seeds) in enumerate(values.items()):
            place, colour = row + 0.22 * (kind - (len(values) - 1) / 2), COLOURS[kind]
            axes.plot(of_seeds, [place] * len(of_seeds), "o", color=colour, alpha=0.5, markersize=5, markeredgewidth=0)
            axes.plot([np.mean(of_seeds)], [place], "|", color=colour, markersize=11, markeredgewidth=2)
            if row == 0:
                axes.plot([], [], "o", color=colour, label=name)
    axes.set_yticks(range(len(found)), list(found))
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlabel("accuracy on a client's own digits")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False, ncols=len(values))


def draw_server_optimizers(runs: Mapping[str, list[Record]]) -> Figure:
    """Draw the curves by rounds, and the worst tenth of the clients before and after fine-tuning."""
    figure = Figure(figsize=(2 * PANEL.size[0], PANEL.size[1]), layout="constrained")
    left, right = figure.subplots(1, 2)
    metric = Metric(ACCURACY, target=0.9, window=9)
    groups = [Group(name, tuple(Curve(record, metric) for record in records)) for name, records in runs.items()]
    spent = np.concatenate([curve.axis("rounds") for group in groups for curve in group.curves])
    unit = scale_axis(left, "rounds", spent, PANEL)
    for index, group in enumerate(groups):
        draw_group(left, group, "rounds", unit, line_style(index))
    left.axhline(0.9, color="0.4", linewidth=1, linestyle=":")
    left.set(ylim=(0, 1), ylabel="accuracy (smoothed)")
    handles, labels = left.get_legend_handles_labels()
    left.legend(handles, [label.partition(" (")[0] for label in labels], loc="lower right", frameon=False)
    kinds = {"worst 10 %": ACCURACY, "worst 10 %, fine-tuned": f"{ACCURACY}_tuned"}
    draw_dots(
        right,
        {
            name: {kind: over_clients(records, "worst10", column) for kind, column in kinds.items()}
            for name, records in runs.items()
        },
    )
    return figure


def draw_personal(runs: Mapping[str, list[Record]]) -> Figure:
    """Draw each client under FedAvg and under FedBN, and mean and worst tenth of all methods."""
    figure = Figure(figsize=(2 * PANEL.size[0], PANEL.size[1]), layout="constrained")
    left, right = figure.subplots(1, 2)
    x, y = (np.concatenate([clients.values for clients in clients_of(runs[name])]) for name in ("FedAvg", "FedBN"))
    turns = np.concatenate([np.arange(len(clients.values)) for clients in clients_of(runs["FedAvg"])]) % TURNS
    jitter = np.random.default_rng(0).uniform(-0.008, 0.008, (2, len(x)))  # several clients have the same values
    for turn in range(TURNS):
        at = turns == turn
        left.plot((x + jitter[0])[at], (y + jitter[1])[at], "o", alpha=0.7, color=COLOURS[turn], label=f"{90 * turn}°")
    low = min(x.min(), y.min()) - 0.03
    left.plot([low, 1], [low, 1], color="0.4", linewidth=1, linestyle=":")
    left.set(xlim=(low, 1.03), ylim=(low, 1.03), xlabel="accuracy of a client under FedAvg", ylabel="under FedBN")
    left.legend(loc="lower right", frameon=False)
    kinds = {"mean": "mean", "worst 10 %": "worst10"}
    draw_dots(
        right,
        {
            name: {kind: over_clients(records, statistic) for kind, statistic in kinds.items()}
            for name, records in runs.items()
        },
    )
    return figure


PICTURES = {"fedopt_clients": draw_server_optimizers, "personal_small": draw_personal}
"""Function that draws each picture, by the study, which gives the picture its name."""


def main() -> None:
    """Draw the picture of each study."""
    for study, draw in PICTURES.items():
        with TemporaryDirectory() as folder, mpl.rc_context({**PANEL.style, "svg.hashsalt": study}):
            figure = draw(kept_runs(study, Path(folder)))
            figure.savefig(IMAGES / f"{study}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
