"""Lightning's connection of logged values and loggers in a federation, in which a round is one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars

from lightning_fl.internals import LoggerConnector
from lightning_fl.outputs.loggers import tell
from lightning_fl.outputs.metrics_csv import RoundCSVLogger


class RoundLoggerConnector(LoggerConnector):
    """Send values of single steps to the user's loggers; in a fit, values of an epoch go into the round's row."""

    trainer: Any

    def log_eval_end_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Send the values of an evaluation outside a fit; within a fit they are in the round's row."""
        if not self.trainer.fitting:
            super().log_eval_end_metrics(metrics)  # type: ignore[arg-type]
        elif self.trainer.privacy is None and not self.trainer.sanity_checking:
            self._logged_metrics.update(metrics)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send values to the user's loggers; a logger that fails is dropped."""
        trainer = self.trainer
        if not metrics or (trainer.fitting and trainer.privacy is not None):
            return
        self._logged_metrics.update(metrics)
        row = dict(convert_tensors_to_scalars(metrics))
        if step is None:
            row.setdefault("epoch", trainer.current_epoch)
            step = trainer.fit_loop.epoch_loop._batches_that_stepped

        def send(logger: Any) -> None:
            if not isinstance(logger, RoundCSVLogger):
                logger.log_metrics(metrics=row, step=step)
                logger.save()

        tell(trainer, send)
