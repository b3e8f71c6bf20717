"""Random crop and flip of a whole batch at once, each image with its own draw (no loop over images)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own name for it)
from torch import Tensor


def crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Shift each image by up to `padding` pixels over a zero border and mirror half of them left to right.

    This is torchvision's `RandomCrop(size, padding)` and `RandomHorizontalFlip()` with one draw per image.

    Args:
        images: (B, C, H, W) float; contiguous or channels_last, which the result keeps.
        generator: a CPU generator, also for images on an accelerator: the draws are the same on every machine.
        padding: width of the border, in pixels.

    Returns:
        (B, C, H, W), same type and device.
    """
    num_images, _, height, width = images.shape
    shifts = torch.randint(0, 2 * padding + 1, (2, num_images), generator=generator).to(images.device)
    mirrored = (torch.rand(num_images, generator=generator) < 0.5).to(images.device)
    # Index in the memory order of the pixels, so that whole rows are copied.
    channels_last = not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)
    windows = F.pad(images, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    windows = windows.permute(0, 2, 3, 4, 5, 1) if channels_last else windows.permute(0, 2, 3, 1, 4, 5)
    cropped = windows[torch.arange(num_images, device=images.device), shifts[0], shifts[1]]
    flipped = cropped.flip(2 if channels_last else 3)
    result = torch.where(mirrored.view(-1, 1, 1, 1), flipped, cropped)
    return result.permute(0, 3, 1, 2) if channels_last else result
