"""Treatment of the gradient of a step before the rule reads it: the pruning mask, then gradient clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.flat_module import FlatModule
from lightning_fl.clients.stack import Stack


def gradient_treatment(flat_module: FlatModule, job: ClientJob) -> Callable[[], None]:
    """Return a function that masks and clips the gradients of the flat module in place, as Lightning clips."""
    unpruned, clip_value, clip_algorithm = job.setting.unpruned, job.schedule.clip_value, job.schedule.clip_algorithm
    masked: list[tuple[Tensor, Tensor]] = []
    if unpruned is not None:
        factors = flat_module.layout.views(unpruned.factors).values()
        masked = list(zip(flat_module.parameters, factors, strict=True))

    def treat() -> None:
        if unpruned is not None and flat_module.reads_gradient:
            flat_module.gradient.mul_(unpruned.factors)
        else:
            for parameter, factors in masked:
                if parameter.grad is not None:
                    parameter.grad.mul_(factors)
        if clip_value:
            trained = [*flat_module.parameters, *flat_module.personal_leaves.values()]
            if clip_algorithm == "value":
                nn.utils.clip_grad_value_(trained, clip_value)
            else:
                nn.utils.clip_grad_norm_(trained, clip_value)

    return treat


def treat_stack(stack: Stack, job: ClientJob) -> None:
    """Mask the gradients of a stack in place, and clip those of each client."""
    if job.setting.unpruned is not None:
        stack.gradient.mul_(job.setting.unpruned.factors)
    if job.schedule.clip_value:
        personal = [leaf.grad for leaf in stack.personal_leaves.values() if leaf.grad is not None]
        _clip_rows([stack.gradient, *personal], job.schedule.clip_value, job.schedule.clip_algorithm)


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
