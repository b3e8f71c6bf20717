"""Local training: the minibatch loop of the serial runner and the server, and the optimiser step of all runners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from math import ceil
from typing import Any

from torch import Tensor

from lightning_fl.clients.client_job import Batch, ClientJob, local_batches
from lightning_fl.clients.device_group import DeviceGroup
from lightning_fl.clients.gradients import (
    full_gradient,
    full_loss,
    gradient_at,
    gradient_treatment,
)
from lightning_fl.clients.local_schedule import ClientWork
from lightning_fl.clients.representations import Representations
from lightning_fl.clients.self_distillation import SelfDistillation
from lightning_fl.errors import require
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.hooks import StepListeners
from lightning_fl.flat_module.local_progress import LocalProgress
from lightning_fl.slots import Gradients, LocalTraining, Message, Phase, State, message_of, phased


def train_locally(
    flat_module: FlatModule,
    job: ClientJob,
    work: ClientWork,
    state: State,
    beside: Callable[[LocalTraining, Sequence[Batch]], None] | None = None,
) -> LocalTraining:
    """Train the flat module from the received model on one client's samples.

    Args:
        flat_module: holds the module. Its parameters are overwritten; what the client owns starts from its present values.
        job: job of the client.
        work: the client's samples, and the steps to make.
        state: the client's state from earlier rounds.
        beside: called before each step with the local training and the step's batches; leaves the flat module as it is.

    Returns:
        The local training after its last step.
    """
    local, progress = begin_training(flat_module, job, work, state)
    treat, listeners = gradient_treatment(flat_module, job), flat_module.hooks.step_listeners()
    forward_context, logs = flat_module.fabric.autocast, flat_module.logs
    reads_at_received = Gradients.MINIBATCH_AT_RECEIVED in job.rule.reads
    reads_at_point = Gradients.MINIBATCH_AT_POINT in job.rule.reads
    keeps_batches = reads_at_received or reads_at_point or beside is not None
    with_penalty = _with_penalty(flat_module, job, local)
    step_batches: list[Batch] = []
    step, has_gradient, starts_step = 0, False, True
    has_listeners, rates = any(listeners), flat_module.optimizer.rates

    def at_received() -> Tensor:
        flat_module.generators.seed(work.seeds[1] + step - 1)  # so that the module repeats its random draws
        received = job.received["model"], job.received["buffers"], job.counters
        return gradient_at(flat_module, received, step_batches, treat, job.group)

    repeat_draws: Callable[[], None] = flat_module.generators.keep() if reads_at_point else lambda: None

    def at_point() -> Tensor:
        repeat_draws()
        point = job.rule.point(local), flat_module.read_buffers(), flat_module.read_counters()
        return gradient_at(flat_module, point, step_batches, treat, job.group, decays=False)

    prepare = partial(flat_module.transfer, resident=work.resident)
    group = job.group
    batches = local_batches(work, job.schedule, prepare, group) if work.num_steps else iter(())
    if flat_module.is_manual:
        _let_module_step(flat_module, islice(batches, work.num_steps), progress, job.schedule.most_steps)
        batches = iter(())
    for batch in batches:
        logs.batch_size, progress.batch_index = batch.size, batch.batch_index
        if keeps_batches:
            if reads_at_received and not step_batches:
                flat_module.generators.seed(work.seeds[1] + step)
            if reads_at_point and not step_batches:
                repeat_draws = flat_module.generators.keep()
            step_batches.append(batch.copied())
        loss = output = penalty = None
        if batch.size:
            for listener in listeners.on_train_batch_start:
                listener(batch.content, batch.batch_index)
            with forward_context():
                if with_penalty is None:
                    loss, output = flat_module.loss_of(batch.content, batch.batch_index)
                else:
                    loss, output, penalty = with_penalty(batch)
        if starts_step:  # not before, because others may read the last step's gradient until then
            for listener in listeners.on_before_zero_grad:
                listener(flat_module.optimizer.optimizer)
            flat_module.gradient.zero()
        starts_step = batch.ends_step
        if loss is not None:
            has_gradient = True
            loss = _backward(flat_module, loss, penalty, batch, job, local, listeners)
        if batch.ends_step:
            step += 1
            if group is not None:
                _sum_gradient(flat_module, group, local, has_gradient or not batch.size)
                has_gradient = True
            for listener in listeners.on_before_optimizer_step:
                listener(flat_module.optimizer.optimizer)
            if listeners.on_before_optimizer_step:
                flat_module.gradient.adopt()
            if has_listeners and flat_module.optimizer.rates != rates:  # a listener has set others
                rates, local.learning_rate = flat_module.optimizer.rates, flat_module.optimizer.learning_rate
            if has_gradient:
                has_gradient = False
                if beside is not None:
                    beside(local, step_batches)
                missing = flat_module.gradient.missing
                rule_step(
                    local,
                    job,
                    flat_module,
                    treat,
                    at_received if reads_at_received else None,
                    at_point if reads_at_point else None,
                    missing,
                )
            move_schedules(local, flat_module, batch.batch_index + 1)
            step_batches.clear()
        if listeners.on_train_batch_end and batch.size:
            listeners.end_batch(loss, output, batch.content, batch.batch_index)
        if step == work.num_steps:
            break
    flat_module.bind_replaced()  # the last step may have put other data into parameters
    flat_module.gradient.zero()
    flat_module.optimizer.end_client()
    return local


def _with_penalty(
    flat_module: FlatModule, job: ClientJob, local: LocalTraining
) -> Callable[[Batch], tuple[Any, Any, Tensor | None]] | None:
    """Return a function that gives a batch's loss and output, and a penalty of other networks; None if there is no penalty."""
    if Gradients.REPRESENTATIONS in job.rule.reads:
        return Representations(flat_module, job, local).training_step
    if flat_module.dropout is not None and flat_module.dropout.distils:
        return SelfDistillation(flat_module, flat_module.dropout).training_step
    return None


def _sum_gradient(flat_module: FlatModule, group: DeviceGroup, local: LocalTraining, has_loss: bool) -> None:
    """Sum a step's gradient over the processes of a group, and give all of them the buffers of the first.

    Raises:
        UserError: this process has samples, but no loss.
    """
    require(
        has_loss,
        f"training_step of {type(flat_module.module).__name__} returned None for one device's share of a minibatch: with "
        "trainer.devices_per_client each device's step needs a loss.",
    )
    if group.sum_gradient(flat_module):
        local.learning_rate = flat_module.optimizer.learning_rate
    group.share_buffers(flat_module)


def _let_module_step(
    flat_module: FlatModule, batches: Iterable[Batch], progress: LocalProgress, most_steps: int | None
) -> None:
    """Train a module that makes its optimisers' steps itself, until a batch reaches `most_steps`."""
    listeners, logs = flat_module.hooks.step_listeners(), flat_module.logs
    forward_context = flat_module.fabric.autocast
    for batch in batches:
        logs.batch_size, progress.batch_index = batch.size, batch.batch_index
        for listener in listeners.on_train_batch_start:
            listener(batch.content, batch.batch_index)
        with forward_context():
            loss, output = flat_module.training_step(batch.content, batch.batch_index)
        if loss is not None:
            logs.add_loss(loss.detach())
        if listeners.on_train_batch_end:
            listeners.end_batch(loss, output, batch.content, batch.batch_index)
        if most_steps is not None and progress.local.num_steps >= most_steps:  # a batch may have several steps
            break


def rule_step(
    local: LocalTraining,
    job: ClientJob,
    flat_module: FlatModule,
    treat: Callable[[], None],
    at_received: Callable[[], Tensor] | None,
    at_point: Callable[[], Tensor] | None,
    missing: Sequence[str] = (),
) -> None:
    """Make one optimiser step of a client, or of every client of a stack, from the gradient of its minibatches.

    Args:
        local: local training, (d,) or stacked (n, d).
        job: job of the clients.
        flat_module: holds the optimisers.
        treat: masks and clips the gradient.
        at_received: returns the gradient of the same minibatches at the received model; None if the rule does not read it.
        at_point: returns their gradient at `Rule.point`; None if the rule does not read it.
        missing: parameters that the optimiser would move, although they have no gradient in this step.
    """
    rule, optimizer, unpruned = job.rule, flat_module.optimizer, job.context.unpruned
    phase = Phase.ALL if (part := phased(job.personal)) is None else part.phase(local)
    rule.observe(local)
    if flat_module.personal.leaves and phase is not Phase.ALL:
        _drop_other_gradients(local, flat_module, phase)
    treat()
    if phase is not Phase.PERSONAL:
        if rule.own_step:
            flat_module.add_decay(local.gradient, local.params, missing)
        if at_received is not None:
            local.gradient_at_received = at_received()
        if at_point is not None:
            local.gradient_at_point = at_point()
        rule.correct(local)
        with flat_module.step_without(missing):
            rule.step(local)
    if unpruned is not None and not optimizer.is_elementwise:
        flat_module.bind_replaced()
        local.params.mul_(unpruned.factors)
    if flat_module.personal.leaves:
        flat_module.personal_optimizer.step()
    local.num_steps += 1
    local.sum_learning_rate = local.sum_learning_rate + local.learning_rate


def _drop_other_gradients(local: LocalTraining, flat_module: FlatModule, phase: Phase) -> None:
    """Drop the gradients of the parameters that do not train in this phase, so that clipping does not see them."""
    if phase is Phase.SHARED:
        flat_module.personal_optimizer.drop_gradients()
    elif local.gradient.numel():
        local.gradient.zero_()
    else:
        for parameter in flat_module.parameters:
            parameter.grad = None


def move_schedules(local: LocalTraining, flat_module: FlatModule, num_batches: int) -> None:
    """Advance the step-wise schedulers after a step; `num_batches` batches of the local training are done."""
    optimizer = flat_module.optimizer
    if optimizer.schedules.moves_within_round:
        optimizer.schedules.after_step(num_batches)
        local.learning_rate = optimizer.learning_rate


def finish(flat_module: FlatModule, job: ClientJob, local: LocalTraining) -> Message:
    """Return the upload of a client, with the change of its float buffers if the module has any."""
    local.buffers = flat_module.read_buffers()
    message = message_of(job.rule, local)
    if flat_module.buffer_layout.names:
        message["buffers"] = change_of(local.buffers, job.received["buffers"])
    return message


def change_of(after: Tensor, before: Tensor) -> Tensor:
    """Return the change of float buffers (…, d_b); 0 where an infinity or NaN, as in an attention mask, is unchanged.

    >>> inf, nan = float("inf"), float("nan")
    >>> change_of(Tensor([1.0, -inf, nan]), Tensor([0.5, -inf, nan])).tolist()
    [0.5, 0.0, 0.0]
    """
    stays = (after == before) | (after.isnan() & before.isnan())
    return (after - before).masked_fill_(stays, 0.0)


def begin_training(
    flat_module: FlatModule, job: ClientJob, work: ClientWork, state: State
) -> tuple[LocalTraining, LocalProgress]:
    """Load the model that the client starts from, and begin the local training: optimiser, full gradient, `Rule.start`."""
    optimizer, schedule, batches = flat_module.optimizer, job.schedule, work.batches_per_epoch
    received, counters, seed, num_samples = job.received, job.counters, work.seeds[1], len(work.selection)
    start = received if job.start is None else job.start
    flat_module.load(start["model"], start["buffers"], counters)
    flat_module.bind_optimizer()
    optimizer.start_client()
    local = LocalTraining(job.context, received, flat_module.params, flat_module.gradient.vector, optimizer.step, state)
    progress = flat_module.progress = LocalProgress(local, batches * schedule.repeat, schedule.num_steps(batches))
    local.num_samples = float(schedule.num_samples(num_samples, work.num_steps))
    local.steps_in_pass = ceil(batches / schedule.step_batches(batches)) * schedule.repeat if batches else 1
    if Gradients.FULL_AT_RECEIVED in job.rule.reads:
        flat_module.generators.seed(seed)
        owned = flat_module.personal.read_buffers()
        local.full_gradient = full_gradient(flat_module, *_whole_pass(job, work), work.resident, job.group)
        if job.context.unpruned is not None:
            local.full_gradient.mul_(job.context.unpruned.factors)
        flat_module.load(start["model"], start["buffers"], counters)
        flat_module.personal.load(owned)
    local.learning_rate = optimizer.learning_rate
    if job.rule.num_losses:
        local.full_loss = partial(_loss_at, flat_module, job, work)
    start_parts(job, local)
    flat_module.generators.seed(seed)
    return local, progress


def _loss_at(flat_module: FlatModule, job: ClientJob, work: ClientWork, params: Tensor) -> Tensor:
    """Return the mean loss () on all of a client's samples at parameters (d,), with the received buffers."""
    with flat_module.other_model(params, job.received["buffers"], job.counters):
        return full_loss(flat_module, *_whole_pass(job, work), work.resident, job.group)


def _whole_pass(job: ClientJob, work: ClientWork) -> tuple[Iterator[Any], list[int]]:
    """Return the batches of a pass over a client's samples in their order, this process's rows of them, and their sizes."""
    share = {} if job.group is None else {"share": job.group.rows}
    contents = work.selection.batches(job.schedule.batch_size, None, **share)
    return contents, job.schedule.batch_sizes(len(work.selection))


def start_parts(job: ClientJob, local: LocalTraining) -> None:
    """Let the rule, and then the phases if there are some, prepare a local training."""
    job.rule.start(local)
    if (part := phased(job.personal)) is not None:
        part.start(local)


def _backward(
    flat_module: FlatModule,
    loss: Tensor,
    penalty: Tensor | None,
    batch: Batch,
    job: ClientJob,
    local: LocalTraining,
    listeners: StepListeners,
) -> Tensor:
    """Add the gradient of a batch to that of the step, and return the batch's part of the step's loss."""
    flat_module.require_gradient(loss)
    flat_module.logs.add_loss(loss)
    if penalty is not None:
        loss = loss + penalty
    factor = 1.0
    if job.schedule.full_batch or job.group is not None:
        loss, factor = loss * batch.factor, batch.factor
    elif job.schedule.accumulate > 1:
        loss, factor = loss / job.schedule.accumulate, 1 / job.schedule.accumulate
    for listener in listeners.on_before_backward:
        listener(loss)
    if flat_module.backward(loss, factor):
        local.learning_rate = flat_module.optimizer.learning_rate
    for listener in listeners.on_after_backward:
        listener()
    if listeners.on_after_backward and flat_module.gradient.adopt():
        local.learning_rate = flat_module.optimizer.learning_rate
    return loss
