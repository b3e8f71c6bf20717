"""Base classes of pruning callbacks: the schedule, and the requirements for removing filters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.callbacks.pruning._training_samples import Source, calibration_images, example_input
from lightning_fl.checks import is_a, needs_closure
from lightning_fl.errors import UserError, require
from lightning_fl.gates import gates_of
from lightning_fl.pruning import Plan, Schedule, feature_map_ranks, plans_of, shrink_when_loading
from lightning_fl.pruning.graph import Network

FIRST_BATCH = "on_train_batch_start"
"""Hook that starts an epoch for the callback if Lightning begins it without `on_train_epoch_start`."""


class PruningCallback(Callback):
    """Prune at the start of epochs, by a schedule.

    Args:
        prune_epoch: epoch (in a federation: round) that pruning precedes, counted from 0.
        every_n_epochs: epochs from one pruning to the next, at least 1; None: prune once.
    """

    in_rehearsals = True
    """True if a plan's rehearsal calls its hooks, because the model or the messages depend on them."""
    removes_filters = False
    """True if pruning makes the module's tensors smaller."""
    sets_mask = False
    """True if it keeps parameters at 0 by a mask."""
    reports: tuple[str, ...] = ("prune/rate",)
    """Names that it logs, and another pruning of the same training may log, too."""

    def __init__(self, prune_epoch: int, every_n_epochs: int | None) -> None:
        self.schedule = Schedule(prune_epoch, every_n_epochs)
        self.prune_epoch, self.every_n_epochs = prune_epoch, every_n_epochs
        self._last_epoch = -1

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Reset for a new training."""
        vars(self).pop(FIRST_BATCH, None)  # left by a fit that raised
        if stage == "fit":
            self._last_epoch = -1

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Warn if the next pruning is due only after the end of the run; also prune before an epoch without a start hook.

        After a checkpoint of an epoch's last step, Lightning begins the next epoch without `on_train_epoch_start`.
        """
        loop = trainer.fit_loop
        has_no_start = (
            getattr(loop, "restarted_mid_epoch", False)
            and loop.epoch_loop.restarted_on_train_batch_end
            and loop.epoch_loop.batch_progress.is_last_batch
        )
        if has_no_start:  # not a method, because hooks of batches keep a federation from stacking its clients
            vars(self)[FIRST_BATCH] = self._start_epoch
        following = self.schedule.next_after(trainer.current_epoch)
        if following is not None and not self.will_prune(trainer):
            rank_zero_warn(
                f"{type(self).__name__} would prune after {following} epochs, but the run ends after {trainer.max_epochs} "
                "epochs: nothing will be pruned."
            )

    def _start_epoch(self, trainer: Any, pl_module: LightningModule, *batch: Any) -> None:
        """Begin an epoch at its first batch."""
        del vars(self)[FIRST_BATCH]
        self.on_train_epoch_start(trainer, pl_module)

    def will_prune(self, trainer: Any) -> bool:
        """True if a pruning is due before the training ends."""
        return self.next_pruning(trainer) is not None

    def next_pruning(self, trainer: Any, earliest: int = 0) -> int | None:
        """Return the epoch of the next pruning that is due before the training ends, not before the `earliest`."""
        following, end = self.schedule.next_after(max(trainer.current_epoch, earliest)), trainer.max_epochs
        return following if following is not None and (end is None or end < 0 or following < end) else None

    def refuse_averages(self, trainer: Any, averages: Callable[[Any], bool], action: str, remedy: str) -> None:
        """Raise `UserError` if another callback averages weights in a way that the pruning would spoil.

        Args:
            trainer: trainer that trains.
            averages: function that returns True for such callbacks.
            action: verb of the error: the callback cannot do this to the averaged weights.
            remedy: an alternative to leaving out one of the two callbacks.
        """
        for other in filter(averages, trainer.callbacks):
            raise UserError(
                f"{type(self).__name__} cannot {action} the averaged weights that {type(other).__name__} keeps: "
                f"use one of the two, or {remedy}."
            )

    def asks_clients(self, has_server_samples: bool) -> bool:
        """True if clients of a federation send something for the pruning, given whether the server has samples."""
        return False

    def is_due(self, trainer: Any) -> bool:
        """True if a pruning is due now; once per epoch."""
        epoch = trainer.current_epoch
        if not self.schedule.due(epoch) or epoch == self._last_epoch:
            return False
        self._last_epoch = epoch
        return True

    def report(self, trainer: Any, pl_module: LightningModule, name: str, value: float) -> None:
        """Log a value, numbered like `prune/rate_2` if a server step or earlier callbacks report the same name.

        Args:
            trainer: trainer that trains.
            pl_module: its module.
            name: name without a number.
            value: value of the epoch; Lightning makes floats float32, and keeps whole numbers.
        """
        prunings = [*getattr(getattr(trainer, "algorithm", None), "chain", ()), *trainer.callbacks]
        earlier = takewhile(lambda other: other is not self, prunings)
        number = 1 + sum(name in getattr(other, "reports", ()) for other in earlier)
        pl_module.log(name if number == 1 else f"{name}_{number}", value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"last_epoch": self._last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self._last_epoch = state_dict["last_epoch"]


class StructuredPruning(PruningCallback):
    """Remove filters from the module, which makes its tensors smaller."""

    removes_filters = True

    def __init__(self, prune_epoch: int, every_n_epochs: int | None) -> None:
        super().__init__(prune_epoch, every_n_epochs)
        self._loading: Any = None

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Let a dense module load the checkpoint of a pruned one."""
        super().setup(trainer, pl_module, stage)
        if self._loading is not None:  # left by a fit that raised, after which Lightning calls no teardown
            self._loading.remove()
        self._loading = shrink_when_loading(pl_module)

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Raise `UserError` if another callback has added gates to the module."""
        require(
            not gates_of(pl_module),
            f"{type(self).__name__} cannot remove filters of a network with gates (FedDP, DynamicGates), which choose channels "
            "for each image: use one of the two.",
        )

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Remove the loading hook from the module."""
        if self._loading is not None:
            self._loading.remove()
            self._loading = None

    def require_prunable(self, trainer: Any, module: LightningModule, named: Sequence[str] = ()) -> None:
        """Check before any training that filters can be removed.

        Args:
            trainer: trainer that is about to train.
            module: its module.
            named: layers that must be able to lose filters.

        Raises:
            UserError: the strategy, the optimiser or another callback does not allow it, or no layer can lose filters.
        """
        callback, strategy = type(self).__name__, trainer.strategy
        self.refuse_averages(
            trainer,
            lambda other: is_a(other, StochasticWeightAveraging, WeightAveraging),
            "remove filters from",
            "average in a second fit",
        )
        if isinstance(strategy, ParallelStrategy):
            raise UserError(
                f"{callback} cannot change a network inside {type(strategy).__name__}, which needs constant shapes: "
                "train on one device."
            )
        for optimizer in trainer.optimizers:
            require(
                not needs_closure(optimizer),
                f"{callback} cuts the optimiser's state of single weights, but {type(optimizer).__name__} keeps it in vectors "
                "for the whole network: use another optimiser, such as Adam.",
            )
            require(
                not isinstance(optimizer, torch.optim.Adafactor),
                f"{callback} cuts the optimiser's state of single weights, but {type(optimizer).__name__} keeps it by row and "
                "column: use another optimiser, such as Adam.",
            )
        network = Network(module, example_input(trainer))
        for name in named:
            network.require_prunable(name)
        was_pruned = bool(plans_of(module)) or self._last_epoch >= 0  # in this process, or before a checkpoint
        require(
            bool(network.layers) or was_pruned,
            f"{callback}: no layer of {type(module).__name__} can lose filters: {network.first_obstacles}.",
        )

    def require_rankable(self, trainer: Any, module: LightningModule, stand_in: Source | None = None) -> None:
        """Check on one image, before any training, that feature maps can be ranked.

        Raises:
            UserError: there are no images, or the module's forward does not take them.
        """
        images = calibration_images(trainer, 1, 1, stand_in)
        try:
            feature_map_ranks(module, images, ())
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{type(self).__name__} ranks feature maps of the first part of a batch, which forward of "
                f"{type(module).__name__} does not take: {error}. FilterPruning with importance 'magnitude' needs no images."
            ) from None

    def plan(self, trainer: Any, network: Network, filters: dict[str, Tensor]) -> Plan:
        """Return the plan that keeps these filters; every process of a federation uses the choice of the first."""
        if trainer.world_size > 1:
            device = next((indices.device for indices in filters.values()), None)
            lists = trainer.strategy.broadcast({name: indices.tolist() for name, indices in filters.items()})
            filters = {name: torch.tensor(indices, dtype=torch.int64, device=device) for name, indices in lists.items()}
        return network.plan(filters)
