"""Gradients of a client: masked and clipped for a step, or taken at another model.

Rules may read gradients at the received model, on all of a client's samples or on a step's batches. They may also read
the gradient of a step's batches at a point of their choice. A client's own model may read them at a point between
itself and the model that is uploaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fl.checks.evaluation_mode import evaluating, keeping_attributes
from lightning_fl.clients.client_job import Batch, ClientJob
from lightning_fl.clients.device_group import DeviceGroup
from lightning_fl.clients.stack import Stack
from lightning_fl.flat_module.flat_module import FlatModule


def gradient_treatment(flat_module: FlatModule, job: ClientJob) -> Callable[[], None]:
    """Return a function that masks and clips the gradients of the flat module in place, as Lightning clips."""
    unpruned, clip_value, clip_algorithm = job.context.unpruned, job.schedule.clip_value, job.schedule.clip_algorithm
    masked: list[tuple[Tensor, Tensor]] = []
    if unpruned is not None:
        factors = flat_module.layout.views(unpruned.factors).values()
        masked = list(zip(flat_module.parameters, factors, strict=True))

    def treat() -> None:
        if unpruned is not None and flat_module.reads_gradient:
            flat_module.gradient.vector.mul_(unpruned.factors)
        else:
            for parameter, factors in masked:
                if parameter.grad is not None:
                    parameter.grad.mul_(factors)
        if clip_value:
            stepped = flat_module.optimizer.names
            shared = zip(flat_module.layout.names, flat_module.parameters, strict=True)
            trained = [p for name, p in shared if name in stepped] + [*flat_module.personal.leaves.values()]
            if clip_algorithm == "value":
                nn.utils.clip_grad_value_(trained, clip_value)
            else:
                nn.utils.clip_grad_norm_(trained, clip_value)

    return treat


def treat_stack(stack: Stack, job: ClientJob, stepped: Sequence[slice]) -> None:
    """Mask the gradients of a stack in place, and clip each client's, in the parts that the optimiser steps."""
    if job.context.unpruned is not None:
        stack.gradient.mul_(job.context.unpruned.factors)
    if job.schedule.clip_value:
        personal = [leaf.grad for leaf in stack.personal_leaves.values() if leaf.grad is not None]
        shared = [stack.gradient[:, part] for part in stepped]
        _clip_rows([*shared, *personal], job.schedule.clip_value, job.schedule.clip_algorithm)


def _clip_rows(gradients: Sequence[Tensor], value: float, algorithm: str) -> None:
    """Clip each client's row of all gradients (n, ...), as torch's `clip_grad_norm_` and `clip_grad_value_` do."""
    if algorithm == "value":
        for gradient in gradients:
            gradient.clamp_(-value, value)
        return
    lengths = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients])
    factors = (value / (torch.linalg.vector_norm(lengths, dim=0) + 1e-6)).clamp(max=1)
    for gradient in gradients:
        gradient.mul_(factors.view(-1, *[1] * (gradient.dim() - 1)))


def full_gradient(
    flat_module: FlatModule, batches: Iterable[Any], sizes: list[int], resident: bool, group: DeviceGroup | None = None
) -> Tensor:
    """Return the mean over samples of the training loss's gradient at the module's parameters, plus any weight decay.

    Buffers change as in training. Values that the module logs are dropped, and its torchmetrics objects do not change.

    Args:
        flat_module: module that is set up to gather gradients; its parameters stay unchanged.
        batches: at least as many batches as `sizes` has entries; in a group of processes, this one's shares.
        sizes: number of samples in each whole batch.
        resident: True if the samples are on the accelerator already.
        group: processes that share the client; None if this one reads all.

    Returns:
        Gradient (d,).
    """
    flat_module.gradient.zero()
    with keeping_attributes(flat_module.own_parts):
        for index, (batch, size) in enumerate(zip(batches, sizes, strict=False)):
            mine = size if group is None else group.num_rows(size)
            if mine:
                _backward(flat_module, flat_module.transfer(batch, resident), index, mine / sum(sizes))
    if group is not None:
        group.sum_gradient(flat_module)
    return _take_gradient(flat_module)


def full_loss(
    flat_module: FlatModule, batches: Iterable[Any], sizes: list[int], resident: bool, group: DeviceGroup | None = None
) -> Tensor:
    """Return the mean over samples of the training loss at the module's parameters, in evaluation mode; () in float64.

    Restores the module. Values that it logs are dropped. The arguments are those of `full_gradient`.
    """
    module, total = flat_module.module, torch.zeros((), dtype=torch.float64, device=flat_module.fabric.device)
    with evaluating(module), keeping_attributes(list(module.modules())), torch.no_grad():
        for index, (batch, size) in enumerate(zip(batches, sizes, strict=False)):
            mine = size if group is None else group.num_rows(size)
            if mine:
                with flat_module.dropping_logs(), flat_module.fabric.autocast():
                    loss, _ = flat_module.training_step(flat_module.transfer(batch, resident), index)
                if loss is not None:
                    total += loss.double() * (mine / sum(sizes))
    return total if group is None else total.new_tensor(sum(group.gather(float(total))))


def gradient_at(
    flat_module: FlatModule,
    model: tuple[Tensor, Tensor, Mapping[str, Tensor]],
    step_batches: Sequence[Batch],
    treat: Callable[[], None],
    group: DeviceGroup | None,
    decays: bool = True,
) -> Tensor:
    """Return the gradient of a step's batches at another model, plus any weight decay if it `decays`.

    Restores the flat module, its gradient and its torchmetrics objects. Values that the module logs are dropped, and the
    client's personal values stay as they are.

    Args:
        flat_module: module that is set up to gather gradients.
        model: parameters (d,), float buffers (d_b,) and counters of the other model.
        step_batches: batches of the step.
        treat: masks and clips the gradient.
        group: processes that share the client; None if this one reads all.
        decays: True to add weight decay.

    Returns:
        Gradient (d,).
    """
    with flat_module.gradient.kept(), keeping_attributes(flat_module.own_parts), flat_module.other_model(*model):
        return gradient_here(flat_module, step_batches, treat, group, decays)


def gradient_here(
    flat_module: FlatModule,
    step_batches: Sequence[Batch],
    treat: Callable[[], None],
    group: DeviceGroup | None,
    decays: bool = True,
) -> Tensor:
    """Return the gradient (d,) of a step's batches at the module's parameters, plus any weight decay if it `decays`.

    Buffers change as in training. Values that the module logs are dropped.
    """
    for batch in step_batches:
        if batch.size:
            _backward(flat_module, batch.copied().content, batch.batch_index, batch.factor)
    if group is not None:
        group.sum_gradient(flat_module)
    treat()
    return _take_gradient(flat_module, decays)


def _backward(flat_module: FlatModule, batch: Any, index: int, factor: float) -> None:
    """Add a factor times the gradient of a batch's loss to the gradient of the flat module."""
    with flat_module.dropping_logs(), flat_module.fabric.autocast():
        loss, _ = flat_module.loss_of(batch, index)
    if loss is not None:
        flat_module.require_gradient(loss)
        flat_module.backward(loss * factor, factor)


def _take_gradient(flat_module: FlatModule, decays: bool = True) -> Tensor:
    """Return the gradient, with weight decay if it `decays`, and set that of the flat module to zero."""
    flat_module.gradient.complete()
    gradient = flat_module.gradient.vector.clone()
    if decays:
        flat_module.add_decay(gradient, flat_module.params, flat_module.gradient.missing)
    flat_module.gradient.zero()
    return gradient
