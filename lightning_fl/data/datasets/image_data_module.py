"""`ImageDataModule`: a `FederatedDataModule` of image tensors, with optional augmentation and normalisation."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from lightning_fl.data.datasets.augment import crop_and_flip
from lightning_fl.data.federated_data_module import FederatedDataModule
from lightning_fl.data.samples.tensor_samples import Normalize, Samples, TensorSamples
from lightning_fl.data.users import Groups
from lightning_fl.errors import require


class ImageDataModule(FederatedDataModule):
    """Images (n, C, H, W), usually uint8, with classes (n,); a subclass reads them in `read`.

    Args:
        augment: True to shift training images by up to 4 pixels and mirror them, at random in each pass.
        normalize: True to centre and scale images per channel by the mean and standard deviation of the clients'
            training images; False leaves pixels in [0, 1].
        **kwargs: arguments of FederatedDataModule: clients, partition, server data, batch sizes and seed.
    """

    def __init__(self, augment: bool = False, normalize: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.augment = augment
        self.normalize = normalize

    @abstractmethod
    def read(self) -> tuple[tuple[Tensor, ...] | Tensor, tuple[Tensor, ...] | Tensor]:
        """Read the training and the test tensors: images (n, C, H, W) first, then int64 classes (n,). Called once.

        For a tensor instead of a tuple, a batch is a tensor, not a list.
        """

    def read_groups(self) -> tuple[Groups | None, Groups | None]:
        """Return the groups of the training and the test images; None unless a subclass overrides it."""
        return None, None

    def load(self) -> tuple[Samples, Samples]:
        """Read the images into `TensorSamples`."""
        parts = self.read()
        lists = [not isinstance(part, Tensor) for part in parts]
        train, test = ((part,) if isinstance(part, Tensor) else part for part in parts)
        for asked, name in ((self.augment, "augment"), (self.normalize, "normalize")):
            shape = tuple(train[0].shape)
            require(
                not asked or len(shape) == 4, f"{name}=True needs images n×C×H×W, but the data have the shape {shape}."
            )
        groups = self.read_groups()
        augment = crop_and_flip if self.augment else None
        return (
            TensorSamples(*train, groups=groups[0], augment=augment, lists=lists[0]),
            TensorSamples(*test, groups=groups[1], lists=lists[1]),
        )

    def after_split(self) -> None:
        """Normalise by the mean and standard deviation of the clients' images, without those of the test or the server."""
        if self.normalize and isinstance(self.train, TensorSamples) and isinstance(self.test, TensorSamples):
            transform = Normalize(*self.train.channel_moments(self.client_indices.joined))
            self.train.transform = self.test.transform = transform
