"""Bits that a client will send and receive after a broadcast, known before anybody trains.

A client that trains nothing takes the turns of the exchange alone, with normal random numbers for its change of the model. The
size of most messages does not depend on their numbers. Where it does, as with range codes, it is about that of such numbers. In
an exchange that chooses parts of the model, a client alone sends all that it might have to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_fl.algorithms import Algorithm
from lightning_fl.clients.client_job import ClientJob
from lightning_fl.engine.roles import Roles
from lightning_fl.features.secure_sums import SecureSum
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.link.link import Link
from lightning_fl.processes import gather_objects
from lightning_fl.slots import Aggregator, LocalTraining, Message, Result, RoundContext, Upload, compressible
from lightning_fl.state.outcome import added_by_client
from lightning_fl.state.run_state import EXCHANGE, Run


def planned_bits(
    flat_module: FlatModule,
    method: Algorithm,
    run: Run,
    context: RoundContext,
    selected: Sequence[int],
    broadcast: Callable[[Link], ClientJob],
    around: Callable[[Roles], Roles] = lambda roles: roles,
    secure_sum: SecureSum | None = None,
) -> dict[int, tuple[int, int]]:
    """Return the bits that each selected client sends and those that it receives; all processes must call it.

    The arguments are those of `planned_link`.
    """
    link = planned_link(flat_module, method, run, context, selected, broadcast, around, secure_sum)
    later = [link.bits_by_client[client] for client in selected[:1]]  # the same for all
    bits = added_by_client(link.broadcast_bits_by_client, dict.fromkeys(selected, *later))
    # Processes on accelerators of different kinds may find other sizes, where these depend on numbers.
    return dict(gather_objects(flat_module.fabric, bits)[0])


def planned_link(
    flat_module: FlatModule,
    method: Algorithm,
    run: Run,
    context: RoundContext,
    selected: Sequence[int],
    broadcast: Callable[[Link], ClientJob],
    around: Callable[[Roles], Roles] = lambda roles: roles,
    secure_sum: SecureSum | None = None,
) -> Link:
    """Return a link after a round in which the first of the selected clients has trained nothing.

    Args:
        flat_module: module that clients train.
        method: method of the run.
        run: the run; not changed.
        context: facts about the run in the present round.
        selected: clients that receive the broadcast.
        broadcast: sends the broadcast of the round through a link, and returns the job of the clients.
        around: puts the features of the run around a training; nobody attacks in it.
        secure_sum: sum over the selected clients, if the server sees no more.
    """

    def train(job: ClientJob, clients: Sequence[int]) -> Iterator[Result]:
        for client in clients:
            yield Result(client, _message(flat_module, job), 1.0, {}, {}, {}, num_steps=1)

    link = Link(
        context,
        method.uplink,
        method.downlink,
        server_memory=run.server_memory,
        random=partial(run.random, EXCHANGE),
        mean=partial(_mean, method.aggregator, len(selected)),
        catch_up=run.ledger.catch_up,
        timed=selected,
        secure_sum=secure_sum,
        is_unchanged=run.is_unchanged,
    )
    job, training = broadcast(link), around(Roles(train)).train
    job, clients = method.exchange.before_training(job, selected[:1], training, link)
    for _ in method.exchange.collect(training(job, clients), link):
        pass
    return link


def _mean(aggregator: Aggregator, count: int, uploads: Iterable[Upload]) -> tuple[Message, int]:
    """Return the mean of uploads of this process alone, {} if there are none, and the number of clients for which they stand."""
    accumulator: dict[str, Any] = {}
    for upload in uploads:
        aggregator.add(accumulator, upload)
    return aggregator.finish(accumulator) if accumulator else {}, count


def _message(flat_module: FlatModule, job: ClientJob) -> Message:
    """Return a message of the form of a client's."""
    model, rate = job.received["model"], flat_module.optimizer.learning_rate
    zeros = torch.zeros_like(model)
    local = LocalTraining(
        job.context,
        job.received,
        model.clone(),
        zeros.clone(),
        lambda: None,
        job.rule.init(model),
        learning_rate=rate,
        sum_learning_rate=rate,
        num_steps=1,
        full_gradient=zeros.clone(),
        gradient_at_received=zeros.clone(),
        num_samples=1.0,
    )
    job.rule.start(local)
    message = job.rule.finish(local)
    if flat_module.buffer_layout.names:
        message["buffers"] = torch.zeros_like(job.received["buffers"])
    generator = torch.Generator().manual_seed(0)
    return {name: _random(entry, generator) if compressible(name) else entry for name, entry in message.items()}


def _random(entry: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(entry.shape, generator=generator).to(entry)
