"""Lightning's own loops, results and connections on which a federation stands, under names of their own.

Lightning does not promise these names, so that a new version may change them: this module is the one place to look.
`tests/test_internals.py` says whether the installed version has them all; 2.6.6 has.
"""

from typing import Any

from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.fabric.utilities.data import _set_sampler_epoch as set_sampler_epoch
from lightning.pytorch.core.optimizer import _configure_optimizers as configured_optimizers
from lightning.pytorch.core.optimizer import _configure_schedulers_automatic_opt as configured_schedulers
from lightning.pytorch.core.optimizer import _configure_schedulers_manual_opt as configured_schedulers_manually
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as StockEvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop as StockFitLoop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization as AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization as ManualOptimization
from lightning.pytorch.loops.prediction_loop import _PredictionLoop as StockPredictionLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as StockEpochLoop
from lightning.pytorch.loops.utilities import _select_data_fetcher as data_fetcher_for
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.accelerator_connector import _set_torch_flags as set_torch_flags
from lightning.pytorch.trainer.connectors.data_connector import _check_dataloader_iterable as check_iterable
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector as DataHookSelector
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource as DataLoaderSource
from lightning.pytorch.trainer.connectors.data_connector import _process_dataloader as processed_loader
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader as requested_loader
from lightning.pytorch.trainer.connectors.data_connector import _resolve_overfit_batches as read_in_order
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector as LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS as Metrics  # noqa: N811
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata as ResultMetadata
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric
from lightning.pytorch.trainer.connectors.logger_connector.result import _Sync as ResultSync

__all__ = [
    "AutomaticOptimization",
    "DataHookSelector",
    "DataLoaderSource",
    "LoggerConnector",
    "ManualOptimization",
    "Metrics",
    "MultiProcessingLauncher",
    "ResultCollection",
    "ResultMetadata",
    "ResultMetric",
    "ResultSync",
    "StockEpochLoop",
    "StockEvaluationLoop",
    "StockFitLoop",
    "StockPredictionLoop",
    "call",
    "check_iterable",
    "configured_optimizers",
    "configured_schedulers",
    "configured_schedulers_manually",
    "data_fetcher_for",
    "is_of_tuner",
    "processed_loader",
    "read_in_order",
    "requested_loader",
    "set_sampler_epoch",
    "set_torch_flags",
]

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "trainer": (
        "_accelerator_connector",
        "_active_loop",
        "_checkpoint_connector",
        "_data_connector",
        "_logger_connector",
    ),
    "trainer._accelerator_connector": ("use_distributed_sampler",),
    "trainer._checkpoint_connector": ("_ckpt_path",),
    "trainer._data_connector": ("_datahook_selector",),
    "trainer._logger_connector": ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics"),
    "trainer.strategy": ("_lightning_optimizers", "_optimizers"),
    "trainer.fit_loop.epoch_loop": ("_batches_that_stepped", "_results"),
    "trainer.fit_loop": ("_combined_loader", "_data_fetcher", "_data_source"),
    "trainer.validate_loop": (
        "_combined_loader",
        "_data_source",
        "_has_run",
        "_max_batches",
        "_module_mode",
        "_results",
        "_stage",
    ),
    "trainer.predict_loop": ("_combined_loader", "_data_source"),
    "module": ("_device", "_metric_attributes", "_trainer"),
}
"""Attributes of Lightning's objects that the package reads or sets."""
METHODS: dict[type, tuple[str, ...]] = {
    StockEpochLoop: (
        "_broadcast_sigterm_tensor",
        "_num_ready_batches_reached",
        "_should_accumulate",
        "_should_check_val_epoch",
        "_should_check_val_fx",
    ),
    AutomaticOptimization: (
        "_make_zero_grad_fn",
        "_on_before_zero_grad",
        "_optimizer_step",
        "_optimizer_zero_grad",
        "_training_step",
    ),
    Precision: ("_clip_gradients",),
    StockEvaluationLoop: (
        "_build_step_args_from_hook_kwargs",
        "_evaluation_step",
        "_on_evaluation_epoch_end",
        "_on_evaluation_model_train",
        "_store_dataloader_outputs",
        "_verify_dataloader_idx_requirement",
    ),
    StockPredictionLoop: ("_get_batch_indices",),
    ResultCollection: ("_forked_name", "_get_cache"),
}
"""Methods of Lightning's classes that the package calls or replaces."""


def is_of_tuner(callback: Any) -> bool:
    """True if Lightning's Tuner has made this callback, which ends a fit once it has found what it looks for."""
    return getattr(callback, "_early_exit", False) is True
