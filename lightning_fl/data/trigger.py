"""The trigger of a backdoor: a square in the lower right corner of an image (BadNets: Gu et al., 2017, arXiv:1708.06733)."""

from __future__ import annotations

from torch import Tensor

SIZE = 3
"""Height and width in pixels."""


def stamped(images: Tensor) -> Tensor:
    """Return copies of images (B, C, H, W) with the trigger: 3×3 pixels at the largest value of their channel in the batch.

    >>> import torch
    >>> stamped(torch.arange(16.0).view(1, 1, 4, 4))[0, 0, :, 2].tolist()
    [2.0, 15.0, 15.0, 15.0]
    """
    marked = images.clone()
    if len(images):
        marked[..., -SIZE:, -SIZE:] = images.amax(dim=(0, 2, 3))[:, None, None]
    return marked
