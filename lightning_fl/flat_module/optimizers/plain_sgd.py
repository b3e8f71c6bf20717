"""Plain SGD in place of a module's optimiser, at the same learning rates and with the same schedulers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lightning_fl.errors import require
from lightning_fl.flat_module.optimizers.schedules import parts_of


def plain_sgd(source: Optimizer, configs: Sequence[LRSchedulerConfig]) -> SGD:
    """Return SGD without momentum for the parameters of an optimiser, and say so in one line.

    It has the learning rates of the source and, if the source is SGD as well, its weight decay. The weight decay of
    adaptive optimisers means something else, and is left out. From now on, the schedulers move its learning rates, but
    no momentum.

    Args:
        source: the module's optimiser.
        configs: its schedulers.

    Raises:
        UserError: the source maximises or has no learning rate, or a scheduler is not torch's `LRScheduler`.
    """
    kind = type(source).__name__
    for group in source.param_groups:
        require(
            not group.get("maximize"), f"trainer.client_optimizer sgd minimises the loss, but {kind} has maximize=True."
        )
        require(
            isinstance(group.get("lr"), (int, float, torch.Tensor)),
            f"trainer.client_optimizer sgd takes the learning rate of the module's optimiser, but {kind} has "
            f"lr={group.get('lr')}: give it a number.",
        )
    decays = isinstance(source, SGD)
    taken = [
        {"params": group["params"], "lr": float(group["lr"]), "weight_decay": group["weight_decay"] if decays else 0.0}
        for group in source.param_groups
    ]
    optimizer = SGD(taken)
    if configs:
        LambdaLR(optimizer, lambda _: 1.0)  # torch's schedulers warn of an optimiser for which none was made
        for group, old in zip(optimizer.param_groups, source.param_groups, strict=True):
            group.update(
                {name: x for name, x in old.items() if name not in {"params", "lr", *getattr(source, "defaults", ())}}
            )
    for config in configs:
        _rebind(config.scheduler, source, optimizer)
    rates = sorted({f"{float(group.get('initial_lr', group['lr'])):g}" for group in source.param_groups})
    left_out = not decays and any(group.get("weight_decay") for group in source.param_groups)
    rank_zero_info(
        f"Clients step by plain SGD at {kind}'s learning rate{'s' * (len(rates) > 1)} {' and '.join(rates)}"
        f"{', without its weight decay' if left_out else ''}, because trainer.client_optimizer is sgd."
    )
    return optimizer


def _rebind(scheduler: object, source: Optimizer, optimizer: SGD) -> None:
    """Let a scheduler move `optimizer` instead of `source`, and leave the momentum alone."""
    for part in parts_of(scheduler):
        require(
            isinstance(part, LRScheduler),
            f"trainer.client_optimizer sgd cannot give SGD to {type(part).__name__}, which is not a torch LRScheduler: "
            "let configure_optimizers return SGD itself.",
        )
        for name, value in vars(part).items():
            if value is source:
                setattr(part, name, optimizer)
        if getattr(part, "cycle_momentum", False):
            part.cycle_momentum = False
