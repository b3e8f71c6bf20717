"""Feature shift: each client's images are changed in a way of its own, over any partition.

`Rotation`: as in Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020 (arXiv:2006.04088).
`Noise`: the code of Li et al., Federated Learning on Non-IID Data Silos: An Experimental Study, ICDE 2022 ("NIID-Bench",
arXiv:2102.02079), where the standard deviation grows with the client's number; their paper prints it as a variance.
`Corruption`: four corruptions of Hendrycks & Dietterich, Benchmarking Neural Network Robustness to Common Corruptions, ICLR 2019
(arXiv:1903.12261), with the severities of their CIFAR-10-C.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Interval
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fl.checks import Checked, check_choice, is_real
from lightning_fl.data.samples.dataset_samples import DatasetSamples, ReadInBatches
from lightning_fl.data.samples.tensor_samples import Samples, TensorSamples
from lightning_fl.errors import require

SHIFT = 7
"""Random stream of the noise: (seed, SHIFT, index of the sample)."""


@dataclass(frozen=True)
class Client:
    """The client whose samples are changed.

    Attributes:
        number: k, from 0.
        num_clients: N.
        seed: seed of the split.
    """

    number: int
    num_clients: int
    seed: int


@dataclass(frozen=True)
class Shift(Checked, ABC):
    """A change of a client's images. The same sample is always changed in the same way."""

    keeps_bytes = False
    """True if images of bytes stay images of bytes."""

    @abstractmethod
    def __call__(self, images: Tensor, client: Client, indices: np.ndarray) -> Tensor:
        """Return changed images, a new tensor of the same shape.

        Args:
            images: (n, C, H, W), float32, usually in [0, 1]; bytes if the shift keeps them.
            client: the client that holds them.
            indices: position of each image in the training set, (n,).

        Raises:
            UserError: these images cannot be changed this way.
        """


@dataclass(frozen=True)
class Rotation(Shift):
    """Rotate the images of client k by the angle k mod the number of angles, counter-clockwise.

    Args:
        angles: angles in degrees, multiples of 90.
    """

    angles: tuple[int, ...] = (0, 90, 180, 270)

    keeps_bytes = True

    def __post_init__(self) -> None:
        angles = self.angles if isinstance(self.angles, (tuple, list)) else (self.angles,)
        object.__setattr__(self, "angles", tuple(angles))
        allowed = len(self.angles) > 0 and all(is_real(angle) and angle % 90 == 0 for angle in self.angles)
        require(allowed, f"angles must be multiples of 90 degrees, such as (0, 90, 180, 270), got {self.angles}.")

    def __call__(self, images: Tensor, client: Client, indices: np.ndarray) -> Tensor:
        """Rotate images: see `Shift`."""
        require_images(self, images)
        turns = int(self.angles[client.number % len(self.angles)] // 90) % 4
        require(
            turns % 2 == 0 or images.shape[2] == images.shape[3],
            f"{self} turns images of {images.shape[2]}×{images.shape[3]} pixels on their side: use angles 0 and 180, or square "
            "images.",
        )
        return torch.rot90(images, turns, (2, 3)).contiguous()


@dataclass(frozen=True)
class Noise(Shift):
    """Add Gaussian noise to the inputs of client k, of standard deviation sigma · k / (N - 1); the first client has none.

    The noise of a sample is drawn once, and is the same in every pass.

    Args:
        sigma: standard deviation of the last client's noise, at least 0, in the units of the inputs; images go from 0 to 1.
    """

    sigma: Annotated[float, Ge(0)] = 0.1

    def __call__(self, images: Tensor, client: Client, indices: np.ndarray) -> Tensor:
        """Add noise: see `Shift`. Inputs of any shape are allowed."""
        deviation = self.sigma * client.number / max(1, client.num_clients - 1)
        return images + deviation * _normal(images, client.seed, indices) if deviation > 0 else images.clone()


LEVELS: dict[str, tuple[float, ...]] = {
    "noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
}
"""Standard deviation, standard deviation in pixels, factor, and addend at the severities 1 to 5 of CIFAR-10-C."""


@dataclass(frozen=True)
class Corruption(Shift):
    """Corrupt the images of client k by the kind k mod the number of kinds, as CIFAR-10-C does; values stay in [0, 1].

    Args:
        kinds: noise, blur, contrast and brightness, or some of them.
        severity: 1 (weak) to 5 (strong).
    """

    kinds: tuple[str, ...] = ("noise", "blur", "contrast", "brightness")
    severity: Annotated[int, Interval(ge=1, le=5)] = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", (self.kinds,) if isinstance(self.kinds, str) else tuple(self.kinds))
        require(len(self.kinds) > 0, f"kinds is empty: give some of {', '.join(LEVELS)}.")
        for kind in self.kinds:
            check_choice("kinds", kind, LEVELS)

    def __call__(self, images: Tensor, client: Client, indices: np.ndarray) -> Tensor:
        """Corrupt images: see `Shift`."""
        from scipy.ndimage import gaussian_filter

        require_images(self, images)
        low, high = (float(images.min()), float(images.max())) if images.numel() else (0.0, 1.0)
        require(
            low >= 0 and high <= 1,
            f"{self} needs images with values in [0, 1], but theirs go from {low:g} to {high:g}.",
        )
        kind = self.kinds[client.number % len(self.kinds)]
        level = LEVELS[kind][self.severity - 1]
        if kind == "noise":
            changed = images + level * _normal(images, client.seed, indices)
        elif kind == "blur":
            blurred = gaussian_filter(images.numpy(), (0, 0, level, level), mode="nearest")
            changed = torch.from_numpy(blurred)
        elif kind == "contrast":
            mean = images.mean((2, 3), keepdim=True)
            changed = (images - mean) * level + mean
        else:  # raises the value of hue, saturation and value
            value = images.amax(1, keepdim=True)
            raised = (value + level).clamp(max=1)
            changed = torch.where(value > 0, images * (raised / value.clamp_min(1e-12)), raised)
        return changed.clamp(0, 1)


def require_images(shift: Shift, images: Tensor) -> None:
    """Raise `UserError` unless samples are images."""
    shape = "×".join(map(str, images.shape[1:]))
    require(
        images.ndim == 4, f"{shift} changes images C×H×W, but a sample has the shape {shape or '()'}: leave out shift."
    )


def shift_clients(shift: Shift, samples: Samples, owners: np.ndarray, num_clients: int, seed: int) -> None:
    """Change the samples of all clients, in their training and in their validation parts.

    Args:
        shift: the change.
        samples: all training samples, also as evaluation reads them; those of the server stay as they are.
        owners: client of each sample, (n,); -1 for none.
        num_clients: N.
        seed: seed of the split.
    """
    if samples.in_evaluation is not None:
        shift_clients(shift, samples.in_evaluation, owners, num_clients, seed)

    def changed(inputs: Tensor, number: int, indices: np.ndarray) -> Tensor:
        return shift(inputs, Client(number, num_clients, seed), indices)

    if isinstance(samples, TensorSamples):
        samples.inputs = _shifted(samples.inputs, owners, changed, shift.keeps_bytes)
        return
    require(
        isinstance(samples, DatasetSamples) and not isinstance(samples.dataset, ReadInBatches),
        f"{shift} cannot change {type(samples).__name__}, whose samples are read in whole batches: leave out shift.",
    )
    assert isinstance(samples, DatasetSamples)
    samples.dataset = _ShiftedDataset(samples.dataset, owners, changed)


def _shifted(
    inputs: Tensor, owners: np.ndarray, changed: Callable[[Tensor, int, np.ndarray], Tensor], keeps_bytes: bool
) -> Tensor:
    """Return a copy of stored inputs, scaled to [0, 1] if they were bytes and do not stay so, with the clients' ones changed."""
    scaled = inputs.float() / 255 if inputs.dtype == torch.uint8 and not keeps_bytes else inputs.clone()
    require(
        keeps_bytes or scaled.is_floating_point(),
        f"shift changes images or other inputs in floats, but the inputs are {str(inputs.dtype)[6:]} numbers: leave it out.",
    )
    order = np.argsort(owners, kind="stable")
    starts = np.flatnonzero(np.diff(owners[order], prepend=-1))
    for rows in np.split(order, starts)[1:]:
        scaled[torch.from_numpy(rows)] = changed(scaled[torch.from_numpy(rows)], int(owners[rows[0]]), rows)
    return scaled


class _ShiftedDataset(Dataset):
    """A dataset whose samples are images, alone or first in a tuple or list, changed when they are read."""

    def __init__(self, dataset: Any, owners: np.ndarray, changed: Callable[[Tensor, int, np.ndarray], Tensor]) -> None:
        self.dataset, self.owners, self.changed = dataset, owners, changed

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, index: int) -> Any:
        sample, owner = self.dataset[index], int(self.owners[index])
        first = sample[0] if isinstance(sample, (tuple, list)) else sample
        require(
            isinstance(first, Tensor) and first.is_floating_point(),
            f"shift changes float tensors, but {type(self.dataset).__name__} gives {type(first).__name__}: convert the images, "
            "as with torchvision's ToTensor.",
        )
        if owner < 0:
            return sample
        shifted = self.changed(first.unsqueeze(0), owner, np.array([index])).squeeze(0)
        if not isinstance(sample, (tuple, list)):
            return shifted
        made = getattr(type(sample), "_make", type(sample))  # a named tuple takes its parts one by one
        return made([shifted, *sample[1:]])


def _normal(like: Tensor, seed: int, indices: np.ndarray) -> Tensor:
    """Return standard normal numbers, drawn for each sample from its own stream."""
    drawn = np.empty(like.shape, dtype=np.float32)
    for row, index in zip(drawn, indices, strict=True):
        row[...] = np.random.default_rng([seed, SHIFT, int(index)]).standard_normal(row.shape, dtype=np.float32)
    return torch.from_numpy(drawn).to(like.dtype)
