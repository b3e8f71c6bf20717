"""Calls of a run's loggers: `metrics.csv` must receive every row; any other logger may fail without stopping the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch.loggers import Logger

from lightning_fl.checks import is_a
from lightning_fl.outputs.losses import say_lost
from lightning_fl.outputs.metrics_csv import RoundCSVLogger


class HasLoggers(Protocol):
    """Trainer, as far as its loggers are concerned."""

    loggers: list[Logger]


def log_row(trainer: HasLoggers, row: dict[str, float], step: int) -> None:
    """Send one row to every logger."""
    tell(trainer, lambda logger: logger.log_metrics(metrics=row, step=step))
    tell(trainer, lambda logger: logger.save())


def tell(trainer: HasLoggers, message: Callable[[Any], Any], kind: type[Any] = object) -> None:
    """Call `message` with every logger, or with those of a class; one that fails is removed, unless it writes `metrics.csv`.

    Args:
        trainer: has the loggers.
        message: calls a logger.
        kind: class of Lightning, of either name.
    """
    for logger in list(trainer.loggers):
        if not is_a(logger, kind):
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
