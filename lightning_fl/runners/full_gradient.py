"""The gradient on all of a client's samples at once, which some rules send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_fl.worker import Worker


def full_gradient(worker: Worker, batches: Iterable[Any], sizes: list[int], resident: bool) -> Tensor:
    """Mean over samples of the gradient of the training loss at the worker's parameters, with weight decay if there is any.

    Buffers change as in training, and what the module logs is dropped.

    Args:
        worker: its parameters are not changed; its rule must read gradients.
        batches: at least as many as `sizes`.
        sizes: samples of each batch to use.
        resident: whether they lie on the accelerator.

    Returns:
        (d,).
    """
    module, fabric, precision = worker.module, worker.fabric, worker.fabric.strategy.precision
    for index, (batch, size) in enumerate(zip(batches, sizes, strict=False)):
        batch = precision.convert_input(worker.transfer(batch, resident))
        worker.logs.batch_size = size
        with precision.forward_context():
            output = module.training_step(batch, index) if worker.takes_index else module.training_step(batch)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is not None:
            fabric.backward(loss * (size / sum(sizes)))
            worker.after_backward()
    gradient = worker.gradient.clone()
    if worker.optimizer.decays:
        gradient.add_(worker.params * worker.optimizer.weight_decay)
    worker.zero_gradient()
    worker.logs.take()
    return gradient
