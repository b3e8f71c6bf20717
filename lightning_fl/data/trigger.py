"""The trigger of a backdoor: a square in the lower right corner of an image (BadNets: Gu et al., 2017, arXiv:1708.06733)."""

from __future__ import annotations

from torch import Tensor

SIZE = 3
"""Height and width in pixels."""


WHITE = 1.0
"""Value of a white pixel in images with values in [0, 1]."""


def stamped(images: Tensor, value: float | None = None) -> Tensor:
    """Return copies of images (B, C, H, W) with the trigger, 3×3 pixels of this value or else white, the same in all batches.

    >>> import torch
    >>> stamped(torch.zeros(1, 1, 4, 4))[0, 0, :, 2].tolist()
    [0.0, 1.0, 1.0, 1.0]
    """
    marked = images.clone()
    marked[..., -SIZE:, -SIZE:] = WHITE if value is None else value
    return marked
