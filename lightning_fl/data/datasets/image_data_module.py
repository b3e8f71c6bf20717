"""`ImageDataModule`: a `FederatedDataModule` over image tensors, with augmentation and normalisation on request."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from torch import Tensor

from lightning_fl.data.datasets.augment import crop_and_flip
from lightning_fl.data.federated_data_module import FederatedDataModule
from lightning_fl.data.samples.tensor_samples import Normalize, Samples, TensorSamples
from lightning_fl.errors import require


class ImageDataModule(FederatedDataModule):
    """Images (n, C, H, W), usually uint8, with classes (n,); a subclass says in `read` where they come from.

    Args:
        augment: whether training images are shifted by up to 4 pixels and mirrored at random in each pass.
        normalize: whether images are centred and scaled per channel by the mean and standard deviation of the clients'
            training images; if not, pixels lie in [0, 1].
        **kwargs: of FederatedDataModule: clients, partition, server data, batch sizes and seed.
    """

    def __init__(self, augment: bool = False, normalize: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.augment = augment
        self.normalize = normalize

    @abstractmethod
    def read(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Read the training and the test tensors: images (n, C, H, W) first, then int64 classes (n,). Called once."""

    def load(self) -> tuple[Samples, Samples]:
        """Read the images into `TensorSamples`."""
        train, test = self.read()
        for asked, name in ((self.augment, "augment"), (self.normalize, "normalize")):
            shape = tuple(train[0].shape)
            require(
                not asked or len(shape) == 4, f"{name}=True needs images n×C×H×W, but the data have the shape {shape}."
            )
        return TensorSamples(*train, augment=crop_and_flip if self.augment else None), TensorSamples(*test)

    def after_split(self) -> None:
        """Normalise by what the clients hold: the test images and the server's stay unseen."""
        if self.normalize and isinstance(self.train, TensorSamples) and isinstance(self.test, TensorSamples):
            transform = Normalize(*self.train.channel_moments(np.concatenate(self.client_indices)))
            self.train.transform = self.test.transform = transform
