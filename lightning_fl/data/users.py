"""Groups of samples: the user, writer or speaker of each sample, who becomes a client with the partition `ByGroup`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from lightning_fl.data.sampled import Sampled, of_sampled
from lightning_fl.errors import UserError, nearest, require

ATTRIBUTES = ("groups", "users", "client_ids")
"""Attributes of a data set that name the group of each sample."""


class Samples(Protocol):
    """Attributes of `Samples` that say who their groups are."""

    @property
    def groups(self) -> Groups | None:
        """Group of each sample, if known."""

    @property
    def source(self) -> Any:
        """Data set from which the samples are read, or None."""

    def __len__(self) -> int:
        """Number of samples."""


@dataclass(frozen=True)
class Groups:
    """The group of each sample.

    Attributes:
        codes: position in `names` of each sample's group, (n,) integers.
        names: names of the groups, (G,) strings, different from each other and in sorted order, so that the order of the
            samples does not matter; by value if all are whole numbers, also as text.
    """

    codes: np.ndarray
    names: np.ndarray

    @classmethod
    def of(cls, values: Any) -> Groups:
        """Number the groups of samples.

        Args:
            values: name of each sample's group, (n,): text or whole numbers.

        Raises:
            UserError: a sample has no name.

        >>> Groups.of(["b", "a", "b"]).codes.tolist(), Groups.of([10, 9]).names.tolist()
        ([1, 0, 1], ['9', '10'])
        """
        named = as_names(values)
        require(named.ndim == 1, f"groups must name one group per sample, (n,), but has the shape {named.shape}.")
        missing = _missing(named) | np.ma.getmaskarray(values if isinstance(values, np.ma.MaskedArray) else named)
        if missing.any():
            raise UserError(
                f"groups has no name for {missing.sum():,} of {len(named):,} samples, the first of which is sample "
                f"{missing.argmax():,}: name the group of every sample, or leave these samples out of the data."
            )
        if named.dtype.kind == "S":
            named = np.char.decode(named)
        elif named.dtype.kind == "f" and bool((named == np.round(named)).all() and (np.abs(named) < 2**53).all()):
            named = named.astype(np.int64)
        elif named.dtype.kind not in "iuU":
            named = np.array([value.decode() if isinstance(value, bytes) else str(value) for value in named], dtype=str)
        names, codes = np.unique(named, return_inverse=True)
        if named.dtype.kind == "U" and bool(np.char.isdecimal(names).all()):
            order = np.array(
                sorted(range(len(names)), key=lambda place: (int(names[place]), names[place])), dtype=np.int64
            )
            names, codes = names[order], np.argsort(order)[codes]
        names = names.astype(str)
        width = max(1, int(np.char.str_len(names).max(initial=1)))
        return cls(codes, names.astype(f"<U{width}"))  # numbers as text would take 84 bytes each

    def __len__(self) -> int:
        """Number of groups, G."""
        return len(self.names)

    def take(self, indices: np.ndarray) -> Groups:
        """Return the groups of the samples at `indices`, under the same numbers."""
        return Groups(self.codes[indices], self.names)

    def codes_of(self, names: np.ndarray) -> np.ndarray:
        """Return the numbers of groups by their names; -1 for a name that is not among these."""
        if not len(self.names):
            return np.full(len(names), -1)
        order = np.argsort(self.names)
        places = np.minimum(np.searchsorted(self.names, names, sorter=order), len(order) - 1)
        return np.where(self.names[order[places]] == names, order[places], -1)


def as_names(values: Any) -> np.ndarray:
    """Return names as an array, in which a missing one stays missing: NumPy would write NaN among texts as the text 'nan'."""
    named = np.asarray(values)
    is_text = named.dtype.kind in "US" and isinstance(values, (list, tuple))
    if is_text and any(not isinstance(value, (str, bytes)) and _is_missing(value) for value in values):
        return np.array(values, dtype=object)
    return named


def _missing(named: np.ndarray) -> np.ndarray:
    """Return for each name whether it is missing: empty, None, NaN, NaT or pandas' NA."""
    kind = named.dtype.kind
    if kind == "O":
        return np.array([_is_missing(value) for value in named], dtype=bool)
    if kind in "fc":
        return np.isnan(named)
    if kind in "mM":
        return np.isnat(named)
    return named == named.dtype.type() if kind in "US" else np.zeros(len(named), dtype=bool)


def _is_missing(value: Any) -> bool:
    try:
        return value is None or bool(value != value) or (isinstance(value, (str, bytes)) and not value)
    except (TypeError, ValueError):  # pandas' NA is neither equal to itself nor different
        return True


def groups_of(samples: Samples, group_of: Any = None) -> Groups | None:
    """Return the groups of samples: the given ones, else their own, else those that their data set names.

    Args:
        samples: samples with `groups`, or read from a data set with `groups`, `users` or `client_ids`.
        group_of: see `given_groups`; None: nothing is given.
    """
    if group_of is not None:
        return given_groups(group_of, samples.source, len(samples))
    if samples.groups is not None:
        return samples.groups
    return next((groups for name in ATTRIBUTES if (groups := _named(samples.source, name)) is not None), None)


def groups_of_test(samples: Samples, group_of: Any) -> Groups | None:
    """Return the groups of test samples; a column of the training data names them if the test data have it, too.

    Args:
        samples: the test samples.
        group_of: what the user gives for the training samples.
    """
    return _named(samples.source, group_of) if isinstance(group_of, str) else groups_of(samples)


def given_groups(group_of: Any, dataset: Any, num_samples: int) -> Groups:
    """Return the groups that a user gives.

    Args:
        group_of: name of each sample's group (n,), a function from a sample's index to it, or the name of an attribute or column
            of the dataset. Of a sampler's samples the index is that in the whole data set, and an array may be for it.
        dataset: data set of the samples, or None.
        num_samples: n.

    Raises:
        UserError: `given` does not name the group of every sample.
    """
    if isinstance(group_of, str):
        groups_of_column = _named(dataset, group_of)
        if groups_of_column is None:
            columns = _columns(dataset)
            hint = nearest(group_of, columns) if columns else "give an array (n,) or a function from index to name"
            raise UserError(f"groups={group_of!r} is no column of the data with a name per sample; {hint}.")
        return groups_of_column
    if isinstance(group_of, Callable):  # type: ignore[arg-type]
        indices = dataset.indices if isinstance(dataset, Sampled) else range(num_samples)
        return Groups.of([_name_by(group_of, index) for index in indices])
    try:
        groups = Groups.of(of_sampled(group_of, dataset))
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(f"groups is no array (n,): {error}.") from error
    require(
        len(groups.codes) == num_samples,
        f"groups names the groups of {len(groups.codes):,} samples, but the data have {num_samples:,} training samples.",
    )
    return groups


def _name_by(group_of: Callable[[int], Any], index: int) -> Any:
    """Return the name that the user's function gives to a sample."""
    try:
        return group_of(index)
    except UserError:
        raise
    except Exception as error:  # of the user's function
        said = f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
        raise UserError(f"groups finds no name for sample {index:,}: {said}.") from error


def _columns(dataset: Any) -> list[str]:
    if isinstance(dataset, Subset):
        return _columns(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return _columns(dataset.datasets[0])
    columns = getattr(dataset, "column_names", None)
    return [str(column) for column in columns] if isinstance(columns, list) else []


def _named(dataset: Any, name: str) -> Groups | None:
    """Return the groups that an attribute or a column of a dataset names; None if it names no group for each sample."""
    own = _own_names(dataset, name)
    if own is not None:
        return own
    if isinstance(dataset, Subset):
        whole = _named(dataset.dataset, name)
        if whole is None:
            return None
        codes = whole.codes[np.asarray(dataset.indices, dtype=np.int64)]
        return Groups.of(whole.names[codes])
    if isinstance(dataset, ConcatDataset):
        parts = [_named(part, name) for part in dataset.datasets]
        present = [part for part in parts if part is not None]
        return (
            Groups.of(np.concatenate([part.names[part.codes] for part in present]))
            if len(present) == len(parts)
            else None
        )
    return None


def _own_names(dataset: Any, name: str) -> Groups | None:
    """Return the groups that a dataset itself names, and not the ones of which it is made."""
    attribute = getattr(dataset, name, None)
    if isinstance(attribute, Groups):
        return attribute
    # Of a Hugging Face dataset this reads no other column.
    if hasattr(dataset, "column_names") and name in _columns(dataset):
        try:
            column = dataset.select_columns(name).with_format("arrow")[:].column(0).combine_chunks().dictionary_encode()
        except NotImplementedError:  # lists, which are no names
            return None
        names = column.dictionary.to_pylist()
        if not column.null_count and "" not in names:
            sorted_names = Groups.of(names)
            return Groups(sorted_names.codes[column.indices.to_numpy()], sorted_names.names)
        attribute = [None if number is None else names[number] for number in column.indices.to_pylist()]
    try:
        values = as_names(attribute)
    except ValueError:
        return None
    return Groups.of(values) if values.ndim == 1 and len(values) == len(dataset) else None
