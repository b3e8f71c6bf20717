"""Length and batches of a client's local training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from lightning_fl.data import Selection
from lightning_fl.slots import RoundContext, Rule
from lightning_fl.state.run_state import STRAGGLER, Run


@dataclass(frozen=True)
class ClientWork:
    """Local training of one client: its samples, and how far it goes.

    Attributes:
        selection: the samples.
        batches_per_epoch: batches of one pass over them.
        num_steps: optimiser steps to make.
        seeds: seed of the order of the samples, and seed of the module's own random draws.
        resident: True if the samples are on the accelerator already.
    """

    selection: Selection
    batches_per_epoch: int
    num_steps: int
    seeds: Sequence[int]
    resident: bool


@dataclass(frozen=True)
class LocalSchedule:
    """Length and batches of a client's local training.

    Attributes:
        batch_size: samples in a minibatch, B.
        epochs: passes over the client's samples, E; or
        steps: optimiser steps over a stream of reshuffled passes, L. One of the two is None.
        limit_batches: batches of each pass to use, a count or a fraction.
        accumulate: batches whose gradients add up to one optimiser step.
        clip_value, clip_algorithm: Lightning's `gradient_clip_val` and `gradient_clip_algorithm`.
        full_batch: True if every optimiser step uses the mean gradient on all samples of a pass; the number of steps stays.
        reports_last_loss: True if results contain the mean training loss of the last pass.
        straggler_rate: probability that a client stops before its last step.
        skips_single_samples: True if a last batch of one sample is left out.
        repeat: optimiser steps that the batches of each step serve, one after the other; `steps`, `epochs` and batches count
            only the first of these.
        drop_last: True if a pass leaves out its last batch when that is not full.
        most_steps: largest number of optimiser steps of a client, those that are left until `max_steps`; None without such a
            limit.
        in_order: True if each pass reads the samples in the stored order, without augmentation.
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
    repeat: int = 1
    skips_single_samples: bool = False
    drop_last: bool = False
    most_steps: int | None = None
    in_order: bool = False

    def with_cohort(self, cohort_size: int, num_clients: int, batches_per_epoch: int) -> LocalSchedule:
        """Return the schedule of one client that holds all samples and makes the steps of a cohort.

        Args:
            cohort_size: clients of a round, K.
            num_clients: clients with samples, N.
            batches_per_epoch: batches of one pass over all samples.
        """
        if self.epochs is None:
            return replace(self, steps=(self.steps or 0) * cohort_size)
        epochs, rest = divmod(self.epochs * cohort_size, num_clients)
        if not rest:
            return replace(self, epochs=epochs)
        steps = round(self.num_steps(batches_per_epoch) * cohort_size / num_clients)
        return replace(self, epochs=None, steps=max(1, steps))

    def in_round(self, rule: Rule, context: RoundContext) -> LocalSchedule:
        """Return the schedule with the batches that a rule uses in the current round, and its number of steps if it has one."""
        full_batch, repeat, steps = rule.takes_full_batches(context), rule.repeats, rule.steps_in_round(context)
        if (full_batch, repeat, steps) == (self.full_batch, self.repeat, None):
            return self
        epochs, steps = (self.epochs, self.steps) if steps is None else (None, steps)
        return replace(self, full_batch=full_batch, repeat=repeat, epochs=epochs, steps=steps)

    def pass_batches(self, num_samples: int) -> int:
        """Return the number of batches of one pass over `num_samples` samples."""
        batches = num_samples // self.batch_size if self.drop_last else ceil(num_samples / self.batch_size)
        last = num_samples - (batches - 1) * self.batch_size
        if self.skips_single_samples and self.batch_size > 1 and last == 1:
            batches -= 1
        limit = self.limit_batches
        return min(batches, limit if isinstance(limit, int) else max(int(batches * limit), 1 if limit else 0))

    def batch_sizes(self, num_samples: int) -> list[int]:
        """Return the number of samples in each batch of one pass."""
        starts = range(0, self.pass_batches(num_samples) * self.batch_size, self.batch_size)
        return [min(self.batch_size, num_samples - start) for start in starts]

    def pass_samples(self, num_samples: int) -> int:
        """Return the number of samples in the batches of one pass."""
        return min(num_samples, self.pass_batches(num_samples) * self.batch_size)

    def num_steps(self, batches_per_epoch: int) -> int:
        """Return the number of optimiser steps of the whole local training, given the batches of one pass."""
        if not batches_per_epoch:
            return 0
        steps = self.steps if self.steps is not None else (self.epochs or 0) * ceil(batches_per_epoch / self.accumulate)
        steps *= self.repeat
        return steps if self.most_steps is None else min(steps, self.most_steps)

    def steps_done(self, batches_per_epoch: int, run: Run, client: int) -> int:
        """Return the number of optimiser steps that a client makes in a round: all, or, if it straggles, 1 to all but one."""
        planned = self.num_steps(batches_per_epoch)
        if not self.straggler_rate or planned < 2:
            return planned
        random = run.random(STRAGGLER, client)
        return int(random.integers(1, planned)) if random.random() < self.straggler_rate else planned

    def step_batches(self, batches_per_epoch: int) -> int:
        """Return the number of batches whose gradients add up to one optimiser step; the last step of a pass may have fewer."""
        return batches_per_epoch if self.full_batch else self.accumulate

    def ends_step(self, batch_index: int, batches_per_epoch: int) -> bool:
        """True if a batch, given its index in the local training, is the last one of an optimiser step."""
        in_step = self.step_batches(batches_per_epoch)
        rest = batches_per_epoch % in_step
        place = batch_index % (batches_per_epoch * self.repeat) + 1
        complete = (batches_per_epoch - rest) * self.repeat
        return place % in_step == 0 if place <= complete else (place - complete) % rest == 0

    def loss_factor(self, size: int, samples_per_epoch: int) -> float:
        """Return the factor of the mean loss of a batch of `size` samples in the loss of its optimiser step."""
        return size / samples_per_epoch if self.full_batch else 1 / self.accumulate

    def num_samples(self, num_samples: int, num_steps: int | None = None) -> int:
        """Return the number of samples that a client with `num_samples` reads in its local training, or in `num_steps` of it."""
        batches_per_epoch = self.pass_batches(num_samples)
        return self._read(batches_per_epoch, num_steps, self.pass_samples(num_samples), self.batch_size)

    def num_batches(self, num_samples: int, num_steps: int | None = None) -> int:
        """Return the number of batches of the whole local training, or of `num_steps` of it."""
        batches_per_epoch = self.pass_batches(num_samples)
        return self._read(batches_per_epoch, num_steps, batches_per_epoch, 1)

    def _read(self, batches_per_epoch: int, num_steps: int | None, per_epoch: int, per_batch: int) -> int:
        """Add up `per_epoch` for each pass of the training, or of `num_steps` of it, and `per_batch` for each further batch."""
        if not batches_per_epoch:
            return 0
        in_step = self.step_batches(batches_per_epoch)
        steps = self.num_steps(batches_per_epoch) if num_steps is None else num_steps
        passes, rest = divmod(steps, ceil(batches_per_epoch / in_step) * self.repeat)
        complete, repeats = divmod(rest, self.repeat)
        before = min(per_epoch, complete * in_step * per_batch)
        after = min(per_epoch, (complete + 1) * in_step * per_batch)
        return self.repeat * (passes * per_epoch + before) + repeats * (after - before)

    def work(
        self, selection: Selection, seeds: Sequence[int], resident: bool, straggler: tuple[Run, int] | None = None
    ) -> ClientWork:
        """Return the local training on some samples.

        Args:
            selection: the samples.
            seeds: seed of their order, and seed of the module's own random draws.
            resident: True if they are on the accelerator already.
            straggler: the run and the client, which may stop early; None to make all steps.
        """
        batches = self.pass_batches(len(selection))
        num_steps = self.num_steps(batches) if straggler is None else self.steps_done(batches, *straggler)
        return ClientWork(selection, batches, num_steps, seeds, resident)
