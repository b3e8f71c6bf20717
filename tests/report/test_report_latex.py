"""Test the LaTeX table of a report: mean and deviation, the best in bold, and a table that LaTeX can read."""

import re
from pathlib import Path
from typing import Any

import pytest
from made_runs import groups_of, rising, write_run

from lightning_fl.report import report
from lightning_fl.report.comparison import Group, Metric
from lightning_fl.report.latex import escaped, results

ODD = [r"a_b & 5 % #1 {x} \n", "half a $ sign", r"$\mu$ = 0.1_", "~^|<>", "two\nlines", "a − b × c…"]


def rows_of(table: str) -> dict[str, list[str]]:
    """Return the cells of the rows between the rules, by the first one."""
    body = table.partition("\\midrule\n")[2].partition("  \\bottomrule")[0]
    rows = [line.strip().removesuffix(r" \\").split(" & ") for line in body.splitlines()]
    return {row[0]: row[1:] for row in rows}


def seeded(folder: Path, algorithm: str, slopes: list[float], **options: Any) -> list[Path]:
    return [
        write_run(folder / f"{algorithm}-{seed}", rising(50, slope), algorithm, seed, **options)
        for seed, slope in enumerate(slopes)
    ]


def test_the_best_of_each_column_is_bold(tmp_path: Path) -> None:
    groups = groups_of(*seeded(tmp_path, "FedAvg", [0.01, 0.012]), *seeded(tmp_path, "FedProx", [0.015, 0.017]))
    table = results(groups, Metric(), ["a title", "of\ntwo lines"])
    assert table.startswith("% a title\n% of two lines\n% accuracy: mean of the last 5 of a run; ")
    assert "over 2 runs" in table
    rows = rows_of(table)
    # The last five of fifty values on a line: 48 times its slope.
    assert rows["FedAvg"][0] == r"0.528 $\pm$ 0.068"
    assert rows["FedProx"][0] == r"\textbf{0.768 $\pm$ 0.068}"
    assert rows["FedAvg"][1:] == rows["FedProx"][1:] == ["50.0", "150", "100"], "what is equal is not bold"


def test_a_loss_and_a_cost_are_best_where_they_are_lowest(tmp_path: Path) -> None:
    groups = groups_of(
        *seeded(tmp_path, "FedAvg", [0.01, 0.01]), *seeded(tmp_path, "FedProx", [0.02, 0.008]), target=0.45
    )
    table = results(groups, Metric(target=0.45), [])
    assert r"  & & \multicolumn{3}{c}{to accuracy 0.45} \\" in table
    assert r"  \cmidrule(lr){3-5}" in table
    rows = rows_of(table)
    assert rows["FedAvg"][1:] == [rf"\textbf{{{value}}}" for value in ("45", "45.0", "90.0")]
    assert rows["FedProx"][1:] == ["23 (1 of 2)", "23.0 (1 of 2)", "46.0 (1 of 2)"], (
        "a run that never arrives is no bargain"
    )
    path = tmp_path / "FedAvg-0" / "metrics.csv"
    path.write_text(path.read_text().replace("val/accuracy", "val/loss"))
    falling = [Group(name, groups_of(path.parent, name="val/loss")[0].curves) for name in ("a", "b")]
    assert "textbf" not in results(falling, Metric("val/loss"), [])
    path = tmp_path / "FedProx-1" / "metrics.csv"
    path.write_text(path.read_text().replace("val/accuracy", "val/loss"))
    both = [*falling[:1], *groups_of(path.parent, name="val/loss")]
    assert [bool(re.match(r"\\textbf", row[0])) for row in rows_of(results(both, Metric("val/loss"), [])).values()] == [
        False,
        True,
    ]


def test_means_that_the_best_one_overlaps_are_bold_too(tmp_path: Path) -> None:
    """Check 0.20 ± 0.03, 0.203 ± 0.025 and 0.1 ± 0.01, whose difference is that of noise, and a single run."""
    spreads = {"FedAvg": (0.2, 0.03), "FedProx": (0.203, 0.025), "FedNova": (0.1, 0.01), "ServerM": (0.15, 0.0)}
    runs = []
    for name, (mean, deviation) in spreads.items():
        for seed, sign in enumerate((-1, 0, 1) if deviation else (0,)):
            value = round(mean + sign * deviation, 6)
            runs.append(write_run(tmp_path / f"{name}-{seed}", [value] * 9, name, seed))
    rows = rows_of(results(groups_of(*runs), Metric(), []))
    assert {name: "textbf" in row[0] for name, row in rows.items()} == {
        "FedAvg": True,
        "FedProx": True,
        "FedNova": False,
        "ServerM": False,
    }
    assert rows["FedAvg"][0] == r"\textbf{0.200 $\pm$ 0.030}"


def test_bounds_stand_apart_and_are_not_the_best(tmp_path: Path) -> None:
    runs = [*seeded(tmp_path, "FedAvg", [0.01, 0.012]), *seeded(tmp_path, "FedProx", [0.015, 0.017])]
    bounds = seeded(tmp_path, "Centralised", [0.019, 0.019], sent=0)
    groups = groups_of(*runs, *bounds)
    table = results(groups, Metric(), [])
    assert "unless all overlap; methods without uploads are not compared.\n" in table
    body = table.partition("\\midrule\n")[2].partition("  \\bottomrule")[0].splitlines()
    assert [line.partition("&")[0].strip() for line in body] == ["FedAvg", "FedProx", r"\midrule", "Centralised"]
    assert ["textbf" in line for line in body] == [False, True, False, False]
    one_method = results([groups[0], groups[2]], Metric(), [])
    assert "textbf" not in one_method, "one method has nothing to be better than"
    alone = results([groups[2], groups[2]], Metric(), [])
    assert alone.count(r"\midrule") == 1
    assert "upload" not in alone


def test_one_run_has_nothing_in_bold(tmp_path: Path) -> None:
    (group,) = groups_of(write_run(tmp_path / "a", rising(20)))
    table = results([group], Metric(), [])
    assert "textbf" not in table
    assert "the only run" in table


@pytest.mark.parametrize("label", ODD)
def test_any_label_is_text_for_latex(label: str, tmp_path: Path) -> None:
    (group,) = groups_of(write_run(tmp_path / "a", rising(5)))
    table = results([Group(label, group.curves), Group("other", group.curves)], Metric(), [label])
    (rows,) = [rows_of(table)]
    assert len(rows) == 2
    assert {len(re.split(r"(?<!\\)&", line)) for line in table.splitlines() if line.endswith(r" \\")} == {5}
    assert "\n\n" not in table
    text = re.sub(r"\\[&%#_{}$]|\\[a-z]+(\{\})?|(?<!\\)\$.*?(?<!\\)\$", "", escaped(label))
    assert not set(text) & set("&%#_{}\\$~^")


@pytest.mark.matrix
def test_a_table_alone_needs_no_picture(tmp_path: Path) -> None:
    runs = map(str, seeded(tmp_path, "FedAvg", [0.01, 0.012]))
    out = tmp_path / "out"
    report([*runs, "--out", str(out), "--format", "tex"])
    assert {path.name for path in out.iterdir() if path.name[0] != "."} == {
        *("results.tex", "report.md", "runs.csv", "curves.csv")
    }
    assert "\n## Curves" not in (out / "report.md").read_text(encoding="utf-8")
    report([str(tmp_path / "FedAvg-0"), "--out", str(out), "--format", "svg"])
    assert not (out / "results.tex").exists(), "the next report replaces the table"
