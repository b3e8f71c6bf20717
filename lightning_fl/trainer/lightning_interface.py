"""Attributes of a trainer that Lightning's own callbacks, loggers and modules read.

A round is an epoch, so stock callbacks work in a federation as long as the trainer has these attributes. `FederatedTrainer`
adds the rounds.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, ProgressBar, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor

from lightning_fl.algorithms import Algorithm
from lightning_fl.clients.flat_module import FlatModule
from lightning_fl.clients.hooks import Hooks
from lightning_fl.communication.simulated_clock import SimulatedClock
from lightning_fl.data import FederatedDataModule
from lightning_fl.federation.loss_guard import LossGuard
from lightning_fl.state.run_state import Run


class TrainerInterface(ABC):
    """Attributes and properties under the names of `lightning.pytorch.Trainer`, with a round as the epoch.

    The loops read the trainer's flags here, and during a session its module, data and algorithm.

    Attributes:
        run: state of the run: the model, states, the ledger; set when `fit` begins.
        algorithm: the federated method.
        flat_module: the module on its flat storage; None outside a session.
        hooks: calls the hooks of callbacks and module.
    """

    fabric: Fabric
    callbacks: list[Callback]
    loggers: list[Logger]
    lightning_module: LightningModule
    datamodule: LightningDataModule | None
    default_root_dir: str
    fast_dev_run: bool | int
    max_rounds: int
    timer: Timer | None
    val_every_n_rounds: int
    accumulate_grad_batches: int
    run: Run
    algorithm: Algorithm
    flat_module: FlatModule | None
    hooks: Hooks
    clients_per_round: int | float
    local_epochs: int | None
    local_steps: int | None
    log_every_n_rounds: int
    checkpoint_every_n_rounds: int
    dropout_rate: float
    straggler_rate: float
    clock: SimulatedClock
    loss_guard: LossGuard
    runner: Literal["auto", "serial", "stacked"]
    clients_at_once: int | None
    client_states: str
    limits: dict[str, int | float | None]
    num_sanity_val_steps: int
    gradient_clip_val: int | float | None
    gradient_clip_algorithm: Literal["norm", "value"]
    enable_progress_bar: bool
    enable_checkpointing: bool
    enable_model_summary: bool
    deterministic: bool | Literal["warn"]
    benchmark: bool
    inference_mode: bool
    detect_anomaly: bool
    profiler: Profiler
    given_callbacks: list[Callback]
    barebones = False
    val_check_interval = 1.0
    reload_dataloaders_every_n_epochs = 0
    max_steps = -1
    min_steps = None
    min_epochs = None

    def __init__(self) -> None:
        self.state = TrainerState()
        self.should_stop = False
        self.ckpt_path: str | None = None
        self.callback_metrics: dict[str, Tensor] = {}
        self.logged_metrics: dict[str, Tensor] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.num_val_batches: list[int | float] = []
        self.num_sanity_val_batches: list[int | float] = []
        self.num_test_batches: list[int | float] = []
        self.num_predict_batches: list[int | float] = []
        self.current_epoch = 0
        self.global_step = 0
        self.round_batches = 0
        self.most_local_steps = 0
        self.predict_loop = SimpleNamespace(current_batch_indices=[], epoch_batch_indices=[], predictions=[])

    # -- stage and progress ------------------------------------------------------------------------------------------

    @property
    def fitting(self) -> bool:
        """True if the current or last session is a `fit`."""
        return self.state.fn == TrainerFn.FITTING

    @property
    def training(self) -> bool:
        """True while clients train."""
        return self.state.stage == RunningStage.TRAINING

    @property
    def validating(self) -> bool:
        """True while validation runs."""
        return self.state.stage == RunningStage.VALIDATING

    @property
    def testing(self) -> bool:
        """True while the test runs."""
        return self.state.stage == RunningStage.TESTING

    @property
    def predicting(self) -> bool:
        """True while prediction runs."""
        return self.state.stage == RunningStage.PREDICTING

    @property
    def evaluating(self) -> bool:
        """True while validation or test runs."""
        return self.state.stage is not None and self.state.stage.evaluating

    @property
    def sanity_checking(self) -> bool:
        """True while the validation before the first round runs."""
        return self.state.stage == RunningStage.SANITY_CHECKING

    @property
    def interrupted(self) -> bool:
        """True if the run was interrupted."""
        return self.state.status == TrainerStatus.INTERRUPTED

    @property
    def max_epochs(self) -> int:
        """Number of rounds of the run."""
        return self.max_rounds

    @property
    def num_rounds(self) -> int:
        """Rounds after which the run ends: `max_rounds`, or one if clients take part in none."""
        return self.max_rounds if self.algorithm.trains_in_rounds else min(1, self.max_rounds)

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
    def accelerator(self) -> Any:
        """Fabric's accelerator."""
        return self.fabric.accelerator

    @property
    def precision(self) -> str:
        """Name of the precision, such as `32-true`."""
        return str(self.fabric.strategy.precision.precision)

    @property
    def global_rank(self) -> int:
        """Rank of this process."""
        return self.fabric.global_rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self.fabric.local_rank

    @property
    def node_rank(self) -> int:
        """Rank of this machine."""
        return self.fabric.node_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.fabric.world_size

    @property
    def num_devices(self) -> int:
        """Accelerators on this machine that the run uses."""
        return self.fabric.world_size // getattr(self.fabric.strategy, "num_nodes", 1)

    @property
    def is_global_zero(self) -> bool:
        """True if this process logs and saves."""
        return self.fabric.is_global_zero

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The module's optimiser, which all clients share."""
        return (
            [self.flat_module.optimizer.optimizer]
            if self.flat_module is not None and self.flat_module.has_optimizer
            else []
        )

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        """The module's schedulers."""
        return (
            self.flat_module.optimizer.scheduler_configs
            if self.flat_module is not None and self.flat_module.has_optimizer
            else []
        )

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str:
        """The run's folder."""
        return self.default_root_dir

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The progress bar, the default one or the user's."""
        return next((c for c in self.callbacks if isinstance(c, ProgressBar)), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """All early-stopping callbacks."""
        return [c for c in self.callbacks if isinstance(c, EarlyStopping)]

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """All checkpoint callbacks."""
        return [c for c in self.callbacks if isinstance(c, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """The first checkpoint callback that monitors a metric, else the first of all."""
        found = sorted(self.checkpoint_callbacks, key=lambda c: getattr(c, "monitor", None) is None)
        return found[0] if found else None

    @property
    def precision_plugin(self) -> Any:
        """Fabric's precision."""
        return self.fabric.strategy.precision

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

    def _best_path(self) -> str:
        """Return the best checkpoint of the first ModelCheckpoint that has one, else an empty string."""
        paths = [c.best_model_path for c in self.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        return next((path for path in paths if path), "")


class _StrategyView:
    """Fabric's strategy with the method names of `lightning.pytorch.strategies.Strategy`."""

    def __init__(self, fabric: Fabric, optimizers: list[torch.optim.Optimizer]) -> None:
        self._fabric = fabric
        self._lightning_optimizers = optimizers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fabric.strategy, name)

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
