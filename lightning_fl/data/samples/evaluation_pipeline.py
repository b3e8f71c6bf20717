"""Read training samples as evaluation does: with the transforms and the collate function of a validation loader.

Clients hold out some of their training samples, and the server's samples are evaluated, too. Random crops, noise or MixUp of
the training pipeline would distort these evaluations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

from lightning_fl.data.samples.dataset_samples import DatasetSamples, ReadInBatches
from lightning_fl.data.samples.tensor_samples import Samples
from lightning_fl.errors import require

TRANSFORMS = ("transform", "target_transform", "transforms")
"""Attributes in which data sets keep their transforms, as torchvision's do."""
ATTRIBUTE = "eval_transform, for which the data set needs an attribute transform,"
"""Remedy for a data set that may change samples without a transform that is known."""


@dataclass(frozen=True)
class EvaluationPipeline:
    """Transforms and collate function with which evaluation reads samples, as far as they are known.

    Attributes:
        loaders: validation or test loaders, whose transforms and collate function are taken where none is given.
        transform: given function of each input; None: none is given.
        collate_fn: given function from a list of samples to a batch; None: none is given.
    """

    loaders: tuple[DataLoader, ...] = ()
    transform: Callable[[Any], Any] | None = None
    collate_fn: Callable[[list], Any] | None = None

    def read(self, train: Samples, dataset: Dataset, collate_fn: Callable[[list], Any] | None) -> Samples:
        """Return the training samples as evaluation reads them: `train` itself if it reads them in the same way.

        Parts that are not found stay as in training; `train.unknown_in_evaluation` then lists them.

        Args:
            train: training samples.
            dataset: data set from which they are read.
            collate_fn: collate function that reads them; None: PyTorch's default.

        Raises:
            UserError: a transform is given, but the data set has none.
        """
        loaders = [one for one in self.loaders if (one.batch_sampler is None) == isinstance(dataset, ReadInBatches)]
        found, shown_by = None, next((one for one in loaders if _class(one.dataset) is _class(dataset)), None)
        if self.transform is not None:
            found = with_transform(dataset, self.transform)
            require(
                found is not None,
                f"eval_transform is given, but {_name(dataset)} has no attribute transform, in whose place it would be used: "
                "give the data set one.",
            )
        for loader in loaders if found is None else ():
            found = with_transforms_of(dataset, loader.dataset)
            if found is not None:
                shown_by = loader
                break
        collate = self.collate_fn or (None if shown_by is None else shown_by.collate_fn)
        train.unknown_in_evaluation = _unknown(dataset if found is None else None, collate or collate_fn, collate)
        found, collate = dataset if found is None else found, collate or collate_fn
        if found is dataset and _plain(collate) is _plain(collate_fn):
            return train
        if isinstance(train, DatasetSamples):
            return train.reading(found, collate)
        return DatasetSamples(found, collate)


def say_unknown(samples: Samples) -> None:
    """Print once that evaluation reads training samples as training does, if nothing else is known; warn of known transforms."""
    unknown, samples.unknown_in_evaluation = samples.unknown_in_evaluation, {}
    if not unknown:
        return
    say = rank_zero_info if list(unknown.values()) == [ATTRIBUTE] else rank_zero_warn
    say(
        "No validation loader or argument shows how to read held-out samples, so evaluation reads them as training does, through "
        f"{' and '.join(unknown)}: give {' and '.join(unknown.values())} if training changes them at random."
    )


def with_transforms_of(dataset: Any, other: Any) -> Any:
    """Return a data set, or a shallow copy, that reads its samples with the transforms of another of the same class.

    Subsets, concatenations and wrappers of data sets are looked into.

    Args:
        dataset: data set of the training samples.
        other: data set of a validation loader.

    Returns:
        `dataset` itself if both have the same transforms, or the same data set is below; None if nothing is known.
    """
    if isinstance(dataset, Subset):
        return _changed(dataset, {"dataset": with_transforms_of(dataset.dataset, other)})
    if isinstance(other, Subset):
        return with_transforms_of(dataset, other.dataset)
    if isinstance(dataset, ConcatDataset):
        paired = isinstance(other, ConcatDataset) and len(other.datasets) == len(dataset.datasets)
        others = other.datasets if paired else [other] * len(dataset.datasets)
        parts = [with_transforms_of(*pair) for pair in zip(dataset.datasets, others, strict=True)]
        if any(part is None for part in parts):
            return None
        same = all(part is own for part, own in zip(parts, dataset.datasets, strict=True))
        return dataset if same else _changed(dataset, {"datasets": parts})
    if isinstance(other, ConcatDataset):
        return next((found for one in other.datasets if (found := with_transforms_of(dataset, one)) is not None), None)
    if dataset is other:
        return dataset
    if type(dataset) is not type(other):
        return None
    if type(dataset) is TensorDataset:
        return dataset
    if _is_hugging_face(dataset):
        return dataset if dataset.format == other.format else _formatted(dataset, other.format)
    own, others = (getattr(one, "__dict__", {}) for one in (dataset, other))  # a list has none
    changes = {name: others[name] for name in TRANSFORMS if name in own and name in others}
    for name in own.keys() & others.keys():
        if isinstance(own[name], Dataset) and isinstance(others[name], Dataset):
            changes[name] = with_transforms_of(own[name], others[name])
    return _changed(dataset, changes)


def with_transform(dataset: Any, transform: Callable[[Any], Any]) -> Any:
    """Return a shallow copy of a data set that reads its inputs with `transform`; None if neither it nor one inside has any."""
    if isinstance(dataset, ConcatDataset):
        parts = [with_transform(part, transform) for part in dataset.datasets]
        return None if any(part is None for part in parts) else _changed(dataset, {"datasets": parts})
    if _is_hugging_face(dataset):
        return dataset.with_transform(transform)
    own = getattr(dataset, "__dict__", {})
    if "transform" in own:
        changes = {"transform": transform}
        if hasattr(own.get("transforms"), "target_transform"):  # torchvision's pair of both
            changes["transforms"] = _changed(own["transforms"], {"transform": transform})
        return _changed(dataset, changes)
    inner = {name: with_transform(part, transform) for name, part in own.items() if isinstance(part, Dataset)}
    return _changed(dataset, inner)


def loaders_in(loaders: Any) -> tuple[DataLoader, ...]:
    """Return the loaders of map-style data sets in what `val_dataloader()` returned: one, or a list, mapping or combination."""
    if isinstance(loaders, DataLoader):
        return (loaders,) if hasattr(loaders.dataset, "__getitem__") else ()
    inner = getattr(loaders, "flattened", loaders)
    parts: Iterable[Any] = (
        inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list | tuple) else ()
    )
    return tuple(loader for part in parts for loader in loaders_in(part))


def _changed(dataset: Any, changes: dict[str, Any]) -> Any:
    """Return a shallow copy with other attributes, or the data set itself if all stay; None if no value is known."""
    known = {name: value for name, value in changes.items() if value is not None or name in TRANSFORMS}
    if not known:
        return None
    if all(getattr(dataset, name) is value for name, value in known.items()):
        return dataset
    changed = copy.copy(dataset)
    for name, value in known.items():
        object.__setattr__(changed, name, value)
    return changed


def _is_hugging_face(dataset: Any) -> bool:
    return all(hasattr(dataset, name) for name in ("column_names", "format", "with_format", "with_transform"))


def _formatted(dataset: Any, form: dict[str, Any]) -> Any:
    """Return a Hugging Face data set in the format of another, which includes its transform, for the columns that it has."""
    options = {name: value for name, value in form.items() if name != "format_kwargs"}
    if options["columns"] is not None:
        options["columns"] = [name for name in options["columns"] if name in dataset.column_names]
    return dataset.with_format(**options, **form["format_kwargs"])


def _unknown(
    dataset: Any, collate_fn: Callable[[list], Any] | None, shown: Callable[[list], Any] | None
) -> dict[str, str]:
    """Return what may change samples in training and is not known of evaluation, in words, and the remedy of each.

    Args:
        dataset: data set whose transforms in evaluation are unknown; None if they are known.
        collate_fn: collate function that reads its samples.
        shown: collate function of evaluation, if known.
    """
    unknown = {}
    if dataset is not None and _has_transform(dataset):
        unknown[f"the transform of {_name(dataset)}"] = "eval_transform"
    elif dataset is not None and _name(dataset) != TensorDataset.__name__:
        unknown[f"{_name(dataset)}.__getitem__"] = ATTRIBUTE
    if shown is None and _plain(collate_fn) is not None:
        unknown[f"the collate_fn {getattr(collate_fn, '__name__', type(collate_fn).__name__)}"] = "eval_collate_fn"
    return unknown


def _has_transform(dataset: Any) -> bool:
    if _is_hugging_face(dataset):
        return dataset.format["type"] == "custom"
    if isinstance(dataset, ConcatDataset):
        return any(map(_has_transform, dataset.datasets))
    own = getattr(dataset, "__dict__", {})
    inside = (part for part in own.values() if isinstance(part, Dataset))
    return any(own.get(name) is not None for name in TRANSFORMS) or any(map(_has_transform, inside))


def _plain(collate_fn: Callable[[list], Any] | None) -> Callable[[list], Any] | None:
    """Return a collate function, or None for PyTorch's default."""
    return None if collate_fn is default_collate else collate_fn


def _class(dataset: Any) -> type:
    """Return the class of the data set inside subsets and concatenations."""
    while isinstance(dataset, Subset | ConcatDataset):
        dataset = dataset.dataset if isinstance(dataset, Subset) else dataset.datasets[0]
    return type(dataset)


def _name(dataset: Any) -> str:
    return _class(dataset).__name__
