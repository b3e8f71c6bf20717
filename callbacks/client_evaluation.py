"""Evaluate each client of a federation with its own model on its own held-out samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, isfinite, nan
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Interval
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fl.callbacks.target_reached import TargetReached
from lightning_fl.checks import (
    Called,
    checked,
    is_a,
    is_whole,
    overrides,
)
from lightning_fl.errors import nearest, require
from lightning_fl.outputs import wandb_run
from lightning_fl.outputs.clients.distribution import GAIN, TUNED, distribution, is_over_clients
from lightning_fl.outputs.clients.rows import OF_CLIENT, add_rows
from lightning_fl.outputs.metric import falls
from lightning_fl.outputs.metrics_csv import RoundCSVLogger
from lightning_fl.outputs.run_folder import CLIENTS

WATCHERS = (EarlyStopping, ModelCheckpoint, TargetReached)
END = "_tuned"
"""End of the columns of clients.csv with values after fine-tuning."""


class ClientEvaluation(Callback):
    """Evaluate every client, or a panel of clients, with its own model on its own held-out samples.

    A client's model is the server's model with the parameters that the client owns, if any. A client that has not taken part
    yet has the initial values of these parameters. Works only in a `FederatedTrainer`: after every n-th round, after the last
    round, even if the run stops early, and in `validate` and `test`. It changes neither the model nor the clients' states nor
    what others log.

    For each value that `validation_step` (or `test_step`) logs, such as `val/accuracy`, the row of the round gets
    `val/accuracy_clients_…`: `weighted` by samples, `mean`, `std`, `min`, `max`, `q10`, `q50`, `q90`, the mean of the worst tenth
    of the clients and of the best (`worst10`, `best10`), and the fairness indices of Jain and Gini (`jain`, `gini`), which are
    left out if a value is below 0. After fine-tuning, `…_clients_tuned_…` has the same statistics, and `…_clients_gain_mean`
    the mean change. Four columns count clients: `clients/evaluated`, `clients/failed` (a value is not finite, and is left
    out), `clients/newcomers` (they own parameters, but have not taken part yet) and `clients/without_samples`. `clients.csv`
    has the values of single clients. If a torchmetrics object is undefined for a client, such as AUROC of samples of one
    class, its value is NaN, not 0.

    Args:
        every_n_rounds: rounds between two evaluations, at least 1.
        part: samples of each client: `validation`, which data.val_fraction holds out, or `test`, if the data give each client
            test samples of its own.
        clients: evaluate only a panel of this many clients, a count or a share in (0, 1]; all if not given.
        panel: evaluate the same panel every time (fixed), or draw a new one each time (fresh), from the seed and the round.
        finetune_epochs: evaluate again after each client has fine-tuned a copy of its model for this many passes over its own
            training samples, with the module's optimiser; 0: no fine-tuning.
        finetune_lr: constant learning rate of these passes; if not given, the learning rate of the next round.
        lower_is_better: for every metric: true if the worst clients have the highest values, false if they have the lowest; if
            not given, the metric's name decides: losses, errors and perplexities are better when lower.
        file: write clients.csv beside metrics.csv.

    Raises:
        UserError: an argument is out of range; or, before training, the trainer has no clients or the clients have no such
            samples.
    """

    tells_of_clients = True
    """True: its columns and its file are about single clients."""
    logs_over_clients = True
    """True if it checks names of statistics over clients itself, which others monitor, in the first round that has them."""

    @checked
    def __init__(
        self,
        every_n_rounds: Annotated[int, Ge(1)] = 10,
        part: Literal["validation", "test"] = "validation",
        clients: Annotated[int, Ge(1)]
        | Annotated[float, Interval(gt=0, le=1), Called("clients, unless it is a count,")]
        | None = None,
        panel: Literal["fixed", "fresh"] = "fixed",
        finetune_epochs: Annotated[int, Ge(0)] = 0,
        finetune_lr: Annotated[float, Gt(0)] | None = None,
        lower_is_better: bool | None = None,
        file: bool = True,
    ) -> None:
        if finetune_lr is not None:
            require(finetune_epochs > 0, f"finetune_lr {finetune_lr} needs finetune_epochs, at least 1.")
        self.every_n_rounds = every_n_rounds
        self.part = part
        self.clients = clients
        self.panel = panel
        self.finetune_epochs = finetune_epochs
        self.finetune_lr = finetune_lr
        self.lower_is_better = lower_is_better
        self.file = file
        self.rows: list[dict[str, Any]] = []
        """Rows of the last evaluation, as in clients.csv."""
        self._last_round = -1
        self._warned = self._may_write = False

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Refuse a trainer without clients, clients without samples, and callbacks that monitor a value more often.

        Raises:
            UserError: the trainer, the clients or a callback are refused.
        """
        require(
            hasattr(trainer, "evaluate_clients"),
            "ClientEvaluation evaluates clients, and lightning.Trainer has no clients: use FederatedTrainer.",
        )
        if stage == "predict":
            return
        self.rows, self._warned, self._may_write, self._last_round = [], False, False, -1
        data, module, step = trainer.datamodule, type(pl_module).__name__, f"{self.part}_step"
        if self.part == "validation":
            require(
                any(map(len, data.client_val_indices)),
                "ClientEvaluation measures clients on samples that they hold out, but data.val_fraction is 0: set it to 0.2, for "
                "example.",
            )
        else:
            data.require_own_test_samples("ClientEvaluation")
            require(
                data.shift is None,
                f"{data.shift} changes the clients' training images, but not their test images, on which ClientEvaluation would "
                "measure them: use part 'validation' with data.val_fraction.",
            )
        require(overrides(step, pl_module), f"ClientEvaluation runs {step}, which {module} does not have.")
        require(
            not is_whole(self.clients) or self.clients <= data.num_clients,
            f"clients of ClientEvaluation is {self.clients}, but the federation has {data.num_clients}: give at most as many.",
        )
        require(
            sum(isinstance(callback, ClientEvaluation) for callback in trainer.callbacks) == 1,
            "two ClientEvaluation callbacks would log the same columns: give one.",
        )
        if stage == "fit":
            self._check_watchers(trainer.callbacks)

    def _check_watchers(self, callbacks: Sequence[Callback]) -> None:
        """Refuse callbacks that read a statistic in rounds without one, or before it is logged."""
        earlier = callbacks[: list(callbacks).index(self)]
        for callback in callbacks:
            monitor, every = getattr(callback, "monitor", None), getattr(callback, "every_n_epochs", 1) or 1
            if not isinstance(callback, WATCHERS) or not is_over_clients(str(monitor)):
                continue
            watched = f"{type(callback).__name__} monitors {monitor!r}"
            require(
                every % self.every_n_rounds == 0,
                f"{watched} {_often(every)}, but ClientEvaluation measures it {_often(self.every_n_rounds)}: give both the same "
                f"number of rounds{' (every_n_epochs)' if is_a(callback, ModelCheckpoint) else ', every_n_rounds 1'}.",
            )
            require(
                not isinstance(callback, TargetReached) or callback not in earlier,
                f"{watched}, which ClientEvaluation logs later: put ClientEvaluation before it.",
            )

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Check before training, with no client, that the evaluation will work.

        Raises:
            UserError: the module's scheduler does not fit the fine-tuning.
        """
        trainer.evaluate_clients(self.part, 0, True, self.finetune_epochs, self.finetune_lr)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Evaluate the clients after every n-th round and the last that is planned.

        Raises:
            UserError: a callback monitors a statistic that is not logged.
        """
        done = trainer.current_epoch + 1
        if done % self.every_n_rounds == 0 or done >= trainer.num_rounds:
            self._evaluate_round(trainer, pl_module)

    def on_early_stop(self, trainer: Any, pl_module: LightningModule) -> None:
        """Evaluate the clients after the last round of a run that stops early, unless that is done."""
        if self._last_round != trainer.current_epoch:
            self._evaluate_round(trainer, pl_module)

    def _evaluate_round(self, trainer: Any, pl_module: LightningModule) -> None:
        """Evaluate the clients after a round, and write and send their values."""
        self._last_round = trainer.current_epoch
        columns = self._evaluate(trainer, pl_module)
        self._check_monitors(trainer.callbacks, columns)
        values: dict[str, list[float]] = {}
        for row in self.rows:
            for name in row.keys() - OF_CLIENT:
                metric, tuned = name.removesuffix(END), END * name.endswith(END)
                values.setdefault(f"{metric}_clients{tuned}", []).extend([row[name]] * isfinite(row[name]))
        wandb_run.send_histograms(trainer, values, [name for name in columns if is_over_clients(name)])
        if self._may_write:
            self._write(trainer)

    def on_folder_claimed(self, trainer: Any, pl_module: LightningModule) -> None:
        """Write the rows of the first round, before which the folder may contain an earlier run."""
        self._may_write = True
        self._write(trainer)

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Send the last evaluation to W&B as a table."""
        if self.rows:
            wandb_run.send_table(trainer, "clients", self.rows)

    def on_model_loaded(self, trainer: Any, pl_module: LightningModule) -> None:
        """Evaluate the clients in `validate` and `test`, which write no file."""
        self._evaluate(trainer, pl_module)

    def _evaluate(self, trainer: Any, module: LightningModule) -> dict[str, float]:
        """Evaluate the clients, keep their rows, and log and return the columns."""
        size = self.clients
        if size is not None and not is_whole(size):
            size = max(1, round(size * trainer.datamodule.num_clients))
        results = trainer.evaluate_clients(
            self.part, size, self.panel == "fixed", self.finetune_epochs, self.finetune_lr
        )
        measured = [result for result in results if result.num_samples]
        logged = dict.fromkeys(name for result in measured for name in result.metrics)
        taken, prefix = [name for name in logged if name in OF_CLIENT], "val" if self.part == "validation" else "test"
        require(
            not taken,
            f"{type(module).__name__} logs {', '.join(map(repr, taken))}, but clients.csv has another column of this name: log "
            f"another name in {self.part}_step, such as {prefix}/{''.join(taken[:1])}.",
        )
        if not measured and not self._warned:
            self._warned = True
            rank_zero_warn("ClientEvaluation measured nothing: no client of the panel has held-out samples.")
        failed = [r for r in measured if not all(map(isfinite, (*r.metrics.values(), *r.tuned.values())))]
        columns: dict[str, float] = {
            "clients/evaluated": len(measured),
            "clients/failed": len(failed),
            "clients/newcomers": sum(result.is_newcomer for result in results),
            "clients/without_samples": len(results) - len(measured),
        }
        for name in logged:
            statistics = _statistics(
                name, measured, falls(name) if self.lower_is_better is None else self.lower_is_better
            )
            columns |= {f"{name}_clients_{statistic}": value for statistic, value in statistics.items()}
        for name, value in columns.items():
            if isinstance(value, int):
                module.log(name, value, reduce_fx="sum")  # a mean would not be a whole number
            else:
                module.log(name, torch.tensor(value, dtype=torch.float64))  # a Python float would become float32
        trainer.publish(columns)  # for callbacks that read them in this round
        round_number = {"round": trainer.current_epoch} if trainer.fitting else {}
        names = trainer.datamodule.client_names
        self.rows = [
            {**round_number, "client": result.client}
            | ({} if names is None else {"name": str(names[result.client])})
            | {"samples": result.num_samples, **result.metrics}
            | {f"{name}{END}": value for name, value in result.tuned.items()}
            for result in measured
        ]
        return columns

    def _write(self, trainer: Any) -> None:
        writes = self.file and any(isinstance(logger, RoundCSVLogger) for logger in trainer.loggers)
        if writes and self.rows and trainer.is_global_zero:
            add_rows(Path(trainer.default_root_dir, CLIENTS), self.rows)

    def _check_monitors(self, callbacks: Sequence[Callback], columns: Mapping[str, float]) -> None:
        """Refuse to go on if a callback monitors a statistic over clients that is not logged."""
        for callback in callbacks:
            monitor = str(getattr(callback, "monitor", None))
            require(
                not is_over_clients(monitor) or monitor in columns or not self.rows,
                f"{type(callback).__name__} monitors {monitor!r}, which is not logged; {nearest(monitor, columns)}.",
            )


def _often(every: int) -> str:
    return "after every round" if every == 1 else f"every {every} rounds"


def _statistics(name: str, results: Sequence[Any], lower_is_better: bool) -> dict[str, float]:
    """Return the statistics of a metric over clients, before and after fine-tuning, without values that are not finite."""
    statistics: dict[str, float] = {}
    for prefix, kind in (("", "metrics"), (TUNED, "tuned")):
        values = {result.client: getattr(result, kind).get(name, nan) for result in results}
        measured = [result for result in results if isfinite(values[result.client])]
        samples = [result.num_samples for result in measured]
        kind_values = distribution([values[result.client] for result in measured], samples, lower_is_better)
        statistics |= {f"{prefix}{statistic}": value for statistic, value in kind_values.items()}
    gains = [result.tuned.get(name, nan) - result.metrics.get(name, nan) for result in results]
    if finite := [gain for gain in gains if isfinite(gain)]:
        statistics[GAIN] = fsum(finite) / len(finite)
    return statistics
