"""`Leaf`: the JSON files of LEAF (Caldas et al., LEAF: A Benchmark for Federated Settings, 2018, arXiv:1812.01097).

A file has `users`, `num_samples` (of each user) and `user_data`, `{user: {"x": […], "y": […]}}`; a folder has
any number of files. LEAF's own `preprocess.sh` writes such folders, `data/train` and `data/test`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any, Literal

import numpy as np
import torch

from lightning_fl.data.datasets.leaf_files import User, read_users
from lightning_fl.data.datasets.leaf_texts import comments, read_numbers, read_words, tweets
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
CHARACTERS = f"\n !\"&'(),-.{digits}:;>?{ascii_uppercase}[]{ascii_lowercase}}}"
"""LEAF's characters of Shakespeare; the position of a character is its number."""
FEMNIST_CLASSES = 62
NUM_CLASSES = {
    "femnist": FEMNIST_CLASSES,
    "shakespeare": len(CHARACTERS),
    "synthetic": None,
    "sent140": 2,
    "reddit": None,
}
"""Number of classes of each kind; for Synthetic the generator decides, and Reddit has no classes."""
VOCABULARIES = {
    "sent140": "a JSON file with a list of words, or LEAF's embs.json",
    "reddit": "a JSON file with the number of each token, such as LEAF's reddit_vocab.pck written as JSON",
}
"""Vocabularies of the kinds that need one."""
MOST_CLASSES = 10_000
"""Limit of the classes of Synthetic, above which a label is a mistake."""


class Leaf(FederatedDataModule):
    """Data sets in the JSON files of LEAF: each user (a writer, a role in a play, a task, an account) is a client.

    FEMNIST: images 1×28×28 with values in [0, 1], 62 classes. Shakespeare: 80 characters as whole numbers (80,), and the next one
    as one of 80 classes. Synthetic: numbers (d,), and as many classes as the files name, from 0. Sent140: the first 25 words
    of a tweet as whole numbers (25,), and class 1 if the tweet is positive, else 0. A word's number is its position among the
    V words of the vocabulary; V stands for all other words, and pads short tweets. Reddit: 10 tokens of a comment as whole
    numbers (10,), and as targets the token after each of them, (10,); a longer comment makes several samples. The vocabulary
    numbers the tokens, <UNK> for all other tokens, and <PAD> for padding.

    Args:
        train: folder of JSON files, or one file, with the training samples.
        test: folder or file with the test samples, of the same users or of others.
        kind: femnist, shakespeare, synthetic, sent140 or reddit.
        num_clients: number of users that become clients, drawn at random; null: all.
        partition: division of the samples; ByGroup(min_samples) leaves out users with fewer training samples.
        vocabulary: JSON file that numbers the words of Sent140 or the tokens of Reddit: a list, for Reddit also an object with
            the number of each token, or an object with one of them as "vocab", as in LEAF's embs.json and reddit_vocab.pck.
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
        kind: Literal["femnist", "shakespeare", "synthetic", "sent140", "reddit"] = "femnist",
        num_clients: int | None = None,
        partition: Partition = ByGroup(),  # noqa: B008  (immutable)
        vocabulary: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_clients=num_clients, partition=partition, **kwargs)
        require(
            kind not in VOCABULARIES or vocabulary is not None,
            f"kind {kind!r} needs a vocabulary: give {VOCABULARIES.get(kind)}.",
        )
        require(kind in VOCABULARIES or vocabulary is None, f"kind {kind!r} has no vocabulary: leave it out.")
        self.kind, self.vocabulary = kind, vocabulary
        self._paths = (train, test)
        self._num_classes = NUM_CLASSES[kind]

    @property
    def num_classes(self) -> int | None:
        """Number of classes: FEMNIST 62, Shakespeare 80, Sent140 2, Synthetic as many as `setup` finds, Reddit None."""
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
        words: dict[str, int] = {}
        if self.vocabulary is not None:
            words = (read_numbers if self.kind == "reddit" else read_words)(Path(self.vocabulary))
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
    converters: dict[str, Callable[[User], tuple[np.ndarray, np.ndarray]]] = {
        "femnist": _images,
        "shakespeare": _texts,
        "synthetic": _vectors,
        "sent140": partial(tweets, words=words),
        "reddit": partial(comments, numbers=words),
    }
    convert = converters[kind]
    inputs: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    names: list[str] = []
    seen: dict[str, Path] = {}
    for file in tqdm(files, desc=f"Reading {folder.name}", unit="file", delay=2, leave=False):
        for user in read_users(file, counted=kind != "reddit"):
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


def _images(user: User) -> tuple[np.ndarray, np.ndarray]:
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


def _texts(user: User) -> tuple[np.ndarray, np.ndarray]:
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


def _vectors(user: User) -> tuple[np.ndarray, np.ndarray]:
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
