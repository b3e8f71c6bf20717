"""Record when a metric first reaches a target, and the cost until then, in any Lightning trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fl.checks import checked, is_real, reaches
from lightning_fl.errors import UserError, nearest, require
from lightning_fl.outputs.metric import ACCURACY, falls, find_metric
from lightning_fl.outputs.traffic import COLUMNS
from lightning_fl.outputs.units import significant

# Costs to record, if the trainer has them.
COSTS = ("comm/total_uplink_bytes", "comm/total_downlink_bytes", "time/simulated_seconds")

# Arguments that say when the target is reached.
ASKED = ("target", "monitor", "mode")


@dataclass(frozen=True)
class _Epoch:
    """An epoch that has just ended: its index, the optimiser steps so far, and the costs so far."""

    index: int
    step: int
    costs: dict[str, float]


class TargetReached(Callback):
    """Record when a metric first reaches a target and the cost until then, and optionally stop the training.

    Checks the metric at the end of every epoch (in a federation: round), without smoothing; `lightning-fl report --target`
    smooths the curve first. Once the target is reached, `reached` is a dictionary: `epoch` (from 0), `step` (optimiser steps
    so far), `value`, and `comm/total_uplink_bytes`, `comm/total_downlink_bytes`, their sum `comm/total_bytes`, and
    `time/simulated_seconds`. The costs are there if the trainer's metrics contain them: in a federation, or with a
    `CommunicationMeter` earlier in the callbacks. `reached` does not change if the metric falls back, and checkpoints contain
    it.

    A metric that the module logs in its own `on_train_epoch_end`, which Lightning calls after the callbacks', has its own epoch
    and costs, too. In `lightning.Trainer` it is read when the next epoch starts, and so stops the training after that one.

    The epoch is logged once, as `target/epoch`, unless it is the last one and the module logs the metric so late. `watched`
    is the name of the metric once it is known, and `watched_falls` is true if lower is better. If several processes log
    different values, without `sync_dist`, the first process decides.

    Args:
        target: value to reach, up to rounding.
        monitor: name of the metric; if not given, `trainer.metric` in a federation, and elsewhere the only accuracy that
            validation logs, or else the loss.
        mode: `max` if higher is better, `min` if lower is; if not given, `min` for the names of losses and errors.
        stop: end the training when the target is reached.

    Raises:
        UserError: the mode is unknown; in training, the first validated epoch has not logged the metric.
    """

    @checked
    def __init__(
        self,
        target: float,
        monitor: str | None = None,
        mode: Literal["max", "min"] | None = None,
        stop: bool = True,
    ) -> None:
        require(is_real(target), f"target must be a finite number, got {target!r}.")
        self.target = target
        self.monitor = monitor
        self.mode = mode
        self.stop = stop
        self.reached: dict[str, float] | None = None
        self._seen = False
        self._validated = self._tested = False
        self._ended: _Epoch | None = None
        self._stops = False
        self.watched = monitor
        self.watched_falls = mode == "min"

    @property
    def state_key(self) -> str:
        """Key that differs between the targets of a training."""
        return self._generate_state_key(target=float(self.target), monitor=self.monitor)

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Reset for a new training."""
        if stage == "fit" and trainer.current_epoch == 0:
            self.reached, self._seen = None, False

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Forget the metric of an earlier training."""
        self.watched, self._validated, self._tested = None, False, False
        self._ended, self._stops = None, False
        if self.monitor is not None:
            self._watch(self.monitor)

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note that the metrics of a validation are available."""
        self._validated = not trainer.sanity_checking

    def on_test_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note that the metrics of a test are available, which a federation may measure after some rounds."""
        self._tested = not trainer.sanity_checking

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Read what the module has logged last; check the metric's name after the first validated epoch, when all are logged.

        Raises:
            UserError: the metric is not logged; the sentence names the nearest one.
        """
        self._compare(trainer, pl_module)
        self._ended = None
        names = trainer.callback_metrics.keys()
        awaits_test = getattr(trainer, "test_every_n_rounds", None) is not None and not self._tested
        if not self._validated or awaits_test or self.watched in names:
            return
        require(
            self.watched is not None,
            f"TargetReached finds neither a single accuracy nor a loss among {', '.join(map(repr, sorted(names)))}: "
            "set its monitor.",
        )
        raise UserError(
            f"TargetReached monitors {self.watched!r}, which is not logged; {nearest(str(self.watched), names)}."
        )

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Compare the metric with the target."""
        metrics = trainer.callback_metrics
        costs = {name: float(metrics[name]) for name in COSTS if name in metrics}
        ways = [costs[COLUMNS[way]] for way in ("up", "down") if COLUMNS[way] in costs]
        if len(ways) == 2:
            costs[COLUMNS["total"]] = sum(ways)
        self._ended = _Epoch(trainer.current_epoch, trainer.global_step, costs)
        self._compare(trainer, pl_module)
        self._stop(trainer)

    def read_last(self, trainer: Any, pl_module: LightningModule) -> None:
        """Compare the metric again: a federation calls this after the module's own hook of the epoch's end."""
        self._compare(trainer, pl_module)
        self._ended = None
        self._stop(trainer)

    def _stop(self, trainer: Any) -> None:
        if self._stops:
            self._stops = False
            trainer.should_stop = True

    def _compare(self, trainer: Any, module: LightningModule | None) -> None:
        """Compare the metric with the target after an epoch that has ended; `module` logs its index, if it may log now."""
        ended, metrics = self._ended, trainer.callback_metrics
        if ended is None:
            return
        if self.watched is None:
            self._find(trainer)
        value = float(metrics[self.watched]) if self.watched in metrics else None
        if trainer.world_size > 1:
            value = trainer.strategy.broadcast(value)  # all processes stop together, also if each logs its own value
        if value is None:
            return
        self._seen = True
        if self.reached is not None or not reaches(value, self.target, self.watched_falls):
            return
        self.reached = {"epoch": ended.index, "step": ended.step, "value": value, **ended.costs}
        self._stops = self.stop
        if module is not None:
            module.log("target/epoch", float(ended.index))
        texts = {
            name: f"{amount:,.0f}" if amount.is_integer() else significant(amount)
            for name, amount in ended.costs.items()
        }
        costs = "".join(f", {name.partition('/')[2]} {text}" for name, text in texts.items())
        rank_zero_info(
            f"{self.watched} reached {self.target:g} with {value:.4g} in epoch {ended.index} (from 0){costs}."
        )

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Read what the module has logged last; warn if the metric was never logged, not even before the run was resumed."""
        self._compare(trainer, None)
        watched = self.watched or ACCURACY
        if not self._seen and watched not in trainer.callback_metrics:
            names = [name for name in trainer.callback_metrics if name.startswith(("val", "train"))]
            rank_zero_warn(f"TargetReached: {watched!r} was never logged; {nearest(watched, names)}.")

    def _find(self, trainer: Any) -> None:
        """Find the metric that the run is about, in a stock trainer after its first validation."""
        run_metric = getattr(trainer, "metric", None)
        if isinstance(run_metric, str):
            self._watch(run_metric, "min" if trainer.metric_falls else "max")
        elif (self._validated or not trainer.enable_validation) and (name := find_metric(trainer.callback_metrics)):
            self._watch(name)
            better = "lower" if self.watched_falls else "higher"
            rank_zero_info(f"TargetReached monitors {name}, where {better} is better; its monitor sets another.")

    def _watch(self, name: str, run_mode: str | None = None) -> None:
        self.watched, self.watched_falls = name, falls(name, self.mode or run_mode)

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read what the module has logged last, so that the checkpoint of an epoch contains it."""
        self._compare(trainer, None)
        if "callbacks" in checkpoint:
            checkpoint["callbacks"][self.state_key] = self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"reached": self.reached, **{name: getattr(self, name) for name in ASKED}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint, unless it is about another target."""
        if all(state_dict[name] == getattr(self, name) for name in ASKED):
            self.reached = state_dict["reached"]
