"""What a run tells its loggers: `metrics.csv` must hold every row, any other logger may fail without taking the run with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fl.outputs.metrics_csv import RoundCSVLogger


def log_row(trainer: Any, row: dict[str, float], step: int) -> None:
    """One row to every logger."""

    def log(logger: Logger) -> None:
        logger.log_metrics(row, step=step)
        logger.save()

    tell(trainer, log)


def tell(trainer: Any, message: Callable[[Any], Any], kind: type[Logger] = Logger) -> None:
    """Call `message` with every logger of a kind; one that fails, but `metrics.csv`, is left out of the rest of the run."""
    for logger in list(trainer.loggers):
        if not isinstance(logger, kind):
            continue
        try:
            message(logger)
        except Exception as error:
            if isinstance(logger, RoundCSVLogger):
                raise
            trainer.loggers = [other for other in trainer.loggers if other is not logger]
            rank_zero_warn(
                f"{type(logger).__name__} failed and is left out from here on; metrics.csv and the checkpoints go on "
                f"({type(error).__name__}: {' '.join(str(error).split())})."
            )
