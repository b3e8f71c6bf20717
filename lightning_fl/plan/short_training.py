"""Train few clients for all of a round, for the rehearsal of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_fl.clients.choose_runner import Runner
from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.data import FederatedDataModule
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.slots import Result

FEW_SAMPLES = 2
"""Batch size of the clients that are not timed."""


@dataclass
class ShortTraining:
    """Runner that trains the first clients whole and times them; one other trains on a few samples, for all others.

    Attributes:
        inner: runner of the run.
        num_whole: clients to train whole in the first round that has some.
        seed: seed of the differences between the others' messages.
        factors: these differences, by shape and dtype.
        whole_seconds: seconds of their training.
        whole_clients: these clients.
        num_steps: optimiser steps of the present round, in this process, those that were left out included.
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
        sizes = data.client_sizes
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
                num_steps = job.schedule.steps_done(job.schedule.pass_batches(int(sizes[client])), job.run, client)
                self.num_steps += num_steps
                yield replace(
                    trained,
                    client=client,
                    num_steps=num_steps,
                    weight=float(sizes[client]),
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
