"""Test what a report shows of runs that have evaluated their clients, against numbers computed by hand."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import groups_of, require_readable, rising, write_run

from lightning_fl.report.clients import draw_clients
from lightning_fl.report.comparison import Metric

SAMPLES = (10, 20, 30, 40)


def write_clients(folder: Path, rounds: dict[int, Sequence[Any]], tuned: Sequence[float] = ()) -> Path:
    """Write the accuracies of four clients in some rounds, and those after fine-tuning."""
    names = ["round", "client", "samples", "val/accuracy", *(["val/accuracy_tuned"] if tuned else [])]
    with (folder / "clients.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for index, values in rounds.items():
            for client, value in enumerate(values):
                writer.writerow([index, client, SAMPLES[client], value, *([tuned[client]] if tuned else [])])
    return folder


def test_a_report_shows_the_clients_of_the_last_round_that_evaluated_them(
    run: Callable[..., tuple], tmp_path: Path
) -> None:
    one = write_run(tmp_path / "one", rising(9))
    write_clients(one, {4: [0.1, 0.1, 0.1, 0.1], 8: [0.9, 0.8, 0.8, 0.5]}, tuned=[1.0, 1.0, 1.0, "nan"])  # type: ignore[list-item]
    for seed, worst in ((0, 0.2), (1, 0.4)):
        folder = write_run(tmp_path / f"two-{seed}", rising(9), "FedProx", seed=seed, mu=0.1)
        write_clients(folder, {8: [0.6, 0.6, 0.6, worst]})
    without = write_run(tmp_path / "without", rising(9), "SCAFFOLD")
    code, said, _ = run("report", str(one), str(tmp_path / "two-0"), str(tmp_path / "two-1"), str(without))
    assert code == 0
    section = Path("report/report.md").read_text().partition("## Clients")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    header, _, *rows = lines
    assert header[1:] == [
        *("rounds", "clients", "mean over samples", "mean over clients", "std", "worst 10 %", "best 10 %", "Jain")
    ]
    found = {row[0]: row[1:] for row in rows}
    assert found["FedAvg"] == ["9", "4", "0.690", "0.750", "0.150", "0.500", "0.900", "0.962"]
    assert found["FedAvg, fine-tuned"][:3] == ["9", "3", "1.000"], "a client without a finite value is left out"
    assert found["FedProx"][4:6] == ["0.130 ± 0.061", "0.300 ± 0.141"]
    assert len(found) == 3, "SCAFFOLD has evaluated no clients"
    assert "## Clients" in said
    assert Path("report/accuracy_of_clients.svg").is_file()


@pytest.mark.matrix
def test_a_report_on_a_statistic_over_clients_shows_the_clients_of_its_metric(
    run: Callable[..., tuple], tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "one", rising(9))
    metrics = folder / "metrics.csv"
    metrics.write_text(metrics.read_text().replace("val/accuracy", "val/accuracy_clients_worst10", 1))
    write_clients(folder, {8: [0.9, 0.8, 0.8, 0.5]})
    assert run("report", str(folder), "--metric", "val/accuracy_clients_worst10")[0] == 0
    section = Path("report/report.md").read_text().partition("## Clients")[2]
    assert "Accuracy of each client" in section
    assert "| 0.962 |" in section


@pytest.mark.parametrize(
    ("statistic", "falls"), [("worst10", True), ("tuned_mean", True), ("std", False), ("tuned_gini", False)]
)
def test_single_clients_have_the_mode_of_the_statistic_but_of_a_deviation(statistic: str, falls: bool) -> None:
    single = Metric(f"val/score_clients_{statistic}", mode="min").over_clients
    assert (single.name, single.falls) == ("val/score", falls)


@pytest.mark.matrix
def test_runs_without_evaluated_clients_have_no_such_section(run: Callable[..., tuple], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", rising(9))
    (folder / "clients.csv").write_text("round,client,samples,val/other\n8,0,10,0.5\n")
    assert "## Clients" not in run("report", str(folder))[1]
    (folder / "clients.csv").write_text("not a table\n8,0,10,0.5\n")
    assert "## Clients" not in run("report", str(folder))[1]


def test_the_histogram_is_that_of_the_clients(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", rising(9))
    write_clients(folder, {8: [0.9, 0.8, 0.8, 0.5]}, tuned=[1.0, 1.0, 1.0, 1.0])
    figure = draw_clients(groups_of(folder), Metric())
    assert figure is not None
    (axes,) = figure.axes
    before, after = (patch.get_data() for patch in axes.patches)
    assert np.array_equal(before.values, np.histogram([0.9, 0.8, 0.8, 0.5], before.edges)[0] / 4)
    assert after.values[-1] == 1.0
    require_readable(figure)
    alike = write_run(tmp_path / "alike", rising(9))
    write_clients(alike, {8: [0.5, 0.5, 0.5, 0.5]})
    equal = write_run(tmp_path / "equal", rising(9), "FedProx")
    write_clients(equal, {8: [0.5, 0.5]})
    figure = draw_clients(groups_of(alike, equal), Metric())
    assert figure is not None
    low, high = figure.axes[0].get_xlim()
    assert 0.4 < low < 0.5 < high < 0.6
    assert [patch.get_linestyle() for patch in figure.axes[0].patches] == ["-", (0, (4, 4))], "the first is seen"
