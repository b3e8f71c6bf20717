"""Expected costs of a study's runs: a plan of the first seed of each cell, as comments below the commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from tqdm import tqdm

from lightning_fl.errors import UserError
from lightning_fl.outputs.plan import Plan, duration
from lightning_fl.outputs.units import BYTES, common_unit, significant
from lightning_fl.study.runner import is_done
from lightning_fl.study.study_file import PlannedRun

PlanFit = Callable[[Sequence[str]], Plan]
"""Function that returns the costs of a fit with these arguments."""


@dataclass(frozen=True)
class _Costs:
    """Costs of some runs."""

    uplink_bytes: float = 0.0
    downlink_bytes: float = 0.0
    seconds: float = 0.0
    disk_bytes: float = 0.0

    @classmethod
    def of(cls, plan: Plan, count: int) -> _Costs:
        """Return the costs of `count` runs of a plan."""
        return cls(*(count * cost for cost in (plan.uplink_bytes, plan.downlink_bytes, plan.seconds, plan.disk_bytes)))

    def cells(self, traffic: str, disk: str) -> list[str]:
        """Return the costs as text, bytes in the units of their columns."""
        up, down = (significant(sent / BYTES[traffic]) for sent in (self.uplink_bytes, self.downlink_bytes))
        return [up, down, duration(self.seconds), significant(self.disk_bytes / BYTES[disk])]


def costs(runs: Sequence[PlannedRun], jobs: int, plan: PlanFit) -> list[str]:
    """Return a table of the costs of the unfinished runs, as lines of shell comments.

    Args:
        runs: runs of the study.
        jobs: runs at once.
        plan: function that returns the costs of a fit.
    """
    left: dict[str, list[PlannedRun]] = {}
    for run in runs:
        if not is_done(run):
            left.setdefault(run.cell, []).append(run)
    if not left:
        return ["# All runs are finished." if runs else "# This part has no runs."]
    planned_costs, unknown, said = dict[str, tuple[int, _Costs]](), list[str](), list[str]()
    for cell, cell_runs in tqdm(left.items(), desc="Planning", unit="cell", leave=False, disable=None):
        try:
            planned = plan(cell_runs[0].arguments)
        except UserError as error:
            unknown.append(f"{cell} is not in the table: {error}")
            continue
        planned_costs[cell] = len(cell_runs), _Costs.of(planned, len(cell_runs))
        said += [f"{cell}: {warning}" for warning in planned.warnings]
    count = sum(number for number, _ in planned_costs.values())
    total = _Costs(*map(sum, zip(*(astuple(of) for _, of in planned_costs.values()), strict=True)))
    every = {**planned_costs, "all": (count, total)}
    traffic = common_unit((sent for _, of in every.values() for sent in (of.uplink_bytes, of.downlink_bytes)), BYTES)
    disk = common_unit((of.disk_bytes for _, of in every.values()), BYTES)
    rows = [["", "runs", f"uplink ({traffic})", f"downlink ({traffic})", "time", f"disk ({disk})"]]
    rows += [[cell, str(number), *of.cells(traffic, disk)] for cell, (number, of) in every.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    done = len(runs) - sum(map(len, left.values()))
    notes = [f"{done} of {len(runs)} runs are finished, and not in the table."] if done else []
    if jobs > 1:
        notes.append(
            f"Times are for one run after the other; {jobs} at once take about {duration(total.seconds / jobs)}."
        )
    lines = [*table, *notes, *said, *unknown] if len(rows) > 2 else [*notes, *unknown]
    return [f"# {line}".rstrip() for line in lines]


def plans_of(runs: Sequence[PlannedRun], plan: PlanFit) -> dict[str, dict[str, Any]]:
    """Return the plan of a run of each cell, or the reason why there is none under `error`, for `--json`.

    Args:
        runs: runs of the study.
        plan: function that returns the costs of a fit.
    """
    firsts = {run.cell: run for run in reversed(runs)}
    return {cell: _plan_of(run, plan) for cell, run in firsts.items()}


def _plan_of(run: PlannedRun, plan: PlanFit) -> dict[str, Any]:
    try:
        return asdict(plan(run.arguments))
    except UserError as error:
        return {"error": str(error)}
