"""VGG-11 and its variants for images of 32 pixels, of any width (Simonyan and Zisserman, ICLR 2015, arXiv:1409.1556)."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count

from torch import nn

from lightning_fl.checks import check_between
from lightning_fl.modules.initialisation import he_initialised, side_before_flatten

VGG11_STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))  # a max-pooling ends every stage


def vgg9(num_classes: int = 10, in_channels: int = 3, image_size: int = 32, width: float = 1.0) -> nn.Module:
    """The eight convolutions of VGG-11 with BatchNorm, one linear layer (FedLDF). 9,231,114 parameters, 153 M MACs.

    Option: `width`, the share of all channels, in (0, 1].
    """
    side = side_before_flatten("vgg9", image_size, lambda size: size // 32)
    layers = _vgg_features("vgg9", in_channels, width, batch_norm=True)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(_narrowed(512, width) * side * side, num_classes)
    return he_initialised(nn.Sequential(layers))


def vgg11(
    num_classes: int = 10, in_channels: int = 3, image_size: int = 32, dropout: float = 0.0, width: float = 1.0
) -> nn.Module:
    """VGG-11 with linear layers of 512, no BatchNorm (FedDUMAP, FedDP). 9,750,922 parameters, 153 M MACs.

    Options:
        dropout: probability before the first two linear layers (NIID-Bench: 0.5), in [0, 1).
        width: share of all channels and of the first two linear layers' neurons, in (0, 1].
    """
    return _vgg11("vgg11", num_classes, in_channels, image_size, dropout, width, batch_norm=False)


def vgg11_bn(
    num_classes: int = 10, in_channels: int = 3, image_size: int = 32, dropout: float = 0.0, width: float = 1.0
) -> nn.Module:
    """VGG-11 with a BatchNorm after every convolution (FedDP). 9,756,426 parameters, 153 M MACs.

    Options:
        dropout: probability before the first two linear layers, in [0, 1).
        width: share of all channels and of the first two linear layers' neurons, in (0, 1].
    """
    return _vgg11("vgg11_bn", num_classes, in_channels, image_size, dropout, width, batch_norm=True)


def _vgg11(
    name: str, num_classes: int, in_channels: int, image_size: int, dropout: float, width: float, batch_norm: bool
) -> nn.Module:
    check_between(f"network {name!r}: dropout", dropout, 0, 1, "[)")
    side = side_before_flatten(name, image_size, lambda size: size // 32)
    layers = _vgg_features(name, in_channels, width, batch_norm)
    layers["flatten"] = nn.Flatten()
    hidden = _narrowed(512, width)
    inputs = hidden * side * side
    for index in (1, 2):
        if dropout:
            layers[f"dropout{index}"] = nn.Dropout(dropout)
        layers[f"fc{index}"] = nn.Linear(inputs, hidden)
        layers[f"relu{8 + index}"] = nn.ReLU()
        inputs = hidden
    layers["fc3"] = nn.Linear(hidden, num_classes)
    return he_initialised(nn.Sequential(layers))


def _narrowed(channels: int, width: float) -> int:
    """Return the share `width` of some channels, at least one."""
    return max(1, round(width * channels))


def _vgg_features(name: str, in_channels: int, width: float, batch_norm: bool) -> OrderedDict[str, nn.Module]:
    check_between(f"network {name!r}: width", width, 0, 1, "(]")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    index = count(1)
    for stage, stage_channels in enumerate(VGG11_STAGES, start=1):
        for channels in (_narrowed(whole, width) for whole in stage_channels):
            number = next(index)
            layers[f"conv{number}"] = nn.Conv2d(in_channels, channels, 3, padding=1)
            if batch_norm:
                layers[f"bn{number}"] = nn.BatchNorm2d(channels)
            layers[f"relu{number}"] = nn.ReLU()
            in_channels = channels
        layers[f"pool{stage}"] = nn.MaxPool2d(2)
    return layers
