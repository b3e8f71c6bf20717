"""Stacked runner: trains several clients at once, which is faster if one small client does not fill the accelerator.

The clients of a stack make their steps together. Clients with more steps continue when the others have finished, and batches of
different sizes form separate groups. Nothing is padded: every client trains on the same batches as it would alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import ceil
from typing import Any, NoReturn

import torch
from lightning.pytorch.utilities.memory import garbage_collection_cuda
from torch import Tensor

from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.gradients import treat_stack
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.clients.local_training import change_of, move_schedules, rule_step, start_parts
from lightning_fl.clients.serial import serial
from lightning_fl.clients.shown_models import DOWNLOAD, UPLOAD, tell_download
from lightning_fl.clients.stack import Stack
from lightning_fl.clients.stack_batches import Group, Member, StackBatches, stack_batches, whole_pass
from lightning_fl.data import FederatedDataModule
from lightning_fl.errors import UserError, add_note, noting
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.local_progress import LocalProgress
from lightning_fl.flat_module.module_logs import LogCollector, RowLogs
from lightning_fl.flat_module.plain_attributes import RestorableAttributes
from lightning_fl.slots import Gradients, LocalTraining, Result, TrainedModel, message_of, phased
from lightning_fl.state.run_state import CLIENT

log = logging.getLogger("lightning.pytorch")


@dataclass
class Stacked:
    """Runner that trains clients in stacks, those with the most steps first.

    The arguments and the results are those of `serial`. The module's own random draws, such as dropout, come from one stream for
    the whole stack, so they differ from those of a client that trains alone.

    Attributes:
        clients_at_once: most clients in a stack; halved for the rest of the run when a stack needs more memory than there is.
            If steps are compiled, every stack but the last has so many, and the last is compiled if it has, too.
        may_end: True to train clients one after the other from the first stack on that the module turns out not to allow, in a
            later step than that of the trial; such a stack is trained again.
        has_ended: True once that has happened.
    """

    clients_at_once: int
    may_end: bool = False
    has_ended: bool = False

    def __call__(
        self, flat_module: FlatModule, job: ClientJob, clients: Sequence[int], data: FederatedDataModule
    ) -> Iterator[Result]:
        """Train the clients, and yield their results stack by stack."""
        if self.has_ended:
            yield from serial(flat_module, job, clients, data)
            return
        run, schedule, left = job.run, job.schedule, [*clients]
        compiles = flat_module.compiled is not None and not flat_module.compiled.why_not
        compiled_sizes = self.compiled_sizes(schedule, data) if compiles else []
        batches = {k: schedule.pass_batches(int(data.client_sizes[k])) for k in clients}
        num_steps = {client: schedule.steps_done(batches[client], run, client) for client in clients}

        def together(client: int) -> int:
            # Phases, or a learning rate that changes within the round, depend on the batches in a pass, so a stack needs equal
            # ones.
            moves = flat_module.optimizer.schedules.moves_within_round or phased(job.personal) is not None
            return batches[client] if moves else 0

        def length(client: int) -> tuple[int, int, int]:
            return together(client), num_steps[client], batches[client]

        def begin(client: int, is_first: bool) -> Member:
            state = run.client_state(client, job.rule, job.received["model"])
            owned = {name: state.get(name, entry) for name, entry in run.personal.items()}
            self._tell_download(flat_module, job, client, owned, is_first)
            seeds, resident = run.torch_seeds(CLIENT, client), data.train.resident
            return Member(client, schedule.work(data.client(client), seeds, resident, (run, client)), state)

        for _, group in groupby(sorted(clients, key=length, reverse=True), key=together):
            waiting = list(group)
            members: list[Member] = []  # of the next stack, as far as they have begun
            size, is_halved = self.clients_at_once if compiles else even_size(len(waiting), self.clients_at_once), False
            while waiting:
                try:
                    for client in waiting[len(members) : size]:
                        members.append(begin(client, is_first=not members))
                    is_whole = len(members[:size]) == self.clients_at_once
                    results, why = self._train(flat_module, job, members[:size], compiled_sizes if is_whole else []), ""
                except _UnfitError as error:
                    results, why = None, str(error)
                if why:  # outside the handler, where the error no longer holds the tensors of the stack
                    self._end(flat_module, why)
                    yield from serial(flat_module, job, left, data)
                    return
                if results is None:
                    self.clients_at_once, is_halved = ceil(min(size, len(members)) / 2), True
                    size = even_size(len(waiting), self.clients_at_once)
                    continue
                if is_halved:
                    is_halved = False
                    log.warning(
                        f"At most {self.clients_at_once} clients train at once from now on, because memory does not suffice "
                        f"for more; trainer.clients_at_once {self.clients_at_once} gives the same results from the start."
                    )
                yield from results
                left = [client for client in left if client not in waiting[:size]]
                waiting, members = waiting[size:], members[size:]
        flat_module.progress = None

    @staticmethod
    def compiled_sizes(schedule: LocalSchedule, data: FederatedDataModule) -> list[int]:
        """Return the samples of the minibatches that clients make together often enough to compile their steps.

        These are full minibatches; and if all clients have equally many samples, whatever minibatches they have. Others are so
        many that compiling them would take longer than it saves.
        """
        if not has_equal_clients(data):
            return [schedule.batch_size]
        size = int(data.client_sizes.max())
        return [min(schedule.batch_size, size), size % schedule.batch_size]

    def _train(
        self, flat_module: FlatModule, job: ClientJob, members: Sequence[Member], compiled_sizes: Collection[int]
    ) -> list[Result] | None:
        """Train one stack; return None, with its memory free again, if several clients need more than there is.

        Raises:
            _UnfitError: the module does not allow stacks after all, and other runners may train.
        """
        names = ", ".join(str(member.client) for member in members)
        attributes = RestorableAttributes(flat_module.module)
        try:
            with noting(lambda: f"Clients {names} were training at once in round {job.run.round}."):
                results = train_stack(flat_module, job, members, compiled_sizes=compiled_sizes)
        except torch.OutOfMemoryError:
            if len(members) == 1:
                raise
        except Exception as error:
            if self.may_end:
                attributes.restore()
                failed = f"a step of several clients failed ({first_sentence(error)})"
                raise _UnfitError(str(error).rstrip(".") if isinstance(error, UserError) else failed) from error
            if not isinstance(error, UserError):
                add_note(
                    error, "trainer.runner serial trains one client after the other, without the limits of a stack."
                )
            raise
        else:
            self._check(flat_module, attributes, members[0].work.seeds[1])
            return results
        # Outside the handler, where the error no longer holds the tensors of the stack.
        _free(flat_module)
        return None

    def _tell_download(
        self, flat_module: FlatModule, job: ClientJob, client: int, owned: Mapping[str, Tensor], is_first: bool
    ) -> None:
        """Call the hooks of a client's download, and check that they leave the module as they did for the stack's first."""
        if is_first or not flat_module.hooks.reads_module(DOWNLOAD):
            tell_download(flat_module, job, client, owned)
            return
        attributes, groups = RestorableAttributes(flat_module.module), flat_module.optimizer.optimizer.param_groups
        before = [dict(group) for group in groups]
        tell_download(flat_module, job, client, owned)
        changed = [f"{name!r} of the module" for name in attributes.differing()]
        changed += ["the optimiser's settings"] if groups != before else []
        if changed:
            self._refuse(
                flat_module, f"{DOWNLOAD} changes {' and '.join(changed)}, which clients of a stack would share"
            )

    def _check(self, flat_module: FlatModule, attributes: RestorableAttributes, seed: int) -> None:
        """Check that the clients of a stack, which began with a seed, have shared neither attributes nor random numbers."""
        if changed := attributes.restore():
            self._refuse(flat_module, shared_attributes(changed))
        if self.may_end and flat_module.generators.have_drawn(seed):
            name = type(flat_module.module).__name__
            raise _UnfitError(f"{name} draws random numbers, which would depend on the stack")

    def _refuse(self, flat_module: FlatModule, why: str) -> NoReturn:
        """End the stack: its clients train one after the other if other runners may, otherwise the run ends with the reason."""
        if self.may_end:
            raise _UnfitError(why)
        raise UserError(
            f"runner 'stacked' cannot train {type(flat_module.module).__name__}: {why}. Use runner 'auto' or 'serial'."
        )

    def _end(self, flat_module: FlatModule, why: str) -> None:
        """Train clients one after the other from now on."""
        self.has_ended = True
        _free(flat_module)
        flat_module.progress = None
        log.warning(f"Clients train one after the other from now on, because {why}.")


class _UnfitError(Exception):
    """A stack cannot be what its clients would be one after the other; the text says why."""


def _free(flat_module: FlatModule) -> None:
    """Free the memory of a stack that was given up, and bind the optimiser to the module again."""
    flat_module.optimizer.end_client()
    flat_module.bind_optimizer()
    flat_module.optimizer.start_client()
    garbage_collection_cuda()


def shared_attributes(names: Sequence[str]) -> str:
    """Return why a training step that changes these attributes fits no stack."""
    return (
        f"training_step changes {' and '.join(map(repr, names))} of the module, which clients of a stack would share (use "
        "self.log(name, value), or a buffer, instead)"
    )


def first_sentence(error: Exception) -> str:
    """Return an error's class and the first sentence of its message."""
    return f"{type(error).__name__}: {str(error).split('. ')[0].splitlines()[0] if str(error) else ''}"


def even_size(num_clients: int, most: int) -> int:
    """Return the clients of each stack but the last, which is as large or smaller, if a stack has at most so many."""
    return ceil(num_clients / ceil(num_clients / most)) if num_clients else most


def has_equal_clients(data: FederatedDataModule) -> bool:
    """True if all clients with samples have equally many."""
    sizes = data.client_sizes[data.client_sizes > 0]
    return len(sizes) > 0 and bool((sizes == sizes[0]).all())


def train_stack(
    flat_module: FlatModule,
    job: ClientJob,
    members: Sequence[Member],
    notifies_callbacks: bool = True,
    compiled_sizes: Collection[int] = (),
    differs: bool = False,
) -> list[Result]:
    """Train the clients of one stack.

    Args:
        flat_module: holds the module.
        job: job of each client.
        members: clients of the stack, in descending order of their numbers of steps.
        notifies_callbacks: True to call Lightning's own callbacks for every batch.
        compiled_sizes: samples of a minibatch with which a step of all clients is computed by a compiled graph.
        differs: True if other clients have other numbers of batches, although these have not.

    Returns:
        Results in the order of `members`.
    """
    optimizer, schedule, seed = flat_module.optimizer, job.schedule, members[0].work.seeds[1]
    stack, local = _start(flat_module, job, members, compiled_sizes)
    progress = flat_module.progress
    assert progress is not None
    differs = differs or len({member.work.batches_per_epoch for member in members}) > 1
    logs = RowLogs(flat_module.logs)
    batches = stack_batches(flat_module, members, schedule)
    reads_at_received = Gradients.MINIBATCH_AT_RECEIVED in job.rule.reads
    reads_at_point = Gradients.MINIBATCH_AT_POINT in job.rule.reads
    twin = stack.restarted(job) if reads_at_received or reads_at_point else None
    repeat_draws: Callable[[], None] = flat_module.generators.keep() if reads_at_point else lambda: None
    finished: list[Result] = []

    def at_received() -> Tensor:
        assert twin is not None
        flat_module.generators.seed(seed + local.num_steps)
        return _gradients_at_received(flat_module, job, twin, batches)

    def at_point() -> Tensor:
        assert twin is not None
        repeat_draws()
        twin.move_to(job.rule.point(local), stack)
        return _gradients_of(flat_module, job, twin, batches)

    while True:
        num_left = sum(member.work.num_steps > local.num_steps for member in members)
        if num_left < len(stack.params):
            ended = members[num_left : len(stack.params)]
            finished = _finish(flat_module, job, local, stack, num_left, ended) + finished
            stack, local = _narrow(flat_module, stack, local, num_left)
            twin = None if twin is None else twin.first(num_left)
        if not num_left:
            break
        stack.zero_gradient()
        batches.advance(num_left)
        if reads_at_received:
            flat_module.generators.seed(seed + local.num_steps)
        if reads_at_point:
            repeat_draws = flat_module.generators.keep()
        progress.differs = differs
        for names in _backward(stack, batches.groups(keep=twin is not None), logs):
            optimizer.activate(names)
            local.learning_rate = optimizer.learning_rate
        progress.differs = False
        progress.check_alike()  # the module may have caught the error
        stack.require_gradients()
        rule_step(
            local,
            job,
            flat_module,
            partial(treat_stack, stack, job, optimizer.stepped),
            at_received if reads_at_received else None,
            at_point if reads_at_point else None,
        )
        move_schedules(local, flat_module, batches.num_batches)  # clients of a stack share a moving schedule
        if notifies_callbacks:
            _notify_stock_callbacks(flat_module, batches)
    optimizer.end_client()
    in_a_pass = [max(1, member.work.batches_per_epoch * schedule.repeat) for member in members]
    last = logs.last_losses(in_a_pass) if schedule.reports_last_loss else [None] * len(members)
    for result, sums, loss in zip(finished, logs.take_rows(len(members)), last, strict=True):
        result.logs, result.last_loss = sums, loss
    return finished


def _start(
    flat_module: FlatModule, job: ClientJob, members: Sequence[Member], compiled_sizes: Collection[int]
) -> tuple[Stack, LocalTraining]:
    """Give every client the received model and begin the local training: optimiser, full gradients, `Rule.start`."""
    optimizer, schedule = flat_module.optimizer, job.schedule
    state = {name: torch.stack([member.state[name] for member in members]) for name in members[0].state}
    owned = {name: state.pop(name) for name in job.run.personal}
    stack = Stack.of(flat_module, job, owned, len(members), compiled_sizes)
    flat_module.personal_optimizer.bind(stack.personal_leaves)
    optimizer.bind(stack.params, stack.gradient)
    optimizer.start_client()
    local = LocalTraining(job.context, job.received, stack.params, stack.gradient, optimizer.step, state)
    batches = [member.work.batches_per_epoch for member in members]
    most_in_pass = max(batches)
    flat_module.progress = LocalProgress(local, most_in_pass * schedule.repeat, schedule.num_steps(most_in_pass))
    read = [schedule.num_samples(len(member.work.selection), member.work.num_steps) for member in members]
    local.num_samples = _on_device(read, stack.params, stack.params.dtype).unsqueeze(1)
    steps_in_pass = [[ceil(count / max(1, schedule.step_batches(count)))] for count in batches]
    local.steps_in_pass = _on_device(steps_in_pass, stack.params).clamp(min=1) * schedule.repeat
    seed = members[0].work.seeds[1]
    if Gradients.FULL_AT_RECEIVED in job.rule.reads:
        flat_module.generators.seed(seed)
        restore = stack.keep_owned_buffers()
        local.full_gradient = _full_gradients(flat_module, stack, members, schedule)
        if job.context.unpruned is not None:
            local.full_gradient.mul_(job.context.unpruned.factors)
        stack.restart(job)
        restore()
    local.learning_rate = optimizer.learning_rate
    start_parts(job, local)
    flat_module.generators.seed(seed)
    return stack, local


def _narrow(
    flat_module: FlatModule, stack: Stack, local: LocalTraining, num_clients: int
) -> tuple[Stack, LocalTraining]:
    """Return the first clients of a stack and of its local training, and let the optimisers step only these."""
    stack, local = stack.first(num_clients), _rows(local, slice(num_clients))
    assert flat_module.progress is not None
    flat_module.progress.local = local
    flat_module.optimizer.narrow(num_clients)
    flat_module.personal_optimizer.narrow(stack.personal_leaves, num_clients)
    return stack, local


def _gradients_at_received(flat_module: FlatModule, job: ClientJob, twin: Stack, batches: StackBatches) -> Tensor:
    """Return the result of `gradient_at_received` for each client (n, d)."""
    twin.restart(job)
    _gradients_of(flat_module, job, twin, batches)
    flat_module.add_decay(twin.gradient, twin.params, ())
    return twin.gradient


def _gradients_of(flat_module: FlatModule, job: ClientJob, twin: Stack, batches: StackBatches) -> Tensor:
    """Return the gradients (n, d) of the present step's batches at a twin's parameters; logged values are dropped."""
    twin.zero_gradient()
    for _ in _backward(twin, batches.groups(), RowLogs(LogCollector())):
        pass
    treat_stack(twin, job, flat_module.optimizer.stepped)
    return twin.gradient


def _full_gradients(
    flat_module: FlatModule, stack: Stack, members: Sequence[Member], schedule: LocalSchedule
) -> Tensor:
    """Return the result of `full_gradient` for each client (n, d)."""
    groups = whole_pass(flat_module, members, schedule)
    for names in _backward(stack, groups, RowLogs(flat_module.logs)):
        flat_module.optimizer.activate(names)
    flat_module.add_decay(stack.gradient, stack.params, ())
    return stack.gradient.clone()


def _backward(stack: Stack, groups: Iterable[Group], logs: RowLogs) -> Iterator[list[str]]:
    """Add up the gradients of the batches of one step; yields names of parameters that get their first gradient."""
    for group in groups:
        logs.rows, logs.batch_size = group.rows, group.size
        factors: float | Tensor = group.factors[0]
        if any(factor != factors for factor in group.factors):
            factors = _on_device(group.factors, stack.params, stack.params.dtype)
        if names := stack.backward(group, factors, logs):
            yield names


def _on_device(numbers: Sequence[Any], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers on the device of a tensor, for which the host does not wait."""
    return torch.tensor(numbers, dtype=dtype).to(like.device, non_blocking=True)


def _rows(local: LocalTraining, rows: slice) -> LocalTraining:
    """Return some clients of a stacked local training; tensors with one axis are shared by all clients."""

    def selected(tensor: Tensor) -> Tensor:
        return tensor[rows] if tensor.dim() > 1 else tensor

    return replace(
        local,
        params=selected(local.params),
        gradient=selected(local.gradient),
        state={name: entry[rows] for name, entry in local.state.items()},
        memory={name: selected(entry) for name, entry in local.memory.items()},
        full_gradient=selected(local.full_gradient),
        gradient_at_received=selected(local.gradient_at_received),
        gradient_at_point=selected(local.gradient_at_point),
        num_samples=selected(torch.as_tensor(local.num_samples)),
        steps_in_pass=selected(local.steps_in_pass) if isinstance(local.steps_in_pass, Tensor) else local.steps_in_pass,
    )


def _finish(
    flat_module: FlatModule, job: ClientJob, local: LocalTraining, stack: Stack, start: int, members: Sequence[Member]
) -> list[Result]:
    """Return the results of the clients from row `start` on, which are these members, without what they have logged."""
    part = _rows(local, slice(start, None))
    # A copy, because a rule may compute its message in place.
    params = part.params.clone() if flat_module.hooks.reads_module(UPLOAD) else None
    part.buffers = stack.buffers[start:]
    message = message_of(job.rule, part)
    if flat_module.buffer_layout.names:
        message["buffers"] = change_of(stack.buffers[start:], local.received["buffers"])

    def result(row: int, member: Member) -> Result:
        owned = {name: entry[start + row].clone() for name, entry in stack.owned.items()}
        counters = {name: counter[start + row].clone() for name, counter in stack.counters.items()}
        buffers = stack.buffers[start + row]
        return Result(
            client=member.client,
            message={name: entry[row] for name, entry in message.items()},
            weight=float(len(member.work.selection)),
            state={name: entry[row].clone() for name, entry in part.state.items()} | owned,
            counters=counters,
            logs={},
            num_steps=part.num_steps,
            owned=owned,
            trained=None if params is None else TrainedModel(params[row], buffers.clone(), counters, owned),
        )

    return [result(row, member) for row, member in enumerate(members)]


def _notify_stock_callbacks(flat_module: FlatModule, batches: StackBatches) -> None:
    """Call Lightning's own callbacks, such as progress bars, for every batch."""
    starts, ends = (
        flat_module.hooks.listeners("on_train_batch_start"),
        flat_module.hooks.listeners("on_train_batch_end"),
    )
    for content, batch_index in batches.contents() if starts or ends else ():
        for listener in starts:
            listener(content, batch_index)
        for listener in ends:
            listener(None, content, batch_index)
