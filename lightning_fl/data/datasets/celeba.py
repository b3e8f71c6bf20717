"""`CelebA`: faces of celebrities, each of whom is a client (Liu et al., Deep Learning Face Attributes in the Wild, ICCV 2015).

As in LEAF (Caldas et al., 2018, arXiv:1812.01097): one attribute is the class, Smiling there; persons with fewer than five images
are left out, so that 9,343 remain; images of 84×84. LEAF resizes with Pillow's default filter, this class bilinearly.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Interval
from torch import Tensor

from lightning_fl.data.datasets.image_data_module import ImageDataModule
from lightning_fl.data.datasets.image_folder import decode_images
from lightning_fl.data.federated_data_module import HELD_OUT
from lightning_fl.data.partitions.by_group import ByGroup
from lightning_fl.data.partitions.partition import Partition
from lightning_fl.data.users import Groups
from lightning_fl.errors import UserError, nearest, require

IDENTITIES, ATTRIBUTES, IMAGES = "identity_CelebA.txt", "list_attr_celeba.txt", "img_align_celeba"


class CelebA(ImageDataModule):
    """Faces with one of CelebA's 40 attributes as the class, yes (1) or no (0); each person is a client.

    Needs CelebA's own files in one folder: `identity_CelebA.txt`, `list_attr_celeba.txt` and the folder `img_align_celeba`. All
    images are decoded once: 4.2 GB for the 200,288 of LEAF's selection at 84×84.

    Args:
        root: folder that contains CelebA's own files.
        attribute: name of the attribute, as in the second line of list_attr_celeba.txt.
        image_size: height and width in pixels to which the images are resized, at least 1.
        min_images: persons with fewer images are left out, at least 2.
        test_fraction: share of each person's images that the seed draws as test images, in (0, 1); at least one image.
        num_clients: number of persons that become clients, drawn at random; null: all.
        partition: division of the images; ByGroup makes persons clients.
        **kwargs: arguments of ImageDataModule and FederatedDataModule.

    Raises:
        UserError: in `setup`: a file is missing or malformed; the sentence names the file and the line.
    """

    num_classes = 2
    in_channels = 3

    changeable = ImageDataModule.changeable | {"root"}

    def __init__(
        self,
        root: str,
        attribute: str = "Smiling",
        image_size: Annotated[int, Ge(1)] = 84,
        min_images: Annotated[int, Ge(2)] = 5,
        test_fraction: Annotated[float, Interval(gt=0, lt=1)] = 0.1,
        num_clients: int | None = None,
        partition: Partition = ByGroup(),  # noqa: B008  (immutable)
        **kwargs: Any,
    ) -> None:
        super().__init__(num_clients=num_clients, partition=partition, **kwargs)
        self.root, self.attribute = root, attribute
        self.min_images, self.test_fraction = min_images, test_fraction
        self._image_size = image_size
        self._persons: tuple[Groups | None, Groups | None] = (None, None)

    @property
    def image_size(self) -> int:
        """Height and width of the images in pixels."""
        return self._image_size

    def read(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Read classes and persons, and decode the images of persons who have enough."""
        classes, persons = self._classes(), dict(_rows(Path(self.root, IDENTITIES), 2))
        missing = next((name for name in classes if name not in persons), None)
        require(missing is None, f"{Path(self.root, IDENTITIES)} does not name the person on {missing}.")
        names = sorted(classes)
        groups = Groups.of([persons[name][0] for name in names])
        counts = np.bincount(groups.codes)
        require(
            counts.max() >= self.min_images,
            f"No person has {self.min_images} images; the most are {counts.max()}: lower min_images.",
        )
        kept_images = np.flatnonzero(counts[groups.codes] >= self.min_images)
        is_test = np.zeros(len(names), dtype=bool)
        rng = self._rng(HELD_OUT)
        for images in np.split(
            kept_images[np.argsort(groups.codes[kept_images], kind="stable")],
            np.cumsum(counts[counts >= self.min_images])[:-1],
        ):
            is_test[rng.permutation(images)[: self._num_tested(len(images))]] = True
        parts = kept_images[~is_test[kept_images]], kept_images[is_test[kept_images]]
        people = [Groups.of(groups.names[groups.codes[part]]) for part in parts]
        self._persons = people[0], people[1]
        train, test = (self._decoded([names[row] for row in part], classes) for part in parts)
        return train, test

    def read_groups(self) -> tuple[Groups | None, Groups | None]:
        """Return the persons on the training and the test images."""
        return self._persons

    def _num_tested(self, count: int) -> int:
        """Return the number of test images of a person, who keeps at least one for training."""
        return min(count - 1, max(1, round(self.test_fraction * count)))

    def _decoded(self, names: list[str], classes: dict[str, int]) -> tuple[Tensor, Tensor]:
        """Return images and classes of files."""
        folder = Path(self.root, IMAGES)
        images = decode_images([str(folder / name) for name in names], self.image_size, "CelebA's")
        return images, torch.tensor([classes[name] for name in names])

    def _classes(self) -> dict[str, int]:
        """Return the class of each image by its file's name."""
        file = Path(self.root, ATTRIBUTES)
        lines = _lines(file)
        names = lines[1].split() if len(lines) > 1 else []
        require(len(names) > 0, f"{file}, line 2, must name the attributes.")
        require(
            self.attribute in names,
            f"attribute={self.attribute!r} is none of {file}; {nearest(self.attribute, names)}.",
        )
        column, classes = names.index(self.attribute), {}
        for number, (name, values) in enumerate(_rows(file, 1 + len(names), first=3), start=3):
            value = values[column]
            require(value in ("1", "-1"), f"{file}, line {number}: {self.attribute} must be 1 or -1, got {value!r}.")
            classes[name] = int(value == "1")
        require(len(classes) > 0, f"{file} has no images.")
        return classes


def _lines(file: Path) -> list[str]:
    """Return the lines of a text file."""
    require(file.is_file() or not file.exists(), f"{file} is no file: root must have CelebA's own files.")
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not readable ({error}): root must have CelebA's own files.") from error


def _rows(file: Path, num_words: int, first: int = 1) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of an image and the words after it of each line from the `first` on; an image has one line."""
    seen: dict[str, int] = {}
    for number, line in enumerate(_lines(file)[first - 1 :], start=first):
        words = line.split()
        require(len(words) == num_words, f"{file}, line {number}, must have {num_words} words, got {len(words)}.")
        name = words[0]
        require(name not in seen, f"{file} has {name} in line {seen.get(name)} and again in line {number}.")
        seen[name] = number
        yield name, words[1:]
