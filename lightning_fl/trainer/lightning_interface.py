"""Attributes of a trainer that the loops read, and those that Lightning's own callbacks, loggers and modules read.

A round is an epoch, so stock callbacks work in a federation as long as the trainer has these attributes. `FederatedTrainer`
adds the rounds.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor

from lightning_fl.algorithms import Algorithm
from lightning_fl.clients.flat_module import FlatModule
from lightning_fl.clients.hooks import Hooks
from lightning_fl.data import FederatedDataModule
from lightning_fl.state.run_state import Run
from lightning_fl.trainer.flags import TrainerFlags

STOCK: Any = Trainer
"""Lightning's trainer, whose properties serve here where they read only attributes that both trainers have."""


class TrainerInterface(TrainerFlags, ABC):
    """Flags, and attributes under the names of `lightning.pytorch.Trainer`, with a round as the epoch.

    Attributes:
        run: state of the run: the model, states, the ledger; set when `fit` begins.
        algorithm: the federated method.
        flat_module: the module on its flat storage; None outside a session.
        hooks: calls the hooks of callbacks and module.
        num_rounds: rounds after which the run ends: `max_rounds`, or one if clients take part in none.
        round_batches: batches of the current round that this process trains.
        most_local_steps: optimiser steps of the client with the most samples in a round.
    """

    run: Run
    algorithm: Algorithm
    hooks: Hooks
    flat_module: FlatModule | None = None
    lightning_module: LightningModule
    datamodule: LightningDataModule | None
    ckpt_path: str | None = None
    should_stop = False
    current_epoch = 0
    global_step = 0
    num_rounds = 0
    round_batches = 0
    most_local_steps = 0
    num_val_batches: Sequence[int | float] = ()
    num_sanity_val_batches: Sequence[int | float] = ()
    num_test_batches: Sequence[int | float] = ()
    num_predict_batches: Sequence[int | float] = ()
    predict_loop = SimpleNamespace(current_batch_indices=[], epoch_batch_indices=[], predictions=[])
    barebones = False
    val_check_interval = 1.0
    reload_dataloaders_every_n_epochs = 0
    max_steps = -1
    min_steps = None
    min_epochs = None

    # Read from `state`.
    training: bool = STOCK.training
    validating: bool = STOCK.validating
    testing: bool = STOCK.testing
    predicting: bool = STOCK.predicting
    evaluating: bool = STOCK.evaluating
    sanity_checking: bool = STOCK.sanity_checking
    interrupted: bool = STOCK.interrupted

    # Read from `strategy`.
    accelerator: Any = STOCK.accelerator
    precision_plugin: Any = STOCK.precision_plugin
    precision: str = STOCK.precision
    global_rank: int = STOCK.global_rank
    local_rank: int = STOCK.local_rank
    node_rank: int = STOCK.node_rank
    world_size: int = STOCK.world_size
    num_nodes: int = STOCK.num_nodes
    is_global_zero: bool = STOCK.is_global_zero

    # Read from `loggers` and `callbacks`.
    logger: Logger | None = STOCK.logger
    progress_bar_callback: ProgressBar | None = STOCK.progress_bar_callback
    early_stopping_callback: EarlyStopping | None = STOCK.early_stopping_callback
    early_stopping_callbacks: list[EarlyStopping] = STOCK.early_stopping_callbacks
    checkpoint_callbacks: list[Checkpoint] = STOCK.checkpoint_callbacks

    # -- progress ----------------------------------------------------------------------------------------------------

    @property
    def fitting(self) -> bool:
        """True while a `fit` runs."""
        return self.state.fn == TrainerFn.FITTING and self.state.stage is not None

    @property
    def max_epochs(self) -> int:
        """Number of rounds of the run."""
        return self.max_rounds

    @property
    def check_val_every_n_epoch(self) -> int:
        """Rounds between validations."""
        return self.val_every_n_rounds

    @property
    def validates_this_round(self) -> bool:
        """True if the current round ends with a validation: every n-th does, and the last."""
        done = self.current_epoch + 1
        return done % self.val_every_n_rounds == 0 or done >= self.num_rounds or self.should_stop

    @property
    def enable_validation(self) -> bool:
        """True if there are validation batches."""
        return sum(self.num_val_batches) > 0

    @property
    def num_training_batches(self) -> int:
        """Batches of one pass of the client in training, for schedules by epoch; else of the whole round."""
        if self.flat_module is not None and self.flat_module.steps_in_training:
            return self.flat_module.batches_in_pass
        return self.round_batches

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimiser steps of the client in training, else of the largest: step-wise schedules span one local training."""
        training = self.flat_module.steps_in_training if self.flat_module is not None else 0
        return training or self.most_local_steps

    # -- module, devices, loggers, callbacks ------------------------------------------------------------------------

    @property
    def model(self) -> LightningModule:
        """The module."""
        return self.lightning_module

    @property
    def strategy(self) -> Any:
        """Fabric's strategy, with the few methods of Lightning's own that callbacks use."""
        return _StrategyView(self.fabric, self.optimizers)

    @property
    def num_devices(self) -> int:
        """Accelerators on this machine that the run uses."""
        return self.world_size // self.num_nodes

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The module's optimiser, which all clients share."""
        return [self.active_module.optimizer.optimizer] if self._has_optimizer else []

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        """The module's schedulers."""
        return self.active_module.optimizer.schedules.configs if self._has_optimizer else []

    @property
    def _has_optimizer(self) -> bool:
        return self.flat_module is not None and self.flat_module.has_optimizer

    @property
    def log_dir(self) -> str:
        """The run's folder."""
        return self.default_root_dir

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """The first checkpoint callback that monitors a metric, else the first of all."""
        found = sorted(self.checkpoint_callbacks, key=lambda c: getattr(c, "monitor", None) is None)
        return found[0] if found else None

    def publish(self, metrics: Mapping[str, float]) -> None:
        """Make metrics visible to callbacks and progress bars."""
        self.callback_metrics.update(
            {name: torch.tensor(float(value), dtype=torch.float64) for name, value in metrics.items()}
        )
        shown = self.active_module.logs.progress_bar_names
        self.progress_bar_metrics.update({name: float(value) for name, value in metrics.items() if name in shown})

    @property
    def active_module(self) -> FlatModule:
        """The flat module, which exists during a session only."""
        assert self.flat_module is not None
        return self.flat_module

    @property
    def data(self) -> FederatedDataModule:
        """The datamodule."""
        assert isinstance(self.datamodule, FederatedDataModule)
        return self.datamodule

    @abstractmethod
    def save_checkpoint(self, filepath: str | os.PathLike[str], weights_only: bool = False) -> None:
        """Save the model and, unless `weights_only`, the run."""

    @property
    def _data_connector(self) -> Any:
        """Selector of the batch hooks that the module calls when ModelSummary runs its example input."""
        selector = SimpleNamespace(get_instance=lambda hook_name: self.lightning_module)
        return SimpleNamespace(_datahook_selector=selector)

    @property
    def _logger_connector(self) -> Any:
        """Flag that LearningRateMonitor reads: rounds are logged, not steps."""
        return SimpleNamespace(should_update_logs=False)


class _StrategyView:
    """Fabric's strategy with the method names of `lightning.pytorch.strategies.Strategy`."""

    def __init__(self, fabric: Fabric, optimizers: list[torch.optim.Optimizer]) -> None:
        self._fabric = fabric
        self._lightning_optimizers = optimizers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fabric.strategy, name)

    @property
    def precision_plugin(self) -> Any:
        """Fabric's precision."""
        return self._fabric.strategy.precision

    def reduce(self, tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Return the mean over ranks, or the reduction given as `reduce_op`."""
        return self._fabric.all_reduce(tensor, reduce_op=options.get("reduce_op") or "mean")  # type: ignore[return-value]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if `decision` is true on all ranks, or on any if `all` is False."""
        votes = self._fabric.all_reduce(torch.tensor(int(decision), device=self._fabric.device), reduce_op="sum")
        return int(votes) == self._fabric.world_size if all else int(votes) > 0  # type: ignore[arg-type]

    def remove_checkpoint(self, path: str) -> None:
        """Delete a checkpoint file."""
        if self._fabric.is_global_zero:
            self._fabric.strategy.checkpoint_io.remove_checkpoint(path)
