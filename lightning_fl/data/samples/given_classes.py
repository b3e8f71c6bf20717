"""Classes of samples that the user names, for data sets that do not keep them in `targets`, `labels` or `tensors[1]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from lightning_fl.data.sampled import of_sampled
from lightning_fl.data.samples.dataset_samples import seeded
from lightning_fl.data.samples.labels import label_values, numbered
from lightning_fl.errors import UserError, nearest, require


def given_classes(class_of: Any, dataset: Any) -> tuple[np.ndarray, list[str] | None]:
    """Return the class of each sample, (n,) int64, as a user gives it, and the names of classes that are text, in sorted order.

    A function or a sample's entry reads all samples once.

    Args:
        class_of: class of each sample (n,), a function from a sample to its class, or the name of an attribute or column of the
            dataset, or else of each sample: an attribute, or a key of a dictionary.
        dataset: data set of the samples; its random draws leave the global generators as they are.

    Raises:
        UserError: `class_of` gives each sample neither a whole number nor text.
    """
    if isinstance(class_of, str):
        attribute = _named(dataset, class_of)
        values = _read(dataset, lambda sample: _entry(sample, class_of)) if attribute is None else attribute
    elif isinstance(class_of, Callable):  # type: ignore[arg-type]
        values = _read(dataset, class_of)
    else:
        values = of_sampled(class_of, dataset)
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
    try:
        classes = np.asarray(values)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"class_of gives no array of classes, (n,): {error}.") from error
    classes = classes[:, 0] if classes.ndim == 2 and classes.shape[1] == 1 else classes
    require(
        classes.shape == (len(dataset),),
        f"class_of must give one class per sample, ({len(dataset)},), but gives an array of shape {classes.shape}.",
    )
    if classes.dtype.kind == "f":
        whole = classes == np.round(classes)
        require(
            bool(whole.all()),
            f"class_of must give whole numbers or text, but sample {int(whole.argmin()):,} has {classes[whole.argmin()]!s}.",
        )
    values = label_values(classes, len(dataset))
    found = None if values is None else numbered(values)
    if found is None:
        raise UserError(f"class_of must give whole numbers or text, but the classes are {classes.dtype}.")
    return found


def _read(dataset: Any, class_of: Callable[[Any], Any]) -> list[Any]:
    """Return what a function says about each sample."""
    values = []
    with seeded(0):
        for index in range(len(dataset)):
            sample = dataset[index]
            try:
                values.append(_number(class_of(sample)))
            except UserError:
                raise
            except Exception as error:  # of the user's function
                said = f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
                raise UserError(
                    f"class_of finds no class in sample {index:,}, a {type(sample).__name__}: {said}."
                ) from error
    return values


def _number(value: Any) -> Any:
    """Return a class, also one in a tensor or an array of one element, as a plain number."""
    item = getattr(value, "item", None)
    return item() if callable(item) else value


def _entry(sample: Any, name: str) -> Any:
    if isinstance(sample, Mapping):
        keys = [str(key) for key in sample]
        require(name in sample, f"class_of={name!r} is no key of the samples; {nearest(name, keys)}.")
        return sample[name]
    try:
        return getattr(sample, name)
    except AttributeError:
        raise UserError(
            f"class_of={name!r} is neither an attribute of the data set nor of its samples ({type(sample).__name__}): give the "
            "name of one, or a function from a sample to its class."
        ) from None


def _named(dataset: Any, name: str) -> Any:
    """Return an attribute or column of a data set that has an entry for each sample, also through `Subset`; else None."""
    values = dataset[name] if name in (getattr(dataset, "column_names", None) or ()) else getattr(dataset, name, None)
    with suppress(TypeError):  # it is nothing with a length
        if len(values) == len(dataset):  # type: ignore[arg-type]
            return values
    if isinstance(dataset, Subset):
        whole = _named(dataset.dataset, name)
        return None if whole is None else np.asarray(whole)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [_named(part, name) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate(parts)
    return None
