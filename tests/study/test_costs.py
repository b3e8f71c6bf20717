"""Test the table of what a study will cost, by plans made by hand."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning_fl.errors import UserError
from lightning_fl.outputs.plan import Plan
from lightning_fl.study.costs import costs, plans_of
from lightning_fl.study.study_file import PlannedRun

UPLINK = {"dense": 148e6, "coded": 4_800.0}


def plan(arguments: Sequence[str]) -> Plan:
    """Return a plan with the uplink bytes of the method that the arguments name."""
    if arguments[0] not in UPLINK:
        raise UserError("the data are missing.")
    known: dict[str, Any] = {field.name: 0 for field in fields(Plan)} | {"algorithm": "FedAvg", "warnings": ()}
    return Plan(**{**known, "uplink_bytes": UPLINK[arguments[0]], "downlink_bytes": 148e6, "seconds": 60.0})


def runs(folder: Path, *cells: str) -> list[PlannedRun]:
    return [PlannedRun(cell, seed, folder / cell / str(seed), (cell,), 9) for seed in (0, 1) for cell in cells]


def test_a_column_of_bytes_has_one_unit_and_adds_up(tmp_path: Path) -> None:
    said = costs(runs(tmp_path, "dense", "coded", "away"), 2, plan)
    rows = [line.split() for line in said[:4]]
    assert rows[0] == ["#", "runs", "uplink", "(MB)", "downlink", "(MB)", "time", "disk", "(B)"]
    assert rows[1:] == [
        ["#", "dense", "2", "296", "296", "2", "min", "0"],
        ["#", "coded", "2", "0.00960", "296", "2", "min", "0"],
        ["#", "all", "4", "296", "592", "4", "min", "0"],
    ]
    assert said[4:] == [
        "# Times are for one run after the other; 2 at once take about 2 min.",
        "# away is not in the table: the data are missing.",
    ]


def test_programs_get_the_plan_of_one_run_of_each_combination(tmp_path: Path) -> None:
    found = plans_of(runs(tmp_path, "dense", "away"), plan)
    assert found["dense"]["uplink_bytes"] == 148e6
    assert found["away"] == {"error": "the data are missing."}
