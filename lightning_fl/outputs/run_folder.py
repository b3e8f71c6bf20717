"""The folder of a run: the names of its files, that it can be written, and what an earlier run has left there.

`lightning-fl report` reads it without Lightning, which is imported only where a run writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_fl.errors import UserError

LAST = Path("checkpoints") / "last.ckpt"
EXPORT = "model.ckpt"
METRICS = "metrics.csv"
HPARAMS = "hparams.yaml"
CONFIG = "config.yaml"
COMMUNICATION = "communication.json"
FILES = (METRICS, COMMUNICATION, HPARAMS, CONFIG, EXPORT, LAST.parent)


class RunFolder:
    """The folder that a fit writes to; an earlier run's until the fit has something of its own to put there.

    Attributes:
        trainer: of the fit.
        first_round: the round that the fit begins with, 0 unless it goes on.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.first_round = 0
        self._is_ours = False

    @property
    def is_used(self) -> bool:
        """Whether the fit leaves files behind."""
        return bool(self.trainer.loggers) or self.trainer.enable_checkpointing

    def claim(self) -> None:
        """Before anything is written: an earlier run is moved aside, of a resumed one the rounds to come are dropped.

        A run that goes on in another folder brings its rows along.
        Not before there is something to write: a command that fails in its first round leaves everything where it was.
        """
        if self._is_ours or not self.is_used:
            return
        self._is_ours = True
        if not self.goes_on_here:
            set_earlier_run_aside(self.trainer.default_root_dir)
        if self.trainer.ckpt_path is None:
            return
        from lightning_fl.outputs.metrics_csv import RoundCSVLogger

        for logger in self.trainer.loggers:
            if isinstance(logger, RoundCSVLogger):
                logger.keep_rounds_before(self.first_round, self._home)

    @property
    def goes_on_here(self) -> bool:
        """Whether what lies here is the run that the fit goes on with."""
        return self._home is not None and self._home == Path(self.trainer.default_root_dir).resolve()

    @property
    def _home(self) -> Path | None:
        """The folder of the run that the fit goes on with, if it does: the checkpoint's, where that has rows, else this one."""
        if self.trainer.ckpt_path is None:
            return None
        folder = Path(self.trainer.ckpt_path).resolve().parent
        folder = folder.parent if folder.name == LAST.parent.name else folder
        return folder if (folder / METRICS).is_file() else Path(self.trainer.default_root_dir).resolve()


def require_writable(root: str, flag: str = "default_root_dir") -> list[Path]:
    """Make a folder; returns the folders that were not there, the innermost first.

    Args:
        root: the folder.
        flag: what names it to the user.

    Raises:
        UserError: nothing can be written there.
    """
    folder = Path(root).absolute()
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        os.makedirs(root, exist_ok=True)
        is_writable = os.access(root, os.W_OK)
    except OSError:
        is_writable = False
    if not is_writable:
        raise UserError(f"nothing can be written to {root}: give another folder as {flag}.")
    return missing


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of these folders in which nothing is, the innermost first."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def set_earlier_run_aside(root: str) -> None:
    """Move the files of an earlier run in `root` into `root/earlier-1` (2, 3 …), so that a new run loses nothing.

    They gather in `earlier-1.moving`, whose new name completes the move: `bring_earlier_run_back` undoes one that was cut short.
    """
    folder = Path(root)
    present = [folder / name for name in FILES if (folder / name).exists()]
    if all(path.name in (CONFIG, HPARAMS) for path in present):
        return
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    aside, moving = folder / f"earlier-{number}", folder / f"earlier-{number}.moving"
    moving.mkdir()
    for path in present:
        os.replace(path, moving / path.name)
    os.replace(moving, aside)
    from lightning.pytorch.utilities.rank_zero import rank_zero_info

    rank_zero_info(f"The earlier run in {root} was moved to {aside}.")


def bring_earlier_run_back(root: str) -> None:
    """Where a kill came while an earlier run was moved aside, put it back: the new run had written nothing yet."""
    for moving in Path(root).glob("earlier-*.moving"):
        for path in moving.iterdir():
            os.replace(path, Path(root) / path.name)
        moving.rmdir()
