"""Static batch normalisation: statistics that are computed from samples, and not averaged over training steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from lightning_fl.checks.evaluation_mode import evaluating
from lightning_fl.data import FederatedDataModule
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.smaller_network import keeps_statistics


def settle_statistics(flat_module: FlatModule, batches: Iterable[Any], resident: bool) -> None:
    """Set the running statistics of each batch normalisation to their means over batches, with the present model.

    The other layers are in evaluation mode, unlike in `torch.optim.swa_utils.update_bn`, so that dropout adds no noise.

    Args:
        flat_module: holds the model.
        batches: batches of the data.
        resident: True if they are on the accelerator.
    """
    module = flat_module.module
    norms: list[Any] = [part for part in module.modules() if keeps_statistics(part)]
    momenta = [part.momentum for part in norms]
    try:
        with evaluating(module), torch.no_grad(), flat_module.fabric.autocast():
            for part in norms:
                part.reset_running_stats()
                part.momentum = None  # the mean over all batches
                part.train()
            for batch in batches:
                module(flat_module.inputs(batch, resident))
    finally:
        for part, momentum in zip(norms, momenta, strict=True):
            part.momentum = momentum


def statistic_batches(data: FederatedDataModule) -> Iterator[Any]:
    """Yield the samples from which statistics are computed, without augmentation: the server's, or else all clients'.

    A last batch of one sample, which may have no variance, is left out.
    """
    size = data.eval_batch_size
    for rows in [data.server_indices] if len(data.server_indices) else data.client_indices:
        taken = rows[:-1] if size > 1 and len(rows) % size == 1 else rows
        yield from data.train.batches(size, taken) if len(taken) else ()
