"""Module without `configure_optimizers`, the same with one, and data that nobody has divided over clients."""

from typing import Any

import lightning as L  # noqa: N812
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Bare(L.LightningModule):
    """Linear classifier that says nothing about its optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.linear(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=len(batch[1]))
        self.log("val_acc", (self.linear(batch[0]).argmax(1) == batch[1]).float().mean(), batch_size=len(batch[1]))


class WithAdam(Bare):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)]


class WithSGD(Bare):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Takes(Bare):
    """Module that takes any parameter."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options


class Saves(WithSGD):
    """Module that saves its hyper-parameters, and one more that it finds itself."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.hparams["found"] = 3
        self.linear = nn.Linear(4, 3, bias)


class SavesAny(Saves):
    """The same, which takes any parameter."""

    def __init__(self, bias: bool = True, **options: Any) -> None:
        super().__init__(bias)
        self.save_hyperparameters()
        self.options = options


class Points(L.LightningDataModule):
    def __init__(self, size: int = 60, wide: bool = False) -> None:
        super().__init__()
        self.size = size

    def loader(self, size: int, seed: int) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        y = torch.randint(3, (size,), generator=generator)
        return DataLoader(TensorDataset(torch.randn(size, 4, generator=generator) + y[:, None], y), batch_size=5)

    def train_dataloader(self) -> DataLoader:
        return self.loader(self.size, 0)

    def val_dataloader(self) -> DataLoader:
        return self.loader(30, 1)
