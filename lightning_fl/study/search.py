"""Search for the best flags of one combination of a study, by Optuna.

Every combination has a folder `search-DIGEST` with Optuna's journal and a folder for each trial, which is a run like all others.
The value of a trial is read from its metrics.csv: the mean of its last evaluations (`lightning_fl.outputs.metric.final`) within
the budget or up to a rung. The lock of a run's folder tells whether a process still trains the trial, so that another process
resumes a trial whose process was killed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_fl.errors import UserError
from lightning_fl.outputs.metric import final
from lightning_fl.report.comparison import Metric
from lightning_fl.report.document import locked
from lightning_fl.report.records import Record, read_run
from lightning_fl.study.runner import DONE, FAILED, failure_of, is_locked
from lightning_fl.study.search_file import Range, SearchFile, written
from lightning_fl.study.study_file import Cell, PlannedRun, seeded

if TYPE_CHECKING:
    import optuna

JOURNAL = "journal.log"
PRUNED, UPLINK, SECONDS, SAID = "pruned_at", "uplink_bytes", "seconds", "said"
"""Attributes of a trial in Optuna's journal."""


@dataclass(frozen=True)
class Trial:
    """Trial of a search.

    Attributes:
        number: its index; trial 0 has the combination's own values.
        flags: value of each flag.
        state: `COMPLETE`, `PRUNED`, `FAIL`, or `RUNNING` for one that has not ended.
        value: metric within the budget, or at the last rung of a pruned trial; NaN for other trials.
        uplink_bytes: bytes that all clients have sent.
        seconds: time of its rounds.
        said: reason why it failed; empty for other trials.
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
        metric: metric by which the winner is chosen.
        planned: run of the combination with its own values; trials have the same number of rounds.
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
        """Optuna's study, created if it does not exist."""
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
        # Hyperband sets up its brackets at the first call; the sampler needs them too.
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
        """Return the best trial of a finished search, the earlier of two equal ones; None if unfinished or if all failed."""
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
        """Return the arguments that a choice of values adds to the combination's own arguments."""
        return tuple(f"--{flag}={written(value)}" for flag, value in flags.items())

    def run(self, number: int, flags: Mapping[str, Any]) -> PlannedRun:
        """Return the run of a trial."""
        arguments = (*self.cell.arguments, *self.arguments(flags), *seeded(self.file.seed))
        folder = self.folder / f"trial-{number}"
        return replace(self.planned, seed=self.file.seed, folder=folder, arguments=arguments, trial=number)

    def take(self) -> PlannedRun | None:
        """Return a trial that was begun but that no process trains, or a new one; None if there is none at this moment."""
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
        """Take over a trial whose process ended too early."""
        from optuna.trial import Trial as OpenTrial

        self._sample(number)
        frozen = self._study.get_trials(deepcopy=False)[number]
        self.active[number] = OpenTrial(self._study, frozen._trial_id)

    def _sample(self, number: int) -> None:
        """Seed the sampler for a trial, so that a stopped and resumed search draws the same values."""
        from optuna.samplers import TPESampler

        digest = hashlib.sha256(f"{self.file.seed} {number}".encode()).digest()
        self._study.sampler = TPESampler(seed=int.from_bytes(digest[:4], "big"))

    def _suggested(self, number: int) -> dict[str, Any]:
        """Return the values of a trial, as the journal stores them."""
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
        """Report the value of a trial at each rung that it has passed, until one prunes it."""
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
        """Return the value of a run at a cost: the mean of its last evaluations up to it; None without any."""
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
