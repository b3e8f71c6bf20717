"""Search for the best flags of each combination of a study, by Optuna; the winners are then trained with the study's seeds.

Every combination has a folder `search-DIGEST` with Optuna's journal and a folder for each trial, which is a run like all others.
What a trial has reached is read from its metrics.csv: the mean of its last evaluations (`lightning_fl.outputs.metric.final`) that
the budget, or a rung, had paid for. The lock of a run's folder says whether a process still trains a trial, so that a trial whose
process was killed goes on in another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from math import ceil, isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_fl.errors import UserError, collecting, require
from lightning_fl.outputs.metric import final
from lightning_fl.outputs.plan import Plan
from lightning_fl.outputs.units import in_bytes
from lightning_fl.report.comparison import Metric
from lightning_fl.report.document import locked
from lightning_fl.report.records import Record, flatten, read_run
from lightning_fl.study.costs import PlanFit
from lightning_fl.study.runner import DONE, FAILED, failure_of, is_locked, rounds_done
from lightning_fl.study.search_file import Range, SearchFile, written
from lightning_fl.study.study_file import Cell, PlannedRun, Resolve, StudyFile, digest_of, seeded

if TYPE_CHECKING:
    import optuna

JOURNAL = "journal.log"
PRUNED, UPLINK, SECONDS, SAID = "pruned_at", "uplink_bytes", "seconds", "said"
"""Attributes of a trial in Optuna's journal."""


@dataclass(frozen=True)
class Trial:
    """Trial of a search.

    Attributes:
        number: its place; the first, 0, has the combination's own values.
        flags: value of each flag.
        state: `COMPLETE`, `PRUNED`, `FAIL`, or `RUNNING` for one that has not ended.
        value: what it reached within the budget, of a pruned one until its last rung; NaN for others.
        uplink_bytes: bytes that all clients have sent.
        seconds: time of its rounds.
        said: why it failed; empty for others.
    """

    number: int
    flags: Mapping[str, Any]
    state: str
    value: float = nan
    uplink_bytes: float = 0.0
    seconds: float = 0.0
    said: str = ""

    @property
    def is_complete(self) -> bool:
        """True if the trial has been trained to its end, with a value."""
        return self.state == "COMPLETE"


class CellSearch:
    """Search of one combination.

    Args:
        cell: the combination.
        file: the study's search.
        folder: folder of the journal and the trials.
        defaults: the combination's own values.
        metric: metric that is chosen by.
        planned: run of the combination with its own values, whose rounds the trials have.
    """

    def __init__(
        self,
        cell: Cell,
        file: SearchFile,
        folder: Path,
        defaults: Mapping[str, Any],
        metric: Metric,
        planned: PlannedRun,
    ) -> None:
        self.cell, self.file, self.folder, self.metric = cell, file, folder, metric
        self.flags, self.defaults, self.planned = file.flags[cell.name], defaults, planned
        self.active: dict[int, optuna.trial.Trial] = {}

    @cached_property
    def _study(self) -> optuna.study.Study:
        """Optuna's study, which is made if it does not exist."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder):
            storage, name = JournalStorage(JournalFileBackend(str(self.folder / JOURNAL))), self.folder.name
            if name not in optuna.get_all_study_names(storage):
                optuna.create_study(
                    study_name=name, storage=storage, direction="minimize" if self.metric.falls else "maximize"
                )
            study = optuna.load_study(study_name=name, storage=storage, pruner=_pruner(self.file))
            if not study.get_trials(deepcopy=False):
                study.enqueue_trial({**self.defaults})
        # Hyperband divides trials into brackets from its first call on, also for the sampler.
        study.pruner.prune(study, optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING))
        return study

    def trials(self) -> list[Trial]:
        """Return the trials that have begun."""
        if not (self.folder / JOURNAL).is_file():
            return []
        return [
            Trial(
                trial.number,
                {flag: trial.params[flag] for flag in self.flags if flag in trial.params},
                trial.state.name,
                nan if trial.value is None else trial.value,
                trial.user_attrs.get(UPLINK, 0.0),
                trial.user_attrs.get(SECONDS, 0.0),
                trial.user_attrs.get(SAID, ""),
            )
            for trial in self._study.get_trials(deepcopy=False)[: self.file.trials]
            if trial.state.name != "WAITING"
        ]

    def num_ended(self) -> int:
        """Return the number of trials that have ended."""
        return sum(trial.state != "RUNNING" for trial in self.trials())

    def winner(self) -> Trial | None:
        """Return the best trial of a search that has ended, the earlier one of two; None if it has not, or all trials failed."""
        trials = self.trials()
        complete = [trial for trial in trials if trial.is_complete]
        if self.num_ended() < self.file.trials or not complete:
            return None
        sign = -1 if self.metric.falls else 1
        return max(complete, key=lambda trial: (sign * trial.value, -trial.number))

    def best_so_far(self) -> dict[int, float]:
        """Return the best value after each number of trials, from the first one that has a value on."""
        better, best = (min if self.metric.falls else max), dict[int, float]()
        for trial in self.trials():
            known = [*[*best.values()][-1:], *([trial.value] if trial.is_complete else [])]
            best |= {trial.number + 1: better(known)} if known else {}
        return best

    def arguments(self, flags: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the arguments that a choice of values adds to those of the combination."""
        return tuple(f"--{flag}={written(value)}" for flag, value in flags.items())

    def run(self, number: int, flags: Mapping[str, Any]) -> PlannedRun:
        """Return the run of a trial."""
        arguments = (*self.cell.arguments, *self.arguments(flags), *seeded(self.file.seed))
        folder = self.folder / f"trial-{number}"
        return replace(self.planned, seed=self.file.seed, folder=folder, arguments=arguments, trial=number)

    def take(self) -> PlannedRun | None:
        """Return a trial that was begun and that nobody trains, or else a new one; None if there is none at this moment."""
        study = self._study  # which is made under the same lock
        with locked(self.folder):
            for trial in self.trials():
                if trial.state == "RUNNING" and trial.number not in self.active:
                    run = self.run(trial.number, {})
                    if is_locked(run):
                        continue
                    self._go_on(trial.number)
                    if PRUNED in self.active[trial.number].user_attrs or (run.folder / DONE).is_file():
                        self.ended(run, None)
                    elif (run.folder / FAILED).is_file():
                        self.ended(run, failure_of(run))
                    else:
                        return self.run(trial.number, self._suggested(trial.number))
            number = len(self.trials())
            if number >= self.file.trials:
                return None
            self._sample(number)
            self.active[number] = study.ask()
            return self.run(number, self._suggested(number))

    def _go_on(self, number: int) -> None:
        """Take over a trial whose process has ended before it."""
        from optuna.trial import Trial as OpenTrial

        self._sample(number)
        frozen = self._study.get_trials(deepcopy=False)[number]
        self.active[number] = OpenTrial(self._study, frozen._trial_id)

    def _sample(self, number: int) -> None:
        """Let the sampler draw for a trial what it draws whenever it is asked, also after a search was stopped."""
        from optuna.samplers import TPESampler

        digest = hashlib.sha256(f"{self.file.seed} {number}".encode()).digest()
        self._study.sampler = TPESampler(seed=int.from_bytes(digest[:4], "big"))

    def _suggested(self, number: int) -> dict[str, Any]:
        """Return the values of a trial, which the journal keeps."""
        return {flag: _suggest(self.active[number], flag, values) for flag, values in self.flags.items()}

    def should_stop(self, run: PlannedRun) -> bool:
        """True if a trial is worse than others at a rung that it has passed."""
        if not self.file.rungs:
            return False
        try:
            record = read_run(run.folder)
        except UserError:  # no round has been logged
            return False
        return self._is_pruned(run, record)

    def _is_pruned(self, run: PlannedRun, record: Record) -> bool:
        """Report what a trial had reached at each rung that it has passed, until one prunes it."""
        assert run.trial is not None
        trial = self.active[run.trial]
        if PRUNED in trial.user_attrs:
            return True
        for rung in self.file.rungs:
            value = self._reached(record, rung) if record.spent[self.file.axis][-1] >= rung else None
            if value is None or rung in self._study.get_trials(deepcopy=False)[run.trial].intermediate_values:
                continue
            trial.report(value, rung)
            if trial.should_prune():
                trial.set_user_attr(PRUNED, rung)
                return True
        return False

    def _reached(self, record: Record, limit: float) -> float | None:
        """Return what a run had reached by a cost: the mean of its last evaluations until then; None without any."""
        none = np.full(len(record.columns["round"]), nan)
        values, broken = record.columns.get(self.metric.name, none), record.not_finite.get(self.metric.name, False)
        counts = (~np.isnan(values) | broken) & (record.spent[self.file.axis] <= limit)
        return final(values[counts]) if counts.any() else None

    def ended(self, run: PlannedRun, said: str | None) -> None:
        """Tell Optuna how a trial has ended."""
        from optuna.trial import TrialState

        assert run.trial is not None
        trial, value, state = self.active[run.trial], None, TrialState.FAIL
        try:
            record = read_run(run.folder)
        except UserError as error:
            said = said or str(error)
        else:
            seconds = record.wall_seconds[-1]
            trial.set_user_attr(UPLINK, float(record.spent["uplink"][-1]))
            trial.set_user_attr(SECONDS, float(seconds) if isfinite(seconds) else 0.0)
            if said is None and self._is_pruned(run, record):
                state = TrialState.PRUNED
            elif said is None:
                value = self._reached(record, self.file.limit)
                if value is None or not isfinite(value):
                    said = f"it has no finite {self.metric.name} within the budget"
                else:
                    state = TrialState.COMPLETE
        if state == TrialState.FAIL:
            trial.set_user_attr(SAID, said or "")
        self._study.tell(trial, value if state == TrialState.COMPLETE else None, state, skip_if_finished=True)
        del self.active[run.trial]

    def elsewhere(self, run: PlannedRun) -> None:
        """Leave a trial to the process that trains it."""
        assert run.trial is not None
        self.active.pop(run.trial, None)


class Searches:
    """Searches of all combinations, as a supply of runs: each combination in turn begins a trial."""

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
        """Return a trial to begin, of the combination with the fewest here, and of these with the fewest so far."""
        order = sorted(self.by_cell.values(), key=lambda search: (len(search.active), len(search.trials())))
        return next((run for search in order if (run := search.take()) is not None), None)

    def should_stop(self, run: PlannedRun) -> bool:
        """True if a trial is pruned."""
        return self.by_cell[run.cell].should_stop(run)

    def ended(self, run: PlannedRun, said: str | None) -> None:
        """Note how a trial has ended."""
        self.by_cell[run.cell].ended(run, said)

    def elsewhere(self, run: PlannedRun) -> None:
        """Note that another process trains a trial."""
        self.by_cell[run.cell].elsewhere(run)

    def left(self, active: Sequence[PlannedRun]) -> str:
        """Return in words how many trials have not ended."""
        total = sum(search.file.trials for search in self.by_cell.values())
        ended = sum(search.num_ended() for search in self.by_cell.values())
        return f" ({total - ended} of {total} trials left)" if ended < total else ""

    def rounds_done(self) -> int:
        """Return the rounds of all trials that have ended, as many as were planned, and those that others have logged."""
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
        """Return the winner's arguments for each combination whose search has ended with one."""
        winners = {name: (search, search.winner()) for name, search in self.by_cell.items()}
        return {name: search.arguments(won.flags) for name, (search, won) in winners.items() if won is not None}

    def check_winners(self) -> None:
        """Raise `UserError` if a search has ended without a winner."""
        for name, search in self.by_cell.items():
            said = [trial.said for trial in search.trials()]
            require(
                name in self.winners(),
                f"the search of {name} has no winner, as all of its {search.file.trials} trials failed, the last one with: "
                f"{(said or [''])[-1].rstrip('.')}; remove {search.folder} to search again.",
            )


def open_searches(file: StudyFile, out: Path, resolve: Resolve, checks: bool = True) -> Searches:
    """Return the searches of a study.

    Args:
        file: study with a search.
        out: folder of the study.
        resolve: function that checks arguments and returns the configuration.
        checks: try the ends of all ranges, too.

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
    """Return a function that plans a fit until its budget is spent, and warns if its last round comes before."""

    def planned(arguments: Sequence[str]) -> Plan:
        costs, budget = plan(arguments), file.budget
        if budget is None:
            return costs
        if costs.uplink_bytes < budget:
            said = f"the last of its {costs.rounds} rounds comes before {in_bytes(budget)} are sent: raise trainer.max_rounds."
            return replace(costs, warnings=(*costs.warnings, said))
        before, every = costs.setup_uplink_bytes, (costs.uplink_bytes - costs.setup_uplink_bytes) / costs.rounds
        share = min(1.0, ceil(max(budget - before, 1) / every) / costs.rounds)
        downlink = costs.setup_downlink_bytes + share * (costs.downlink_bytes - costs.setup_downlink_bytes)
        uplink = before + share * (costs.uplink_bytes - before)
        return replace(costs, uplink_bytes=uplink, downlink_bytes=downlink, seconds=share * costs.seconds)

    return planned


def _pruner(file: SearchFile) -> optuna.pruners.BasePruner:
    """Return the pruner whose rungs are the file's."""
    from optuna.pruners import HyperbandPruner, NopPruner, SuccessiveHalvingPruner

    pruning = file.pruning
    if pruning is None:
        return NopPruner()
    if pruning.kind == "halving":
        return SuccessiveHalvingPruner(min_resource=pruning.first, reduction_factor=pruning.factor)
    return HyperbandPruner(min_resource=pruning.first, max_resource=int(file.limit), reduction_factor=pruning.factor)


def _suggest(trial: optuna.trial.Trial, flag: str, values: Range) -> Any:
    """Return the value of a flag, which is drawn unless the trial has one."""
    if values.choices:
        return trial.suggest_categorical(flag, values.choices)
    if values.integer:
        return trial.suggest_int(flag, int(values.low), int(values.high), log=values.log)
    return trial.suggest_float(flag, values.low, values.high, log=values.log)
