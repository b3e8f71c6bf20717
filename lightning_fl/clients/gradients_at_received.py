"""Gradients at the received model for rules that read them: on all samples of a client, or on the batches of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from lightning_fl.clients.client_job import Batch, ClientJob
from lightning_fl.clients.flat_module import FlatModule


def full_gradient(flat_module: FlatModule, batches: Iterable[Any], sizes: list[int], resident: bool) -> Tensor:
    """Return the mean over samples of the training loss's gradient at the module's parameters, plus any weight decay.

    Buffers change as in training. Values that the module logs are dropped.

    Args:
        flat_module: module that is set up to gather gradients; its parameters stay unchanged.
        batches: at least as many batches as `sizes` has entries.
        sizes: number of samples in each batch.
        resident: True if the samples are on the accelerator already.

    Returns:
        Gradient (d,).
    """
    for index, (batch, size) in enumerate(zip(batches, sizes, strict=False)):
        _backward(flat_module, flat_module.transfer(batch, resident), index, size / sum(sizes))
    return _take_gradient(flat_module)


def gradient_at_received(
    flat_module: FlatModule, job: ClientJob, of_step: Sequence[Batch], treat: Callable[[], None]
) -> Tensor:
    """Return the gradient of a step's batches at the received model, plus any weight decay.

    The flat module and its gradient are restored afterwards. Values that the module logs are dropped.

    Args:
        flat_module: module that is set up to gather gradients.
        job: job of the client.
        of_step: batches of the step.
        treat: masks and clips the gradient.

    Returns:
        Gradient (d,).
    """
    gradient, owned = flat_module.gradient.clone(), {n: leaf.grad for n, leaf in flat_module.personal_leaves.items()}
    flat_module.zero_gradient()
    with flat_module.other_model(job.received["model"], job.received["buffers"], job.counters):
        for batch in of_step:
            _backward(flat_module, batch.content, batch.batch_index, batch.factor)
        treat()
        found = _take_gradient(flat_module)
    flat_module.gradient.copy_(gradient)
    for name, leaf in flat_module.personal_leaves.items():
        leaf.grad = owned[name]
    return found


def _backward(flat_module: FlatModule, batch: Any, index: int, factor: float) -> None:
    """Add a factor times the gradient of a batch's loss to the gradient of the flat module."""
    with flat_module.lending({}, _drop), flat_module.fabric.autocast():
        loss, _ = flat_module.training_step(batch, index)
    if loss is not None:
        flat_module.fabric.backward(loss * factor)
        flat_module.after_backward()


def _take_gradient(flat_module: FlatModule) -> Tensor:
    """Return the gradient with weight decay, and set that of the flat module to zero."""
    gradient = flat_module.gradient.clone()
    if flat_module.optimizer.decays:
        gradient.add_(flat_module.params * flat_module.optimizer.weight_decay)
    flat_module.zero_gradient()
    return gradient


def _drop(*arguments: Any, **options: Any) -> None:
    """Replace the module's `log`, and drop the values."""
