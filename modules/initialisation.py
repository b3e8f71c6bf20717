"""Parts of building a network: its initialisation, and the size of its last feature map."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from torch import nn

from lightning_fl.errors import require


def he_initialised(layers: nn.Module) -> nn.Module:
    """Initialise all convolutions of a network as He et al. (2015, fan-out) do, with bias 0, and return it."""
    for module in layers.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return layers


def side_before_flatten(name: str, image_size: int, shrink: Callable[[int], int]) -> int:
    """Return the side of the feature map before the flatten layer, `shrink(image_size)`, in pixels.

    Args:
        name: name of the network, for the message.
        image_size: side of the images in pixels.
        shrink: function from the side of the images to that of the feature map.

    Raises:
        UserError: the images are too small, so that nothing would be left.
    """
    side = shrink(image_size)
    if side < 1:
        smallest = next(size for size in count(image_size) if shrink(size) >= 1)
        require(
            False,
            f"network {name!r} needs images of at least {smallest}×{smallest}, got {image_size}×{image_size}; Digits "
            "and ImageFolder resize their images to image_size",
        )
    return side
