"""Residual blocks of the ResNets (He et al., Deep Residual Learning for Image Recognition, CVPR 2016)."""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut that adds the input to their output (He et al. 2016, figure 2).

    `y = relu2(bn2(conv2(relu1(bn1(conv1(x))))) + shortcut(x))`; (B, C_in, H, W) → (B, C_out, ⌈H/stride⌉, ⌈W/stride⌉).
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int = 1, conv_bias: bool = False, shortcut: str = "B"
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=conv_bias)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=conv_bias)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module
        if stride == 1 and in_channels == out_channels:
            self.shortcut = nn.Identity()
        elif shortcut == "A":
            self.shortcut = PaddingShortcut(out_channels - in_channels, stride)
        else:
            self.shortcut = nn.Sequential(
                OrderedDict(
                    conv=nn.Conv2d(in_channels, out_channels, 1, stride, bias=conv_bias),
                    bn=nn.BatchNorm2d(out_channels),
                )
            )
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C_in, H, W) to (B, C_out, ⌈H/stride⌉, ⌈W/stride⌉)."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu2(y + self.shortcut(x))


class PaddingShortcut(nn.Module):
    """Shortcut without parameters: every `stride`-th pixel between `extra` zero channels, half of them on each side."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.padding = (0, 0, 0, 0, extra // 2, extra - extra // 2)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C + extra, ⌈H/stride⌉, ⌈W/stride⌉)."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], self.padding)
