"""Runner `lightning`: Lightning's own epoch loop trains each client, one after the other.

So every hook, every way of logging and every optimiser works as in `lightning.Trainer`, at its speed. Rules of methods act
between gradient and step (`lightning_fl.trainer.rules_in_steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from math import ceil, inf
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch.utils.data import DataLoader

from lightning_fl.checks import check_whole, is_a
from lightning_fl.checks.swapped_attributes import swapped
from lightning_fl.clients.client_job import Batch, ClientJob, local_batches
from lightning_fl.clients.local_schedule import ClientWork, LocalSchedule
from lightning_fl.clients.local_training import begin_training
from lightning_fl.clients.serial import serial
from lightning_fl.data import FederatedDataModule
from lightning_fl.data.descriptions import describe_batch
from lightning_fl.data.samples.own_loaders import OwnLoader
from lightning_fl.errors import noting, require
from lightning_fl.evaluation.loops import EvaluationLoop
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.hooks import SERVER_CALLBACKS
from lightning_fl.internals import (
    AutomaticOptimization,
    ManualOptimization,
    StockEpochLoop,
    data_fetcher_for,
    set_sampler_epoch,
)
from lightning_fl.slots import LocalTraining, Result, State
from lightning_fl.trainer.rules_in_steps import acts_in_steps, rule_in_steps

WARNINGS = WarningCache()
LOG_OPTIONS = [*signature(LightningModule.log).parameters][3:]
"""Names of the options of `LightningModule.log`, in their order."""


def lightning(
    flat_module: FlatModule, job: ClientJob, clients: Sequence[int], data: FederatedDataModule
) -> Iterator[Result]:
    """Train clients one after the other by the epoch loop of their trainer; yield the result of each."""
    return serial(flat_module, job, clients, data, train_by_lightning)


def check_module_of_runner(module: LightningModule) -> None:
    """Raise `UserError` if the module is one of `pytorch_lightning`, whose own loop is another."""
    require(
        isinstance(module, LightningModule),
        f"runner 'lightning' trains modules of lightning.pytorch, and {type(module).__name__} is one of pytorch_lightning: "
        "import LightningModule from lightning.pytorch.",
    )


def train_by_lightning(
    flat_module: FlatModule,
    job: ClientJob,
    work: ClientWork,
    state: State,
    beside: Callable[..., None] | None = None,
) -> LocalTraining:
    """Train the flat module from the received model on one client's samples; see `train_locally`."""
    assert beside is None  # `check_rules_in_steps` refuses it
    trainer: Any = flat_module.module.trainer
    local, progress = begin_training(flat_module, job, work, state)
    acts = trainer.fit_loop.epoch_loop.rule_acts = acts_in_steps(flat_module, job)
    with _logging_in_both(flat_module), rule_in_steps(flat_module, job, local) if acts else nullcontext():
        if isinstance(work.selection, OwnLoader):
            loaders = trainer.fit_loop.own_loaders(work.selection.client)
            progress.batches_in_pass, progress.planned_steps = (
                trainer.num_training_batches,
                trainer.estimated_stepping_batches,
            )
            trainer.fit_loop.epoch_loop.train(loaders, local, job.schedule)
            if not local.num_steps:
                WARNINGS.warn(
                    "A client has made no step on its own loader in a round, so that its upload changes nothing, but counts in "
                    "the mean: give it a batch, or leave it out. This is said once."
                )
        elif len(loader := ClientLoader(flat_module, work, job.schedule)):
            trainer.fit_loop.epoch_loop.train(loader, local, job.schedule)
    flat_module.bind_replaced()
    flat_module.gradient.zero()
    flat_module.optimizer.end_client()
    return local


class ClientLoader:
    """Batches of one client's local training, of all its passes; their length is known.

    Attributes:
        batch: the batch that was read last.
        takes_full_batches: True if each step uses the gradient on all of the client's samples.
    """

    batch: Batch

    def __init__(self, flat_module: FlatModule, work: ClientWork, schedule: LocalSchedule) -> None:
        self._flat_module, self._work, self._schedule = flat_module, work, schedule
        self.batch_sampler = None  # which Lightning looks for
        self.batch_size, self.takes_full_batches = schedule.batch_size, schedule.full_batch

    @property
    def dataset(self) -> Any:
        """The client's part of the user's data set; None if its samples come from no data set."""
        return getattr(self._work.selection, "dataset", None)

    def __len__(self) -> int:
        return self._schedule.num_batches(len(self._work.selection), self._work.num_steps)

    def __iter__(self) -> Iterator[Any]:
        progress = self._flat_module.progress
        assert progress is not None
        for index, batch in enumerate(local_batches(self._work, self._schedule, _as_it_is)):
            if index == len(self):
                return
            self.batch, progress.batch_index = batch, batch.batch_index
            self._flat_module.logs.batch_size = batch.size
            yield batch.content


def flag_in_loop(name: str, least: int, unset: int | None = None, may_be_unset: bool = False) -> Any:
    """Return the property by which a loop shows and sets a flag of its trainer, under the name that it has in Lightning's loop.

    Args:
        name: name of the trainer's flag.
        least: smallest value.
        unset: value that Lightning's loop shows if the flag is None.
        may_be_unset: True if None may be set.
    """

    def read(loop: Any) -> Any:
        value = getattr(loop.trainer, name)
        return unset if value is None else value

    def write(loop: Any, value: Any) -> None:
        if value == read(loop):
            return
        if value is not None or not may_be_unset:
            check_whole(name, value, least)
        setattr(loop.trainer, name, value)

    return property(read, write, doc=f"The trainer's {name}.")


class RoundEpochLoop(StockEpochLoop):
    """Lightning's loop of an epoch: a client's local training within a round, after which the server's model is validated."""

    trainer: Any
    max_steps: int = flag_in_loop("max_steps", -1)
    min_steps: int | None = flag_in_loop("min_steps", 0, may_be_unset=True)
    val_loop: EvaluationLoop
    loader: ClientLoader | None = None
    """Batches of the client in training; None if it reads loaders of its own."""
    local: LocalTraining
    steps_left: int | float
    """Steps after which the client's training ends, even if its loader has more; with manual optimisation a step is a batch."""
    most_steps: int | float
    """Optimiser steps after which it ends."""
    passes_left: int | float
    """Remaining passes over its loader, including the present one."""
    rule_acts = False
    """True if the rule acts in the optimiser's steps, which it then counts."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer, trainer.min_steps, trainer.max_steps)
        self.automatic_optimization = _ClientOptimization(trainer)
        self.manual_optimization = _ClientsOwnOptimization(trainer)
        # As in Lightning, because hooks of a validation may make tensors that the next training uses.
        self.val_loop = EvaluationLoop(trainer, "validation", inference_mode=False)
        self.starts_step = True

    def train(self, loaders: ClientLoader | CombinedLoader, local: LocalTraining, schedule: LocalSchedule) -> None:
        """Train a client, until there are no steps left to make, or a pass makes none.

        Args:
            loaders: all batches of the client's training, or loaders of its own.
            local: its local training, whose optimiser steps are counted.
            schedule: passes over loaders of its own, or optimiser steps in as many passes as these need; and the most steps.
        """
        self.local, self.starts_step = local, True
        self.most_steps = inf if schedule.most_steps is None else schedule.most_steps
        if isinstance(loaders, CombinedLoader):
            self.loader = None
            self.steps_left, self.passes_left = (inf if x is None else x for x in (schedule.steps, schedule.epochs))
            passes_in_round = schedule.epochs or ceil(
                (schedule.steps or 1) / max(1, self.trainer.fit_loop.steps_in_pass)
            )
        else:
            self.loader, self.steps_left, self.passes_left = loaders, inf, 1
            passes_in_round = 1
            loaders = CombinedLoader(loaders, "max_size_cycle")
        fetcher = data_fetcher_for(self.trainer, RunningStage.TRAINING)
        fetcher.setup(loaders)
        num_passes, steps_before = 0, inf
        with nullcontext() if self.trainer.trains_only_client else _without_server_callbacks(self.trainer):
            while self.passes_left > 0 and not self._is_at_end:
                if steps_before == self.steps_left < inf:
                    break  # the pass before made no step
                steps_before = self.steps_left
                for one in loaders.flattened:
                    set_sampler_epoch(one, self.trainer.current_epoch * passes_in_round + num_passes)
                iter(fetcher)
                self.run(fetcher)
                self.passes_left -= 1
                num_passes += 1
        loaders._iterator = None  # ends workers that a loader does not keep until the next pass
        if (
            not self.trainer.trains_only_client
        ):  # ends those that it keeps, too: other clients train before this one does again
            for one in loaders.flattened:
                if isinstance(one, DataLoader):
                    one._iterator = None
        self.trainer._logger_connector._callback_metrics.update(self.trainer.callback_metrics)  # of the last step
        self.trainer._logger_connector.epoch_end_reached()

    @property
    def done(self) -> bool:
        """True after the last batch: a federation stops after a round."""
        is_last = self.batch_progress.is_last_batch and self.batch_progress.current.ready > 0
        return is_last or self._is_at_end

    @property
    def _is_at_end(self) -> bool:
        """True if no steps are left to make. A batch of manual optimisation may make several."""
        return self.steps_left <= 0 or self.local.num_steps >= self.most_steps

    def on_run_start(self, data_fetcher: Any) -> None:
        """Read from the beginning."""
        data_fetcher._start_profiler, data_fetcher._stop_profiler = self._on_before_fetch, self._on_after_fetch

    def advance(self, data_fetcher: Any) -> None:
        """Train on one batch."""
        if self.loader is None:
            self.trainer.active_module.logs.batch_size = self._size_of_batch
            self.trainer.active_module.progress.batch_index += 1
            self.trainer.round_batches += 1
        num_batches = self.trainer.num_training_batches if self.loader is None else len(self.loader)
        # The last batch ends with the round: `Hooks.after_round`.
        is_last = self.passes_left == 1 and self.batch_progress.current.ready + 1 >= num_batches
        with noting(self._description), _without_server_callbacks(self.trainer) if is_last else nullcontext():
            super().advance(data_fetcher)
        self.starts_step = not self._should_accumulate()
        self.steps_left -= self.starts_step

    def _size_of_batch(self) -> int:
        """Return the number of samples of the present batch of a client's own loader; 1 if Lightning cannot tell it."""
        batch: Any = self._results.batch
        try:
            return extract_batch_size(batch)
        except MisconfigurationException:  # which Lightning raises itself if the module logs a mean
            return 1

    def _description(self) -> str:
        if self.loader is None:
            return f"training_step read batch {self.batch_idx}: {describe_batch(self._results.batch)}."
        batch = self.loader.batch
        return f"training_step read batch {batch.batch_index}: {describe_batch(batch.content)}."

    @property
    def batch_idx(self) -> int:
        """Index of the client's present batch in the round; between rounds of the round's last one, -1 before the first."""
        if self.trainer.by_lightning:
            return int(super().batch_idx)
        if (progress := self.trainer.progress) is not None:
            return int(progress.batch_index)
        return int(self.trainer.round_batches - 1) if self.batches_before else -1

    @property
    def total_batch_idx(self) -> int:
        """The same, after the batches of all rounds before, of each those of the client that made the most steps.

        Where Lightning's own loop trains, the number of all batches of this process so far, less one.
        """
        if self.trainer.by_lightning:
            return int(super().total_batch_idx)
        return self.batches_before + (-1 if self.trainer.progress is None else self.batch_idx)

    @property
    def batches_before(self) -> int:
        """Batches of the rounds before, of each those of the client that made the most steps."""
        if "run" not in vars(self.trainer) or not (steps := self.trainer.run.num_successive_steps):
            return 0
        largest = int(self.trainer.fit_loop.engine.data.client_sizes.max())
        return int(self._schedule_in_round.num_batches(largest, steps))

    @property
    def _schedule_in_round(self) -> LocalSchedule:
        """Length and batches of a client's local training in this round."""
        engine = self.trainer.fit_loop.engine
        return engine.schedule.in_round(engine.algorithm.rule, engine.context)

    @property
    def global_step(self) -> int:
        """Optimiser steps, as the trainer counts them."""
        return int(self.trainer.global_step)

    def _broadcast_sigterm_tensor(self) -> None:
        """Do nothing: processes train different clients, on different numbers of batches."""

    def _should_accumulate(self) -> bool:
        if self.trainer.by_lightning:
            return super()._should_accumulate() if self.loader is None else not self.loader.batch.ends_step
        progress = self.trainer.progress_for("fit_loop._should_accumulate()")
        if progress is None or "engine" not in vars(self.trainer.fit_loop):  # where a runner is only tried
            return False
        schedule = self._schedule_in_round
        return not schedule.ends_step(progress.batch_index, progress.batches_in_pass // schedule.repeat)

    def _num_ready_batches_reached(self) -> bool:
        return bool(self.batch_progress.is_last_batch)

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Advance the schedulers that step within a round; the others step after it."""
        if interval == "step":
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _should_check_val_epoch(self) -> bool:
        return bool(self.trainer.validates_this_round)

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        return False  # the server's model is validated, after the round


class _ClientOptimization(AutomaticOptimization):
    """Lightning's automatic optimisation, which counts a client's steps and keeps its losses."""

    trainer: Any

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Any) -> Callable[[], None] | None:
        if self._skip_backward or not self.trainer.fit_loop.epoch_loop.starts_step:
            return None

        def zero_grad() -> None:
            self._on_before_zero_grad(optimizer)
            self._optimizer_zero_grad(batch_idx, optimizer)

        return zero_grad

    def _training_step(self, kwargs: Any) -> Any:
        result = super()._training_step(kwargs)
        if result.closure_loss is not None:
            self.trainer.active_module.logs.add_loss(
                result.closure_loss.detach() * self.trainer.accumulate_grad_batches
            )
            loader = self.trainer.fit_loop.epoch_loop.loader
            if loader is not None and loader.takes_full_batches:
                result.closure_loss = result.closure_loss * self.trainer.accumulate_grad_batches * loader.batch.factor
        return result

    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Callable[[], Any]) -> None:
        flat_module, local = self.trainer.active_module, self.trainer.fit_loop.epoch_loop.local
        super()._optimizer_step(batch_idx, train_step_and_backward_closure)
        flat_module.bind_replaced()
        if self.trainer.fit_loop.epoch_loop.rule_acts:
            return
        if (unpruned := local.context.unpruned) is not None:
            local.params.mul_(unpruned.factors)
        local.num_steps += 1
        local.sum_learning_rate = local.sum_learning_rate + local.learning_rate
        local.learning_rate = flat_module.optimizer.learning_rate


class _ClientsOwnOptimization(ManualOptimization):
    """Lightning's manual optimisation, which keeps a client's losses; the optimisers count the steps."""

    trainer: Any

    def run(self, kwargs: Any) -> dict[str, Any]:
        """Make the training step of a batch."""
        output = super().run(kwargs)
        if output.get("loss") is not None:
            self.trainer.active_module.logs.add_loss(output["loss"])
        return output


@contextmanager
def _logging_in_both(flat_module: FlatModule) -> Iterator[None]:
    """Let what the module logs reach Lightning, too, which sends single steps to loggers and callbacks."""
    attributes, module = vars(flat_module.module), flat_module.module
    collect = attributes["log"]

    def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
        given = {**dict(zip(LOG_OPTIONS, arguments, strict=False)), **options}
        # Processes train different clients, on different numbers of batches.
        type(module).log(module, name, value, **given | {"sync_dist": False})
        collect(name, value, **given)

    attributes["log"] = log
    try:
        yield
    finally:
        attributes["log"] = collect


def _without_server_callbacks(trainer: Any) -> AbstractContextManager[None]:
    """Leave out callbacks that save or average the server's model, which they see after the round."""
    kept = [callback for callback in trainer.callbacks if not is_a(callback, *SERVER_CALLBACKS)]
    return swapped(trainer, callbacks=kept)


def _as_it_is(batch: Any) -> Any:
    return batch
