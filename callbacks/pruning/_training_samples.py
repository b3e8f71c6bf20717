"""Training samples in any trainer: their sources, and the samples on which a pruning callback ranks the filters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, Subset, SubsetRandomSampler

from lightning_fl.errors import UserError


class Source(Protocol):
    """Source of training data.

    Attributes:
        client: index of the client in a federation; None for the server, or in a training without clients.
        num_samples: number of samples n_k.
        degree: non-IID degree D(P_k) of its labels relative to the labels of all sources, in [0, 1].
    """

    degree: float

    @property
    def client(self) -> int | None: ...

    @property
    def num_samples(self) -> int: ...

    def batch(self, size: int, rng: np.random.Generator) -> Any:
        """Draw a random batch of at most `size` samples."""

    def answer(self, count: int) -> None:
        """Record that the source reports `count` numbers about the current model; called on every process.

        A federation counts their bits.
        """


class _TrainingData:
    """Training data of a trainer without clients."""

    client = None
    degree = 0.0
    num_samples = 1

    def __init__(self, loaders: Any) -> None:
        self._loaders = loaders

    def batch(self, size: int, rng: np.random.Generator) -> Any:
        """Draw random samples of every loader, as the loaders collate them."""
        return tree_map(lambda loader: _draw(loader, size, rng), self._loaders)

    def answer(self, count: int) -> None:
        """Do nothing, because nothing is sent."""


def sources_of(trainer: Any) -> Sequence[Source]:
    """Return all sources of training data, the server first; without clients, the training data."""
    federation = getattr(trainer, "sources", None)
    return federation() if federation is not None else [_TrainingData(trainer.train_dataloader)]


def _draw(loader: Any, size: int, rng: np.random.Generator) -> Any:
    """Draw random samples of a map-style data set or of a loader that draws; else take the start of the first batch."""
    if hasattr(loader, "draw"):
        return loader.draw(size, rng)
    is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if is_map and loader.batch_sampler is not None:
        dataset = _sampled(loader)
        rows = rng.choice(len(dataset), min(size, len(dataset)), replace=False)
        return loader.collate_fn([dataset[int(row)] for row in rows])
    return tree_map(lambda x: x[:size] if isinstance(x, Tensor) and x.dim() else x, next(iter(loader)))


def _sampled(loader: DataLoader) -> Any:
    """Return the samples that a loader of a map-style data set draws: without those that its sampler holds out."""
    sampler = loader.sampler
    if type(sampler) is not SubsetRandomSampler:
        return loader.dataset
    return Subset(loader.dataset, [int(index) for index in sampler.indices])


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
    """Move a batch to the accelerator, through the batch hooks, in the precision of the parameters."""
    module = trainer.lightning_module
    if not str(trainer.precision).endswith(
        "mixed"
    ):  # in mixed precision the parameters are float32, as the samples are
        batch = trainer.precision_plugin.convert_input(batch)
    return module._apply_batch_transfer_handler(module._on_before_batch_transfer(batch))


def example_input(trainer: Any) -> Any:
    """Return an input of the module's forward: its `example_input_array`, or zeros shaped like a batch's first part."""
    example = trainer.lightning_module.example_input_array
    if example is not None:
        return example
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
            "the importance of feature maps is computed on the server's samples, but the server has none: give the data a "
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
    size = batch_size if loader.batch_sampler is not None else None  # the data set's items are batches themselves
    return DataLoader(_sampled(loader), size, shuffle=True, collate_fn=loader.collate_fn, generator=generator)
