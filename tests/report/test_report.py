"""Reports against numbers worked out by hand; pictures that can be read; what is missing is said."""

import csv
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg

from lightning_fl.cli import main
from lightning_fl.errors import UserError
from lightning_fl.report import report
from lightning_fl.report.comparison import Group, Metric, group_runs
from lightning_fl.report.plots import draw_bits, draw_curves
from lightning_fl.report.published import read_published
from lightning_fl.report.records import read_run
from lightning_fl.report.smoothing import smooth


def write_run(folder: Path, accuracies: list[float], algorithm: str = "FedAvg", seed: int = 0, **options: Any) -> Path:
    """The files of a run whose round costs 1,000 bytes up, 3,000 down, 2 simulated seconds and half a second."""
    folder.mkdir(parents=True)
    columns = ["round", "val/accuracy", "comm/total_uplink_bytes", "comm/total_downlink_bytes", "clients/selected"]
    columns += ["model/parameters", "model/macs", "time/simulated_seconds", "time/round_seconds", "step"]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for i, accuracy in enumerate(accuracies):
            writer.writerow([i, accuracy, 1000 * (i + 1), 3000 * (i + 1), 10, 650, 4_500_000, 2.0 * (i + 1), 0.5, i])
    data = {"class_path": "lightning_fl.data.CIFAR10", "init_args": {"seed": seed, "num_clients": 20}}
    data["init_args"] |= options.pop("data", {})
    config = {
        "seed_everything": seed,
        "trainer": {"max_rounds": len(accuracies), "default_root_dir": str(folder), "log_every_n_rounds": 1},
        "model": {"class_path": "lightning_fl.modules.ImageClassifier", "init_args": {"network": "cnn"}},
        "data": data,
        "algorithm": {"class_path": f"lightning_fl.algorithms.{algorithm}", "init_args": options},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def rising(num_rounds: int, slope: float = 0.01, start: float = 0.0) -> list[float]:
    """A straight line, which smoothing leaves as it is."""
    return [round(start + slope * (i + 1), 6) for i in range(num_rounds)]


def groups_of(*folders: Path, **metric: Any) -> list[Group]:
    return group_runs([read_run(folder) for folder in folders], Metric(**metric))


# ------------------------------------------------------------------------------------------------- smoothing


def test_smoothing_is_a_cubic_through_each_window() -> None:
    values = np.random.default_rng(0).random(100)
    smoothed = smooth(values, decimals=None)
    x = np.arange(39)
    for centre in range(19, 81):
        cubic = np.polyfit(x, values[centre - 19 : centre + 20], 3)
        assert smoothed[centre] == pytest.approx(np.polyval(cubic, 19), abs=1e-9)
    first, last = np.polyfit(x, values[:39], 3), np.polyfit(x, values[-39:], 3)
    assert np.allclose(smoothed[:19], np.polyval(first, x[:19]).clip(values.min(), values.max()))
    assert np.allclose(smoothed[-19:], np.polyval(last, x[-19:]).clip(values.min(), values.max()))


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


# --------------------------------------------------------------------------------------------------- numbers


def test_the_numbers_of_a_run_are_those_of_its_rows(tmp_path: Path) -> None:
    (group,) = groups_of(write_run(tmp_path / "a", rising(50)), target=0.2)
    numbers = group.curves[0].numbers
    assert numbers == {
        "final": 0.5, "last": 0.5, "rounds": 50, "uplink": 50_000, "downlink": 150_000, "simulated_seconds": 100,
        "wall_seconds": 25, "mflops": 4.5, "parameters": 650, "target_rounds": 20, "target_uplink": 20_000,
        "target_downlink": 60_000, "target_simulated_seconds": 40, "target_wall_seconds": 10,
    }  # fmt: skip
    (missed,) = groups_of(tmp_path / "a", target=0.6)
    assert {missed.curves[0].numbers[f"target_{name}"] for name in ("rounds", "uplink", "wall_seconds")} == {None}


def test_final_is_the_best_of_the_smoothed_curve_not_its_last(tmp_path: Path) -> None:
    (group,) = groups_of(write_run(tmp_path / "a", rising(60) + [0.6 - 0.01 * i for i in range(60)]))
    assert group.curves[0].numbers["final"] == smooth(np.array(rising(60) + [0.6 - 0.01 * i for i in range(60)])).max()
    assert 0.5 < group.curves[0].numbers["final"] < 0.6
    assert group.curves[0].numbers["last"] == pytest.approx(0.01)


def test_rounds_without_evaluation_and_lower_is_better(tmp_path: Path) -> None:
    write_run(tmp_path / "a", rising(30, -0.02, 1.0))
    text = (tmp_path / "a" / "metrics.csv").read_text().replace("val/accuracy", "val/loss")
    lines = text.splitlines(keepends=True)
    for i in range(1, 31, 2):  # every second round has none
        cells = lines[i].split(",")
        lines[i] = ",".join([cells[0], "", *cells[2:]])
    (tmp_path / "a" / "metrics.csv").write_text("".join(lines), newline="")
    (group,) = groups_of(tmp_path / "a", name="val/loss", target=0.8)
    numbers = group.curves[0].numbers
    assert numbers["final"] == pytest.approx(0.4)
    assert numbers["target_rounds"] == 10
    assert numbers["target_uplink"] == 10_000


def test_seeds_become_mean_and_spread(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"s{i}", rising(50, s), "FedDUM", i, beta=0.9) for i, s in enumerate((0.01, 0.012))]
    other = write_run(tmp_path / "other", rising(50), "FedDUM", beta=0.5)
    groups = groups_of(*folders, other, target=0.55)
    assert [(g.label, len(g.curves)) for g in groups] == [("FedDUM, beta=0.9", 2), ("FedDUM, beta=0.5", 1)]
    mean, spread, count = groups[0].spread("final")
    assert (mean, count) == (pytest.approx(0.55), 2)
    assert spread == pytest.approx(0.1 / 2**0.5)  # of 0.5 and 0.6
    assert groups[0].spread("target_rounds") == (46, None, 1)
    x, y, deviation = groups[0].mean_curve("uplink")
    assert x.tolist() == [1000.0 * (i + 1) for i in range(50)]
    assert y[19] == pytest.approx(0.22)
    assert deviation[19] == pytest.approx(0.04 / 2**0.5)


def test_runs_without_a_configuration_stand_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (write_run(tmp_path / name, rising(9)) / "config.yaml").unlink()
        (tmp_path / name / "hparams.yaml").write_text("algorithm: FedProx\nlearning_rate: 0.1\n")
    groups = groups_of(tmp_path / "a", tmp_path / "b")
    assert [group.label for group in groups] == ["FedProx (a)", "FedProx (b)"]


# ------------------------------------------------------------------------------------------------- published


def test_the_published_rows_are_those_of_the_paper() -> None:
    rows = {(row.network, row.method): row for row in read_published("feddumap:12").rows}
    assert rows["vgg11", "FedDUM"].numbers.items() >= {"simulated_seconds": 7490, "rounds": 77}.items()
    assert rows["cnn", "FedAvg"].target == 0.6
    assert rows["cnn", "FedAvg"].numbers["final_accuracy"] == 0.626
    ssm = {(row.dataset, row.setting, row.method): row for row in read_published("FedAdam-SSM:I").rows}
    assert ssm["Fashion-MNIST", "IID", "FedAdam"].numbers == {"uplink_mbit_per_client": 24.0}
    assert ssm["Fashion-MNIST", "IID", "1-bit Adam"].numbers == {"uplink_mbit_per_client": float("inf")}


def test_own_runs_stand_under_the_rows_of_their_method_and_setting(tmp_path: Path) -> None:
    five = {"data": {"server_fraction": 0.05}}
    write_run(tmp_path / "du", rising(50, 0.0124), "FedDU", **five)
    write_run(tmp_path / "avg", rising(50, 0.0121))
    arguments = [str(tmp_path / "du"), str(tmp_path / "avg"), "--out", str(tmp_path / "out")]
    printed = report([*arguments, "--paper", "feddumap:2"])
    lines = [line.split("|")[1:-1] for line in printed.partition("## Published")[2].splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert all("vgg11" not in line[1] for line in cells), "the runs are of the CNN"
    place = cells.index(["FedDU", "CIFAR-10, cnn, p=5%", "–", "0.663"])
    assert cells[place + 1] == ["here: FedDU", "50 rounds", "–", "0.620"]
    assert sum(line[0] == "here: FedDU" for line in cells) == 1
    printed = report([*arguments, "--paper", "feddumap:10"])
    assert re.search(r"here: FedAvg .* 50 rounds .* 0\.6 .* 0\.605 .* 100 s .* 50 .* 4\.50", printed)


# --------------------------------------------------------------------------------------------------- pictures


class Links(HTMLParser):
    """Everything that a page would load, and its cells."""

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


def test_a_report_is_files_that_need_nothing_else(tmp_path: Path) -> None:
    write_run(tmp_path / "a<b>", rising(50), "FedAvg")
    write_run(tmp_path / "b", rising(50, 0.012), "FedProx", mu=0.1)
    out = tmp_path / "out"
    runs = [str(tmp_path / "a<b>"), str(tmp_path / "b")]
    printed = report([*runs, "--target", "0.4", "--out", str(out), "--html"])
    assert printed.splitlines()[-1] == f"report  {out / 'report.html'}"
    pictures = [f"accuracy_by_{axis}" for axis in ("uplink", "rounds", "simulated_seconds")]
    files = {f"{name}.{kind}" for name in pictures for kind in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == files | {"report.md", "report.html", "runs.csv", "curves.csv"}
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
    assert [(row["method"], row["final"], row["target_uplink"]) for row in rows] == [
        ("FedAvg", "0.5", "40000.0"), ("FedProx", "0.6", "34000.0"),
    ]  # fmt: skip
    with (out / "curves.csv").open() as file:
        assert sum(1 for _ in csv.DictReader(file)) == 100


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


def require_readable(figure: Any) -> None:
    """No text of a picture covers another or leaves the picture, and no legend covers the curves."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    texts = [label for axes in figure.axes for label in (axes.xaxis.label, axes.yaxis.label, axes.title)]
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            texts += [tick.label1 for tick in ticks if low <= tick.get_loc() <= high and tick.label1.get_visible()]
    texts += [text for legend in figure.legends for text in legend.get_texts()]
    boxes = {(t.get_text(), i): t.get_window_extent(renderer) for i, t in enumerate(texts) if t.get_text()}
    assert len(boxes) > 4
    for (name, a), (other, b) in combinations(boxes.items(), 2):
        assert not a.shrunk(0.98, 0.98).overlaps(b.shrunk(0.98, 0.98)), f"{name} covers {other}"
    for name, box in boxes.items():
        assert box.x0 >= 0 <= box.y0, name
        assert box.x1 <= figure.bbox.x1, name
        assert box.y1 <= figure.bbox.y1, name
    for legend in figure.legends:
        assert not any(legend.get_window_extent(renderer).overlaps(axes.bbox) for axes in figure.axes)


# ------------------------------------------------------------------------------------------------- a real run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple]:
    """Run a command line in an empty folder; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def command(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["lightning-fl", *words])
        code: Any = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        return (code, *capsys.readouterr())

    return command


def test_bytes_by_kind_are_those_of_the_run(run: Callable[..., tuple], tmp_path: Path) -> None:
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
    line = next(line for line in out.partition("## Bytes by kind")[2].splitlines() if "FedAdamSSM" in line)
    assert [int(cell.replace(",", "")) for cell in line.split("|")[2:5]] == up
    metrics = Path("runs/0/metrics.csv").read_text().splitlines()
    last = dict(zip(metrics[0].split(","), metrics[-1].split(","), strict=True))
    assert sum(up) == float(last["comm/total_uplink_bytes"])
    assert re.search(r"FedAdamSSM +\| +2 \| +0\.\d{3} ± 0\.\d{3}", out)
    figure = draw_bits(groups_of(Path("runs/0"), Path("runs/1")))
    assert figure is not None
    require_readable(figure)


# ---------------------------------------------------------------------------------------------------- mistakes


def test_a_truncated_file_is_used_as_far_as_it_is_whole(run: Callable[..., tuple], tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", rising(50)) / "metrics.csv"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])  # through the last cell of the last row
    code, out, _ = run("report", "a")
    assert code == 0
    assert "a: 1 of its rows cut short or broken and left out." in out
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
    assert record.gaps == ("1 of its rows cut short or broken and left out", "3 of its first 50 rounds have no row")
    assert np.isnan(record.wall_seconds[20])
    assert record.wall_seconds[8] == 4.5


MISTAKES = {
    "no runs": ([], ["required: RUN"]),
    "no such folder": (["aa"], ["aa", "does not exist", "did you mean 'a'"]),
    "folder without a run": (["empty"], ["empty", "no metrics.csv"]),
    "folder of runs": (["."], ["there are runs in", "a", "b"]),
    "file": (["file.txt"], ["file.txt", "no folder"]),
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


def test_the_same_seed_twice_is_remarked_on(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", rising(50)), write_run(tmp_path / "b", rising(50))
    assert "some of its 2 runs have the same seeds" in report([str(a), str(b), "--out", str(tmp_path / "out")])
    with pytest.raises(UserError, match="no val/f1"):
        report([str(a), "--metric", "val/f1", "--out", str(tmp_path / "again")])
