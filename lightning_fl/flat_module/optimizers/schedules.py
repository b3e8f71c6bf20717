"""Schedulers in a federation: hyper-parameters that go on from round to round, and restart for every client.

Schedulers with `interval: epoch` step once a round. Every client starts from the hyper-parameters of the round (learning rate,
momentum, betas and all others of the optimiser's groups), and schedulers with `interval: step` are made anew on these.

In manual optimisation the module steps its schedulers itself: a step between rounds moves the round, and one in a client's
training that client, after which the next client starts from the round again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from lightning_fl.checks.misconfiguration import MisconfigurationError
from lightning_fl.errors import UserError, require
from lightning_fl.flat_module.optimizers.schedule_lengths import most_steps, schedule_length
from lightning_fl.settings.settings import Change, RunSettings

ABSOLUTE = (CyclicLR, OneCycleLR)
"""Schedulers whose rates are their own arguments, whatever the rate of the optimiser."""

Options = dict[str, Any]
"""Hyper-parameters of one group of an optimiser, by name."""


class Schedules:
    """Schedulers of an optimiser, with the hyper-parameters of the round.

    Outside a local training the optimiser's groups hold the hyper-parameters from which the next client starts.

    Attributes:
        configs: the schedulers, as Lightning's `LRSchedulerConfig`; callbacks may replace some.
        settings: hyper-parameters of the optimiser and its schedulers as `configure_optimizers` returned them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        configs: list[LRSchedulerConfig],
        advance: Callable[[Any, Any], None],
        by_module: bool = False,
    ) -> None:
        """Take over the schedulers that `configure_optimizers` has just created.

        Args:
            optimizer: their optimiser.
            configs: the schedulers.
            advance: the module's `lr_scheduler_step`, called with a scheduler and the value of its metric or None.
            by_module: True if the module steps them itself, whatever their interval.

        Raises:
            UserError: a scheduler that watches a metric, as ReduceLROnPlateau does, has the interval `step`.
        """
        for config in configs if not by_module else []:
            require(
                config.interval == "epoch" or not config.reduce_on_plateau,
                f"{type(config.scheduler).__name__} watches a metric of the round, so its interval must be 'epoch', got 'step'.",
            )
        self.configs = configs
        self._advance = advance
        self._optimizer = optimizer
        self._groups = list(optimizer.param_groups)
        self._client: list[Options] = []
        self._present: dict[str, Any] | None = None
        self._by_module, self._says_restarts = by_module, True
        self._step_schedulers = [config for config in configs if config.interval == "step" and not by_module]
        self._fresh = [deepcopy(config.scheduler.state_dict()) for config in self._step_schedulers]
        if self._step_schedulers and len(configs) > len(self._step_schedulers):
            # The rates of the round are those without step-wise schedulers.
            for group in self._groups:
                group["lr"] = deepcopy(group.get("initial_lr", group["lr"]))
            for config in configs:
                if config.interval == "epoch":
                    _begin(config.scheduler, self._groups)
        self._first = self._options()
        self._round = self._options()
        self._prepare_clients()
        self.settings = self._settings(type(optimizer).__name__)

    @property
    def moves_within_round(self) -> bool:
        """True if hyper-parameters change from step to step."""
        return bool(self._step_schedulers)

    @property
    def moved_by_module(self) -> bool:
        """True if the module steps schedulers itself."""
        return self._by_module and bool(self.configs)

    @property
    def _restarting(self) -> list[LRSchedulerConfig]:
        """Schedulers with whose present state every client of the round starts."""
        return self.configs if self._by_module else self._step_schedulers

    @property
    def _of_rounds(self) -> list[LRSchedulerConfig]:
        """Schedulers whose state goes on from round to round."""
        return [config for config in self.configs if self._by_module or config.interval == "epoch"]

    @property
    def cycles_momentum(self) -> bool:
        """True if a scheduler changes the momentum."""
        return any(
            getattr(part, "cycle_momentum", False) for config in self.configs for part in parts_of(config.scheduler)
        )

    def adopt(self) -> None:
        """Adopt changes that callbacks have made since the last local training, such as a new learning rate."""
        self._adopt_groups()
        for group, round_group, client_group in zip(self._groups, self._round, self._client, strict=True):
            changed = _changed(group, client_group)
            round_group.update(deepcopy(changed))
            client_group.update(deepcopy(changed))
        if self._by_module:  # which may have stepped its schedulers in a hook
            self._keep_states()

    def _keep_states(self) -> None:
        """Keep the states of the schedulers with which every client starts."""
        self._client_states = [deepcopy(config.scheduler.state_dict()) for config in self._restarting]

    def _adopt_groups(self) -> None:
        """Adopt groups that callbacks have added, or put in the place of others.

        Lightning's finetuning callbacks replace all groups of a resumed run by those that they remember, with their first rates,
        before the trainer restores the present ones; so here the present ones stay.
        """
        groups = list(self._optimizer.param_groups)
        if len(groups) == len(self._groups):
            replaced = any(now is not before for now, before in zip(groups, self._groups, strict=True))
            self._groups = groups
            if replaced:
                self._restore(self._client)
            return
        places = {id(group): place for place, group in enumerate(self._groups)}
        self._groups = groups
        known = [places.get(id(group)) for group in groups]
        now = self._options()
        self._first = [{} if place is None else self._first[place] for place in known]
        self._round = [now[i] if place is None else self._round[place] for i, place in enumerate(known)]
        self._client = [dict(now[i]) if place is None else self._client[place] for i, place in enumerate(known)]

    def end_client(self) -> None:
        """Restore the hyper-parameters and schedulers with which every client of the round starts."""
        if self._by_module and self._says_restarts:
            self._say_restarts()
        self._restore(self._client)
        for config, state in zip(self._restarting, self._client_states, strict=True):
            config.scheduler.load_state_dict(deepcopy(state))

    def _say_restarts(self) -> None:
        """Say once that a client's steps of a scheduler do not reach the next client."""
        for config, state in zip(self.configs, self._client_states, strict=True):
            if getattr(config.scheduler, "last_epoch", 0) != (state or {}).get("last_epoch", 0):
                self._says_restarts = False
                rank_zero_info(
                    f"{type(config.scheduler).__name__} steps while a client trains, and the next client begins again with the "
                    "learning rates of the round; steps between rounds, as in on_train_epoch_end, change these."
                )
                return

    def after_step(self, num_batches: int) -> None:
        """Advance the step-wise schedulers whose frequency divides the client's batches so far; Lightning counts batches, too."""
        for config in self._step_schedulers:
            if num_batches % config.frequency == 0:
                scheduler: Any = config.scheduler
                try:
                    scheduler.step()
                except ValueError as error:
                    raise UserError(
                        f"{type(scheduler).__name__} fails after {num_batches} batches of a local training: {error}"
                    ) from error

    def check_rounds(self, module: str, num_rounds: int) -> None:
        """Raise `UserError` if an epoch-wise scheduler, which steps once a round, refuses so many steps."""
        for config in self.configs if not self._by_module else []:
            most, steps = most_steps(config.scheduler), num_rounds // config.frequency
            require(
                config.interval == "step" or steps <= most,
                f"{_name(config.scheduler)} of {module} has total_steps={most:g}, but steps {steps} times, after "
                f"{_every(config.frequency, 'round')}: give it total_steps=trainer.max_epochs, or the interval 'step'.",
            )

    def check_steps(self, module: str, client: int, num_steps: int, accumulate: int) -> None:
        """Check the step-wise schedulers against the longest local training of a client; warn of longer schedules.

        Args:
            module: name of the module, for messages.
            client: client that makes the most steps in a round.
            num_steps: its optimiser steps.
            accumulate: batches of a step.

        Raises:
            UserError: a scheduler refuses so many steps.
        """
        for config in self._step_schedulers:
            if config.frequency > 1 and accumulate > 1:
                continue  # a frequency counts batches, so that it may pass over the ends of steps
            name, steps = _name(config.scheduler), num_steps // config.frequency
            most, length = most_steps(config.scheduler), schedule_length(config.scheduler)
            require(
                steps <= most,
                f"{name} of {module} has total_steps={most:g}, but client {client} makes {steps} steps in a round: give it "
                "total_steps=trainer.estimated_stepping_batches.",
            )
            if length > steps:
                rank_zero_warn(
                    f"The schedule of {name} is made for {length} steps, but each client begins it anew, with at most {steps} "
                    "in a round: make it for trainer.estimated_stepping_batches, the steps of a client, or give it the "
                    "interval 'epoch', which counts rounds."
                )

    def end_round(self, num_rounds: int) -> None:
        """Advance the epoch-wise schedulers, with a round as the epoch; `end_plateau` advances those that monitor a metric.

        Args:
            num_rounds: rounds completed.
        """
        self._move([config for config in self._due(num_rounds) if not config.reduce_on_plateau], {})

    def end_plateau(self, num_rounds: int, metrics: Mapping[str, Any]) -> None:
        """Advance the schedulers that monitor a metric.

        Raises:
            UserError: the metric was not logged.
        """
        self._move([config for config in self._due(num_rounds) if config.reduce_on_plateau], metrics)

    def _due(self, num_rounds: int) -> list[LRSchedulerConfig]:
        return [c for c in self._of_rounds if num_rounds % c.frequency == 0 and not self._by_module]

    def _move(self, configs: list[LRSchedulerConfig], metrics: Mapping[str, Any]) -> None:
        if not configs:
            return
        self.adopt()
        self._restore(self._round)
        for config in configs:
            scheduler: Any = config.scheduler
            if not config.reduce_on_plateau:
                self._advance(scheduler, None)
            elif config.monitor is not None and config.monitor in metrics:
                self._advance(scheduler, metrics[config.monitor])
            else:
                missing = f"{type(scheduler).__name__} conditioned on metric {config.monitor} which is not available"
                if config.strict:
                    available = ", ".join(sorted(metrics)) or "none"
                    raise MisconfigurationError(
                        f"{missing}. Available metrics are: {available}. Name one as the scheduler's `monitor`."
                    )
                rank_zero_warn(f"{missing} but strict is False, so the learning rate stays.", category=RuntimeWarning)
        self._round = self._options()
        self._prepare_clients()

    def _prepare_clients(self) -> None:
        """Make the step-wise schedulers anew on the hyper-parameters of the round, and keep the result for every client."""
        self._restore(self._round)
        if self._of_rounds:
            for config, state in zip(self._step_schedulers, self._fresh, strict=True):
                config.scheduler.load_state_dict(deepcopy(state))
                if not any(isinstance(part, ABSOLUTE) for part in parts_of(config.scheduler)):
                    _rebase(config.scheduler, self._groups)
                _begin(config.scheduler, self._groups)
        self._client = self._options()
        self._keep_states()

    @contextmanager
    def constant(self, rate: float | None) -> Iterator[None]:
        """Train with one learning rate in all groups and without schedulers; with None, as always."""
        self.adopt()
        before = self._client, self._step_schedulers, self._client_states
        if rate is not None:
            self._client, self._step_schedulers, self._client_states = [{**x, "lr": rate} for x in self._client], [], []
            self._restore(self._client)
        try:
            yield
        finally:
            self._client, self._step_schedulers, self._client_states = before
            self._restore(self._client)

    @contextmanager
    def as_of(self, state: dict[str, Any], num_rounds: int, present: int) -> Iterator[None]:
        """Train with the hyper-parameters of an earlier round; a resumed run that has changed them trains with its own.

        Args:
            state: result of `state_dict` in that round.
            num_rounds: rounds completed then.
            present: rounds completed now.
        """
        self.adopt()
        if any(map(_moves_rates, self.changes_since(state))):
            yield
            return
        self._present = now = deepcopy(self.state_dict())
        try:
            self.load_state_dict(state, num_rounds)
            yield
        finally:
            self._present = None
            self.load_state_dict(now, present)

    def _options(self) -> list[Options]:
        """Return copies of the groups' hyper-parameters."""
        return [{name: deepcopy(x) for name, x in group.items() if name != "params"} for group in self._groups]

    def _restore(self, options: Sequence[Options]) -> None:
        """Give the groups these hyper-parameters and no others, because some optimisers count their steps in the groups."""
        for group, saved in zip(self._groups, options, strict=True):
            for name in group.keys() - saved.keys() - {"params"}:
                del group[name]
            group.update(deepcopy(_changed(saved, group)))

    def _settings(self, name: str) -> RunSettings:
        """Return the optimiser's class and hyper-parameters, and those of its schedulers without the rates that follow."""
        settings = RunSettings()
        settings.add("optimizer", name, True)
        settings.add("optimizer.groups", len(self._first), True)
        for position, options in enumerate(self._first):
            prefix = "optimizer" if len(self._first) == 1 else f"optimizer.{position}"
            for option in options:
                if option not in ("params", "initial_lr"):
                    settings.add(f"{prefix}.{option}", options[option], True)
        schedulers = [part for config in self.configs for part in parts_of(config.scheduler)]
        settings.add("schedulers", [type(part).__name__ for part in schedulers], True)
        for position, part in enumerate(schedulers):
            for option, value in (part.state_dict() or {}).items():  # one of the user's may have none
                if not option.startswith("_") and option not in ("base_lrs", "last_epoch"):
                    settings.add(f"schedulers.{position}.{option}", value, True)
        return settings

    def changes_since(self, state: dict[str, Any]) -> list[Change]:
        """Return how the optimiser and its schedulers differ from those of a result of `state_dict`.

        Raises:
            UserError: the rates differ, but follow from metrics of rounds that this run did not see.
        """
        changes = self.settings.changes_since(state["settings"])
        if any(map(_moves_rates, changes)):
            for config in self.configs:
                watches, name = config.reduce_on_plateau, type(config.scheduler).__name__
                require(
                    not watches and not self._by_module,
                    f"{name} cannot go on with other rates ({', '.join(map(str, changes))}), because its rates depend on "
                    f"{'the metrics of' if watches else 'where the module stepped it in'} earlier rounds: use the old values, or "
                    "start a new run in another folder.",
                )
        return changes

    def state_dict(self) -> dict[str, Any]:
        """Return the round's learning rates, its other hyper-parameters that have changed, and the epoch-wise schedulers.

        They are those of the present round also while clients train `as_of` an earlier one.
        """
        if self._present is not None:
            return self._present
        changed = [_changed(now, first) for now, first in zip(self._round, self._first, strict=True)]
        return {
            "round_rates": [options["lr"] for options in self._round],
            "round_options": [{name: x for name, x in options.items() if name != "lr"} for options in changed],
            "schedulers": self._client_states
            if self._by_module  # also while a client trains, whose steps are its own
            else [config.scheduler.state_dict() for config in self._of_rounds],
            "settings": self.settings.values,
        }

    def load_state_dict(self, state: dict[str, Any], num_rounds: int) -> None:
        """Restore a result of `state_dict`; if the rate or schedule has changed, set its rates after as many rounds."""
        self._adopt_groups()
        if changes := [change for change in self.changes_since(state) if _moves_rates(change)]:
            require(
                all(self._first),
                f"callbacks have added groups to the optimizer, whose rates are in the checkpoint, so the run cannot go on with "
                f"other rates ({', '.join(map(str, changes))}): use the old values, or start a new run in another folder.",
            )
            for completed in range(1, num_rounds + 1):
                self.end_round(completed)
            return
        saved_groups = zip(self._round, self._first, state["round_rates"], state["round_options"], strict=True)
        for round_group, first, rate, options in saved_groups:
            round_group.update(deepcopy({**first, **options, "lr": rate}))
        # Lightning's StochasticWeightAveraging adds a scheduler in the middle of a run, and restores it itself.
        for config, saved in zip(self._of_rounds, state["schedulers"], strict=False):
            config.scheduler.load_state_dict(deepcopy(saved))
        self._prepare_clients()


def check_schedulers(module: str, optimizers: Sequence[Any], configs: Sequence[LRSchedulerConfig]) -> None:
    """Raise `UserError` if a scheduler has no state to keep, or would move no optimiser that steps.

    Args:
        module: name of the module, for messages.
        optimizers: the optimisers that `configure_optimizers` returns.
        configs: the schedulers that it returns.
    """
    for config in configs:
        scheduler: Any = config.scheduler
        name = f"{type(scheduler).__name__} of {module}.configure_optimizers"
        require(
            hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict"),
            f"{name} has no state_dict or load_state_dict, which carry it from round to round: write them.",
        )
        if all(getattr(scheduler, "optimizer", optimizer) is not optimizer for optimizer in optimizers):
            raise MisconfigurationError(
                f"{name} is attached with an optimizer that wasn't returned, so it would have no effect: return that one, too."
            )


def parts_of(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and, if it is chained or sequential, those that it consists of."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from parts_of(part)


def _name(scheduler: Any) -> str:
    """Return the class of the scheduler, or of the part that limits its steps."""
    limits = [part for part in parts_of(scheduler) if isinstance(part, OneCycleLR)]
    return type(limits[0] if limits else scheduler).__name__


def _every(frequency: int, unit: str) -> str:
    return f"each {unit}" if frequency == 1 else f"every {frequency} {unit}s"


def _moves_rates(change: Change) -> bool:
    """True if learning rates in a checkpoint are not those of the changed optimiser or schedulers."""
    return change.key.endswith((".lr", ".groups")) or change.key.startswith("schedulers")


def _changed(options: Options, earlier: Options) -> Options:
    """Return the hyper-parameters that are new or have another value."""
    changed = {}
    for name, value in options.items():
        if name != "params":
            differs: Any = name not in earlier or value != earlier[name]
            if differs.any() if isinstance(differs, Tensor) else differs:
                changed[name] = value
    return changed


def _rebase(scheduler: Any, groups: Sequence[Options]) -> None:
    """Let the groups' present learning rates be those from which a scheduler computes its own."""
    for group in groups:
        group["initial_lr"] = deepcopy(group["lr"])
    for part in parts_of(scheduler):
        if hasattr(part, "base_lrs"):
            part.base_lrs = [deepcopy(group["lr"]) for group in groups]


def _begin(scheduler: Any, groups: Sequence[Options]) -> None:
    """Apply a scheduler that has made no step to the groups' present learning rates, as its constructor does."""
    if isinstance(scheduler, ChainedScheduler):
        for part in scheduler._schedulers:
            _begin(part, groups)
    elif isinstance(scheduler, SequentialLR):
        for group in groups:
            group["lr"] = deepcopy(group["initial_lr"])
        first = scheduler._schedulers[bisect_right(scheduler._milestones, 0)]
        scheduler.recursive_undo(first)
        first._initial_step()
    elif isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
        scheduler.last_epoch -= 1
        scheduler._initial_step()
    if isinstance(scheduler, LRScheduler):
        scheduler._last_lr = [deepcopy(group["lr"]) for group in groups]
