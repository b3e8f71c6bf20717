"""Test reports that compare methods by uplink, downlink or total traffic."""

import re
from pathlib import Path

import pytest
from made_runs import groups_of, rising, write_run

from lightning_fl.errors import UserError
from lightning_fl.report import report
from lightning_fl.report.tables import other_orders


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Return a dense method, and one that sends a tenth up, but twice as much down, and learns as fast."""
    ways = {"FedAvg": (10_000, 10_000), "FedAdamSSM": (1_000, 25_000)}
    return [
        str(write_run(tmp_path / name, rising(40), name, sent=up, received=down)) for name, (up, down) in ways.items()
    ]


@pytest.mark.parametrize(
    ("traffic", "axis", "label", "costs"),
    [
        ("up", "uplink", "uplink of all clients", ["200", "20.0"]),
        ("down", "downlink", "downlink of all clients", ["200", "500"]),
        ("total", "total_traffic", "total traffic of all clients, uplink + downlink", ["400", "520"]),
    ],
)
@pytest.mark.parametrize("has_panels", [False, True])
def test_pictures_and_tables_name_and_show_the_bytes_of_the_direction(
    traffic: str, axis: str, label: str, costs: list[str], has_panels: bool, runs: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    flags = ["--target", "0.2", "--traffic", traffic, "--format", "svg,tex", "--out", str(out)]
    report([*runs, *flags, *["--panels"] * has_panels])
    picture = "accuracy_panels.svg" if has_panels else f"accuracy_by_{axis}.svg"
    drawn = (out / picture).read_text()
    words = axis.replace("_", " ")
    assert f"{words} of all clients" in drawn
    assert f"{label}" in (out / "report.md").read_text()
    for other in {"uplink", "downlink", "total traffic"} - {words}:
        assert f">{other} of all clients" not in drawn
        assert not (out / f"accuracy_by_{other.replace(' ', '_')}.svg").exists()
    table = (out / "results.tex").read_text()
    assert f"{words.capitalize()} (kB)" in table
    for row, cost in zip([line for line in table.splitlines() if "Fed" in line and "&" in line], costs, strict=True):
        assert re.search(rf"& (\\textbf{{)?{cost}\b", row), row


@pytest.mark.matrix
def test_a_report_says_when_total_traffic_turns_the_order(runs: list[str], tmp_path: Path) -> None:
    said = report([*runs, "--target", "0.2", "--out", str(tmp_path / "out")])
    assert (
        "The total traffic to 0.2 gives another order than the uplink: FedAvg 400 kB, FedAdamSSM 520 kB. "
        "`--traffic total` compares by it." in said
    )
    assert said.count("| total traffic (") == 2, "of the whole run and of the target"
    total = report([*runs, "--traffic", "total", "--out", str(tmp_path / "out")])
    assert "The uplink of the whole run gives another order than the total traffic: FedAdamSSM" in total
    assert "The downlink of" not in total, "by which the order is the same"


def test_nothing_is_said_where_the_order_stays(tmp_path: Path) -> None:
    """Check equal orders, differences of less than a tenth, and a bound that sends nothing."""
    sent = {"FedAvg": (10_000, 20_000), "FedPAQ": (1_000, 20_000), "FedProx": (1_040, 18_500), "Centralised": (0, 0)}
    folders = [write_run(tmp_path / n, rising(9), n, sent=up, received=down) for n, (up, down) in sent.items()]
    groups = groups_of(*folders)
    assert other_orders(groups, groups[0].curves[0].metric) == []
    assert "total traffic" not in report([*map(str, folders), "--out", str(tmp_path / "out")]).partition("## How")[0]


def test_a_direction_that_is_none_is_refused(runs: list[str]) -> None:
    with pytest.raises(UserError, match=r"'both' .*choose from 'up', 'down', 'total'"):
        report([*runs, "--traffic", "both"])
