"""Test the pictures that a user describes by flags, runs found below a folder, and the page on a phone."""

import re
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_runs import groups_of, require_readable, rising, write_run
from PIL import Image

from lightning_fl.errors import UserError
from lightning_fl.outputs.figures import Look
from lightning_fl.report import report
from lightning_fl.report.comparison import Metric
from lightning_fl.report.plots import draw_bits, draw_curves, draw_panels
from lightning_fl.report.records import read_runs, runs_below


def two_runs(folder: Path) -> list[str]:
    return [
        str(write_run(folder / name, rising(50, slope), name)) for name, slope in (("FedAvg", 0.01), ("FedProx", 0.012))
    ]


@pytest.mark.matrix
def test_pictures_have_the_formats_the_size_and_the_text_that_journals_ask_for(tmp_path: Path) -> None:
    out = tmp_path / "out"
    look = ["--format", "pdf,svg,png", "--size", "3.5x2.4", "--dpi", "300", "--font-size", "8"]
    report([*two_runs(tmp_path), "--out", str(out), *look])
    name = "accuracy_by_uplink"
    assert {path.suffix for path in out.glob(f"{name}.*")} == {".pdf", ".svg", ".png"}
    with Image.open(out / f"{name}.png") as image:
        assert image.size == (1050, 720)
    drawn = (out / f"{name}.svg").read_text()
    assert re.search(r"<text[^>]*>accuracy \(smoothed\)</text>", drawn), "text is text, not outlines"
    assert re.search(r"font(-size)?: 8px", drawn)
    page = (out / f"{name}.pdf").read_bytes()
    assert b"/Subtype /Type0" in page, "a TrueType font"
    assert b"/Subtype /Type3" not in page
    assert re.search(rb"/MediaBox \[ ?0 0 252 172.8 ?\]", page)
    assert "![Accuracy against rounds](accuracy_by_rounds.svg)" in (out / "report.md").read_text()


@pytest.mark.matrix
def test_a_report_of_pdf_files_alone_links_them(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report([*two_runs(tmp_path), "--out", str(out), "--format", "pdf", "--html"])
    assert "[Accuracy against rounds](accuracy_by_rounds.pdf)" in (out / "report.md").read_text()
    assert {path.suffix for path in out.glob("accuracy*")} == {".pdf"}
    assert (out / "report.html").read_text().count("data:image/svg+xml") == 3


@pytest.mark.matrix
def test_two_reports_of_the_same_runs_have_the_same_files(tmp_path: Path) -> None:
    found = []
    runs = two_runs(tmp_path)
    for name in ("one", "two"):
        report([*runs, "--out", str(tmp_path / name), "--format", "pdf,svg", "--html"])
        files = (path for path in (tmp_path / name).iterdir() if path.suffix not in {".md", ".html"})
        found.append({path.name: zlib.crc32(path.read_bytes()) for path in files})
        page = (tmp_path / name / "report.html").read_text()
        found[-1]["embedded"] = [zlib.crc32(picture.encode()) for picture in re.findall('base64,([^"]+)', page)]
    assert found[0] == found[1], "neither a date nor names that were drawn by lot"


@pytest.mark.parametrize(
    ("xscale", "yscale", "expected"),
    [
        (None, "linear", {"uplink": "log", "rounds": "linear"}),
        ("log", "log", {"uplink": "log", "rounds": "log"}),
        ("linear", "log", {"uplink": "linear", "rounds": "linear"}),
    ],
)
def test_scales_are_the_users(tmp_path: Path, xscale: Any, yscale: str, expected: dict[str, str]) -> None:
    groups = groups_of(write_run(tmp_path / "run", rising(50)))
    for axis, scale in expected.items():
        figure = draw_curves(groups, Metric(), axis, Look(xscale=xscale, yscale=yscale))
        assert figure is not None
        (axes,) = figure.axes
        assert (axes.get_xscale(), axes.get_yscale()) == (scale, yscale)
        assert ("logarithmic" in axes.get_xlabel()) == (scale == "log")


@pytest.mark.parametrize("look", [Look(size=(3.5, 2.4), font_size=8), Look(size=(5, 3.5)), Look(font_size=14)])
@pytest.mark.parametrize("axis", ["uplink", "rounds", "simulated_seconds", "joules"])
def test_nothing_overlaps_in_a_picture_of_another_size(tmp_path: Path, axis: str, look: Look) -> None:
    names = ["FedAvg", "FedProx", "RandomLayers", "OneBitAdam", "SCAFFOLD"]
    groups = groups_of(
        *(write_run(tmp_path / name, rising(50, 0.01 + 0.001 * i), name, joules=35.0) for i, name in enumerate(names))
    )
    for yscale in ("linear", "log"):
        figure = draw_curves(groups, Metric(), axis, Look(size=look.size, font_size=look.font_size, yscale=yscale))
        assert figure is not None
        require_readable(figure)
    assert draw_bits(groups, look) is None


@pytest.mark.parametrize(
    "look", [Look(size=(7.5, 2.8)), Look(size=(7, 2.4), font_size=8), Look(size=(7.5, 2.8), yscale="log", xscale="log")]
)
@pytest.mark.parametrize(("num_rounds", "joules"), [(2, 120.0), (3, None), (50, 120.0), (500, None)])
def test_nothing_overlaps_in_a_picture_with_panels(
    tmp_path: Path, num_rounds: int, joules: float | None, look: Look
) -> None:
    names = ["FedAvg", "FedProx", "RandomLayers"]
    runs = [
        write_run(tmp_path / name, rising(num_rounds, 0.001 * (i + 1)), name, joules=joules)
        for i, name in enumerate(names)
    ]
    figure = draw_panels(groups_of(*runs), Metric(), look)
    assert figure is not None
    require_readable(figure)
    assert [axes.get_xlabel().partition(" ")[0] for axes in figure.axes] == [
        *("rounds", "uplink", "simulated"),
        *(["estimated"] if joules else []),
    ]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names


@pytest.mark.matrix
def test_text_and_formulas_have_the_users_font(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out"
    look = ["--format", "pdf", "--font", "STIXGeneral", "--ylabel", r"$\mu$ of the accuracy"]
    report([*two_runs(tmp_path), "--out", str(out), *look])
    fonts = set(re.findall(rb"/FontName /[A-Z]+\+([\w-]+)", (out / "accuracy_by_rounds.pdf").read_bytes()))
    assert fonts == {b"STIXGeneral-Regular", b"STIXGeneral-Italic"}
    assert "findfont" not in caplog.text
    with pytest.raises(UserError, match=r"^there is no font 'STIXgenral': did you mean 'STIXGeneral'\? Allowed: "):
        Look(font="STIXgenral")


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.matrix
def test_what_is_printed_fits_the_terminal_and_the_page_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [*two_runs(Path()), str(write_run(Path("nothing"), [float("nan")] * 9))]
    whole = report([*runs, "--target", "0.4", "--format", "tex,svg"])
    page = Path("report/report.md").read_text(encoding="utf-8")
    monkeypatch.setenv("COLUMNS", str(columns))
    printed = report([*runs, "--target", "0.4", "--format", "tex,svg"])
    assert Path("report/report.md").read_text(encoding="utf-8") == page
    assert max(map(len, whole.splitlines())) > 120
    assert [line for line in printed.splitlines() if len(line) > columns] == []
    results = printed.partition("## Results\n")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in results.splitlines() if line]
    rows = {name: [cell for row in cells if row[0] == name for cell in row[1:]] for name in ("method", "FedProx")}
    expected = [
        line.strip("| ").split("|")[1:] for line in whole.splitlines() if line.startswith(("| method", "| FedP"))
    ]
    assert [*rows.values()] == [[cell.strip() for cell in row] for row in expected[:2]], "every column once, in order"
    assert whole.splitlines()[-3:] == [
        "table     report/results.tex",
        "pictures  report/*.svg",
        "report    report/report.md",
    ]


@pytest.mark.matrix
def test_panels_and_the_vertical_axis_are_the_users(tmp_path: Path) -> None:
    flags = ["--out", str(tmp_path / "out"), "--format", "svg", "--ylabel", "Test accuracy"]
    runs = two_runs(tmp_path)
    report([*runs, *flags])
    assert ">Test accuracy (smoothed)</text>" in (tmp_path / "out" / "accuracy_by_rounds.svg").read_text()
    report([*runs, *flags, "--panels"])
    assert [path.name for path in (tmp_path / "out").glob("*.svg")] == ["accuracy_panels.svg"]
    assert (tmp_path / "out" / "accuracy_panels.svg").read_text().count(">Test accuracy (smoothed)</text>") == 1
    caption = "![Accuracy against rounds, uplink of all clients, simulated time](accuracy_panels.svg)"
    assert caption in (tmp_path / "out" / "report.md").read_text(encoding="utf-8"), "nothing of energy"


@pytest.mark.matrix
def test_runs_found_below_a_folder_that_differ_in_their_task_are_named_a_mixture(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out"), "--format", "svg"]
    runs = [
        str(write_run(tmp_path / "runs" / "a", rising(9))),
        str(write_run(tmp_path / "runs" / "b", rising(9), "FedProx")),
    ]
    said = "differ in their task, by "
    assert said not in report([str(tmp_path / "runs"), *out])
    runs.append(
        str(
            write_run(
                tmp_path / "runs" / "c", rising(9), "FedProx", model={"network": "lenet5"}, data={"num_clients": 9}
            )
        )
    )
    assert f"{said}`model.network`, `data.num_clients`: if they" in report([str(tmp_path / "runs"), *out])
    assert said not in report([*runs, *out]), "the user has named them"


@pytest.mark.parametrize("xscale", ["log", "linear"])
def test_runs_without_bytes_are_lines_across_the_picture_over_bytes(tmp_path: Path, xscale: str) -> None:
    runs = [write_run(tmp_path / "run", rising(30))]
    runs += [write_run(tmp_path / f"bound-{seed}", rising(30, 0.02), "Centralised", seed, sent=0) for seed in (0, 1)]
    groups = groups_of(*runs)
    figure = draw_curves(groups, Metric(), "uplink", Look(xscale=xscale))
    assert figure is not None
    require_readable(figure)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["FedAvg", "Centralised (2 seeds)"]
    lines = {str(line.get_label()): line for line in figure.axes[0].get_lines()}
    bound = lines["Centralised (2 seeds)"]
    assert list(bound.get_xdata()) == [0, 1], "in parts of the width"
    assert list(bound.get_ydata()) == [pytest.approx(0.58)] * 2, "the mean of the last three values"
    over_time = draw_curves(groups, Metric(), "simulated_seconds", Look(xscale=xscale))
    assert over_time is not None
    lines_over_time = {str(line.get_label()): line for line in over_time.axes[0].get_lines()}
    assert list(lines_over_time["Centralised (2 seeds)"].get_xdata()) == [0, 1]
    assert len(lines_over_time["FedAvg"].get_xdata()) == 30
    over_rounds = draw_curves(groups, Metric(), "rounds", Look())
    assert over_rounds is not None
    assert all(len(line.get_xdata()) == 30 for line in over_rounds.axes[0].get_lines())
    named = {str(line.get_label()): line for line in over_rounds.axes[0].get_lines()}
    assert {named[name].get_linestyle() for name in ("FedAvg", "Centralised (2 seeds)")} == {"-", "--"}
    assert draw_curves(groups[1:], Metric(), "uplink", Look()) is None, "no axis"
    bounds_alone = draw_curves(groups[1:], Metric(), "simulated_seconds", Look())
    assert bounds_alone is not None
    assert all(len(line.get_xdata()) == 30 for line in bounds_alone.axes[0].get_lines())


def test_a_bound_that_diverges_or_alone_has_simulated_time_ends_no_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rising(4))
    groups = groups_of(run, write_run(tmp_path / "bound", [*rising(3), float("nan")], "Centralised", sent=0))
    figure = draw_curves(groups, Metric(), "uplink", Look())
    assert figure is not None
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["FedAvg"], "the bound has no end"
    (run / "metrics.csv").write_text((run / "metrics.csv").read_text().replace("time/simulated_seconds", "other"))
    timed = groups_of(run, write_run(tmp_path / "other", rising(4), "Centralised", sent=0))
    figure = draw_curves(timed, Metric(), "simulated_seconds", Look())
    assert figure is not None
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["Centralised"]


def test_a_report_begins_with_the_settings_and_the_commands_of_its_runs(tmp_path: Path) -> None:
    average, proximal = two_runs(tmp_path)
    (Path(proximal) / "config.yaml").rename(Path(proximal) / "settings.yaml")
    report([average, proximal, "--out", str(tmp_path / "out"), "--format", "tex", "--html"])
    page = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert re.findall("^## (.*)", page, re.M)[:3] == ["Settings in common", "Commands", "Results"]
    command = f"lightning-fl fit --config {average}/config.yaml"
    assert f"\n```bash\n# FedAvg\n{command}\n```\n" in page, "a run from Python has no command"
    assert f"<pre># FedAvg\n{command}</pre>" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


@pytest.mark.matrix
def test_labels_and_order_are_the_users(tmp_path: Path) -> None:
    average, proximal = two_runs(tmp_path)
    flags = ["--out", str(tmp_path / "out"), "--label", "Proximal term", "--label", "Baseline"]
    printed = report([proximal, average, *flags])
    assert re.findall(r"^\| (Proximal term|Baseline)", printed, re.M)[:2] == ["Proximal term", "Baseline"]
    assert "Baseline" in (tmp_path / "out" / "accuracy_by_rounds.svg").read_text()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--label", "one"], "--label is given 1 time, but the report has 2 lines, in this order: FedAvg; FedProx."),
        (["--label", "one", "--label", "one"], "two lines have the same --label, got one, one."),
        (["--format", "png,gif"], "format 'gif' is unknown; allowed: pdf, png, svg, tex."),
        (["--format", ","], "--format is empty: give one or several of png, svg, pdf, tex, separated by commas."),
        (["--size", "3.5"], "--size is the width and height in inches, such as 3.5x2.4, got '3.5'."),
        (["--size", "0x3"], "size in inches must lie in [1, 100], got 0.0."),
        (["--dpi", "0"], "dpi must lie in [10, 2400], got 0."),
        (["--font-size", "0"], "font_size in points must lie in [1, 100], got 0.0."),
        *(
            (
                [flag, ""],
                f"lightning-fl report: argument {flag}: it is empty; perhaps a variable of the shell is not set.",
            )
            for flag in ("--metric", "--out")
        ),
        (
            ["--window", "3"],
            "window must be 1 (no smoothing) or an odd number from 5 on, got 3: the filter fits a cubic to the window, and a "
            "cubic passes through any 4 values or fewer, so nothing would be smoothed.",
        ),
    ],
)
def test_a_look_that_is_impossible_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)  # where an empty --out would write
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
        report([*two_runs(tmp_path), "--out", str(tmp_path / "out"), *flags])
    assert not (tmp_path / "out").exists()


def test_runs_below_are_those_behind_links_and_in_folders_named_like_those_moved_aside(tmp_path: Path) -> None:
    (below := tmp_path / "runs").mkdir()
    for name in ("runs/earlier-2024/q", "runs/earlier-2/q", "runs/one", "runs/one/earlier-1", "elsewhere"):
        write_run(tmp_path / name, rising(1))
    (below / "link").symlink_to(tmp_path / "elsewhere")
    (below / "circle").symlink_to(below)
    found = [path.relative_to(below).as_posix() for path in runs_below(below)]
    assert found == ["earlier-2/q", "earlier-2024/q", "link", "one"]


@pytest.mark.matrix
def test_a_folder_stands_for_the_runs_below_it(tmp_path: Path, run: Callable[..., tuple]) -> None:
    for name in ("FedAvg/10", "FedAvg/9", "FedProx", "FedAvg/9/earlier-1", ".hidden"):
        write_run(
            tmp_path / "runs" / name, rising(9), name.partition("/")[0].strip("."), data={"num_clients": len(name)}
        )
    (tmp_path / "runs" / "stock").mkdir()
    (tmp_path / "runs" / "stock" / "metrics.csv").write_text("epoch,step\n0,1\n")
    other = write_run(tmp_path / "other", rising(9), "FedNova")
    records, remarks = read_runs([other, tmp_path / "runs", tmp_path / "runs" / "FedProx"])
    names = [record.folder.relative_to(tmp_path).as_posix() for record in records]
    assert names == ["other", "runs/FedAvg/9", "runs/FedAvg/10", "runs/FedProx"]
    code, printed, _ = run("report", "runs")
    assert code == 0
    assert "- Runs in runs: FedAvg/9, FedAvg/10, FedProx.\n" in printed
    assert "- Left out: runs/stock/metrics.csv is not from a run: its first line has no column round.\n" in printed
    assert len(remarks) == 2
    assert [len(read_runs([tmp_path / "runs" / "FedAvg" / "9"])[0])] == [1], "a run is only itself"


def test_a_folder_without_a_run_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    with pytest.raises(UserError, match=r"^there is no run in .*empty or below it: no folder has a metrics\.csv\.$"):
        report([str(tmp_path / "empty")])


class Cells(HTMLParser):
    """Parser that collects the titles beside the cells of a page, which a phone shows in place of the tables' heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[str] = []
        self.titles: list[str | None] = []
        self._in_head = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_head = tag == "th"
        if tag == "td":
            self.titles.append(dict(attrs).get("data-title"))

    def handle_data(self, data: str) -> None:
        if self._in_head:
            self.heads.append(data)
        self._in_head = False


@pytest.mark.matrix
def test_a_phone_knows_each_cells_column(tmp_path: Path) -> None:
    report([write_run(tmp_path / 'a"b', rising(50)).as_posix(), "--out", str(tmp_path / "out"), "--html"])
    page = Cells()
    page.feed((tmp_path / "out" / "report.html").read_text())
    assert page.titles == page.heads  # one row
    assert page.heads[:3] == ["method", "runs", "final accuracy (mean of the last 5)"]
