"""Unstructured pruning in any Lightning trainer: the smallest weights become 0 and stay 0 (FedDUMAP's baseline IMC).

𝒱 = the ⌈p · R⌉-th smallest |v|, counted from 0, of the R weights and biases of all layers;  w ← w ⊙ [|w| > 𝒱], from then on

Unlike `torch.nn.utils.prune` and Lightning's `ModelPruning` it leaves the module as it is: no `weight_orig`, no `weight_mask`,
no forward hook. A checkpoint has the names and shapes of the dense network with zeros in it, and loads anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning.pytorch import LightningModule
from torch.utils.hooks import RemovableHandle

from lightning_fl.callbacks._pruning_callback import PruningCallback
from lightning_fl.callbacks.adaptive_rate import AdaptiveRate
from lightning_fl.errors import UserError, nearest, require
from lightning_fl.pruning import Masks, apply_masks, forget_masks, hold_masks, largest, masks_of, prunable

SCOPES = ("global", "layer")


class MagnitudePruning(PruningCallback):
    """Leave out the smallest weights when an epoch begins, and keep them at 0 for the rest of the training.

    All trained weights and biases can go, but those of normalisation and of excluded layers; each layer keeps at least its
    largest weight. Masked weights get no gradient, so that clipping and moments know nothing of them, and are put back to 0
    after each step of an optimiser, whatever momentum and weight decay make of them. The masks are kept in checkpoints.

    In a federation, where a round is an epoch, clients and server train under the mask, only the kept parameters cross, and each
    client is sent the mask once, at a bit for each parameter.

    Logs `prune/rate`, the share gone of the weights that could go, and `prune/kept`, the trained parameters that are left.

    Args:
        rate: share of the weights to leave out, in [0, 1); 0 leaves out none. An `AdaptiveRate` finds it when it is time.
        prune_epoch: the epoch before which to prune, from 0.
        every_n_epochs: prune again every so many epochs, each time this share of what is left; None: only once.
        scope: choose the smallest of the whole network (`global`) or of each `layer`.
        exclude: layers with one of these words as a part of their name stay whole; by default those beside residual blocks.

    Raises:
        UserError: a value outside its range, or a network without a weight to leave out.
    """

    def __init__(
        self,
        rate: float | AdaptiveRate = 0.5,
        prune_epoch: int = 30,
        every_n_epochs: int | None = None,
        scope: Literal["global", "layer"] = "global",
        exclude: Sequence[str] = ("shortcut", "downsample"),
    ) -> None:
        super().__init__(prune_epoch, every_n_epochs)
        if not isinstance(rate, AdaptiveRate):
            require(0 <= rate < 1, f"rate is the share of the weights to leave out and lies in [0, 1), got {rate}.")
        if scope not in SCOPES:
            raise UserError(f"scope {scope!r} is unknown; {nearest(str(scope), SCOPES)}.")
        self.rate = rate
        self.scope = scope
        self.exclude = tuple(exclude)
        self._masks: Masks = {}
        self._handles: list[RemovableHandle] = []

    @property
    def state_key(self) -> str:
        """Of its own for each pruning of a training."""
        return self._generate_state_key(
            rate="adaptive" if isinstance(self.rate, AdaptiveRate) else self.rate,
            prune_epoch=self.schedule.first,
            every_n_epochs=self.schedule.every,
            scope=self.scope,
            exclude=self.exclude,
        )

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """A new training begins."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and isinstance(self.rate, AdaptiveRate):
            self.rate.reset(pl_module)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """There must be something to prune, and an epoch to do it."""
        super().on_train_start(trainer, pl_module)
        require(bool(prunable(pl_module, self.exclude)), f"{type(pl_module).__name__} has no weight to leave out.")
        if isinstance(self.rate, AdaptiveRate) and self.schedule.next_after(trainer.current_epoch) is not None:
            self.rate.remember(pl_module)
            if self.will_prune(trainer):
                self.rate.start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Prune if it is time, and see that what was pruned remains so."""
        if trainer.current_epoch == 0:
            self._masks = {}  # of an earlier training
        self._follow(pl_module)
        if self.is_due(trainer):
            rate = self.rate(trainer, pl_module) if isinstance(self.rate, AdaptiveRate) else self.rate
            self._masks = self._choose(pl_module, rate) if rate else self._masks
        if self._masks:
            parameters = dict(pl_module.named_parameters())
            self._masks = {name: mask.to(parameters[name].device) for name, mask in self._masks.items()}
            apply_masks(pl_module, self._masks, trainer.optimizers)
            self._let_go()
            self._handles = hold_masks(pl_module, trainer.optimizers)

    def on_client_download(self, trainer: Any, pl_module: LightningModule, client: int) -> None:
        """A federation's hook: its engine keeps clients under the mask itself."""
        self._let_go()

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log what is left."""
        self._follow(pl_module)
        parameters = dict(pl_module.named_parameters())
        candidates = sum(
            parameters[name].numel() for names in prunable(pl_module, self.exclude).values() for name in names
        )
        gone = sum(int((~mask).sum()) for mask in self._masks.values())
        trained = sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad)
        pl_module.log("prune/rate", gone / candidates)
        pl_module.log("prune/kept", float(trained - gone))

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """The module is an ordinary one again, with zeros."""
        self._let_go()
        forget_masks(pl_module)

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Likewise."""
        self._let_go()
        forget_masks(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        adaptive = {"rate": self.rate.state_dict()} if isinstance(self.rate, AdaptiveRate) else {}
        return super().state_dict() | {"masks": self._masks} | adaptive

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the checkpoint."""
        super().load_state_dict(state_dict)
        self._masks = state_dict["masks"]
        if isinstance(self.rate, AdaptiveRate):
            self.rate.load_state_dict(state_dict["rate"])

    def _follow(self, module: LightningModule) -> None:
        """Another callback may have cut layers of the module since, and its masks with them."""
        known = masks_of(module)
        self._masks = {name: known.get(name, mask) for name, mask in self._masks.items()}

    def _choose(self, module: LightningModule, rate: float) -> Masks:
        parameters, layers = dict(module.named_parameters()), prunable(module, self.exclude)
        everything = [name for names in layers.values() for name in names]
        together = [everything] if self.scope == "global" else list(layers.values())
        masks: Masks = {}
        for names in together:
            masks |= largest({name: parameters[name] for name in names}, rate, self._masks)
        return masks

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
