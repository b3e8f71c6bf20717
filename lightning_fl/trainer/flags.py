"""Flags of a trainer: their documentation, their checks, and the size of a round's cohort."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from datetime import timedelta
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.strategies import Strategy
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_module

from lightning_fl.checks import check_at_least, check_choice, is_a, is_whole, listed
from lightning_fl.checks.misconfiguration import misconfiguration
from lightning_fl.checks.ranges import Called, check_ranges
from lightning_fl.errors import nearest, require
from lightning_fl.evaluation.loops import EvaluationLoop, PredictionLoop
from lightning_fl.features.attacks import Adversary
from lightning_fl.features.clock import ClientClock, SimulatedClock
from lightning_fl.features.loss_guard import LossGuard
from lightning_fl.features.privacy.mechanism import Privacy
from lightning_fl.features.secure_aggregation import SecureAggregation
from lightning_fl.features.selection import ClientSelection
from lightning_fl.outputs.metric import falls
from lightning_fl.outputs.quiet import quiet
from lightning_fl.outputs.wandb_run import trial_folder
from lightning_fl.processes import launch
from lightning_fl.trainer.callback_list import CallbackList, require_no_tuner
from lightning_fl.trainer.fabric_strategy import FabricStrategy, lightning_flags
from lightning_fl.trainer.flag_facts import (
    CALLBACKS,
    CLOCK,
    DEVICES,
    FAILING,
    GRADIENTS,
    GUARD,
    LATE,
    METRIC,
    MODES,
    OUTPUT,
    PRIVACY,
    ROUNDS,
    RUNNER,
    SEEN,
    SHORT,
    Flag,
    execution,
    flags_of,
)
from lightning_fl.trainer.lightning_parts import (
    build_fabric,
    build_loggers,
    build_profiler,
    build_timer,
    check_callbacks,
    refuse_flag,
    refusing_others,
)
from lightning_fl.trainer.logger_connector import RoundLoggerConnector

ClientsPerRound = Annotated[int, Ge(1)] | Annotated[float, Interval(gt=0, le=1), Called("{}, unless it is a count,")]
"""Count of clients, or fraction of those with samples."""


class TrainerFlags(Trainer, ABC):
    """Flags of a trainer as attributes, the Lightning objects that some flags describe, and the state of an idle trainer."""

    default_root_dir = ""  # a property of Lightning's trainer, as are the next two
    max_steps: int = -1
    min_steps: int | None = None
    gradient_clip_algorithm: Any
    _max_rounds: int
    if TYPE_CHECKING:
        strategy: FabricStrategy
        validate_loop: EvaluationLoop
        test_loop: EvaluationLoop

    @refusing_others(refuse_flag)
    def __init__(
        self,
        *,
        max_rounds: Annotated[int, Ge(0), Flag(ROUNDS)] = 100,
        min_rounds: Annotated[int | None, Ge(0), Flag(ROUNDS)] = None,
        max_steps: Annotated[int | None, Ge(-1), Flag(ROUNDS)] = None,
        min_steps: Annotated[int | None, Ge(0), Flag(ROUNDS)] = None,
        clients_per_round: Annotated[ClientsPerRound, Flag(ROUNDS)] = 10,
        selection: Annotated[ClientSelection | None, Flag(ROUNDS)] = None,
        local_epochs: Annotated[int | None, Ge(1), Flag(ROUNDS)] = None,
        local_steps: Annotated[int | None, Ge(1), Flag(ROUNDS)] = None,
        client_optimizer: Annotated[Literal["module", "sgd"], Flag(ROUNDS, "must stay")] = "module",
        metric: Annotated[str | None, execution(METRIC)] = None,
        metric_mode: Annotated[Literal["max", "min"] | None, execution(METRIC)] = None,
        val_every_n_rounds: Annotated[int, Ge(1), Flag(METRIC)] = 1,
        test_every_n_rounds: Annotated[int | None, Ge(1), Flag(METRIC, decides="execution")] = None,
        validation_clients: Annotated[int | None, Ge(1), Flag(METRIC)] = None,
        log_every_n_rounds: Annotated[int, Ge(1), execution(METRIC)] = 1,
        log_every_n_steps: Annotated[int | None, Ge(0), execution(METRIC)] = None,
        checkpoint_every_n_rounds: Annotated[int, Ge(1), execution(METRIC)] = 1,
        dropout_rate: Annotated[float, Interval(ge=0, lt=1), Flag(FAILING)] = 0.0,
        straggler_rate: Annotated[float, Interval(ge=0, le=1), Flag(FAILING)] = 0.0,
        clock: Annotated[SimulatedClock, Flag(CLOCK)] = SimulatedClock(),  # noqa: B008 -- frozen
        over_selection: Annotated[float | None, Ge(1), Flag(LATE)] = None,
        deadline: Annotated[float | None, Gt(0), Flag(LATE)] = None,
        availability: Annotated[str | os.PathLike[str] | None, Flag(LATE)] = None,
        availability_period: Annotated[float | None, Gt(0), Flag(LATE)] = None,
        if_too_few: Annotated[Literal["wait", "fewer"] | None, Flag(LATE)] = None,
        loss_guard: Annotated[LossGuard, Flag(GUARD)] = LossGuard(),  # noqa: B008
        privacy: Annotated[Privacy | None, Flag(PRIVACY, "must stay")] = None,
        secure_aggregation: Annotated[SecureAggregation | None, Flag(SEEN)] = None,
        adversary: Annotated[Adversary | None, Flag(SEEN)] = None,
        runner: Annotated[Literal["auto", "serial", "stacked", "lightning"], execution(RUNNER)] = "auto",
        clients_at_once: Annotated[int | None, Ge(1), execution(RUNNER)] = None,
        threads: Annotated[int | None, Ge(1), execution(RUNNER)] = None,
        compile: Annotated[bool | None, execution(RUNNER)] = None,
        client_states: Annotated[str | os.PathLike[str], execution(RUNNER)] = "memory",
        accelerator: Annotated[str | Accelerator, execution(DEVICES)] = "auto",
        strategy: Annotated[str | Strategy, execution(DEVICES)] = "auto",
        devices: Annotated[list[int] | str | int, execution(DEVICES)] = 1,
        devices_per_client: Annotated[int, Ge(1), execution(DEVICES)] = 1,
        num_nodes: Annotated[int, execution(DEVICES)] = 1,
        precision: Annotated[int | str | None, Flag(DEVICES)] = None,
        plugins: Annotated[Any | None, Flag(DEVICES, None)] = None,
        callbacks: Annotated[list[Callback] | Callback | None, Flag(CALLBACKS)] = None,
        logger: Annotated[Logger | Iterable[Logger] | bool | None, execution(CALLBACKS)] = None,
        default_root_dir: Annotated[str | os.PathLike[str] | None, execution(CALLBACKS)] = None,
        fast_dev_run: Annotated[bool | int, Ge(0), Flag(SHORT, None)] = False,
        max_time: Annotated[str | timedelta | dict[str, int] | None, execution(SHORT)] = None,
        limit_train_batches: Annotated[int | float | None, Flag(SHORT)] = None,
        limit_val_batches: Annotated[int | float | None, Flag(SHORT)] = None,
        limit_test_batches: Annotated[int | float | None, Flag(SHORT, None)] = None,
        limit_predict_batches: Annotated[int | float | None, execution(SHORT)] = None,
        overfit_batches: Annotated[int | float | None, Flag(SHORT)] = None,
        reload_dataloaders_every_n_epochs: Annotated[int | None, Ge(0), Flag(SHORT)] = None,
        num_sanity_val_steps: Annotated[int | None, Ge(-1), execution(SHORT)] = None,
        accumulate_grad_batches: Annotated[int, Ge(1), Flag(GRADIENTS)] = 1,
        gradient_clip_val: Annotated[int | float | None, Flag(GRADIENTS)] = None,
        gradient_clip_algorithm: Annotated[Literal["norm", "value"] | None, Flag(GRADIENTS)] = "norm",
        enable_progress_bar: Annotated[bool, execution(OUTPUT)] = True,
        enable_checkpointing: Annotated[bool, execution(OUTPUT)] = True,
        enable_model_summary: Annotated[bool, execution(OUTPUT)] = True,
        deterministic: Annotated[bool | Literal["warn"] | None, execution(MODES)] = None,
        benchmark: Annotated[bool | None, execution(MODES)] = None,
        channels_last: Annotated[bool | None, execution(MODES)] = None,
        float32_precision: Annotated[Literal["highest", "high", "medium"] | None, Flag(MODES, None)] = None,
        inference_mode: Annotated[bool, execution(MODES)] = True,
        detect_anomaly: Annotated[bool, execution(MODES)] = False,
        profiler: Annotated[Profiler | str | None, execution(MODES)] = None,
    ) -> None:
        """Set up the trainer.

        Args:
            max_rounds: Rounds of communication; a round is an epoch for callbacks and schedulers.
            min_rounds: Rounds that are made before a callback or the module may stop the run; none if not given.
            max_steps: End with the round in which a client's `trainer.global_step` reaches this number; no client goes beyond
                it. Each round adds the steps of the client that makes the most. Without it, or with -1, max_rounds is the
                limit.
            min_steps: Steps, counted in the same way, that are made before a callback or the module may stop the run; none if
                not given.
            clients_per_round: Clients selected in each round, a count or a fraction in (0, 1] of those that have samples.
            selection: Rule that selects these clients, such as BySize or PowerOfChoice; uniform without replacement if not
                given.
            local_epochs: Passes of a client over its samples in a round; 1 if neither this nor local_steps is given.
            local_steps: Optimiser steps of a client in a round, instead of local_epochs.
            client_optimizer: `module` for the optimiser of the module, or `sgd` for plain SGD at that optimiser's learning rates,
                for methods that make the steps themselves.
            metric: Name of the run's metric, for the final table, the progress bar, reports, targets, and methods that need an
                accuracy; if not given, val/accuracy or the only accuracy that the validation logs, else the loss.
            metric_mode: `max` if higher values of the given metric are better, `min` if lower values are; if not given, lower
                is better for names of losses and errors.
            val_every_n_rounds: Validate after every n-th round and after the last.
            test_every_n_rounds: Also measure the test set, as test/…, after every n-th round and after the last; needs
                validation on other samples, such as by data.val_fraction.
            validation_clients: Number of clients to validate and test, drawn anew every time, for methods with personal models
                or parameters; all if not given.
            log_every_n_rounds: Log a row after every n-th round and after the last.
            log_every_n_steps: With runner lightning, send values logged with on_step to loggers in every n-th step; 0 for
                never, and 50 if not given.
            checkpoint_every_n_rounds: Save checkpoints/last.ckpt after every n-th round and after the last.
            dropout_rate: Probability in [0, 1) that a selected client receives the model but sends nothing back.
            straggler_rate: Probability in [0, 1] that a client stops after some of its optimiser steps and sends the result.
            clock: Simulated network and computation, from which time/simulated_seconds follows.
            over_selection: Clients selected in each round, as a multiple of clients_per_round; the round closes once
                clients_per_round have answered, and the others are late. Needs a clock of clients; 1 if not given.
            deadline: Simulated seconds after which a round closes, however many clients have answered. Needs a clock of
                clients.
            availability: CSV file with the columns client, start_seconds and end_seconds: the times at which clients are
                available. Needs a clock of clients; all clients are always available if not given.
            availability_period: Seconds after which these times repeat; if not given, the latest end in the file.
            if_too_few: `wait` until clients_per_round clients are available, or go on with `fewer`; wait if not given.
            loss_guard: Reject uploads, undo server steps or undo rounds whose loss explodes; off if not given.
            privacy: Differential privacy: clipping, noise, and the accounting of the privacy loss; off if not given.
            secure_aggregation: Let the server see only sums over a round's clients: count the bits of keys, shares and masked
                numbers, and refuse parts that read single clients. SecureAggregation for the usual sizes, or its key_bits,
                share_bits and value_bits; off if not given.
            adversary: Clients that attack: `adversary.attack` names the attack; attackers, start and per_round say who attacks
                and when; none if not given.
            runner: `serial` trains one client after the other, `stacked` several at once, `lightning` one after the other by
                Lightning's own loop, with all methods that need one gradient a step, not FedSAM, MOON, Ditto, APFL or FedRep;
                auto takes `lightning` for modules that change the optimiser's steps, and `stacked` for small steps, if the
                module allows it and draws no random numbers.
            clients_at_once: Largest number of clients that `stacked` trains at once; if not given, as many as need an
                estimated 4 GiB, at most 64; on a GPU 8 GiB and 256.
            threads: Threads that each process computes with on a CPU; if not given, OMP_NUM_THREADS, or a number that suits the
                size of a step.
            compile: Let torch compile a client's training step with its gradient into one graph, or that of clients at once, and
                the steps of validation and test; on a GPU with CUDA graphs. Last digits change, and compiling takes up to a
                minute for each shape of batches. Off if not given.
            client_states: Storage of clients' states between rounds: memory, disk (a folder in default_root_dir, deleted
                with the run), or a folder in which to create that folder.
            accelerator: As in Lightning: auto, cpu, gpu, cuda …, but not Apple's mps.
            strategy: As in Fabric; strategies that shard a model are refused.
            devices: Accelerators to use.
            devices_per_client: Accelerators that train one client together, each on its share of every minibatch.
            num_nodes: Machines to use.
            precision: 32-true, bf16-mixed, bf16-true or 64-true.
            plugins: As in Fabric.
            callbacks: Lightning callbacks.
            logger: Loggers in addition to metrics.csv, which is always written; False for none, not even metrics.csv.
            default_root_dir: Folder of the run; the working directory if not given.
            fast_dev_run: Try the run with one round (or n) and one batch (or n), without logging or saving.
            max_time: Stop after this time, as in Lightning: DD:HH:MM:SS, a timedelta or its arguments.
            limit_train_batches: Batches of each local pass, a count or a fraction.
            limit_val_batches: Validation batches, a count or a fraction.
            limit_test_batches: Test batches, a count or a fraction.
            limit_predict_batches: Prediction batches, a count or a fraction.
            overfit_batches: Train in every pass on the same first batches of each client, a count or a fraction, and validate
                on equally many; replaces limit_train_batches and limit_val_batches. Off if not given, or 0.
            reload_dataloaders_every_n_epochs: Request the loaders anew every n rounds, if clients have loaders of their own;
                never if not given, or 0.
            num_sanity_val_steps: Validation batches to try before the first round; -1 for all, and 2 if not given.
            accumulate_grad_batches: Batches whose gradients make one optimiser step.
            gradient_clip_val: Clip each step's gradient to this norm or value.
            gradient_clip_algorithm: norm or value; null is norm.
            enable_progress_bar: Show a progress bar.
            enable_checkpointing: Save checkpoints and the final model.
            enable_model_summary: Print a summary of the module before training.
            deterministic: Use only deterministic algorithms; "warn" warns of operations that have none. None leaves torch's
                setting.
            benchmark: Let cuDNN choose its algorithms by benchmarks. None leaves torch's setting, and turns it off with
                deterministic.
            channels_last: Train convolutions in an nn.Sequential with their channels innermost in memory; your code sees the
                usual layout everywhere. If not given, on where it is faster: on a CPU with at most 64 channels and without
                batch normalisation.
            float32_precision: Precision of matrix products of float32, as in `torch.set_float32_matmul_precision`, on a GPU
                also of convolutions and recurrent layers: highest, high (TF32) or medium; if not given, torch's setting, whose
                default uses TF32 in convolutions and recurrent layers.
            inference_mode: Evaluate in torch.inference_mode rather than torch.no_grad. Within a fit it is always the latter,
                as in Lightning.
            detect_anomaly: Let autograd report operations that produce NaN.
            profiler: simple, advanced, pytorch, or a Lightning profiler.

        Raises:
            UserError: a value is not allowed.
        """
        with misconfiguration():
            check_ranges(TrainerFlags.__init__, locals())
        self.max_rounds = max_rounds
        self.min_rounds = min_rounds
        self.max_steps = -1 if max_steps is None else max_steps
        self.min_steps = min_steps
        self.clients_per_round = clients_per_round
        self.selection = selection
        self.local_epochs = local_epochs
        self.local_steps = local_steps
        self.client_optimizer = client_optimizer
        self.metric, self.metric_mode = self.given_metric = metric, metric_mode
        self.val_every_n_rounds = val_every_n_rounds
        self.test_every_n_rounds = test_every_n_rounds
        self.validation_clients = validation_clients
        self.log_every_n_rounds = log_every_n_rounds
        self.log_every_n_steps = 50 if log_every_n_steps is None else log_every_n_steps
        self.checkpoint_every_n_rounds = checkpoint_every_n_rounds
        self.dropout_rate = dropout_rate
        self.straggler_rate = straggler_rate
        require(
            isinstance(clock, SimulatedClock),
            f"clock must be SimulatedClock(…) or ClientClock(…) of lightning_fl.features.clock, got {clock!r}.",
        )
        self.clock = ClientClock.of(clock)
        self.over_selection = over_selection
        self.deadline = deadline
        self.availability = availability
        self.availability_period = availability_period
        self.if_too_few = if_too_few
        self.loss_guard = loss_guard
        self.privacy = privacy
        self.secure_aggregation = secure_aggregation
        self.adversary = adversary
        self.runner = runner
        self.clients_at_once = clients_at_once
        self.threads = threads
        self.compile = compile
        self.client_states = os.fspath(client_states)
        self.devices_per_client = devices_per_client
        self.default_root_dir = os.path.abspath(default_root_dir or os.curdir)
        self.fast_dev_run = True if fast_dev_run == 1 else fast_dev_run
        self.limits = {
            "limit_train_batches": limit_train_batches,
            "limit_val_batches": limit_val_batches,
            "limit_test_batches": limit_test_batches,
            "limit_predict_batches": limit_predict_batches,
        }
        self.overfit_batches = 0.0 if overfit_batches is None else overfit_batches
        self.reload_dataloaders_every_n_epochs = reload_dataloaders_every_n_epochs or 0
        num_sanity_val_steps = 2 if num_sanity_val_steps is None else num_sanity_val_steps
        self.num_sanity_val_steps = inf if num_sanity_val_steps == -1 else num_sanity_val_steps
        self.accumulate_grad_batches = accumulate_grad_batches
        self.gradient_clip_val = gradient_clip_val
        clip_algorithm = gradient_clip_algorithm or "norm"
        # As in Lightning, where it is None by default, so that a module may clip by value itself.
        is_given = gradient_clip_val is not None or clip_algorithm != "norm"
        self.gradient_clip_algorithm = GradClipAlgorithmType(clip_algorithm) if is_given else None
        self.enable_progress_bar = enable_progress_bar
        self.enable_checkpointing = enable_checkpointing
        self.enable_model_summary = enable_model_summary
        self.deterministic = deterministic
        self.benchmark = benchmark
        self.channels_last = channels_last
        self.float32_precision = float32_precision
        self.inference_mode = inference_mode
        self.detect_anomaly = detect_anomaly
        with misconfiguration():
            self._check()
        if overfit_batches:
            self.limits |= {"limit_train_batches": overfit_batches, "limit_val_batches": overfit_batches}
        self.max_rounds = int(fast_dev_run or max_rounds)
        if local_epochs is None and local_steps is None:
            self.local_epochs = 1
        if fast_dev_run:
            self.limits = {name: int(fast_dev_run) for name in self.limits}
            self.enable_checkpointing, self.num_sanity_val_steps = False, 0
        self.timer = build_timer(max_time)
        self.plugins = plugins
        self.fabric = build_fabric(accelerator, strategy, devices, num_nodes, precision, plugins)
        given_loggers = logger if isinstance(logger, Iterable) else [logger]
        self.default_root_dir = trial_folder(self.default_root_dir, given_loggers)
        self.loggers = build_loggers(logger, self.default_root_dir)
        if fast_dev_run and self.loggers:
            self.loggers = [DummyLogger()]  # as in Lightning: modules may call it, and nothing is written
        self.profiler = build_profiler(profiler)
        listed_callbacks = [] if callbacks is None else listed(callbacks, Callback)
        check_callbacks(listed_callbacks, runner in ("auto", "lightning"))
        if self.timer is not None and any(is_a(callback, Timer) for callback in listed_callbacks):
            rank_zero_info(f"max_time {max_time!r} is ignored, because the callbacks list already contains a Timer.")
            self.timer = None
        self.callback_list = CallbackList(listed_callbacks, self.timer, self.default_root_dir)
        self.callback_list.arrange(self)
        launch(self.fabric)
        self._set_up_lightning()

    def _set_up_lightning(self) -> None:
        """Let Lightning's trainer set itself up around Fabric's processes; the flags stay as they are."""
        flags, callbacks = {**vars(self), "limits": dict(self.limits)}, self.callbacks
        with quiet(rank_zero_module.log.name):  # which tells of flags that a federation sets
            super().__init__(
                **lightning_flags(self.fabric),
                max_epochs=self.max_rounds,
                check_val_every_n_epoch=self.val_every_n_rounds,
                inference_mode=self.inference_mode,
            )
        vars(self).update(flags)
        self.callbacks = callbacks
        self._logger_connector = RoundLoggerConnector(self)
        self.validate_loop = EvaluationLoop(self, "validation", self.inference_mode)
        self.test_loop = EvaluationLoop(self, "test", self.inference_mode)
        self.predict_loop = PredictionLoop(self, self.inference_mode)
        self.fit_loop = self._loop_of_rounds()

    @property
    def flags(self) -> Mapping[str, Flag]:
        """Facts about each flag, in the order of `--help`."""
        return flags_of(TrainerFlags)

    @property
    def max_rounds(self) -> int:
        """Rounds of communication."""
        return self._max_rounds

    @max_rounds.setter
    def max_rounds(self, value: int) -> None:
        is_fitting = getattr(self, "fitting", False)  # which a trainer knows only when it is set up
        require(
            not is_fitting or value == self._max_rounds,
            f"max_rounds cannot change during a fit, got {value!r}: set trainer.should_stop = True to end it early.",
        )
        self._max_rounds = value

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks; a fit, validation, test or prediction adds those of module and algorithm."""
        return self.callback_list.present

    @callbacks.setter
    def callbacks(self, callbacks: list[Callback]) -> None:
        require_no_tuner(callbacks)
        self.callback_list.present = callbacks

    @property
    def given_callbacks(self) -> list[Callback]:
        """The user's callbacks."""
        return self.callback_list.given

    @abstractmethod
    def _loop_of_rounds(self) -> Any:
        """Return the loop that runs the rounds of a fit."""

    @property
    def metric_falls(self) -> bool:
        """True if lower values of the metric are better."""
        return falls(self.metric or "", self.metric_mode)

    def _check(self) -> None:
        """Check how flags fit together, and those of which annotations cannot say what is allowed."""
        require(
            self.local_epochs is None or self.local_steps is None,
            f"local_epochs={self.local_epochs} and local_steps={self.local_steps} exclude each other: give one of them.",
        )
        self._check_client_times()
        require(
            self.selection is None or isinstance(self.selection, ClientSelection),
            f"selection must be a ClientSelection of lightning_fl.features.selection, such as BySize(), got {self.selection!r}.",
        )
        require(
            self.secure_aggregation is None or isinstance(self.secure_aggregation, SecureAggregation),
            f"secure_aggregation is SecureAggregation(), with other sizes if need be, or None, got {self.secure_aggregation!r}.",
        )
        require(
            isinstance(self.loss_guard, LossGuard),
            f"loss_guard must be LossGuard(…) of lightning_fl.features, which is off without arguments, got "
            f"{self.loss_guard!r}.",
        )
        require(
            self.privacy is None or isinstance(self.privacy, Privacy),
            f"privacy must be ClientPrivacy(…) or LocalPrivacy(…) of lightning_fl.features.privacy, got {self.privacy!r}.",
        )
        check_choice("channels_last", self.channels_last, (None, True, False))
        check_choice("compile", self.compile, (None, True, False))
        if self.gradient_clip_val is not None:
            check_at_least("gradient_clip_val", self.gradient_clip_val, 0)
        require(self.metric != "", "metric must be the name of a logged value, got ''.")
        require(
            self.metric is not None or self.metric_mode is None,
            f"metric_mode {self.metric_mode!r} needs trainer.metric, the name whose direction it says.",
        )
        require(
            self.adversary is None or isinstance(self.adversary, Adversary),
            f"adversary must be an Adversary, such as Adversary(SignFlip()), got {self.adversary!r}.",
        )
        require(
            self.client_states in ("memory", "disk") or os.path.isdir(self.client_states),
            f"client_states {self.client_states!r} is not a folder; {nearest(self.client_states, ('memory', 'disk'))}, or a "
            "folder.",
        )
        for name, limit in {**self.limits, "overfit_batches": self.overfit_batches}.items():
            if is_whole(limit):
                check_at_least(f"{name} as a count", limit, 0)
            else:
                require(
                    limit is None or 0 <= limit <= 1,
                    f"You have passed invalid value {limit} for {name}: it has to be in [0.0, 1.0] or an int.",
                )

    def _check_client_times(self) -> None:
        """Check the flags about clients that are late or not there."""
        flags = {"over_selection": self.over_selection, "deadline": self.deadline, "availability": self.availability}
        for name, value in flags.items():
            require(
                value is None or (name, value) == ("over_selection", 1) or self.clock.is_of_clients,
                f"{name} needs a clock that knows each client's time: give devices, trace or a …_sigma of trainer.clock, such as "
                "--trainer.clock.devices phones, or in Python clock=ClientClock().",
            )
        for name in ("availability_period", "if_too_few"):
            require(
                getattr(self, name) is None or self.availability is not None,
                f"{name} {getattr(self, name)} is about trainer.availability, which is not given.",
            )


def cohort_size(clients_per_round: int | float, num_eligible: int) -> int:
    """Return the number of clients of a round, K.

    Args:
        clients_per_round: count, or fraction of the clients with samples.
        num_eligible: clients with samples, N.

    Raises:
        UserError: `clients_per_round` exceeds the number of clients with samples.
    """
    if not is_whole(clients_per_round):
        return max(1, round(clients_per_round * num_eligible))
    require(
        clients_per_round <= num_eligible,
        f"clients_per_round is {clients_per_round}, but the federation has {num_eligible} clients with samples: "
        f"give at most {num_eligible}, or a fraction in (0, 1].",
    )
    return int(clients_per_round)
