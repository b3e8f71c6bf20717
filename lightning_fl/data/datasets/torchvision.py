"""CIFAR-10, CIFAR-100, Fashion-MNIST and SVHN from torchvision's files, read directly into uint8 tensors.

Their training files are already in random order, which is kept: the clients get the first `client_fraction`.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fl.data.datasets.image_data_module import ImageDataModule
from lightning_fl.errors import UserError


class DownloadableImages(ImageDataModule):
    """Images that torchvision can download.

    Args:
        root: folder of the files, also for downloads.
        download: True to download the files if they are absent.
        **kwargs: arguments of ImageDataModule and FederatedDataModule.
    """

    shuffled_files = True
    """The files are in random order, so that any part of them is a fair sample; others are shuffled before they are split."""
    num_classes: int = 10
    """Number of classes, known without the files."""
    in_channels: int = 3
    """Number of channels, known without the files."""
    image_size: int = 32
    """Height and width of the images in pixels, known without the files."""
    files: str
    """Names of the files that must be in `root`, for error messages."""

    changeable = ImageDataModule.changeable | {"root", "download"}

    def __init__(self, root: str = "data", download: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root
        self.download = download

    @abstractmethod
    def open(self, train: bool, download: bool) -> tuple[Tensor | np.ndarray, Any]:
        """Return uint8 images (n, C, H, W) and classes of the training or the test files."""

    def prepare_data(self) -> None:
        """Download the files if `download` is True (Lightning calls this in one process only)."""
        if self.download:
            for train in (True, False):
                self._open(train)

    def read(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Read the training and the test files."""
        return self._open(train=True), self._open(train=False)

    def _open(self, train: bool) -> tuple[Tensor, Tensor]:
        try:
            images, labels = self.open(train, self.download)
        except (RuntimeError, OSError) as error:
            folder = Path(self.root).resolve()
            if self.download:
                remedy = f"could not be downloaded to {folder}: check the network, or put {self.files} there yourself"
            else:
                remedy = (
                    f"needs {self.files} in {folder}: use --data.download true (download=True) to download them, or set "
                    "--data.root (root=) to their folder"
                )
            remedy += "; for images of your own use --data Arrays --data.path images.npz"
            reason = f"{type(error).__name__}: {error}".rstrip(".").replace("\n", " ")
            raise UserError(f"{type(self).__name__} {remedy} ({reason}).") from error
        return torch.as_tensor(images), torch.as_tensor(labels, dtype=torch.int64)


class CIFAR10(DownloadableImages):
    """CIFAR-10: 50,000 training and 10,000 test images, 3×32×32, 10 classes (Krizhevsky, 2009)."""

    files = "the folder cifar-10-batches-py with data_batch_1 to data_batch_5, test_batch and batches.meta"

    def open(self, train: bool, download: bool) -> tuple[Tensor | np.ndarray, Any]:
        """Read torchvision's CIFAR10."""
        from torchvision.datasets import CIFAR10 as Files  # noqa: N811

        files = Files(self.root, train, download=download)
        return files.data.transpose(0, 3, 1, 2), files.targets


class CIFAR100(DownloadableImages):
    """CIFAR-100: 50,000 training and 10,000 test images, 3×32×32, 100 classes (Krizhevsky, 2009)."""

    num_classes = 100
    files = "the folder cifar-100-python with train, test and meta"

    def open(self, train: bool, download: bool) -> tuple[Tensor | np.ndarray, Any]:
        """Read torchvision's CIFAR100."""
        from torchvision.datasets import CIFAR100 as Files  # noqa: N811

        files = Files(self.root, train, download=download)
        return files.data.transpose(0, 3, 1, 2), files.targets


class FashionMNIST(DownloadableImages):
    """Fashion-MNIST: 60,000 training and 10,000 test images, 1×28×28, 10 classes (Xiao et al., 2017)."""

    in_channels = 1
    image_size = 28
    files = "the folder FashionMNIST/raw with train-images-idx3-ubyte, t10k-images-idx3-ubyte and the two of labels"

    def open(self, train: bool, download: bool) -> tuple[Tensor | np.ndarray, Any]:
        """Read torchvision's FashionMNIST."""
        from torchvision.datasets import FashionMNIST as Files

        files = Files(self.root, train, download=download)
        return files.data.unsqueeze(1), files.targets


class SVHN(DownloadableImages):
    """SVHN, house numbers: 73,257 training and 26,032 test images, 3×32×32, 10 classes (Netzer et al., 2011)."""

    files = "train_32x32.mat and test_32x32.mat"

    def open(self, train: bool, download: bool) -> tuple[Tensor | np.ndarray, Any]:
        """Read torchvision's SVHN."""
        from torchvision.datasets import SVHN as Files  # noqa: N811

        files = Files(self.root, "train" if train else "test", download=download)
        return files.data, files.labels
