"""Structured pruning in any Lightning trainer: filters of low importance are removed from the network, not masked.

Before the training of an epoch, each convolution l with c_l filters loses its ⌊rate · c_l⌋ least important filters, with
everything that belongs to them: optimiser state, batch normalisation, inputs of the next layers. Importance is HRank's (Lin et
al., CVPR 2020), the mean rank of a filter's feature map, or the norm of its weights (Li et al., ICLR 2017).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.callbacks.pruning._pruning_callback import StructuredPruning
from lightning_fl.callbacks.pruning._training_samples import calibration_images, example_input
from lightning_fl.checks import check_between, checked
from lightning_fl.pruning import (
    feature_map_ranks,
    filter_magnitudes,
    filters_to_keep,
    plans_of,
    prune,
)
from lightning_fl.pruning.graph import Network


class FilterPruning(StructuredPruning):
    """Remove the least important filters from a network while it trains.

    Prunes every convolution whose filters affect only the layers behind it. A convolution stays whole if its outputs are added
    to others (in residual networks all but the first of a block), if it has groups, or if it gives the network's own outputs.
    On a copy with random numbers, the callback first checks that the small network computes the same as the large one without
    these filters. A layer that fails stays whole, or is refused if `rate` names it.

    A layer of c filters loses ⌊rate · c⌋, and keeps at least one. In front of a GroupNorm, whole groups of the lowest mean
    importance are removed, at most ⌊rate · c⌋ filters.

    The module needs an `example_input_array`, or a `forward` that takes the first part of a batch. Parameters stay the same
    objects, and optimisers keep the remaining part of their state. DDP is refused, because it needs constant shapes.
    Checkpoints contain the small network; with this callback they also load into a dense one, in `fit`, `validate` and `test`.

    Logs `prune/rate`, the removed share of these filters, and `prune/parameters`, the number of remaining parameters.

    Args:
        rate: share of filters that every layer loses, in [0, 1); or shares by layer, {"network.conv1": 0.2, …}, where other
            layers lose none.
        prune_epoch: epoch (in a federation the round), from 0; the network is pruned before its training.
        every_n_epochs: epochs from one pruning to the next, at least 1; None: prune once.
        importance: `feature_rank`, HRank's; or `magnitude`, the L1 norm of a filter's weights.
        num_batches: batches of images for `feature_rank`, at least 1, from the server's samples if it has any, otherwise from
            the training set.
        batch_size: images per batch, at least 1.

    Raises:
        UserError: a value is not allowed; at the start of `fit`, a layer cannot lose filters.

    Attributes:
        filters: kept filters of each layer that has lost some, as indices into its original filters.
        widths: original number of filters of each layer that can lose some; empty before the first pruning.
    """

    @checked
    def __init__(
        self,
        rate: float | dict[str, float] = 0.4,
        prune_epoch: int = 30,
        every_n_epochs: int | None = None,
        importance: Literal["feature_rank", "magnitude"] = "feature_rank",
        num_batches: Annotated[int, Ge(1)] = 5,
        batch_size: Annotated[int, Ge(1)] = 128,
    ) -> None:
        super().__init__(prune_epoch, every_n_epochs)
        for layer, share in rate.items() if isinstance(rate, Mapping) else [("every layer", rate)]:
            check_between(f"rate, the share of filters that {layer} loses,", share, 0, 1, "[)")
        self.rate = rate
        self.importance = importance
        self.num_batches = num_batches
        self.batch_size = batch_size
        self.filters: dict[str, Tensor] = {}
        self.widths: dict[str, int] = {}

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Reset for a new training of a dense module."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and not plans_of(pl_module):
            self.filters, self.widths = {}, {}

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Check before any training that pruning will work."""
        super().on_train_start(trainer, pl_module)
        if not self.will_prune(trainer):
            return
        self.require_prunable(
            trainer, pl_module, tuple(self.rate) if isinstance(self.rate, Mapping) and not self.widths else ()
        )
        if self.importance == "feature_rank":
            self.require_rankable(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Prune if it is due."""
        if not self.is_due(trainer):
            return
        # A layer may have only one filter left by now, which it keeps.
        network = Network(pl_module, example_input(trainer))
        layers = network.layers
        if isinstance(self.rate, Mapping):
            layers = tuple(name for name in layers if name in self.rate)
        scores = self._scores(trainer, pl_module, layers)
        plan = self.plan(trainer, network, filters_to_keep(scores, self.rate, network.blocks))
        self.widths = self.widths or dict(plan.widths)
        if plan.filters:
            prune(pl_module, plan, trainer.optimizers)
        elif not self.filters and self.rate and (not isinstance(self.rate, Mapping) or any(self.rate.values())):
            rank_zero_warn(
                f"FilterPruning removes nothing: with rate {self.rate} no layer loses a whole filter, or in front of a GroupNorm "
                "a whole group."
            )
        for name, filters in plan.filters.items():
            self.filters[name] = self.filters.get(name, torch.arange(plan.widths[name]))[filters]

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log the removed share and the remaining parameters."""
        lost = sum(self.widths[name] - len(filters) for name, filters in self.filters.items())
        self.report(trainer, pl_module, "prune/rate", lost / max(1, sum(self.widths.values())))
        pl_module.log(
            "prune/parameters", sum(p.numel() for p in pl_module.parameters())
        )  # a float would become float32

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the kept filters, and the epoch of the last pruning."""
        return super().state_dict() | {"filters": self.filters, "widths": self.widths}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        super().load_state_dict(state_dict)
        self.filters, self.widths = dict(state_dict["filters"]), dict(state_dict["widths"])

    def _scores(self, trainer: Any, pl_module: LightningModule, layers: tuple[str, ...]) -> dict[str, Tensor]:
        if self.importance == "magnitude":
            return filter_magnitudes(pl_module, layers)
        images = calibration_images(trainer, self.num_batches * self.batch_size, self.batch_size)
        return feature_map_ranks(pl_module, images, layers)
