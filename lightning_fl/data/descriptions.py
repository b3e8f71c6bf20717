"""Descriptions of data in one line: settings, split, and the samples that a loader reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_fl.checks import parameters_of
from lightning_fl.data.non_iid_degree import held_classes_and_degrees, non_iid_degree
from lightning_fl.data.samples.loaders import SampleLoader
from lightning_fl.data.split_data import SplitData

NUM_DRAWS = 1000
"""Number of random draws that estimate the degree of IID clients of these sizes."""
MOST_COUNTS = 2**21
"""Counts of classes of all draws, which limit these where classes are many, such as words."""


def settings_in_one_line(data: SplitData) -> str:
    """Return the number of clients, the partition, and all other settings that differ from the defaults."""
    shown = {"num_clients": repr(data.num_clients), "partition": part_in_short(data.partition)}
    for name, parameter in parameters_of(type(data)).items():
        value = getattr(data, name, parameter.default)
        is_short = value is None or isinstance(value, bool | int | float | str)
        is_wrapped = name in ("batch_size", "drop_last", "num_classes") and not getattr(data, f"_{name}_given", True)
        if is_short and not is_wrapped and value != parameter.default:
            shown[name] = repr(value)
    wrapped = getattr(data, "datamodule", None)
    first = [] if wrapped is None else [type(wrapped).__name__]
    return ", ".join([*first, *(f"{name}={value}" for name, value in shown.items())])


def part_in_short(part: Any) -> str:
    """Return a partition or a shift with its first argument and those that are not the defaults.

    >>> from lightning_fl.data import Dirichlet
    >>> part_in_short(Dirichlet(0.1, min_samples=1)), part_in_short(Dirichlet())
    ('Dirichlet(alpha=0.1, min_samples=1)', 'Dirichlet(alpha=0.5)')
    """
    values = [(field.name, repr(getattr(part, field.name)), repr(field.default)) for field in fields(part)]
    shown = [f"{name}={value}" for place, (name, value, default) in enumerate(values) if place == 0 or value != default]
    return f"{type(part).__name__}({', '.join(shown)})"


def describe_split(data: SplitData) -> str:
    """Describe the split of a data module that is set up."""
    unit = _unit(data)
    sizes = data.client_indices.sizes  # not `client_sizes`, which leaves out clients that drop all of their samples
    each = "-".join(f"{size:,}" for size in sorted({sizes.min(), sizes.max()}))
    clients = f"{data.num_clients:,} clients by {part_in_short(data.partition)}, {each} each"
    clients += f" of {data.groups_of_clients.describe()}" if data.groups_of_clients is not None else ""
    server = f"{len(data.server_indices):,} server {unit}" if len(data.server_indices) else "no server data"
    labels, num_classes = data.train.labels, data.num_classes
    if labels is not None and num_classes is not None and data.server_histogram is not None:
        pooled = np.bincount(labels[data.client_indices.joined], minlength=num_classes)
        held, degrees = held_classes_and_degrees(labels, data.client_indices, pooled)
        by_chance = degree_of_random_draws(pooled, sizes[sizes > 0])
        clients += (
            f" ({held.mean():.1f} of {num_classes} classes per client; non-IID degree {degrees.mean():.2f}, where 0 "
            f"means the same shares of classes everywhere, and random draws of these sizes give {by_chance:.2f})"
        )
        if len(data.server_indices):
            server += f" (non-IID degree {non_iid_degree(data.server_histogram, pooled):.2g})"
    clients += f"; {data.num_left_out:,} others left out" if data.num_left_out else ""
    clients += f"; {unit} changed by {part_in_short(data.shift)}" if data.shift is not None else ""
    num_held_out = len(data.client_val_indices.joined)
    clients += f"; {num_held_out:,} held out for validation" if num_held_out else ""
    test = "test data as given" if data.test is None else f"{len(data.test):,} test {unit}"
    return f"{type(data).__name__}: {sizes.sum():,} training {unit} over {clients}; {server}; {test}."


def degree_of_random_draws(pooled: np.ndarray, sizes: np.ndarray) -> float:
    """Return the mean non-IID degree of random clients of these sizes, which is above 0 because the clients are small.

    Args:
        pooled: (C,) samples of all clients per class.
        sizes: (N,) samples of each client, at least 1.
    """
    sizes, rng = np.sort(sizes), np.random.default_rng(0)
    some = np.linspace(0, len(sizes) - 1, max(1, min(NUM_DRAWS, MOST_COUNTS // len(pooled)))).astype(np.int64)
    drawn = [
        rng.multivariate_hypergeometric(pooled, size, count, method="marginals")
        for size, count in zip(*np.unique(sizes[some], return_counts=True), strict=True)
    ]
    return float(non_iid_degree(np.concatenate(drawn), pooled).mean())


def describe_loader(data: SplitData, loaders: CombinedLoader, num_batches: Sequence[int | float]) -> str:
    """Return the number and the kind of samples that validation or test loaders read.

    Args:
        data: data module that returned the loaders.
        loaders: the loaders.
        num_batches: batches to read of each.
    """
    num_test, from_training, others = 0, 0, []
    for loader, count in zip(loaders.flattened, num_batches, strict=True):
        num_samples = _num_samples(loader, count)
        if isinstance(loader, SampleLoader) and loader.samples in (data.test, data.train, data.train.in_evaluation):
            num_test += num_samples * (loader.samples is data.test)
            from_training += num_samples * (loader.samples is not data.test)
        else:
            others.append(f"{num_samples:,} samples" if num_samples else "samples")
    unit = _unit(data)
    parts = [f"{num_test:,} test {unit}"] * bool(num_test) + [f"{from_training:,} held-out training {unit}"] * bool(
        from_training
    )
    wrapped = type(getattr(data, "datamodule", data)).__name__
    return " and ".join([*parts, *(f"{number} of {wrapped}" for number in others)])


def have_same_samples(first: CombinedLoader, second: CombinedLoader) -> bool:
    """True if a loader of the first and one of the second read the same samples."""
    return bool({_samples_of(loader) for loader in first.flattened} & {_samples_of(x) for x in second.flattened})


def _samples_of(loader: Any) -> tuple[int, ...]:
    """Return what tells the samples of two loaders apart, as long as both exist."""
    if isinstance(loader, SampleLoader):
        return id(loader.samples), 0 if loader.indices is None else id(loader.indices)
    return (id(getattr(loader, "dataset", loader)),)


def _num_samples(loader: Any, num_batches: int | float) -> int:
    """Return the number of samples in the first batches of a loader; 0 if that is unknown."""
    total = loader.num_samples if isinstance(loader, SampleLoader) else sized_len(getattr(loader, "dataset", None))
    batch_size = getattr(loader, "batch_size", None)
    reads_all = sized_len(loader) == num_batches
    if total is None or (batch_size is None and not reads_all):
        return 0
    return total if reads_all else min(total, int(num_batches * (batch_size or 1)))


def _unit(data: SplitData) -> str:
    return "samples" if data.in_channels is None else "images"


def describe_batch(batch: Any) -> str:
    """Return type and shape of each part of a batch.

    >>> import torch
    >>> describe_batch([torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64), "text"])
    'float32 (8, 3), int64 (8,), str'
    """
    leaves = tree_leaves(batch)
    parts = [
        f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for leaf in leaves[:8]
    ]
    return ", ".join(parts + ["…"] * (len(leaves) > 8)) or "empty"
