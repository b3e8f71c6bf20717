"""An image classifier for any Lightning trainer: cross-entropy, SGD, and two learning-rate schedules that multiply.

With η the learning rate, d the decay and t the epoch of the trainer, `lr_decay` gives η·dᵗ. The cosine of Loshchilov
and Hutter (2017), constant within an epoch, gives η·½(1 + cos(πe/E)) in epoch e of E. Both together multiply.
The decay is a scheduler of interval "epoch"; the cosine has interval "step" and counts epochs itself. A trainer that
runs a whole training within each of its epochs therefore decays once per epoch of its own, and each inner training
follows a whole cosine.
"""

from __future__ import annotations

import math
import warnings
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from annotated_types import Ge, Gt, Interval
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, MultiplicativeLR

from lightning_fl.checks import check_arguments
from lightning_fl.errors import UserError, require
from lightning_fl.modules.networks import network as build_network
from lightning_fl.modules.networks import usual_input
from lightning_fl.pruning import Prunable


class ImageClassifier(Prunable, LightningModule):
    """Train a network on (images, labels) batches by mean cross-entropy and SGD.

    Images are (B, in_channels, image_size, image_size) floats, labels are (B,) class indices. Logs `train/loss` for
    every step, and `val/loss`, `val/accuracy` (`test/…`) as means over all samples.

    Args:
        network: a key of `lightning_fl.modules.NETWORKS`, or any module from images to (B, num_classes) logits. A
            module given from Python is no hyper-parameter: pass it again in `load_from_checkpoint(path, network=…)`.
        num_classes: number of classes, at least 2.
        in_channels: channels of the images; None means the usual number of a network given by name.
        image_size: height and width of the images in pixels; None means the usual size of a network given by name.
        learning_rate: step size of SGD, above 0.
        momentum: momentum of SGD as PyTorch defines it, in [0, 1).
        weight_decay: L2 penalty of SGD, at least 0.
        lr_decay: factor of the learning rate after every epoch, in (0, 1].
        lr_schedule: "constant", or "cosine": down from `learning_rate` over the epochs of a training.
        network_options: options of a network given by name, for example `{"dropout": 0.5}` for `vgg11`.

    Raises:
        UserError: an argument is outside its range, or a name is unknown.

    >>> model = ImageClassifier("linear", num_classes=10, in_channels=1, image_size=8)
    >>> model(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        network: str | nn.Module = "cnn",
        num_classes: Annotated[int, Ge(2)] = 10,
        in_channels: int | None = None,
        image_size: int | None = None,
        learning_rate: Annotated[float, Gt(0)] = 0.1,
        momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.0,
        weight_decay: Annotated[float, Ge(0)] = 0.0,
        lr_decay: Annotated[float, Interval(gt=0, le=1)] = 1.0,
        lr_schedule: Literal["constant", "cosine"] = "constant",
        network_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        require(
            num_classes is not None,
            "the data do not define num_classes: set it (--data.num_classes at the command line)",
        )
        check_arguments(
            ImageClassifier.__init__, (), locals()
        )  # not `checked`: Lightning reads a subclass's arguments here
        with warnings.catch_warnings():
            # From the command line, the hyper-parameter `network` is a configuration, which must be saved.
            warnings.filterwarnings("ignore", "Attribute 'network' is an instance of")
            self.save_hyperparameters()
        if isinstance(self.hparams.get("network"), nn.Module):
            self.save_hyperparameters(ignore=["network"])
            self.hparams["network"] = None
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.lr_decay = lr_decay
        self.lr_schedule = lr_schedule
        if isinstance(network, str):
            self.network = build_network(network, num_classes, in_channels, image_size, **(network_options or {}))
            usual_channels, usual_size = usual_input(network)
            in_channels, image_size = in_channels or usual_channels, image_size or usual_size
        else:
            require(
                isinstance(network, nn.Module),
                f"network must be a name or an nn.Module, got {network!r}; a checkpoint whose network was a module "
                "needs it again: use load_from_checkpoint(path, network=…)",
            )
            require(not network_options, "network_options is for networks given by name, not for an nn.Module")
            self.network = network
        if in_channels and image_size:
            self.example_input_array = torch.zeros(1, in_channels, image_size, image_size)

    def forward(self, images: Tensor) -> Tensor:
        """Return the (B, num_classes) logits of (B, C, H, W) images."""
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of the batch, a scalar."""
        images, labels = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log `val/loss` and `val/accuracy`."""
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log `test/loss` and `test/accuracy`."""
        self._evaluate("test", batch)

    def predict_step(self, batch: Tensor | tuple[Tensor, ...] | list[Tensor], batch_idx: int) -> Tensor:
        """Return the class probabilities, (B, num_classes), of images or of an (images, …) batch."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return self.network(images).softmax(dim=-1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return SGD, with a scheduler of interval "epoch" for `lr_decay` and one of interval "step" for the cosine."""
        optimizer = torch.optim.SGD(
            self.network.parameters(), lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
        )
        schedulers: list[Any] = []
        # Both multiply the current learning rate, so their order does not matter: a LambdaLR would overwrite the decay.
        if self.lr_decay < 1:
            decay = ExponentialLR(optimizer, gamma=self.lr_decay)
            schedulers.append({"scheduler": decay, "interval": "epoch", "name": "lr_decay"})
        if self.lr_schedule == "cosine":
            cosine = MultiplicativeLR(optimizer, lambda step: self._cosine_ratio(step))
            schedulers.append({"scheduler": cosine, "interval": "step", "name": "cosine"})
        return [optimizer], schedulers

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = self.network(images)
        loss = F.cross_entropy(logits, labels)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        metrics = {f"{stage}/loss": loss, f"{stage}/accuracy": accuracy}
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=len(labels), sync_dist=True)

    def _cosine_ratio(self, step: int) -> float:
        """Return the factor from the learning rate of optimiser step `step - 1` to that of `step`; 1 within an epoch.

        It asks the trainer at every step, because the length may differ between trainings.
        """
        if step == 0:
            return 1.0
        total_steps = self.trainer.estimated_stepping_batches
        num_batches = self.trainer.num_training_batches
        if not (math.isfinite(total_steps) and math.isfinite(num_batches)):
            raise UserError(
                "lr_schedule='cosine' needs the length of the training: set max_epochs, and use a dataset with a length"
            )
        steps_per_epoch = math.ceil(num_batches / self.trainer.accumulate_grad_batches)
        num_epochs = math.ceil(total_steps / steps_per_epoch)
        epoch, previous = (min(s // steps_per_epoch, num_epochs - 1) for s in (step, step - 1))
        return cosine_factor(epoch, num_epochs) / cosine_factor(previous, num_epochs)


def cosine_factor(epoch: int, num_epochs: int) -> float:
    """Return ½(1 + cos(πe/E)): 1 in epoch 0, and above 0 in every epoch e < E.

    >>> [round(cosine_factor(epoch, 4), 3) for epoch in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    """
    return (1 + math.cos(math.pi * epoch / num_epochs)) / 2
