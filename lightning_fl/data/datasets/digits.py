"""Handwritten digits that come with scikit-learn: 1,797 images of 8×8, no download, for first steps and tests."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own name for it)
from annotated_types import Ge
from torch import Tensor

from lightning_fl.data.datasets.image_data_module import ImageDataModule
from lightning_fl.data.federated_data_module import HELD_OUT


@cache  # scikit-learn parses a text file
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images (1797, 8, 8), with values 0..16, and the digits that they show."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images, digits.target


class Digits(ImageDataModule):
    """The 1,797 handwritten digits of scikit-learn; the seed draws a stratified fifth of them as the test set.

    Args:
        image_size: height and width in pixels, at least 8; the 8×8 images are enlarged bilinearly.
        **kwargs: arguments of ImageDataModule and FederatedDataModule.
    """

    num_classes = 10
    in_channels = 1

    def __init__(self, image_size: Annotated[int, Ge(8)] = 8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._image_size = image_size

    @property
    def image_size(self) -> int:
        """Height and width of the images in pixels."""
        return self._image_size

    def read(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Read, enlarge and split the images; pixel values 0..16 become 0..255."""
        from sklearn.model_selection import train_test_split

        drawn, written = _digits()
        images = torch.from_numpy(drawn).float().unsqueeze(1) * (255 / 16)
        if self.image_size != 8:
            images = F.interpolate(images, size=self.image_size, mode="bilinear")
        images = images.round().to(torch.uint8)
        labels = torch.from_numpy(written.astype(np.int64))
        train, test = train_test_split(
            np.arange(len(labels)),
            test_size=0.2,
            stratify=written,
            random_state=int(self._rng(HELD_OUT).integers(2**31)),
        )
        return (images[train], labels[train]), (images[test], labels[test])
