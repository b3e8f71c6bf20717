"""Rehearse a run on copies of module and trainer, and throw it away: `FederatedTrainer.plan`.

All checks of a fit see the user's own settings and callbacks, so that a plan refuses what a fit refuses, and nothing else. Only
after them are flags set for the rehearsal, and callbacks left out.

The engine itself counts bytes and steps, round by round, so that warm-ups, masks and prunings are in them. The first clients of
the first round train whole, and are timed. Of the others one makes a step on a few samples in each pass, and stands for all:
their messages have the same size. A second rehearsal starts from another model: bytes, steps and multiply-accumulates that
differ from the first one's depend on what is trained. Bytes of parts that declare that their size depends on values are never
called exact, as two rehearsals that agree prove nothing of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_fl.checks import listed, overrides
from lightning_fl.errors import UserError, require
from lightning_fl.outputs.plan import Plan
from lightning_fl.outputs.quiet import NOTES, PROFILES, quiet
from lightning_fl.outputs.traffic import in_directions
from lightning_fl.plan.needed_resources import (
    StatesToKeep,
    accelerator_peak_bytes,
    checkpoint_bytes,
    exceeded,
    peak_bytes,
    rounds_paid,
)
from lightning_fl.plan.short_training import ShortTraining
from lightning_fl.processes import gather_objects
from lightning_fl.slots import Part, parts_in
from lightning_fl.state.run_state import Run
from lightning_fl.trainer.callback_list import CallbackList
from lightning_fl.trainer.fit_loop import FitLoop
from lightning_fl.trainer.lightning_interface import TrainerInterface
from lightning_fl.trainer.session import Given, algorithm_of, session

CHECKED = "lightning_fl.callbacks."
"""Package whose callbacks check in `setup` what they need, and do nothing else."""
STOCK = (CHECKED, "lightning.", "pytorch_lightning.")
"""Packages whose callbacks log nothing that others monitor."""
MOST_SECONDS = 5.0
"""Seconds after the first round in which further rounds begin to be rehearsed."""
MOST_ROUNDS_LATER = 2
"""Rounds to rehearse after these seconds, at most, until one sends as much as the one before: after a pruning it does."""


@dataclass
class Rehearsed:
    """What a rehearsal has found.

    Attributes:
        rows: rows of its rounds, as metrics.csv has them.
        setup_bits: bits of the set-up by direction.
        steps: optimiser steps of each round, those that the clients would make and those that the server has made.
        setup_steps: optimiser steps before the first round.
        setup_seconds: seconds of the set-up, with the steps that were left out.
        beside_seconds: seconds of each round, callbacks' prunings included, without the clients' training.
        training_seconds: estimate of the seconds of the clients' training in a round.
        evaluation_seconds: seconds of one validation, and of one test.
        peak: bytes of host memory of this process after the first round; None if unknown.
        accelerator_peak: bytes of the accelerator's memory that the first round took; None on a CPU.
    """

    rows: list[dict[str, float]] = field(default_factory=list)
    setup_bits: dict[str, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    setup_steps: int = 0
    setup_seconds: float = 0.0
    beside_seconds: list[float] = field(default_factory=list)
    training_seconds: float = 0.0
    evaluation_seconds: dict[str, float] = field(default_factory=dict)
    peak: int | None = None
    accelerator_peak: int | None = None

    @property
    def macs(self) -> list[int]:
        """Multiply-accumulates of the forward passes of the clients' training in each round; 0 if unknown.

        Samples on which clients have only computed their loss count as a third, as a gradient takes three forward passes.
        """
        found = []
        for row in self.rows:
            macs = int(row.get("model/macs", 0))
            passed = sum(int(row.get(f"clients/{name}_samples", 0)) for name in ("asked", "loss"))
            trained = int(row.get("clients/macs", macs * int(row["clients/samples"])))
            found.append(trained + macs * passed // 3)
        return found

    def bits(self, direction: str) -> list[int]:
        """Return the bits of each round in a direction."""
        return [int(row[f"comm/{direction}link_bits"]) for row in self.rows]


def rehearse(
    trainer: TrainerInterface,
    model: LightningModule,
    datamodule: LightningDataModule | None,
    algorithm: Given | None,
) -> Plan:
    """Return the plan of a fit.

    Raises:
        UserError: an argument does not fit, as in a fit, or the module cannot be copied.
    """
    algorithm = algorithm_of(algorithm)
    before = getattr(datamodule, "trainer", None)
    try:
        with isolate_rng(), quiet(*NOTES, PROFILES):
            stage = _stage(trainer)
            with session(stage, TrainerFn.FITTING, _copied(model), datamodule, algorithm, None, None):
                require(
                    not stage.data.reads_own_loaders,
                    "plan needs the number of each client's batches, which loaders of their own do not tell: train a few rounds "
                    "instead.",
                )
                first = _Rehearsal(stage, times=True)
                rehearsed = first.run()
                plan = first.plan(rehearsed, trainer)
            again = _stage(trainer)
            if trainer.fabric.broadcast(first.follows_training or rehearsed.setup_seconds > MOST_SECONDS):
                return plan
            with session(again, TrainerFn.FITTING, _copied(model), datamodule, algorithm, None, None):
                other = _Rehearsal(again, times=False).run()
    finally:
        if isinstance(datamodule, LightningDataModule):
            datamodule.trainer = before
    depends = any(part.size_depends_on_values for part in first.parts)
    has_same_bits = (
        not depends
        and rehearsed.setup_bits == other.setup_bits
        and all(_are_same(rehearsed.bits(way), other.bits(way)) for way in ("up", "down"))
    )
    has_same_work = (
        rehearsed.setup_steps == other.setup_steps
        and _are_same(rehearsed.steps, other.steps)
        and _are_same(rehearsed.macs, other.macs)
    )
    return replace(plan, is_fixed=has_same_bits, has_fixed_work=has_same_work)


def _are_same(one: Sequence[int], other: Sequence[int]) -> bool:
    """True if two rehearsals have the same counts in the rounds that both have."""
    return all(count == again for count, again in zip(one, other, strict=False))


class _Rehearsal(Callback):
    """One rehearsal, in a session; as a callback it counts the steps of each round, and ends when the time is over."""

    def __init__(self, trainer: TrainerInterface, times: bool) -> None:
        """Build the federation.

        Args:
            trainer: copy of the trainer, whose session this is.
            times: True to train and time the first clients; False to start from another model.
        """
        self._trainer, self._times = trainer, times
        self._loop: FitLoop = trainer.fit_loop
        self._loop.start()
        engine = self.engine = self._loop.engine
        _leave_out(trainer)
        engine.most_setup_steps = 1
        num_whole = 0
        if times:
            num_whole = getattr(engine.runner, "clients_at_once", 1)
        self._runner = engine.runner = ShortTraining(engine.runner, num_whole, seed=int(times))
        self._found, self._batches = Rehearsed(), list[int]()
        self._bits, self._rounds_later, self._most_steps = (-1, -1), 0, 0
        trainer.callbacks.append(self)

    def run(self) -> Rehearsed:
        """Run the rounds, as many as the time allows."""
        rehearsed, engine, trainer = self._found, self.engine, self._trainer
        if not self._times:
            _disturb(engine.run)
        begun = perf_counter()
        self._loop.prepare()
        done, left_out = engine.run.num_steps, engine.setup_steps_left_out
        rehearsed.setup_seconds = (perf_counter() - begun) * (done + left_out) / max(1, done)
        rehearsed.setup_steps, rehearsed.setup_bits = done + left_out, engine.run.ledger.setup()
        self._steps_before = done
        self._loop.run_rounds(None)
        rehearsed.rows = self._loop.rows
        profiler: Any = trainer.profiler
        durations = profiler.recorded_durations
        rehearsed.evaluation_seconds = {
            name: durations[name][-1] for name in ("validate", "test") if durations.get(name)
        }
        if self._runner.whole_clients:
            batch_seconds = self._runner.whole_seconds / max(1, self._batches_of(self._runner.whole_clients))
            rehearsed.training_seconds = batch_seconds * fmean(self._batches)
        if rehearsed.rows:
            parts = durations["on_train_epoch_start"], durations["train_round"], self._runner.seconds_of_rounds
            rehearsed.beside_seconds = [
                start + max(0.0, whole - inside) for start, whole, inside in zip(*parts, strict=True)
            ]
        return rehearsed

    @property
    def parts(self) -> list[Part]:
        """All parts of the method, also those inside others."""
        method = self.engine.algorithm
        slots = (method.rule, method.uplink, method.downlink, method.exchange, method.aggregator)
        return list(parts_in([*slots, *method.steps, *method.personal]))

    @property
    def follows_training(self) -> bool:
        """True if the model will have a size that depends on what is trained."""
        return any(
            callback.size_follows_training(self._trainer.num_rounds)
            for callback in self._trainer.callbacks
            if hasattr(callback, "size_follows_training")
        )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Count the steps that the round's clients would make."""
        self._planned = self.engine.num_client_steps()
        self._successive = self.engine.run.num_successive_steps
        self._batches.append(self.engine.num_batches())
        self._runner.begin_round()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Count the steps of the round, and stop when the time is over, in a round that the following ones resemble."""
        self._evaluate_seldom()
        rehearsed, runner, run = self._found, self._runner, self.engine.run
        group = self.engine.group
        counts = group is None or group.is_first
        client_steps = sum(gather_objects(trainer.fabric, runner.num_steps if counts else 0))
        server_steps = run.num_steps - self._steps_before - client_steps
        self._steps_before = run.num_steps
        self._most_steps = run.num_successive_steps - self._successive
        rehearsed.steps.append(self._planned + max(0, server_steps))
        bits = run.ledger.bits("up"), run.ledger.bits("down")
        if len(rehearsed.steps) == 1:
            rehearsed.peak = peak_bytes()
            rehearsed.accelerator_peak = accelerator_peak_bytes(self.engine.flat_module)
            self._begun = perf_counter()
        elif trainer.fabric.broadcast(perf_counter() - self._begun > MOST_SECONDS):
            trainer.should_stop = bits == self._bits or self._rounds_later == MOST_ROUNDS_LATER
            self._rounds_later += 1
        self._bits = bits

    def _evaluate_seldom(self) -> None:
        """Validate and test in the last round alone, once the first validation has told which metrics there are."""
        trainer, configs = self._trainer, self._trainer.active_module.optimizer.schedules.configs
        if any(config.reduce_on_plateau for config in configs):  # which read a metric of each round
            return
        if self._loop.val_loop._has_run:
            trainer.val_every_n_rounds = max(1, trainer.max_rounds)
        if trainer.test_every_n_rounds is not None and self._loop.evaluation.tested is not None:
            trainer.test_every_n_rounds = max(1, trainer.max_rounds)

    def _batches_of(self, clients: Sequence[int]) -> int:
        """Return the batches of whole trainings of these clients, as `Engine.num_batches` counts them."""
        engine = self.engine
        trainings = 1 + sum(len(part.rules()) for part in engine.algorithm.personal)
        schedule, sizes = engine.work.schedule, engine.data.client_sizes
        return trainings * sum(schedule.num_batches(int(sizes[client])) for client in clients)

    def _num_rounds(self) -> int:
        """Return the rounds of the run, which `max_steps` may end before `max_rounds`."""
        stage, run = self._trainer, self.engine.run
        if not stage.steps_left:  # there is no limit, or the rehearsal has reached it
            return stage.num_rounds if stage.steps_left is None else run.round
        return min(stage.num_rounds, run.round + -(-stage.steps_left // max(1, self._most_steps)))

    def _share_of_last_round(self, rounds: int) -> Fraction:
        """Return the part of a round's steps that `max_steps` leaves to the last of so many rounds."""
        stage, run = self._trainer, self.engine.run
        if stage.steps_left is None or not self._most_steps:
            return Fraction(1)
        left = stage.steps_left - (rounds - run.round - 1) * self._most_steps
        return min(Fraction(1), Fraction(left, self._most_steps))

    def plan(self, rehearsed: Rehearsed, trainer: TrainerInterface) -> Plan:
        """Return the plan, in the session, given what was found; `trainer` has the user's flags."""
        stage, engine = self._trainer, self.engine
        rounds = self._num_rounds()
        up, down = (_continued(rehearsed.bits(way), rounds) for way in ("up", "down"))
        ways = (np.cumsum([rehearsed.setup_bits.get(way, 0), *of])[1:] / 8 for way, of in (("up", up), ("down", down)))
        sent = in_directions(*ways)
        rounds = rounds_paid(trainer, sent)
        up, down = up[:rounds], down[:rounds]
        totals = {way: rehearsed.setup_bits.get(way, 0) + sum(bits) for way, bits in (("up", up), ("down", down))}
        steps, macs = _continued(rehearsed.steps, rounds), _continued(rehearsed.macs, rounds)
        if rounds > len(rehearsed.steps) and (share := self._share_of_last_round(rounds)) != 1:
            steps[-1], macs[-1] = round(steps[-1] * share), round(macs[-1] * share)
        beside = float(np.median(rehearsed.beside_seconds)) if rehearsed.beside_seconds else 0.0
        round_seconds = beside + rehearsed.training_seconds
        evaluations = {"validate": trainer.val_every_n_rounds, "test": trainer.test_every_n_rounds}
        evaluation_seconds = sum(
            rehearsed.evaluation_seconds.get(name, 0.0) * -(-rounds // every)
            for name, every in evaluations.items()
            if every
        )
        known_seconds = rehearsed.beside_seconds[:rounds]
        beside_others = sum(known_seconds) + beside * (rounds - len(known_seconds))
        seconds = rehearsed.setup_seconds + beside_others + rounds * rehearsed.training_seconds + evaluation_seconds
        simulated = [row["time/simulated_seconds"] for row in rehearsed.rows]
        states = StatesToKeep.of(engine, rounds, trainer.checkpoint_every_n_rounds)
        memory = (
            None
            if rehearsed.peak is None
            else rehearsed.peak + (trainer.client_states == "memory") * states.coming_bytes
        )
        disk = checkpoint_bytes(stage, engine, states) if trainer.enable_checkpointing else 0
        plan = Plan(
            algorithm=engine.algorithm.name,
            rounds=rounds,
            clients=engine.population.cohort_size,
            setup_uplink_bytes=_bytes(rehearsed.setup_bits.get("up", 0)),
            setup_downlink_bytes=_bytes(rehearsed.setup_bits.get("down", 0)),
            round_uplink_bytes=_bytes(sum(up[:1])),
            round_downlink_bytes=_bytes(sum(down[:1])),
            uplink_bytes=_bytes(totals["up"]),
            downlink_bytes=_bytes(totals["down"]),
            is_fixed=False,
            has_fixed_work=False,
            rehearsed_rounds=min(rounds, len(rehearsed.rows)),
            round_steps=sum(steps[:1]),
            steps=rehearsed.setup_steps + sum(steps),
            macs=None if engine.network.macs is None else 3.0 * sum(macs),
            setup_seconds=rehearsed.setup_seconds,
            round_seconds=round_seconds,
            seconds=seconds,
            round_simulated_seconds=sum(simulated[:1]),
            simulated_seconds=simulated[-1] * rounds / len(simulated) if simulated else 0.0,
            memory_bytes=memory,
            accelerator_bytes=rehearsed.accelerator_peak,
            disk_bytes=disk,
        )
        return replace(plan, warnings=tuple(exceeded(plan, trainer, sent, states)))


def _stage(trainer: TrainerInterface) -> Any:
    """Return a copy of a trainer that writes, prints and stops nothing, and has no state of an earlier fit."""
    stage: Any = copy(trainer)
    for name in list(vars(stage)):
        if name in ("run", "hooks", "reservation", "datamodule") or name.endswith(("_loop", "_connector")):
            del vars(stage)[name]
    stage.compile = None  # which would take longer than the rehearsal
    stage.state = TrainerState()
    callbacks = [_silenced(callback) for callback in trainer.given_callbacks]
    timer: Any = None if trainer.timer is None else _silenced(trainer.timer)
    stage.callback_list = CallbackList(callbacks, timer, trainer.default_root_dir)
    stage.loggers, stage.timer, stage.profiler = [], timer, SimpleProfiler()
    stage.enable_checkpointing = stage.enable_progress_bar = stage.enable_model_summary = False
    stage.client_states = "memory"
    stage._set_up_lightning()
    return stage


def _silenced(callback: Callback) -> Callback:
    """Return a copy of a callback whose hooks do nothing, unless it takes part in a rehearsal or checks what it needs."""
    is_checked = type(callback).__module__.startswith(CHECKED)
    silent = deepcopy(callback) if is_checked else copy(callback)
    if not _takes_part(callback):
        present = {name for name in dir(callback) if name.startswith("on_")} | {"setup", "teardown"}
        for hook in sorted(present - ({"setup"} if is_checked else set())):
            # Others stay as they are, so that no runner is chosen for hooks that nobody has.
            if not hasattr(Callback, hook) or overrides(hook, callback):
                vars(silent)[hook] = _do_nothing
    return silent


def _takes_part(callback: Callback) -> bool:
    """True if hooks of a callback are called in a rehearsal; those of others may write files or stop it."""
    return getattr(callback, "in_rehearsals", False)


def _do_nothing(*arguments: Any, **named: Any) -> None:
    """Stand in for a hook."""


def _leave_out(stage: Any) -> None:
    """Set a trainer that has passed all checks to a rehearsal: show all columns, and log every round."""
    stage.log_every_n_rounds, stage.min_rounds, stage.min_steps = 1, None, None
    loop = stage.fit_loop
    loop.engine.features = [feature for feature in loop.engine.features if getattr(feature, "in_rehearsals", True)]
    if loop.privacy.hides_costs:
        shown = replace(loop.privacy, settings=replace(loop.privacy.settings, side_channels="keep"))
        features = loop.engine.features
        loop.engine.features = [shown if feature is loop.privacy else feature for feature in features]
        loop.privacy = shown
    if not all(type(callback).__module__.startswith(STOCK) for callback in stage.callbacks):
        # One of the user's may log what others monitor.
        stage.callbacks[:] = [callback for callback in stage.callbacks if _takes_part(callback)]


def _copied(model: LightningModule) -> LightningModule:
    """Return a copy of a module that configures silent callbacks.

    Raises:
        UserError: it cannot be copied.
    """
    parts = (
        [part for part in model.modules() if isinstance(part, LightningModule)]
        if isinstance(model, torch.nn.Module)
        else []
    )
    trainers = [part._trainer for part in parts]
    for part in parts:
        part._trainer = None
    try:
        twin = deepcopy(model)
    except Exception as error:
        raise UserError(
            f"a plan trains a copy of the module, but {type(model).__name__} cannot be copied: {error}."
        ) from error
    finally:
        for part, its_trainer in zip(parts, trainers, strict=True):
            part._trainer = its_trainer
    if parts:
        configure = twin.configure_callbacks
        twin.configure_callbacks = lambda: [_silenced(one) for one in listed(configure(), Callback)]  # type: ignore[method-assign]
    return twin


def _disturb(run: Run) -> None:
    """Start from another model, so that values differ from those of the first rehearsal."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(run.params.shape, generator=generator).to(run.params)
    run.replace_model(run.params + 0.1 * run.params.abs().mean() * noise, run.buffers)


def _continued(counts: Sequence[int], rounds: int) -> list[int]:
    """Return the counts of so many rounds, given those of the first ones, the last of which further rounds repeat."""
    return [*counts[:rounds], *[*counts[-1:]] * (rounds - len(counts))]


def _bytes(bits: int) -> float:
    return bits // 8 if bits % 8 == 0 else bits / 8
