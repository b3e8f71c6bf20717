"""Samples on which a pruning callback ranks the filters of a network, in any trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from lightning_fl.callbacks._sources import Source
from lightning_fl.errors import UserError


def calibration_images(
    trainer: Any, num_samples: int, batch_size: int, stand_in: Source | None = None, seed: Sequence[int] = (0,)
) -> list[Any]:
    """Return images to rank feature maps on: the server's first samples if the datamodule has any, else training samples.

    Training samples are drawn at random from a fixed seed. The run's random state and the order of its data do not change.

    Args:
        trainer: an `L.Trainer` in `fit`, or a `FederatedTrainer`.
        num_samples: number of images, at least 1; there may be fewer.
        batch_size: images in a batch, at least 1.
        stand_in: source of samples in a federation whose server has none.
        seed: seed of the stand-in's samples.

    Returns:
        The network's input of each batch, on the module's device, as its training_step would see it.

    Raises:
        UserError: only clients have samples and there is no stand-in, or there are several training loaders.
    """
    with isolate_rng():
        torch.manual_seed(0)
        batches: list[Any] = []
        left = num_samples
        for batch in _batches(trainer, batch_size, num_samples, stand_in, seed):
            images = _inputs(moved(trainer, batch))
            if isinstance(images, Tensor):
                images = images[:left]
                batches.extend(images.split(batch_size))
                left -= len(images)
            else:
                batches.append(images)
                left -= batch_size
            if left <= 0:
                break
        return batches


def moved(trainer: Any, batch: Any) -> Any:
    """Move a batch to the accelerator, through the batch hooks, in the precision of the training."""
    module = trainer.lightning_module
    batch = module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch))
    return module._apply_batch_transfer_handler(batch)


def example_input(trainer: Any) -> Any:
    """Return an input of the module's forward: its `example_input_array`, or zeros shaped like a batch's first part."""
    own = trainer.lightning_module.example_input_array
    if own is not None:
        return own
    with isolate_rng():
        loader = _train_loader(trainer)
        if loader is None:
            loader = trainer.datamodule.train_dataloader()  # only the shape of a sample matters
        batch = next(iter(_reread(loader, 2)))
    return tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, _inputs(batch))


def _inputs(batch: Any) -> Any:
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def _batches(
    trainer: Any, batch_size: int, num_samples: int, stand_in: Source | None, seed: Sequence[int]
) -> Iterator[Any]:
    server_data = getattr(trainer.datamodule, "server_data", None)
    samples = server_data() if callable(server_data) else None
    if samples is not None:
        return iter(samples.batches(batch_size))
    if stand_in is not None:
        return iter([stand_in.batch(num_samples, np.random.default_rng(seed))])
    loader = _train_loader(trainer)
    if loader is None:
        raise UserError(
            "the importance of feature maps is computed on the server's samples, and it has none: give the data a "
            "server_fraction above 0, or use importance 'magnitude'."
        )
    return iter(_reread(loader, batch_size))


def _train_loader(trainer: Any) -> Any:
    """Return the trainer's training loader; None in a federation, where clients have the loaders."""
    return None if hasattr(trainer, "sources") else getattr(trainer, "train_dataloader", None)


def _reread(loader: Any, batch_size: int) -> Any:
    """Return another loader over the same samples, shuffled from a fixed seed."""
    if hasattr(loader, "reseeded"):
        return loader.reseeded(0, batch_size)
    if not isinstance(loader, DataLoader):
        raise UserError(f"pruning reads samples from one training loader, got a {type(loader).__name__}.")
    if isinstance(loader.dataset, IterableDataset):
        return loader
    generator = torch.Generator().manual_seed(0)
    return DataLoader(loader.dataset, batch_size, shuffle=True, collate_fn=loader.collate_fn, generator=generator)
