"""Data for Weights & Biases besides the rows: name, axes, the resolved configuration, the labels, the results and the model.

`WandbRun` is a callback that the trainer adds if one of its loggers is a `WandbLogger`. Its state in the checkpoint is the
id of the W&B run, so that a resumed run continues it.
"""

from __future__ import annotations

import netrc
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl.checks import is_a
from lightning_fl.errors import UserError
from lightning_fl.outputs.figures import label_histogram
from lightning_fl.outputs.loggers import tell
from lightning_fl.outputs.metric import is_result
from lightning_fl.outputs.run_folder import EXPORT
from lightning_fl.outputs.traffic import COLUMNS

# Columns that charts may use as the horizontal axis.
AXES = (*COLUMNS.values(), "time/simulated_seconds", "round")
HOST = "https://api.wandb.ai"
LONGEST = {"name": 128, "group": 128, "tag": 64}
"""Characters that W&B accepts."""
VARIABLES = {"name": "WANDB_NAME", "group": "WANDB_RUN_GROUP", "tags": "WANDB_TAGS"}
"""Environment variables with which a user may name a run."""


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
        self._metric: str | None = None

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
            if not is_a(logger, WandbLogger):
                continue
            try:
                # Change the arguments of wandb.init, because W&B reads the environment only once in a process.
                logger._wandb_init.update(self._missing(logger) | self._names(trainer, logger))
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
            if in_sweep():
                rank_zero_info(f"This run is a trial of a sweep; its files are in {trainer.default_root_dir}.")
            for axis in AXES:
                run.define_metric(axis)
            run.define_metric("time/round_seconds", step_metric="round")  # logged when the round is over
            self._defined, self._metric = {*AXES, "time/round_seconds"}, None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Send the partition's labels as a picture."""
        histograms = trainer.datamodule.label_histograms
        if histograms is not None and trainer.ckpt_path is None:
            _tell(trainer, lambda logger: _send_picture(logger, histograms))

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log the total traffic, and define the horizontal axis of metrics that are new: uplink for results, rounds for others.

        The summary of the run's metric has its best value, too. Each is defined by name, because the logger defines an axis for
        `*`, and W&B may prefer either of two patterns that match.
        """
        sent = sum(trainer.run.ledger.total_bytes(way) for way in ("up", "down"))
        pl_module.log(COLUMNS["total"], torch.tensor(sent, dtype=torch.float64))  # a float would become float32
        new = trainer.callback_metrics.keys() - self._defined
        if trainer.metric != self._metric:  # it may be found only when all names are known
            self._metric = trainer.metric
            new |= {trainer.metric} & trainer.callback_metrics.keys()
        self._defined |= new

        def define(logger: WandbLogger) -> None:
            for name in sorted(new):
                axis = AXES[0] if is_result(name) or name == trainer.metric else "round"
                best = f"{'min' if trainer.metric_falls else 'max'},last" if name == trainer.metric else None
                logger.experiment.define_metric(name, step_metric=axis, summary=best)

        _tell(trainer, define)

    def _names(self, trainer: Any, logger: WandbLogger) -> dict[str, Any]:
        """Return name, group and tags that the user has not given; a resumed run keeps those that it has.

        W&B numbers the trials of a sweep itself, and shows them together.
        """
        if self._id is not None:
            return {}
        words = run_words(trainer)
        names: dict[str, Any] = {"tags": [word[: LONGEST["tag"]] for word in words]}
        if not in_sweep():
            names |= {"name": " ".join(words)[: LONGEST["name"]], "group": " ".join(words[:-1])[: LONGEST["group"]]}
        fixed = {kind for kind in VARIABLES if logger._wandb_init.get(kind) or os.environ.get(VARIABLES[kind])}
        return {kind: value for kind, value in names.items() if kind not in fixed}

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


def run_words(trainer: Any) -> list[str]:
    """Return method, data, partition and seed of a run, such as FedProx, Digits, Shards(2), seed 0."""
    data = trainer.datamodule
    wrapped, partition = getattr(data, "datamodule", data), data.partition
    first = [getattr(partition, field.name) for field in fields(partition)[:1]] if is_dataclass(partition) else []
    split = type(partition).__name__ + "".join(f"({value})" for value in first)
    return [trainer.algorithm.name, type(wrapped).__name__, split, f"seed {trainer.run.seed}"]


def in_sweep() -> bool:
    """True if an agent of a W&B sweep started this process."""
    return bool(os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID"))


def trial_folder(root: str, loggers: Iterable[Any]) -> str:
    """Return the folder of a run: for a trial of a sweep one of its own, because agents may run side by side.

    Args:
        root: folder that the user wants, or that all trials share.
        loggers: loggers of the run; without W&B the environment of an agent does not matter.
    """
    if in_sweep() and any(is_a(logger, WandbLogger) for logger in loggers):
        return os.path.join(root, f"trial-{os.environ['WANDB_RUN_ID']}")
    return root


def is_used(trainer: Any) -> bool:
    """True if W&B is one of the trainer's loggers."""
    return any(is_a(logger, WandbLogger) for logger in trainer.loggers)


def send_config(trainer: Any, config: dict[str, Any], path: Path) -> None:
    """Send the resolved configuration to W&B, as the run's config and as a file."""

    def send(logger: WandbLogger) -> None:
        logger.experiment.config.update(config, allow_val_change=True)
        if path.is_file():
            logger.experiment.log_artifact(str(path), name=f"config-{logger.experiment.id}", type="config")

    _tell(trainer, send)


def send_results(
    trainer: Any, lines: list[tuple[str, str]], numbers: Mapping[str, float | str], with_model: bool
) -> None:
    """Send the table at the end of a run, its results as the summary, and the exported model to W&B.

    Args:
        trainer: trainer after the run.
        lines: names and values of the table.
        numbers: results by name, and the name of the metric.
        with_model: True if there is an exported model.
    """

    def send(logger: WandbLogger) -> None:
        logger.log_table("final_table", columns=["what", "value"], data=[list(line) for line in lines])
        logger.experiment.summary.update(dict(numbers))
        if with_model:
            path = Path(trainer.default_root_dir) / EXPORT
            logger.experiment.log_artifact(str(path), name=f"model-{logger.experiment.id}", type="model")

    _tell(trainer, send)


def send_histograms(trainer: Any, values: Mapping[str, Sequence[float]], columns: Iterable[str]) -> None:
    """Send a histogram of each name's values over the uplink bytes so far, and define this axis for columns of the round."""
    numbers = {AXES[0]: trainer.run.ledger.total_bytes("up"), "trainer/global_step": trainer.current_epoch}

    def send(logger: WandbLogger) -> None:
        histogram = sys.modules["wandb"].Histogram
        for name in (*values, *columns):
            logger.experiment.define_metric(name, step_metric=AXES[0])
        logger.experiment.log({**{name: histogram(list(x), num_bins=20) for name, x in values.items()}, **numbers})

    _tell(trainer, send)


def send_table(trainer: Any, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Send rows of equal columns as a table."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    data = [[row.get(column) for column in columns] for row in rows]
    _tell(trainer, lambda logger: logger.log_table(name, columns=columns, data=data))


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
