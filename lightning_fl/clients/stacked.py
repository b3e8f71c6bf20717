"""Several clients at once, their models stacked: the fast way where one small client does not fill the accelerator.

Clients make their steps together. Those with more steps go on when the others have finished, and batches of another size are a
group of their own: nothing is padded, and every client trains on exactly what it would train on alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_fl.clients.flat_module import FlatModule
from lightning_fl.clients.local_training import LocalSchedule, Selection
from lightning_fl.clients.module_logs import LogCollector, RowLogs
from lightning_fl.clients.stack import Stack
from lightning_fl.data import FederatedDataModule
from lightning_fl.slots import LocalTraining, Message, Result, Rule, Setting, State
from lightning_fl.state.run_state import CLIENT, Run
from lightning_fl.vectors.personal import PERSONAL


@dataclass
class Member:
    """A client of a stack.

    Attributes:
        client: its index.
        selection: its samples.
        in_pass: batches of one pass over them.
        num_steps: optimiser steps it will make.
        state: what it has kept from earlier rounds.
        seeds: of the order of its samples, and of what the module draws.
    """

    client: int
    selection: Selection
    in_pass: int
    num_steps: int
    state: State
    seeds: Sequence[int]


@dataclass(frozen=True)
class Batch:
    """One batch of one client.

    Attributes:
        content: what `training_step` gets.
        size: its samples.
        index: which of the local training's batches it is, from 0.
        factor: of its loss in the step's gradient.
    """

    content: Any
    size: int
    index: int
    factor: float

    @property
    def signature(self) -> Any:
        """Equal for batches that can be stacked: one structure, equal shapes, equal values of all that is no tensor."""
        leaves, structure = tree_flatten(self.content)
        shapes = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        return structure, shapes, self.index


def stacked(
    flat_module: FlatModule,
    rule: Rule,
    setting: Setting,
    received: Message,
    cohort: Sequence[int],
    data: FederatedDataModule,
    schedule: LocalSchedule,
    run: Run,
    clients_at_once: int,
) -> Iterator[Result]:
    """Train the cohort in stacks of at most `clients_at_once` clients, those with the most steps first.

    The other arguments and the results are those of `serial`. What a module draws itself while it trains (dropout) comes from
    one stream for the whole stack, so it differs from what the client would draw alone.
    """
    in_pass = {k: schedule.pass_batches(int(data.client_sizes[k]), flat_module.skips_single_samples) for k in cohort}
    num_steps = {client: schedule.steps_done(in_pass[client], run, client) for client in cohort}

    def together(client: int) -> int:
        # Schedules inside a round ask how long the client is to train, so clients of one stack must agree on it.
        return in_pass[client] if flat_module.optimizer.moves_within_round else 0

    def length(client: int) -> tuple[int, int, int]:
        return together(client), num_steps[client], in_pass[client]

    for _, clients in groupby(sorted(cohort, key=length, reverse=True), key=together):
        waiting = list(clients)
        stack_size = ceil(len(waiting) / ceil(len(waiting) / clients_at_once))
        for start in range(0, len(waiting), stack_size):
            members = []
            for client in waiting[start : start + stack_size]:
                flat_module.hooks.call("on_client_download", client)
                state = run.client_state(client, rule, received["model"])
                seeds = run.torch_seeds(CLIENT, client)
                selection = data.client(client)
                members.append(Member(client, selection, in_pass[client], num_steps[client], state, seeds))
            yield from train_stack(
                flat_module, rule, setting, received, run.counters, members, schedule, data.train.resident
            )
    flat_module.steps_in_training = 0


def train_stack(
    flat_module: FlatModule,
    rule: Rule,
    setting: Setting,
    received: Message,
    counters: dict[str, Tensor],
    members: Sequence[Member],
    schedule: LocalSchedule,
    resident: bool,
    notifies_callbacks: bool = True,
) -> list[Result]:
    """Train some clients together.

    Args:
        flat_module: holds the module.
        rule: makes the steps.
        setting: of the run.
        received: what came down.
        counters: integer buffers of the server's module.
        members: the clients, the one with the most steps first.
        schedule: how long and in what batches.
        resident: whether the samples already lie on the accelerator.
        notifies_callbacks: whether Lightning's own callbacks hear of the batches.

    Returns:
        Their results, in the order of `members`.
    """
    optimizer, num_active = flat_module.optimizer, len(members)
    state = {name: torch.stack([member.state[name] for member in members]) for name in members[0].state}
    nothing = flat_module.personal.new_zeros(num_active, 0)
    stack = Stack.of(flat_module, received, counters, state.pop(PERSONAL, nothing))
    flat_module.personal_optimizer.bind(stack.personal_leaves)
    logs = RowLogs(flat_module.logs)
    optimizer.bind(stack.params, stack.gradient)
    optimizer.start_client()
    flat_module.batches_in_pass = max(member.in_pass for member in members)
    flat_module.steps_in_training = schedule.num_steps(flat_module.batches_in_pass)
    local = LocalTraining(setting, received, stack.params, stack.gradient, optimizer.step, state)
    local.learning_rate = optimizer.learning_rate
    read = [schedule.num_samples(len(m.selection), flat_module.skips_single_samples, m.num_steps) for m in members]
    local.num_samples = stack.params.new_tensor(read).unsqueeze(1)
    in_pass = [[ceil(member.in_pass / max(1, schedule.step_batches(member.in_pass)))] for member in members]
    local.steps_in_pass = torch.tensor(in_pass, device=stack.params.device).clamp(min=1)
    if rule.reads_full_gradient:
        flat_module.seed(members[0].seeds[1])
        local.full_gradient = _full_gradients(flat_module, stack, members, schedule, resident)
        if setting.unpruned is not None:
            local.full_gradient.mul_(setting.unpruned.factors)
        stack.restart(received, counters)
        local.learning_rate = optimizer.learning_rate
    rule.start(local)

    flat_module.seed(members[0].seeds[1])
    # What clients own they have in both stacks.
    at_received = Stack.of(flat_module, received, counters, stack.personal) if rule.reads_gradient_at_received else None
    batches = [_batches_by_step(flat_module, member, schedule, resident) for member in members]
    finished: list[tuple[Message, State, State, dict[str, Tensor], int]] = []
    step = 0
    while True:
        num_left = sum(member.num_steps > step for member in members)
        if num_left < num_active:
            finished = _finish(flat_module, rule, local, stack, num_left) + finished
            stack, num_active = stack.first(num_left), num_left
            at_received = None if at_received is None else at_received.first(num_left)
            local = _rows(local, slice(num_left))
            optimizer.narrow(num_left)
            flat_module.personal_optimizer.narrow(stack.personal_leaves, num_left)
        if not num_active:
            break
        stack.zero_gradient()
        of_step = [next(steps) for steps in batches[:num_active]]
        if at_received is not None:
            flat_module.seed(members[0].seeds[1] + step)
        for found in _backward(stack, of_step, logs):
            optimizer.activate(found)
            local.learning_rate = optimizer.learning_rate
        rule.observe(local)
        _mask_and_clip(stack, setting, schedule)
        if rule.own_step and optimizer.decays:
            local.gradient.add_(local.params * optimizer.weight_decay)
        if at_received is not None:
            flat_module.seed(members[0].seeds[1] + step)
            at_received.restart(received, counters)
            at_received.zero_gradient()
            for _ in _backward(at_received, of_step, RowLogs(LogCollector())):
                pass
            _mask_and_clip(at_received, setting, schedule)
            local.gradient_at_received = at_received.gradient
            if optimizer.decays:
                local.gradient_at_received.add_(at_received.params * optimizer.weight_decay)
        rule.correct(local)
        rule.step(local)
        if stack.personal_leaves:
            flat_module.personal_optimizer.step()
        step = local.num_steps = local.num_steps + 1
        local.sum_learning_rate = local.sum_learning_rate + local.learning_rate
        if optimizer.moves_within_round:
            optimizer.after_step()
            local.learning_rate = optimizer.learning_rate
        if notifies_callbacks:
            _tell_stock_callbacks(flat_module, of_step)
    in_a_pass = [max(1, member.in_pass) for member in members]
    last = logs.last_losses(in_a_pass) if schedule.reports_last_loss else [None] * len(members)
    return [
        Result(
            member.client, message, float(len(member.selection)), state | owned, counters, sums, num_steps, owned, loss
        )
        for member, sums, loss, (message, state, owned, counters, num_steps) in zip(
            members, logs.take_rows(len(members)), last, finished, strict=True
        )
    ]


def _batches_by_step(
    flat_module: FlatModule, member: Member, schedule: LocalSchedule, resident: bool
) -> Iterator[list[Batch]]:
    """The batches of a client, those of one optimiser step together."""
    order = torch.Generator().manual_seed(member.seeds[0])
    num_samples, batch_size, count = len(member.selection), schedule.batch_size, 0
    in_step, in_one_pass = schedule.step_batches(member.in_pass), min(num_samples, member.in_pass * batch_size)
    transfers = not resident or flat_module.hooks.changes_batches
    of_step: list[Batch] = []
    while True:
        for index, content in enumerate(member.selection.batches(batch_size, order)):
            if transfers:
                content = flat_module.transfer(content, resident)
            size = min(batch_size, num_samples - index * batch_size)
            of_step.append(
                Batch(content, size, count, size / in_one_pass if schedule.full_batch else 1 / schedule.accumulate)
            )
            count += 1
            is_last = index + 1 == member.in_pass
            if len(of_step) == in_step or is_last:
                yield of_step
                of_step = []
            if is_last:
                break


def _full_gradients(
    flat_module: FlatModule, stack: Stack, members: Sequence[Member], schedule: LocalSchedule, resident: bool
) -> Tensor:
    """What `full_gradient` gives, for each client (n, d)."""
    of_pass = []
    for member in members:
        sizes = schedule.batch_sizes(len(member.selection), flat_module.skips_single_samples)
        batches = zip(member.selection.batches(schedule.batch_size), sizes, strict=False)
        of_pass.append(
            [
                Batch(flat_module.transfer(content, resident), size, index, size / sum(sizes))
                for index, (content, size) in enumerate(batches)
            ]
        )
    for found in _backward(stack, of_pass, RowLogs(flat_module.logs)):
        flat_module.optimizer.activate(found)
    if flat_module.optimizer.decays:
        stack.gradient.add_(stack.params * flat_module.optimizer.weight_decay)
    return stack.gradient.clone()


def _backward(stack: Stack, of_step: Sequence[list[Batch]], logs: RowLogs) -> Iterator[list[str]]:
    """Add up the gradients of the batches of one step; yields names of parameters that get their first one."""
    for position in range(max(map(len, of_step))):
        groups: dict[Any, list[int]] = {}
        for row, batches in enumerate(of_step):
            if position < len(batches):
                groups.setdefault(batches[position].signature, []).append(row)
        for rows in groups.values():
            batches = [of_step[row][position] for row in rows]
            logs.rows, logs.batch_size = rows, batches[0].size
            factors: float | Tensor = batches[0].factor
            if any(batch.factor != factors for batch in batches):
                factors = stack.params.new_tensor([batch.factor for batch in batches])
            if found := stack.backward(rows, [batch.content for batch in batches], batches[0].index, factors, logs):
                yield found


def _rows(local: LocalTraining, rows: slice) -> LocalTraining:
    """Some clients of a stacked local training; what has one axis only is shared by all."""

    def some(x: Tensor) -> Tensor:
        return x[rows] if x.dim() > 1 else x

    return replace(
        local,
        params=some(local.params),
        gradient=some(local.gradient),
        state={name: x[rows] for name, x in local.state.items()},
        memory={name: some(x) for name, x in local.memory.items()},
        full_gradient=some(local.full_gradient),
        gradient_at_received=some(local.gradient_at_received),
        num_samples=some(torch.as_tensor(local.num_samples)),
        steps_in_pass=some(local.steps_in_pass) if isinstance(local.steps_in_pass, Tensor) else local.steps_in_pass,
    )


def _finish(
    flat_module: FlatModule, rule: Rule, local: LocalTraining, stack: Stack, start: int
) -> list[tuple[Message, State, State, dict[str, Tensor], int]]:
    """What the clients from `start` on upload and keep, what of it they own, their counters, and their steps."""
    part = _rows(local, slice(start, None))
    message = rule.finish(part)
    if flat_module.buffer_layout.names:
        message["buffers"] = stack.buffers[start:] - local.received["buffers"]
    return [
        (
            {name: x[row] for name, x in message.items()},
            {name: x[row].clone() for name, x in part.state.items()},
            {PERSONAL: stack.personal[start + row].clone()} if stack.personal_leaves else {},
            {name: x[start + row].clone() for name, x in stack.counters.items()},
            part.num_steps,
        )
        for row in range(len(part.params))
    ]


def _mask_and_clip(stack: Stack, setting: Setting, schedule: LocalSchedule) -> None:
    """What is done with the gradients of a step: 0 outside a pruning mask, and clipped."""
    if setting.unpruned is not None:
        stack.gradient.mul_(setting.unpruned.factors)
    if schedule.clip_value:
        _clip(stack.gradient, list(stack.personal_leaves.values()), schedule.clip_value, schedule.clip_algorithm)


def _clip(gradient: Tensor, personal: Sequence[Tensor], value: float, algorithm: str) -> None:
    """Clip each client's gradients, (n, d) and those of `personal`, as torch's `clip_grad_norm_` and `clip_grad_value_` do."""
    gradients = [gradient, *(leaf.grad for leaf in personal if leaf.grad is not None)]
    if algorithm == "value":
        for x in gradients:
            x.clamp_(-value, value)
        return
    lengths = torch.stack([torch.linalg.vector_norm(x.flatten(1), dim=1) for x in gradients])
    factors = (value / (torch.linalg.vector_norm(lengths, dim=0) + 1e-6)).clamp(max=1)
    for x in gradients:
        x.mul_(factors.view(-1, *[1] * (x.dim() - 1)))


def _tell_stock_callbacks(flat_module: FlatModule, of_step: Sequence[list[Batch]]) -> None:
    """Lightning's own callbacks, such as progress bars, count batches."""
    starts, ends = (
        flat_module.hooks.listeners("on_train_batch_start"),
        flat_module.hooks.listeners("on_train_batch_end"),
    )
    for batch in (batch for batches in of_step for batch in batches) if starts or ends else ():
        for listener in starts:
            listener(batch.content, batch.index)
        for listener in ends:
            listener(None, batch.content, batch.index)
