"""Images in folders, one folder per class, decoded once into uint8 tensors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_fl.data.datasets.image_data_module import ImageDataModule
from lightning_fl.errors import UserError, require

LAYOUT = "expected images in ROOT/train/CLASS/ and ROOT/test/CLASS/, with the same classes in both"


class ImageFolder(ImageDataModule):
    """Colour images in `root/train/<class>/` and `root/test/<class>/`; classes are numbered in alphabetical order.

    Args:
        root: folder that contains `train` and `test`.
        image_size: height and width in pixels, at least 1, to which every image is resized (proportions are not kept);
            None: the images must already have one size.
        **kwargs: arguments of ImageDataModule and FederatedDataModule.
    """

    in_channels = 3

    changeable = ImageDataModule.changeable | {"root"}

    def __init__(self, root: str, image_size: Annotated[int, Ge(1)] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root
        self._image_size = image_size

    @property
    def num_classes(self) -> int:
        """Number of class folders."""
        return len(self._classes("train"))

    @property
    def image_size(self) -> int | None:
        """Given height and width in pixels, or the size of the first image if it is square (reads it); else None."""
        if self._image_size is not None:
            return self._image_size
        height, width, _ = read_pixels(self._files("train")[0][0][0], None).shape
        return height if height == width else None

    def read(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Decode every image."""
        train, test = self._classes("train"), self._classes("test")
        require(train == test, f"{self.root}/train has the classes {train} but {self.root}/test has {test}: {LAYOUT}.")
        return self._decode("train"), self._decode("test")

    def _classes(self, part: str) -> list[str]:
        folder = Path(self.root) / part
        classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
        require(len(classes) > 0, f"{folder} is missing or has no class folders: {LAYOUT}.")
        return classes

    def _files(self, part: str) -> tuple[list[tuple[str, int]], list[str]]:
        """Return the paths and classes of the images, in sorted order, and the paths of files with other suffixes."""
        from torchvision.datasets.folder import IMG_EXTENSIONS

        labelled_files: list[tuple[str, int]] = []
        left_out: list[str] = []
        folders: dict[str, str] = {}
        for label, name in enumerate(self._classes(part)):
            folder = os.path.join(self.root, part, name)
            found = _walk(folder, folders)
            files = [path for path in found if path.lower().endswith(IMG_EXTENSIONS)]
            left_out += [path for path in found if not path.lower().endswith(IMG_EXTENSIONS)]
            require(
                len(files) > 0,
                f"The class folder {folder} has no images with the suffixes {', '.join(IMG_EXTENSIONS)}: {LAYOUT}.",
            )
            labelled_files += [(path, label) for path in files]
        return labelled_files, left_out

    def _decode(self, part: str) -> tuple[Tensor, Tensor]:
        files, left_out = self._files(part)
        _say_left_out(left_out, str(Path(self.root) / part))
        images = decode_images([path for path, _ in files], self._image_size, part)
        return images, torch.tensor([label for _, label in files])


def _say_left_out(paths: Sequence[str], folder: str) -> None:
    """Say how many files of a folder are left out for their suffixes; hidden ones, such as .DS_Store, are meant to be.

    A suffix that Pillow reads is a warning, because these are images.
    """
    from PIL import Image

    names = [os.path.basename(path) for path in paths]
    counts = Counter(os.path.splitext(name)[1].lower() or "none" for name in names if not name.startswith("."))
    if not counts:
        return
    are_images = counts.keys() & Image.registered_extensions().keys()
    suffixes = ", ".join(f"{suffix} ({count:,})" for suffix, count in counts.most_common(5))
    more = f", and {len(counts) - 5} more suffixes" if len(counts) > 5 else ""
    say = rank_zero_warn if are_images else rank_zero_info
    say(
        f"ImageFolder leaves out {counts.total():,} of the files in {folder}, because it does not read their suffixes: {suffixes}"
        f"{more}. Convert them, for instance to .png, if they are images."
    )


def _walk(folder: str, seen: dict[str, str]) -> list[str]:
    """Return the files in a folder at any depth, in sorted order; links are followed.

    Args:
        folder: the folder.
        seen: path by which each folder was read, by its path without links; the folders that are read now are added.

    Raises:
        UserError: a folder cannot be read, or is read a second time through a link.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}).") from error

    names_by_place = []
    for place, _, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(place)
        require(
            real not in seen,
            f"{place} leads again to the folder of {seen.get(real)}, whose images would count twice: remove the link.",
        )
        seen[real] = place
        names_by_place.append((place, names))
    return [os.path.join(place, name) for place, names in sorted(names_by_place) for name in sorted(names)]


def decode_images(paths: Sequence[str], image_size: int | None, name: str) -> Tensor:
    """Return colour images as bytes, (n, 3, H, W) uint8.

    Args:
        paths: files of the images.
        image_size: height and width to which every image is resized; None: they must already have one size.
        name: name of these images, for the bar, which appears after two seconds.

    Raises:
        UserError: a file is missing or is no image, or two have different sizes.
    """
    from tqdm.contrib.concurrent import thread_map

    first = read_pixels(paths[0], image_size)
    images = torch.empty((len(paths), *first.shape), dtype=torch.uint8)

    def decode(position: int) -> None:
        pixels = read_pixels(paths[position], image_size)
        require(
            pixels.shape == first.shape,
            f"{paths[position]} is {_size(pixels)} but {paths[0]} is {_size(first)}: set image_size to resize all images to one "
            "size.",
        )
        images[position] = torch.from_numpy(pixels)

    # Decoding releases Python's global lock, so threads run in parallel.
    thread_map(decode, range(len(paths)), desc=f"Decoding {name} images", unit="image", delay=2, leave=False)
    return images.permute(0, 3, 1, 2)


def read_pixels(path: str, image_size: int | None) -> np.ndarray:
    """Return the pixels of an image, (H, W, 3) uint8, resized unless the size is None.

    Raises:
        UserError: the file is no image, or its pixels have no 8 bits per channel.
    """
    from PIL import Image

    # A pipe would never end.
    require(os.path.isfile(path) or not os.path.exists(path), f"{path} is no file, so it is not a readable image.")
    try:
        with Image.open(path) as opened:
            check_depth(opened, path, "or read them in Python and give Arrays floats in [0, 1]")
            image = opened.convert("RGB")
    except UserError:
        raise
    except Exception as error:  # of any decoder; also of very large images, against which Pillow protects
        raise UserError(f"{path} is not a readable image ({error}).") from error
    if image_size is not None:
        image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
    return np.array(image)


def check_depth(image: Any, place: str, remedy: str) -> None:
    """Raise `UserError` for a PIL image whose pixels have more than 8 bits, which Pillow would not scale but clip to white.

    Args:
        image: the image.
        place: name of the image in the error message.
        remedy: second remedy, at the end of the message.
    """
    require(
        not image.mode.startswith(("I", "F")),
        f"{place} has pixels of {'floats' if image.mode == 'F' else '16 or 32 bits'} (Pillow's mode {image.mode}), which cannot "
        f"become bytes without a scale: convert such images to 8 bits per channel, {remedy}.",
    )


def _size(pixels: np.ndarray) -> str:
    return f"{pixels.shape[1]}×{pixels.shape[0]} pixels"
