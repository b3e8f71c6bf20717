"""Rehearse a run on copies of module and trainer, and throw it away: `FederatedTrainer.plan`.

The engine itself counts bytes and steps, round by round, so that warm-ups, masks and prunings are in them. The first clients of
the first round train whole, and are timed. Of the others one makes a step on a few samples in each pass, and stands for all:
their messages have the same size. A second rehearsal starts from another model: bytes, steps and multiply-accumulates that
differ from the first one's depend on what is trained.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fl.callbacks import (
    AdaptivePruning,
    CommunicationMeter,
    DynamicGates,
    FilterPruning,
    MagnitudePruning,
    SparseUpdates,
)
from lightning_fl.clients.choose_runner import Runner
from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.clients.stacked import Stacked
from lightning_fl.data import FederatedDataModule
from lightning_fl.errors import UserError
from lightning_fl.federation.round import Federation
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.outputs.frozen_weights import frozen_bytes
from lightning_fl.outputs.plan import Plan, duration
from lightning_fl.outputs.units import in_bytes
from lightning_fl.privacy import ClientPrivacy
from lightning_fl.processes import gather_objects
from lightning_fl.slots import Result
from lightning_fl.state.client_states import ClientStates
from lightning_fl.state.run_state import Run
from lightning_fl.state.saved_states import GENERATIONS, KINDS
from lightning_fl.trainer import checkpointing
from lightning_fl.trainer.fit_loop import FitLoop
from lightning_fl.trainer.lightning_interface import TrainerInterface
from lightning_fl.trainer.session import Given, algorithm_of, session

CHANGES_COSTS = (AdaptivePruning, DynamicGates, FilterPruning, MagnitudePruning, SparseUpdates)
"""Callbacks that take part in a rehearsal; all others are left out, because they may write files or stop it."""
MOST_SECONDS = 5.0
"""Seconds after the first round in which further rounds begin to be rehearsed."""
MOST_ROUNDS_LATER = 2
"""Rounds to rehearse after these seconds, at most, until one sends as much as the one before: after a pruning it does."""
FEW_SAMPLES = 2
"""Batch size of the clients that are not timed."""


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
        """Multiply-accumulates of the clients' forward passes in each round; 0 if unknown."""
        return [int(row.get("model/macs", 0)) * int(row["clients/samples"]) for row in self.rows]

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
        with isolate_rng(), _quietly():
            stage = _stage(trainer)
            with session(stage, TrainerFn.FITTING, _copied(model), datamodule, algorithm, None, None):
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
    has_same_bits = rehearsed.setup_bits == other.setup_bits and all(
        _are_same(rehearsed.bits(way), other.bits(way)) for way in ("up", "down")
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
        federation = self.federation = self._loop.federation
        federation.most_setup_steps = 1
        num_whole = 0
        if times:
            num_whole = federation.runner.clients_at_once if isinstance(federation.runner, Stacked) else 1
        self._runner = federation.runner = _ShortTraining(federation.runner, num_whole, seed=int(times))
        self._found, self._batches = Rehearsed(), list[int]()
        self._bits, self._rounds_later = (-1, -1), 0
        trainer.callbacks.append(self)

    def run(self) -> Rehearsed:
        """Run the rounds, as many as the time allows."""
        rehearsed, federation, trainer = self._found, self.federation, self._trainer
        if not self._times:
            _disturb(federation.run)
        begun = perf_counter()
        self._loop.prepare()
        done, left_out = federation.run.num_steps, federation.setup_steps_left_out
        rehearsed.setup_seconds = (perf_counter() - begun) * (done + left_out) / max(1, done)
        rehearsed.setup_steps, rehearsed.setup_bits = done + left_out, federation.run.ledger.setup()
        self._steps_before = done
        self._loop.run(None)
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
    def follows_training(self) -> bool:
        """True if the model will have a size that depends on what is trained."""
        return any(
            isinstance(each, AdaptivePruning) and each.rate is None and each.prune_epoch < self._trainer.num_rounds
            for each in self._trainer.callbacks
        )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Count the steps that the round's clients would make."""
        self._planned = self.federation.num_client_steps()
        self._batches.append(self.federation.num_batches())
        self._runner.begin_round()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Count the steps of the round, and stop when the time is over, in a round that the following ones resemble."""
        rehearsed, runner, run = self._found, self._runner, self.federation.run
        group = self.federation.group
        counts = group is None or group.is_first
        client_steps = sum(gather_objects(trainer.fabric, runner.num_steps if counts else 0))
        server_steps = run.num_steps - self._steps_before - client_steps
        self._steps_before = run.num_steps
        rehearsed.steps.append(self._planned + max(0, server_steps))
        bits = run.ledger.bits("up"), run.ledger.bits("down")
        if len(rehearsed.steps) == 1:
            rehearsed.peak, rehearsed.accelerator_peak = peak_bytes(), _accelerator_peak(self.federation.flat_module)
            self._begun = perf_counter()
        elif trainer.fabric.broadcast(perf_counter() - self._begun > MOST_SECONDS):
            trainer.should_stop = bits == self._bits or self._rounds_later == MOST_ROUNDS_LATER
            self._rounds_later += 1
        self._bits = bits

    def _batches_of(self, clients: Sequence[int]) -> int:
        """Return the batches of whole trainings of these clients, as `Federation.num_batches` counts them."""
        federation = self.federation
        trainings = 1 + sum(len(part.rules()) for part in federation.algorithm.personal)
        schedule, sizes = federation.work.schedule, federation.data.client_sizes
        return trainings * sum(schedule.num_batches(int(sizes[client])) for client in clients)

    def plan(self, rehearsed: Rehearsed, trainer: TrainerInterface) -> Plan:
        """Return the plan, in the session, given what was found; `trainer` has the user's flags."""
        stage, federation = self._trainer, self.federation
        rounds = stage.num_rounds
        up, down = (_continued(rehearsed.bits(way), rounds) for way in ("up", "down"))
        totals = {way: rehearsed.setup_bits.get(way, 0) + sum(bits) for way, bits in (("up", up), ("down", down))}
        steps = _continued(rehearsed.steps, rounds)
        beside = float(np.median(rehearsed.beside_seconds)) if rehearsed.beside_seconds else 0.0
        round_seconds = beside + rehearsed.training_seconds
        evaluations = {"validate": trainer.val_every_n_rounds, "test": trainer.test_every_n_rounds}
        evaluation_seconds = sum(
            rehearsed.evaluation_seconds.get(name, 0.0) * -(-rounds // every)
            for name, every in evaluations.items()
            if every
        )
        beside_others = sum(rehearsed.beside_seconds) + beside * (rounds - len(rehearsed.beside_seconds))
        seconds = rehearsed.setup_seconds + beside_others + rounds * rehearsed.training_seconds + evaluation_seconds
        simulated = [row["time/simulated_seconds"] for row in rehearsed.rows]
        states = _ClientStates.of(federation, rounds, trainer.checkpoint_every_n_rounds)
        memory = (
            None
            if rehearsed.peak is None
            else rehearsed.peak + (trainer.client_states == "memory") * states.coming_bytes
        )
        disk = _checkpoint_bytes(stage, federation, states) if trainer.enable_checkpointing else 0
        plan = Plan(
            algorithm=federation.algorithm.name,
            rounds=rounds,
            clients=federation.population.cohort_size,
            setup_uplink_bytes=_bytes(rehearsed.setup_bits.get("up", 0)),
            setup_downlink_bytes=_bytes(rehearsed.setup_bits.get("down", 0)),
            round_uplink_bytes=_bytes(sum(up[:1])),
            round_downlink_bytes=_bytes(sum(down[:1])),
            uplink_bytes=_bytes(totals["up"]),
            downlink_bytes=_bytes(totals["down"]),
            is_fixed=False,
            has_fixed_work=False,
            rehearsed_rounds=len(rehearsed.rows),
            round_steps=sum(steps[:1]),
            steps=rehearsed.setup_steps + sum(steps),
            macs=None if federation.network.macs is None else 3.0 * sum(_continued(rehearsed.macs, rounds)),
            setup_seconds=rehearsed.setup_seconds,
            round_seconds=round_seconds,
            seconds=seconds,
            round_simulated_seconds=sum(simulated[:1]),
            simulated_seconds=simulated[-1] * rounds / len(simulated) if simulated else 0.0,
            memory_bytes=memory,
            accelerator_bytes=rehearsed.accelerator_peak,
            disk_bytes=disk,
        )
        sent = np.cumsum([rehearsed.setup_bits.get("up", 0), *up])[1:] / 8
        return replace(plan, warnings=tuple(_exceeded(plan, trainer, sent, states)))


@dataclass
class _ShortTraining:
    """Runner that trains the first clients whole and times them; one other trains on a few samples, for all others.

    Attributes:
        inner: runner of the run.
        num_whole: clients to train whole in the first round that has some.
        seed: seed of the differences between the others' messages.
        factors: these differences, by shape and dtype.
        whole_seconds: seconds of their training.
        whole_clients: these clients.
        num_steps: optimiser steps made in the present round, in this process.
        seconds_of_rounds: seconds that clients have trained in each round.
    """

    inner: Runner
    num_whole: int
    seed: int = 0
    factors: dict[Any, Tensor] = field(default_factory=dict)
    whole_seconds: float = 0.0
    whole_clients: Sequence[int] = ()
    num_steps: int = 0
    seconds_of_rounds: list[float] = field(default_factory=list)

    def begin_round(self) -> None:
        """Count anew."""
        if self.whole_clients:
            self.num_whole = 0
        self.num_steps = 0
        self.seconds_of_rounds.append(0.0)

    def __call__(
        self, flat_module: FlatModule, job: ClientJob, clients: Sequence[int], data: FederatedDataModule
    ) -> Iterator[Result]:
        """Train the clients, and yield their results."""
        short = replace(job, schedule=_shortened(job.schedule))
        whole = clients[: self.num_whole]
        if self.whole_clients and (job.run.again or list(whole) != list(self.whole_clients)):
            whole = []  # others have been timed in this round, or, where the server does not wait, the same already
        others = clients[len(whole) :]
        if whole:
            for _ in self._timed(flat_module, short, whole, data):
                """Let torch allocate and choose what it does in a first step, which is not timed."""
            before = self.seconds_of_rounds[-1]
            for result in self._timed(flat_module, job, whole, data):
                self.num_steps += result.num_steps
                yield result
            self.whole_seconds += self.seconds_of_rounds[-1] - before
            self.whole_clients = whole
        for trained in self._timed(flat_module, short, others[:1], data):
            for client in others:
                self.num_steps += trained.num_steps
                yield replace(
                    trained,
                    client=client,
                    weight=float(data.client_sizes[client]),
                    message={name: self._varied(entry, client) for name, entry in trained.message.items()},
                )

    def _varied(self, entry: Tensor, client: int) -> Tensor:
        """Return an entry of a message with other values of about the same size, those of another client; zeros stay."""
        if not entry.is_floating_point():
            return entry
        key = entry.shape, entry.dtype
        if key not in self.factors:
            generator = torch.Generator().manual_seed(self.seed)
            self.factors[key] = (0.5 + torch.rand(entry.shape, generator=generator)).to(entry)
        return entry * self.factors[key].roll(7919 * client)

    def _timed(
        self, flat_module: FlatModule, job: ClientJob, clients: Sequence[int], data: FederatedDataModule
    ) -> Iterator[Result]:
        results = self.inner(flat_module, job, clients, data)
        while True:
            begun = perf_counter()
            result = next(results, None)
            if flat_module.fabric.device.type == "cuda":
                torch.cuda.synchronize(flat_module.fabric.device)
            self.seconds_of_rounds[-1] += perf_counter() - begun
            if result is None:
                return
            yield result


def _shortened(schedule: LocalSchedule) -> LocalSchedule:
    """Return the schedule with one batch of a few samples in a pass; unchanged if it makes no step."""
    if schedule.epochs == 0:
        return schedule
    steps = None if schedule.steps is None else 1
    size = min(FEW_SAMPLES, schedule.batch_size)
    return replace(schedule, batch_size=size, limit_batches=1, steps=steps, accumulate=1, drop_last=False)


def _stage(trainer: TrainerInterface) -> Any:
    """Return a copy of a trainer that writes, prints and stops nothing, validates once, and has no state of an earlier fit."""
    stage: Any = copy(trainer)
    for name in ("fit_loop", "run", "hooks", "reservation", "lightning_module", "datamodule"):
        vars(stage).pop(name, None)
    stage.state = TrainerState()
    stage.given_callbacks = [deepcopy(each) for each in trainer.given_callbacks if isinstance(each, CHANGES_COSTS)]
    stage.callbacks = stage.given_callbacks
    stage.loggers, stage.timer, stage.profiler = [], None, SimpleProfiler()
    stage.enable_checkpointing = stage.enable_progress_bar = stage.enable_model_summary = False
    stage.num_sanity_val_steps, stage.log_every_n_rounds = 0, 1
    stage.val_every_n_rounds = max(1, trainer.max_rounds)  # once, in the last round that is rehearsed
    if trainer.test_every_n_rounds is not None:
        stage.test_every_n_rounds = stage.val_every_n_rounds
    stage.client_states = "memory"
    if isinstance(trainer.privacy, ClientPrivacy):
        stage.privacy = replace(trainer.privacy, side_channels="keep")  # whose columns the rehearsal reads
    stage.callback_metrics, stage.logged_metrics, stage.progress_bar_metrics = {}, {}, {}
    return stage


def _copied(model: LightningModule) -> LightningModule:
    """Return a copy of a module that configures no callbacks.

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
        twin.configure_callbacks = list  # type: ignore[method-assign]
    return twin


def _disturb(run: Run) -> None:
    """Start from another model, so that values differ from those of the first rehearsal."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(run.params.shape, generator=generator).to(run.params)
    run.replace_model(run.params + 0.1 * run.params.abs().mean() * noise, run.buffers)


def _continued(counts: Sequence[int], rounds: int) -> list[int]:
    """Return the counts of all rounds, given those of the first ones, the last of which the others repeat."""
    return [*counts, *[*counts[-1:]] * (rounds - len(counts))]


def _bytes(bits: int) -> float:
    return bits // 8 if bits % 8 == 0 else bits / 8


@dataclass(frozen=True)
class _ClientStates:
    """States and codec memories that clients keep between rounds.

    Attributes:
        coming_bytes: bytes of the clients that will take part for the first time in the rounds that were not rehearsed.
        file_bytes: bytes of their files beside the checkpoints, which also hold what the last checkpoints have replaced.
    """

    coming_bytes: int = 0
    file_bytes: int = 0

    @classmethod
    def of(cls, federation: Federation, rounds: int, every: int) -> _ClientStates:
        """Return the estimate after so many rounds, with a checkpoint in every so many of them."""
        run, population = federation.run, federation.population
        stores = (run.clients, run.client_memory)
        num_present = max(len(each) for each in stores)
        present = sum(x.nbytes for each in stores for client in each for x in each[client].values())
        if not num_present:
            return cls()
        eligible = len(population.eligible)
        share = population.cohort_size * (1 - population.dropout_rate) / eligible
        expected = max(float(num_present), eligible * (1 - (1 - share) ** rounds))
        changed = eligible * (1 - (1 - share) ** min(every, rounds))  # between two checkpoints
        rows = min(expected + GENERATIONS * changed, max(expected, changed * rounds / every))
        one = present / num_present
        return cls(int(one * expected) - present, int(one * rows))


def _checkpoint_bytes(trainer: TrainerInterface, federation: Federation, states: _ClientStates) -> int:
    """Return the bytes of the last and the previous checkpoint with their files, and of the exported model."""
    run_state = {**federation.run.state_dict(), **{kind: ClientStates() for kind in KINDS}}
    whole = _saved_bytes(checkpointing.build_checkpoint(trainer, federation, run_state))
    exported = _saved_bytes(checkpointing.build_checkpoint(trainer))
    frozen = frozen_bytes(trainer.lightning_module)
    return 2 * (whole - frozen) + frozen + states.file_bytes + exported


def _saved_bytes(content: Any) -> int:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.tell()


def peak_bytes() -> int | None:
    """Return the most memory that this process has had; None if the system does not tell."""
    try:
        import resource
    except ImportError:  # on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _accelerator_peak(flat_module: FlatModule) -> int | None:
    device = flat_module.fabric.device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def machine_bytes() -> int | None:
    """Return the memory of this machine; None if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _exceeded(plan: Plan, trainer: TrainerInterface, sent: Any, states: _ClientStates) -> Iterator[str]:
    """Yield a sentence about each limit that the run would exceed.

    Args:
        plan: the plan.
        trainer: trainer with the user's flags.
        sent: bytes sent up until the end of each round.
        states: states of the clients.
    """
    from shutil import disk_usage

    for meter in (each for each in trainer.given_callbacks if isinstance(each, CommunicationMeter)):
        most = meter.max_uplink_bytes
        if most is not None and len(sent) and sent[-1] > most:
            last = int(np.argmax(sent >= most)) + 1
            yield (
                f"CommunicationMeter will stop the run after round {last:,} of {plan.rounds:,}: max_uplink_bytes is "
                f"{in_bytes(most)}."
            )
    limit = None if trainer.timer is None else trainer.timer.time_remaining()
    if limit is not None and plan.seconds > limit:
        last = int(max(0.0, limit - plan.setup_seconds) / max(1e-9, plan.seconds - plan.setup_seconds) * plan.rounds)
        last = max(1, last)  # no round is broken off
        yield f"max_time will stop the run after about round {last:,} of {plan.rounds:,}: it is {duration(limit)}."
    there = machine_bytes()
    if plan.memory_bytes is not None and there is not None and plan.memory_bytes > there:
        keep = ", most of it for states of clients, which trainer.client_states disk keeps in files"
        yield (
            f"The run needs about {in_bytes(plan.memory_bytes)} of memory, but this machine has {in_bytes(there)}"
            f"{keep if states.coming_bytes > plan.memory_bytes / 2 else ''}."
        )
    if plan.disk_bytes:
        folder = trainer.default_root_dir
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        free = disk_usage(folder).free
        if plan.disk_bytes > free:
            yield (
                f"The checkpoints need about {in_bytes(plan.disk_bytes)}, but {folder} has {in_bytes(free)} left: use another "
                "trainer.default_root_dir."
            )


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep notes on data, devices and runners from the terminal: the fit itself will say them."""
    names = (
        "lightning.pytorch.utilities.rank_zero",
        "lightning.fabric.utilities.rank_zero",
        "lightning.fabric.utilities.seed",
    )
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
