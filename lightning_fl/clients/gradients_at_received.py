"""Gradients at the model that came down, which some rules read: on all of a client's samples, or on the batches of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_fl.clients.flat_module import Worker
from lightning_fl.slots import Message


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
    for index, (batch, size) in enumerate(zip(batches, sizes, strict=False)):
        batch = worker.fabric.strategy.precision.convert_input(worker.transfer(batch, resident))
        _backward(worker, batch, index, size / sum(sizes))
    return _take(worker)


def gradient_at_received(
    worker: Worker,
    received: Message,
    counters: dict[str, Tensor],
    batches: Iterable[tuple[Any, int, float]],
    treat: Callable[[], None],
) -> Tensor:
    """The gradient of a step's batches at the model that came down, with weight decay if there is any.

    The worker has everything back afterwards, its gradient included; what the module logs is dropped.

    Args:
        worker: its rule must read gradients.
        received: `model` (d,) and `buffers` (d_b,).
        counters: integer buffers of the server's module.
        batches: as `training_step` had them, with their indices and the factors of their losses.
        treat: does with the worker's gradient what is done with a step's: masks and clips it.

    Returns:
        (d,).
    """
    model = worker.params.clone(), worker.read_buffers().clone(), worker.read_counters()
    gradient, owned = worker.gradient.clone(), {name: leaf.grad for name, leaf in worker.personal_leaves.items()}
    worker.zero_gradient()
    worker.load(received["model"], received["buffers"], counters)
    for batch, index, factor in batches:
        _backward(worker, batch, index, factor)
    treat()
    found = _take(worker)
    worker.load(*model)
    worker.gradient.copy_(gradient)
    for name, leaf in worker.personal_leaves.items():
        leaf.grad = owned[name]
    return found


def _backward(worker: Worker, batch: Any, index: int, factor: float) -> None:
    """Add the gradient of a batch's loss, times a factor, to the worker's."""
    module = worker.module
    with worker.lending({}, _nothing), worker.fabric.strategy.precision.forward_context():
        output = module.training_step(batch, index) if worker.takes_index else module.training_step(batch)
    loss = output["loss"] if isinstance(output, Mapping) else output
    if loss is not None:
        worker.fabric.backward(loss * factor)
        worker.after_backward()


def _take(worker: Worker) -> Tensor:
    """The worker's gradient with weight decay, of which it has none then."""
    gradient = worker.gradient.clone()
    if worker.optimizer.decays:
        gradient.add_(worker.params * worker.optimizer.weight_decay)
    worker.zero_gradient()
    return gradient


def _nothing(*arguments: Any, **options: Any) -> None:
    pass
