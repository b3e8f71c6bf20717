"""Calls of a run's loggers: `metrics.csv` must receive every row; any other logger may fail without stopping the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_fl.checks import is_a, parameters_of
from lightning_fl.data import FederatedDataModule
from lightning_fl.data.federated_data_module import OFFERED
from lightning_fl.errors import require
from lightning_fl.outputs.losses import say_lost
from lightning_fl.outputs.metrics_csv import RoundCSVLogger


class HasLoggers(Protocol):
    """Trainer, as far as its loggers are concerned."""

    loggers: list[Logger]


def log_row(trainer: HasLoggers, row: dict[str, float], step: int) -> None:
    """Send one row to every logger."""
    tell(trainer, lambda logger: logger.log_metrics(row, step=step))
    tell(trainer, lambda logger: logger.save())


def tell(trainer: HasLoggers, message: Callable[[Any], Any], kind: type[Logger] = Logger) -> None:
    """Call `message` with every logger of a kind; a logger that fails is removed, unless it writes `metrics.csv`."""
    for logger in list(trainer.loggers):
        if not isinstance(logger, kind):
            continue
        try:
            message(logger)
        except Exception as error:
            if isinstance(logger, RoundCSVLogger):
                raise
            trainer.loggers = [other for other in trainer.loggers if other is not logger]
            say_lost(
                f"{type(logger).__name__} failed and is not used any more; metrics.csv and the checkpoints are still written "
                f"({type(error).__name__}: {' '.join(str(error).split())})."
            )


def hyperparameters_of(module: LightningModule, data: FederatedDataModule) -> dict[str, Any]:
    """Return what the module and the datamodule save for loggers, without what the command line adds to every module.

    Either has none after `save_hyperparameters(logger=False)`.

    Raises:
        UserError: both save one of the same name with other values, which Lightning refuses, too.
    """
    merged: dict[str, Any] = {}
    wrapped = getattr(data, "datamodule", None)
    for owner in (module, data, *([wrapped] if is_a(wrapped, LightningDataModule) else [])):
        if not owner._log_hyperparams:
            continue
        added = set(OFFERED) - set(parameters_of(type(owner))) if owner is module else set()
        for name, value in owner.hparams_initial.items():
            if name in added or name.startswith("_"):
                continue
            require(
                name not in merged or _are_same(value, merged[name]),
                f"module and datamodule both save a hyper-parameter {name!r} for loggers, and the values differ: rename one, or "
                "use save_hyperparameters(logger=False) in one of them.",
            )
            merged[name] = value
    return merged


def _are_same(one: Any, other: Any) -> bool:
    """True if two hyper-parameters are one object, or equal and of one type."""
    return one is other or (
        type(one) is type(other) and not isinstance(one, (Tensor, np.ndarray)) and bool(one == other)
    )
