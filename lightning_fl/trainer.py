"""FederatedTrainer: fit, validate, test and predict in a simulated federation, driven by Lightning Fabric.

The round (`_train_round`) reads from top to bottom as the field draws it: cohort, download, local training, upload,
aggregation, server steps. A round is Lightning's epoch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.strategies import Strategy
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl import checkpoint as checkpoints
from lightning_fl import persistence
from lightning_fl.algorithms import Algorithm, FedAvg
from lightning_fl.clock import SimulatedClock
from lightning_fl.data import FederatedDataModule
from lightning_fl.errors import UserError
from lightning_fl.evaluation import as_loaders, evaluate, num_batches
from lightning_fl.federation import Federation
from lightning_fl.hooks import Hooks, check_module
from lightning_fl.macs import count_macs
from lightning_fl.memory_format import prefers_channels_last
from lightning_fl.progress import RoundProgressBar
from lightning_fl.run import SERVER, Run
from lightning_fl.runners import LocalPlan
from lightning_fl.settings import (
    build_fabric,
    build_loggers,
    build_profiler,
    check_limits,
    check_rounds,
    cohort_size,
)
from lightning_fl.surface import TrainerSurface
from lightning_fl.worker import Worker

STAGES = {
    TrainerFn.FITTING: RunningStage.TRAINING,
    TrainerFn.VALIDATING: RunningStage.VALIDATING,
    TrainerFn.TESTING: RunningStage.TESTING,
    TrainerFn.PREDICTING: RunningStage.PREDICTING,
}


class FederatedTrainer(TrainerSurface):
    """Trains a LightningModule in a simulated federation; flags keep the names and meaning of `lightning.Trainer`'s."""

    def __init__(
        self,
        *,
        max_rounds: int = 100,
        clients_per_round: int | float = 10,
        local_epochs: int | None = None,
        local_steps: int | None = None,
        val_every_n_rounds: int = 1,
        log_every_n_rounds: int = 1,
        checkpoint_every_n_rounds: int = 1,
        dropout_rate: float = 0.0,
        clock: SimulatedClock = SimulatedClock(),  # noqa: B008 -- frozen
        runner: Literal["auto", "serial"] = "auto",
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = 1,
        num_nodes: int = 1,
        precision: int | str | None = None,
        plugins: Any | None = None,
        callbacks: list[Callback] | Callback | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        default_root_dir: str | os.PathLike[str] | None = None,
        fast_dev_run: bool | int = False,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        num_sanity_val_steps: int = 2,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        enable_progress_bar: bool = True,
        enable_checkpointing: bool = True,
        enable_model_summary: bool = True,
        deterministic: bool | Literal["warn"] = False,
        benchmark: bool = False,
        inference_mode: bool = True,
        detect_anomaly: bool = False,
        profiler: Profiler | str | None = None,
    ) -> None:
        """Set up the trainer.

        Args:
            max_rounds: Rounds of communication; a round is an epoch for callbacks and schedulers.
            clients_per_round: Clients selected in each round, a count or a fraction in (0, 1].
            local_epochs: Passes of a client over its samples in a round; 1 if neither this nor local_steps is given.
            local_steps: Optimiser steps of a client in a round, instead of local_epochs.
            val_every_n_rounds: Validate after every n-th round and after the last.
            log_every_n_rounds: Log a row after every n-th round and after the last.
            checkpoint_every_n_rounds: Save checkpoints/last.ckpt after every n-th round and after the last.
            dropout_rate: Probability in [0, 1) that a selected client receives the model but never answers.
            clock: The simulated network and computation behind time/simulated_seconds.
            runner: Who loops over the clients; auto takes the fastest that fits.
            accelerator: As in Lightning: auto, cpu, gpu, cuda, mps …
            strategy: As in Fabric; strategies that shard a model are refused.
            devices: Accelerators to use.
            num_nodes: Machines to use.
            precision: 32-true, bf16-mixed, bf16-true or 64-true.
            plugins: As in Fabric.
            callbacks: Lightning callbacks.
            logger: Loggers besides metrics.csv, which is always written; False for none at all.
            default_root_dir: Folder of the run; the working directory if not given.
            fast_dev_run: Try everything on one round (or n) and one batch (or n), without logging or saving.
            max_time: Stop after this time, as in Lightning: DD:HH:MM:SS, a timedelta or its arguments.
            limit_train_batches: Batches of each local pass, a count or a fraction.
            limit_val_batches: Validation batches, a count or a fraction.
            limit_test_batches: Test batches, a count or a fraction.
            limit_predict_batches: Prediction batches, a count or a fraction.
            num_sanity_val_steps: Validation batches to try before the first round; -1 for all.
            accumulate_grad_batches: Batches whose gradients make one optimiser step.
            gradient_clip_val: Clip each step's gradient to this norm or value.
            gradient_clip_algorithm: norm or value.
            enable_progress_bar: Show a progress bar.
            enable_checkpointing: Save checkpoints and the final model.
            enable_model_summary: Print a summary of the module before training.
            deterministic: Use deterministic algorithms only; warn where there is none with "warn".
            benchmark: Let cuDNN choose its algorithms by trying them.
            inference_mode: Evaluate in torch.inference_mode rather than torch.no_grad.
            detect_anomaly: Let autograd point at operations that make NaN.
            profiler: simple, advanced, pytorch, or a Lightning profiler.

        Raises:
            UserError: a value is not allowed.
        """
        super().__init__()
        every = {
            "val_every_n_rounds": val_every_n_rounds,
            "log_every_n_rounds": log_every_n_rounds,
            "checkpoint_every_n_rounds": checkpoint_every_n_rounds,
            "accumulate_grad_batches": accumulate_grad_batches,
        }
        check_rounds(max_rounds, clients_per_round, local_epochs, local_steps, dropout_rate, every)
        self.limits: dict[str, int | float | None] = {
            "limit_train_batches": limit_train_batches,
            "limit_val_batches": limit_val_batches,
            "limit_test_batches": limit_test_batches,
            "limit_predict_batches": limit_predict_batches,
        }
        check_limits(self.limits)
        self.max_rounds = max_rounds
        self.fast_dev_run = fast_dev_run
        if fast_dev_run:
            self.max_rounds = int(fast_dev_run)
            self.limits = dict.fromkeys(self.limits, int(fast_dev_run))
            logger, enable_checkpointing, num_sanity_val_steps = False, False, 0
        self.clients_per_round = clients_per_round
        self.local_epochs = 1 if local_epochs is None and local_steps is None else local_epochs
        self.local_steps = local_steps
        self.val_every_n_rounds = val_every_n_rounds
        self.log_every_n_rounds = log_every_n_rounds
        self.checkpoint_every_n_rounds = checkpoint_every_n_rounds
        self.dropout_rate = dropout_rate
        self.clock = clock
        self.runner = runner
        self.num_sanity_val_steps = num_sanity_val_steps
        self.accumulate_grad_batches = accumulate_grad_batches
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm
        self.enable_progress_bar = enable_progress_bar
        self.enable_checkpointing = enable_checkpointing
        self.enable_model_summary = enable_model_summary
        self.deterministic = deterministic
        self.benchmark = benchmark
        self.inference_mode = inference_mode
        self.detect_anomaly = detect_anomaly
        self.default_root_dir = os.path.abspath(os.fspath(default_root_dir or os.getcwd()))
        self.max_time = max_time  # type: ignore[assignment]
        self.fabric = build_fabric(accelerator, strategy, devices, num_nodes, precision, plugins)
        self.loggers = build_loggers(logger, self.default_root_dir)
        self.profiler = build_profiler(profiler)
        given = [] if callbacks is None else [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
        self._given_callbacks: list[Callback] = given
        self.callbacks: list[Callback] = given
        self.worker: Worker | None = None
        self.run: Run
        self.fabric.launch()

    # -- the four entry points -----------------------------------------------------------------------------------------

    def fit(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        algorithm: Algorithm | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Train a model in a federation.

        Args:
            model: Every client trains this module.
            datamodule: A FederatedDataModule; lightning_fl.data.Federated makes one of any other.
            algorithm: The federated method; FedAvg if not given.
            ckpt_path: Resume from a checkpoint: a path, `last` or `best`.

        Raises:
            UserError: something given does not fit; nothing has been trained or written then.
        """
        with self._stage(TrainerFn.FITTING, model, datamodule, algorithm, ckpt_path):
            self._start_run()
            if self.ckpt_path is not None:
                persistence.resume(self, self.ckpt_path)
            self._fit()

    def validate(
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        algorithm: Algorithm | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Evaluate a model on the validation data.

        Args:
            model: The module; the last one if not given.
            datamodule: Where the data come from; the last one if not given.
            algorithm: The federated method that the model was trained with.
            ckpt_path: Load the model from a checkpoint: a path, `last` or `best`.
            verbose: Print the results.

        Returns:
            One dictionary of metrics.
        """
        return self._evaluate(TrainerFn.VALIDATING, model, datamodule, algorithm, ckpt_path, verbose)

    def test(
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        algorithm: Algorithm | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Evaluate a model on the test data.

        Args:
            model: The module; the last one if not given.
            datamodule: Where the data come from; the last one if not given.
            algorithm: The federated method that the model was trained with.
            ckpt_path: Load the model from a checkpoint: a path, `last` or `best`.
            verbose: Print the results.

        Returns:
            One dictionary of metrics.
        """
        return self._evaluate(TrainerFn.TESTING, model, datamodule, algorithm, ckpt_path, verbose)

    def predict(
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        algorithm: Algorithm | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        return_predictions: bool = True,
    ) -> list[Any] | None:
        """Run a model on the prediction data.

        Args:
            model: The module; the last one if not given.
            datamodule: Where the data come from; the last one if not given.
            algorithm: The federated method that the model was trained with.
            ckpt_path: Load the model from a checkpoint: a path, `last` or `best`.
            return_predictions: Return what `predict_step` returned, batch by batch.

        Returns:
            A list of outputs, one list for each loader if there are several.
        """
        model, datamodule, algorithm = self._or_last(model, datamodule, algorithm)
        with self._stage(TrainerFn.PREDICTING, model, datamodule, algorithm, ckpt_path):
            _, outputs = self._run_evaluation("predict")
        if not return_predictions:
            return None
        return outputs[0] if len(outputs) == 1 else outputs

    # -- a run ---------------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        """All rounds, between Lightning's opening and closing hooks."""
        run = self.run
        self.hooks.call("on_fit_start")
        for logger in self.loggers:
            logger.log_hyperparams({**self.lightning_module.hparams_initial, "algorithm": self.algorithm.name})
        self._sanity_check()
        self.hooks.call("on_train_start")
        while run.round < self.max_rounds and not self.should_stop:
            self.current_epoch = run.round
            self._round()
        self.hooks.call("on_train_end")
        self.hooks.call("on_fit_end")
        if self.enable_checkpointing and self.is_global_zero:
            exported = persistence.build_checkpoint(self, weights_only=True)
            checkpoints.save_atomically(exported, Path(self.default_root_dir) / persistence.EXPORT)

    def _round(self) -> None:
        """One round with everything around it: hooks, validation, schedules, the log row, the checkpoint."""
        run, worker, started = self.run, self._worker(), time.perf_counter()
        worker.seed(run.torch_seeds(SERVER)[0])
        self.state.stage = RunningStage.TRAINING
        self.round_batches = self.federation.num_batches()
        self.hooks.call("on_train_epoch_start")
        # Callbacks may have changed the model; clones, because a step may have kept the old tensors.
        run.params, run.buffers = worker.params.clone(), worker.read_buffers().clone()
        with self.profiler.profile("train_round"):
            record = self.federation.train_round()
        worker.load(run.params, run.buffers, run.counters)
        self._publish(record)
        if self.validates_this_round and self.enable_validation:
            with self.profiler.profile("validate"):
                record |= self._validate()
        self.hooks.call("on_train_epoch_end", monitoring=False)
        record |= worker.logs.averages([worker.logs.take()])
        self._publish(record)
        self.hooks.call("on_train_epoch_end", monitoring=True)
        worker.optimizer.end_round(self.callback_metrics)
        run.round += 1
        record["time/simulated_seconds"] = run.simulated_seconds
        record["time/round_seconds"] = time.perf_counter() - started
        self._log(record)
        if self.enable_checkpointing and self._is_due(self.checkpoint_every_n_rounds):
            self.save_checkpoint(Path(self.default_root_dir) / persistence.LAST)

    # -- what a round reports ------------------------------------------------------------------------------------------

    def _publish(self, record: dict[str, float]) -> None:
        """Make metrics visible to callbacks and progress bars."""
        tensors = {name: torch.tensor(float(value)) for name, value in record.items()}
        self.callback_metrics.update(tensors)
        shown = self._worker().logs.progress_bar_names
        self.progress_bar_metrics.update({name: float(value) for name, value in record.items() if name in shown})

    def _log(self, record: dict[str, float]) -> None:
        """One row to every logger."""
        hidden = self._worker().logs.unlogged_names
        row = {name: value for name, value in record.items() if name not in hidden}
        self.logged_metrics = {name: torch.tensor(float(value)) for name, value in row.items()}
        if not self._is_due(self.log_every_n_rounds):
            return
        for logger in self.loggers:
            logger.log_metrics(row, step=int(record["round"]))
            logger.save()

    def _is_due(self, every: int) -> bool:
        """Whether something done every n-th round is due after the round just done, which the last always is."""
        return self.run.round % every == 0 or self.run.round >= self.max_rounds or self.should_stop

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def _validate(self) -> dict[str, float]:
        """Validation inside `fit`."""
        self.state.stage = RunningStage.VALIDATING
        averages, _ = evaluate(
            self._worker(), "validation", self._val_loaders, self.num_val_batches, self.inference_mode
        )
        self.has_validated = True
        self._publish(averages)
        self.hooks.call("on_validation_end")
        self.hooks.call("on_validation_model_train")
        self.state.stage = RunningStage.TRAINING
        return averages

    def _sanity_check(self) -> None:
        """A few validation batches before anything is trained, so that an error in them does not cost a round."""
        steps = self.num_sanity_val_steps
        self.num_sanity_val_batches = [count if steps == -1 else min(count, steps) for count in self.num_val_batches]
        if not sum(self.num_sanity_val_batches):
            return
        self.state.stage = RunningStage.SANITY_CHECKING
        self.hooks.call("on_sanity_check_start")
        evaluate(self._worker(), "validation", self._val_loaders, self.num_sanity_val_batches, self.inference_mode)
        self.hooks.call("on_validation_end")
        self.hooks.call("on_sanity_check_end")
        self.state.stage = RunningStage.TRAINING

    def _evaluate(
        self,
        fn: TrainerFn,
        model: LightningModule | None,
        datamodule: LightningDataModule | None,
        algorithm: Algorithm | None,
        ckpt_path: str | os.PathLike[str] | None,
        verbose: bool,
    ) -> list[dict[str, float]]:
        """Validation or test outside `fit`."""
        model, datamodule, algorithm = self._or_last(model, datamodule, algorithm)
        with self._stage(fn, model, datamodule, algorithm, ckpt_path):
            averages, _ = self._run_evaluation("test" if fn == TrainerFn.TESTING else "validation")
        if verbose and self.is_global_zero:
            for name, value in averages.items():
                print(f"{name:<24} {value:.6g}")
        return [averages]

    def _run_evaluation(self, stage: str) -> tuple[dict[str, float], list[list[Any]]]:
        """One evaluation of the model on the loaders of `stage`."""
        module, worker = self.lightning_module, self._worker()
        if not is_overridden(f"{stage}_step", module):
            raise UserError(f"{type(module).__name__} has no {stage}_step.")
        if self.ckpt_path is not None:
            persistence.load_model(module, checkpoints.load(self.ckpt_path), self.ckpt_path)
        short = {"validation": "val"}.get(stage, stage)
        loaders = as_loaders(getattr(self._data(), f"{short}_dataloader")())
        limits = num_batches(loaders, self.limits[f"limit_{short}_batches"])
        setattr(self, f"num_{short}_batches", limits)
        averages, outputs = evaluate(worker, stage, loaders, limits, self.inference_mode)
        self._publish(averages)
        self.hooks.call(f"on_{stage}_end")
        for logger in self.loggers[1:]:
            logger.log_metrics(averages, step=self.global_step)
            logger.save()
        return averages, outputs

    # -- setting up and taking down ------------------------------------------------------------------------------------

    def _or_last(
        self, model: LightningModule | None, datamodule: LightningDataModule | None, algorithm: Algorithm | None
    ) -> tuple[LightningModule, LightningDataModule | None, Algorithm | None]:
        """What was given, or else what the trainer had last."""
        if model is None and not hasattr(self, "lightning_module"):
            raise UserError("there is no model to evaluate: give one, or call fit first.")
        return (
            self.lightning_module if model is None else model,
            getattr(self, "datamodule", None) if datamodule is None else datamodule,
            getattr(self, "algorithm", None) if algorithm is None else algorithm,
        )

    @contextmanager
    def _stage(
        self,
        fn: TrainerFn,
        model: LightningModule,
        datamodule: LightningDataModule | None,
        algorithm: Algorithm | None,
        ckpt_path: str | os.PathLike[str] | None,
    ) -> Iterator[None]:
        """Attach model, data and algorithm, run what is inside, and leave everything as it was, whatever happens."""
        if not isinstance(model, LightningModule):
            raise UserError(f"model must be a LightningModule, got {type(model).__name__}.")
        if not isinstance(datamodule, FederatedDataModule):
            raise UserError(
                f"datamodule must be a FederatedDataModule, got {type(datamodule).__name__}: "
                "lightning_fl.data.Federated(datamodule, num_clients=…) makes one of any other data."
            )
        if fn == TrainerFn.FITTING:
            check_module(model)
        self.state.fn, self.state.stage, self.state.status = fn, STAGES[fn], TrainerStatus.RUNNING
        self.lightning_module, self.datamodule = model, datamodule
        self.algorithm = algorithm or FedAvg()
        self.should_stop, self.callback_metrics, self.progress_bar_metrics = False, {}, {}
        self.current_epoch = self.global_step = 0
        model.trainer = self  # type: ignore[assignment]
        datamodule.trainer = self  # type: ignore[assignment]
        self.callbacks = self._all_callbacks(model)
        self.hooks = Hooks(self, model, datamodule, self.callbacks)
        settings = (torch.is_anomaly_enabled(), torch.are_deterministic_algorithms_enabled())
        torch.autograd.set_detect_anomaly(self.detect_anomaly)
        torch.use_deterministic_algorithms(bool(self.deterministic), warn_only=self.deterministic == "warn")
        torch.backends.cudnn.benchmark = self.benchmark
        try:
            datamodule.prepare_data()
            datamodule.setup(fn.value)
            if self.fitting:
                self._eligible = datamodule.client_sizes.nonzero()[0]
                self._cohort_size = cohort_size(self.clients_per_round, datamodule.num_clients, len(self._eligible))
            self.ckpt_path = persistence.resolve(self, ckpt_path)
            if self.fitting and self.ckpt_path is None and (self.loggers or self.enable_checkpointing):
                persistence.set_earlier_run_aside(self.default_root_dir)
            self.profiler.setup(stage=fn.value, local_rank=self.local_rank, log_dir=self.default_root_dir)
            self.hooks.call("setup", fn.value)
            model.configure_model()
            self._place(model, datamodule)
            yield
            self.hooks.call("teardown", fn.value)
            self.state.status = TrainerStatus.FINISHED
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            self.state.status = TrainerStatus.INTERRUPTED
            self.hooks.call("on_exception", error)
            for logger in self.loggers:
                logger.finalize("interrupted" if interrupted else "failed")
            raise
        else:
            for logger in self.loggers:
                logger.finalize("success")
        finally:
            torch.autograd.set_detect_anomaly(settings[0])
            torch.use_deterministic_algorithms(settings[1])
            self._release()
            self.state.stage = None

    def _all_callbacks(self, model: LightningModule) -> list[Callback]:
        """The user's callbacks, then the module's and the algorithm's, then what the flags ask for."""
        configured = model.configure_callbacks()
        own = [configured] if isinstance(configured, Callback) else list(configured)
        types = {type(callback) for callback in own}
        callbacks = [c for c in self._given_callbacks if type(c) not in types] + own
        callbacks += self.algorithm.configure_callbacks()
        if self.max_time is not None:
            callbacks.append(Timer(duration=self.max_time, interval="epoch"))
        if self.enable_model_summary and self.fitting and not any(isinstance(c, ModelSummary) for c in callbacks):
            callbacks.append(ModelSummary())
        if not self.enable_progress_bar:
            callbacks = [c for c in callbacks if not isinstance(c, ProgressBar)]
        elif not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks.append(RoundProgressBar())
        # Lightning too calls checkpoint callbacks last, so that they save what the others have done.
        return sorted(callbacks, key=lambda callback: isinstance(callback, Checkpoint))

    def _place(self, model: LightningModule, datamodule: FederatedDataModule) -> None:
        """Bring model and data to the accelerator and bind the model to flat storage."""
        model.to(self.fabric.device)
        self.fabric.strategy.precision.convert_module(model)
        channels_last = prefers_channels_last(model, self.fabric.device)
        self.worker = Worker(model, self.fabric, self.hooks, channels_last)
        datamodule.place(self.fabric.device, channels_last)
        model.log = self.worker.logs.log  # type: ignore[method-assign]

    def _start_run(self) -> None:
        """Set up optimiser and run state for a fit."""
        worker, data = self._worker(), self._data()
        limit = self.limits["limit_train_batches"]
        plan = LocalPlan(
            batch_size=data.batch_size,
            epochs=self.local_epochs,
            steps=self.local_steps,
            limit_batches=1.0 if limit is None else limit,
            accumulate=self.accumulate_grad_batches,
            clip_value=self.gradient_clip_val,
            clip_algorithm=self.gradient_clip_algorithm,
        )
        worker.configure_optimizer(flat_gradient=self.algorithm.rule.reads_gradient)
        if self.algorithm.rule.own_step and not worker.optimizer.is_plain_sgd:
            raise UserError(
                f"{self.algorithm.name} makes the clients' steps itself, in place of plain SGD; "
                f"{type(self.lightning_module).__name__} has {worker.optimizer.description}: "
                "let configure_optimizers return torch.optim.SGD with momentum 0."
            )
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        self.run = Run(
            seed=seed,
            layout=worker.layout,
            buffer_layout=worker.buffer_layout,
            params=worker.params.clone(),
            buffers=worker.buffers.clone(),
            counters={name: x.clone() for name, x in worker.counters.items()},
        )
        names = zip(self.algorithm.step_names(), self.algorithm.steps, strict=True)
        self.run.server = {key: step.init(self.run.params) for key, step in names}
        self._val_loaders = as_loaders(data.val_dataloader()) if is_overridden("validation_step", worker.module) else []
        self.num_val_batches = num_batches(self._val_loaders, self.limits["limit_val_batches"])
        self.federation = Federation(
            algorithm=self.algorithm,
            worker=worker,
            data=data,
            run=self.run,
            plan=plan,
            clock=self.clock,
            eligible=self._eligible,
            cohort_size=self._cohort_size,
            dropout_rate=self.dropout_rate,
            macs=count_macs(worker, data.client(int(self._eligible[0])), data.train.resident),
            on_upload=self._on_upload,
        )
        rank_zero_info(data.description())

    def _on_upload(self, client: int, place: int, total: int) -> None:
        """Tell callbacks that a client's upload has arrived."""
        self.global_step = self.run.num_steps
        self.hooks.call("on_client_upload", client, place, total)

    def _release(self) -> None:
        """Give the module its own tensors and its own `log` again."""
        if self.worker is None:
            return
        if self.fitting and hasattr(self, "run"):
            self.worker.load(self.run.params, self.run.buffers, self.run.counters)
        self.lightning_module.__dict__.pop("log", None)
        self.worker.release()
        self.worker = None

    def save_checkpoint(self, filepath: str | os.PathLike[str], weights_only: bool = False) -> None:
        """Save the model and, unless `weights_only`, the run, so that `fit(ckpt_path=filepath)` goes on from here.

        Args:
            filepath: Where; written aside and renamed.
            weights_only: Leave the run out.
        """
        if self.is_global_zero:
            is_last = Path(filepath) == Path(self.default_root_dir) / persistence.LAST
            checkpoints.save_atomically(
                persistence.build_checkpoint(self, weights_only), filepath, keep_previous=is_last
            )

    @property
    def fitting(self) -> bool:
        """Whether `fit` is running."""
        return self.state.fn == TrainerFn.FITTING

    def _worker(self) -> Worker:
        assert self.worker is not None
        return self.worker

    def _data(self) -> FederatedDataModule:
        assert isinstance(self.datamodule, FederatedDataModule)
        return self.datamodule
