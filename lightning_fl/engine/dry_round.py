"""Messages of a dry round, in which one client alone takes the turns of the exchange, and trains nothing.

Random numbers stand for its change of the model. The size of most messages does not depend on their numbers. Where it does, as
with range codes, it is about that of such numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from lightning_fl.clients.client_job import ClientJob
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.slots import Aggregator, LocalTraining, Message, Result, Upload, compressible, message_of


def results_without_training(flat_module: FlatModule, job: ClientJob, clients: Sequence[int]) -> Iterator[Result]:
    """Yield a result of the form of each client's, without training."""
    for client in clients:
        yield Result(client, _message(flat_module, job), 1.0, {}, {}, {}, num_steps=1)


def mean_alone(aggregator: Aggregator, count: int, uploads: Iterable[Upload]) -> tuple[Message, int]:
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
    message = message_of(job.rule, local)
    if flat_module.buffer_layout.names:
        message["buffers"] = torch.zeros_like(job.received["buffers"])
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(entry.shape, generator=generator).to(entry) if compressible(name) else entry
        for name, entry in message.items()
    }
