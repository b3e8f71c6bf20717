"""Read a training `DataLoader` as `Samples`: a federation takes its samples, not the order in which it would yield them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from lightning_fl.data.sampled import Sampled
from lightning_fl.data.samples.dataset_samples import ReadInBatches, require_map_style, samples_of
from lightning_fl.data.samples.tensor_samples import Samples
from lightning_fl.errors import require

OF_WORKERS = ("multiprocessing_context", "prefetch_factor", "timeout", "worker_init_fn")
"""Attributes of a loader that say how its workers are started and read."""


def read_loader(loader: Any, owner: str) -> tuple[Samples, int, bool]:
    """Return the samples of a training loader, its batch size, and whether it drops a last batch that is not full.

    Of a `SubsetRandomSampler` only the samples that it names are read. A loader with batch_size=None and a `BatchSampler` for its
    sampler hands whole batches of indices to the dataset, as sparse matrices and tables are read; clients do so, too.

    Args:
        loader: what `train_dataloader()` returned.
        owner: name of the class that returned it, for the sentences.

    Raises:
        UserError: the samples cannot be divided over clients, or the loader chooses or batches them in a way that clients,
            which go through all their samples in random order, would not follow.
    """
    require(
        isinstance(loader, DataLoader),
        f"{owner}.train_dataloader() returns a {type(loader).__name__}: only a single torch DataLoader can be "
        "divided over clients.",
    )
    require_map_style(loader.dataset)
    if type(loader).__iter__ is not DataLoader.__iter__:
        rank_zero_warn(
            f"{owner}'s training loader is a {type(loader).__name__} with an __iter__ of its own, which clients do not use: they "
            "read its dataset in batches of its collate_fn, so change samples and batches there."
        )
    dataset, batches = loader.dataset, loader.batch_sampler
    if batches is None and isinstance(loader.sampler, BatchSampler):
        dataset, batches = ReadInBatches(dataset), loader.sampler
    require(
        batches is not None,
        f"{owner}'s training loader does not batch its samples (batch_size=None): set its batch_size.",
    )
    require(
        type(batches) is BatchSampler,
        f"{owner}'s training loader has a batch sampler of its own ({type(batches).__name__}), but a federation divides "
        "each client's samples into batches: use DataLoader(dataset, batch_size=…, shuffle=True), with a Subset for a part "
        "of the samples.",
    )
    assert isinstance(batches, BatchSampler)
    chosen = _sampled(dataset, batches.sampler, owner)
    of_workers = {name: getattr(loader, name) for name in OF_WORKERS}
    samples = samples_of(chosen, loader.collate_fn, loader.num_workers, **of_workers)
    return samples, batches.batch_size, batches.drop_last


def _sampled(dataset: Any, sampler: Any, owner: str) -> Dataset:
    """Return the samples of a dataset that a sampler names."""
    if type(sampler) is SubsetRandomSampler:
        return Sampled(dataset, [int(index) for index in sampler.indices])
    name, is_plain = type(sampler).__name__, type(sampler) in (SequentialSampler, RandomSampler)
    reads_each = is_plain and len(sampler) == len(dataset) and not getattr(sampler, "replacement", False)
    require(
        reads_each,
        f"{owner}'s training loader has a {name}{' that does not read each sample once' if is_plain else ''}, but a client "
        "reads all its samples in random order: use shuffle=True, a SubsetRandomSampler for a part of the samples, or "
        "weights in the loss.",
    )
    return dataset
