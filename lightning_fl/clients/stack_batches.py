"""Batches of the clients of a stack: for each optimiser step groups of batches of one form, which one mapped call trains on.

If the data set is on the accelerator, one gather reads the batches of many steps, and those of a group are a view of it:
`GatheredBatches`. Otherwise each client reads its own batches, and a group is a copy of them: `SeparateBatches`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_fl.clients.client_job import Batch, local_batches
from lightning_fl.clients.local_schedule import ClientWork, LocalSchedule
from lightning_fl.data.samples.tensor_samples import TensorSelection
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.slots import State

# On a CPU batches are best gathered into memory that its caches hold until they are read.
BYTES_ON_CPU, BYTES_ELSEWHERE = 2**24, 2**30
"""Most bytes of one gather, unless a single step needs more."""


@dataclass
class Member:
    """Client of a stack.

    Attributes:
        client: index of the client.
        work: its samples, and the steps to make.
        state: its state from earlier rounds.
    """

    client: int
    work: ClientWork
    state: State


@dataclass(frozen=True)
class Group:
    """Batches of one form, each of another client.

    Attributes:
        rows: the clients' rows in the stack, ascending.
        leaves: leaves of the batches' content: tensors (n, …), and other values, equal in all batches.
        structure: structure of the content.
        size: samples of each batch.
        batch_index: their index in the local training, from 0.
        factors: factor of each batch's loss in its client's gradient.
    """

    rows: Sequence[int]
    leaves: list[Any]
    structure: TreeSpec
    size: int
    batch_index: int
    factors: Sequence[float]

    def copied(self) -> Group:
        """Return the group with a copy of its tensors, because a module may change what it reads."""
        return replace(self, leaves=[leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves])

    def content(self, position: int) -> Any:
        """Return the content of one of the batches."""
        leaves = [leaf[position] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)


class StackBatches(ABC):
    """Batches of the clients of a stack, step by step."""

    @abstractmethod
    def advance(self, num_clients: int) -> None:
        """Go on to the next optimiser step, which the first clients of the stack make."""

    @abstractmethod
    def groups(self, keep: bool = False) -> Iterator[Group]:
        """Yield the groups of the present step; with `keep`, they can be read again, even if the module changes them."""

    @abstractmethod
    def contents(self) -> Iterator[tuple[Any, int]]:
        """Yield content and index of each batch of the present step, client by client."""

    @property
    @abstractmethod
    def num_batches(self) -> int:
        """Number of batches that the first client has read."""


def stack_batches(flat_module: FlatModule, members: Sequence[Member], schedule: LocalSchedule) -> StackBatches:
    """Return the batches of the local training of a stack.

    Args:
        flat_module: prepares batches for the module.
        members: clients of the stack, in descending order of their numbers of steps.
        schedule: batches of a step.
    """
    prepare = partial(flat_module.transfer, resident=members[0].work.resident)
    joined = None
    # A user's hooks see each batch, and a rule that repeats a step's batches copies them.
    if members[0].work.resident and not flat_module.hooks.changes_batches and schedule.repeat == 1:
        joined = TensorSelection.join([member.work.selection for member in members])
    if joined is None:
        return SeparateBatches([local_batches(m.work, schedule, prepare) for m in members if m.work.num_steps])
    most_bytes = BYTES_ON_CPU if flat_module.fabric.device.type == "cpu" else BYTES_ELSEWHERE
    return GatheredBatches(joined, members, schedule, prepare, most_bytes)


def whole_pass(flat_module: FlatModule, members: Sequence[Member], schedule: LocalSchedule) -> Iterator[Group]:
    """Yield the groups of one pass over each client's samples in their order, with the factors of the mean of all."""
    once = [replace(m, work=replace(m.work, num_steps=min(1, m.work.batches_per_epoch))) for m in members]
    if not any(member.work.num_steps for member in once):
        return iter(())
    batches = stack_batches(flat_module, once, replace(schedule, full_batch=True, in_order=True, repeat=1))
    batches.advance(len(members))
    return batches.groups()


class SeparateBatches(StackBatches):
    """Batches that each client reads by itself."""

    def __init__(self, batches: Sequence[Iterator[Batch]]) -> None:
        """Take the batches of each client's passes without end."""
        self._batches = batches
        self._step: list[list[Batch]] = []

    def advance(self, num_clients: int) -> None:
        """Read the batches of the next step."""
        self._step = [_next_step(batches) for batches in self._batches[:num_clients]]

    def groups(self, keep: bool = False) -> Iterator[Group]:
        """Yield copies of the batches of each form."""
        return groups_of(self._step)

    def contents(self) -> Iterator[tuple[Any, int]]:
        """Yield content and index of each batch of the present step."""
        return ((batch.content, batch.batch_index) for batches in self._step for batch in batches)

    @property
    def num_batches(self) -> int:
        """Number of batches that the first client has read."""
        return self._step[0][-1].batch_index + 1


def groups_of(batches: Sequence[Sequence[Batch]]) -> Iterator[Group]:
    """Yield copies of the clients' batches, batches of one form together."""
    for position in range(max(map(len, batches), default=0)):
        alike: dict[Any, list[int]] = {}
        for row, client_batches in enumerate(batches):
            if position < len(client_batches):
                alike.setdefault(client_batches[position].signature, []).append(row)
        for rows in alike.values():
            some = [batches[row][position] for row in rows]
            leaves = [
                torch.stack(column) if isinstance(column[0], Tensor) else column[0]
                for column in zip(*(batch.flat[0] for batch in some), strict=True)
            ]
            one = some[0]
            yield Group(rows, leaves, one.flat[1], one.size, one.batch_index, [batch.factor for batch in some])


def _next_step(batches: Iterator[Batch]) -> list[Batch]:
    """Return the batches of a client's next optimiser step."""
    step_batches = []
    for batch in batches:
        step_batches.append(batch)
        if batch.ends_step:
            break
    return step_batches


class _Reader:
    """Order in which a client of a stack reads its samples: pass after pass, each shuffled anew unless they stay in order."""

    def __init__(self, member: Member, start: int, schedule: LocalSchedule) -> None:
        """Begin before the first pass; `start` is the position of the client's first sample among those of the stack."""
        self.num_steps, self._shuffled = member.work.num_steps, not schedule.in_order
        self._start, self._num_samples = start, len(member.work.selection)
        self._generator = torch.Generator().manual_seed(member.work.seeds[0])
        sizes = schedule.batch_sizes(len(member.work.selection))
        self._sizes, self._batch_size = sizes, schedule.batch_size
        self._in_step = schedule.step_batches(member.work.batches_per_epoch)
        self._factors = [schedule.loss_factor(size, sum(sizes)) for size in sizes]
        self._order = np.zeros(0, dtype=np.int64)
        self._next, self._before = len(sizes), -len(sizes)  # the next batch of this pass; the batches of earlier passes

    @property
    def next_samples(self) -> int:
        """Number of samples of the next step."""
        first = 0 if self._next == len(self._sizes) else self._next
        return sum(self._sizes[first : first + self._in_step])

    def read(self) -> Iterator[tuple[int, int, float, np.ndarray]]:
        """Yield size, index, factor and positions (size,) of the batches of the next step."""
        if self._next == len(self._sizes):
            self._next, self._before = 0, self._before + len(self._sizes)
            draw = torch.randperm(self._num_samples, generator=self._generator).numpy() if self._shuffled else None
            self._order = (np.arange(self._num_samples) if draw is None else draw) + self._start
        for index in range(self._next, min(self._next + self._in_step, len(self._sizes))):
            begin, size = index * self._batch_size, self._sizes[index]
            yield size, self._before + index, self._factors[index], self._order[begin : begin + size]
            self._next += 1


class GatheredBatches(StackBatches):
    """Views of gathered samples; each gather reads the batches of one pass of all clients, or fewer."""

    def __init__(
        self,
        joined: TensorSelection,
        members: Sequence[Member],
        schedule: LocalSchedule,
        prepare: Callable[[Any], Any],
        most_bytes: int,
    ) -> None:
        """Read nothing yet.

        Args:
            joined: samples of all clients of the stack.
            members: its clients.
            schedule: batches of a step.
            prepare: prepares samples for the module.
            most_bytes: most bytes of one gather, unless a single step needs more.
        """
        self._joined, self._prepare = joined, prepare
        starts = np.cumsum([0, *(len(member.work.selection) for member in members)]).tolist()
        pairs = zip(members, starts, strict=False)
        self._readers = [_Reader(m, start, schedule) for m, start in pairs if m.work.num_steps]
        self._most_samples = min(len(joined), most_bytes // max(1, joined.bytes_of_a_sample))
        self._num_planned = 0
        self._steps: deque[list[Group]] = deque()
        self._step: list[Group] = []

    def advance(self, num_clients: int) -> None:
        """Go on to the next step; gather the samples of some more steps if there are none left."""
        self._step = []  # first, because it holds the last gather
        if not self._steps:
            self._gather()
        self._step = self._steps.popleft()

    def groups(self, keep: bool = False) -> Iterator[Group]:
        """Yield views of the gathered samples."""
        return (group.copied() if keep else group for group in self._step)

    def contents(self) -> Iterator[tuple[Any, int]]:
        """Yield content and index of each batch of the present step."""
        places = [(row, g, i) for g, group in enumerate(self._step) for i, row in enumerate(group.rows)]
        for _, g, i in sorted(places):
            yield self._step[g].content(i), self._step[g].batch_index

    @property
    def num_batches(self) -> int:
        """Number of batches that the first client has read."""
        return max(group.batch_index for group in self._step if group.rows[0] == 0) + 1

    def _gather(self) -> None:
        """Gather the samples of the next steps, in the order in which they are read."""
        planned: list[list[tuple[int, int, list[int], list[float]]]] = []
        positions: list[np.ndarray] = []
        room = self._most_samples
        while readers := [reader for reader in self._readers if reader.num_steps > self._num_planned]:
            room -= sum(reader.next_samples for reader in readers)
            if planned and room < 0:
                break
            step, step_batches = [], [list(reader.read()) for reader in readers]
            for number in range(max(map(len, step_batches))):
                alike: dict[tuple[int, int], tuple[list[int], list[float], list[np.ndarray]]] = {}
                for row, batches in enumerate(step_batches):
                    if number < len(batches):
                        size, index, factor, client_order = batches[number]
                        rows, factors, parts = alike.setdefault((size, index), ([], [], []))
                        rows.append(row)
                        factors.append(factor)
                        parts.append(client_order)
                for (size, index), (rows, factors, parts) in alike.items():
                    step.append((size, index, rows, factors))
                    positions += parts
            planned.append(step)
            self._num_planned += 1
        leaves, structure = tree_flatten(self._prepare(self._joined.gather(np.concatenate(positions))))
        start = 0
        for step in planned:
            groups = []
            for size, index, rows, factors in step:
                end = start + size * len(rows)
                views = [leaf[start:end].unflatten(0, (len(rows), size)) for leaf in leaves]
                groups.append(Group(rows, views, structure, size, index, factors))
                start = end
            self._steps.append(groups)
