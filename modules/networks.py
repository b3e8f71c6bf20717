"""The small image networks of the federated-learning papers, by name.

Sources: LeNet-5 (LeCun et al. 1998), VGG (Simonyan and Zisserman 2015), ResNet for CIFAR (He et al. 2016), and the
convolutional networks that FedDUMAP (TIST 2024), FedLDF (2024), FedDP (CCGrid 2023) and FedAdam-SSM (2024) train.

A network is a plain chain of named layers, `conv1 → bn1 → relu1 → pool1 → … → flatten → fc1 → …`, or such a chain with
residual blocks in the middle. Every ReLU is a separate module, so that a hook can read its output feature map, and none
works in place. Inputs are (B, in_channels, image_size, image_size) floats, outputs are (B, num_classes) logits.

All networks are initialised alike: convolution weights N(0, 2/(k²·C_out)) (He et al. 2015, fan-out) with bias 0, as in
the code of FedDUMAP and as usual for ResNets; BatchNorm γ=1, β=0; linear layers as in PyTorch.

Parameters and multiply-accumulates (MACs) below are for 10 classes and the usual image size; MACs count convolutions
and linear layers without their biases.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from lightning_fl.checks import check_choice, check_whole
from lightning_fl.errors import nearest, require
from lightning_fl.modules.initialisation import he_initialised, side_before_flatten
from lightning_fl.modules.residual_blocks import BasicBlock
from lightning_fl.modules.vgg import vgg9, vgg11, vgg11_bn


def network(
    name: str, num_classes: int, in_channels: int | None = None, image_size: int | None = None, **options: Any
) -> nn.Module:
    """Build the network `name` of `NETWORKS`.

    Args:
        name: a key of `NETWORKS`.
        num_classes: number of logits, at least 1.
        in_channels: channels of the images; None means the network's usual number.
        image_size: height and width of the images in pixels; None means the network's usual size.
        options: the network's own options, such as `dropout` of `vgg11`.

    Raises:
        UserError: a name or option is unknown, or the image size is too small for the network.

    >>> network("linear", num_classes=10, in_channels=1, image_size=8)
    Sequential(
      (flatten): Flatten(start_dim=1, end_dim=-1)
      (fc): Linear(in_features=64, out_features=10, bias=True)
    )
    """
    usual_channels, usual_size = usual_input(name)
    in_channels = usual_channels if in_channels is None else in_channels
    image_size = usual_size if image_size is None else image_size
    for label, value in (("num_classes", num_classes), ("in_channels", in_channels), ("image_size", image_size)):
        check_whole(f"network {name!r}: {label}", value, 1)
    allowed = list(inspect.signature(NETWORKS[name]).parameters)[3:]
    for option in options:
        hint = nearest(option, allowed) if allowed else "it has none"
        require(option in allowed, f"network {name!r} has no option {option!r}: {hint}")
    return NETWORKS[name](num_classes, in_channels, image_size, **options)


def usual_input(name: str) -> tuple[int, int]:
    """Return the usual (in_channels, image_size) of the network `name`: the defaults of its builder.

    >>> usual_input("cnn_mnist")
    (1, 28)
    """
    remedy = f"use {{class_path: {name}}} for a class of your own; " if "." in name else ""
    require(name in NETWORKS, f"unknown network {name!r}: {remedy}{nearest(name, NETWORKS)}")
    parameters = inspect.signature(NETWORKS[name]).parameters
    return parameters["in_channels"].default, parameters["image_size"].default


# ------------------------------------------------------------------------------------------------ chains


def linear(num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> nn.Module:
    """Softmax regression on the pixels, for images of any size. 30,730 parameters."""
    return nn.Sequential(
        OrderedDict(flatten=nn.Flatten(), fc=nn.Linear(in_channels * image_size * image_size, num_classes))
    )


def cnn(num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> nn.Module:
    """Three unpadded 3×3 convolutions and two linear layers (FedDUMAP). 122,570 parameters, 4.5 M MACs."""
    side = side_before_flatten("cnn", image_size, lambda size: ((size - 2) // 2 - 2) // 2 - 2)
    return he_initialised(
        nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(in_channels, 32, 3),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(32, 64, 3),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                conv3=nn.Conv2d(64, 64, 3),
                relu3=nn.ReLU(),
                flatten=nn.Flatten(),
                fc1=nn.Linear(64 * side * side, 64),
                relu4=nn.ReLU(),
                fc2=nn.Linear(64, num_classes),
            )
        )
    )


def lenet5(num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> nn.Module:
    """LeNet-5 with ReLU and max-pooling (FedDUMAP). 62,006 parameters, 0.65 M MACs."""
    side = side_before_flatten("lenet5", image_size, lambda size: ((size - 4) // 2 - 4) // 2)
    return he_initialised(
        nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(in_channels, 6, 5),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(6, 16, 5),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(16 * side * side, 120),
                relu3=nn.ReLU(),
                fc2=nn.Linear(120, 84),
                relu4=nn.ReLU(),
                fc3=nn.Linear(84, num_classes),
            )
        )
    )


def cnn_mnist(num_classes: int = 10, in_channels: int = 1, image_size: int = 28) -> nn.Module:
    """Two unpadded 5×5 convolutions and two linear layers for 28×28 grey images (FedAdam-SSM). 21,840 parameters."""
    side = side_before_flatten("cnn_mnist", image_size, lambda size: ((size - 4) // 2 - 4) // 2)
    return he_initialised(
        nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(in_channels, 10, 5),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(10, 20, 5),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(20 * side * side, 50),
                relu3=nn.ReLU(),
                fc2=nn.Linear(50, num_classes),
            )
        )
    )


# ------------------------------------------------------------------------------------------------ ResNet


def resnet18(
    num_classes: int = 10,
    in_channels: int = 3,
    image_size: int = 32,
    conv_bias: bool = True,
    stem_kernel: int = 3,
) -> nn.Module:
    """ResNet-18 with the CIFAR stem, no first pooling (FedDUMAP). 11,178,762 parameters, 556 M MACs.

    Images may have any size: the whole last feature map is averaged.

    Options:
        conv_bias: True if convolutions have a bias (FedDUMAP: True; FedAdam-SSM: False, 11,173,962 parameters).
        stem_kernel: side of the first convolution's kernel in pixels; FedAdam-SSM prints 2, most likely a misprint of
            3. The feature map keeps the size of the image.
    """
    check_whole("network 'resnet18': stem_kernel", stem_kernel, 1)
    stem = nn.Conv2d(
        in_channels,
        64,
        stem_kernel,
        padding=stem_kernel // 2 if stem_kernel % 2 else "same",
        bias=conv_bias,
    )
    return _resnet(stem, widths=(64, 128, 256, 512), depth=2, num_classes=num_classes, conv_bias=conv_bias)


def resnet32(
    num_classes: int = 10, in_channels: int = 3, image_size: int = 32, shortcut: Literal["A", "B"] = "A"
) -> nn.Module:
    """ResNet-32 for CIFAR (FedDP): three stages of five blocks. 464,154 parameters, 69 M MACs.

    Images may have any size: the whole last feature map is averaged.

    Option: `shortcut` of the blocks that halve the image, in the notation of He et al.: "A" pads with zero channels,
    "B" is a 1×1 convolution with BatchNorm (466,906 parameters).
    """
    check_choice("network 'resnet32': shortcut", shortcut, ("A", "B"))
    stem = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
    return _resnet(stem, widths=(16, 32, 64), depth=5, num_classes=num_classes, conv_bias=False, shortcut=shortcut)


def _resnet(
    stem: nn.Conv2d, widths: tuple[int, ...], depth: int, num_classes: int, conv_bias: bool, shortcut: str = "B"
) -> nn.Module:
    width = stem.out_channels
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=stem, bn1=nn.BatchNorm2d(width), relu1=nn.ReLU())
    for stage, stage_width in enumerate(widths, start=1):
        blocks = []
        for block in range(depth):
            stride = 2 if block == 0 and stage > 1 else 1
            blocks.append(BasicBlock(width, stage_width, stride, conv_bias, shortcut))
            width = stage_width
        layers[f"stage{stage}"] = nn.Sequential(*blocks)
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(width, num_classes)
    return he_initialised(nn.Sequential(layers))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "cnn": cnn,
    "lenet5": lenet5,
    "vgg9": vgg9,
    "vgg11": vgg11,
    "vgg11_bn": vgg11_bn,
    "resnet18": resnet18,
    "resnet32": resnet32,
    "cnn_mnist": cnn_mnist,
    "linear": linear,
}
"""Builders by name, called as `(num_classes, in_channels, image_size, **options)`; lists show their first doc line."""
