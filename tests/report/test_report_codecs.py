"""Test what a report shows of codecs, against columns written by hand."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import groups_of, require_readable, rising, write_run
from matplotlib.colors import to_hex

from lightning_fl.outputs.figures import COLOURS, Look
from lightning_fl.report.codecs import draw_errors, draw_layers


def with_columns(folder: Path, columns: dict[str, list[float | str]]) -> Path:
    """Add columns to a run's metrics.csv."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *columns])
        writer.writeheader()
        for i, row in enumerate(rows):
            writer.writerow(row | {name: values[i] for name, values in columns.items()})
    return folder


def lossy(folder: Path, method: str, error: float, seed: int = 0) -> Path:
    """Write a run whose codec is measured in its second and its third round."""
    columns: dict[str, list[float | str]] = {
        "codec/error": ["", error, 3 * error],
        "codec/drift": ["", 0.9, 0.4],
        "comm/uplink_ratio": ["", 8, 8],
        "codec/error/network.b": ["", error / 2, error / 2],
        "codec/error/network.a": ["", error, error],
        "comm/uplink_bits/layer/network.b": [800, 800, 800],
        "comm/uplink_bits/layer/shared": [0, 80, 160],
        "comm/uplink_bits/layer/network.a": [8000, 8000, 8000],
    }
    return with_columns(write_run(folder, rising(3), method, seed=seed), columns)


def test_a_report_shows_what_codecs_lose_and_the_bytes_of_layers(run: Callable[..., tuple], tmp_path: Path) -> None:
    exact = write_run(tmp_path / "exact", rising(3), "SCAFFOLD")
    folders = [exact, lossy(tmp_path / "one", "FedAvg", 0.1), lossy(tmp_path / "two", "FedAvg", 0.3, seed=1)]
    code, said, _ = run("report", *map(str, folders))
    assert code == 0
    section = Path("report/report.md").read_text().partition("## Codecs")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    assert lines[0] == ["method", "error", "drift", "ratio"]
    assert lines[2:] == [["FedAvg", "0.400 ± 0.283", "0.400", "8.00"]], "SCAFFOLD has measured nothing"
    assert "## Codecs" in said
    assert Path("report/codec_error_by_rounds.svg").is_file()
    assert Path("report/codecs_by_layer.svg").is_file()


def test_runs_that_measure_nothing_have_no_such_section(run: Callable[..., tuple], tmp_path: Path) -> None:
    assert "Codecs" not in run("report", str(write_run(tmp_path / "one", rising(9))))[1]


def test_the_error_is_drawn_over_the_rounds_measured_in_the_colour_of_its_run(tmp_path: Path) -> None:
    groups = groups_of(write_run(tmp_path / "exact", rising(3), "SCAFFOLD"), lossy(tmp_path / "one", "FedAvg", 0.1))
    figure = draw_errors(groups, Look())
    assert figure is not None
    (line,) = figure.axes[0].lines
    assert line.get_xdata().tolist() == [2, 3]
    assert line.get_ydata().tolist() == pytest.approx([0.1, 0.3])
    assert to_hex(line.get_color()) == COLOURS[1].lower()
    assert figure.axes[0].get_yscale() == "linear"
    require_readable(figure)
    apart = draw_errors([*groups, *groups_of(lossy(tmp_path / "fine", "FedProx", 1e-9))], Look())
    assert apart is not None
    assert apart.axes[0].get_yscale() == "log"
    require_readable(apart)
    low, high = apart.axes[0].get_ylim()
    assert sum(low <= tick <= high for tick in apart.axes[0].get_yticks()) > 2


def test_layers_have_a_bar_for_each_run_in_the_order_of_the_network(tmp_path: Path) -> None:
    one, two = lossy(tmp_path / "one", "FedAvg", 0.1), lossy(tmp_path / "two", "FedProx", 0.4)
    figure = draw_layers(groups_of(one, two), Look())
    assert figure is not None
    errors, sizes = figure.axes
    layers = [label.get_text() for label in errors.get_yticklabels()]
    assert layers == ["network.b", "network.a", "shared"]
    widths = [[bar.get_width() for bar in bars] for bars in sizes.containers]
    assert widths == [pytest.approx([100, 10, 1000])] * 2, "means of a round, in the order of the columns"
    rows = [round(bar.get_y() + bar.get_height() / 2) for bar in sizes.containers[0]]
    assert rows == [0, 2, 1]
    assert [bar.get_width() for bar in errors.containers[1]] == pytest.approx([0.2, 0.4])
    require_readable(figure)
    column = draw_layers(groups_of(one, two), Look(size=(3.5, 2.4), font_size=8))
    require_readable(column)
    many = draw_layers(groups_of(one, two) * 4, Look())
    assert many is not None
    looks = {(bars[0].get_facecolor(), bars[0].get_hatch()) for bars in many.axes[0].containers}
    assert len(looks) == 8, "one more than there are colours"
    only_sizes = with_columns(write_run(tmp_path / "sizes", rising(1)), {"comm/uplink_bits/layer/all": [80]})
    assert len(draw_layers(groups_of(only_sizes), Look()).axes) == 1  # type: ignore[union-attr]
