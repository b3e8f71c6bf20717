"""The rounds of a `fit`: hooks, validation, schedules, the log row and the checkpoint around `Federation.train_round`."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl import checkpoint as checkpoints
from lightning_fl import persistence, surgery, weights_and_biases
from lightning_fl.client_states import ClientStatesOnDisk
from lightning_fl.errors import UserError
from lightning_fl.evaluation import as_loaders, evaluate, num_batches
from lightning_fl.federation import Federation
from lightning_fl.final_table import final_lines
from lightning_fl.groups import layer_groups
from lightning_fl.loggers import log_row, tell
from lightning_fl.macs import count_macs
from lightning_fl.pruning import masks_of
from lightning_fl.run import SERVER, VALIDATION, Run
from lightning_fl.runners import LocalPlan, choose_runner
from lightning_fl.runners.ranks import check_sums, gather_objects
from lightning_fl.settings import check_monitors, cohort_size
from lightning_fl.slots import MEAN_GRADIENT
from lightning_fl.validation import ModelValidation

if TYPE_CHECKING:
    from lightning_fl.trainer import FederatedTrainer


class FitLoop:
    """Runs a federation round by round on behalf of a trainer.

    Attributes:
        federation: the round itself; there once `start` has run.
        before_round: the state of the run before the round under way, None between rounds: what a checkpoint saved in
            the middle of a round goes back to.
        epoch_loop: what stock callbacks read of Lightning's own loop.
    """

    federation: Federation

    def __init__(self, trainer: FederatedTrainer) -> None:
        self.trainer = trainer
        self.has_validated = False
        self.before_round: dict[str, Any] | None = None
        self._val_loaders: list[Iterable[Any]] = []
        self.epoch_loop = SimpleNamespace(
            _should_check_val_epoch=lambda: trainer.validates_this_round,
            val_loop=_HasRun(self),
            batch_progress=SimpleNamespace(is_last_batch=False),
            _batches_that_stepped=0,
        )

    @property
    def max_epochs(self) -> int:
        """Rounds of the run."""
        return self.trainer.max_rounds

    def start(self) -> None:
        """Set up the optimiser, the state of the run and the federation."""
        trainer, worker, algorithm = self.trainer, self.trainer.bound_worker, self.trainer.algorithm
        worker.agree_on_model()
        run = trainer.run = Run(
            seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
            layout=worker.layout,
            buffer_layout=worker.buffer_layout,
            params=worker.params.clone(),
            buffers=worker.buffers.clone(),
            counters=worker.read_counters(),
            personal_layout=worker.personal_layout,
            personal=worker.personal.clone(),
        )
        data = algorithm.arrange(trainer.data)
        steps = zip(algorithm.step_names(), algorithm.steps, strict=True)
        run.server = {key: step.init(run.params) for key, step in steps}
        limit = trainer.limits["limit_train_batches"]
        plan = LocalPlan(
            batch_size=data.batch_size,
            epochs=trainer.local_epochs,
            steps=trainer.local_steps,
            limit_batches=1.0 if limit is None else limit,
            accumulate=trainer.accumulate_grad_batches,
            clip_value=trainer.gradient_clip_val,
            clip_algorithm=trainer.gradient_clip_algorithm,
            tells_last_loss=trainer.loss_guard.clients is not None,
        )
        in_pass = plan.pass_batches(int(data.client_sizes.max()), worker.skips_single_samples)
        trainer.most_local_steps = plan.num_steps(in_pass)
        worker.configure_optimizer(flat_gradient=any(rule.reads_gradient for rule in algorithm.rules()))
        own = next((rule for rule in algorithm.rules() if rule.own_step), None)
        if own is not None and not worker.optimizer.is_plain_sgd:
            flag = "give --model.momentum 0, or " if worker.module.hparams.get("momentum") else ""
            raise UserError(
                f"{algorithm.name} makes the clients' steps itself, in place of plain SGD, {own.why_plain_sgd}; "
                f"{type(worker.module).__name__} has {worker.optimizer.description}: "
                f"{flag}let configure_optimizers return torch.optim.SGD with momentum 0."
            )
        eligible = data.client_sizes.nonzero()[0]
        self.federation = Federation(
            algorithm=algorithm,
            worker=worker,
            data=data,
            run=run,
            groups=layer_groups(worker.module, without=worker.personal_layout.names),
            plan=plan,
            clock=trainer.clock,
            guard=trainer.loss_guard,
            eligible=eligible,
            cohort_size=cohort_size(trainer.clients_per_round, data.num_clients, len(eligible)),
            num_rounds=trainer.max_rounds,
            dropout_rate=trainer.dropout_rate,
            macs=count_macs(worker, data.client(int(data.client_sizes.argmax())), data.train.resident),
            on_upload=partial(trainer.hooks.call, "on_client_upload"),
            on_prepared=partial(trainer.hooks.call, "on_client_prepared"),
        )
        if trainer.fabric.world_size > 1:
            check_sums(algorithm.aggregator)
        algorithm.check(self.federation.setting, self.federation.server, self.federation.cohort_size)
        trainer.loss_guard.check(self.federation.server, algorithm.steps)
        before = {MEAN_GRADIENT: torch.zeros_like(run.params)} if algorithm.rule.reads_mean_gradient else {}
        self.federation.runner = choose_runner(
            trainer.runner,
            trainer.clients_at_once,
            worker,
            algorithm.rule,
            self.federation.setting,
            {"model": run.params, "buffers": run.buffers, **algorithm.share(run.server), **before},
            data,
            plan,
            run,
        )
        run.macs_at_start = self.federation.macs
        worker.load(run.params, run.buffers, run.counters)  # counting and checking may have changed it
        worker.personal.copy_(run.personal)
        if is_overridden("validation_step", worker.module):
            self._val_loaders = as_loaders(data.val_dataloader())
        trainer.num_val_batches = num_batches(self._val_loaders, trainer.limits["limit_val_batches"])
        self._keep_client_states(run)
        rank_zero_info(data.description())

    def prepare(self) -> None:
        """What the method does before its first round."""
        self.federation.prepare()
        self.trainer.bound_worker.personal.copy_(self.trainer.run.personal)
        self.trainer.bound_worker.load(self.trainer.run.params, self.trainer.run.buffers, self.trainer.run.counters)

    def _keep_client_states(self, run: Run) -> None:
        """Make the folder that the trainer's `client_states` asks for, one a machine; it goes when the run does."""
        trainer = self.trainer
        if trainer.client_states == "memory":
            return
        parent = trainer.default_root_dir if trainer.client_states == "disk" else trainer.client_states
        made = None
        if trainer.local_rank == 0:
            persistence.require_writable(parent)
            made = tempfile.mkdtemp(prefix="client-states-", dir=parent)
            finalize(run, shutil.rmtree, made, ignore_errors=True)
        folder = gather_objects(trainer.fabric, made)[trainer.global_rank - trainer.local_rank]
        run.clients = ClientStatesOnDisk(Path(folder, "rule"), writes=trainer.local_rank == 0)
        run.client_memory = ClientStatesOnDisk(Path(folder, "codec"), writes=trainer.local_rank == 0)

    def run(self) -> None:
        """All rounds, between Lightning's opening and closing hooks."""
        trainer, run = self.trainer, self.trainer.run
        trainer.hooks.call("on_fit_start")
        self._sanity_check()
        # Nothing is written before something has run: a mistake leaves the earlier run where it is.
        if trainer.ckpt_path is None and (trainer.loggers or trainer.enable_checkpointing) and trainer.is_global_zero:
            persistence.set_earlier_run_aside(trainer.default_root_dir)
        trainer.fabric.barrier()
        hyperparameters = {**trainer.lightning_module.hparams_initial, "algorithm": trainer.algorithm.name}
        tell(trainer, lambda logger: logger.log_hyperparams(hyperparameters))
        trainer.hooks.call("on_train_start")
        while run.round < trainer.max_rounds and not trainer.should_stop:
            trainer.current_epoch = run.round
            self._round()
        trainer.current_epoch = run.round
        trainer.hooks.call("on_train_end")
        self._take_over_changes()
        trainer.hooks.call("on_fit_end")
        if trainer.enable_checkpointing and trainer.is_global_zero:
            exported = persistence.build_checkpoint(trainer, weights_only=True)
            checkpoints.save_atomically(exported, Path(trainer.default_root_dir) / persistence.EXPORT)
        weights_and_biases.send_results(trainer, final_lines(trainer), trainer.enable_checkpointing)

    def _round(self) -> None:
        """One round with everything around it."""
        trainer, run, worker, started = self.trainer, self.trainer.run, self.trainer.bound_worker, time.perf_counter()
        worker.seed(run.torch_seeds(SERVER)[0])
        trainer.state.stage = RunningStage.TRAINING
        trainer.round_batches = self.federation.num_batches()
        trainer.hooks.call("on_train_epoch_start")
        self._take_over_changes()
        # Lightning's GradientAccumulationScheduler sets the trainer's number when an epoch starts.
        self.federation.plan = replace(self.federation.plan, accumulate=trainer.accumulate_grad_batches)
        self.before_round = run.state_dict()
        with trainer.profiler.profile("train_round"):
            record = self.federation.train_round()
        if worker.new_plans:
            raise UserError(
                "a callback has pruned the model in the middle of a round, while the clients were training: "
                "it must do so when an epoch starts (on_train_epoch_start)."
            )
        worker.load(run.params, run.buffers, run.counters)
        worker.personal.copy_(run.personal)
        worker.optimizer.end_round(run.round)
        self.before_round = None
        trainer.global_step = run.num_steps
        trainer.publish({**record, "time/simulated_seconds": run.simulated_seconds})
        for callback in trainer.callbacks:
            # Averages of weights follow optimiser steps; `global_step` moves, and so they do, when the server makes its own.
            if isinstance(callback, WeightAveraging):
                callback.on_train_batch_end(trainer, worker.module, None, None, trainer.round_batches)  # type: ignore[arg-type]
        if trainer.validates_this_round and trainer.enable_validation:
            with trainer.profiler.profile("validate"):
                record |= self._validate()
        trainer.hooks.call("on_train_epoch_end", monitoring=False)
        surgery.follow(self.federation)
        self.federation.book_answers()
        record |= worker.logs.averages(gather_objects(trainer.fabric, worker.logs.take())[:1])
        trainer.publish(record)
        worker.optimizer.end_plateau(run.round, trainer.callback_metrics)
        trainer.hooks.call("on_train_epoch_end", monitoring=True)
        record["time/simulated_seconds"] = run.simulated_seconds
        record["time/round_seconds"] = time.perf_counter() - started
        self._log(record)
        if trainer.enable_checkpointing and self._is_due(trainer.checkpoint_every_n_rounds):
            trainer.save_checkpoint(Path(trainer.default_root_dir) / persistence.LAST)

    def _take_over_changes(self) -> None:
        """The server's model is what callbacks made of it; clones, because a step may have kept the old tensors."""
        surgery.follow(self.federation)
        run, worker = self.trainer.run, self.trainer.bound_worker
        run.params, run.buffers = worker.params.clone(), worker.read_buffers().clone()
        if masks := masks_of(worker.module):
            mask = torch.ones_like(run.params, dtype=torch.bool)
            views = worker.layout.views(mask)
            for name in views.keys() & masks.keys():  # what clients own they keep whole
                views[name].copy_(masks[name])
            if run.mask is None or not torch.equal(mask, run.mask):
                self.federation.set_mask(mask)
        self.federation.book_answers()

    def _validate(self) -> dict[str, float]:
        """Validation at the end of a round."""
        trainer = self.trainer
        trainer.state.stage = RunningStage.VALIDATING
        self.has_validated = True
        federation = self.federation
        validation = ModelValidation(
            trainer.bound_worker,
            trainer.data,
            "validation",
            self._val_loaders,
            trainer.limits["limit_val_batches"],
            trainer.run.clients,
            federation.setting,
            federation.cohort_size,
            trainer.run.random(VALIDATION),
        )
        of_method = trainer.algorithm.validate(validation)
        averages, _ = evaluate(
            trainer.bound_worker,
            "validation",
            self._val_loaders,
            trainer.num_val_batches,
            trainer.inference_mode,
            lambda averages: trainer.publish(averages | of_method),
        )
        trainer.state.stage = RunningStage.TRAINING
        return averages | of_method

    def _sanity_check(self) -> None:
        """A few validation batches before anything is trained, so that an error in them does not cost a round."""
        trainer, steps = self.trainer, self.trainer.num_sanity_val_steps
        limits = [count if steps == -1 else min(count, steps) for count in trainer.num_val_batches]
        trainer.num_sanity_val_batches = limits
        if not sum(limits):
            return
        trainer.state.stage = RunningStage.SANITY_CHECKING
        trainer.hooks.call("on_sanity_check_start")
        evaluate(
            trainer.bound_worker,
            "validation",
            self._val_loaders,
            limits,
            trainer.inference_mode,
            lambda averages: check_monitors(trainer.callbacks, averages),
        )
        trainer.hooks.call("on_sanity_check_end")
        trainer.state.stage = RunningStage.TRAINING

    def _log(self, record: dict[str, float]) -> None:
        """One row to every logger."""
        trainer, hidden = self.trainer, self.trainer.bound_worker.logs.unlogged_names
        row = {name: value for name, value in record.items() if name not in hidden}
        trainer.logged_metrics = {name: torch.tensor(float(value)) for name, value in row.items()}
        if not self._is_due(trainer.log_every_n_rounds):
            return
        log_row(trainer, row, int(record["round"]))

    def _is_due(self, every: int) -> bool:
        """Whether something done every n-th round is due after the round just done, which the last always is."""
        rounds, trainer = self.trainer.run.round, self.trainer
        return rounds % every == 0 or rounds >= trainer.max_rounds or trainer.should_stop


class _HasRun:
    """ModelCheckpoint asks whether validation has run before it complains of a missing metric."""

    def __init__(self, loop: FitLoop) -> None:
        self._loop = loop

    @property
    def _has_run(self) -> bool:
        return self._loop.has_validated
