"""Stand-in for Lightning's default ModelCheckpoint: says where a run's checkpoint is, and offers the final model to loggers."""

from __future__ import annotations

import os

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import WandbLogger

from lightning_fl.checks import is_a
from lightning_fl.outputs.loggers import HasLoggers, tell


class LastCheckpoint(Checkpoint):
    """Path of the checkpoint that the run writes itself, for programs that read `trainer.checkpoint_callback`.

    Attributes:
        dirpath: folder of the checkpoint.
        last_model_path, best_model_path: its path once it has been written; "" before that.
        best_model_score, current_score, monitor: None, as no metric decides.
        save_top_k: 1, as it keeps one checkpoint.
    """

    best_model_score = current_score = monitor = None
    save_top_k = 1

    def __init__(self, dirpath: str) -> None:
        self.dirpath = dirpath
        self.last_model_path = self.best_model_path = ""

    def saved(self, path: str) -> None:
        """Note that the checkpoint has been written."""
        self.last_model_path = self.best_model_path = path


def offer_model(trainer: HasLoggers, path: str) -> None:
    """Offer the final model to loggers, of which some keep it, such as `MLFlowLogger(log_model=True)`.

    `wandb_run.send_results` sends it to W&B.

    Args:
        trainer: trainer at the end of a fit without a ModelCheckpoint, which offers its checkpoints itself.
        path: file of the model.
    """
    model = LastCheckpoint(os.path.dirname(path))
    model.saved(path)
    tell(trainer, lambda logger: None if is_a(logger, WandbLogger) else logger.after_save_checkpoint(model))
