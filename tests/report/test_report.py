"""Test reports against numbers computed by hand, readable pictures, and messages about missing data."""

import csv
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import scipy.signal as signal
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from made_runs import groups_of, require_readable, rising, write_run
from numpy.typing import NDArray

from lightning_fl.errors import UserError
from lightning_fl.outputs.run_folder import UNKNOWN
from lightning_fl.report import report
from lightning_fl.report.comparison import Curve, Metric
from lightning_fl.report.plots import draw_bits, draw_curves
from lightning_fl.report.records import Record, read_run
from lightning_fl.report.smoothing import fitting_window, smooth

# ------------------------------------------------------------------------------------------------- smoothing


def test_smoothing_is_a_cubic_through_each_window() -> None:
    values = np.random.default_rng(0).random(100)
    smoothed = smooth(values, decimals=None)
    x = np.arange(39)
    for centre in range(19, 81):
        cubic = np.polyfit(x, values[centre - 19 : centre + 20], 3)
        assert smoothed[centre] == pytest.approx(np.polyval(cubic, 19), abs=1e-9)
    ends = np.polyval(np.polyfit(x, values[:39], 3), x), np.polyval(np.polyfit(x, values[-39:], 3), x)
    for position in (*range(19), *range(81, 100)):
        cubic = ends[0][position] if position < 19 else ends[1][position - 61]
        near = values[max(0, position - 19) : position + 20]
        assert smoothed[position] == pytest.approx(cubic.clip(near.min(), near.max()), abs=1e-9)


@pytest.mark.parametrize(("count", "window"), [(1, 1), (3, 3), (4, 3), (5, 5), (20, 19), (38, 37), (39, 39), (40, 39)])
def test_a_short_curve_has_the_largest_window_that_fits(count: int, window: int) -> None:
    values = np.random.default_rng(1).random(count)
    smoothed = smooth(values)
    if window <= 3:
        assert (smoothed == values).all()
        return
    cubic = np.polyval(np.polyfit(np.arange(window), values[:window], 3), window // 2)
    assert smoothed[window // 2] == pytest.approx(cubic, abs=5e-4)
    assert np.allclose(smoothed * 1000, (smoothed * 1000).round()) or smoothed.max() == values.max()


def test_no_smoothed_accuracy_is_above_every_measured_one() -> None:
    steep = np.array([0.1] * 4 + [0.95] * 36)
    assert smooth(steep).max() == 0.95


@given(
    arrays(float, st.integers(5, 60), elements=st.floats(0, 1)), st.sampled_from([5, 9, 39]), st.floats(-100.0, 100.0)
)
def test_no_target_is_reached_long_before_a_value_reaches_it(
    values: NDArray[np.float64], window: int, first: float
) -> None:
    values[0] = first  # a steep beginning makes a cubic swing
    smoothed, half = smooth(values, decimals=None, window=window), fitting_window(len(values), window) // 2
    for position, value in enumerate(smoothed):
        near = values[max(0, position - half) : position + half + 1]
        assert near.min() <= value <= near.max()


@pytest.mark.parametrize("count", [5, 6, 40])
@pytest.mark.parametrize("window", [5, 6, 38, 39])
def test_what_is_smoothed_is_rounded_and_within_the_values_as_they_are_rounded(count: int, window: int) -> None:
    values = np.random.default_rng(count).random(count)
    smoothed = smooth(values, window=window)
    assert (smoothed == smoothed.round(3)).all()
    assert values.min().round(3) <= smoothed.min() < smoothed.max() <= values.max().round(3)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_a_window_that_a_cubic_passes_through_smooths_nothing(window: int) -> None:
    values = np.random.default_rng(2).random(40)
    assert (smooth(values, window=window) == values).all()


# --------------------------------------------------------------------------------------------------- numbers


def test_the_numbers_of_a_run_are_those_of_its_rows(tmp_path: Path) -> None:
    (group,) = groups_of(write_run(tmp_path / "a", rising(50), joules=3.0), target=0.2)
    numbers = group.curves[0].numbers
    assert numbers == pytest.approx({
        "final": 0.48, "last": 0.5, "best": 0.5, "at_best_validation": None,
        "rounds": 50, "uplink": 50_000, "downlink": 150_000, "simulated_seconds": 100,
        "wall_seconds": 25, "mflops": 4.5, "parameters": 650, "target_rounds": 20, "target_uplink": 20_000,
        "target_downlink": 60_000, "target_simulated_seconds": 40, "target_wall_seconds": 10,
        "joules": 150, "target_joules": 60, "total_traffic": 200_000, "target_total_traffic": 80_000,
    })  # fmt: skip
    (missed,) = groups_of(tmp_path / "a", target=0.6)
    assert {missed.curves[0].numbers[f"target_{name}"] for name in ("rounds", "uplink", "wall_seconds")} == {None}


def test_final_is_the_end_of_the_curve_and_best_that_of_the_smoothed_one(tmp_path: Path) -> None:
    values = rising(60) + [0.6 - 0.01 * i for i in range(60)]
    (group,) = groups_of(write_run(tmp_path / "a", values))
    numbers = group.curves[0].numbers
    assert numbers["best"] == smooth(np.array(values)).max()
    assert 0.5 < numbers["best"] < 0.6
    assert numbers["last"] == pytest.approx(0.01)
    assert numbers["final"] == pytest.approx(np.mean(values[-10:]))


def test_rounds_without_evaluation_and_lower_is_better(tmp_path: Path) -> None:
    write_run(tmp_path / "a", rising(30, -0.02, 1.0))
    text = (tmp_path / "a" / "metrics.csv").read_text().replace("val/accuracy", "val/loss")
    lines = text.splitlines(keepends=True)
    for i in range(1, 31, 2):  # every second round has no value
        cells = lines[i].split(",")
        lines[i] = ",".join([cells[0], "", *cells[2:]])
    (tmp_path / "a" / "metrics.csv").write_text("".join(lines), newline="")
    (group,) = groups_of(tmp_path / "a", name="val/loss", target=0.8)
    numbers = group.curves[0].numbers
    assert numbers["final"] == numbers["last"] == pytest.approx(0.4)  # of 15 values, the last alone
    assert numbers["best"] == pytest.approx(0.4)
    assert numbers["target_rounds"] == 10
    assert numbers["target_uplink"] == 10_000


@pytest.mark.parametrize("toward", [-np.inf, np.inf])
@pytest.mark.parametrize("name", ["val/loss", "val/accuracy"])
def test_a_target_that_is_touched_is_reached_whatever_the_last_bit_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, toward: float
) -> None:
    values = rising(30, -0.02, 1.0) if name == "val/loss" else rising(30, 0.02)
    path = write_run(tmp_path / "a", values) / "metrics.csv"
    path.write_text(path.read_text().replace("val/accuracy", name))
    savgol_filter = signal.savgol_filter
    monkeypatch.setattr(signal, "savgol_filter", lambda *how: np.nextafter(savgol_filter(*how), toward))
    (group,) = groups_of(path.parent, name=name, target=values[14])
    assert group.curves[0].numbers["target_rounds"] == 15


@given(
    hundredths=st.integers(6, 94),
    more=st.sampled_from(["", "5", "41", "0001"]),
    window=st.sampled_from([1, 5, 39, None]),
)
def test_a_curve_that_stays_at_a_target_reaches_it(hundredths: int, more: str, window: int | None) -> None:
    """Check that more than three decimals count, and that fewer leave accuracies rounded to three, as in the paper."""
    target = float(f"0.{hundredths:02}{more}")
    is_rounded = len(more) < 2 and window != 1

    def reached(value: float) -> float | None:
        columns = {"round": np.arange(40.0), "val/accuracy": np.full(40, value)}
        return Curve(Record(Path("a"), columns, {}, "A", None, ()), Metric(target=target, window=window)).numbers[
            "target_rounds"
        ]

    assert reached(target) == 1
    assert reached(target - 1e-4) == (1 if is_rounded else None)


@pytest.mark.matrix
def test_a_report_says_to_how_many_decimals_it_rounds(run: Callable[..., tuple], tmp_path: Path) -> None:
    write_run(tmp_path / "a", rising(90))
    for target, decimals in (("0.8", "three"), ("0.8125", "4")):
        run("report", "a", "--target", target)
        assert f"accuracies are rounded to {decimals} decimals" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.parametrize("toward", [-np.inf, np.inf])
def test_the_last_bit_does_not_decide_how_an_accuracy_is_rounded(
    monkeypatch: pytest.MonkeyPatch, toward: float
) -> None:
    halves = (np.arange(100) / 1000 + 0.0005).round(9)  # a straight line, which smoothing does not change
    savgol_filter = signal.savgol_filter
    monkeypatch.setattr(signal, "savgol_filter", lambda *how: np.nextafter(savgol_filter(*how), toward))
    assert (smooth(halves)[1:-1] == halves.round(3)[1:-1]).all()


def test_seeds_become_mean_and_spread(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"s{i}", rising(50, s), "FedDUM", i, beta=0.9) for i, s in enumerate((0.01, 0.012))]
    other = write_run(tmp_path / "other", rising(50), "FedDUM", beta=0.5)
    groups = groups_of(*folders, other, target=0.55)
    assert [(g.label, len(g.curves)) for g in groups] == [("FedDUM, beta=0.9", 2), ("FedDUM, beta=0.5", 1)]
    mean, spread, count = groups[0].spread("final")
    assert (mean, count) == (pytest.approx((0.48 + 0.576) / 2), 2)
    assert spread == pytest.approx((0.576 - 0.48) / 2**0.5)
    assert groups[0].spread("target_rounds") == (46, None, 1)
    x, y, deviation = groups[0].mean_curve("uplink")
    assert x.tolist() == [1000.0 * (i + 1) for i in range(50)]
    assert y[19] == pytest.approx(0.22)
    assert deviation[19] == pytest.approx(0.04 / 2**0.5)


def test_runs_without_a_configuration_stand_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (write_run(tmp_path / name, rising(9)) / "config.yaml").unlink()
        (tmp_path / name / "hparams.yaml").write_text("algorithm: FedProx\nlearning_rate: 0.1\n")  # the loggers'
    groups = groups_of(tmp_path / "a", tmp_path / "b")
    assert [group.label for group in groups] == ["a", "b"]


# --------------------------------------------------------------------------------------------------- pictures


class Links(HTMLParser):
    """Parser that collects the links and cells of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.cells: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_data(self, data: str) -> None:
        self.cells.append(data.strip())


@pytest.mark.usefixtures("all_formats")
@pytest.mark.matrix
def test_a_report_is_files_that_need_nothing_else(tmp_path: Path) -> None:
    write_run(tmp_path / "a<b>", rising(50), "FedAvg")
    write_run(tmp_path / "b", rising(50, 0.012), "FedProx", mu=0.1)
    out = tmp_path / "out"
    runs = [str(tmp_path / "a<b>"), str(tmp_path / "b")]
    printed = report([*runs, "--target", "0.4", "--out", str(out), "--html"])
    assert printed.splitlines()[-1] == f"report    {out / 'report.html'}"
    pictures = [f"accuracy_by_{axis}" for axis in ("uplink", "rounds", "simulated_seconds")]
    files = {f"{name}.{kind}" for name in pictures for kind in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == files | {
        "report.md", "report.html", "runs.csv", "curves.csv", ".report-files.json"
    }  # fmt: skip
    page = Links()
    text = (out / "report.html").read_text()
    page.feed(text)
    assert len(page.loads) == 3
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.loads)
    assert not page.tags & {"script", "link", "iframe"}
    assert not re.search(r"url\(|@import|https?://", re.sub(r"base64,[\w+/=]+", "", text))
    assert page.cells.count("FedProx") == 2  # in the table of results and in that of the target
    markdown = (out / "report.md").read_text()
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", markdown)
    assert len(shown) == 3
    assert all((out / name).is_file() for name in shown)
    with (out / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["final"], row["last"], row["best"], row["target_uplink"]) for row in rows] == [
        ("FedAvg", "0.48", "0.5", "0.5", "40000"), ("FedProx", "0.576", "0.6", "0.6", "34000"),
    ]  # fmt: skip
    with (out / "curves.csv").open() as file:
        assert sum(1 for _ in csv.DictReader(file)) == 100


@pytest.mark.parametrize(("window", "count", "is_smoothed"), [(1, 50, False), (39, 3, False), (5, 50, True)])
@pytest.mark.parametrize("name", ["val/accuracy", "val/loss"])
def test_a_picture_says_whether_it_is_smoothed(
    tmp_path: Path, name: str, window: int, count: int, is_smoothed: bool
) -> None:
    path = write_run(tmp_path / "a", rising(count)) / "metrics.csv"
    path.write_text(path.read_text().replace("val/accuracy", name))
    metric = Metric(name=name, window=window)
    figure = draw_curves(groups_of(tmp_path / "a", name=name, window=window), metric, "rounds")
    assert figure is not None
    (axes,) = figure.axes
    assert axes.get_ylabel() == metric.short + " (smoothed)" * is_smoothed
    pale = [line for line in axes.lines if line.get_alpha()]
    assert len(pale) == is_smoothed  # the raw values, behind all curves and not in the legend
    assert all(line.get_zorder() < other.get_zorder() for line in pale for other in axes.lines if other not in pale)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FedAvg"]


def test_the_values_of_ten_seeds_hide_no_more_than_those_of_three(tmp_path: Path) -> None:
    """Check how opaque the raw values are where all seeds coincide, so that means and bands stay visible among many seeds."""
    opacities = {}
    for num_seeds in (1, 3, 10):
        folders = [write_run(tmp_path / f"{num_seeds}-{seed}", rising(50), seed=seed) for seed in range(num_seeds)]
        figure = draw_curves(groups_of(*folders), Metric(), "rounds")
        assert figure is not None
        pale = [alpha for line in figure.axes[0].lines if (alpha := line.get_alpha())]
        assert len(pale) == num_seeds
        opacities[num_seeds] = 1 - math.prod(1 - alpha for alpha in pale)
    assert opacities[1] < opacities[10] <= opacities[3]


@pytest.mark.parametrize("axis", ["uplink", "rounds", "simulated_seconds"])
@pytest.mark.parametrize("num_rounds", [1, 50, 500])
def test_nothing_in_a_picture_overlaps(tmp_path: Path, axis: str, num_rounds: int) -> None:
    names = [
        "FedAvg",
        "FedProx",
        "FedDU",
        "FedDUMAP",
        "RandomLayers",
        "FairnessTop",
        "OneBitAdam",
        "SCAFFOLD",
        "FedNova",
    ]
    folders = [
        write_run(tmp_path / name, rising(num_rounds, 0.9 / num_rounds * (1 - 0.05 * i)), name)
        for i, name in enumerate(names)
    ]
    figure = draw_curves(groups_of(*folders, target=0.5), Metric(target=0.5), axis)
    assert figure is not None
    require_readable(figure)


@pytest.mark.parametrize(
    ("round_seconds", "label"),
    [(0.01, "ms"), (50, "s"), (900, "h"), (3240, "h"), (72_000, "days"), (1e6, "days")],
)
def test_simulated_time_has_a_few_ticks_in_a_unit_that_fits(tmp_path: Path, round_seconds: float, label: str) -> None:
    path = write_run(tmp_path / "a", rising(50)) / "metrics.csv"
    header, *rows = csv.reader(path.read_text().splitlines())
    column = header.index("time/simulated_seconds")
    for i, row in enumerate(rows, 1):
        row[column] = str(round_seconds * i)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    figure = draw_curves(groups_of(tmp_path / "a"), Metric(), "simulated_seconds")
    assert figure is not None
    require_readable(figure)
    (axes,) = figure.axes
    seconds = {"ms": 1e-3, "s": 1, "h": 3600, "days": 86_400}[label]
    assert axes.get_xlabel() == f"simulated time ({label})"
    assert axes.lines[-1].get_xdata()[-1] == pytest.approx(50 * round_seconds / seconds)
    low, high = axes.get_xlim()
    assert 3 <= sum(low <= tick <= high for tick in axes.get_xticks()) <= 10


@pytest.mark.parametrize(("values", "most"), [((0.1, 0.95, 1.0), 1.0), ((10.0, 95.0, 100.0), 120.0)])
def test_the_deviation_of_an_accuracy_ends_at_1(values: tuple[float, ...], most: float, tmp_path: Path) -> None:
    """Draw three constant curves, whose mean plus deviation is 1.19, or 119 in percent."""
    folders = [write_run(tmp_path / str(value), [value] * 9, seed=seed) for seed, value in enumerate(values)]
    figure = draw_curves(groups_of(*folders), Metric(), "rounds")
    assert figure is not None
    (band,) = figure.axes[0].collections
    assert band.get_datalim(figure.axes[0].transData).y1 == pytest.approx(most, rel=0.01)


def test_settings_that_differ_are_listed_beside_the_names(tmp_path: Path) -> None:
    for mu in (0.1, 0.01):
        write_run(tmp_path / f"{mu}", rising(9), "FedProx", mu=mu)
    write_run(tmp_path / "avg", rising(9), trainer={"clients_per_round": 5})
    printed = report([str(tmp_path / name) for name in ("0.1", "0.01", "avg")] + ["--out", str(tmp_path / "out")])
    lines = printed.partition("## Settings that differ")[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    assert cells[0] == ["method", "clients_per_round", "mu"]
    assert cells[2:] == [["FedProx, mu=0.1", "–", "0.1"], ["FedProx, mu=0.01", "–", "0.01"], ["FedAvg", "5", "–"]]


def test_numbers_that_a_search_has_drawn_have_four_figures(tmp_path: Path) -> None:
    for mu in (0.06556320296094853, 0.5):
        write_run(tmp_path / f"{mu}", rising(9), "FedProx", mu=mu)
    labels = ["--label", "tuned", "--label", "default"]
    folders = [str(tmp_path / name) for name in ("0.06556320296094853", "0.5")]
    printed = report([*folders, *labels, "--out", str(tmp_path / "out")])
    rows = [line.split() for line in printed.partition("## Settings that differ")[2].splitlines() if line[:1] == "|"]
    assert [row[1:4:2] for row in rows[2:4]] == [["tuned", "0.06556"], ["default", "0.5"]]


def test_the_method_is_a_setting_that_differs_where_a_label_does_not_name_it(tmp_path: Path) -> None:
    folders = [str(write_run(tmp_path / name, rising(9), name)) for name in ("FedAvg", "FedProx")]
    command = [*folders, "--out", str(tmp_path / "out"), "--label"]
    assert "Settings that differ" not in report([*command, "FedAvg", "--label", "FedProx with a default"])
    printed = report([*command, "FedAvg", "--label", "Proximal"]).partition("## Settings that differ")[2]
    assert [line.split()[1:4:2] for line in printed.splitlines() if line[:1] == "|"][2:4] == [
        ["FedAvg", "FedAvg"],
        ["Proximal", "FedProx"],
    ]


# ------------------------------------------------------------------------------------------------- a real run


@pytest.mark.matrix
def test_bytes_by_kind_are_those_of_the_run(run: Callable[..., tuple]) -> None:
    words = ["--model", "ImageClassifier", "--model.network", "linear", "--data", "Digits", "--data.num_clients", "5"]
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
    fit = ["fit", *words, *quiet, "--trainer.max_rounds", "2", "--trainer.clients_per_round", "3"]
    for seed in ("0", "1"):
        run(*fit, "--algorithm", "FedAdamSSM", "--seed_everything", seed, "--trainer.default_root_dir", f"runs/{seed}")
    code, out, err = run("report", "runs/0", "runs/1", "--target", "0.99")
    assert code == 0, err
    d, k = 650, 32
    masks = 2 * 3 * min(d, k * 10) // 8
    up = [2 * 3 * 4 * k, 2 * 2 * 3 * 4 * k, masks]
    with Path("report/runs.csv").open() as file:
        for row in csv.DictReader(file):
            assert [int(row[f"uplink_{kind}"]) for kind in ("model", "moments", "mask")] == up
    line = next(line for line in out.partition("## Bytes by kind")[2].splitlines() if "FedAdamSSM" in line)
    assert [cell.strip() for cell in line.split("|")[2:5]] == ["0.768", "1.54", "0.240"]
    assert "| up: mask (kB) |" in out
    metrics = Path("runs/0/metrics.csv").read_text().splitlines()
    last = dict(zip(metrics[0].split(","), metrics[-1].split(","), strict=True))
    assert sum(up) == float(last["comm/total_uplink_bytes"])
    assert re.search(r"FedAdamSSM +\| +2 \| +0\.\d{3} ± 0\.\d{3}", out)
    figure = draw_bits(groups_of(Path("runs/0"), Path("runs/1")))
    assert figure is not None
    require_readable(figure)


# ---------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("way", "budget", "lacks_rounds"),
    [
        ("uplink", 9000, False),
        ("uplink", 9001, True),
        ("uplink", None, True),
        ("downlink", 27_000, False),
        ("total", 36_000, False),
        ("total", 36_001, True),
    ],
)
def test_a_run_that_has_spent_its_budget_lacks_no_rounds(
    way: str, budget: float | None, lacks_rounds: bool, tmp_path: Path
) -> None:
    """Test rounds of 1,000 bytes up and 3,000 down, with a list of one callback and with it alone."""
    meter = {"class_path": "CommunicationMeter", "init_args": {f"max_{way}_bytes": budget}}
    write_run(tmp_path / "alone", rising(9), trainer={"max_rounds": 50, "callbacks": meter})
    assert read_run(tmp_path / "alone").gaps == ("it ends after 9 of 50 rounds",) * lacks_rounds
    write_run(tmp_path / "a", rising(9), trainer={"max_rounds": 50, "callbacks": [meter]})
    assert read_run(tmp_path / "a").gaps == ("it ends after 9 of 50 rounds",) * lacks_rounds


def test_a_truncated_file_is_used_as_far_as_it_is_whole(run: Callable[..., tuple], tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", rising(50)) / "metrics.csv"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])  # cuts through the last cell of the last row
    code, out, _ = run("report", "a")
    assert code == 0
    assert "a: incomplete or broken rows left out: 1." in out
    assert "a: it ends after 49 of 50 rounds." in out
    assert read_run("a").column("val/accuracy")[-1] == 0.49
    path.write_bytes(whole[:100])
    code, _, err = run("report", "a", "--out", "again")
    assert code == 2
    assert err.startswith("lightning-fl: error: a/metrics.csv ")
    assert not Path("again").exists()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:10], b"\0\0,,garbage\r\n", *lines[13:]]))
    record = read_run("a")
    assert record.gaps == ("incomplete or broken rows left out: 1", "3 of its first 50 rounds have no row")
    assert np.isnan(record.wall_seconds[20])
    assert record.wall_seconds[8] == 4.5


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"uplink_bits": 3}'])
def test_a_damaged_record_of_bits_is_named_and_costs_nothing_else(tmp_path: Path, content: str) -> None:
    intact = read_run(write_run(tmp_path / "intact", rising(5)))
    folder = write_run(tmp_path / "damaged", rising(5))
    (folder / "communication.json").write_text(content)
    record = read_run(folder)
    assert record.bits is None
    assert record.gaps == ("its communication.json cannot be read, so its bits by kind are unknown",)
    assert list(record.columns) == list(intact.columns)


MISTAKES = {
    "no runs": ([], ["required: RUN"]),
    "no such folder": (["aa"], ["aa", "does not exist", "did you mean 'a'"]),
    "folder without a run": (["empty"], ["no run in empty or below it", "metrics.csv"]),
    "folder of runs with other data": (["."], ["different data", "CIFAR10 in a", "Digits in b"]),
    "file": (["file.txt"], ["file.txt", "not a folder"]),
    "other data": (["a", "b"], ["different data", "CIFAR10 in a", "Digits in b"]),
    "metric": (["a", "--metric", "val/acuracy"], ["val/acuracy", "did you mean 'val/accuracy'"]),
    "target in percent": (["a", "--target", "60"], ["(0, 1]", "60", "0.6"]),
    "target": (["a", "--target", "high"], ["--target", "high"]),
    "window": (["a", "--window", "4"], ["window", "odd", "4"]),
    "paper": (["a", "--paper", "feddumap:1"], ["feddumap:1", "feddumap:10"]),
    "paper of another metric": (["a", "--paper", "feddumap:10", "--metric", "train/loss"], ["--paper", "train/loss"]),
    "flag": (["a", "--targt", "0.6"], ["--targt", "did you mean '--target'"]),
    "abbreviated flag": (["a", "--tar", "0.6"], ["--tar"]),
    "folder that cannot be written": (["a", "--out", "/proc/nowhere"], ["/proc/nowhere", "--out"]),
}


@pytest.mark.parametrize(("words", "named"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_ends_with_one_sentence(
    run: Callable[..., tuple], tmp_path: Path, words: list[str], named: list[str]
) -> None:
    write_run(tmp_path / "a", rising(9))
    write_run(tmp_path / "b", rising(9))
    config = (tmp_path / "b" / "config.yaml").read_text().replace("CIFAR10", "Digits")
    (tmp_path / "b" / "config.yaml").write_text(config)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("nothing")
    code, out, err = run("report", *words)
    assert code == 2, out
    assert out == ""
    assert err.startswith("lightning-fl: error: ")
    assert err.count("\n") == 1
    assert [name for name in named if name not in err] == [], err
    assert not Path("report").exists()


@pytest.mark.usefixtures("undrawn")
def test_the_same_seed_twice_is_remarked_on(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", rising(50)), write_run(tmp_path / "b", rising(50))
    assert "some of its 2 runs have the same seeds" in report([str(a), str(b), "--out", str(tmp_path / "out")])
    with pytest.raises(UserError, match="no val/f1"):
        report([str(a), "--metric", "val/f1", "--out", str(tmp_path / "again")])


@pytest.mark.usefixtures("undrawn")
def test_cells_are_no_formulas_of_a_spreadsheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("=1+1", "@SUM(1)"):
        write_run(tmp_path / name, rising(50))
    report(["=1+1", "@SUM(1)", "--out", "out"])
    for file in ("runs.csv", "curves.csv"):
        with (tmp_path / "out" / file).open(newline="") as opened:
            rows = list(csv.DictReader(opened))
        assert {row["folder"] for row in rows} == {"'=1+1", "'@SUM(1)"}
        assert not [cell for row in rows for cell in (*row, *row.values()) if cell.startswith(("=", "+", "@"))]


@pytest.mark.usefixtures("undrawn")
def test_the_same_folder_twice_is_one_run(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", rising(50))
    printed = report([str(a), f"{a}/", str(a / "metrics.csv"), "--out", str(tmp_path / "out")])
    assert "same seeds" not in printed
    assert (tmp_path / "out" / "runs.csv").read_text().count("\n") == 2


# ------------------------------------------------------------------------------------------- what is remarked on


def test_rejected_uploads_are_remarked_on(run: Callable[..., tuple], tmp_path: Path) -> None:
    write_run(tmp_path / "a", rising(4), rejected=[0, 10, 1, 0])
    write_run(tmp_path / "b", rising(4), "FedProx")
    write_run(tmp_path / "c", [0.1] * 4, "FedDU", rejected=[10] * 4, trainer={"loss_guard": {"clients": 3.0}})
    noisy = write_run(tmp_path / "d", rising(4), "FedAdam", rejected=[10, 0, 0, 0]) / "metrics.csv"
    head, *lines = noisy.read_text().splitlines()
    noisy.write_text("\n".join([f"{head},privacy/noise", *(f"{line},0.1" for line in lines)]))
    out = run("report", "a", "b", "c", "d")[1]
    assert (
        "- a: 11 of 40 uploads were rejected (not finite) in 2 of 4 rounds; in 1 of these no upload was accepted, and the model "
        "did not change." in out
    )
    assert "in all of these no upload was accepted, and only noise changed the model." in out
    assert "- c: 40 of 40 uploads were rejected (not finite or loss exploded) in 4 of 4 rounds; in all of" in out
    assert "- b:" not in out


def test_rounds_without_a_row_do_not_count_in_remarks(run: Callable[..., tuple], tmp_path: Path) -> None:
    write_run(tmp_path / "a", rising(7), rejected=[10, 0, 3, 0, 0, 10, 0], trainer={"log_every_n_rounds": 3})
    out = run("report", "a")[1]
    assert (
        "- a: 13 of 30 uploads were rejected (not finite) in 2 of 3 logged rounds; in 1 of these no upload was" in out
    )


@pytest.mark.matrix
def test_values_that_are_not_finite_are_left_out_and_counted(run: Callable[..., tuple], tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", rising(9)) / "metrics.csv"
    text = (
        path.read_text().replace("\n4,0.05,", "\n4,nan,").replace("\n6,0.07,", "\n6,inf,").replace("\n7,0.08,", "\n7,,")
    )
    path.write_text(text)
    code, out, _ = run("report", "a")
    assert code == 0
    assert "a: left out 2 non-finite values of val/accuracy." in out
    path.write_text(text.replace("\n8,0.09,", "\n8,nan,"))
    _, out, _ = run("report", "a")
    assert re.search(r"\| method \| runs \| +best \|", out), "its last finite values are not its end"
    assert "left out 3 non-finite values of val/accuracy, some of them in its last rounds: it has no `final`" in out
    path.write_text(re.sub(r"\n(\d),[^,]+,", r"\n\1,nan,", text))
    assert "val/accuracy of the run in a has no finite value" in run("report", "a")[2]


def test_runs_of_different_files_are_not_compared(run: Callable[..., tuple], tmp_path: Path) -> None:
    for name, path in {"a": "data/one.npz", "b": "data/two.npz", "c": "elsewhere/one.npz"}.items():
        write_run(tmp_path / name, rising(9), data_class="Arrays", data={"path": path})
    code, _, err = run("report", "a", "b")
    assert code == 2
    assert "Arrays of data/one.npz in a, Arrays of data/two.npz in b" in err
    code, out, _ = run("report", "a", "c")  # another machine may have the same file elsewhere
    assert code == 0
    assert "The runs may use different data: `data.path` is `data/one.npz` and `elsewhere/one.npz`." in out
    assert "| elsewhere/one.npz |" in out


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["CIFAR10", "ImageFolder"])
def test_where_a_well_known_data_set_lies_does_not_matter(run: Callable[..., tuple], tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "a", rising(9), data_class=name, data={"root": "here/photos", "download": True})
    write_run(tmp_path / "b", rising(9), data_class=name, seed=1, data={"root": "there/photos", "download": False})
    out = run("report", "a", "b")[1]
    assert ("| FedAvg |    2 |" in out) == (name == "CIFAR10")
    write_run(tmp_path / "c", rising(9), data_class=name, seed=1, data={"root": "there/paintings"})
    assert run("report", "a", "c")[0] == (0 if name == "CIFAR10" else 2)


@pytest.mark.usefixtures("undrawn")
def test_other_validation_samples_are_remarked_on(run: Callable[..., tuple], tmp_path: Path) -> None:
    write_run(tmp_path / "a", rising(9), data={"val_fraction": 0.0})
    write_run(tmp_path / "b", rising(9), "FedProx", data={"val_fraction": 0.1})
    out = run("report", "a", "b")[1]
    assert (
        "not evaluated on the same samples: `data.val_fraction` is `0.0` and `0.1`; 0 stands for the test set." in out
    )
    assert "is measured on" not in out


MEASURED = {
    "the test set": ({"val_fraction": 0.0}, {}, "the test set (`data.val_fraction` 0)"),
    "held out": ({"val_fraction": 0.1}, {}, "samples that the clients hold out (`data.val_fraction` 0.1)"),
    "own loader": ({"val_fraction": 0.0}, {"data_class": "Federated"}, "the datamodule's own validation data"),
    "own class": ({"val_fraction": 0.0}, {"data_class": "MyFederation"}, None),
    "unknown": ({"val_fraction": UNKNOWN}, {}, None),
    "not written": ({}, {}, None),
}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("case", MEASURED)
def test_a_report_says_what_validation_was_measured_on(case: str, run: Callable[..., tuple], tmp_path: Path) -> None:
    data, options, on = MEASURED[case]
    write_run(tmp_path / "a", rising(9), data=data, **options)
    out = run("report", "a")[1]
    assert ("is measured on" in out) == (on is not None)
    assert on is None or f"\n- val/accuracy is measured on {on}.\n" in out
    assert "is measured on" not in run("report", "a", "--metric", "clients/accepted")[1]


@pytest.mark.usefixtures("undrawn")
def test_a_report_names_the_settings_that_all_runs_share(run: Callable[..., tuple], tmp_path: Path) -> None:
    plain = {"data": {"batch_size": 10, "partition": "IID"}, "trainer": {"clients_per_round": 5, "local_steps": 7}}
    write_run(tmp_path / "a", rising(9), **plain)
    write_run(tmp_path / "b", rising(9), "FedProx", mu=0.1, **plain, model={"learning_rate": 0.1})
    shared = "CIFAR10, IID, 20 clients, 5 a round, 7 steps, 9 rounds, batch 10"
    assert f"## Settings in common\n\n- {shared}, cnn.\n" in run("report", "a", "b")[1]
    assert f"## Settings\n\n- {shared}, learning rate 0.1, cnn.\n" in run("report", "b")[1]
    odd = {"data": {"num_clients": UNKNOWN}, "trainer": {"clients_per_round": 0.5}, "model": {"learning_rate": [1, 2]}}
    write_run(tmp_path / "d", rising(9), **odd)
    assert ", 0.5 a round, 9 rounds, learning rate 1+2, cnn.\n" in run("report", "d")[1]
    write_run(tmp_path / "f", rising(1), data={"num_clients": 1})
    assert "1 client, 1 round, cnn.\n" in run("report", "f")[1]
    other = (
        write_run(tmp_path / "e", rising(9), "FedProx", mu=0.1, **plain, model={"learning_rate": 0.1}) / "config.yaml"
    )
    other.write_text(other.read_text() + "\noptimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.02}}\n")
    assert f"## Settings\n\n- {shared}, learning rate 0.02, cnn.\n" in run("report", "e")[1]
    assert f"## Settings in common\n\n- {shared}, cnn.\n" in run("report", "b", "e")[1]
    write_run(tmp_path / "c", rising(8), **plain, model={"network": "vgg11"})
    assert f"- {shared.replace('9 rounds, ', '')}.\n" in run("report", "a", "c")[1]
    (tmp_path / "c" / "config.yaml").unlink()
    assert "Settings in common" not in run("report", "a", "c")[1]


def test_a_mistyped_metric_has_its_nearest_among_all_columns(run: Callable[..., tuple], tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", rising(9)) / "metrics.csv"
    path.write_text(path.read_text().replace("clients/accepted", "explained_variance"))
    err = run("report", "a", "--metric", "explaned")[2]
    assert "has no explaned: did you mean 'explained_variance'? Allowed: " in err


# -------------------------------------------------------------------------------------------------- the folder


@pytest.mark.usefixtures("all_formats")
@pytest.mark.matrix
def test_a_report_leaves_nothing_of_the_one_before_it(run: Callable[..., tuple], tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", rising(9)) / "metrics.csv"
    path.write_text(path.read_text().replace("clients/accepted", "val/loss"))
    out = tmp_path / "report"
    run("report", "a", "--html")
    (out / "mine.html").write_text("mine")
    page = (out / "curves.csv").read_text()
    (out / "curves.csv").write_text(f"{page}mine")
    assert (out / "report.html").is_file()
    run("report", "a", "--metric", "val/loss")
    left = {file.name for file in out.iterdir()}
    assert "report.html" not in left
    assert not any(name.startswith("accuracy") for name in left)
    assert {"mine.html", "loss_by_rounds.png", "report.md"} <= left
    (out / "report.md").write_text("mine")
    (out / ".report-files.json").write_text('{"report.md": "0", "../a/metrics.csv": "0"}')
    assert run("report", "a")[0] == 0
    assert path.is_file()


@pytest.mark.matrix
def test_what_someone_has_changed_is_not_removed(run: Callable[..., tuple], tmp_path: Path) -> None:
    write_run(tmp_path / "a", rising(9))
    run("report", "a", "--html")
    (tmp_path / "report" / "report.html").write_text("notes of mine")
    run("report", "a")
    assert (tmp_path / "report" / "report.html").read_text() == "notes of mine"
