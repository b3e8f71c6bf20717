"""`Leaf`: the JSON files of LEAF (Caldas et al., LEAF: A Benchmark for Federated Settings, 2018, arXiv:1812.01097).

A file has `users`, `num_samples` (of each user) and `user_data`, `{user: {"x": […], "y": […]}}`; a folder has
any number of files. LEAF's own `preprocess.sh` writes such folders, `data/train` and `data/test`. Words of Sent140 become
numbers as in LEAF's `models/utils/language_utils.py`.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any

import numpy as np
import torch

from lightning_fl.checks import check_choice
from lightning_fl.data.federated_data_module import FederatedDataModule
from lightning_fl.data.partitions.by_group import ByGroup
from lightning_fl.data.partitions.partition import Partition
from lightning_fl.data.samples.tensor_samples import Samples, TensorSamples
from lightning_fl.data.users import Groups
from lightning_fl.errors import UserError, require

SIDE = 28
"""Height and width of FEMNIST's images in pixels."""
LENGTH = 80
"""Characters of an input of Shakespeare."""
NUM_WORDS = 25
"""Words of an input of Sent140."""
CHARACTERS = f"\n !\"&'(),-.{digits}:;>?{ascii_uppercase}[]{ascii_lowercase}}}"
"""LEAF's characters of Shakespeare; the position of a character is its number."""
FEMNIST_CLASSES = 62
NUM_CLASSES = {"femnist": FEMNIST_CLASSES, "shakespeare": len(CHARACTERS), "synthetic": None, "sent140": 2}
"""Classes of each kind; those of Synthetic are as many as its generator was asked for."""

REDDIT = (
    "LEAF keeps its vocabulary as a pickle, and its samples are sequences without a class: in Python, give tensors with the "
    "numbers of their tokens to Arrays, with groups for the users and the partition ByGroup"
)
"""What to do with LEAF's Reddit."""
MOST_CLASSES = 10_000
"""Limit of the classes of Synthetic, above which a label is a mistake."""


class Leaf(FederatedDataModule):
    """Data sets in the JSON files of LEAF: each user (a writer, a role in a play, a task, who tweets) is a client.

    FEMNIST: images 1×28×28 with values in [0, 1], 62 classes. Shakespeare: 80 characters as whole numbers (80,), and the next one
    as the class, of 80. Synthetic: numbers (d,), and as many classes as the files name, from 0. Sent140: the first 25 words of a
    tweet as whole numbers (25,), and class 1 if it is positive, else 0. The number of a word is its place among the V words of
    the vocabulary; V stands for all other words, and fills up short tweets.

    Args:
        train: folder of JSON files, or one file, with the training samples.
        test: folder or file with the test samples, of the same users or of others.
        kind: femnist, shakespeare, synthetic or sent140.
        num_clients: number of users that become clients, drawn at random; null: all.
        partition: division of the samples; ByGroup(min_samples) leaves out users with fewer training samples.
        vocabulary: JSON file with the words of Sent140: a list, or an object with such a list as "vocab", as in LEAF's embs.json.
        **kwargs: arguments of FederatedDataModule: server_groups, batch sizes, val_fraction and seed.

    Raises:
        UserError: the kind is unknown, needs a vocabulary, or has none; in `setup`: a file is missing or malformed; the sentence
            names the file and the user, or the line.
    """

    changeable = FederatedDataModule.changeable | {"train", "test", "vocabulary"}

    def __init__(
        self,
        train: str,
        test: str,
        kind: str = "femnist",
        num_clients: int | None = None,
        partition: Partition = ByGroup(),  # noqa: B008  (immutable)
        vocabulary: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_clients=num_clients, partition=partition, **kwargs)
        require(kind != "reddit", f"kind {kind!r} is not read: {REDDIT}.")
        check_choice("kind", kind, NUM_CLASSES)
        require(
            kind != "sent140" or vocabulary is not None,
            "kind 'sent140' needs a vocabulary: give a JSON file with a list of words, or LEAF's embs.json.",
        )
        require(kind == "sent140" or vocabulary is None, f"kind {kind!r} has no vocabulary: leave it out.")
        self.kind, self.vocabulary = kind, vocabulary
        self._paths = (train, test)
        self._num_classes = NUM_CLASSES[kind]

    @property
    def num_classes(self) -> int | None:
        """Number of classes: 62 of FEMNIST, 80 of Shakespeare, 2 of Sent140; of Synthetic the largest plus 1, after `setup`."""
        return self._num_classes

    @property
    def in_channels(self) -> int | None:
        """1 for the images of FEMNIST, else None."""
        return 1 if self.kind == "femnist" else None

    @property
    def image_size(self) -> int | None:
        """Height and width of the images of FEMNIST in pixels, else None."""
        return SIDE if self.kind == "femnist" else None

    def load(self) -> tuple[Samples, Samples]:
        """Read all files."""
        words = {} if self.vocabulary is None else _vocabulary(Path(self.vocabulary))
        train, test = (_read(path, self.kind, words) for path in self._paths)
        if self.kind == "synthetic":
            sizes = [len(samples.stored(np.array([0]))[0][0]) for samples in (train, test)]
            require(
                sizes[0] == sizes[1],
                f"the samples in {self._paths[0]} have {sizes[0]} numbers, and those in {self._paths[1]} {sizes[1]}.",
            )
            self._num_classes = 1 + max(
                int(samples.labels.max()) for samples in (train, test) if samples.labels is not None
            )
        return train, test


@dataclass(frozen=True)
class _User:
    """Samples of a user, as a file has them; `place` is the file and the user, for the sentences."""

    name: str
    x: list
    y: list
    place: str


def _read(path: str, kind: str, words: dict[str, int]) -> TensorSamples:
    """Return the samples of all users in a folder or file."""
    from tqdm import tqdm

    folder, files = Path(path), [Path(path)]
    if not folder.is_file():
        files = sorted(folder.glob("*.json"))
        require(
            len(files) > 0,
            f"{folder} has no JSON files: give a folder that LEAF's preprocess.sh wrote, such as data/train.",
        )
    converters: dict[str, Callable[[_User], tuple[np.ndarray, np.ndarray]]] = {
        "femnist": _images,
        "shakespeare": _texts,
        "synthetic": _vectors,
        "sent140": partial(_tweets, words=words),
    }
    convert = converters[kind]
    inputs: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    names: list[str] = []
    seen: dict[str, Path] = {}
    for file in tqdm(files, desc=f"Reading {folder.name}", unit="file", delay=2, leave=False):
        for user in _users(file):
            require(
                user.name not in seen,
                f"User {user.name!r} is in {seen.get(user.name, file)} and again in {file}: leave out one of them.",
            )
            seen[user.name] = file
            if user.x:
                x, y = convert(user)
                if inputs and x.shape[1:] != inputs[0].shape[1:]:
                    raise UserError(
                        f"{user.place}: x has samples of {x.shape[1]} numbers, and those of others have {len(inputs[0][0])}."
                    )
                inputs.append(x)
                labels.append(y)
                names += [user.name] * len(y)
    require(len(names) > 0, f"{path} has no samples.")
    dtype = np.result_type(*{x.dtype for x in inputs})
    joined = np.concatenate([x / np.float32(255) if x.dtype == np.uint8 != dtype else x for x in inputs])
    return TensorSamples(torch.from_numpy(joined), torch.from_numpy(np.concatenate(labels)), groups=Groups.of(names))


def _content(file: Path) -> Any:
    """Return the content of a JSON file."""
    require(file.is_file(), f"{file} is no file.")  # a pipe would never end
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"{file}, line {error.lineno}, is not JSON ({error.msg}).") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not readable ({error}).") from error
    except (RecursionError, ValueError) as error:  # brackets nested too deeply, or a number too long
        raise UserError(f"{file} is not JSON that can be read ({error}).") from error


def _users(file: Path) -> Iterator[_User]:
    """Yield the users of a file; all lengths fit."""
    content = _content(file)
    for key, kind in (("users", list), ("num_samples", list), ("user_data", dict)):
        require(
            isinstance(content, dict) and isinstance(content.get(key), kind),
            f"{file} is no file of LEAF: it lacks a {'mapping' if kind is dict else 'list'} {key!r} beside users, num_samples "
            "and user_data.",
        )
    users, sizes, data = content["users"], content["num_samples"], content["user_data"]
    require(len(users) == len(sizes), f"{file} has {len(users):,} users but {len(sizes):,} num_samples.")
    unnamed = next((user for user in users if type(user) not in (str, int)), "")
    require(unnamed == "", f"{file} has the user {unnamed!r} in users: name every user by text or a whole number.")
    require("" not in users, f"{file} has a user whose name is empty in users: name every user.")
    require(len({str(user) for user in users}) == len(users), f"{file} names a user twice in users.")
    extra = sorted(data.keys() - {str(user) for user in users})
    require(not extra, f"{file} has user_data of {', '.join(map(repr, extra[:3]))}, which users does not name.")
    for user, size in zip(map(str, users), sizes, strict=True):
        place = f"{file}, user {user!r}"
        samples = data.pop(user, None)
        require(
            isinstance(samples, dict) and all(isinstance(samples.get(key), list) for key in "xy"),
            f"{place}: user_data lacks the lists x and y.",
        )
        lengths = len(samples["x"]), len(samples["y"])
        require(
            lengths == (size, size),
            f"{place}: num_samples is {size!r}, but x has {lengths[0]:,} samples and y {lengths[1]:,}.",
        )
        yield _User(user, samples["x"], samples["y"], place)


def _images(user: _User) -> tuple[np.ndarray, np.ndarray]:
    """Return a writer's images, (n, 1, 28, 28) uint8 if all values are whole 255ths and float32 otherwise, and classes (n,)."""
    for position, pixels in enumerate(user.x):
        size = len(pixels) if isinstance(pixels, list) else type(pixels).__name__
        require(
            size == SIDE**2,
            f"{user.place}, sample {position}: x must have {SIDE**2} numbers (28×28 pixels), got {size}.",
        )
    try:
        values = np.array(user.x)
    except ValueError as error:
        raise UserError(f"{user.place}: x has a value that is no number ({error}).") from error
    require(values.dtype.kind in "iuf", f"{user.place}: x has a value that is no number.")
    require(
        bool(((values >= 0) & (values <= 1)).all()),
        f"{user.place}: pixels must lie in [0, 1], but go from {values.min():g} to {values.max():g}.",
    )
    for position, label in enumerate(user.y):
        require(
            type(label) is int and 0 <= label < FEMNIST_CLASSES,
            f"{user.place}, sample {position}: y must be a whole number from 0 to 61, got {label!r}.",
        )
    levels = np.rint(255 * values)
    stored = levels.astype(np.uint8) if np.array_equal(levels / 255, values) else values.astype(np.float32)
    return stored.reshape(-1, 1, SIDE, SIDE), np.array(user.y, dtype=np.int64)


def _texts(user: _User) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of a role's characters, (n, 80) int64, and of the next ones (n,)."""
    for length, name, texts in ((LENGTH, "x", user.x), (1, "y", user.y)):
        for position, text in enumerate(texts):
            require(
                isinstance(text, str) and len(text) == length,
                f"{user.place}, sample {position}: {name} must be text of {length} character{'s' * (length > 1)}, got {text!r}.",
            )
            unknown = sorted(set(text) - set(CHARACTERS))
            require(
                not unknown,
                f"{user.place}, sample {position}: {name} has {unknown[:3]}, none of LEAF's {len(CHARACTERS)} characters.",
            )
    numbers = {character: number for number, character in enumerate(CHARACTERS)}
    x = np.array([[numbers[character] for character in text] for text in user.x], dtype=np.int64)
    return x, np.array([numbers[character] for character in user.y], dtype=np.int64)


def _vectors(user: _User) -> tuple[np.ndarray, np.ndarray]:
    """Return a task's samples, (n, d) float32, and classes (n,)."""
    try:
        values = np.array(user.x)
    except ValueError as error:
        raise UserError(f"{user.place}: x has samples of different lengths, or a value that is no number.") from error
    require(
        values.ndim == 2 and values.dtype.kind in "iuf" and bool(np.isfinite(values).all()),
        f"{user.place}: x must have lists of finite numbers.",
    )
    for position, label in enumerate(user.y):
        require(
            type(label) is int and 0 <= label < MOST_CLASSES,
            f"{user.place}, sample {position}: y must be a whole number from 0 to {MOST_CLASSES - 1:,}, got {label!r}.",
        )
    return values.astype(np.float32), np.array(user.y, dtype=np.int64)


def _vocabulary(file: Path) -> dict[str, int]:
    """Return the numbers of the words in a vocabulary."""
    content = _content(file)
    words: Any = content.get("vocab") if isinstance(content, dict) else content
    require(
        isinstance(words, list) and all(isinstance(word, str) for word in words),
        f"{file} is no vocabulary: it must be a list of words, or an object with such a list as 'vocab'.",
    )
    numbers = {word: number for number, word in enumerate(words)}
    require(0 < len(numbers) == len(words), f"{file} must have words, and each once, to number them by their places.")
    return numbers


def _tweets(user: _User, words: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the first words of a user's tweets, (n, 25) int64, and classes (n,)."""
    numbers = np.full((len(user.x), NUM_WORDS), len(words), dtype=np.int64)
    for position, (tweet, label) in enumerate(zip(user.x, user.y, strict=True)):
        text = tweet[4] if isinstance(tweet, list) and len(tweet) > 4 else None
        if not isinstance(text, str):
            given = reprlib.repr(tweet)
            raise UserError(
                f"{user.place}, sample {position}: x must be a list of id, date, query, user and text, got {given}."
            )
        require(
            type(label) is int and label in (0, 1),
            f"{user.place}, sample {position}: y must be 0 or 1, got {label!r}.",
        )
        found = [words.get(word, len(words)) for word in re.findall(r"[\w']+|[.,!?;]", text)[:NUM_WORDS]]
        numbers[position, : len(found)] = found
    return numbers, np.array(user.y, dtype=np.int64)
