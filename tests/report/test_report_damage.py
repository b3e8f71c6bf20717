"""Test reports of damaged run folders: what is wrong is left out with a sentence, and never ends or holds up the report."""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from characters import CHARACTERS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_runs import groups_of, rising, write_run

from lightning_fl.errors import FileError, UserError
from lightning_fl.report import command, document, report
from lightning_fl.report.comparison import Curve
from lightning_fl.report.document import plain, to_html, to_markdown
from lightning_fl.report.plots import draw_bits, draw_curves
from lightning_fl.report.records import read_run

CHEAP = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
LAUGHS = "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))])


def two_runs(folder: Path) -> tuple[Path, Path]:
    """Write an intact run and one to be damaged, with all files that reports read."""
    runs = write_run(folder / "intact", rising(5)), write_run(folder / "other", rising(5), "FedProx", mu=0.1)
    bits = {"rounds": 5, "uplink_bits": {"model": 8}, "downlink_bits": {"model": 8}}
    for run in runs:
        metric = {"name": "val/accuracy", "mode": "max"}
        (run / "communication.json").write_text(json.dumps({**bits, "metric": metric}))
        (run / "clients.csv").write_text("round,client,samples,val/accuracy\n4,0,10,0.5\n4,1,10,0.6\n")
    return runs


def reported(folder: Path, *words: str) -> str:
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    return report([str(folder / "intact"), str(folder / "other"), "--out", str(out), *words])


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "gone": lambda path: None,
    "empty": Path.touch,
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "words": lambda path: path.write_text("nothing of value\nhere"),
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "deep": lambda path: path.write_text("[" * 2000),
    "laughs": lambda path: path.write_text(LAUGHS),
    "a mapping of itself": lambda path: path.write_text("trainer: &a\n  callbacks: *a\n"),
    "a date that does not exist": lambda path: path.write_text("trainer: 2001-99-99\n"),
    "a long cell": lambda path: path.write_text(f"round\n0\n{'9' * 200_000}\n"),
    "a column twice": lambda path: path.write_text("round,round\n0,\n"),
    "numbers of JSON": lambda path: path.write_text(
        '{"uplink_bits": {"model": Infinity}, "downlink_bits": {"model": -1}}'
    ),
}
NAMES = ["metrics.csv", "config.yaml", "config-2.yaml", "settings.yaml", "communication.json", "clients.csv"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_costs_no_more_than_its_run(name: str, tmp_path: Path) -> None:
    for kind, damage in DAMAGE.items():
        folder = tmp_path / kind
        _, other = two_runs(folder)
        (other / name).unlink(missing_ok=True)
        damage(other / name)
        text = reported(folder)
        assert "FedAvg" in text, kind
        if kind not in ("gone", "empty", "a link to nothing") and name in ("metrics.csv", "clients.csv"):
            assert str(other) in text.partition("## Remarks")[2], kind
        if name == "metrics.csv":
            assert "Left out: " in text, kind
            with pytest.raises(UserError):
                report([str(other), "--out", str(folder / "out")])
        elif name == "config.yaml" and kind not in ("gone", "empty", "a link to nothing"):
            assert f"{other}: its config.yaml is ignored" in text or f"`{other}` are unknown" in text, kind


KEYS = [
    *(f"trainer.{name}" for name in ("max_rounds", "log_every_n_rounds", "local_steps", "clients_per_round", "clock")),
    *(f"data.init_args.{name}" for name in ("num_clients", "seed", "val_fraction", "server_degree", "partition")),
    *("data.class_path", "model.class_path", "algorithm.class_path", "seed_everything", "trainer", "data", "algorithm"),
    *(
        "model.init_args.network",
        "model.init_args.learning_rate",
        "algorithm.init_args.mu",
        "model",
        "trainer.max_time",
    ),
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(CHARACTERS, max_size=5)
    | st.dates()
    | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.usefixtures("undrawn")
@CHEAP
@given(key=st.sampled_from(KEYS), value=VALUES, words=st.sampled_from([(), ("--paper", "feddumap:10")]))
def test_any_setting_is_read_or_ignored(key: str, value: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    _, other = two_runs(tmp_path)
    content = yaml.safe_load((other / "config.yaml").read_text())
    inside = content
    *parents, last = key.split(".")
    for parent in parents:
        inside = inside[parent]
    inside[last] = value
    (other / "config.yaml").write_text(yaml.safe_dump(content))
    try:
        assert "FedAvg" in reported(tmp_path, *words)
    except UserError as error:
        assert "different data" in str(error)  # noqa: PT017


@pytest.mark.usefixtures("undrawn")
@CHEAP
@given(
    cells=st.lists(
        st.tuples(
            st.integers(0, 5), st.integers(0, 11), st.text("019.-+e_nai \"',\n\0x", max_size=6) | st.floats().map(str)
        ),
        max_size=4,
    ),
    words=st.sampled_from([(), ("--target", "0.3")]),
)
def test_any_cell_is_read_or_its_row_left_out(cells: list[Any], words: tuple[str, ...], tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    _, other = two_runs(tmp_path)
    rows = [line.split(",") for line in (other / "metrics.csv").read_text().splitlines()]
    for row, column, cell in cells:
        rows[row][column] = cell
    (other / "metrics.csv").write_text("".join(f"{','.join(row)}\n" for row in rows))
    assert "FedAvg" in reported(tmp_path, *words)


def test_a_column_of_texts_costs_no_rows(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", rising(5)) / "metrics.csv"
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([f"{header},phase", *(f"{row},{'warm' * (row[0] < '3')}" for row in rows), ""]))
    record = read_run(tmp_path / "a")
    assert record.column("val/accuracy").tolist() == rising(5)
    assert np.isnan(record.column("phase")).all()
    assert not record.gaps


def test_numbers_of_any_size_are_drawn(tmp_path: Path) -> None:
    _, other = two_runs(tmp_path)
    text = (other / "metrics.csv").read_text()
    lines = text.splitlines(keepends=True)
    lines[2] = lines[2].replace("0.02,2000", "1e308,3e38").replace(",6000,", ",-5,")
    lines[3] = lines[3].replace("0.03,", "-3e38,")
    (other / "metrics.csv").write_text("".join(lines))
    assert "left out 1 non-finite value of val/accuracy" in reported(tmp_path)


# ---------------------------------------------------------------------------------------------- runs that are left out


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_the_metric_is_left_out_with_a_sentence(tmp_path: Path) -> None:
    _, other = two_runs(tmp_path)
    rows = (other / "metrics.csv").read_text()
    (other / "metrics.csv").write_text(re.sub(r"\n(\d),[^,]+,", r"\n\1,nan,", rows))
    text = reported(tmp_path)
    assert f"Left out: val/accuracy of the run in {other} has no finite value" in text
    assert "FedProx" not in text.partition("## Remarks")[0]
    with pytest.raises(UserError, match="has no finite value"):
        report([str(other), "--out", str(tmp_path / "out")])


# ---------------------------------------------------------------------------------------------- files of the user


@pytest.mark.usefixtures("undrawn")
def test_a_report_writes_over_no_file_that_it_did_not_write(tmp_path: Path) -> None:
    two_runs(tmp_path)
    words, out = [str(tmp_path / "intact"), "--out", str(tmp_path / "out")], tmp_path / "out"
    out.mkdir()
    mine = {name: f"my {name}" for name in ("report.md", "runs.csv", "curves.csv")}
    for name, text in mine.items():
        (out / name).write_text(text)
    assert f"kept    {out / 'earlier-1'}, " in report(words)
    assert {name: (out / "earlier-1" / name).read_text() for name in mine} == mine
    assert "kept" not in report(words), "what a report has written is replaced"
    (out / "report.md").write_text("notes of mine")
    (out / "runs.csv").unlink()
    (out / "runs.csv").mkdir()
    report(words)
    assert (out / "earlier-2" / "report.md").read_text() == "notes of mine"
    assert sorted(path.name for path in (out / "earlier-2").iterdir()) == ["report.md", "runs.csv"]
    assert (out / "runs.csv").is_file()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("kind", [*DAMAGE])
def test_a_damaged_record_of_the_last_report_costs_nothing(kind: str, tmp_path: Path) -> None:
    two_runs(tmp_path)
    words, out = [str(tmp_path / "intact"), "--out", str(tmp_path / "out")], tmp_path / "out"
    report(words)
    (out / ".report-files.json").unlink()
    DAMAGE[kind](out / ".report-files.json")
    report(words)
    assert "report.md" in json.loads((out / ".report-files.json").read_text())


@pytest.mark.usefixtures("undrawn")
def test_reports_into_one_folder_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that nothing is removed or set aside while another report writes, and that the second replaces the first."""
    out = tmp_path / "report"
    words = [str(write_run(tmp_path / "run", rising(9))), "--out", str(out)]
    report(words)
    lock, remove, asked, removed = document.lock_descriptor, command.remove_earlier, threading.Event(), list[Path]()

    def asking(descriptor: int) -> None:
        asked.set()
        lock(descriptor)

    def remove_earlier(folder: Path) -> None:
        removed.append(folder)
        remove(folder)

    with document.locked(out):
        monkeypatch.setattr(document, "lock_descriptor", asking)
        monkeypatch.setattr(command, "remove_earlier", remove_earlier)
        thread = threading.Thread(target=report, args=(words,))
        thread.start()
        assert asked.wait(60), "it does not ask for the lock"
        assert removed == []
    thread.join()
    assert removed == [out]
    assert not list(out.glob("earlier-*"))


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_runs(tmp_path)

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "note_written", refuse)
    with pytest.raises(FileError, match=r"out cannot be written \(No space left on device\)"):
        reported(tmp_path)


# ---------------------------------------------------------------------------------------------- work


@pytest.mark.matrix
def test_the_work_of_a_long_run_grows_with_its_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axis, calls = Curve.axis, list[str]()

    def counted(curve: Curve, name: str) -> Any:
        calls.append(name)
        return axis(curve, name)

    monkeypatch.setattr(Curve, "axis", counted)
    counts = []
    for length in (12, 50):  # of both the curves are smoothed
        calls.clear()
        report([str(write_run(tmp_path / str(length), rising(length))), "--out", str(tmp_path / f"out-{length}")])
        counts.append(len(calls))
    assert counts[0] == counts[1] < 50


# ---------------------------------------------------------------------------------------------- labels and texts


@pytest.mark.parametrize("axis", ["uplink", "rounds", "simulated_seconds"])
def test_a_column_that_one_of_two_seeds_lacks_is_drawn_from_the_other(axis: str, tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(seed), rising(9), seed=seed) for seed in (0, 1)]
    path = folders[1] / "metrics.csv"
    rows = [line.split(",") for line in path.read_text().splitlines()]
    columns = [i for i, name in enumerate(rows[0]) if name in ("comm/total_uplink_bytes", "time/simulated_seconds")]
    for row in rows[1:]:
        for column in columns:
            row[column] = ""
    path.write_text("".join(f"{','.join(row)}\n" for row in rows))
    (group,) = groups = groups_of(*folders)
    figure = draw_curves(groups, group.curves[0].metric, axis)
    assert figure is not None
    (text,) = figure.legends[0].get_texts()
    assert text.get_text() == "FedAvg" + " (2 seeds)" * (axis == "rounds")


LABELS = [
    "_hidden",
    "$5, $x_{$",
    "a $",
    "<script>alert(1)</script>",
    "two\nlines",
    "a|b",
    "\x01",
    "`code`",
    "[a](b)",
    " ",
]


def test_any_label_is_drawn_and_is_in_the_legend(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", rising(5))
    (folder / "communication.json").write_text('{"uplink_bits": {"model": 8}, "downlink_bits": {"model": 8}}')
    (group,) = groups_of(folder)
    groups = [type(group)(label, group.curves) for label in LABELS]
    for figure in (draw_curves(groups, group.curves[0].metric, "rounds"), draw_bits(groups)):
        assert figure is not None
        figure.draw_without_rendering()
    (legend,) = draw_curves(groups, group.curves[0].metric, "rounds").legends  # type: ignore[union-attr]
    assert len(legend.get_texts()) == len(LABELS)


@pytest.mark.usefixtures("undrawn")
def test_texts_of_the_user_are_no_markup_of_a_page(tmp_path: Path) -> None:
    two_runs(tmp_path)
    bad = "<script>alert(1)</script>\n# [here](javascript:x) a|b"
    reported(tmp_path, "--label", bad, "--label", "plain", "--html")
    page, commands, rest = re.split(r"(?s)(```bash\n.*?\n```\n)", (tmp_path / "out" / "report.md").read_text())
    assert commands.count("```") == 2, "a block of code shows all that is in it"
    page += rest
    assert "<script>" not in page.replace("\\<script>", "")
    assert "](javascript" not in page.replace("\\](javascript", "")
    assert "\n# [" not in page
    rows = [line for line in page.splitlines() if "alert" in line and line.startswith("|")]
    assert rows
    header = page.splitlines()[page.splitlines().index(rows[0]) - 2]
    assert header.startswith("| method")
    assert rows[0].replace("\\|", "").count("|") == header.count("|")
    assert "<script>" not in (tmp_path / "out" / "report.html").read_text()


@given(st.text("<ab/`[]()!\n \\", max_size=12))
@pytest.mark.matrix
def test_markdown_has_no_html_outside_of_code(text: str) -> None:
    found = plain(text)
    assert "\n" not in found
    without_code = re.sub(r"\\[\\<\]`|]|(?<!`)`(?!`)[^`]+(?<!`)`(?!`)", ".", found)
    assert not re.search(r"<[a-z/!]", without_code)
    assert to_markdown(text, {text: [text, [text]]}).count("\n# ") == 0
    assert to_html(text, {text: [text, [text]]})


def test_a_run_with_half_a_name_is_written(tmp_path: Path) -> None:
    folder = write_run(tmp_path / os.fsdecode(b"a\xff"), rising(5))
    assert np.isclose(read_run(folder).column("val/accuracy")[-1], 0.05)
    report([str(folder), "--out", str(tmp_path / "out"), "--format", "svg"])
    assert (tmp_path / "out" / "runs.csv").is_file()
