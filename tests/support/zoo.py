"""Networks of every family that users bring: torchvision's classification zoo, a U-Net, a recurrent network, some of timm."""

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import MBConvConfig
from torchvision.models.regnet import BlockParams

NUM_CLASSES = 5


class UNet(nn.Module):
    """Encoder, decoder and a skip connection; a class for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, NUM_CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.down(x)
        return self.last(torch.cat([skipped, self.up(self.middle(F.max_pool2d(skipped, 2)))], 1))


class Recurrent(nn.Module):
    """Two LSTM layers over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(24, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.permute(0, 2, 1, 3).flatten(2))[0][:, -1])


class WithAuxiliaryHead(nn.Module):
    """Network with a head that runs only while it trains, as GoogLeNet's; `wrong` reads channels in another order."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.wrong = wrong
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 6, 3, padding=1)
        self.head = nn.Linear(6, 5)
        self.auxiliary = nn.Sequential(nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Dropout(), nn.Linear(4 * 36, 5))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        logits = self.head(self.second(x.relu()).mean((2, 3)))
        return (logits, self.auxiliary(x.flip(1) if self.wrong else x)) if self.training else logits


def _convnext() -> nn.Module:
    return models.ConvNeXt([CNBlockConfig(8, 12, 1), CNBlockConfig(12, None, 1)], num_classes=NUM_CLASSES)


def _efficientnet() -> nn.Module:
    blocks = [MBConvConfig(1, 3, 1, 8, 8, 1, 0.5, 1.0), MBConvConfig(4, 3, 2, 8, 12, 2, 0.5, 1.0)]
    return models.EfficientNet(blocks, 0.1, num_classes=NUM_CLASSES)


def _regnet() -> nn.Module:
    blocks = BlockParams([1, 1], [16, 16], [8, 8], [1.0, 1.0], [2, 2], se_ratio=0.25)
    return models.RegNet(blocks, num_classes=NUM_CLASSES, stem_width=8)


def _named(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: models.get_model(name, weights=None, num_classes=NUM_CLASSES, **options)


Zoo = dict[str, tuple[Callable[[], nn.Module], int]]

SMALL: Zoo = {  # network and the height of its images
    "ConvNeXt": (_convnext, 16),
    "DenseNet": (lambda: models.DenseNet(4, (2, 2), 8, num_classes=NUM_CLASSES), 16),
    "EfficientNet": (_efficientnet, 16),
    "MaxVit": (lambda: models.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 4, 0.1, num_classes=NUM_CLASSES), 32),
    "MobileNetV2": (lambda: models.MobileNetV2(NUM_CLASSES, 0.1), 16),
    "MobileNetV3": (_named("mobilenet_v3_small", width_mult=0.25), 16),
    "RegNet": (_regnet, 16),
    "ShuffleNetV2": (lambda: models.ShuffleNetV2([1, 1, 1], [8, 8, 16, 16, 16], NUM_CLASSES), 32),
    "Swin": (lambda: models.SwinTransformer([2, 2], 8, [1, 1], [2, 2], [2, 2], num_classes=NUM_CLASSES), 16),
    "ViT": (lambda: models.VisionTransformer(8, 4, 1, 2, 8, 16, num_classes=NUM_CLASSES), 8),
    "U-Net": (UNet, 8),
    "auxiliary head": (WithAuxiliaryHead, 6),
    "LSTM": (Recurrent, 8),
}

WHOLE: Zoo = {
    "alexnet": (_named("alexnet"), 64),
    "convnext_tiny": (_named("convnext_tiny"), 32),
    "densenet121": (_named("densenet121"), 32),
    "efficientnet_b0": (_named("efficientnet_b0"), 32),
    "efficientnet_v2_s": (_named("efficientnet_v2_s"), 32),
    "googlenet": (_named("googlenet", init_weights=False), 32),
    "inception_v3": (_named("inception_v3", init_weights=False, aux_logits=False), 75),
    "maxvit_t": (_named("maxvit_t"), 224),
    "mnasnet0_5": (_named("mnasnet0_5"), 32),
    "mobilenet_v2": (_named("mobilenet_v2"), 32),
    "mobilenet_v3_small": (_named("mobilenet_v3_small"), 32),
    "regnet_y_400mf": (_named("regnet_y_400mf"), 32),
    "resnet18": (_named("resnet18"), 32),
    "resnext50_32x4d": (_named("resnext50_32x4d"), 32),
    "shufflenet_v2_x0_5": (_named("shufflenet_v2_x0_5"), 32),
    "squeezenet1_0": (_named("squeezenet1_0"), 32),
    "swin_t": (_named("swin_t"), 32),
    "vgg11_bn": (_named("vgg11_bn"), 32),
}


def _of_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: pytest.importorskip("timm").create_model(name, num_classes=NUM_CLASSES, **options)


TIMM: Zoo = {  # the whole families of blocks, in timm's own sizes for tests
    "timm BYOBNet": (_of_timm("test_byobnet"), 32),
    "timm CoAtNet": (_of_timm("test_coatnet", img_size=32), 32),
    "timm ConvNeXt": (_of_timm("test_convnext"), 32),
    "timm NFNet": (_of_timm("test_nfnet"), 32),
    "timm ViT": (_of_timm("test_vit", img_size=32), 32),
}

ZOO = SMALL | WHOLE | TIMM


class ZooModule(L.LightningModule):
    """Module of any of these networks; auxiliary outputs are trained as well."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = build()

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        outputs = self(x)
        loss = torch.zeros(())
        for logits in [outputs] if isinstance(outputs, Tensor) else outputs:
            pixels = logits if logits.dim() == 2 else logits.permute(0, 2, 3, 1).flatten(0, 2)
            loss = loss + F.cross_entropy(pixels, y.repeat_interleave(len(pixels) // len(y)))
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)
