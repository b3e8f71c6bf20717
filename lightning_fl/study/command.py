"""`lightning-fl study FILE`: train all runs of a study file, then report on them."""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_fl.checks import check_whole
from lightning_fl.errors import CommandParser, require
from lightning_fl.outputs.run_folder import remove_empty, require_writable
from lightning_fl.outputs.units import in_bytes
from lightning_fl.report import report
from lightning_fl.report.comparison import Curve, Metric, common_metric, curves_with
from lightning_fl.report.document import Part, Picture, Sections
from lightning_fl.report.records import readable
from lightning_fl.study import budget
from lightning_fl.study.budget import efficiency_table
from lightning_fl.study.claims import Verdict, claims_table, legend
from lightning_fl.study.runner import Outcome, command, train
from lightning_fl.study.study_file import KEYS, PlannedRun, Resolve, StudyFile, read_study


def build_parser() -> ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="lightning-fl study",
        description="Train methods, settings and seeds as a study file lists them, several at once, and report on them. The "
        "same command again resumes what was stopped, skips what is done, and renews the report.",
        epilog=f"Keys of the file: {', '.join(KEYS)}; docs/how-to/studies.md explains them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "file", metavar="FILE", help="study file in YAML, or the name of one of the package's, such as fedldf_small"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder to write into (default: runs/studies/ and the file's name)"
    )
    parser.add_argument(
        "--jobs", type=int, help="runs at once, each with its share of the cores (default: one per core)"
    )
    parser.add_argument("--retry", action="store_true", help="try runs again that failed")
    parser.add_argument("--dry_run", action="store_true", help="check and print the commands, and train nothing")
    return parser


def study(arguments: Sequence[str], resolve: Resolve, find: Callable[[str], Path] = Path) -> tuple[str, bool]:
    """Run a study.

    Args:
        arguments: command line after `study`.
        resolve: function that checks the arguments of a fit and returns its configuration.
        find: function that returns the path of the study file that is named.

    Returns:
        Text to print (the report's tables, the claims, and what is left to do), and True if nothing is left.

    Raises:
        UserError: the file is not a study, or some of its runs do not fit.
    """
    given = build_parser().parse_args(arguments)
    path = find(given.file)
    file = read_study(path)
    out = Path(given.out) if given.out else Path("runs", "studies", path.stem)
    cores = os.cpu_count() or 1
    jobs = cores if given.jobs is None else given.jobs
    check_whole("--jobs", jobs, 1)
    runs = file.runs(out, resolve)
    jobs = min(jobs, len(runs))
    threads = max(1, cores // jobs)
    if given.dry_run:
        return "\n".join(shlex.join(["lightning-fl", *command(run, threads)]) for run in runs), True
    remove_empty(require_writable(str(out / "report"), flag="--out"))
    from torch.cuda import device_count

    outcome = train(runs, jobs, threads, given.retry, device_count())
    parts = [_reported(file, out, outcome)] if outcome.done else []
    left = _left(outcome)
    return "\n".join([*parts, *left]), not left


def _reported(file: StudyFile, out: Path, outcome: Outcome) -> str:
    """Write the report of the runs that are done, with the claims, and return it as text."""
    place = {cell.name: position for position, cell in enumerate(file.cells)}
    done = sorted(outcome.done, key=lambda run: (place[run.cell], run.seed))
    curves, left_out = _read(file, done)
    lines = {cell: [str(curve.record.folder) for curve in runs.values()] for cell, runs in curves.items()}
    claims: Sections = {"Claims": _claims(file, curves)} if file.claims else {}
    sections = {**claims, **_within_budget(file, curves), **({"Left out": [left_out]} if left_out else {})}
    folders = [folder for of_line in lines.values() for folder in of_line]
    return report([*folders, *file.report_flags, "--out", str(out / "report"), "--html"], sections, lines)


Curves = dict[str, dict[int, Curve]]
"""Curves of the runs that are done, by cell and seed."""


def verdicts_of(file: StudyFile, curves: Curves) -> list[Verdict]:
    """Return the verdict on each claim, from the runs that are done."""
    metric = next((curve.metric for runs in curves.values() for curve in runs.values()), Metric())
    return [claim.judge(claim.pairs(curves), metric) for claim in file.claims]


def _claims(file: StudyFile, curves: Curves) -> list[Part]:
    """Return the table of the claims, and how to read it."""
    regimes = [f"In the paper: {file.regime.paper}. Here: {file.regime.here}."] if file.regime else []
    return [*regimes, claims_table(file.claims, verdicts_of(file, curves)), legend(file.claims)]


def _within_budget(file: StudyFile, curves: Curves) -> Sections:
    """Return the section that compares the cells within the study's budget; {} without a budget."""
    if file.budget is None:
        return {}
    from lightning_fl.study.pictures import draw_areas, draw_front

    measure = file.budget.measure
    found = {cell: {seed: measure(curve) for seed, curve in runs.items()} for cell, runs in curves.items()}
    choices = {cell.name: cell.choices for cell in file.cells if cell.name in found}
    metric = next(iter(next(iter(curves.values())).values())).metric
    low, high = in_bytes(file.budget.low), in_bytes(file.budget.high)
    parts: list[Part] = [efficiency_table(found), [budget.LEGEND.format(resamples=budget.NUM_RESAMPLES)]]
    parts.append(
        Picture("front", f"Best {metric.short} within {high} of uplink", draw_front(found, choices, metric.short))
    )
    if areas := draw_areas(found, choices):
        parts.append(Picture("areas", f"Mean {metric.short} over budgets from {low} to {high}", areas))
    return {f"Accuracy per byte, {low} to {high} of uplink": parts}


def curves_of(file: StudyFile, done: Sequence[PlannedRun]) -> Curves:
    """Read the runs that are done.

    Raises:
        UserError: one of them cannot be read, or has no value of the metric.
    """
    curves, problems = _read(file, done)
    require(not problems, " ".join(problems))
    return curves


def _read(file: StudyFile, done: Sequence[PlannedRun]) -> tuple[Curves, list[str]]:
    """Return the curves of the runs that are done, and why others have none."""
    records, problems = readable([run.folder for run in done])
    metric = common_metric(list(records.values()), file.metric, file.target, file.window)
    curves, without = curves_with(list(records.values()), metric)
    found: Curves = {}
    for run in done:
        if curve := curves.get(run.folder):
            found.setdefault(run.cell, {})[run.seed] = curve
    return found, problems + without


def _left(outcome: Outcome) -> list[str]:
    """Return what is not done, a line each."""
    lines = [f"{run.cell}, seed {run.seed} failed: {said} ({run.folder})" for run, said in outcome.failed.items()]
    if outcome.failed:
        lines.append("`--retry` tries failed runs again.")
    return lines + [f"{run.cell}, seed {run.seed} is trained by another process." for run in outcome.elsewhere]
