"""Memory and disk that a planned run needs, and the limits that it would exceed."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_fl.callbacks import CommunicationMeter
from lightning_fl.engine.engine import Engine
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.outputs.frozen_weights import frozen_bytes
from lightning_fl.outputs.plan import Plan, duration
from lightning_fl.outputs.traffic import in_words
from lightning_fl.outputs.units import in_bytes
from lightning_fl.state.client_states import ClientStates
from lightning_fl.state.saved_states import GENERATIONS, KINDS
from lightning_fl.trainer import checkpointing
from lightning_fl.trainer.lightning_interface import TrainerInterface


@dataclass(frozen=True)
class StatesToKeep:
    """States and codec memories that clients keep between rounds.

    Attributes:
        coming_bytes: bytes of the clients that will take part for the first time in the rounds that were not rehearsed.
        file_bytes: bytes of their files beside the checkpoints, which also hold what the last checkpoints have replaced.
    """

    coming_bytes: int = 0
    file_bytes: int = 0

    @classmethod
    def of(cls, engine: Engine, rounds: int, every: int) -> StatesToKeep:
        """Return the estimate after so many rounds, with a checkpoint in every so many of them."""
        run, population = engine.run, engine.population
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


def checkpoint_bytes(trainer: TrainerInterface, engine: Engine, states: StatesToKeep) -> int:
    """Return the bytes of the last and the previous checkpoint with their files, and of the exported model."""
    start = checkpointing.round_start(trainer, engine, trainer.stop)
    start.run.update({kind: ClientStates() for kind in KINDS})
    whole = _saved_bytes(checkpointing.build_checkpoint(trainer, engine, start))
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


def accelerator_peak_bytes(flat_module: FlatModule) -> int | None:
    """Return the most memory that tensors have taken on the accelerator; None on a CPU."""
    device = flat_module.fabric.device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def machine_bytes() -> int | None:
    """Return the memory of this machine; None if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def rounds_paid(trainer: TrainerInterface, sent: Any) -> int:
    """Return the round after which a budget of bytes ends the run, or the number of all rounds.

    Args:
        trainer: trainer with the user's flags.
        sent: bytes until the end of each round (rounds,) by direction.
    """
    rounds = len(sent["up"])
    return rounds if trainer.min_steps else min((last for *_, last in _spent_budgets(trainer, sent)), default=rounds)


def _spent_budgets(trainer: TrainerInterface, sent: Any) -> Iterator[tuple[str, str, float, int]]:
    """Yield the callback, direction, bytes and last round of each budget that is spent before the last round."""
    for callback in trainer.given_callbacks:
        limits = callback.max_bytes if isinstance(callback, CommunicationMeter) else {}
        for traffic, most in limits.items():
            if len(sent[traffic]) and sent[traffic][-1] > most:
                last = max(int(np.argmax(sent[traffic] >= most)) + 1, trainer.min_rounds or 1)
                yield type(callback).__name__, traffic, most, last


def exceeded(plan: Plan, trainer: TrainerInterface, sent: Any, states: StatesToKeep) -> Iterator[str]:
    """Yield a sentence about each limit that the run would exceed.

    Args:
        plan: the plan.
        trainer: trainer with the user's flags.
        sent: bytes until the end of each round (rounds,) by direction, also of rounds after a budget is spent.
        states: states of the clients.
    """
    from shutil import disk_usage

    rounds = len(sent["up"])
    for name, traffic, most, last in _spent_budgets(trainer, sent):
        yield (
            f"{name} will stop the run after round {last:,} of {rounds:,}: its limit of {in_words(traffic)} is {in_bytes(most)}."
        )
    limit = None if trainer.timer is None else trainer.timer.time_remaining()
    if limit is not None and plan.seconds > limit:
        last = int(max(0.0, limit - plan.setup_seconds) / max(1e-9, plan.seconds - plan.setup_seconds) * plan.rounds)
        last = max(1, last)  # no round is broken off
        yield f"max_time will stop the run after about round {last:,} of {rounds:,}: it is {duration(limit)}."
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
