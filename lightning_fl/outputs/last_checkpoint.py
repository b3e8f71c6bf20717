"""Callback that says where a run's checkpoint is, as Lightning's default ModelCheckpoint does."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.callbacks import Checkpoint

from lightning_fl.outputs.run_folder import LAST


class LastCheckpoint(Checkpoint):
    """Path of the checkpoint that the run writes itself, for programs that read `trainer.checkpoint_callback`.

    Attributes:
        dirpath: folder of the checkpoint.
        last_model_path, best_model_path: its path once it has been written; "" before that.
        best_model_score: None, as no metric decides.
    """

    best_model_score = None

    def __init__(self, root: str) -> None:
        self.dirpath = str(Path(root, LAST.parent))
        self.last_model_path = self.best_model_path = ""

    def saved(self, path: str) -> None:
        """Note that the checkpoint has been written."""
        self.last_model_path = self.best_model_path = path
