"""Read any map-style `Dataset` as `Samples`: all clients share one `DataLoader`."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from lightning_fl.checks import checked
from lightning_fl.data.samples.labels import NUMBERS, TEXT, label_values, numbered
from lightning_fl.data.samples.tensor_samples import Samples, Selection, TensorSamples
from lightning_fl.errors import require


class DatasetSamples(Samples):
    """Samples read from a map-style `Dataset` through a `DataLoader` that is constructed once.

    Random draws of the dataset and of `collate_fn` (augmentation) depend on the pass's generator and not on the number of
    workers. With workers, only one shuffled pass can run at a time: a second pass ends the first with an error.

    Args:
        dataset: any dataset with `__len__` and `__getitem__`.
        collate_fn: function from a list of samples to a batch; None: PyTorch's default.
        num_workers: processes that read ahead, at least 0; they start once and keep running.
        worker_init_fn: function called in each worker with the worker's number.
        **worker_options: further options of a `DataLoader`'s workers: multiprocessing_context, prefetch_factor, timeout.

    Raises:
        UserError: the dataset is an `IterableDataset`, which cannot be divided.
    """

    resident = False
    """Batches come from the host's memory."""

    @checked
    def __init__(
        self,
        dataset: Dataset,
        collate_fn: Callable[[list], Any] | None = None,
        num_workers: Annotated[int, Ge(0)] = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        **worker_options: Any,
    ) -> None:
        require_map_style(dataset)
        self.dataset = self.source = dataset
        self.labels = dataset_labels(dataset)
        self._options: dict[str, Any] = {
            "collate_fn": collate_fn,
            "num_workers": num_workers,
            "worker_init_fn": worker_init_fn,
            **worker_options,
        }
        self._turn = 0
        self._sampler = _BatchSampler()
        self._loader: DataLoader | None = None

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def num_workers(self) -> int:
        """See `Samples.num_workers`."""
        return int(self._options["num_workers"])

    def reading(self, dataset: Dataset, collate_fn: Callable[[list], Any] | None) -> DatasetSamples:
        """Return the same samples, read from another data set of them and with another collate function."""
        changed = copy.copy(self)
        changed.dataset, changed._sampler, changed._loader = dataset, _BatchSampler(), None
        changed._options = self._options | {"collate_fn": collate_fn}
        return changed

    def place(self, device: torch.device) -> None:
        """Pin batches for a CUDA device. The reader of a batch moves it."""
        self._options["pin_memory"] = device.type == "cuda"
        self._loader = None

    def select(self, indices: np.ndarray) -> DatasetSelection:
        """Select the samples at `indices`; this reads nothing yet."""
        return DatasetSelection(self, np.asarray(indices))

    def batches(self, batch_size: int, indices: np.ndarray | None = None) -> Iterator[Any]:
        """Yield the samples in order: see `Samples.batches`. This may run during a shuffled pass."""
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices)
        # Persistent workers serve one pass at a time, and an evaluation may run during a training pass, so it gets its
        # own loader.
        loader = DataLoader(
            self.dataset,
            batch_sampler=_cut(chosen, batch_size),
            generator=torch.Generator(),
            **self._options,
        )
        return iter(loader)

    def end_workers(self) -> None:
        """End the workers of the training loader: see `Samples.end_workers`."""
        if self._loader is not None:
            CombinedLoader(self._loader).reset()

    def stored(self, indices: np.ndarray) -> list[Tensor]:
        """Return the tensors of the samples as one batch: see `Samples.stored`."""
        leaves = tree_leaves(next(self.batches(len(indices), indices)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return [rows.int() if rows.dtype == torch.int64 else rows for rows in tensors]

    def shuffled_pass(self, batches: list[list[int]]) -> Iterator[Any]:
        """Yield one batch per list of a seed and indices, from the loader that all selections share."""
        if self._loader is None:
            persistent = self.num_workers > 0
            batches_of_seeds = _SeededBatches(self.dataset, self._options["collate_fn"] or default_collate)
            init = partial(_init_worker, self._options["worker_init_fn"])
            options = self._options | {"collate_fn": _as_it_is, "worker_init_fn": init}
            self._loader = DataLoader(
                batches_of_seeds, batch_sampler=self._sampler, persistent_workers=persistent, **options
            )
        self._turn += 1
        turn = self._turn
        self._sampler.batches = batches
        # Without its own generator, each pass would draw a number from PyTorch's global one.
        self._loader.generator = torch.Generator()
        for batch in self._loader:
            if turn != self._turn and self.num_workers > 0:
                raise RuntimeError(
                    "Another pass over the same data has started: finish one client's pass before the next."
                )
            yield batch


class DatasetSelection(Selection):
    """Indices into `DatasetSamples`."""

    __slots__ = ("_indices", "_samples")

    def __init__(self, samples: DatasetSamples, indices: np.ndarray) -> None:
        self._samples = samples
        self._indices = indices

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._indices)

    @property
    def dataset(self) -> Subset:
        """See `Selection.dataset`."""
        return Subset(self._samples.source, self._indices.tolist())

    def batches(
        self, batch_size: int, generator: torch.Generator | None = None, share: Callable[[int], slice] | None = None
    ) -> Iterator[Any]:
        """Yield every sample once: see `Selection.batches`."""
        if generator is None:
            return self._in_order(batch_size, share)
        order = torch.randperm(len(self._indices), generator=generator).numpy()
        batches = _cut(self._indices[order], batch_size)
        seeds = torch.randint(2**31, (len(batches),), generator=generator).tolist()
        if share is not None:
            rows = [share(len(batch)) for batch in batches]
            # The draws of transforms differ between the processes.
            seeds = [seed + part.start for seed, part in zip(seeds, rows, strict=True)]
            batches = [batch[part] for batch, part in zip(batches, rows, strict=True)]
        read = self._samples.shuffled_pass(
            [[seed, *batch] for seed, batch in zip(seeds, batches, strict=True) if batch]
        )
        return read if share is None else (next(read) if batch else None for batch in batches)

    def _in_order(self, batch_size: int, share: Callable[[int], slice] | None) -> Iterator[Any]:
        """Yield every sample once, in the order given to `select`."""
        if share is None:
            return self._samples.batches(batch_size, self._indices)
        batches = [self._indices[start : start + batch_size] for start in range(0, len(self._indices), batch_size)]
        parts = [batch[share(len(batch))] for batch in batches]
        return (next(self._samples.batches(len(part), part)) if len(part) else None for part in parts)


class ReadInBatches(Subset):
    """All samples of a dataset whose `__getitem__` takes the list of a batch's indices and returns the batch."""

    def __init__(self, dataset: Any) -> None:
        require_map_style(dataset)
        super().__init__(dataset, range(len(dataset)))

    def __getitem__(self, index: int) -> Any:
        """Return a batch of one sample."""
        return self.dataset[[index]]

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the batch of these samples, which the loader's fetcher reads with this method."""
        return self.dataset[indices]


class _BatchSampler:
    """Lists of indices, replaced before each pass."""

    batches: Sequence[list[int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class _SeededBatches(Dataset):
    """A dataset that returns a collated batch for a seed of its random draws, followed by the indices."""

    def __init__(self, dataset: Dataset, collate_fn: Callable[[list], Any]) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __getitems__(self, seed_and_indices: list[int]) -> Any:
        seed, *indices = seed_and_indices
        with seeded(seed):
            if hasattr(self.dataset, "__getitems__"):
                return self.collate_fn(self.dataset.__getitems__(indices))
            return self.collate_fn([self.dataset[index] for index in indices])


def _as_it_is(batch: Any) -> Any:
    return batch


def _init_worker(worker_init_fn: Callable[[int], None] | None, number: int) -> None:
    """Show a worker its copy of the user's data set, which `get_worker_info` names, and call the user's function."""
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, _SeededBatches)
    object.__setattr__(info, "dataset", info.dataset.dataset)  # torch's object is frozen
    if worker_init_fn is not None:
        worker_init_fn(number)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators that datasets use (torch, numpy, random), and restore them afterwards."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)


def _cut(indices: np.ndarray, batch_size: int) -> list[list[int]]:
    listed = indices.tolist()
    return [listed[start : start + batch_size] for start in range(0, len(listed), batch_size)]


def samples_of(
    dataset: Dataset, collate_fn: Callable[[list], Any] | None = None, num_workers: int = 0, **options: Any
) -> Samples:
    """Return `TensorSamples`, which are faster, for a plain `TensorDataset` or its `Subset`; else `DatasetSamples`."""
    base, indices = dataset, None
    while type(base) is Subset:  # a subclass may change the samples
        positions = np.asarray(base.indices, dtype=np.int64)
        indices = positions if indices is None else positions[indices]
        base = base.dataset
    tensors: tuple[Tensor, ...] = base.tensors if type(base) is TensorDataset else ()
    plain = collate_fn in (None, default_collate) and all(
        type(t) is Tensor and t.layout is torch.strided for t in tensors
    )
    # TensorSamples treats uint8 as images and scales them to [0, 1], which users of this dataset do not expect.
    if tensors and plain and tensors[0].dtype != torch.uint8:
        rows = (t if indices is None else t[torch.from_numpy(indices)] for t in tensors)
        samples = TensorSamples(*rows, lists=True)
        samples.source = dataset
        return samples
    return DatasetSamples(dataset, collate_fn, num_workers, **options)


def require_map_style(dataset: Any) -> None:
    """Raise `UserError` unless `dataset` has a length and can be indexed."""
    map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    require(
        map_style and not isinstance(dataset, IterableDataset),
        f"{type(dataset).__name__} cannot be divided over clients: use a map-style Dataset with __len__ and "
        "__getitem__, not an IterableDataset.",
    )


def dataset_labels(dataset: Any) -> np.ndarray | None:
    """Return (n,) int64 classes: a dataset's `targets`, `labels` or second tensor, also through `Subset`; else None.

    Whole numbers of any shape (n,) or (n, 1), and true and false, are classes. See `named_labels` for others.
    """
    values = _found_values(dataset)
    return values.astype(np.int64) if values is not None and values.dtype.kind in NUMBERS else None


def named_labels(dataset: Any) -> tuple[np.ndarray, list[str] | None] | None:
    """Return classes as `dataset_labels` does, or else of text (in sorted order) and whole floats; and the names of text.

    Regression and captioning have such targets, too, so use this only for settings that need classes.
    """
    values = _found_values(dataset)
    return None if values is None else numbered(values)


def _found_values(dataset: Any) -> np.ndarray | None:
    """Return the numbers or texts, (n,), in which a data set names one target per sample; None without any."""
    tensors = getattr(dataset, "tensors", ())
    for candidate in (getattr(dataset, "targets", None), getattr(dataset, "labels", None), *tensors[1:2]):
        values = None if candidate is None else label_values(candidate, len(dataset))
        if values is not None:
            return _as_read(dataset, values.astype(np.int64)) if values.dtype.kind in NUMBERS else values
    if isinstance(dataset, Subset):
        whole = _found_values(dataset.dataset)
        return None if whole is None else whole[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [_found_values(part) for part in dataset.datasets]
        present_parts = [part for part in parts if part is not None]
        kinds = {part.dtype.kind in TEXT for part in present_parts}
        return np.concatenate(present_parts) if len(present_parts) == len(parts) and len(kinds) == 1 else None
    return None


def _as_read(dataset: Any, labels: np.ndarray) -> np.ndarray:
    """Return the classes of samples as torchvision reads them: through `target_transform`, if that gives whole numbers."""
    transform = getattr(dataset, "target_transform", None)
    if transform is None or not len(labels):
        return labels
    from torchvision.datasets import VisionDataset

    if not isinstance(dataset, VisionDataset):
        return labels
    with seeded(0):
        first = np.asarray(transform(int(labels[0])))
        if first.ndim or first.dtype.kind not in "iu":
            return labels
        return np.array([int(transform(int(label))) for label in labels], dtype=np.int64)
