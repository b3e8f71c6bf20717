"""Loaders of an evaluation, and the loss of a module on batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from math import inf, nan
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader

from lightning_fl.checks.evaluation_mode import evaluating, measuring
from lightning_fl.checks.misconfiguration import misconfiguration
from lightning_fl.errors import require
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.processes import gather_objects


def as_loaders(loaders: Any, mode: Any = "sequential") -> CombinedLoader:
    """Return a loader, a list or mapping of loaders, a `CombinedLoader` or None as Lightning iterates over them.

    Args:
        loaders: the loaders.
        mode: mode of a `CombinedLoader` of them; in training Lightning uses `max_size_cycle`.
    """
    if isinstance(loaders, CombinedLoader):
        return loaders
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec")  # Lightning's own, of torch
        return CombinedLoader([] if loaders is None else loaders, mode)


@misconfiguration()
def num_batches(loaders: CombinedLoader, limit: int | float | None) -> list[int | float]:
    """Return the batches to run of each loader under Lightning's `limit_*_batches` (a count, a fraction or None for all).

    Raises:
        MisconfigurationError: a fraction is less than one batch, or a loader has no length to take a fraction of.
    """
    counts: list[int | float] = []
    for loader in loaders.flattened:
        length = sized_len(loader)
        if limit is None or isinstance(limit, int) or limit == 1.0:
            counts.append(min(inf if length is None else length, limit if isinstance(limit, int) else inf))
            continue
        source = type(getattr(loader, "dataset", None) or loader).__name__
        require(
            length is not None,
            f"{source} has no length, like any `IterableDataset`, so `Trainer(limit_*_batches)` must be `1.0` or an int, got "
            f"{limit}.",
        )
        assert length is not None
        counts.append(int(length * limit))
        require(
            counts[-1] > 0 or not length or not limit,
            f"a limit of {limit} of the {length} batches of {source} is less than one: use a whole number of batches.",
        )
    return counts


def is_sequential(loaders: CombinedLoader) -> bool:
    """True if each batch comes from one loader, and not from all of them."""
    return loaders._mode == "sequential"


def mean_training_loss(flat_module: FlatModule, batches: Iterable[Any], sizes: Sequence[int], resident: bool) -> float:
    """Return the mean over samples of the loss of `training_step` in evaluation mode; ranks take turns.

    Values that the module logs are dropped, and its attributes are restored.

    Args:
        flat_module: holds the model.
        batches: batches of the data.
        sizes: number of samples of each batch.
        resident: True if they are on the accelerator.

    Returns:
        Mean loss, the same on every rank; NaN if there was no loss.
    """
    fabric = flat_module.fabric
    mine = summed_training_loss(flat_module, batches, sizes, resident, fabric.global_rank, fabric.world_size)
    total, num_samples = (sum(parts) for parts in zip(*gather_objects(fabric, mine), strict=True))
    return total / num_samples if num_samples else nan


def summed_training_loss(
    flat_module: FlatModule,
    batches: Iterable[Any],
    sizes: Sequence[int],
    resident: bool,
    rank: int = 0,
    num_ranks: int = 1,
) -> tuple[float, float]:
    """Return the sum over samples of the loss of `training_step` in evaluation mode, and the samples that had a loss.

    Only every `num_ranks`-th batch counts, beginning with batch `rank`; see `mean_training_loss`.
    """
    module, total, num_samples = flat_module.module, 0.0, 0.0
    with evaluating(module), measuring(module), torch.no_grad(), flat_module.dropping_logs():
        for index, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
            if index % num_ranks == rank:
                batch = flat_module.transfer(batch, resident)
                with flat_module.fabric.autocast():
                    loss, _ = flat_module.training_step(batch, index)
                if loss is not None:
                    total, num_samples = total + float(loss) * size, num_samples + size
    return total, num_samples
