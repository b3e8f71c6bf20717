"""Samples as training reads them: `Samples` is a data set, `Selection` the samples of one client.

`TensorSamples` is the fast path: all samples are tensors on the accelerator and a batch is a view of one gather.
`lightning_fl.data.samples.dataset_samples.DatasetSamples` reads any map-style `Dataset` through a `DataLoader`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from lightning_fl.data.users import Groups
from lightning_fl.errors import require

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Function from float images (B, C, H, W) and a CPU generator to images of the same shape and memory format."""


class Selection(ABC):
    """Some samples of a data set, ready for training: usually those of one client."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def batches(
        self, batch_size: int, generator: torch.Generator | None = None, share: Callable[[int], slice] | None = None
    ) -> Iterator[Any]:
        """Yield every sample once. The last batch contains the remaining samples and may be smaller.

        Args:
            batch_size: samples per batch, at least 1.
            generator: a CPU generator that first draws the order, `torch.randperm(len(self), generator=generator)`, and
                then any augmentation; None: the order given to `select`, without augmentation.
            share: returns the rows of a batch, given its size, of which alone a batch consists, where several processes train
                a client together; a batch without rows may be anything. Only given in this case.
        """

    @property
    def dataset(self) -> Subset | None:
        """The samples as part of the data set from which they are read, unchanged; None if there is no such data set."""
        return None


class Samples(ABC):
    """A data set that can be read client by client for training, and in order for evaluation."""

    labels: np.ndarray | None
    """Class of each sample, (n,) int64, or None if the samples have no classes."""
    class_names: list[str] | None = None
    """Names of the classes whose positions `labels` are, where targets are text; None: `labels` are the targets' own numbers."""
    groups: Groups | None = None
    """Group of each sample, such as its user; None: as `source` names it, if it does."""
    source: Any = None
    """Data set from which the samples are read, or None."""
    in_evaluation: Samples | None = None
    """The same samples as evaluation reads them, if that is not how `batches` does: other transforms, another collate_fn."""
    unknown_in_evaluation: Mapping[str, str] = MappingProxyType({})
    """Parts of the training pipeline that may change samples, where none is known for evaluation; each with its remedy."""

    @property
    def num_workers(self) -> int:
        """Processes that read batches of training ahead."""
        return 0

    @property
    @abstractmethod
    def resident(self) -> bool:
        """True if batches are already on the device given to `place`; otherwise their reader has to move them."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def place(self, device: torch.device) -> None:
        """Prepare to feed `device`, the accelerator of the training; called once, before it."""

    @abstractmethod
    def select(self, indices: np.ndarray) -> Selection:
        """Select the samples at `indices` (int64), in that order."""

    @abstractmethod
    def stored(self, indices: np.ndarray) -> list[Tensor]:
        """Return the samples at `indices` (int64, not empty) in the format for sending: uint8 as is, int64 as int32."""

    @abstractmethod
    def batches(self, batch_size: int, indices: np.ndarray | None = None) -> Iterator[Any]:
        """Yield the samples (at `indices`; None: all) in order, without augmentation, one batch in memory at a time.

        Args:
            batch_size: samples per batch, at least 1; the last batch may be smaller.
            indices: (m,) int64, or None for all.
        """

    def end_workers(self) -> None:  # noqa: B027 -- most samples have none
        """End the processes that read batches of training, if there are any; the next pass starts new ones."""


class TensorSamples(Samples):
    """Samples that are rows of tensors. A batch is a list, as a `TensorDataset`'s, or the tensor itself if there is one.

    A uint8 first tensor contains images: it is stored as uint8 and read as float32 in [0, 1]. Batches are copies, which a module
    may change in place.

    Args:
        *tensors: tensors of equal first dimension n, usually (n, C, H, W) images and (n,) int64 classes.
        labels: (n,) integers; None: the second tensor, if it contains one integer per sample.
        groups: group of each sample; None if it is unknown.
        transform: function of float batches of the first tensor, such as `Normalize`; a module moves with `place`.
        augment: function applied to a client's images anew in every shuffled pass, before `transform`.
        lists: True if a batch of a single tensor is a list, too, as of a `TensorDataset` of one tensor.

    Raises:
        UserError: there is no tensor, or tensors or labels differ in length.
    """

    resident = True
    """The tensors are on the device."""

    def __init__(
        self,
        *tensors: Tensor,
        labels: np.ndarray | None = None,
        groups: Groups | None = None,
        transform: Callable[[Tensor], Tensor] | None = None,
        augment: Augment | None = None,
        lists: bool = False,
    ) -> None:
        require(len(tensors) > 0, "TensorSamples needs at least one tensor.")
        lengths = [len(tensor) for tensor in tensors]
        if labels is None and len(tensors) > 1 and tensors[1].ndim == 1 and not _is_real(tensors[1]):
            labels = tensors[1].cpu().numpy()
        lengths += [] if labels is None else [len(labels)]
        lengths += [] if groups is None else [len(groups.codes)]
        require(
            len(set(lengths)) == 1,
            f"Samples, targets, labels and groups must have one length, but theirs are {lengths}.",
        )
        self.labels = None if labels is None else np.asarray(labels, dtype=np.int64)
        self.groups = groups
        self.transform = transform
        self.augment = augment
        self._lists = lists or len(tensors) > 1
        self._stored = [tensor.contiguous() for tensor in tensors]

    @property
    def inputs(self) -> Tensor:
        """First tensor as it is stored, (n, …), before `place`; images may be bytes."""
        return self._stored[0]

    @inputs.setter
    def inputs(self, inputs: Tensor) -> None:
        self._stored[0] = inputs.contiguous()

    @property
    def sample_shape(self) -> torch.Size:
        """Shape of one sample of the first tensor, such as (C, H, W)."""
        return self._stored[0].shape[1:]

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._stored[0])

    def place(self, device: torch.device) -> None:
        """Move the tensors to `device`."""
        self._stored = [tensor.to(device) for tensor in self._stored]
        if isinstance(self.transform, nn.Module):
            self.transform.to(device)

    def select(self, indices: np.ndarray) -> TensorSelection:
        """Select the samples at `indices`; each pass gathers them once. Those that have to be converted are, once for all."""
        return TensorSelection(self, [indices])

    def batches(self, batch_size: int, indices: np.ndarray | None = None) -> Iterator[Any]:
        """Yield the samples in order, converted batch by batch: see `Samples.batches`."""
        for start in range(0, len(self) if indices is None else len(indices), batch_size):
            if indices is None:
                stored = [
                    tensor[start : start + batch_size].clone() for tensor in self._stored
                ]  # not the data set itself
            else:
                stored = self.gather(indices[start : start + batch_size])
            first = self._as_float(stored[0])
            if self.transform is not None:
                first = self.transform(first)
            yield [first, *stored[1:]] if self._lists else first

    def stored(self, indices: np.ndarray) -> list[Tensor]:
        """Return the tensors' rows: see `Samples.stored`."""
        return [rows.int() if rows.dtype == torch.int64 else rows for rows in self.gather(indices)]

    def channel_moments(self, indices: np.ndarray, rows: int = 2048) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation per channel of the first tensor at `indices`, read without `transform`.

        Args:
            indices: (m,) int64, not empty.
            rows: number of samples to convert at a time.

        Returns:
            Two (C,) float64 tensors on the CPU.
        """
        total = torch.zeros(2, self.sample_shape[0], dtype=torch.float64)
        num_values = len(indices) * self.sample_shape[1:].numel()
        for start in range(0, len(indices), rows):
            part = self._as_float(self.gather(indices[start : start + rows])[0]).double()
            channels = part.transpose(0, 1).flatten(1)
            total += torch.stack([channels.sum(1), channels.square().sum(1)]).cpu()
        mean, square = total / num_values
        return mean, (square - mean.square()).clamp_min(0).sqrt()

    def gather(self, indices: np.ndarray) -> list[Tensor]:
        """Return copies of the tensors' rows at `indices` (int64), as they are stored."""
        return rows_of(self._stored, torch.as_tensor(indices))

    @property
    def is_converted(self) -> bool:
        """True if a client's samples are read as other numbers than the stored ones, except for augmentation."""
        return self._stored[0].dtype == torch.uint8 or (self.transform is not None and self.augment is None)

    @property
    def bytes_of_a_sample(self) -> int:
        """Bytes of a sample as it is read."""
        first, *others = self._stored
        width = 4 if first.dtype == torch.uint8 else first.element_size()
        return first.shape[1:].numel() * width + sum(t.shape[1:].numel() * t.element_size() for t in others)

    def converted(self, parts: Sequence[np.ndarray]) -> list[Tensor]:
        """Return the samples at the indices of all parts, converted; each part is that of one client."""
        first, *others = self.gather(np.concatenate(parts))
        first = self._as_float(first)
        # The standard recipe augments before it normalises (the border is black): then each pass normalises.
        if self.transform is None or self.augment is not None:
            return [first, *others]
        # A user's function may round a number in another way beside other samples, so it sees each client by itself.
        whole = len(parts) == 1 or isinstance(self.transform, Normalize)
        split = [first] if whole else first.split([len(part) for part in parts])
        read = [self.transform(part) for part in split]
        return [read[0] if len(read) == 1 else torch.cat(read), *others]

    def read(self, tensors: list[Tensor], generator: torch.Generator | None = None) -> list[Tensor]:
        """Return gathered samples in the shape in which a module reads them; with a generator, augmented."""
        if self.augment is not None:
            first, *others = tensors
            if generator is not None and len(first):
                first = self.augment(first, generator)
            if self.transform is not None:
                first = self.transform(first)
            return [first, *others]
        return tensors

    @property
    def lists(self) -> bool:
        """True if a batch is a list, False if it is the only tensor."""
        return self._lists

    @staticmethod
    def _as_float(tensor: Tensor) -> Tensor:
        return tensor.float().div_(255) if tensor.dtype == torch.uint8 else tensor


def rows_of(tensors: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """Return copies of the rows of tensors at `index` (int64 on the CPU), for which the host does not wait."""
    if tensors[0].device.type != "cpu":
        index = index.to(tensors[0].device, non_blocking=True)
    return [tensor.index_select(0, index) for tensor in tensors]


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class TensorRows(Dataset):
    """Data set of `TensorSamples`, for those who ask a loader for its `dataset`.

    >>> rows = TensorRows(TensorSamples(torch.zeros(3, 2), torch.arange(3)))
    >>> len(rows), rows[1]
    (3, (tensor([0., 0.]), tensor(1)))
    """

    def __init__(self, samples: TensorSamples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        """Return a sample as training reads it, without augmentation: a tensor, or a tuple of several."""
        batch = next(self._samples.batches(1, np.array([index])))
        return tuple(x[0] for x in batch) if self._samples.lists else batch[0]


class TensorSelection(Selection):
    """Rows of `TensorSamples`, usually those of one client; `join` makes one of the rows of several."""

    __slots__ = ("_converted", "_indices", "_parts", "_samples")

    def __init__(self, samples: TensorSamples, parts: Sequence[np.ndarray]) -> None:
        self._samples = samples
        self._parts = parts
        self._indices = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._converted: list[Tensor] | None = None

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._indices)

    @property
    def dataset(self) -> Subset:
        """See `Selection.dataset`; samples that come from no data set are `TensorRows`."""
        source = TensorRows(self._samples) if self._samples.source is None else self._samples.source
        return Subset(source, self._indices.tolist())

    @staticmethod
    def join(selections: Sequence[Any]) -> TensorSelection | None:
        """Return the rows of several selections, one after the other; None if they must be read one by one.

        Selections of other kinds must be, and augmented ones, whose draws and orders come from one generator.
        """
        if not selections or not all(isinstance(selection, TensorSelection) for selection in selections):
            return None
        (samples, *others) = {id(selection._samples): selection._samples for selection in selections}.values()
        if others or samples.augment is not None:
            return None
        return TensorSelection(samples, [part for selection in selections for part in selection._parts])

    @property
    def bytes_of_a_sample(self) -> int:
        """Bytes of a sample as it is read."""
        return self._samples.bytes_of_a_sample

    def gather(self, positions: np.ndarray | None = None, generator: torch.Generator | None = None) -> Any:
        """Return one batch of copies of the samples at `positions` (int64) in this selection, or of all.

        Args:
            positions: in any order; None for all in their order.
            generator: CPU generator of the augmentation; None for none.
        """
        samples = self._samples
        if not samples.is_converted:
            tensors = samples.gather(self._indices if positions is None else self._indices[positions])
        else:
            if self._converted is None:
                self._converted = samples.converted(self._parts)
            tensors = self._converted
            tensors = (
                [t.clone() for t in tensors] if positions is None else rows_of(tensors, torch.from_numpy(positions))
            )
        tensors = samples.read(tensors, generator)
        return tensors if samples.lists else tensors[0]

    def batches(
        self, batch_size: int, generator: torch.Generator | None = None, share: Callable[[int], slice] | None = None
    ) -> Iterator[Any]:
        """Yield every sample once, as views of one copy: see `Selection.batches`."""
        num_samples = len(self._indices)
        positions = None if generator is None else torch.randperm(num_samples, generator=generator).numpy()
        if not num_samples:
            return iter(())
        batch = self.gather(positions, generator)
        if share is not None:  # the draws of all samples are made, so that they are those of one process
            return _shares(batch, batch_size, share)
        if num_samples <= batch_size:
            # Many federated clients have a single batch: skip the split, which would take a third of the pass.
            return iter((batch,))
        if isinstance(batch, Tensor):
            return iter(batch.split(batch_size))
        return map(list, zip(*[tensor.split(batch_size) for tensor in batch], strict=True))


def _shares(samples: Any, batch_size: int, share: Callable[[int], slice]) -> Iterator[Any]:
    """Yield some rows of each batch of a tensor, or of a list of tensors."""
    for start in range(0, len(samples if isinstance(samples, Tensor) else samples[0]), batch_size):
        batch = [x[start : start + batch_size] for x in ([samples] if isinstance(samples, Tensor) else samples)]
        rows = [x[share(len(x))] for x in batch]
        yield rows[0] if isinstance(samples, Tensor) else rows


class Normalize(nn.Module):
    """Subtract `mean` from images and divide by `std`, channel by channel.

    Args:
        mean: (C,) in the units of the images.
        std: (C,) in the units of the images; a constant channel (0) is only centred.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        shape = (-1, 1, 1)
        self.register_buffer("mean", mean.float().view(shape))
        self.register_buffer("scale", torch.where(std > 0, 1 / std, 1.0).float().view(shape))

    def forward(self, images: Tensor) -> Tensor:
        """Normalise (B, C, H, W) float images; the memory format is kept."""
        return (images - self.mean) * self.scale
