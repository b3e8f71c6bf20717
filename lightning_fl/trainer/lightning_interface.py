"""Attributes of a trainer that the loops and Lightning's callbacks, loggers and modules read.

A round is an epoch, so stock callbacks work in a federation as long as the trainer has these attributes. `FederatedTrainer`
adds the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from math import inf
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fl.algorithms import Algorithm
from lightning_fl.checks import is_a, overrides
from lightning_fl.data import FederatedDataModule
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.hooks import Hooks
from lightning_fl.flat_module.local_progress import LocalProgress
from lightning_fl.outputs.reservation import Reservation
from lightning_fl.settings.settings import RunSettings
from lightning_fl.state.run_state import Run
from lightning_fl.state.saved_states import LoadedRun
from lightning_fl.trainer.flags import TrainerFlags
from lightning_fl.trainer.lightning_parts import refuse_flag
from lightning_fl.trainer.stops import Stop, stop_of


def _limit(name: str) -> Any:
    """Return the property for one of Lightning's `limit_*_batches`: 1.0, all batches, unless the flag is given."""

    def limit(self: TrainerFlags) -> int | float:
        value = self.limits[name]
        return 1.0 if value is None else value

    def set_limit(self: TrainerFlags, value: int | float | None) -> None:
        self.limits[name] = value

    return property(limit, set_limit, doc=f"The flag {name}.")


def _of_stock_trainers(name: str, read: Callable[[TrainerFlags], Any]) -> Any:
    """Return the property for a flag that only `lightning.Trainer` has: callbacks read it, and another value is refused."""

    def refuse(self: TrainerFlags, value: Any) -> None:
        if value != read(self):
            refuse_flag(name, ())

    return property(read, refuse, doc=f"The value of {name} that describes a federation.")


class TrainerInterface(TrainerFlags):
    """Flags, and attributes under the names of `lightning.pytorch.Trainer`, with a round as the epoch.

    Attributes:
        run: state of the run: the model, states, the ledger; set when `fit` begins.
        settings: settings that decide the results; set when `fit` begins.
        checkpoint: the checkpoint of the session, until it is loaded; None without one.
        weights_only: False if the user trusts objects of any class in the checkpoint of the session.
        algorithm: the federated method.
        flat_module: the module on its flat storage; None outside a session.
        hooks: calls the hooks of callbacks and module.
        num_rounds: rounds after which the run ends: `max_rounds`, or one if clients take part in none.
        round_batches: batches of this process in the current round; before the first, those of a pass of the largest client.
        by_lightning: True if Lightning's own loop trains the clients of this fit.
        loop_in_use: loop of the present evaluation; None outside one.
        evaluated: facts about the run whose model is validated or tested.
        learning_rates: state of the module's schedulers after the last fit; None before it.
        most_local_steps: optimiser steps of the client with the most samples in a round.
        estimated_steps: the same, as read before the module was set up; None if it was not read.
        stop: callback or module that has stopped the run; None while it goes on.
        privacy_in_words: privacy loss of the last fit and what it means; empty without privacy.
        stoppers: callbacks and module, which may stop the run, with their settings; set when `fit` begins.
    """

    run: Run
    fit_loop: Any
    settings: RunSettings
    algorithm: Algorithm
    hooks: Hooks
    flat_module: FlatModule | None = None
    evaluated = LoadedRun()
    learning_rates: dict[str, Any] | None = None
    datamodule: LightningDataModule | None = None
    loop_in_use: Any = None
    by_lightning = False
    checkpoint: dict[str, Any] | None = None
    weights_only: bool = True
    reservation: Reservation
    stop: Stop | None = None
    privacy_in_words = ""
    stoppers: list[tuple[Any, dict[str, Any]]] = []  # noqa: RUF012 -- a fit replaces it
    num_rounds = 0
    round_batches = 0
    most_local_steps = 0
    estimated_steps: int | None = None
    limit_train_batches: int | float = _limit("limit_train_batches")
    limit_val_batches: int | float = _limit("limit_val_batches")
    limit_test_batches: int | float = _limit("limit_test_batches")
    limit_predict_batches: int | float = _limit("limit_predict_batches")
    check_val_every_n_epoch: int = _of_stock_trainers("check_val_every_n_epoch", lambda self: self.val_every_n_rounds)
    val_check_interval: float = _of_stock_trainers("val_check_interval", lambda self: 1.0)

    # -- progress ----------------------------------------------------------------------------------------------------

    @property
    def fitting(self) -> bool:
        """True while a `fit` runs."""
        return self.state.fn == TrainerFn.FITTING and self.state.stage is not None

    @property
    def should_stop(self) -> bool:
        """True if the run ends after the current round; a callback or the module sets it."""
        return self.stop is not None

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if not value:
            self.stop = None
        elif self.stop is None:
            self.stop = stop_of(self)

    def stops_after(self, rounds: int) -> bool:
        """True if something stops the run after this many rounds, and `min_rounds` and `min_steps` are made."""
        has_least = rounds >= (self.min_rounds or 0) and self.run.num_successive_steps >= (self.min_steps or 0)
        return self.should_stop and has_least

    def ends_after(self, rounds: int) -> bool:
        """True if the run ends after this many rounds: all rounds or `max_steps` are made, or something stops it."""
        return rounds >= self.num_rounds or self.steps_left == 0 or self.stops_after(rounds)

    def is_due(self, every: int, rounds: int) -> bool:
        """True if what happens in every n-th round happens after this many rounds; after the last it always does."""
        return rounds % every == 0 or self.ends_after(rounds)

    @property
    def steps_left(self) -> int | None:
        """Optimiser steps that a client may make until `max_steps`; None without this limit."""
        return None if self.max_steps == -1 else max(0, self.max_steps - self.run.num_successive_steps)

    @property
    def max_epochs(self) -> int:
        """Number of rounds of the run."""
        return self.max_rounds

    @property
    def validates_this_round(self) -> bool:
        """True if the current round ends with a validation: every n-th does, and the last."""
        return self.is_due(self.val_every_n_rounds, self.current_epoch + 1)

    @property
    def trains_only_client(self) -> bool:
        """True if Lightning's own loop trains the only client: callbacks that save or average the model then see its steps."""
        return self.by_lightning and self.data.num_clients == 1 and self.world_size == 1 and self.privacy is None

    @property
    def _active_loop(self) -> Any:
        return self.loop_in_use or Trainer._active_loop.fget(self)  # type: ignore[attr-defined]

    @property
    def enable_validation(self) -> bool:
        """True if a fit has a validation loader and a module with a validation step, and `limit_val_batches` is not 0."""
        has_loader = self.fit_loop.epoch_loop.val_loop._data_source.is_defined()
        return has_loader and overrides("validation_step", self.lightning_module) and self.limit_val_batches > 0

    @property
    def has_validation_batches(self) -> bool:
        """True if there are batches to validate on, once the loaders are read."""
        return sum(self.num_val_batches) > 0

    @property
    def progress(self) -> LocalProgress | None:
        """Progress of the local training that the module makes; None between local trainings."""
        return None if self.flat_module is None else self.flat_module.progress

    def progress_for(self, name: str) -> LocalProgress | None:
        """Return the progress from which an attribute is read; `UserError` if clients of a stack do not share it."""
        if (progress := self.progress) is not None:
            progress.check_alike(name)
        return progress

    @property
    def global_step(self) -> int:
        """Optimiser steps so far.

        While a client trains: its steps in this round plus, for each earlier round, the most steps of a client, so that a
        schedule sees as many as in one training. Otherwise: the steps of all clients and of the server.
        """
        if self.progress is not None:
            return self.run.num_successive_steps + self.progress.local.num_steps
        return self.run.num_steps if "run" in vars(self) else 0

    @property
    def is_last_batch(self) -> bool:
        """True in the last batch of a client's pass, and when no client trains."""
        progress = self.progress_for("is_last_batch")
        return progress is None or (progress.batch_index + 1) % max(1, progress.batches_in_pass) == 0

    @property
    def begins_fit(self) -> bool:
        """True in a fit whose module is not set up yet, and may change."""
        return self.fitting and self.flat_module is None

    @property
    def _hides_data(self) -> bool:
        """True in a fit whose module is not set up yet, and has not asked for its loader or number of steps."""
        return self.begins_fit and self.estimated_steps is None and self.fit_loop._combined_loader is None

    @property
    def num_training_batches(self) -> int | float:
        """Batches of one pass of the client in training, for schedules by epoch; else `round_batches`.

        For a client with loaders of its own, the batches of its last pass, also after a fit. Infinity if they are unknown, as in
        `setup` until `estimated_stepping_batches` is read.
        """
        if self._hides_data:
            return inf
        self.fit_loop.find_lengths()
        if self.fit_loop._combined_loader is not None:
            return self.fit_loop.max_batches
        progress = self.progress_for("num_training_batches")
        return self.round_batches if progress is None else progress.batches_in_pass

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimiser steps of the client in training, else of the largest client: step-wise schedules span one local training.

        For a client with loaders of its own, infinity if they have no length.

        Raises:
            UserError: it is read before the data are set up.
        """
        self.fit_loop.find_lengths()
        if self.fitting and self.data.reads_own_loaders:
            return self.local_steps or (self.local_epochs or 1) * self.fit_loop.steps_in_pass
        progress = self.progress_for("estimated_stepping_batches")
        return (0 if progress is None else progress.planned_steps) or self.most_local_steps

    # -- module, devices, loggers, callbacks ------------------------------------------------------------------------

    @property
    def device_ids(self) -> list[int]:
        """Indices of the accelerators on this machine that the run uses."""
        devices = getattr(self.fabric.strategy, "parallel_devices", None) or [self.fabric.device]
        return [device.index or position for position, device in enumerate(devices)]

    @property
    def train_dataloader(self) -> Any:
        """Loader of the client that Lightning's own loop trains; else a loader of all clients' samples; None outside a fit.

        For a client with loaders of its own, the loader stays after the fit, as in Lightning.
        """
        if self.fit_loop._combined_loader is not None:
            return self.fit_loop._combined_loader.iterables
        if self.by_lightning and self.progress is not None:
            return self.fit_loop.epoch_loop.loader
        if self.fitting and self.data.reads_own_loaders:
            return None
        return self.data.train_dataloader() if self.fitting and not self._hides_data else None

    @property
    def log_dir(self) -> str:
        """The run's folder."""
        return self.default_root_dir

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The first progress bar among the callbacks."""
        return next((callback for callback in self.callbacks if is_a(callback, ProgressBar)), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """All callbacks that stop early."""
        return [callback for callback in self.callbacks if is_a(callback, EarlyStopping)]

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """All callbacks that save checkpoints."""
        callbacks = self.callbacks if self.flat_module is None else self.hooks.callbacks
        return [callback for callback in callbacks if is_a(callback, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """The first checkpoint callback that monitors a metric, else the first of all."""
        callbacks = sorted(self.checkpoint_callbacks, key=lambda c: getattr(c, "monitor", None) is None)
        return callbacks[0] if callbacks else None

    def publish(self, metrics: Mapping[str, float]) -> None:
        """Make metrics visible to callbacks and progress bars, also under Lightning's names with suffixes."""
        values = {
            name: torch.tensor(float(value), dtype=torch.float64) for name, value in self.with_suffixed(metrics).items()
        }
        self._logger_connector._callback_metrics.update(values)
        if self.privacy is None:  # whose loggers get less
            hidden = self.active_module.logs.unlogged_names
            logged = self.with_suffixed({name: x for name, x in metrics.items() if name not in hidden})
            self._logger_connector._logged_metrics.update({name: torch.tensor(float(x)) for name, x in logged.items()})
        shown = self.active_module.logs.progress_bar_names
        self._logger_connector._progress_bar_metrics.update(
            {name: float(value) for name, value in metrics.items() if name in shown}
        )

    def with_suffixed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics; those logged on step and on epoch also under Lightning's names with suffixes."""
        suffixed = self.active_module.logs.suffixed
        return {other: value for name in metrics for other, value in suffixed.get(name, {}).items()} | dict(metrics)

    @property
    def active_module(self) -> FlatModule:
        """The flat module, which exists during a session only."""
        assert self.flat_module is not None
        return self.flat_module

    @property
    def data(self) -> FederatedDataModule:
        """The datamodule."""
        assert isinstance(self.datamodule, FederatedDataModule)
        return self.datamodule

    def __getattr__(self, name: str) -> Any:
        """Say why an attribute is absent.

        Raises:
            AttributeError: always; its sentence names the reason, or the nearest name.
        """
        kind = type(self)
        if hasattr(kind, name):
            return object.__getattribute__(self, name)  # a property that failed: raise its own error
        if name.startswith("_"):
            raise AttributeError(f"{kind.__name__} has no attribute {name!r}.")
        if name in ("run", "settings"):
            raise AttributeError(f"{kind.__name__} has no {name} before a fit has begun.")
        if name in ("algorithm", "hooks"):
            raise AttributeError(f"{kind.__name__} has no {name} before fit, validate, test or predict is called.")
        near = get_close_matches(name, [other for other in (*dir(kind), *vars(self)) if other[0] != "_"], n=1)
        raise AttributeError(
            f"{kind.__name__} has no attribute {name!r}{f'; did you mean {near[0]!r}?' if near else '.'}"
        )
