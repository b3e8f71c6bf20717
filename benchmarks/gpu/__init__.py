"""Parts of `accelerator.py`, and what they share: rows, limits of time, turns, and a federation to measure in."""

from __future__ import annotations

import logging
import statistics
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule
from peers import Work
from round_time import LEARNING_RATE, Alternate, federation_of, noise
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import FedAvg
from lightning_fl.engine.engine import Engine
from lightning_fl.errors import UserError
from lightning_fl.modules import ImageClassifier, network

now = Alternate({}, time.perf_counter).now
"""Return the time in seconds after the device has finished all work."""


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        part, case, way: what was measured.
        ms: least, median and largest time in milliseconds.
        clients_per_second: clients trained in a second, from the median.
        peak_mb: most GPU memory in MB (10⁶ bytes) allocated during a round, above that at its start.
        busy: share of time in which the GPU ran kernels, in [0, 1].
        result: finding in words.
        numbers: further figures, for the JSON file only.
        skipped, failed: reason if there is no measurement, or if it is an error.
    """

    part: str
    case: str
    way: str
    ms: tuple[float, ...] | None = None
    clients_per_second: float | None = None
    peak_mb: float | None = None
    busy: float | None = None
    result: str | None = None
    numbers: dict[str, Any] | None = None
    skipped: str | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Sizes:
    """Sizes of all measurements.

    Attributes:
        cohorts: numbers of clients of `rounds`, the smaller first.
        at_once: networks and numbers of clients of `at-once`.
        steps: networks and numbers of clients of `step`.
        local_steps: optimiser steps of a client in a round.
        batch_size: samples of a batch.
        turns: most turns, after one to warm up.
        steps_in_turn: optimiser steps in one turn of `step`.
        busy_seconds: seconds of rounds before NVML's utilisation is read, longer than its sample period.
    """

    cohorts: tuple[int, int] = (10, 100)
    at_once: tuple[tuple[str, int], ...] = (("cnn", 256), ("resnet18", 64))
    steps: tuple[tuple[str, int], ...] = (("lenet5", 10), ("cnn", 10), ("cnn", 100), ("resnet18", 10))
    local_steps: int = 5
    batch_size: int = 10
    turns: int = 9
    steps_in_turn: int = 20
    busy_seconds: float = 1.2


FULL = Sizes()
TINY = Sizes((1, 2), (("lenet5", 4),), (("lenet5", 2), ("resnet18", 2)), 1, 2, 1, 1, 0.0)


@dataclass(frozen=True)
class Plan:
    """Plan of a part.

    Attributes:
        device: "cuda" or "cpu".
        sizes: sizes of the measurements.
        deadline: value of `time.perf_counter` at which the part should end.
        add: takes each row as soon as it is measured.
    """

    device: str
    sizes: Sizes
    deadline: float
    add: Callable[[Row], None]

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.perf_counter()

    def attempt(self, label: Row, measure: Callable[[], None]) -> None:
        """Call `measure`, which adds rows; without time left, or after an error, add `label` with the reason."""
        if self.seconds_left <= 0:
            self.add(replace(label, skipped="no time was left for it"))
            return
        try:
            measure()
        except torch.OutOfMemoryError:
            self.add(replace(label, skipped="the GPU's memory does not suffice"))
        except Exception as error:
            traceback.print_exc()
            self.add(replace(label, failed=sentence(error)))
        if self.device == "cuda":
            torch.cuda.empty_cache()


def sentence(error: Exception) -> str:
    """Return the first line of an error, after its class unless it is a `UserError`."""
    line = next(iter(str(error).splitlines()), "")
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"


def allow_tf32(allowed: bool) -> None:
    """Allow or forbid tf32 in matrix products and convolutions."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def quiet_trainer(device: str, **flags: Any) -> FederatedTrainer:
    """Return a trainer that prints and writes nothing."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    fixed = {"accelerator": device, "devices": 1, "num_sanity_val_steps": 0, **dict.fromkeys(off, False)}
    return FederatedTrainer(**{**fixed, **flags})


class InsteadOfRounds(Callback):
    """Call a function with the federation in place of the rounds of a fit."""

    def __init__(self, body: Callable[[Engine], None]) -> None:
        self.body = body

    def on_train_start(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
        """Call the function, and end the fit."""
        self.body(trainer.fit_loop.engine)
        trainer.should_stop = True


def in_federation(
    name: str,
    clients: int,
    plan: Plan,
    body: Callable[[Engine, Work], None],
    precision: str = "32-true",
    runner: Literal["serial", "stacked"] = "stacked",
    compiles: bool | None = None,
) -> None:
    """Set up FedAvg on images of CIFAR-10's shape; call `body` with the federation and with the same work for a bare loop."""
    torch.manual_seed(0)
    batch_size = plan.sizes.batch_size
    samples = plan.sizes.local_steps * batch_size
    images, labels = noise(clients * samples)
    client_samples = list(zip(images.split(samples), labels.split(samples), strict=True))
    work = Work(network(name, 10), client_samples, batch_size, epochs=1, learning_rate=LEARNING_RATE)
    data = federation_of(images, labels, clients, batch_size)
    trainer = quiet_trainer(
        plan.device,
        max_rounds=1,
        clients_per_round=clients,
        local_epochs=1,
        limit_val_batches=0,
        runner=runner,
        compile=compiles,
        precision=precision,
        callbacks=[InsteadOfRounds(lambda engine: body(engine, work))],
    )
    trainer.fit(ImageClassifier(name, learning_rate=LEARNING_RATE), data, FedAvg(), verbose=False)


@dataclass
class Timed:
    """Seconds of each turn, and peak memory in MB above that at the turn's start (None on a CPU)."""

    seconds: list[float] = field(default_factory=list)
    peak_mb: float | None = None

    @property
    def ms(self) -> tuple[float, float, float]:
        """Least, median and largest time in milliseconds."""
        return 1e3 * min(self.seconds), 1e3 * statistics.median(self.seconds), 1e3 * max(self.seconds)


def in_turns(ways: dict[str, Callable[[], Any]], turns: int, seconds: float) -> dict[str, Timed]:
    """Time functions in turns, after one turn to warm up: at least one turn, at most `turns`, and none after `seconds`."""
    timed, on_gpu, begun = {name: Timed() for name in ways}, torch.cuda.is_available(), now()
    for way in ways.values():
        way()
    for turn in range(turns):
        if turn and now() - begun > seconds:
            break
        for name, way in ways.items():
            before = torch.cuda.memory_allocated() if on_gpu else 0
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            started = now()
            way()
            timed[name].seconds.append(now() - started)
            if on_gpu:
                peak_mb = 1e-6 * (torch.cuda.max_memory_allocated() - before)
                timed[name].peak_mb = max(timed[name].peak_mb or 0.0, peak_mb)
    return timed


def kernels(work: Callable[[], Any]) -> tuple[int, dict[str, float]]:
    """Return the number of kernels that some work runs, and their seconds by name; on a CPU, those of operators."""
    on_gpu = torch.cuda.is_available()
    now()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        work()
        now()
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in profiled.events() if event.device_type == device and not event.is_user_annotation]
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        seconds[event.name] += 1e-6 * (event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total)
    return len(events), dict(sorted(seconds.items(), key=lambda item: -item[1]))
