"""FederatedTrainer: fit, validate, test and predict in a simulated federation, driven by Lightning Fabric.

`lightning_fl.federation.round.Federation.train_round` trains one round; a round is Lightning's epoch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.accelerators import Accelerator
from lightning.fabric.strategies import Strategy
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fl.algorithms import Algorithm
from lightning_fl.checks import check_choice
from lightning_fl.clients.flat_module import FlatModule
from lightning_fl.communication.simulated_clock import SimulatedClock
from lightning_fl.data import Source
from lightning_fl.federation.loss_guard import LossGuard
from lightning_fl.outputs import checkpoint_file
from lightning_fl.outputs.run_folder import LAST
from lightning_fl.trainer import checkpointing
from lightning_fl.trainer.evaluation_loop import run_evaluation
from lightning_fl.trainer.fit_loop import FitLoop
from lightning_fl.trainer.flags import (
    build_fabric,
    build_loggers,
    build_profiler,
    build_timer,
    check_callbacks,
    check_client_states,
    check_flags,
    check_limits,
    check_rounds,
)
from lightning_fl.trainer.lightning_interface import TrainerInterface
from lightning_fl.trainer.session import session


class FederatedTrainer(TrainerInterface):
    """Train a LightningModule in a simulated federation; flags have the names and meaning of `lightning.Trainer`'s.

    Attributes:
        run: state of the run: the model, states, the ledger; set when `fit` begins.
        algorithm: the federated method.
        flat_module: the module on its flat storage; None outside a session.
        fit_loop: runs the rounds.
        hooks: calls the hooks of callbacks and module.
    """

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
        straggler_rate: float = 0.0,
        clock: SimulatedClock = SimulatedClock(),  # noqa: B008 -- frozen
        loss_guard: LossGuard = LossGuard(),  # noqa: B008
        runner: Literal["auto", "serial", "stacked"] = "auto",
        clients_at_once: int | None = None,
        client_states: str | os.PathLike[str] = "memory",
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
            dropout_rate: Probability in [0, 1) that a selected client receives the model but sends nothing back.
            straggler_rate: Probability in [0, 1] that a client stops after a part of its optimiser steps and sends the result.
            clock: The simulated network and computation behind time/simulated_seconds.
            loss_guard: Reject uploads, undo server steps or undo rounds whose loss explodes; off if not given.
            runner: `serial` trains one client after the other, `stacked` several at once; auto stacks on a GPU if the module
                allows it.
            clients_at_once: Clients that `stacked` trains at once, at most; as many as fit into half of the free memory if
                not given.
            client_states: Storage of clients' states between rounds: memory, disk (a folder in default_root_dir, deleted
                with the run), or a folder in which to create that folder.
            accelerator: As in Lightning: auto, cpu, gpu, cuda …, but not Apple's mps.
            strategy: As in Fabric; strategies that shard a model are refused.
            devices: Accelerators to use.
            num_nodes: Machines to use.
            precision: 32-true, bf16-mixed, bf16-true or 64-true.
            plugins: As in Fabric.
            callbacks: Lightning callbacks.
            logger: Loggers in addition to metrics.csv, which is always written; False for none, not even metrics.csv.
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
            deterministic: Use deterministic algorithms only; "warn" gives a warning where there is none.
            benchmark: Let cuDNN choose its algorithms by benchmarks.
            inference_mode: Evaluate in torch.inference_mode rather than torch.no_grad.
            detect_anomaly: Let autograd report operations that produce NaN.
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
            "clients_at_once": 1 if clients_at_once is None else clients_at_once,
        }
        check_rounds(max_rounds, clients_per_round, local_epochs, local_steps, dropout_rate, straggler_rate, every)
        check_flags(num_sanity_val_steps, gradient_clip_val, fast_dev_run)
        check_choice("runner", runner, ("auto", "serial", "stacked"))
        check_client_states(client_states)
        check_choice("gradient_clip_algorithm", gradient_clip_algorithm, ("norm", "value"))
        check_choice("deterministic", deterministic, (True, False, "warn"))
        self.limits = {
            "limit_train_batches": limit_train_batches,
            "limit_val_batches": limit_val_batches,
            "limit_test_batches": limit_test_batches,
            "limit_predict_batches": limit_predict_batches,
        }
        check_limits(self.limits)
        self.max_rounds = int(max_rounds)
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
        self.straggler_rate = straggler_rate
        self.clock = clock
        self.loss_guard = loss_guard
        self.runner = runner
        self.clients_at_once = clients_at_once
        self.client_states = os.fspath(client_states)
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
        self.timer = build_timer(max_time)
        self.fabric = build_fabric(accelerator, strategy, devices, num_nodes, precision, plugins)
        self.loggers = build_loggers(logger, self.default_root_dir)
        self.profiler = build_profiler(profiler)
        given = [] if callbacks is None else [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
        check_callbacks(given)
        self.given_callbacks = self.callbacks = given
        self.flat_module: FlatModule | None = None
        self.fit_loop = FitLoop(self)
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
            model: Module that every client trains.
            datamodule: A FederatedDataModule; lightning_fl.data.Federated converts any other.
            algorithm: The federated method; FedAvg if not given.
            ckpt_path: Resume from a checkpoint: a path, `last` or `best`.

        Raises:
            UserError: an argument does not fit; raised before anything is trained or written.
        """
        with session(self, TrainerFn.FITTING, model, datamodule, algorithm, ckpt_path):
            self.fit_loop.start()
            if self.ckpt_path is not None:
                checkpointing.resume(self, self.ckpt_path)
            else:
                self.fit_loop.prepare()
            self.fit_loop.run()

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
            datamodule: The data; the last one if not given.
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
            datamodule: The data; the last one if not given.
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
            datamodule: The data; the last one if not given.
            algorithm: The federated method that the model was trained with.
            ckpt_path: Load the model from a checkpoint: a path, `last` or `best`.
            return_predictions: Return what `predict_step` returned, batch by batch.

        Returns:
            A list of outputs; one list for each loader if there are several.
        """
        with session(self, TrainerFn.PREDICTING, model, datamodule, algorithm, ckpt_path):
            _, outputs = run_evaluation(self, "predict")
        if not return_predictions:
            return None
        return outputs[0] if len(outputs) == 1 else outputs

    def _evaluate(
        self,
        fn: TrainerFn,
        model: LightningModule | None,
        datamodule: LightningDataModule | None,
        algorithm: Algorithm | None,
        ckpt_path: str | os.PathLike[str] | None,
        verbose: bool,
    ) -> list[dict[str, float]]:
        """Validate or test outside `fit`."""
        with session(self, fn, model, datamodule, algorithm, ckpt_path):
            averages, _ = run_evaluation(self, "test" if fn == TrainerFn.TESTING else "validation")
        if verbose and self.is_global_zero:
            for name, value in averages.items():
                print(f"{name:<24} {value:.6g}")
        return [averages]

    # -- for loops and callbacks ----------------------------------------------------------------------------------------

    def save_checkpoint(self, filepath: str | os.PathLike[str], weights_only: bool = False) -> None:
        """Save the model and, unless `weights_only`, the run, so that `fit(ckpt_path=filepath)` resumes from here.

        Args:
            filepath: Path of the file, which is written under another name and then renamed.
            weights_only: Leave the run out.
        """
        if self.is_global_zero:
            if self.fitting:
                self.fit_loop.folder.claim()
            is_last = Path(filepath) == Path(self.default_root_dir) / LAST
            checkpoint_file.save_atomically(
                checkpointing.build_checkpoint(self, weights_only), filepath, keep_previous=is_last
            )

    def sources(self) -> list[Source]:
        """Return all holders of training samples, for callbacks that query each of them; a stock Trainer has no such method."""
        return self.fit_loop.federation.sources()
