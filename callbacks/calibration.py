"""The samples by which a pruning callback judges a network, in any trainer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from lightning_fl.errors import UserError


def calibration_batches(trainer: Any, num_batches: int, batch_size: int) -> list[Any]:
    """The first batches of the server's samples, where the datamodule has such; otherwise some of the training samples.

    Training samples are drawn at random, always the same. The run's own randomness, and the order in which it reads its data, are
    left as they were.

    Args:
        trainer: an `L.Trainer` in `fit`, or a `FederatedTrainer`.
        num_batches: how many, at least 1; there may be fewer.
        batch_size: samples per batch; a loader over an IterableDataset keeps its own.

    Returns:
        Batches on the module's device, as its training_step would see them.

    Raises:
        UserError: the clients of a federation hold all samples, or there are several training loaders.
    """
    with isolate_rng():
        torch.manual_seed(0)
        module = trainer.lightning_module
        batches = islice(_batches(trainer, batch_size), num_batches)
        return [module._apply_batch_transfer_handler(module._on_before_batch_transfer(batch)) for batch in batches]


def example_input(trainer: Any) -> Any:
    """What the module's forward takes: its `example_input_array`, or zeros in the shape of a training batch's first part."""
    own = trainer.lightning_module.example_input_array
    if own is not None:
        return own
    with isolate_rng():
        loader = _train_loader(trainer)
        if loader is None:
            loader = trainer.datamodule.train_dataloader()  # only the shape of a sample matters
        batch = next(iter(_reread(loader, 2)))
    first = batch[0] if isinstance(batch, (tuple, list)) else batch
    return tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, first)


def _batches(trainer: Any, batch_size: int) -> Iterator[Any]:
    server_data = getattr(trainer.datamodule, "server_data", None)
    samples = server_data() if callable(server_data) else None
    if samples is not None:
        return iter(samples.batches(batch_size))
    loader = _train_loader(trainer)
    if loader is None:
        raise UserError(
            "the importance of feature maps is judged on samples of the server's, and it has none: give the data a "
            "server_fraction above 0, or take importance 'magnitude'."
        )
    return iter(_reread(loader, batch_size))


def _train_loader(trainer: Any) -> Any:
    """The training loader of a trainer that reads one itself; None in a federation, whose clients do."""
    return getattr(trainer, "train_dataloader", None)


def _reread(loader: Any, batch_size: int) -> Any:
    """A loader over the same samples, shuffled from a seed, that leaves the given one alone."""
    if hasattr(loader, "reseeded"):
        return loader.reseeded(0, batch_size)
    if not isinstance(loader, DataLoader):
        raise UserError(f"pruning reads samples from one training loader, got a {type(loader).__name__}.")
    if isinstance(loader.dataset, IterableDataset):
        return loader
    generator = torch.Generator().manual_seed(0)
    return DataLoader(loader.dataset, batch_size, shuffle=True, collate_fn=loader.collate_fn, generator=generator)
