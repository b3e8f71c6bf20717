"""Measure how often an attack makes a classifier predict the attackers' class, in any Lightning trainer."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Ge
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_fl.checks import checked, is_real
from lightning_fl.data.trigger import stamped
from lightning_fl.errors import require


class BackdoorProbe(Callback):
    """Log `attack/success` with each validation: the share of samples of other classes that a trigger turns into a target class.

    The trigger is the one of `lightning_fl.features.attacks.Backdoor`. With `source` there is no trigger: the probe logs the
    share of that class's samples that are classified as `target`, the aim of `LabelFlip`. The module's `forward` must return
    scores (B, C) of the batch's first entry; the second are the classes (B,). In a federation whose clients own parts of the
    model, or models of their own, the share is the mean over the clients, as are the module's values.

    Args:
        target: class that the attackers want.
        source: class whose samples should be classified as `target`; null: samples of all other classes, with the trigger.
        value: value of the trigger's pixels, as in `Backdoor`; null: 1, which is white in images of [0, 1].

    Raises:
        UserError: an argument is out of range; or, in the first validation, batches or scores have another shape.
    """

    in_rehearsals = True
    """True if a plan's rehearsal calls its hooks, because the model or the messages depend on them."""
    probes_models = True
    """True if it measures each model of a validation, also those of single clients."""

    @checked
    def __init__(
        self, target: Annotated[int, Ge(0)] = 0, source: Annotated[int, Ge(0)] | None = None, value: float | None = None
    ) -> None:
        if source is not None:
            require(source != target, f"source and target are both {target}: give two classes.")
        self.target = target
        self.source = source
        require(value is None or is_real(value), f"value, of the trigger's pixels, must be a number, got {value!r}.")
        self.value = value

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add the samples of a batch to the share."""
        self.measure(pl_module, batch)

    def measure(self, pl_module: LightningModule, batch: Any) -> None:
        """Add the samples of a batch to the share of the model that the module holds."""
        inputs, labels = self._parts(batch)
        asked = labels != self.target if self.source is None else labels == self.source
        if not asked.any():
            if not hasattr(pl_module.trainer, "evaluate_clients") and pl_module.trainer.world_size > 1:
                # Every process of lightning.Trainer must log a value that they add up.
                pl_module.log("attack/success", 0.0, batch_size=0, sync_dist=True)
            return
        scores = pl_module((stamped(inputs, self.value) if self.source is None else inputs)[asked])
        is_scores = isinstance(scores, Tensor) and scores.dim() == 2 and scores.shape[1] > self.target
        require(
            is_scores,
            f"BackdoorProbe needs scores (B, C) of more than {self.target} classes, and forward of {type(pl_module).__name__} "
            f"returns {tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__}.",
        )
        is_target = scores.argmax(1) == self.target
        pl_module.log("attack/success", is_target.double().mean(), batch_size=len(is_target), sync_dist=True)

    def _parts(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return inputs (B, …) and classes (B,) of a batch."""
        is_pair = isinstance(batch, list | tuple) and len(batch) >= 2 and all(isinstance(x, Tensor) for x in batch[:2])
        inputs, labels = batch[:2] if is_pair else (torch.zeros(0), torch.zeros(0))
        fits = is_pair and labels.dim() == 1 and not labels.is_floating_point()
        require(
            fits and (inputs.dim() == 4 or self.source is not None),
            "BackdoorProbe needs batches of images (B, C, H, W) and classes (B,), but the batches of this validation differ.",
        )
        return inputs, labels
