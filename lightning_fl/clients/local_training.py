"""One local training: the minibatch loop that all runners and the server share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_fl.clients.flat_module import FlatModule
from lightning_fl.clients.gradients_at_received import full_gradient, gradient_at_received
from lightning_fl.slots import LocalTraining, Message, Rule, Setting, State
from lightning_fl.state.run_state import STRAGGLER, Run


class Selection(Protocol):
    """The samples of one client."""

    def __len__(self) -> int: ...

    def batches(self, batch_size: int, generator: torch.Generator | None = None) -> Iterator[Any]:
        """One pass in batches, in an order drawn from `generator`."""


@dataclass(frozen=True)
class LocalSchedule:
    """How long a client trains and in what batches.

    Attributes:
        batch_size: samples in a minibatch, B.
        epochs: passes over the client's samples, E; or
        steps: optimiser steps over a stream of reshuffled passes, L. One of the two is None.
        limit_batches: of each pass only this many batches, or this fraction of them.
        accumulate: batches whose gradients add up to one optimiser step.
        clip_value, clip_algorithm: Lightning's `gradient_clip_val` and `gradient_clip_algorithm`.
        full_batch: every optimiser step, of which there are as many, follows the mean gradient on all samples of a pass.
        reports_last_loss: results tell the mean training loss of the last pass.
        straggler_rate: probability that a client is stopped before it is done.
    """

    batch_size: int
    epochs: int | None
    steps: int | None
    limit_batches: int | float = 1.0
    accumulate: int = 1
    clip_value: float | None = None
    clip_algorithm: str = "norm"
    full_batch: bool = False
    reports_last_loss: bool = False
    straggler_rate: float = 0.0

    def in_round(self, rule: Rule, setting: Setting) -> LocalSchedule:
        """With the batches that a rule takes in the round under way."""
        full_batch = rule.takes_full_batches(setting)
        return self if full_batch == self.full_batch else replace(self, full_batch=full_batch)

    def pass_batches(self, num_samples: int, skip_single: bool) -> int:
        """Batches of one pass over `num_samples` samples."""
        batches = ceil(num_samples / self.batch_size)
        last = num_samples - (batches - 1) * self.batch_size
        if skip_single and self.batch_size > 1 and last == 1:
            batches -= 1
        limit = self.limit_batches
        return min(batches, limit if isinstance(limit, int) else max(int(batches * limit), 1 if limit else 0))

    def batch_sizes(self, num_samples: int, skip_single: bool) -> list[int]:
        """Samples of each batch of one pass."""
        starts = range(0, self.pass_batches(num_samples, skip_single) * self.batch_size, self.batch_size)
        return [min(self.batch_size, num_samples - start) for start in starts]

    def num_steps(self, in_pass: int) -> int:
        """Optimiser steps of the whole local training, given the batches of one pass."""
        if not in_pass:
            return 0
        return self.steps if self.steps is not None else (self.epochs or 0) * ceil(in_pass / self.accumulate)

    def steps_done(self, in_pass: int, run: Run, client: int) -> int:
        """Optimiser steps that a client makes before the round's time is up: all, or, if it straggles, 1 to all but one."""
        planned = self.num_steps(in_pass)
        if not self.straggler_rate or planned < 2:
            return planned
        random = run.random(STRAGGLER, client)
        return int(random.integers(1, planned)) if random.random() < self.straggler_rate else planned

    def step_batches(self, in_pass: int) -> int:
        """Batches whose gradients add up to one optimiser step; at the end of a pass there may be fewer."""
        return in_pass if self.full_batch else self.accumulate

    def num_samples(self, num_samples: int, skip_single: bool, num_steps: int | None = None) -> int:
        """Samples read in the whole local training of a client that has `num_samples`, or in so many steps of it."""
        in_pass = self.pass_batches(num_samples, skip_single)
        passes, rest = self._passes(in_pass, num_steps)
        in_one_pass = min(num_samples, in_pass * self.batch_size)
        return passes * in_one_pass + rest * self.batch_size

    def num_batches(self, num_samples: int, skip_single: bool, num_steps: int | None = None) -> int:
        """Batches of the whole local training, or of so many steps of it."""
        in_pass = self.pass_batches(num_samples, skip_single)
        passes, rest = self._passes(in_pass, num_steps)
        return passes * in_pass + rest

    def _passes(self, in_pass: int, num_steps: int | None) -> tuple[int, int]:
        """How often the steps of a local training, or so many of them, read all `in_pass` batches, and the batches after that."""
        if not in_pass:
            return 0, 0
        in_step = self.step_batches(in_pass)
        passes, rest = divmod(self.num_steps(in_pass) if num_steps is None else num_steps, ceil(in_pass / in_step))
        return passes, rest * in_step


def train_locally(
    flat_module: FlatModule,
    rule: Rule,
    setting: Setting,
    received: Message,
    counters: dict[str, Tensor],
    state: State,
    selection: Selection,
    schedule: LocalSchedule,
    seeds: tuple[int, int],
    resident: bool,
    num_steps: int | None = None,
) -> LocalTraining:
    """Train the flat module from the received model on one client's samples.

    Args:
        flat_module: holds the module; its parameters are overwritten, those that the client owns are trained from where they are.
        rule: makes the steps.
        setting: of the run.
        received: `model` (d,) and `buffers` (d_b,), and what else came down.
        counters: integer buffers of the server's module.
        state: what the client kept from earlier rounds.
        selection: its samples.
        schedule: how long and in what batches.
        seeds: of the order of the samples, and of everything the module draws itself.
        resident: whether the samples already lie on the accelerator.
        num_steps: stop after so many optimiser steps; by default when the schedule is done.

    Returns:
        The local training after its last step.
    """
    module, hooks, optimizer, logs = flat_module.module, flat_module.hooks, flat_module.optimizer, flat_module.logs
    flat_module.load(received["model"], received["buffers"], counters)
    flat_module.bind_optimizer()
    optimizer.start_client()
    flat_module.zero_gradient()
    local = LocalTraining(
        setting, received, flat_module.params, flat_module.gradient, optimizer.step, state, learning_rate=0.0
    )
    local.learning_rate = optimizer.learning_rate
    num_samples, batch_size = len(selection), schedule.batch_size
    local.num_samples = float(schedule.num_samples(num_samples, flat_module.skips_single_samples, num_steps))
    unpruned = setting.unpruned
    mask_gradient = flat_module.mask_gradient(unpruned) if unpruned else None
    if rule.reads_full_gradient:
        flat_module.seed(seeds[1])
        sizes = schedule.batch_sizes(num_samples, flat_module.skips_single_samples)
        local.full_gradient = full_gradient(flat_module, selection.batches(batch_size), sizes, resident)
        if unpruned is not None:
            local.full_gradient.mul_(unpruned.factors)
        flat_module.load(received["model"], received["buffers"], counters)
        local.learning_rate = optimizer.learning_rate
    rule.start(local)

    order = torch.Generator().manual_seed(seeds[0])
    flat_module.seed(seeds[1])
    in_pass = flat_module.batches_in_pass = schedule.pass_batches(num_samples, flat_module.skips_single_samples)
    flat_module.steps_in_training = schedule.num_steps(in_pass)
    num_steps = flat_module.steps_in_training if num_steps is None else num_steps
    accumulate, in_one_pass = schedule.step_batches(in_pass), min(num_samples, in_pass * batch_size)
    local.steps_in_pass = ceil(in_pass / accumulate) if in_pass else 1
    batch_start, batch_end = hooks.listeners("on_train_batch_start"), hooks.listeners("on_train_batch_end")
    before_zero, before_backward = hooks.listeners("on_before_zero_grad"), hooks.listeners("on_before_backward")
    after_backward, before_step = hooks.listeners("on_after_backward"), hooks.listeners("on_before_optimizer_step")
    precision, fabric = flat_module.fabric.strategy.precision, flat_module.fabric
    converts, transfers = precision.precision != "32-true", not resident or hooks.changes_batches
    of_step: list[tuple[Any, int, float]] = []

    def mask_and_clip() -> None:
        if mask_gradient is not None:
            mask_gradient()
        if schedule.clip_value:
            flat_module.clip_gradient(schedule.clip_value, schedule.clip_algorithm)

    step = batch_index = 0
    has_gradient = False
    while step < num_steps:
        for index, batch in enumerate(selection.batches(batch_size, order)):
            logs.batch_size = min(batch_size, num_samples - index * batch_size)
            if transfers:
                batch = flat_module.transfer(batch, resident)
            if converts:
                batch = precision.convert_input(batch)
            if rule.reads_gradient_at_received:
                if not of_step:
                    flat_module.seed(seeds[1] + step)
                factor = logs.batch_size / in_one_pass if schedule.full_batch else 1 / accumulate
                of_step.append((batch, batch_index, factor))
            for listener in batch_start:
                listener(batch, batch_index)
            with precision.forward_context():
                output = (
                    module.training_step(batch, batch_index) if flat_module.takes_index else module.training_step(batch)
                )
            loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
            if loss is not None:
                has_gradient = True
                logs.add_loss(loss)
                for listener in before_backward:
                    listener(loss)
                if schedule.full_batch:
                    loss = loss * (logs.batch_size / in_one_pass)
                fabric.backward(loss if accumulate == 1 or schedule.full_batch else loss / accumulate)
                if flat_module.after_backward():
                    local.learning_rate = optimizer.learning_rate
                for listener in after_backward:
                    listener()
            if (index + 1) % accumulate == 0 or index + 1 == in_pass:
                step += 1
                if has_gradient:
                    has_gradient = False
                    for listener in before_step:
                        listener(optimizer.optimizer)
                    rule.observe(local)
                    mask_and_clip()
                    if rule.own_step and optimizer.decays:
                        local.gradient.add_(local.params * optimizer.weight_decay)
                    if rule.reads_gradient_at_received:
                        flat_module.seed(seeds[1] + step - 1)
                        found = gradient_at_received(flat_module, received, counters, of_step, mask_and_clip)
                        local.gradient_at_received = found
                    rule.correct(local)
                    rule.step(local)
                    if unpruned is not None and not optimizer.is_elementwise:
                        local.params.mul_(unpruned.factors)
                    if flat_module.personal_leaves:
                        flat_module.personal_optimizer.step()
                    local.num_steps += 1
                    local.sum_learning_rate = local.sum_learning_rate + local.learning_rate
                    if optimizer.moves_within_round:
                        optimizer.after_step()
                        local.learning_rate = optimizer.learning_rate
                of_step.clear()
                for listener in before_zero:
                    listener(optimizer.optimizer)
                flat_module.zero_gradient()
            if batch_end:
                outputs = {"loss": output.detach()} if isinstance(output, Tensor) else output
                for listener in batch_end:
                    listener(outputs, batch, batch_index)
            batch_index += 1
            if step == num_steps or index + 1 == in_pass:
                break
    return local
