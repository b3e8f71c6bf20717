"""Test numbers in tables: units, significant figures, and only an exact zero printed as zero."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import rising, write_run

from lightning_fl.outputs.units import in_bytes, significant
from lightning_fl.report import report
from lightning_fl.report.comparison import mean_and_spread
from lightning_fl.report.document import Table
from lightning_fl.report.tables import Column, table

KINDS = ["share", "count", "figures", "bytes", "seconds"]


def is_zero(text: str) -> bool:
    return not any(digit in text for digit in "123456789")


@given(st.floats(1e-12, 1e18))
def test_only_zero_reads_as_zero(value: float) -> None:
    assert not is_zero(significant(value))
    assert not is_zero(in_bytes(value))
    assert float(significant(value).replace(",", "")) == pytest.approx(value, rel=5e-3)


@given(st.lists(st.floats(1e-9, 1e12), min_size=1, max_size=3), st.sampled_from(KINDS), st.floats(0, 1e12))
def test_no_mean_and_no_deviation_reads_as_zero(values: list[float], kind: str, other: float) -> None:
    mean, spread, count = mean_and_spread(values)
    rows = [(["a"], {"x": (mean, spread, count)}), (["b"], {"x": (other, None, 1)})]
    (_, cell), _ = table(["method"], {"x": Column("x", kind)}, rows).rows  # type: ignore[arg-type]
    shown = cell.split(" ± ")
    assert not any(map(is_zero, shown)), cell
    assert len(shown) == 1 + bool(spread)


@pytest.mark.parametrize(
    ("kind", "values", "cell"),
    [
        ("seconds", (0.0833, 0.0833001), "83.3 ± <0.1"),
        ("share", (0.5, 0.500001), "0.500 ± <0.001"),
        ("share", (0.5, 0.5002), "0.5001 ± 0.0001"),
        ("count", (40, 40.001), "40.0 ± <0.1"),
        ("bytes", (650, 650.0), "650"),
        ("figures", (1e-6, 1.1e-6), "1.05e-06 ± 7.07e-08"),
        ("figures", (1e-6, 1.000001e-6), "1e-06 ± 7.07e-13"),
    ],
)
def test_a_deviation_below_the_digits_of_the_mean_is_said_to_be_below_them(
    kind: str, values: tuple[float, float], cell: str
) -> None:
    found = table(["method"], {"x": Column("x", kind)}, [(["a"], {"x": mean_and_spread(values)})])  # type: ignore[arg-type]
    assert [list(row) for row in found.rows] == [["a", cell]]


def test_one_unit_for_all_columns_of_a_kind() -> None:
    columns = {"up": Column("up", "bytes"), "down": Column("down", "bytes"), "time": Column("time", "seconds")}
    rows = [
        (["a"], {"up": (23_400.0, None, 1), "down": (2.34e6, 1.2e5, 2), "time": (0.0037, None, 1)}),
        (["b"], {"up": (0.0, 0.0, 2), "time": (0.0202, 0.00004, 2)}),
    ]
    found = table(["method"], columns, rows)
    assert list(found.header) == ["method", "up (kB)", "down (kB)", "time (ms)"]
    assert [list(row) for row in found.rows] == [
        ["a", "23.4", "2,340 ± 120", "3.70"],
        ["b", "0", "–", "20.20 ± 0.04"],
    ]


def test_a_column_has_one_unit_in_which_its_least_number_can_be_read() -> None:
    columns = {"up": Column("up", "bytes"), "time": Column("time", "seconds")}
    rows = [
        (["a"], {"up": (2.34e9, None, 1), "time": (90.0, None, 1)}),
        (["b"], {"up": (75.0, 2.0, 2), "time": (0.202, 0.004, 2)}),
        (["c"], {"up": (7.5e6, None, 1), "time": (1.0, None, 1)}),
        (["d"], {"up": (float("inf"), None, 1), "time": (0.0, None, 1)}),
    ]
    found = table(["method"], columns, rows)
    assert list(found.header) == ["method", "up (kB)", "time (s)"]
    assert [list(row)[1:] for row in found.rows] == [
        ["2,340,000", "90.0"],
        ["0.0750 ± 0.0020", "0.202 ± 0.004"],
        ["7,500", "1.00"],
        ["never", "0"],
    ]


def test_a_bar_in_a_name_does_not_end_its_cell() -> None:
    lines = Table(["a|b", "c"], [["x", "1"]]).markdown().splitlines()
    assert lines[0] == r"| a\|b |  c |".replace("  c", " c")
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(("count", "window"), [(6, 1), (20, 9), (60, 29), (77, 37), (78, 39), (90, 39)])
def test_the_smoothing_window_suits_the_curves_unless_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None, count: int, window: int
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", rising(count))
    said = report(["a"])
    page = Path("report/report.md").read_text(encoding="utf-8")
    assert ("Curves are not smoothed." in page) == (window == 1)
    assert (f"window {window} (1 does not smooth; at most half of a curve" in page) == (window > 1)
    assert "smoothing window covers half" not in said
    said = report(["a", "--window", "39"])
    assert ("smoothing window covers half" in said) == (count < 78)


def test_a_table_has_no_column_without_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", rising(9))
    said = report(["a", "--target", "0.999"]).partition("## Cost of reaching accuracy 0.999")[2]
    lines = [line for line in said.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == ["method", "reached it"]
    assert lines[2].split("|")[2].strip() == "0 of 1"
