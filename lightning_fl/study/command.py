"""`lightning-fl study FILE`: train all runs of a study file, then report on them; `lightning-fl report FILE`: report again."""

from __future__ import annotations

import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_fl.checks import check_whole
from lightning_fl.errors import CommandParser, require
from lightning_fl.outputs.cores import usable_cores
from lightning_fl.outputs.figures import Look
from lightning_fl.outputs.json_text import json_text
from lightning_fl.outputs.plan import Plan
from lightning_fl.outputs.run_folder import remove_empty, require_writable
from lightning_fl.outputs.traffic import COSTS, in_words
from lightning_fl.outputs.units import counted, in_bytes
from lightning_fl.report import flags
from lightning_fl.report.command import OfStudy, write_report
from lightning_fl.report.comparison import Curve, Metric, common_metric, curves_with
from lightning_fl.report.document import Part, Picture, Sections
from lightning_fl.report.records import readable
from lightning_fl.study.budget import LEGEND, NUM_RESAMPLES, Budget, Found, efficiency_table
from lightning_fl.study.claims import Claim, Verdict, claims_table, floors, legend, q_values_of
from lightning_fl.study.costs import PlanFit, costs, plans_of
from lightning_fl.study.runner import Outcome, changes_since, command, is_done, train, train_all
from lightning_fl.study.search_report import search_parts
from lightning_fl.study.searches import Searches, open_searches, within_budget
from lightning_fl.study.statistics import LEVEL
from lightning_fl.study.study_file import KEYS, PlannedRun, Resolve, StudyFile, read_study


def build_parser() -> ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="lightning-fl study",
        description="Train the methods, settings and seeds of a study file, several at once, and report on them. The same "
        "command again resumes stopped runs, skips finished runs, and renews the report.",
        epilog=f"Keys of the file: {', '.join(KEYS)}; docs/how-to/studies.md explains them.",
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
    parser.add_argument(
        "--part",
        metavar="I/N",
        help="train only the I-th of N parts of the runs, such as 3/8, for several machines with one folder",
    )
    parser.add_argument("--retry", action="store_true", help="try failed runs again")
    parser.add_argument(
        "--dry_run", action="store_true", help="check and print the commands and their costs, and train nothing"
    )
    parser.add_argument("--json", action="store_true", help="with --dry_run, print them as one JSON document")
    return parser


def study(
    arguments: Sequence[str], resolve: Resolve, find: Callable[[str], Path] = Path, plan: PlanFit | None = None
) -> tuple[str, bool]:
    """Run a study.

    Args:
        arguments: command line after `study`.
        resolve: function that checks the arguments of a fit and returns its configuration.
        find: function that returns the path of the study file that is named.
        plan: function that returns the costs of a fit with these arguments; None to print no costs.

    Returns:
        Text to print (the report's tables, the claims, and the runs that are left), and True if no run is left.

    Raises:
        UserError: the file is not a study, or some of its runs have invalid arguments.
    """
    parsed = build_parser().parse_args(arguments)
    path = find(parsed.file)
    file = read_study(path)
    out = Path(parsed.out) if parsed.out else folder_of(path)
    cores = len(usable_cores())
    jobs = cores if parsed.jobs is None else parsed.jobs
    check_whole("--jobs", jobs, 1)
    # A part of the runs also divides the cores by the jobs of the whole study, because threads decide the last bits.
    most = len(file.cells) * max(len(file.seeds), 0 if file.search is None else file.search.trials)
    jobs = min(jobs, most)
    threads = max(1, cores // jobs)
    require(
        parsed.dry_run or not parsed.json,
        "--json of a study needs --dry_run; `lightning-fl report FILE --json` is its report.",
    )
    planned_fit = None if plan is None else _like_the_runs(plan, file, threads)
    part_of([], parsed.part)  # refuses an invalid part before a search that takes hours
    searches = None
    if file.search is not None:
        resolve = _remembering(resolve)
        searches = open_searches(file, out, resolve)
        if parsed.dry_run and not searches.is_over():
            require(
                not parsed.json,
                "--json lists the runs of a study, but the search has not found them yet: leave it out.",
            )
            return _search_costs(file, searches, out, resolve, jobs, threads, planned_fit), True
    if not parsed.dry_run:
        remove_empty(require_writable(str(out / "report"), flag="--out"))
    if searches is not None:
        if not searches.is_over():
            train_all(searches, jobs, threads, _num_accelerators(), "Searching", searches.num_rounds)
        searches.check_winners()
        file = file.with_flags(searches.winners())
    every_run = file.runs(out, resolve)
    runs = part_of(every_run, parsed.part)
    if parsed.dry_run and parsed.json:
        planned = [{**_planned(run, threads), "is_done": is_done(run)} for run in runs]
        plans = {} if planned_fit is None else plans_of(runs, planned_fit)
        return json_text("study_plan", {"runs": planned, "plans": plans}), True
    if parsed.dry_run:
        commands = [shlex.join(["lightning-fl", *command(run, threads)]) for run in runs]
        return "\n".join([*commands, *([] if planned_fit is None else costs(runs, jobs, planned_fit))]), True
    _say_changed_code(runs, out)
    outcome = train(runs, jobs, threads, parsed.retry, _num_accelerators())
    done = outcome.done if runs == every_run else [run for run in every_run if is_done(run)]
    said = [] if runs else ["This part has no runs."]
    if done:
        words = [str(path), *file.report_flags, "--out", str(out / "report"), "--html"]
        said.append(_reported(file, parsed.file, out, done, flags.build_parser().parse_args(words), searches))
    left = _left(outcome)
    return "\n".join([*said, *left]), not left


def _like_the_runs(plan: PlanFit, file: StudyFile, threads: int) -> PlanFit:
    """Return a function that plans a fit with the threads that the study's runs get, within the budget of its search."""

    def planned(arguments: Sequence[str]) -> Plan:
        return plan((f"--trainer.threads={threads}", *arguments))

    return planned if file.search is None else within_budget(planned, file.search)


def _num_accelerators() -> int:
    from torch.cuda import device_count

    return device_count()


def _remembering(resolve: Resolve) -> Resolve:
    """Return a function that checks equal arguments only once; the searches and the runs of a study share many."""
    remembered = cache(resolve)
    return lambda words: remembered(tuple(words))


def _search_costs(
    file: StudyFile, searches: Searches, out: Path, resolve: Resolve, jobs: int, threads: int, plan: PlanFit | None
) -> str:
    """Return the commands of the trials with the combinations' own values, and the costs of all trials and winners' runs."""
    assert file.search is not None
    firsts = [search.run(0, search.defaults) for search in searches.by_cell.values()]
    lines = [
        f"# A search comes first: {file.search}. The first trials:",
        *(shlex.join(["lightning-fl", *command(run, threads)]) for run in firsts),
    ]
    if plan is not None:
        runs = [*searches.runs_left(), *file.runs(out, resolve)]
        lines += costs(runs, jobs, plan)
        left, seeds = counted(len(searches.runs_left()), "trial"), counted(len(file.seeds), "run")
        lines.append(f"# These are {left} and {seeds} of each winner, each at the cost of the first trial.")
    return "\n".join(lines)


def _planned(run: PlannedRun, threads: int) -> dict[str, Any]:
    """Return the facts about a run that `--json` prints before it is trained."""
    return {
        "cell": run.cell,
        "seed": run.seed,
        "folder": str(run.folder),
        "command": ["lightning-fl", *command(run, threads)],
        "rounds": run.num_rounds,
    }


def part_of(runs: Sequence[PlannedRun], part: str | None) -> list[PlannedRun]:
    """Return the runs of one machine: for the part `i/n`, every n-th run from the i-th on; for None, all runs.

    Raises:
        UserError: the part is not i/n with 1 ≤ i ≤ n.
    """
    if part is None:
        return list(runs)
    numbers = re.fullmatch(r"([0-9]+)/([0-9]+)", part)
    index, count = map(int, numbers.groups()) if numbers else (0, 0)
    require(1 <= index <= count, f"--part must be I/N with I from 1 to N, such as 3/8, got {part}.")
    return list(runs[index - 1 :: count])


def folder_of(path: Path) -> Path:
    """Return the folder into which a study file's runs are written by default."""
    return Path("runs", "studies", path.stem)


def report_on_study(arguments: Sequence[str], resolve: Resolve, find: Callable[[str], Path] = Path) -> str:
    """Write a report of the finished runs of a study file, and train nothing.

    Args:
        arguments: command line after `report`: a study file, the folder of its runs if this is not `folder_of`, and flags;
            target, metric and window are by default the file's.
        resolve: function that returns the configuration of a fit from its arguments; files that it names may be elsewhere.
        find: function that returns the path of the study file that is named.

    Returns:
        Text to print: tables, remarks, and the path of the report.

    Raises:
        UserError: the file is not a study, none of its runs is finished, or a flag's value is not allowed.
    """
    parser = flags.build_parser()
    name, *folders = parser.parse_args(arguments).runs
    require(
        len(folders) < 2,
        f"after a study file give at most one folder, the folder of its runs, got {', '.join(folders)}.",
    )
    path = find(name)
    file = read_study(path)
    parser.set_defaults(metric=file.metric, target=file.target, window=file.window, traffic=file.traffic)
    parsed = parser.parse_args(arguments)
    flags.look_of(parsed)  # refuses impossible values before the configurations are made, which takes seconds
    out = Path(*folders) if folders else folder_of(path)
    searches = None
    tuned = {cell.name for cell in file.cells}
    if file.search is not None:
        resolve = _remembering(resolve)
        searches = open_searches(file, out, resolve, checks=False)
        winners = searches.winners()
        file, tuned = file.with_flags(winners), {*winners}
    done = [run for run in file.runs(out, resolve) if run.cell in tuned and is_done(run)]
    require(
        bool(done),
        f"{out} has no finished run of {path} as the file is now: `lightning-fl study {name}` trains them; if you gave it --out, "
        "name that folder after the file.",
    )
    _say_changed_code(done, out)
    return _reported(file, name, out, done, parsed, searches)


def _say_changed_code(runs: Sequence[PlannedRun], out: Path) -> None:
    """Print a sentence if files of the user's own classes have changed since some of the runs began."""
    if said := changes_since(runs, out):
        print(said, file=sys.stderr)


def _reported(
    file: StudyFile,
    name: str,
    out: Path,
    done: Sequence[PlannedRun],
    parsed: Namespace,
    searches: Searches | None,
) -> str:
    """Write the report of the finished runs, with the claims, and return it as text.

    Args:
        file: content of the study file.
        name: path of the study file, or its name.
        out: folder of the study.
        done: finished runs.
        parsed: flags of the report; claims and budget are left out if the flags choose another comparison than the file.
        searches: searches whose winners the runs are; None for a study without a search.
    """
    place = {cell.name: position for position, cell in enumerate(file.cells)}
    done = sorted(done, key=lambda run: (place[run.cell], run.seed))
    compared = replace(file, metric=parsed.metric, target=parsed.target, window=parsed.window)
    curves, never_finite, left_out = _read(compared, done)
    if missing := len(file.cells) * len(file.seeds) - len(done):
        left_out.append(f"{missing} of {len(file.cells) * len(file.seeds)} runs of the study are not done.")
    is_files_own = compared == file
    if not is_files_own and (file.claims or file.budgets):
        left_out.append("Claims and budget belong to the metric, target and window of the study file.")

    def sections(look: Look) -> Sections:
        claims: Sections = {"Claims": _claims(file, curves, never_finite)} if file.claims and is_files_own else {}
        within: Sections = within_budgets(file, curves, look) if is_files_own else {}
        searched: Sections = {} if searches is None else {"Search": search_parts(searches, look)}
        return {**claims, **within, **searched, **({"Left out": [left_out]} if left_out else {})}

    content: dict[str, Any] = {}
    if parsed.json:
        content = {"study": Path(name).stem, "left_out": left_out}
        if is_files_own:
            verdicts = verdicts_of(file, curves, never_finite)
            q_values = q_values_of(verdicts)
            content["claims"] = [
                {**asdict(claim), **asdict(verdict), "q": q, "stands": None if q is None else q <= LEVEL}
                for claim, verdict, q in zip(file.claims, verdicts, q_values, strict=True)
            ]
            content["budgets"] = [_content(budget, curves) for budget in file.budgets]
    lines = {cell: [str(curve.record.folder) for curve in runs.values()] for cell, runs in curves.items()}
    parsed.runs = [folder for line_folders in lines.values() for folder in line_folders]
    return write_report(parsed, OfStudy(lines, Path(name).stem, _commands(file, name, out, done), sections, content))


def _commands(file: StudyFile, name: str, out: Path, done: Sequence[PlannedRun]) -> list[str]:
    """Return the command that trains the whole study, and the command of the first run of each line."""
    elsewhere = [] if out == folder_of(Path(name)) else ["--out", str(out)]
    firsts = {run.cell: run for run in reversed(done)}
    seeds = ", ".join(map(str, file.seeds))
    lines = [shlex.join(["lightning-fl", "study", name, *elsewhere]), f"# which trains, with the seeds {seeds}:"]
    for cell in file.cells:
        if run := firsts.get(cell.name):
            lines += [f"# {cell.name}", shlex.join(["lightning-fl", "fit", *run.arguments])]
    return lines


Curves = dict[str, dict[int, Curve]]
"""Curves of the finished runs, by cell and seed."""
NeverFinite = Mapping[str, Collection[int]]
"""Seeds of the finished runs without a finite value of the metric, by cell."""


def verdicts_of(file: StudyFile, curves: Curves, never_finite: NeverFinite = MappingProxyType({})) -> list[Verdict]:
    """Return the verdict on each claim, from the finished runs."""
    metric = next((curve.metric for runs in curves.values() for curve in runs.values()), Metric())
    every_run = _every_run(curves, never_finite)
    return [
        claim.judge(
            claim.pairs(every_run), claim.metric_in(every_run, metric), claim.floor(file.floor_pairs(claim), every_run)
        )
        for claim in file.claims
    ]


def floors_of(file: StudyFile, curves: Curves, never_finite: NeverFinite = MappingProxyType({})) -> str:
    """Return the differences of methods from themselves in words, a sentence for the claims of each setting."""
    every_run = _every_run(curves, never_finite)
    claims: dict[tuple[tuple[str, str], ...], list[Claim]] = {}
    for claim in file.claims:
        claims.setdefault(file.floor_pairs(claim), []).append(claim)
    return " ".join(filter(None, (floors(of, pairs, every_run) for pairs, of in claims.items())))


def _every_run(curves: Curves, never_finite: NeverFinite) -> dict[str, dict[int, Curve | None]]:
    """Return the curves of the finished runs; None for a run without a finite value."""
    every_run: dict[str, dict[int, Curve | None]] = {cell: dict(runs) for cell, runs in curves.items()}
    for cell, seeds in never_finite.items():
        every_run.setdefault(cell, {}).update(dict.fromkeys(seeds))
    return every_run


def _claims(file: StudyFile, curves: Curves, never_finite: NeverFinite) -> list[Part]:
    """Return the table of the claims, and its explanation."""
    regimes = [f"In the paper: {file.regime.paper}. Here: {file.regime.here}."] if file.regime else []
    return [
        *regimes,
        claims_table(file.claims, verdicts_of(file, curves, never_finite)),
        legend(file.claims, floors_of(file, curves, never_finite)),
    ]


def within_budgets(file: StudyFile, curves: Curves, look: Look) -> Sections:
    """Return a section for each of the study's budgets, with a comparison of the cells within it."""
    return {
        f"Accuracy per byte, {budget.range}": _within(
            file, budget, curves, look, f"_{COSTS[budget.traffic]}" * bool(at)
        )
        for at, budget in enumerate(file.budgets)
    }


def _within(file: StudyFile, budget: Budget, curves: Curves, look: Look, end: str) -> list[Part]:
    """Return the comparison of the cells within a budget; the names of its pictures end in `end`."""
    from lightning_fl.study.pictures import draw_areas, draw_front

    spending = spending_of(budget, curves)
    choices = {cell.name: cell.choices for cell in file.cells if cell.name in spending}
    metric = next(iter(next(iter(curves.values())).values())).metric
    legend = LEGEND.format(resamples=NUM_RESAMPLES)
    parts: list[Part] = [efficiency_table(spending, budget), [legend]]
    front = draw_front(spending, choices, metric.short, budget, look)
    within = f"{in_bytes(budget.high)} of {in_words(budget.traffic)}"
    parts.append(Picture(f"front{end}", f"Best {metric.short} within {within}", front, look))
    if areas := draw_areas(spending, choices, budget, look):
        parts.append(Picture(f"areas{end}", f"Mean {metric.short} over budgets from {budget.range}", areas, look))
    return parts


def _content(budget: Budget, curves: Curves) -> dict[str, Any]:
    """Return a budget, and the accuracy of each run within it, for `--json`."""
    runs = [
        {"cell": cell, "seed": seed, **asdict(run)}
        for cell, of_cell in spending_of(budget, curves).items()
        for seed, run in of_cell.items()
    ]
    return {**asdict(budget), "runs": runs}


def spending_of(budget: Budget, curves: Curves) -> Found:
    """Return the accuracy of the runs within a budget, by cell and seed."""
    return {cell: {seed: budget.measure(curve) for seed, curve in runs.items()} for cell, runs in curves.items()}


def curves_of(file: StudyFile, done: Sequence[PlannedRun]) -> Curves:
    """Read the finished runs.

    Raises:
        UserError: one of them cannot be read, or has no value of the metric.
    """
    curves, _, problems = _read(file, done)
    require(not problems, " ".join(problems))
    return curves


def _read(file: StudyFile, done: Sequence[PlannedRun]) -> tuple[Curves, NeverFinite, list[str]]:
    """Return the curves of the finished runs, the seeds of runs without a finite value, and reasons for missing curves."""
    records, problems = readable([run.folder for run in done])
    metric = common_metric(list(records.values()), file.metric, file.target, file.window)
    curves, without = curves_with(list(records.values()), metric)
    by_cell: Curves = {}
    never_finite: dict[str, list[int]] = {}
    for run in done:
        if curve := curves.get(run.folder):
            by_cell.setdefault(run.cell, {})[run.seed] = curve
        elif run.folder in records and metric.name in records[run.folder].not_finite:
            never_finite.setdefault(run.cell, []).append(run.seed)
    return by_cell, never_finite, problems + without


def _left(outcome: Outcome) -> list[str]:
    """Return a line for each run that is not finished."""
    lines = [f"{run.cell}, seed {run.seed} failed: {said} ({run.folder})" for run, said in outcome.failed.items()]
    if outcome.failed:
        lines.append("`--retry` tries failed runs again.")
    return lines + [f"{run.cell}, seed {run.seed} is trained by another process." for run in outcome.elsewhere]
