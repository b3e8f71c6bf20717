"""What the runs of a study will cost: a plan of the first seed of each cell, as comments below the commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from tqdm import tqdm

from lightning_fl.errors import UserError
from lightning_fl.outputs.plan import Plan, duration
from lightning_fl.outputs.units import in_bytes
from lightning_fl.study.runner import is_done
from lightning_fl.study.study_file import PlannedRun

PlanFit = Callable[[Sequence[str]], Plan]
"""Function that returns what a fit with some arguments would cost."""


@dataclass(frozen=True)
class _Costs:
    """Costs of some runs."""

    uplink_bytes: float = 0.0
    downlink_bytes: float = 0.0
    seconds: float = 0.0
    disk_bytes: float = 0.0

    def plus(self, plan: Plan, count: int) -> _Costs:
        """Return the costs with those of so many runs of a plan."""
        run_costs = (plan.uplink_bytes, plan.downlink_bytes, plan.seconds, plan.disk_bytes)
        return _Costs(*(before + count * each for before, each in zip(astuple(self), run_costs, strict=True)))

    @property
    def cells(self) -> list[str]:
        return [
            in_bytes(self.uplink_bytes),
            in_bytes(self.downlink_bytes),
            duration(self.seconds),
            in_bytes(self.disk_bytes),
        ]


def costs(runs: Sequence[PlannedRun], jobs: int, plan: PlanFit) -> list[str]:
    """Return a table of what the runs that are not done will cost, a comment of the shell in each line.

    Args:
        runs: runs of the study.
        jobs: runs at once.
        plan: returns what a fit would cost.
    """
    left: dict[str, list[PlannedRun]] = {}
    for run in runs:
        if not is_done(run):
            left.setdefault(run.cell, []).append(run)
    if not left:
        return ["# All runs are done."]
    rows, unknown, said, total = [["", "runs", "uplink", "downlink", "time", "disk"]], [], [], _Costs()
    for cell, cell_runs in tqdm(left.items(), desc="Planning", unit="cell", leave=False, disable=None):
        try:
            planned = plan(cell_runs[0].arguments)
        except UserError as error:
            unknown.append(f"{cell} is not in the table: {error}")
            continue
        total = total.plus(planned, len(cell_runs))
        rows.append([cell, str(len(cell_runs)), *_Costs().plus(planned, len(cell_runs)).cells])
        said += [f"{cell}: {warning}" for warning in planned.warnings]
    rows.append(["all", str(sum(int(row[1]) for row in rows[1:])), *total.cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    done = len(runs) - sum(map(len, left.values()))
    notes = [f"{done} of {len(runs)} runs are done, and not in the table."] if done else []
    if jobs > 1:
        notes.append(
            f"Time is that of one run after the other; {jobs} at once take about {duration(total.seconds / jobs)}."
        )
    lines = [*table, *notes, *said, *unknown] if len(rows) > 2 else [*notes, *unknown]
    return [f"# {line}".rstrip() for line in lines]


def plans_of(runs: Sequence[PlannedRun], plan: PlanFit) -> dict[str, dict[str, Any]]:
    """Return the plan of a run of each cell, or under `error` why there is none, for programs.

    Args:
        runs: runs of the study.
        plan: returns what a fit would cost.
    """
    firsts = {run.cell: run for run in reversed(runs)}
    return {cell: _plan_of(run, plan) for cell, run in firsts.items()}


def _plan_of(run: PlannedRun, plan: PlanFit) -> dict[str, Any]:
    try:
        return asdict(plan(run.arguments))
    except UserError as error:
        return {"error": str(error)}
