"""Job of the clients in a round, and the batches of their local training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map

from lightning_fl.clients.device_group import DeviceGroup
from lightning_fl.clients.local_schedule import ClientWork, LocalSchedule
from lightning_fl.data import FederatedDataModule
from lightning_fl.errors import UserError
from lightning_fl.flat_module.smaller_network import SmallerNetwork
from lightning_fl.slots import Message, Personal, RoundContext, Rule
from lightning_fl.state.outcome import Outcome
from lightning_fl.state.run_state import Run

VALUES = (Tensor, bool, int, float, complex, str, bytes, type(None))
"""Common types of the parts of a batch that can be stacked or compared."""


@dataclass(frozen=True)
class ClientJob:
    """Job of every client in a round. The server's training on its own samples has such a job too.

    Attributes:
        rule: rule of the local training.
        context: facts about the run.
        received: message that the clients have received: `model` (d,), `buffers` (d_b,) and the names that the rule receives.
        schedule: length and batches of a client's local training.
        run: holds client states and random seeds; not changed.
        initial_counters: initial integer buffers by name; None for those of the run.
        start: model (d,) and buffers (d_b,) from which clients train; None for the received ones.
        personal: parts that say what each client keeps.
        group: processes that train each client together; None if this process trains it alone.
        data: samples of the clients; None in the server's job, and before the round's clients begin.
        selected, answering: clients of the round that have received the broadcast, and those that answer, in all processes.
        accepted: outcome of the clients whose uploads the server has accepted so far, in this process; None when `data`
            is.
        smaller: smaller network that each of some clients trains, with the message that the client has received; the other
            clients train the whole one.
    """

    rule: Rule
    context: RoundContext
    received: Message
    schedule: LocalSchedule
    run: Run
    initial_counters: Mapping[str, Tensor] | None = None
    start: Message | None = None
    personal: tuple[Personal, ...] = ()
    group: DeviceGroup | None = None
    data: FederatedDataModule | None = None
    selected: Sequence[int] = ()
    answering: Sequence[int] = ()
    accepted: Outcome | None = None
    smaller: Mapping[int, tuple[SmallerNetwork, Message]] = field(default_factory=dict)

    @property
    def counters(self) -> Mapping[str, Tensor]:
        """Initial integer buffers of the module by name."""
        return self.run.counters if self.initial_counters is None else self.initial_counters

    def without_steps(self, rule: Rule) -> ClientJob:
        """Return a job that makes no optimiser step and uploads what `rule` uploads."""
        return replace(self, rule=rule, schedule=replace(self.schedule, epochs=0, steps=None), personal=())

    def on_smaller(self, network: SmallerNetwork, received: Message) -> ClientJob:
        """Return the job of clients that train a smaller network, given the message that they have received."""
        return replace(self, context=self.context.within(network.submodel), received=received, smaller={})

    def receiving(self, message: Message) -> ClientJob:
        """Return the job with the entries of `message` added to `received`."""
        return replace(self, received=self.received | message)


@dataclass
class Batch:
    """One batch of a client.

    Attributes:
        content: argument of `training_step`.
        size: number of samples; 0 for a process of a group that gets no share, because the minibatch is too small.
        batch_index: index of the batch in the local training, from 0.
        factor: factor of its loss in the step's gradient.
        ends_step: True for the last batch of an optimiser step.
    """

    content: Any
    size: int
    batch_index: int
    factor: float
    ends_step: bool

    @cached_property
    def flat(self) -> tuple[list[Any], TreeSpec]:
        """Tensors and other leaves of the content, and its structure."""
        return tree_flatten(self.content)

    def copied(self) -> Batch:
        """Return the batch with a copy of its content, because a module may change what it reads."""
        return replace(self, content=tree_map(_copied, self.content))

    @property
    def signature(self) -> Any:
        """Key that is equal for batches that can be stacked: same structure, same shapes, equal values except in tensors.

        Raises:
            UserError: a part of the batch is an object that may contain tensors.
        """
        leaves, structure = self.flat
        for leaf in leaves:
            if not isinstance(leaf, VALUES) and (is_dataclass(leaf) or type(leaf).__hash__ in (None, object.__hash__)):
                raise UserError(
                    f"its batches contain a {type(leaf).__name__}, whose tensors torch cannot find (use tuples or dictionaries)"
                )
        shapes = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        return structure, shapes, self.batch_index


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return leaf if isinstance(leaf, VALUES) else deepcopy(leaf)


def local_batches(
    work: ClientWork, schedule: LocalSchedule, prepare: Callable[[Any], Any], group: DeviceGroup | None = None
) -> Iterator[Batch]:
    """Yield the batches of a local training, in endless passes; with `repeat`, yield those of each step several times.

    Args:
        work: the client's samples, of at least one batch, and the seed of their order.
        schedule: batch size, and batches per optimiser step.
        prepare: prepares a batch for the module.
        group: processes that share the client; None to read whole minibatches.
    """
    batches = _batches(work, schedule, prepare, group)
    return batches if schedule.repeat == 1 else _repeated(batches, schedule.repeat)


def _repeated(batches: Iterator[Batch], repeat: int) -> Iterator[Batch]:
    """Yield the batches of each step `repeat` times, and number them anew."""
    step_batches: list[Batch] = []
    count = 0
    for batch in batches:
        step_batches.append(batch)
        if batch.ends_step:
            for again in step_batches * repeat:
                yield replace(again.copied(), batch_index=count)
                count += 1
            step_batches.clear()


def _batches(
    work: ClientWork, schedule: LocalSchedule, prepare: Callable[[Any], Any], group: DeviceGroup | None
) -> Iterator[Batch]:
    """Yield the batches of endless passes; in a group of processes, yield this one's shares."""
    order, num_samples, batch_size = (
        None if schedule.in_order else torch.Generator().manual_seed(work.seeds[0]),
        len(work.selection),
        schedule.batch_size,
    )
    in_step = schedule.step_batches(work.batches_per_epoch)
    samples_per_epoch = min(num_samples, work.batches_per_epoch * batch_size)
    share = {} if group is None else {"share": group.rows}
    count = 0
    while True:
        for index, content in enumerate(work.selection.batches(batch_size, order, **share), start=1):
            size = min(batch_size, num_samples - (index - 1) * batch_size)
            factor = schedule.loss_factor(size, samples_per_epoch)
            if group is not None:
                whole, size = size, group.num_rows(size)
                factor *= size / whole
            ends_step = index % in_step == 0 or index == work.batches_per_epoch
            yield Batch(prepare(content) if size else None, size, count, factor, ends_step)
            count += 1
            if index == work.batches_per_epoch:
                break
