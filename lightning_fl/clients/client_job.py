"""What the clients of a round are asked to do, and the batches that they do it on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.slots import Message, Rule, Setting
from lightning_fl.state.run_state import Run


class Selection(Protocol):
    """The samples of one client."""

    def __len__(self) -> int: ...

    def batches(self, batch_size: int, generator: torch.Generator | None = None) -> Iterator[Any]:
        """Yield one pass in batches, in an order drawn from `generator`."""


@dataclass(frozen=True)
class ClientJob:
    """What every client of a round does; the server trains on its own samples by such a job too.

    Attributes:
        rule: what a client does with its gradients.
        setting: of the run.
        received: what came down: `model` (d,), `buffers` (d_b,), and what the rule receives besides.
        schedule: how long a client trains, and in what batches.
        run: holds client states and random seeds; not changed.
        trained_counters: integer buffers to begin with, by name; None for those of the run.
    """

    rule: Rule
    setting: Setting
    received: Message
    schedule: LocalSchedule
    run: Run
    trained_counters: Mapping[str, Tensor] | None = None

    @property
    def counters(self) -> Mapping[str, Tensor]:
        """Integer buffers of the module to begin with, by name."""
        return self.run.counters if self.trained_counters is None else self.trained_counters

    def without_steps(self, rule: Rule) -> ClientJob:
        """Return the job that makes no optimiser step and reports what `rule` reports."""
        return replace(self, rule=rule, schedule=replace(self.schedule, epochs=0, steps=None))

    def receiving(self, message: Message) -> ClientJob:
        """Return the job of clients that have received `message` too."""
        return replace(self, received=self.received | message)


class Batch(NamedTuple):
    """One batch of a client.

    Attributes:
        content: what `training_step` gets.
        size: samples in it.
        batch_index: of the batch in the local training, from 0.
        factor: of its loss in the step's gradient.
        ends_step: True for the last batch of an optimiser step.
    """

    content: Any
    size: int
    batch_index: int
    factor: float
    ends_step: bool

    @property
    def signature(self) -> Any:
        """Equal for batches that can be stacked: one structure, equal shapes, equal values of all that is no tensor."""
        leaves, structure = tree_flatten(self.content)
        shapes = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        return structure, shapes, self.batch_index


def local_batches(
    selection: Selection,
    schedule: LocalSchedule,
    in_pass: int,
    seed: int,
    prepare: Callable[[Any], Any] | None = None,
) -> Iterator[Batch]:
    """Yield the batches of a local training, pass after pass without end.

    Args:
        selection: the client's samples.
        schedule: in what batches they are read.
        in_pass: batches of one pass, at least 1.
        seed: of the order of the samples.
        prepare: brings a batch to the accelerator; not needed if None.
    """
    order, batch_size, num_samples = torch.Generator().manual_seed(seed), schedule.batch_size, len(selection)
    in_step, in_one_pass = schedule.step_batches(in_pass), min(num_samples, in_pass * batch_size)
    count = 0
    while True:
        for index, content in enumerate(selection.batches(batch_size, order), start=1):
            size = min(batch_size, num_samples - (index - 1) * batch_size)
            factor = size / in_one_pass if schedule.full_batch else 1 / schedule.accumulate
            ends_step = index % in_step == 0 or index == in_pass
            yield Batch(content if prepare is None else prepare(content), size, count, factor, ends_step)
            count += 1
            if index == in_pass:
                break
