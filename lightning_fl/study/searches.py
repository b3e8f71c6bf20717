"""Searches of all combinations of a study, as a supply of runs; the winners are then trained with the study's seeds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from lightning_fl.errors import UserError, collecting, require
from lightning_fl.outputs.plan import Plan
from lightning_fl.outputs.units import in_bytes
from lightning_fl.report.comparison import Metric
from lightning_fl.report.records import flatten
from lightning_fl.study.costs import PlanFit
from lightning_fl.study.runner import rounds_done
from lightning_fl.study.search import CellSearch
from lightning_fl.study.search_file import Range, SearchFile, written
from lightning_fl.study.study_file import Cell, PlannedRun, Resolve, StudyFile, digest_of, seeded


class Searches:
    """Searches of all combinations, as a supply of runs; the combinations begin trials in turn."""

    def __init__(self, searches: Sequence[CellSearch]) -> None:
        self.by_cell = {search.cell.name: search for search in searches}

    @property
    def num_rounds(self) -> int:
        """Rounds of all trials."""
        return sum(search.file.trials * search.planned.num_rounds for search in self.by_cell.values())

    def is_over(self) -> bool:
        """True if all trials have ended."""
        return all(search.num_ended() >= search.file.trials for search in self.by_cell.values())

    def take(self) -> PlannedRun | None:
        """Return a trial to begin, of the combination with the fewest trials in this process, then the fewest in all."""
        order = sorted(self.by_cell.values(), key=lambda search: (len(search.active), len(search.trials())))
        return next((run for search in order if (run := search.take()) is not None), None)

    def should_stop(self, run: PlannedRun) -> bool:
        """True if a trial is pruned."""
        return self.by_cell[run.cell].should_stop(run)

    def ended(self, run: PlannedRun, said: str | None) -> None:
        """Record the end of a trial."""
        self.by_cell[run.cell].ended(run, said)

    def elsewhere(self, run: PlannedRun) -> None:
        """Record that another process trains a trial."""
        self.by_cell[run.cell].elsewhere(run)

    def left(self, active: Sequence[PlannedRun]) -> str:
        """Return the number of trials that have not ended, in words."""
        total = sum(search.file.trials for search in self.by_cell.values())
        ended = sum(search.num_ended() for search in self.by_cell.values())
        return f" ({total - ended} of {total} trials left)" if ended < total else ""

    def rounds_done(self) -> int:
        """Return the planned rounds of all trials that have ended, plus the rounds that other trials have logged."""
        return sum(
            rounds_done(search.run(trial.number, {})) if trial.state == "RUNNING" else search.planned.num_rounds
            for search in self.by_cell.values()
            for trial in search.trials()
        )

    def runs_left(self) -> list[PlannedRun]:
        """Return the trials that have not ended, with the combinations' own values for those that are not chosen yet."""
        return [
            search.run(number, search.defaults)
            for search in self.by_cell.values()
            for number in range(search.file.trials)
            if not any(trial.number == number and trial.state != "RUNNING" for trial in search.trials())
        ]

    def winners(self) -> dict[str, tuple[str, ...]]:
        """Return the winner's arguments for each combination whose search has ended with a winner."""
        winners = {name: (search, search.winner()) for name, search in self.by_cell.items()}
        return {name: search.arguments(won.flags) for name, (search, won) in winners.items() if won is not None}

    def check_winners(self) -> None:
        """Raise `UserError` if a search has ended without a winner."""
        for name, search in self.by_cell.items():
            said = [trial.said for trial in search.trials()]
            require(
                name in self.winners(),
                f"the search of {name} has no winner: all of its {search.file.trials} trials failed, the last one with: "
                f"{(said or [''])[-1].rstrip('.')}; remove {search.folder} to search again.",
            )


def open_searches(file: StudyFile, out: Path, resolve: Resolve, checks: bool = True) -> Searches:
    """Return the searches of a study.

    Args:
        file: study with a search.
        out: folder of the study.
        resolve: function that checks arguments and returns the configuration.
        checks: also try the ends of all ranges.

    Raises:
        UserError: Optuna is not installed, a combination does not take a flag, or its metric is measured on test samples.
    """
    require(
        find_spec("optuna") is not None,
        "search needs the package optuna, which is not installed: pip install 'lightning-fl[search]'.",
    )
    assert file.search is not None
    planned = {run.cell: run for run in file.runs(out, resolve)}
    problems: dict[str, list[str]] = {}
    searches = []
    for cell in file.cells:
        said = list[str]()
        with collecting(said):
            searches.append(_open(cell, file, planned[cell.name], out, resolve, checks))
        for sentence in said:
            problems.setdefault(sentence.rstrip("."), []).append(cell.name)
    require(not problems, "; ".join(f"{', '.join(names)}: {why}" for why, names in problems.items()) + ".")
    return Searches(searches)


def _open(cell: Cell, study: StudyFile, planned: PlannedRun, out: Path, resolve: Resolve, checks: bool) -> CellSearch:
    """Return the search of a combination."""
    assert study.search is not None
    file, words = study.search, (*cell.arguments, *seeded(study.seeds[0]))
    config = resolve(words)
    settings, flags = flatten(config), study.search.flags[cell.name]
    require(
        bool(settings.get("data.val_fraction")),
        f"metric of search, {file.metric}, is measured on test samples unless clients hold some out: add "
        "--data.val_fraction=0.1 to base.",
    )
    if checks:
        _check_taken(words, flags, resolve)
    for flag, values in flags.items():
        default = settings.get(flag)
        require(
            default is not None,
            f"the first trial is the default, but {flag} has no value: add --{flag}=… to base or to the choice.",
        )
        require(
            values.contains(default),
            f"the first trial is the default, but {flag}={written(default)} is not in the range of search, {values}: widen it, "
            "or set the flag in base or in the choice.",
        )
    mode = config["trainer"].get("metric_mode") if config["trainer"].get("metric") == file.metric else None
    identity = json.dumps([digest_of(config), file.identity(cell.name)], sort_keys=True)
    folder = out / cell.name / f"search-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    defaults = {flag: settings[flag] for flag in flags}
    return CellSearch(cell, file, folder, defaults, Metric(file.metric, mode=mode), planned)


def _check_taken(words: Sequence[str], flags: Mapping[str, Range], resolve: Resolve) -> None:
    """Raise `UserError` unless a combination takes the ends and choices of all ranges."""
    for place in range(max(len(values.ends) for values in flags.values())):
        tried = {flag: values.ends[min(place, len(values.ends) - 1)] for flag, values in flags.items()}
        try:
            resolve((*words, *(f"--{flag}={written(value)}" for flag, value in tried.items())))
        except UserError as error:
            raise UserError(
                f"search has a flag or a value that this combination does not take ({str(error).rstrip('.')}); a flag that only "
                "some combinations take belongs to own_flags."
            ) from error


def within_budget(plan: PlanFit, file: SearchFile) -> PlanFit:
    """Return a function that plans a fit, and warns if its last round comes before its budget is spent."""

    def planned(arguments: Sequence[str]) -> Plan:
        costs, budget = plan(arguments), file.budget
        if budget is not None and costs.uplink_bytes < budget:
            said = f"the last of its {costs.rounds} rounds comes before {in_bytes(budget)} are sent: raise trainer.max_rounds."
            return replace(costs, warnings=(*costs.warnings, said))
        return costs

    return planned
