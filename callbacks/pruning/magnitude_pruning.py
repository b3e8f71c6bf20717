"""Unstructured pruning in any Lightning trainer: the smallest weights become 0 and stay 0 (FedDUMAP's baseline IMC).

𝒱 = the ⌈p · R⌉-th smallest |v|, counted from 0, of the R weights and biases of all layers;  w ← w ⊙ [|w| > 𝒱], from then on

Unlike `torch.nn.utils.prune` and Lightning's `ModelPruning`, it does not change the module's structure: no `weight_orig`, no
`weight_mask`, no forward hook. A checkpoint has the names and shapes of the dense network, with zeros, and loads anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from annotated_types import Interval
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch.utils.hooks import RemovableHandle

from lightning_fl.callbacks.pruning._pruning_callback import PruningCallback
from lightning_fl.callbacks.pruning.adaptive_rate import AdaptiveRate
from lightning_fl.checks import Called, check_name_parts, checked, is_a, name_parts
from lightning_fl.errors import require
from lightning_fl.gates.network import SKIPPED
from lightning_fl.pruning import Masks, apply_masks, forget_masks, hold_masks, largest, masks_of, prunable


class MagnitudePruning(PruningCallback):
    """Set the smallest weights to 0 at the start of an epoch, and keep them at 0 for the rest of the training.

    All trained weights and biases can be pruned, except in normalisation and excluded layers. Of these R numbers, the callback
    keeps those with a magnitude above the ⌈rate · R⌉-th smallest, counted from 0; each layer keeps at least its largest. Masked
    weights get no gradient, so they do not affect clipping and moments, and their optimiser state is 0. After each optimiser
    step they are reset to 0, because momentum and weight decay may have changed them.

    Unlike `torch.nn.utils.prune` it adds no `weight_orig`, `weight_mask` or forward hook to the module. A checkpoint has the
    names and shapes of the dense network, and the masks in the callback's state. Under DDP all processes find the same masks.

    In a federation, a round takes the place of an epoch. Clients and server train under the mask, messages contain only the
    kept parameters, and each client receives the mask once, at one bit per parameter.

    Logs `prune/rate`, the pruned share of the weights that can be pruned, and `prune/kept`, the number of remaining parameters
    that train.

    Args:
        rate: share of the weights to prune, in [0, 1); 0 prunes none. An `AdaptiveRate` finds it when pruning is due.
        prune_epoch: epoch (in a federation the round), from 0; the network is pruned before its training.
        every_n_epochs: epochs from one pruning to the next, each of which prunes this share of the remaining weights; None:
            prune once.
        scope: prune the smallest weights of the whole network (`global`) or of each `layer`.
        exclude: whole parts of names, such as `fc1` or `shortcut`; layers with one of them in their name stay whole. The
            default excludes shortcuts of residual blocks.

    Raises:
        UserError: a value is out of range, the network has no weight to prune or no layer of a given name, or another
            callback averages weights from before the pruning.
    """

    sets_mask = True
    reports = ("prune/rate", "prune/kept")

    @checked
    def __init__(
        self,
        rate: Annotated[float, Interval(ge=0, lt=1), Called("rate, the share of the weights to prune,")]
        | AdaptiveRate = 0.5,
        prune_epoch: int = 30,
        every_n_epochs: int | None = None,
        scope: Literal["global", "layer"] = "global",
        exclude: Sequence[str] = ("shortcut", "downsample"),
    ) -> None:
        super().__init__(prune_epoch, every_n_epochs)
        self.rate = rate
        self.scope = scope
        self.exclude = name_parts(exclude)
        self._masks: Masks = {}
        self._handles: list[RemovableHandle] = []

    @property
    def state_key(self) -> str:
        """Key that distinguishes several prunings of one training."""
        return self._generate_state_key(
            rate="adaptive" if isinstance(self.rate, AdaptiveRate) else self.rate,
            prune_epoch=self.schedule.first,
            every_n_epochs=self.schedule.every,
            scope=self.scope,
            exclude=self.exclude,
        )

    def asks_clients(self, has_server_samples: bool) -> bool:
        """True if clients find the rate."""
        return isinstance(self.rate, AdaptiveRate) and not self.rate.server_only

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Reset for a new training."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if trainer.current_epoch == 0:
            self._masks = {}  # drop the masks of an earlier training
        if isinstance(self.rate, AdaptiveRate):
            self.rate.reset(pl_module)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Check that something can be pruned within the run; keep the mask of a checkpoint."""
        super().on_train_start(trainer, pl_module)
        check_name_parts("exclude", self.exclude, pl_module, SKIPPED)
        require(bool(prunable(pl_module, self.exclude)), f"{type(pl_module).__name__} has no weight to prune.")
        following = self.next_pruning(trainer, max(1, self._last_epoch + 1))  # before epoch 0 nothing is averaged
        if following is not None:
            self._refuse_earlier_averages(trainer, following, max(1, trainer.global_step))
        if isinstance(self.rate, AdaptiveRate) and self.schedule.next_after(trainer.current_epoch) is not None:
            self.rate.remember(pl_module)
            if self.will_prune(trainer):
                self.rate.start(trainer, pl_module)
        self._hold(trainer, pl_module)  # a training that resumes within an epoch does not start that epoch

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Prune if it is due, and keep pruned weights at 0."""
        self._follow(pl_module)
        if self.is_due(trainer):
            self._refuse_earlier_averages(trainer, trainer.current_epoch, trainer.global_step)
            rate = self.rate(trainer, pl_module) if isinstance(self.rate, AdaptiveRate) else self.rate
            self._masks = self._choose(pl_module, rate) if rate else self._masks
        self._hold(trainer, pl_module)

    def on_client_download(self, trainer: Any, pl_module: LightningModule, client: int) -> None:
        """Remove the hooks in a federation, which applies the mask to its clients itself."""
        self._let_go()

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log the pruned share and the number of kept parameters."""
        self._follow(pl_module)
        parameters = dict(pl_module.named_parameters())
        candidates = self._masks.keys() | {
            name for names in prunable(pl_module, self.exclude).values() for name in names
        }
        removed = {name: int((~mask).sum()) for name, mask in self._masks.items()}
        numbers = sum(parameters[name].numel() for name in candidates)
        trained = sum(p.numel() - removed.get(name, 0) for name, p in parameters.items() if p.requires_grad)
        self.report(trainer, pl_module, "prune/rate", sum(removed.values()) / max(1, numbers))
        self.report(trainer, pl_module, "prune/kept", trained)  # a Python float would become float32

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Make the module an ordinary one again, with zeros."""
        self._let_go()
        forget_masks(pl_module)

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Make the module an ordinary one again, with zeros."""
        self.teardown(trainer, pl_module, "fit")

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        adaptive = {"rate": self.rate.state_dict()} if isinstance(self.rate, AdaptiveRate) else {}
        return super().state_dict() | {"masks": self._masks} | adaptive

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the masks as they are now, if another callback has cut the layers since the epoch's start."""
        self._follow(pl_module)
        checkpoint["callbacks"][self.state_key] = self.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        super().load_state_dict(state_dict)
        self._masks = state_dict["masks"]
        if isinstance(self.rate, AdaptiveRate):
            self.rate.load_state_dict(state_dict["rate"])

    def _refuse_earlier_averages(self, trainer: Any, epoch: int, num_steps: int) -> None:
        """Raise `UserError` if a callback averages weights from before the pruning of an epoch, at least `num_steps` steps."""

        def averages(other: Any) -> bool:
            if is_a(other, StochasticWeightAveraging):  # when epochs start, in the order of the callbacks
                order = trainer.callbacks.index
                return (other.swa_start, order(other)) < (epoch, order(self))
            return is_a(other, WeightAveraging) and (
                any(other.should_update(step_idx=step) for step in range(num_steps))
                or any(other.should_update(epoch_idx=earlier) for earlier in range(epoch))
            )

        if self.rate:
            self.refuse_averages(trainer, averages, "prune", "let it average only after the pruning")

    def _follow(self, module: LightningModule) -> None:
        """Take over masks that another callback has cut with the module's layers, and cut the initial model in the same way."""
        present_masks = masks_of(module)
        self._masks = {name: present_masks.get(name, mask) for name, mask in self._masks.items()}
        if isinstance(self.rate, AdaptiveRate):
            self.rate.follow(module)

    def _choose(self, module: LightningModule, rate: float) -> Masks:
        parameters, layers = dict(module.named_parameters()), prunable(module, self.exclude)
        everything = [name for names in layers.values() for name in names]
        pools = [everything] if self.scope == "global" else list(layers.values())
        masks = dict(self._masks)  # the masks of frozen layers stay
        for names in filter(None, pools):
            masks |= largest({name: parameters[name] for name in names}, rate, self._masks)
        return masks

    def _hold(self, trainer: Any, module: LightningModule) -> None:
        """Set pruned weights to 0, and keep them there."""
        if self._masks:
            parameters = dict(module.named_parameters())
            self._masks = {name: mask.to(parameters[name].device) for name, mask in self._masks.items()}
            apply_masks(module, self._masks, trainer.optimizers)
            self._let_go()
            self._handles = hold_masks(module, trainer.optimizers)

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
