"""Test that a report shows the privacy loss of runs, those with other neighbours apart."""

import csv
from pathlib import Path
from typing import Any

from made_runs import groups_of, rising, write_run

from lightning_fl.report import tables
from lightning_fl.report.comparison import Metric
from lightning_fl.report.plots import AXES, draw_curves
from lightning_fl.report.remarks import remarks


def private(folder: Path, sampling: str, epsilon: float) -> Path:
    privacy: dict[str, Any] = {
        "class_path": "lightning_fl.features.privacy.ClientPrivacy",
        "init_args": {"sampling": sampling},
    }
    return write_run(folder, rising(12), trainer={"privacy": privacy}, epsilon=epsilon)


def test_neighbours_have_columns_and_pictures_of_their_own(tmp_path: Path) -> None:
    folders = [
        private(tmp_path / "poisson", "poisson", 0.5),
        private(tmp_path / "every", "every", 0.25),
        private(tmp_path / "fixed", "fixed", 4.0),
        write_run(tmp_path / "open", rising(12)),
    ]
    metric = Metric("val/accuracy", window=1)
    groups = groups_of(*folders, name="val/accuracy", window=1)
    table = tables.results(groups, metric)
    columns = {title: [row[position] for row in table.rows] for position, title in enumerate(table.header)}
    assert columns["ε (one client more or less)"] == ["6.00", "3.00", "–", "–"]
    assert columns["ε (one client replaced)"] == ["–", "–", "48.0", "–"]
    labels = {}
    for axis in ("epsilon_more_or_less", "epsilon_replaced"):
        figure = draw_curves(groups, metric, axis)
        assert figure is not None
        lines = [line for line in figure.axes[0].get_lines() if not line.get_label().startswith("_")]
        labels[axis] = [list(line.get_xdata())[-1] for line in lines]
    assert labels == {"epsilon_more_or_less": [6.0, 3.0], "epsilon_replaced": [48.0]}
    assert draw_curves(groups, metric, "epsilon_removed") is None


def test_several_private_runs_cost_more_than_one(tmp_path: Path) -> None:
    folders = [private(tmp_path / sampling, sampling, 0.5) for sampling in ("poisson", "every")]
    open_run = write_run(tmp_path / "open", rising(12))
    said = remarks(groups_of(*folders, open_run, name="val/accuracy"))
    assert [line for line in said if line.startswith("2 runs are private. The ε of each covers this run alone")]
    assert not [line for line in remarks(groups_of(folders[0], open_run, name="val/accuracy")) if "private" in line]


def test_reports_of_open_runs_stay_as_they_are(tmp_path: Path) -> None:
    groups, metric = groups_of(write_run(tmp_path / "open", rising(5)), name="val/accuracy"), Metric("val/accuracy")
    assert not [name for name in groups[0].curves[0].numbers if "epsilon" in name]
    tables.write_curves(tmp_path / "curves.csv", groups, metric)
    with (tmp_path / "curves.csv").open() as file:
        assert not [name for name in next(csv.reader(file)) if "epsilon" in name]
    assert all(draw_curves(groups, metric, axis) is None for axis in AXES if axis.startswith("epsilon"))
