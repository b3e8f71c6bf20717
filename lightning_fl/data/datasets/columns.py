"""Columns of a Hugging Face data set as arrays: numbers, text, the classes of targets by their names, and tokens of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fl.data.split_checks import are_quantities, warn_of_gaps
from lightning_fl.errors import UserError, nearest, require

TEXT, CLASS_LABELS, WHOLE, REAL, LISTS = "text", "class labels", "whole numbers", "real numbers", "lists"
RECONCILED = {
    (TEXT, CLASS_LABELS),
    (CLASS_LABELS, TEXT),
    (CLASS_LABELS, WHOLE),  # `datasets` writes class labels to CSV and JSON as their numbers
    (WHOLE, CLASS_LABELS),
    (REAL, WHOLE),
}
"""Kinds of training and of test targets that are different and fit together."""


@dataclass(frozen=True)
class Targets:
    """Targets of a split.

    Attributes:
        values: (n, …) numbers; of text and class labels positions in `names`, (n,) integers.
        names: names of the classes; None if the targets have none.
        kind: text, class labels, whole numbers, real numbers or lists.
        place: name of the split in error messages.
    """

    values: np.ndarray
    names: list[str] | None
    kind: str
    place: str

    @classmethod
    def read(cls, part: Any, column: str, place: str) -> Targets:
        """Read a column of a split."""
        values, names = column_values(part, column, place), getattr(part.features[column], "names", None)
        if values.ndim != 1:
            return cls(values, None, LISTS, place)
        if values.dtype.kind == "U":
            texts, codes = np.unique(values, return_inverse=True)
            return cls(codes, texts.tolist(), TEXT, place)
        if values.dtype.kind == "f":
            return cls(values, None, REAL, place)
        return cls(values, names, WHOLE if names is None else CLASS_LABELS, place)


def number_classes(
    train: Targets, test: Targets | None, column: str, needed_by: str = ""
) -> tuple[tuple[np.ndarray | None, np.ndarray | None], int | None]:
    """Return the class of each training and of each test sample, (n,) int64, and the number of classes; None without classes.

    Args:
        train: targets of the training samples.
        test: targets of the test samples, or None.
        column: name of their column.
        needed_by: setting that needs classes; empty if none does.

    Raises:
        UserError: the kinds of the targets do not fit together, or a test label is no class of the training data.
    """
    if test is not None:
        require(
            train.kind == test.kind or (train.kind, test.kind) in RECONCILED,
            f"target={column!r} has {train.kind} in {train.place} but {test.kind} in {test.place}: give both one kind.",
        )
    if train.kind in (REAL, LISTS):
        return (None, None), None
    codes = [train.values.astype(np.int64)]
    if train.names is None and are_quantities(codes[0], f"make the column {column!r} class labels or text", needed_by):
        return (None, None), None
    if test is not None:
        by_name = train.names is not None and test.names is not None
        codes.append(_renumbered(test, train, column) if by_name else test.values.astype(np.int64))
    if train.names is None:
        num_classes = int(np.concatenate(codes).max()) + 1
        warn_of_gaps(np.concatenate(codes), num_classes, f"correct the column {column!r}")
    else:
        num_classes = len(train.names)
    return (codes[0], codes[1] if len(codes) > 1 else None), num_classes


def _renumbered(test: Targets, train: Targets, column: str) -> np.ndarray:
    """Return the numbers that the names of the test samples' classes have in the training data."""
    assert train.names is not None
    assert test.names is not None
    number = {name: position for position, name in enumerate(train.names)}
    for code in np.unique(test.values).tolist():
        label = test.names[code] if 0 <= code < len(test.names) else code
        require(
            label in number,
            f"target={column!r} of {test.place} has the label {label!r}, which is no class of {train.place}; "
            f"{nearest(str(label), train.names)}.",
        )
    return np.array([number.get(name, -1) for name in test.names], dtype=np.int64)[test.values]


def column_values(part: Any, column: str, place: str) -> np.ndarray:
    """Return a column as an array (n, …) of numbers or of text; no other column is read.

    Raises:
        UserError: a row lacks a value, or the values are neither numbers, equally long lists of numbers nor text.
    """
    chunks = part.select_columns(column).with_format("arrow")[:].column(0).chunks
    starts = np.cumsum([0, *map(len, chunks)])
    missing = np.concatenate(
        [np.zeros(0, dtype=np.int64), *(s + _missing(c) for s, c in zip(starts, chunks, strict=False))]
    )
    require(
        not len(missing),
        f"column {column!r} of {place} lacks a value in {len(missing):,} of {len(part):,} rows, the first of which is row "
        f"{missing[0] if len(missing) else 0:,}, counted from 0: leave these rows out.",
    )
    values = np.asarray(part.select_columns(column).with_format("numpy")[:][column])
    if values.dtype.kind == "O" and all(isinstance(value, str) for value in values):
        values = values.astype(str)
    require(
        values.dtype.kind in "iufbU",
        f"column {column!r} of {place} must have numbers, equally long lists of numbers, or text, got {part.features[column]}.",
    )
    return values.astype(np.int64) if values.dtype.kind == "b" else values


def _missing(values: Any) -> np.ndarray:
    """Return the positions at which an Arrow array has no value, or a list that lacks one at any depth."""
    values = getattr(values, "storage", values)  # of the columns Array2D to Array5D
    missing = np.flatnonzero(values.is_null()) if values.null_count else np.zeros(0, dtype=np.int64)
    if not hasattr(values, "value_parent_indices"):
        return missing
    lists = values.drop_null()
    inside = _missing(lists.flatten())
    if not len(inside):
        return missing
    incomplete = lists.value_parent_indices().to_numpy()[inside]
    return np.union1d(missing, np.flatnonzero(values.is_valid())[incomplete])


def padded_tokens(tokens: Any, num_texts: int, length: int) -> Tensor:
    """Return what a tokenizer returned as (num_texts, length) int64: each row cut, or padded with 0.

    Raises:
        UserError: the tokenizer did not return a list of whole numbers for each text.
    """
    wanted = "tokenizer must return a list of whole numbers for each text"
    try:
        rows = list(tokens["input_ids"] if isinstance(tokens, Mapping) or hasattr(tokens, "input_ids") else tokens)
    except (KeyError, TypeError):
        rows = None
    require(rows is not None, f"{wanted}, or a mapping that has them in input_ids, got {short_repr(tokens)}.")
    assert rows is not None
    require(
        len(rows) == num_texts,
        f"tokenizer returned {len(rows):,} rows of tokens for {num_texts:,} texts: return one for each.",
    )
    padded = torch.zeros(num_texts, length, dtype=torch.int64)
    for text, (row, text_tokens) in enumerate(zip(padded, rows, strict=True)):
        try:
            ids = np.asarray(text_tokens)
        except (TypeError, ValueError):  # ragged lists
            ids = np.zeros((0, 0))
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise UserError(f"{wanted}, but returned {short_repr(text_tokens)} for text {text:,}.")
        present_ids = torch.from_numpy(ids[:length].astype(np.int64))
        row[: len(present_ids)] = present_ids
    return padded
