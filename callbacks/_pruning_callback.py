"""What pruning callbacks have in common: when they prune, and, where filters are cut out, what that takes of a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.callbacks._calibration import example_input
from lightning_fl.errors import UserError, require
from lightning_fl.gates import gates_of
from lightning_fl.pruning import Plan, Schedule, plan_for, plans_of, prunable_layers, shrink_when_loading


class PruningCallback(Callback):
    """Prunes when epochs start, by a schedule.

    Args:
        prune_epoch: the epoch before whose training to prune, at least 0; in a federation the round.
        every_n_epochs: prune what is left again every so many epochs, at least 1; None: once.
    """

    def __init__(self, prune_epoch: int, every_n_epochs: int | None) -> None:
        self.schedule = Schedule(prune_epoch, every_n_epochs)
        self._last_epoch = -1

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """A new training begins."""
        if stage == "fit":
            self._last_epoch = -1

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Warn of a pruning that comes after the end."""
        following = self.schedule.next_after(trainer.current_epoch)
        if following is not None and not self.will_prune(trainer):
            rank_zero_warn(
                f"{type(self).__name__} would prune before epoch {following}, but the run ends after {trainer.max_epochs} "
                "epochs: nothing will be pruned."
            )

    def will_prune(self, trainer: Any) -> bool:
        """Whether it is its turn before the training ends."""
        following, end = self.schedule.next_after(trainer.current_epoch), trainer.max_epochs
        return following is not None and (end is None or end < 0 or following < end)

    def is_due(self, trainer: Any) -> bool:
        """Whether to prune now; once in an epoch."""
        epoch = trainer.current_epoch
        if not self.schedule.due(epoch) or epoch == self._last_epoch:
            return False
        self._last_epoch = epoch
        return True

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"last_epoch": self._last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the checkpoint."""
        self._last_epoch = state_dict["last_epoch"]


class StructuredPruning(PruningCallback):
    """Cuts filters out of the module, whose tensors get smaller."""

    def __init__(self, prune_epoch: int, every_n_epochs: int | None) -> None:
        super().__init__(prune_epoch, every_n_epochs)
        self._loading: Any = None

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Let a dense module load what a pruned one has saved."""
        super().setup(trainer, pl_module, stage)
        self._loading = self._loading or shrink_when_loading(pl_module)

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Find out whether another callback has given the module gates."""
        require(
            not gates_of(pl_module),
            f"{type(self).__name__} cannot cut out filters that the gates of dynamic pruning (FedDP, DynamicGates) choose anew "
            "for each image: take one of the two.",
        )

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Leave the module as it was found."""
        if self._loading is not None:
            self._loading.remove()
            self._loading = None

    def require_prunable(self, trainer: Any, module: LightningModule, named: Sequence[str] = ()) -> None:
        """Find out before any training whether filters can be cut out.

        Args:
            trainer: that is about to train.
            module: its module.
            named: layers that must be able to lose filters.

        Raises:
            UserError: the strategy does not allow it, or no layer can lose filters.
        """
        callback, strategy = type(self).__name__, trainer.strategy
        if isinstance(strategy, ParallelStrategy):
            raise UserError(
                f"{callback} cannot change a network inside {type(strategy).__name__}, which keeps the shapes it began with: "
                "train on one device."
            )
        layers = prunable_layers(module, example_input(trainer), required=named)
        require(bool(layers or plans_of(module)), f"{callback}: no layer of {type(module).__name__} can lose filters.")

    def plan(self, trainer: Any, module: LightningModule, kept: dict[str, Tensor]) -> Plan:
        """What follows from the filters that shall stay; every process of a federation takes the decision of the first."""
        return plan_for(module, trainer.strategy.broadcast(kept), example_input(trainer))
