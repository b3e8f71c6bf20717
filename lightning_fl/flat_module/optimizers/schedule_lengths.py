"""Lengths of schedulers: the steps that a schedule is made for, and the steps after which it refuses another."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, OneCycleLR, SequentialLR

LENGTHS = ("total_steps", "T_max", "total_iters", "total_size", "T_0", "step_size", "anneal_epochs")
"""Attributes in which schedulers of torch keep the steps of their course, or of its first part."""


def schedule_length(scheduler: Any) -> int:
    """Return the steps that a schedule is made for, or at least those of its first part; 0 if it does not say.

    >>> from torch import nn, optim
    >>> optimizer = optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    >>> schedule_length(OneCycleLR(optimizer, max_lr=0.1, total_steps=200))
    200
    """
    if isinstance(scheduler, ChainedScheduler):
        return max(map(schedule_length, scheduler._schedulers))
    if isinstance(scheduler, SequentialLR):
        return int(scheduler._milestones[-1]) + schedule_length(scheduler._schedulers[-1])
    if isinstance(scheduler, LambdaLR):  # those of transformers have arguments with their lengths
        parts = [part for part in scheduler.lr_lambdas if isinstance(part, partial)]
        return max((int(part.keywords.get("num_training_steps") or 0) for part in parts), default=0)
    milestones = getattr(scheduler, "milestones", None)
    if milestones:
        return int(max(milestones))
    return next((int(getattr(scheduler, name)) for name in LENGTHS if getattr(scheduler, name, None)), 0)


def most_steps(scheduler: Any) -> float:
    """Return the steps after which a schedule refuses another; infinite for all but OneCycleLR and what contains it."""
    if isinstance(scheduler, OneCycleLR):
        return scheduler.total_steps
    if isinstance(scheduler, ChainedScheduler):
        return min(map(most_steps, scheduler._schedulers))
    if isinstance(scheduler, SequentialLR):
        starts = [0, *scheduler._milestones]
        ends = [*(milestone - 1 for milestone in scheduler._milestones), inf]  # a milestone starts the next part
        limits = [start + most_steps(part) for start, part in zip(starts, scheduler._schedulers, strict=True)]
        return min((limit for limit, end in zip(limits, ends, strict=True) if limit < end), default=inf)
    return inf
