"""Rounds of a `fit`: hooks, validation, schedules, log rows and checkpoints around `train_round`."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Collection
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from math import ceil, inf
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fl.checks import is_a
from lightning_fl.engine import between_rounds, follow_pruning, follow_torch_pruning, follow_unfreezing
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.round import train_round
from lightning_fl.engine.round_record import check_logged
from lightning_fl.errors import FileError, UserError, require
from lightning_fl.evaluation.loops import EvaluationLoop
from lightning_fl.features.privacy.mechanism import Mechanism
from lightning_fl.features.privacy.noise_key import noise_key
from lightning_fl.features.privacy.refusals import check_watched_of_clients
from lightning_fl.features.privacy.side_channels import told_by
from lightning_fl.flat_module.hooks import check_watched
from lightning_fl.internals import StockFitLoop
from lightning_fl.outputs import checkpoint_file, wandb_run
from lightning_fl.outputs.clients.rows import add_rows
from lightning_fl.outputs.communication_json import Bits, write_communication
from lightning_fl.outputs.final_table import final_lines
from lightning_fl.outputs.last_checkpoint import LastCheckpoint, offer_model
from lightning_fl.outputs.loggers import log_row, tell
from lightning_fl.outputs.run_folder import CLIENTS, EXPORT, LAST, RunFolder, write_settings
from lightning_fl.processes import check_agreement, checksum, gather_logs, gather_objects
from lightning_fl.pruning import masks_of
from lightning_fl.settings.settings import RunSettings, settings_of
from lightning_fl.settings.written_settings import written_settings
from lightning_fl.state.run_state import SERVER
from lightning_fl.state.saved_frozen import SavedFrozen
from lightning_fl.state.saved_states import SavedStates
from lightning_fl.trainer import checkpointing
from lightning_fl.trainer.build_engine import assemble
from lightning_fl.trainer.build_runner import try_runner_again
from lightning_fl.trainer.compiling import seconds_of_compiling
from lightning_fl.trainer.evaluation_loop import RoundEvaluation
from lightning_fl.trainer.hyperparameters import hyperparameters_of
from lightning_fl.trainer.lightning_interface import TrainerInterface
from lightning_fl.trainer.lightning_runner import RoundEpochLoop, flag_in_loop
from lightning_fl.trainer.loaders import ClientLoaders, batches_of
from lightning_fl.trainer.local_schedules import estimate_steps
from lightning_fl.trainer.new_run import keep_client_states
from lightning_fl.trainer.run_metric import choose_metric, kept_metric, log_metric_choice, results_of
from lightning_fl.trainer.stops import stoppers_of
from lightning_fl.vectors.layout import Tree


class FitLoop(StockFitLoop):
    """Run a trainer's federation round by round.

    Attributes:
        engine: trains the rounds; `start` sets it, and all others that are only declared here.
        privacy: the guarantee of a private run, and the columns that it may show.
        before_round: the run before the current round, which a checkpoint saved within the round contains; None between rounds.
        folder: folder that the fit writes to.
        saved_states: files of clients' states that `last.ckpt` refers to.
        saved_frozen: files of frozen weights that it refers to.
        evaluation: validates and tests after rounds.
        rows: logged rows, those of the rounds before a resumption first.
        client_values: values of clients that callbacks have logged in this process, by client, until they are collected.
        prunes_by_torch: True if Lightning's ModelPruning is among the callbacks.
    """

    engine: Engine
    privacy: Mechanism
    folder: RunFolder
    saved_states: SavedStates
    saved_frozen: SavedFrozen
    evaluation: RoundEvaluation
    prunes_by_torch: bool

    trainer: TrainerInterface
    epoch_loop: RoundEpochLoop
    max_epochs: int = flag_in_loop("max_rounds", 0)
    min_epochs: int = flag_in_loop("min_rounds", 0, unset=0)

    def __init__(self, trainer: TrainerInterface) -> None:
        super().__init__(trainer, min_epochs=trainer.min_rounds or 0, max_epochs=trainer.max_rounds)
        self.epoch_loop = RoundEpochLoop(trainer)
        self.epoch_loop.batch_progress.is_last_batch = True  # `Hooks.after_round` comes after the last batch
        self.rows: list[dict[str, float]] = []
        self._unwritten: tuple[int, Bits] | None = None
        self._shown_round = 0
        self._next_write = 0.0
        self._forget_fit()

    def _forget_fit(self) -> None:
        """Forget an earlier fit, but not its rows."""
        self.before_round: checkpointing.RoundStart | None = None
        self.client_values: dict[int, dict[str, float]] = {}
        self._logged_of_clients: dict[int, dict[str, float]] = {}
        self._has_begun = self._knows_metrics = self._says_repeated = self._says_it_goes_on = False
        self.val_loop._has_run = False
        self.epoch_loop._batches_that_stepped = 0
        self._delete_states: Callable[[], Any] | None = None

    @property
    def val_loop(self) -> EvaluationLoop:
        """Loop of the validation: `_has_run` is True once a round has been validated."""
        return self.epoch_loop.val_loop

    @property
    def has_whole_run(self) -> bool:
        """True in and after a fit that has begun its rounds, if the trainer still has its module: the run can be saved."""
        has_run = self._has_begun and "run" in vars(self.trainer)  # a later fit may have failed before it had one
        return has_run and self.engine.flat_module.module is self.trainer.lightning_module

    @property
    def loaders_of_clients(self) -> list[CombinedLoader]:
        """Clients' own loaders, as far as they have been requested."""
        return self._client_loaders.requested if "_client_loaders" in vars(self) else []

    def own_loaders(self, client: int) -> CombinedLoader:
        """Return a client's own loaders, which then are the trainer's."""
        loaders = self._combined_loader = self._client_loaders.of(client)
        self.max_batches = batches_of(loaders)
        return loaders

    @property
    def steps_in_pass(self) -> int | float:
        """Optimiser steps in one pass over a client's own loaders; infinity if they have no length."""
        steps = self.max_batches / self.trainer.accumulate_grad_batches
        return ceil(steps) if steps < inf else inf

    def begin(self) -> None:
        """Begin a fit before its module and data are set up."""
        self.set_round(0)
        self._client_loaders = ClientLoaders(self.trainer)

    def setup_data(self) -> None:
        """Find the lengths of a fit, which then has a training loader; outside a fit do as Lightning does."""
        if self.trainer.fitting:
            self.find_lengths()
        else:
            super().setup_data()

    def find_lengths(self) -> None:
        """In a fit, let the trainer know the length of a client's schedule, and the first client's loader if it has its own."""
        if self.trainer.begins_fit:
            estimate_steps(self.trainer)
        elif self.trainer.fitting and self.trainer.data.reads_own_loaders and self._combined_loader is None:
            self.own_loaders(0)

    def set_round(self, round_index: int) -> None:
        """Set the index of the coming round, `trainer.current_epoch`.

        Raises:
            UserError: somebody else has set another one.
        """
        progress: Any = self.epoch_progress.current
        changed = {progress.processed, progress.completed} - {self._shown_round, round_index}
        require(
            not changed,
            f"trainer.fit_loop.epoch_progress was set to {max(changed, default=0)}, but a fit begins with round 0, or where the "
            "run of its ckpt_path has ended: leave it as it is.",
        )
        self._shown_round = progress.processed = progress.completed = round_index

    def delete_unused_states(self) -> None:
        """Delete the folder of clients' states after an error before any client has a state, for example in a refused fit."""
        run = getattr(self.trainer, "run", None)
        if self._delete_states is not None and run is not None and not run.clients and not run.client_memory:
            self._delete_states()

    def start(self) -> None:
        """Build the engine, and find the validation loaders."""
        trainer = self.trainer
        self._forget_fit()
        self.folder = RunFolder(
            trainer.default_root_dir,
            [] if trainer.fast_dev_run else trainer.loggers,
            trainer.enable_checkpointing,
            trainer.ckpt_path,
        )
        self.engine, self.privacy = assemble(trainer)
        self._first_model = checksum(trainer.run.params)
        data = self.engine.data
        trainer.settings, trainer.stoppers = settings_of(trainer, data), stoppers_of(trainer)
        self._callbacks = list(trainer.callbacks)  # of which a rehearsal leaves some out
        self.prunes_by_torch = any(is_a(callback, ModelPruning) for callback in trainer.callbacks)
        self._delete_states = keep_client_states(trainer)
        self.saved_states, self.saved_frozen = self._new_files()
        rank_zero_info(data.description())
        # The first loader of a client is requested in Lightning's order, so that errors in it come before the first round.
        if data.reads_own_loaders and not trainer.num_sanity_val_steps:
            self.own_loaders(0)
        self.evaluation = RoundEvaluation(trainer, data)
        if data.reads_own_loaders:
            self.own_loaders(0)
        self._hyperparameters = hyperparameters_of(trainer.lightning_module, data)
        log_metric_choice(trainer)
        self._say_who_is_idle()

    def _say_who_is_idle(self) -> None:
        """Say so if a round has fewer clients than there are processes, or groups of them, to train one each."""
        trainer, population = self.trainer, self.engine.population
        num_clients, processes = population.cohort_size, trainer.world_size
        idle = (population.num_ranks - num_clients) * trainer.devices_per_client
        if num_clients and idle > 0:
            together = processes // num_clients
            remedy = "reduce trainer.devices or trainer.num_nodes"
            if together > trainer.devices_per_client and processes % together == 0:
                remedy = f"trainer.devices_per_client {together} lets {together} of them train each client together, or {remedy}"
            rank_zero_info(
                f"A round has {num_clients} {'client' if num_clients == 1 else 'clients'} for {processes} processes: "
                f"{idle} of them {'trains' if idle == 1 else 'train'} no client; {remedy}."
            )

    def prepare(self) -> None:
        """Run the method's work before its first round, and load the resulting model into the module."""
        self.trainer.hooks.hides_steps = True  # from callbacks, for which no training has begun yet
        between_rounds.prepare(self.engine)
        seconds_of_compiling(self.trainer)
        self.trainer.hooks.hides_steps = False
        self.trainer.active_module.load_server_model(self.trainer.run)

    def run_rounds(self, num_rows: int | None) -> None:
        """Run all rounds, between Lightning's opening and closing hooks.

        Args:
            num_rows: number of rows that a resumed run had logged; None if that is unknown.
        """
        trainer, run, privacy = self.trainer, self.trainer.run, self.privacy
        self._has_begun = True
        trainer.num_rounds = privacy.begin(run, trainer.num_rounds, self._noise_key)
        self.folder.begin(run.round, num_rows)
        self.rows = self.folder.earlier_rows()
        trainer.hooks.call("on_fit_start")
        trainer.lightning_module.zero_grad()
        trainer.active_module.gradient.zero()  # whose views that has removed
        self.evaluation.sanity_check()
        seconds_of_compiling(trainer)  # which are not part of the first round
        hyperparameters = {**self._hyperparameters, "algorithm": trainer.algorithm.name} | privacy.hyperparameters(run)
        if trainer.secure_aggregation is not None:
            hyperparameters["sum_only"] = True
        tell(trainer, lambda logger: logger.log_hyperparams(hyperparameters))
        tell(trainer, lambda logger: logger.log_graph(trainer.lightning_module))
        trainer.hooks.call("on_train_start")
        try:
            while not trainer.ends_after(run.round):
                self.set_round(run.round)
                self._round()
                self._say_that_it_goes_on()
        except BaseException:
            with suppress(FileError):  # of two errors the first is shown
                self._write_communication()
            raise
        self._say_why_it_ends()
        self.engine.settle_statistics()
        if run.round == self.folder.first_round and self.folder.goes_on_here:
            self._note_bits()  # of a run that was killed after its last round
        self._write_communication()
        self.set_round(run.round)
        schedules = trainer.active_module.optimizer.schedules
        schedules.adopt()  # what callbacks have set since the last training
        trainer.learning_rates = schedules.state_dict() | follow_unfreezing.as_saved(trainer.active_module)
        trainer.privacy_in_words = privacy.in_words(run)
        trainer.hooks.call("on_train_end")
        self.adopt_module_changes()
        check_agreement(gather_objects(trainer.fabric, self.engine.prunings))
        if run.round == self.folder.first_round and not self.folder.goes_on_here:
            self._begin_to_write()
            if run.round:  # of a run that was finished in another folder
                self._note_bits()
                self._write_communication()
        trainer.hooks.call("on_fit_end")
        self.adopt_module_changes()
        if trainer.enable_checkpointing and trainer.is_global_zero:
            exported = checkpointing.build_checkpoint(trainer)
            path = os.path.join(trainer.default_root_dir, EXPORT)
            checkpoint_file.save_atomically(exported, path)
            if any(isinstance(callback, LastCheckpoint) for callback in trainer.callbacks):
                offer_model(trainer, path)
        wandb_run.send_results(
            trainer, final_lines(trainer, self.rows), results_of(trainer, self.rows), trainer.enable_checkpointing
        )

    def _noise_key(self, noise_multiplier: float) -> int:
        """Return the key of a private run's noise by all settings, of module and optimiser too, and the first model."""
        trainer, module = self.trainer, self.trainer.lightning_module
        given = RunSettings()
        for name, value in module.hparams.items():
            given.add(f"model.{name}", value, True)
        optimizer = trainer.active_module.optimizer.schedules.settings.values
        return noise_key(
            {
                **trainer.settings.values,
                **given.values,
                **{f"optimizer.{name}": value for name, value in optimizer.items()},
                "module": f"{type(module).__module__}.{type(module).__qualname__}",
                "first model": self._first_model,
                "noise_multiplier": noise_multiplier,
            }
        )

    def _say_why_it_ends(self) -> None:
        """Say so if the run ends before its last round, or before its last step."""
        trainer, run = self.trainer, self.trainer.run
        if run.round == self.folder.first_round:
            return
        if trainer.steps_left == 0 and run.round < trainer.num_rounds:
            rank_zero_info(
                f"The run ends with round {run.round} of {trainer.num_rounds}, which reaches max_steps {trainer.max_steps}."
            )
        elif trainer.stop is not None and run.round < trainer.num_rounds:
            rank_zero_info(f"{trainer.stop.in_words(run.round, trainer.num_rounds)}.")
        elif trainer.steps_left:
            rank_zero_info(
                f"The run ends after {run.num_successive_steps} of max_steps {trainer.max_steps}, with round {run.round}, the "
                "last of max_rounds."
            )

    def _say_that_it_goes_on(self) -> None:
        """Say once that the run goes on although something stops it."""
        trainer, done = self.trainer, self.trainer.run.round
        if trainer.stop is not None and not trainer.ends_after(done) and not self._says_it_goes_on:
            self._says_it_goes_on = True
            who = trainer.stop.by or "Something that set should_stop"
            least = {"min_rounds": trainer.min_rounds, "min_steps": trainer.min_steps}
            until = " and ".join(f"{name} {number}" for name, number in least.items() if number)
            rank_zero_info(f"{who} would stop the run after round {done}; it goes on until {until}.")

    def _round(self) -> None:
        """Run one round with its hooks, validation, logging and checkpoint."""
        trainer, run, flat_module = self.trainer, self.trainer.run, self.trainer.active_module
        started = time.perf_counter()
        self._begin_round()
        frozen = flat_module.sample_frozen()
        with trainer.profiler.profile("train_round"):
            record = train_round(self.engine)
        compiling = seconds_of_compiling(trainer)
        record = self._shown(record, self.engine.of_clients)
        self._end_training(frozen)
        if trainer.trains_only_client:  # the callbacks read the values of its last step, as of the others
            trainer.hooks.after_round(trainer.round_batches)
        trainer.publish({**record, "time/simulated_seconds": run.simulated_seconds})
        if not trainer.trains_only_client:
            trainer.hooks.after_round(trainer.round_batches)
        evaluated = set[str]()
        self._evaluate(record, evaluated)
        if trainer.validates_this_round:
            record |= self.privacy.loss(run)
        record = self._shown(record)
        trainer.hooks.call("on_train_epoch_end", monitoring=False)
        self.adopt_module_changes()
        record = self._shown(record | self._logged_beside(record))
        trainer.publish(record)
        flat_module.optimizer.schedules.end_plateau(run.round, trainer.callback_metrics)
        self._check_names(record)
        if run.round == self.folder.first_round + 1:
            self._begin_to_write()
        self.before_round = None  # what is saved from here on has the whole round
        trainer.hooks.read_targets()
        trainer.hooks.call("on_train_epoch_end", monitoring=True)
        if trainer.stops_after(run.round):  # which a callback may have set after others had read it
            self._evaluate(record, evaluated)
            self._check_names(record)
            trainer.hooks.call("on_early_stop")
            record |= (late := self._shown(self._logged_beside(record) | self.privacy.loss(run)))
            trainer.publish(late)
        record["time/simulated_seconds"] = run.simulated_seconds
        ended = time.perf_counter()
        compiling += seconds_of_compiling(trainer)  # for clients that adapt their model to be measured
        record["time/round_seconds"] = ended - started - compiling
        self._log(self._shown(record))
        self._write_clients(run.round - 1)
        if trainer.enable_checkpointing and trainer.is_due(trainer.checkpoint_every_n_rounds, run.round):
            trainer.save_checkpoint(Path(trainer.default_root_dir) / LAST)

    def _begin_round(self) -> None:
        """Open a round: call its first hook, adopt what callbacks change in it, and keep the run as it is then."""
        trainer, run, flat_module, stop = self.trainer, self.trainer.run, self.trainer.active_module, self.trainer.stop
        flat_module.generators.seed(run.torch_seeds(SERVER)[0])
        trainer.state.stage = RunningStage.TRAINING
        self.engine.schedule = replace(self.engine.schedule, most_steps=trainer.steps_left)
        # The batches of loaders of clients are counted as they are read.
        trainer.round_batches = 0 if self.engine.data.reads_own_loaders else self.engine.num_batches()
        if not trainer.by_lightning:  # which counts single steps
            self.epoch_loop._batches_that_stepped = run.round  # the axis of loggers
        flat_module.optimizer.start_client()  # callbacks read the learning rate of a client's first step
        with trainer.profiler.profile("on_train_epoch_start"):  # in which callbacks prune and unfreeze
            with flat_module.optimizer.showing_parameters():
                trainer.hooks.call("on_train_epoch_start")
                trainer.strategy.follow_replaced(flat_module.optimizer)
            self.adopt_module_changes()
            flat_module.require_trained()
        # Lightning's GradientAccumulationScheduler sets `trainer.accumulate_grad_batches` when an epoch starts.
        self.engine.schedule = replace(self.engine.schedule, accumulate=trainer.accumulate_grad_batches)
        self.before_round = checkpointing.round_start(trainer, self.engine, stop)

    def _end_training(self, frozen: Tree) -> None:
        """Check what the clients have trained, and load the server's new model; `frozen` are `sample_frozen` before them."""
        trainer, flat_module = self.trainer, self.trainer.active_module
        self._check_private()
        self.epoch_loop._results.clear()  # those of the last client
        flat_module.require_unmoved(frozen)
        if flat_module.new_plans:
            raise UserError(
                "a callback pruned the model in the middle of a round, while clients were training: "
                "prune when an epoch starts (on_train_epoch_start)."
            )
        flat_module.load_server_model(trainer.run)
        if self.prunes_by_torch:
            follow_torch_pruning.begin(self.engine)
        assert self.before_round is not None
        self.before_round.is_trained = True
        flat_module.optimizer.schedules.end_round(trainer.run.round)

    def _shown(self, record: dict[str, float], of_clients: Collection[str] = ()) -> dict[str, float]:
        """Return the columns of a row that a private run may show; `of_clients` tell of clients, with those of callbacks."""
        return self.privacy.shown(record, told_by(self.trainer.callbacks), of_clients)

    def _evaluate(self, record: dict[str, float], done: set[str]) -> None:
        """Validate and test the model if that is due after the present round, and not done yet.

        Args:
            record: values of the round so far, to which the measured ones are added.
            done: names of the round's evaluations so far, to which the present ones are added.
        """
        trainer = self.trainer
        if "validate" not in done and trainer.validates_this_round and trainer.has_validation_batches:
            done.add("validate")
            self.val_loop._has_run = True
            with trainer.profiler.profile("validate"):
                self.engine.settle_statistics()
                validated = self.evaluation.validate(self.engine)
            check_logged(validated, record)
            self._say_repeated(validated, record)
            record |= validated
        every = trainer.test_every_n_rounds
        if "test" not in done and every is not None and trainer.is_due(every, trainer.run.round):
            done.add("test")
            with trainer.profiler.profile("test"):
                self.engine.settle_statistics()
                record |= self.evaluation.test(record)

    def _say_repeated(self, validated: Collection[str], record: Collection[str]) -> None:
        """Say once if a module logs a name both in training and in validation."""
        same = [name for name in validated if name in record]
        if same and not self._says_repeated:
            self._says_repeated = True
            rank_zero_warn(
                f"{type(self.trainer.lightning_module).__name__} logs {', '.join(map(repr, same))} in training and in "
                "validation; a round has one column of a name, so the value of the validation stands: log names such as train/… "
                "and val/…."
            )

    def _logged_beside(self, record: Collection[str]) -> dict[str, float]:
        """Return what callbacks and the module have logged since the last call, as process 0 has it.

        Values that are logged with `sync_dist` are combined over the processes that have logged them, as in Lightning.

        Args:
            record: values of the round so far.

        Raises:
            UserError: processes have pruned the model differently, or a name is that of one of the round's own columns.
        """
        trainer, logs = self.trainer, self.trainer.active_module.logs
        sums, knowledge, more = gather_logs(trainer.fabric, logs, (self.engine.prunings, self.client_values))
        check_agreement([prunings for prunings, _ in more])
        for _, process_values in more:
            for client, values in process_values.items():
                self._logged_of_clients.setdefault(client, {}).update(values)
        self.client_values = {}
        synchronised = set[str]().union(*(names.synchronised_names for names in knowledge))
        others = [
            {key: entry for key, entry in part.items() if (key if isinstance(key, str) else key[0]) in synchronised}
            for part in sums[1:]
        ]
        logged = logs.averages([*sums[:1], *others], knowledge)
        logs.end_round()
        check_logged(logged, record)
        return logged

    def _check_names(self, record: dict[str, float]) -> None:
        """Check what callbacks and the user watch, once the names of all metrics are known."""
        trainer = self.trainer
        tested = self.evaluation.tested
        awaits_test = trainer.test_every_n_rounds is not None and tested is None
        if self._knows_metrics or awaits_test or (trainer.has_validation_batches and not self.val_loop._has_run):
            return
        self._knows_metrics = True
        choose_metric(trainer, record, is_all=True, tested=tested or ())
        self._check_private()
        if self.val_loop._has_run:
            check_watched(trainer.callbacks, {*trainer.callback_metrics, *(tested or ())})

    def _check_private(self) -> None:
        """Check that nothing in a private run acts on what is logged while clients train."""
        trainer, engine = self.trainer, self.engine
        schedulers, told = trainer.active_module.optimizer.schedules.configs, engine.of_clients
        check_watched_of_clients(trainer, engine.algorithm, self._callbacks, schedulers, told)

    def renew_folder(self) -> None:
        """Make the run's folder again if it was deleted; clients' states and frozen weights are then written again."""
        if self.trainer.reservation.renew():
            self.saved_states, self.saved_frozen = self._new_files()

    def _new_files(self) -> tuple[SavedStates, SavedFrozen]:
        parent = Path(self.trainer.default_root_dir) / LAST.parent
        return SavedStates(parent, self.trainer.weights_only), SavedFrozen(parent, self.trainer.weights_only)

    def _begin_to_write(self) -> None:
        """Claim the folder after the first round, and call `on_folder_claimed` of callbacks that write to it."""
        if not self.folder.is_used:
            return
        if self.trainer.is_global_zero:
            self.folder.claim()
        self.trainer.fabric.barrier()
        self.trainer.hooks.call("on_folder_claimed")
        self._write_settings()

    def _write_settings(self) -> None:
        """Write the settings, unless a callback saves a configuration: Lightning's SaveConfigCallback, or one like it."""
        trainer = self.trainer
        if trainer.is_global_zero and not any(hasattr(callback, "save_config") for callback in trainer.callbacks):
            settings = written_settings(
                trainer, trainer.lightning_module, trainer.data, trainer.algorithm, trainer.run.seed
            )
            write_settings(trainer.default_root_dir, trainer.ckpt_path is not None, settings)

    def adopt_module_changes(self) -> None:
        """Adopt callbacks' changes to the server's model: what they have pruned, unfrozen and computed."""
        follow_pruning.follow(self.engine)
        has_grown = follow_unfreezing.follow(self.engine)
        run, flat_module = self.trainer.run, self.trainer.active_module
        flat_module.bind_replaced()
        flat_module.adopt_unsaved_buffers()
        mask = self._mask()
        if mask is not None:
            flat_module.params.mul_(mask)  # ModelPruning resets pruned weights, too
        run.adopt_model(flat_module.params, flat_module.read_buffers(), flat_module.read_counters(), mask)
        if mask is not None and (run.mask is None or not torch.equal(mask, run.mask)):
            self.engine.set_mask(mask)
            self.engine.prunings = zlib.crc32(mask.cpu().numpy().tobytes(), self.engine.prunings)
        if has_grown:
            try_runner_again(self.trainer, self.engine)
        between_rounds.charge_queries(self.engine)

    def _mask(self) -> torch.Tensor | None:
        """Return the mask (d,) under which callbacks let the module train; None if they have set none."""
        flat_module = self.trainer.active_module
        masks = masks_of(flat_module.module)
        if self.prunes_by_torch:
            masks |= follow_torch_pruning.masks_of(flat_module)
        if not masks:
            return None
        mask = torch.ones_like(flat_module.params, dtype=torch.bool)
        views = flat_module.layout.views(mask)
        for name in views.keys() & masks.keys():  # personal parameters stay unpruned
            views[name].copy_(masks[name])
        return mask

    def _log(self, record: dict[str, float]) -> None:
        """Send one row to every logger."""
        trainer, hidden = self.trainer, self.trainer.active_module.logs.unlogged_names
        row = {name: value for name, value in record.items() if name not in hidden}
        trainer._logger_connector._logged_metrics.update(
            {name: torch.tensor(float(value)) for name, value in trainer.with_suffixed(row).items()}
        )
        if not trainer.is_due(trainer.log_every_n_rounds, trainer.run.round):
            return
        self.rows.append({name: x if isinstance(x, int) else float(x) for name, x in row.items()})
        if trainer.is_global_zero:
            self.renew_folder()
        log_row(trainer, row, int(record["round"]))
        for logger in self.folder.csv_loggers:
            self.rows[-1] |= logger.last_row  # with the step and what callbacks have sent to the loggers
        self._note_bits()
        if time.monotonic() >= self._next_write:
            self._write_communication()

    def _write_clients(self, round_index: int) -> None:
        """Write what callbacks have logged of clients in a round to clients.csv, beside metrics.csv."""
        trainer, values_by_client = self.trainer, self._logged_of_clients
        self._logged_of_clients = {}
        if values_by_client and self.folder.csv_loggers and trainer.is_global_zero:
            names = trainer.data.client_names
            rows = [
                {"round": round_index, "client": client}
                | ({} if names is None else {"name": str(names[client])})
                | values_by_client[client]
                for client in sorted(values_by_client)
            ]
            add_rows(Path(trainer.default_root_dir, CLIENTS), rows)

    def _note_bits(self) -> None:
        """Keep the bits of all rounds so far until they are written."""
        trainer = self.trainer
        if trainer.is_global_zero and self.folder.csv_loggers:
            self._unwritten = trainer.run.round, deepcopy(trainer.run.ledger.total_bits)

    def _write_communication(self) -> None:
        """Write the bits of the rounds logged so far; once a second is enough, because short rounds would wait for the disk."""
        if self._unwritten is not None:
            write_communication(self.trainer.default_root_dir, *self._unwritten, kept_metric(self.trainer))
            self._unwritten, self._next_write = None, time.monotonic() + 1
