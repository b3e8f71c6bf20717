"""Gradients at the model that came down, which some rules read: on all of a client's samples, or on the batches of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_fl.clients.flat_module import FlatModule
from lightning_fl.slots import Message


def full_gradient(flat_module: FlatModule, batches: Iterable[Any], sizes: list[int], resident: bool) -> Tensor:
    """Mean over samples of the gradient of the training loss at the flat module's parameters, with weight decay if there is any.

    Buffers change as in training, and what the module logs is dropped.

    Args:
        flat_module: its parameters are not changed; its rule must read gradients.
        batches: at least as many as `sizes`.
        sizes: samples of each batch to use.
        resident: whether they lie on the accelerator.

    Returns:
        (d,).
    """
    for index, (batch, size) in enumerate(zip(batches, sizes, strict=False)):
        batch = flat_module.fabric.strategy.precision.convert_input(flat_module.transfer(batch, resident))
        _backward(flat_module, batch, index, size / sum(sizes))
    return _take(flat_module)


def gradient_at_received(
    flat_module: FlatModule,
    received: Message,
    counters: dict[str, Tensor],
    batches: Iterable[tuple[Any, int, float]],
    treat: Callable[[], None],
) -> Tensor:
    """The gradient of a step's batches at the model that came down, with weight decay if there is any.

    The flat module has everything back afterwards, its gradient included; what the module logs is dropped.

    Args:
        flat_module: its rule must read gradients.
        received: `model` (d,) and `buffers` (d_b,).
        counters: integer buffers of the server's module.
        batches: as `training_step` had them, with their indices and the factors of their losses.
        treat: does with the flat module's gradient what is done with a step's: masks and clips it.

    Returns:
        (d,).
    """
    model = flat_module.params.clone(), flat_module.read_buffers().clone(), flat_module.read_counters()
    gradient, owned = (
        flat_module.gradient.clone(),
        {name: leaf.grad for name, leaf in flat_module.personal_leaves.items()},
    )
    flat_module.zero_gradient()
    flat_module.load(received["model"], received["buffers"], counters)
    for batch, index, factor in batches:
        _backward(flat_module, batch, index, factor)
    treat()
    found = _take(flat_module)
    flat_module.load(*model)
    flat_module.gradient.copy_(gradient)
    for name, leaf in flat_module.personal_leaves.items():
        leaf.grad = owned[name]
    return found


def _backward(flat_module: FlatModule, batch: Any, index: int, factor: float) -> None:
    """Add the gradient of a batch's loss, times a factor, to the flat module's."""
    module = flat_module.module
    with flat_module.lending({}, _nothing), flat_module.fabric.strategy.precision.forward_context():
        output = module.training_step(batch, index) if flat_module.takes_index else module.training_step(batch)
    loss = output["loss"] if isinstance(output, Mapping) else output
    if loss is not None:
        flat_module.fabric.backward(loss * factor)
        flat_module.after_backward()


def _take(flat_module: FlatModule) -> Tensor:
    """The flat module's gradient with weight decay, of which it has none then."""
    gradient = flat_module.gradient.clone()
    if flat_module.optimizer.decays:
        gradient.add_(flat_module.params * flat_module.optimizer.weight_decay)
    flat_module.zero_gradient()
    return gradient


def _nothing(*arguments: Any, **options: Any) -> None:
    pass
