"""`HuggingFace`: data sets of the library `datasets`, on the disk or from the hub, in columns."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fl.data.datasets.columns import Targets, column_values, number_classes, padded_tokens
from lightning_fl.data.datasets.image_folder import check_depth
from lightning_fl.data.federated_data_module import FederatedDataModule
from lightning_fl.data.samples.dataset_samples import DatasetSamples
from lightning_fl.data.samples.tensor_samples import Samples, TensorSamples
from lightning_fl.data.split_checks import needing_classes
from lightning_fl.errors import UserError, nearest, require

READERS = {".arrow": "arrow", ".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
"""Readers of `datasets.load_dataset` by a file's suffix."""
DICTIONARY = "dataset_dict.json"
"""File in which `save_to_disk` lists the splits of a folder."""
TEST = "test"
MOST_BYTES = 2**32
"""Size up to which images are decoded once and kept as bytes; more are read from the disk in each pass."""
Tokenizer = Callable[[list[str]], Any]
"""Function from texts to their tokens: a list of whole numbers for each, or a mapping that has them in `input_ids`."""


class HuggingFace(FederatedDataModule):
    """Columns of a Hugging Face data set. Needs the package datasets: `pip install 'lightning-fl[hf]'`.

    Images of one size are decoded once and become C×H×W in [0, 1]; lists of numbers become tensors; text needs a tokenizer. Users
    as clients: `groups` is the column that names them, `partition` ByGroup and `num_clients` null.

    Args:
        path: folder that `save_to_disk` wrote, a file (.arrow .parquet .json .jsonl .csv), any other folder that
            `datasets.load_dataset` reads, or a name on the hub, which alone downloads.
        name: configuration of a data set on the hub.
        split: name of the training split; a single saved data set or file has none.
        test_split: name of the test split, or path of a folder or file with it; null: the split `test` if `save_to_disk` wrote
            one into the folder, else there are no test data.
        input: column of the inputs.
        target: column of the targets: class labels, whole numbers and text are classes (text in sorted order; test labels are
            found by name); other numbers are quantities, and so are whole numbers if some are negative, or if the largest is
            at least the number of samples, and it is at least 10,000 or most differ or are as large; null: no targets.
        transform: function applied to each training input as `datasets` decodes it (an image as PIL image), in every pass.
        test_transform: the same for test inputs, and for held-out and server samples in evaluation.
        tokenizer: function from a list of texts to the tokens of each, whole numbers; rows are cut and padded with 0 to `length`.
        length: tokens of each text, at least 1.
        **kwargs: arguments of FederatedDataModule: clients, partition, groups, server data, batch sizes and seed.

    Raises:
        UserError: the package datasets is missing, or in `setup`: data, split or column.
    """

    changeable = FederatedDataModule.changeable | {"path"}
    test_remedy = "name their split, such as test_split='test' (--data.test_split test)"

    def __init__(
        self,
        path: str,
        name: str | None = None,
        split: str = "train",
        test_split: str | None = None,
        input: str = "image",
        target: str | None = "label",
        transform: Callable[[Any], Any] | None = None,
        test_transform: Callable[[Any], Any] | None = None,
        tokenizer: Tokenizer | None = None,
        length: Annotated[int, Ge(1)] = 128,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require(
            find_spec("datasets") is not None,
            "HuggingFace needs the package datasets, which is not installed: pip install 'lightning-fl[hf]'.",
        )
        self.path, self.name, self.split, self.test_split = path, name, split, test_split
        self.input, self.target = input, target
        self.transform, self.test_transform = transform, test_transform
        self.tokenizer, self.length = tokenizer, length

    @property
    def num_classes(self) -> int | None:
        """Number of class labels or of distinct training texts, or the largest label plus one (reads the data); else None."""
        return self._classes[1]

    @property
    def in_channels(self) -> int | None:
        """Channels of the first image (reads it); None if the inputs are not images."""
        return self._image_shape[0]

    @property
    def image_size(self) -> int | None:
        """Height and width of the first image if it is square (reads it), else None."""
        _, height, width = self._image_shape
        return height if height == width else None

    def prepare_data(self) -> None:
        """Download a data set of the hub, once."""
        if not Path(self.path).exists():
            _ = self._parts

    def load(self) -> tuple[Samples, Samples | None]:
        """Read inputs and targets, into memory unless they are large images or have a transform."""
        labels, transforms = self._classes[0], (self.transform, self.test_transform)
        train, test = (
            None if part is None else self._samples(part, place, part_labels, transform)
            for part, place, part_labels, transform in zip(self._parts, self._places, labels, transforms, strict=True)
        )
        assert train is not None
        if self.transform is not None:
            self._set_evaluation(train)
        return train, test

    def _set_evaluation(self, train: Samples) -> None:
        """Evaluate training samples that have a transform as test samples are: with theirs, or as images without any."""
        assert isinstance(train, DatasetSamples)
        if self.test_transform is None and (self._parts[1] is None or not _holds_images(self._parts[0], self.input)):
            train.unknown_in_evaluation = {"the transform": "test_transform"}
            return
        rows = copy.copy(train.dataset)
        rows.transform = self.test_transform  # type: ignore[attr-defined]
        train.in_evaluation = train.reading(rows, None)

    @property
    def _places(self) -> tuple[str, str]:
        """What sentences call the training and the test data: a path, or a split of it."""
        return self.path, str(self._test_split) if self._has_own_test else f"split {self._test_split!r} of {self.path}"

    @cached_property
    def _test_split(self) -> str | None:
        """Name or path of the test split: the given one, or a saved split `test`; None without test data."""
        saved = Path(self.path) / DICTIONARY
        if self.test_split is not None or self.split == TEST or not saved.is_file():
            return self.test_split
        return TEST if TEST in json.loads(saved.read_text(encoding="utf-8"))["splits"] else None

    @property
    def _has_own_test(self) -> bool:
        """True if the test data are in a folder or file of their own."""
        return self.test_split is not None and Path(self.test_split).exists()

    @cached_property
    def _parts(self) -> tuple[Any, Any]:
        """Training and test data set; they have samples, and their columns exist."""
        train = _read(self.path, self.name, self.split)
        test = None
        if self._test_split is not None:
            own_folder = self._has_own_test
            test = (
                _read(self._test_split, None, "train") if own_folder else _read(self.path, self.name, self._test_split)
            )
        for part, place, use in zip((train, test), self._places, ("training", "test"), strict=True):
            require(part is None or len(part) > 0, f"{place} has no {use} samples: give at least one.")
            for key in ("input", "target"):
                column = getattr(self, key)
                require(
                    part is None or column is None or column in part.column_names,
                    f"{key}={column!r} is no column of {place}; "
                    f"{nearest(str(column), [] if part is None else part.column_names)}.",
                )
        return train, test

    @cached_property
    def _classes(self) -> tuple[tuple[np.ndarray | None, np.ndarray | None], int | None]:
        """Class of each training and of each test sample, (n,) int64, and the number of classes; None without classes."""
        if self.target is None:
            return (None, None), None
        train, test = (
            None if part is None else Targets.read(part, self.target, place)
            for part, place in zip(self._parts, self._places, strict=True)
        )
        assert train is not None
        return number_classes(train, test, self.target, needing_classes(self))

    @cached_property
    def _image_shape(self) -> tuple[int | None, int | None, int | None]:
        """Channels, height and width of the first image, or None."""
        train = self._parts[0]
        reads = _holds_images(train, self.input) and self.transform is None
        first = _pixels(train, 0, self.input, self._places[0]) if reads else None
        return (None, None, None) if first is None else (first.shape[0], first.shape[1], first.shape[2])

    def _samples(
        self, part: Any, place: str, labels: np.ndarray | None, transform: Callable[[Any], Any] | None
    ) -> Samples:
        """Return the samples of a split."""
        targets = None
        if self.target is not None:
            targets = torch.from_numpy(column_values(part, self.target, place) if labels is None else labels)
            targets = targets.float() if targets.is_floating_point() else targets
        images = _holds_images(part, self.input)
        if images and transform is None and len(part) * _pixels(part, 0, self.input, place).size <= MOST_BYTES:
            inputs = _decoded(part, self.input, place)
        elif images or transform is not None:
            require(self.tokenizer is None, "HuggingFace takes a transform or a tokenizer, not both.")
            read: Samples = DatasetSamples(_Rows(part, place, self.input, targets, labels, transform))
            read.source, read.labels = part, labels
            return read
        else:
            inputs = self._numbers(part, place)
        samples = TensorSamples(inputs, *([] if targets is None else [targets]))
        samples.source, samples.labels = part, labels
        return samples

    def _numbers(self, part: Any, place: str) -> Tensor:
        """Return a column of numbers or of text as a tensor."""
        values = column_values(part, self.input, place)
        if values.dtype.kind != "U":
            require(
                self.tokenizer is None,
                f"tokenizer is given, but input={self.input!r} is a column of numbers, not of text.",
            )
            inputs = torch.from_numpy(values)
            return inputs.float() if inputs.is_floating_point() else inputs.long()
        require(self.tokenizer is not None, f"input={self.input!r} is a column of text: give a tokenizer.")
        assert self.tokenizer is not None
        return padded_tokens(self.tokenizer(values.tolist()), len(values), self.length)


class _Rows(Dataset):
    """Inputs and targets of a split, read and transformed one by one; images without a transform are float32 in [0, 1]."""

    def __init__(
        self,
        part: Any,
        place: str,
        column: str,
        targets: Tensor | None,
        labels: np.ndarray | None,
        transform: Callable[[Any], Any] | None,
    ) -> None:
        self.part, self.place = part.select_columns(column), place
        self.column, self.targets, self.transform = column, targets, transform
        self.labels = labels

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int) -> Any:
        if self.transform is None:
            pixels = _pixels(self.part, int(index), self.column, self.place)
            value: Any = torch.from_numpy(pixels.copy()).float().div_(255)
        else:
            value = self.transform(self.part[int(index)][self.column])
        return value if self.targets is None else (value, self.targets[index])


def _read(path: str, name: str | None, split: str) -> Any:
    """Return a split of a saved data set, a file, a folder or a data set of the hub."""
    import datasets

    place = Path(path)
    try:
        if (place / "state.json").is_file() or place.is_file():
            require(split == "train", f"{path} has no splits, so split={split!r} is none of them: leave out split.")
        if (place / "state.json").is_file():
            return datasets.load_from_disk(path)
        if (place / DICTIONARY).is_file():
            splits = datasets.load_from_disk(path)
            require(split in splits, f"{path} has no split {split!r}; {nearest(split, splits)}.")
            return splits[split]
        reader = READERS.get(place.suffix)
        if place.is_file():
            require(reader is not None, f"{path} has the suffix {place.suffix!r}; allowed: {', '.join(READERS)}.")
            return _loaded(reader, data_files=str(place.resolve()), split="train")
        require(
            place.is_dir() or (reader is None and not place.is_absolute() and path.count("/") < 2 and path[:1] != "."),
            f"There is no folder or file {place.resolve()}.",
        )
        return _loaded(path, name, split=split)
    except UserError:
        raise
    except Exception as error:  # of any reader, and of the network
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        # The readers of CSV and JSON say why only in the cause of a general sentence.
        reasons = dict.fromkeys(
            " ".join(str(failure).split())[:300] or type(failure).__name__ for failure in (error, cause)
        )
        raise UserError(f"datasets cannot read {path!r} ({': '.join(reasons).rstrip('.')}).") from error


def _loaded(*source: Any, **options: Any) -> Any:
    """Return what `datasets.load_dataset` reads, but in CSV files only empty fields are missing; NA and None are texts."""
    import datasets

    part = datasets.load_dataset(*source, **options)
    if part.info.builder_name != "csv":
        return part
    num_missing = {name: part.data.column(name).null_count for name in part.column_names}
    texts = [
        name
        for name, count in num_missing.items()
        if count == len(part) or (count and getattr(part.features[name], "dtype", "").endswith("string"))
    ]
    if not texts:
        return part
    # In a column of numbers, NA stands for a missing one.
    exact = datasets.load_dataset(*source, **options, keep_default_na=False, na_values=[""]).select_columns(texts)
    others = [name for name in part.column_names if name not in texts]
    joined = datasets.concatenate_datasets([part.select_columns(others), exact], axis=1) if others else exact
    return joined.select_columns(part.column_names)


def _holds_images(part: Any, column: str) -> bool:
    """True if a column holds images in files' formats."""
    return type(part.features[column]).__name__ == "Image"


def _pixels(part: Any, row: int, column: str, place: str, rows: Iterator[Any] | None = None) -> np.ndarray:
    """Return the pixels of an image, (C, H, W) uint8: grey ones as they are, all others as RGB.

    Args:
        part: data set.
        row: row of the image.
        column: column of the images.
        place: what sentences call the data set.
        rows: iterator whose next row it is, which is faster; None: the row is looked up.
    """
    name = f"image {row:,} in column {column!r} of {place}"
    try:
        image = (part[row] if rows is None else next(rows))[column]
        require(image is not None, f"{name} is missing: leave this row out.")
        check_depth(image, name, "or give a transform")
        pixels = np.asarray(image if image.mode == "L" else image.convert("RGB"))
    except UserError:
        raise
    except Exception as error:  # of any decoder; also of very large images, against which Pillow protects
        raise UserError(f"{name} is not readable ({error}).") from error
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _decoded(part: Any, column: str, place: str) -> Tensor:
    """Decode images of one size, (n, C, H, W) uint8."""
    images = part.select_columns(column)
    first = _pixels(images, 0, column, place)
    decoded = np.empty((len(images), *first.shape), dtype=np.uint8)
    rows = iter(images)
    for row in range(len(images)):
        pixels = _pixels(images, row, column, place, rows)
        require(
            pixels.shape == first.shape,
            f"image {row} in column {column!r} is {_size(pixels.shape)}, but the first one is {_size(first.shape)}: give a "
            "transform that makes all of one size.",
        )
        decoded[row] = pixels
    return torch.from_numpy(decoded)


def _size(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
