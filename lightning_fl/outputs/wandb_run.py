"""Data for Weights & Biases besides the rows: axes, the resolved configuration, the labels, the results and the model.

`WandbRun` is a callback that the trainer adds if one of its loggers is a `WandbLogger`. Its state in the checkpoint is the
id of the W&B run, so that a resumed run continues it.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl.errors import UserError
from lightning_fl.outputs.figures import label_histogram
from lightning_fl.outputs.loggers import tell
from lightning_fl.outputs.metric import is_result
from lightning_fl.outputs.run_folder import EXPORT

# Columns that charts may use as the horizontal axis.
AXES = ("comm/total_uplink_bytes", "comm/total_downlink_bytes", "time/simulated_seconds", "round")
HOST = "https://api.wandb.ai"


def has_key(environment: Mapping[str, str] = os.environ) -> bool:
    """True if W&B finds a login key, in the environment or in the .netrc that `wandb login` writes."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(environment.get("WANDB_BASE_URL", HOST)).hostname or ""
    named = environment.get("NETRC")
    paths = [Path(named)] if named else [Path("~/.netrc"), Path("~/_netrc")]
    return any(_names(path.expanduser(), host) for path in paths)


def _names(path: Path, host: str) -> bool:
    """True if a .netrc has a key for a host."""
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WandbRun(Callback):
    """Callback that opens the W&B run, offline if there is no key, and sends a federation's data besides the rows."""

    def __init__(self) -> None:
        self._id: str | None = None
        self._defined: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the W&B run for the checkpoint."""
        return {"id": self._id} if self._id else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the id of the W&B run from the checkpoint."""
        self._id = state_dict.get("id")

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Open the W&B run before training.

        Raises:
            UserError: W&B does not start.
        """
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if not isinstance(logger, WandbLogger):
                continue
            try:
                # Change the arguments of wandb.init, because W&B reads the environment only once in a process.
                logger._wandb_init.update(self._missing(logger))
                # W&B would warn about a None that the user has not given.
                if logger._wandb_init.get("anonymous", "allow") is None:
                    del logger._wandb_init["anonymous"]
                run = logger.experiment
            except Exception as error:
                raise UserError(
                    f"Weights & Biases does not start ({' '.join(str(error).split())[:200]}): use --trainer.logger.offline true "
                    "to keep the run on this machine, and `wandb sync` to send it later."
                ) from error
            self._id = str(run.id)
            for axis in AXES:
                run.define_metric(axis)
            run.define_metric("time/round_seconds", step_metric="round")  # logged when the round is over
            self._defined = {*AXES, "time/round_seconds"}

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Send the partition's labels as a picture."""
        histograms = trainer.datamodule.label_histograms
        if histograms is not None and trainer.ckpt_path is None:
            _tell(trainer, lambda logger: _send_picture(logger, histograms))

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Define the horizontal axis of metrics that are new in this round: bytes for results, rounds for all others.

        Each is defined by name, because the logger defines an axis for `*`, and W&B may prefer either of two patterns that match.
        """
        new = trainer.callback_metrics.keys() - self._defined
        self._defined |= new

        def define(logger: WandbLogger) -> None:
            for name in sorted(new):
                axis = AXES[0] if is_result(name) or name == trainer.metric else "round"
                logger.experiment.define_metric(name, step_metric=axis)

        _tell(trainer, define)

    def _missing(self, logger: WandbLogger) -> dict[str, str]:
        """Return arguments that the user has not given: the id of a resumed run, and offline mode if there is no key."""
        missing = {}
        if self._id and logger.version is None and "WANDB_RUN_ID" not in os.environ:
            missing["id"] = self._id
        asked = logger._wandb_init.get("mode") or os.environ.get("WANDB_MODE")
        if logger._offline:
            missing["mode"] = "offline"
        elif not (asked or has_key()):
            missing["mode"] = "offline"
            rank_zero_info(
                "Weights & Biases: no key was found, so the run stays on this machine; `wandb sync` sends it."
            )
        return missing


def is_used(trainer: Any) -> bool:
    """True if W&B is one of the trainer's loggers."""
    return any(isinstance(logger, WandbLogger) for logger in trainer.loggers)


def send_config(trainer: Any, config: dict[str, Any], path: Path) -> None:
    """Send the resolved configuration to W&B, as the run's config and as a file."""

    def send(logger: WandbLogger) -> None:
        logger.experiment.config.update(config, allow_val_change=True)
        if path.is_file():
            logger.experiment.log_artifact(str(path), name=f"config-{logger.experiment.id}", type="config")

    _tell(trainer, send)


def send_results(trainer: Any, lines: list[tuple[str, str]], best: tuple[float, int] | None, with_model: bool) -> None:
    """Send the table at the end of a run, the best value of its metric and the exported model to W&B.

    Args:
        trainer: trainer after the run.
        lines: names and values of the table.
        best: best value of the metric and the number of rounds until then; None without.
        with_model: True if there is an exported model.
    """

    def send(logger: WandbLogger) -> None:
        logger.log_table("final", columns=["what", "value"], data=[list(line) for line in lines])
        if best is not None:
            logger.experiment.summary.update({"metric": trainer.metric, "best": best[0], "best_round": best[1]})
        if with_model:
            path = Path(trainer.default_root_dir) / EXPORT
            logger.experiment.log_artifact(str(path), name=f"model-{logger.experiment.id}", type="model")

    _tell(trainer, send)


def _send_picture(logger: WandbLogger, histograms: Any) -> None:
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(label_histogram(histograms))
    canvas.draw()
    logger.log_image("partition", [np.asarray(canvas.buffer_rgba())[..., :3]])


def _tell(trainer: Any, message: Callable[[WandbLogger], Any]) -> None:
    """Call `message` with every W&B logger, in the one process that logs."""
    if trainer.is_global_zero:
        tell(trainer, message, WandbLogger)
