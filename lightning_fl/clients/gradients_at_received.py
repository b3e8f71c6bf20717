"""Gradients at the received model, which some rules read: on all of a client's samples, or on the batches of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from lightning_fl.clients.client_job import Batch, ClientJob
from lightning_fl.clients.flat_module import FlatModule


def full_gradient(flat_module: FlatModule, batches: Iterable[Any], sizes: list[int], resident: bool) -> Tensor:
    """Mean over samples of the gradient of the training loss at the module's parameters, with weight decay if there is any.

    Buffers change as in training, and what the module logs is dropped.

    Args:
        flat_module: its parameters are not changed; its rule must read gradients.
        batches: at least as many as `sizes`.
        sizes: number of samples of each batch.
        resident: True if the samples lie on the accelerator already.

    Returns:
        (d,).
    """
    for index, (batch, size) in enumerate(zip(batches, sizes, strict=False)):
        batch = flat_module.fabric.strategy.precision.convert_input(flat_module.transfer(batch, resident))
        _backward(flat_module, batch, index, size / sum(sizes))
    return _take_gradient(flat_module)


def gradient_at_received(
    flat_module: FlatModule, job: ClientJob, of_step: Sequence[Batch], treat: Callable[[], None]
) -> Tensor:
    """Gradient of a step's batches at the received model, with weight decay if there is any.

    The flat module is left as it was, its gradient included; what the module logs is dropped.

    Args:
        flat_module: its rule must read gradients.
        job: what the client does.
        of_step: batches of the step.
        treat: masks and clips the gradient.

    Returns:
        (d,).
    """
    model = flat_module.params.clone(), flat_module.read_buffers().clone(), flat_module.read_counters()
    gradient, owned = flat_module.gradient.clone(), {n: leaf.grad for n, leaf in flat_module.personal_leaves.items()}
    flat_module.zero_gradient()
    flat_module.load(job.received["model"], job.received["buffers"], job.counters)
    for batch in of_step:
        _backward(flat_module, batch.content, batch.batch_index, batch.factor)
    treat()
    found = _take_gradient(flat_module)
    flat_module.load(*model)
    flat_module.gradient.copy_(gradient)
    for name, leaf in flat_module.personal_leaves.items():
        leaf.grad = owned[name]
    return found


def _backward(flat_module: FlatModule, batch: Any, index: int, factor: float) -> None:
    """Add the gradient of a batch's loss, times a factor, to that of the flat module."""
    with flat_module.lending({}, _drop), flat_module.fabric.strategy.precision.forward_context():
        loss, _ = flat_module.training_step(batch, index)
    if loss is not None:
        flat_module.fabric.backward(loss * factor)
        flat_module.after_backward()


def _take_gradient(flat_module: FlatModule) -> Tensor:
    """Return the gradient with weight decay, and leave the flat module without one."""
    gradient = flat_module.gradient.clone()
    if flat_module.optimizer.decays:
        gradient.add_(flat_module.params * flat_module.optimizer.weight_decay)
    flat_module.zero_gradient()
    return gradient


def _drop(*arguments: Any, **options: Any) -> None:
    """Stand in for the module's `log`."""
