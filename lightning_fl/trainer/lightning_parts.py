"""Build the Lightning objects that a trainer's flags describe, and check its callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, NoReturn, TypeVar, cast

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import MPSAccelerator
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_fl.algorithms.compatibility import prunes
from lightning_fl.checks import check_whole, is_a, is_whole, listed, other_names, overrides, parameters_of
from lightning_fl.data import FederatedDataModule
from lightning_fl.errors import UserError, nearest, require
from lightning_fl.internals import MultiProcessingLauncher
from lightning_fl.outputs.metrics_csv import RoundCSVLogger
from lightning_fl.trainer.fabric_strategy import PRECISIONS

PRECISION_ALIASES = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed"}
STRATEGIES = ("auto", "ddp")
SHARDED_STRATEGIES = ("fsdp", "deepspeed", "xla", "modelparallel", "tensorparallel")
"""Parts of their names, without underscores, which classes do not have."""
REFUSED_CALLBACKS: dict[type[Callback], str] = {
    BatchSizeFinder: "tries batch sizes in a separate training, which a federation does not have: set data.batch_size, or use "
    "Lightning's Tuner with a lightning.Trainer",
    LearningRateFinder: "tries learning rates in a separate training, which a federation does not have: compare runs "
    "with different model.learning_rate, or use Lightning's Tuner with a lightning.Trainer",
    SpikeDetection: "compares the losses of successive steps, which in a federation belong to different clients: "
    "trainer.loss_guard rejects uploads, and undoes rounds, whose loss explodes",
}
OF_STEPS: dict[type[Callback], str] = {
    DeviceStatsMonitor: "logs every step, which only runner 'lightning' does; --trainer.profiler simple reports where time goes",
    ModelPruning: "renames parameters, which only runner 'lightning' follows; lightning_fl.callbacks.MagnitudePruning prunes "
    "with all runners",
    ThroughputMonitor: "logs every step, which only runner 'lightning' does; metrics.csv contains time/round_seconds",
}
"""Callbacks that need single steps, or parameters that Lightning's own loop finds under other names."""
PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}

STOCK_FLAGS = {
    "max_epochs": "a federation trains in rounds, which callbacks count as epochs: use max_rounds, and local_epochs for the "
    "passes of a client in a round",
    "min_epochs": "a federation trains in rounds, which callbacks count as epochs: use min_rounds",
    "val_check_interval": "the server's model exists only between rounds: use val_every_n_rounds",
    "check_val_every_n_epoch": "the epoch of a federation is a round: use val_every_n_rounds",
    "use_distributed_sampler": "processes share the clients, not the samples, so there is no sampler to replace: leave it out",
    "barebones": "a federation has no such mode: use enable_progress_bar false, enable_model_summary false, "
    "enable_checkpointing false and logger false",
    "sync_batchnorm": "clients are trained apart, each on its own samples, and sharing their batch statistics would mix them: "
    "leave it out, the server averages the running statistics in every round",
    "enable_autolog_hparams": "the model's hyper-parameters are always logged: use logger false to log nothing",
    "model_registry": "models are not uploaded to a registry: the final model is in model.ckpt",
}
"""Flags of `lightning.Trainer` that FederatedTrainer does not have: the reason, and what to use instead."""
OF_FIT = ("algorithm", "ckpt_path")


Function = TypeVar("Function", bound=Callable[..., Any])


def refusing_others(refuse: Callable[[str, Iterable[str]], NoReturn]) -> Callable[[Function], Function]:
    """Return a decorator of a method that refuses unknown arguments; the signature, which the command line reads, stays.

    Args:
        refuse: raises the error, given the unknown name and all known ones.
    """

    def decorated(method: Function) -> Function:
        parameters = signature(method).parameters.keys() - {"self"}

        @wraps(method)
        def checked(*positional: Any, **named: Any) -> Any:
            for name in named:
                if name not in parameters:
                    refuse(name, parameters)
            return method(*positional, **named)

        return cast(Function, checked)

    return decorated


def refuse_argument(method: str, name: str, arguments: Iterable[str]) -> NoReturn:
    """Refuse an argument that a method of the trainer does not have.

    Raises:
        UserError: always; the sentence names the argument to use instead, or the nearest one.
    """
    if "dataloader" in name and method not in ("fit", "plan"):
        raise UserError(
            f"{method} of FederatedTrainer has no argument {name!r}: lightning.Trainer().{method}(model, {name}) takes the "
            "trained model and any loader."
        )
    if "dataloader" in name:
        raise UserError(
            f"{method} has no argument {name!r}: a federation divides the samples of a datamodule, so use "
            "datamodule=lightning_fl.data.Federated(datamodule, num_clients=…)."
        )
    raise UserError(f"{method} has no argument {name!r}; {nearest(name, arguments)}.")


def refuse_flag(name: str, flags: Iterable[str]) -> NoReturn:
    """Refuse a flag that a trainer does not have.

    Raises:
        UserError: always; the sentence names the flag or object to use instead, or the nearest flag.
    """
    if name in STOCK_FLAGS:
        raise UserError(
            f"{name} is a flag of lightning.Trainer that FederatedTrainer does not have: {STOCK_FLAGS[name]}."
        )
    unknown = f"FederatedTrainer has no flag {name!r}"
    if name in other_names.FLAGS:
        raise UserError(f"{unknown}; here it is {other_names.FLAGS[name].replace('trainer.', '')}.")
    if name in parameters_of(FederatedDataModule):
        raise UserError(f"{unknown}: give it to the data module, as in Federated(datamodule, {name}=…).")
    if name in OF_FIT:
        raise UserError(f"{unknown}: give it to fit, as in trainer.fit(model, datamodule, {name}=…).")
    raise UserError(f"{unknown}; {nearest(name, flags)}.")


def check_callbacks(callbacks: Iterable[Callback], by_lightning: bool) -> None:
    """Check that callbacks work in a federation; timers check the time once a round.

    Learning-rate monitors log once a round, too, unless Lightning's own loop trains the clients.

    Raises:
        UserError: a callback does not work, or a checkpoint could not tell two callbacks apart; the sentence gives the reason
            and the alternative.
    """
    by_key: dict[str, Callback] = {}
    callbacks = list(callbacks)
    for one in callbacks:
        name = one.__name__ if isinstance(one, type) else str(one)
        remedy = f": give {name}(…)" if isinstance(one, str | type) else ""
        require(is_a(one, Callback), f"callbacks must be objects of the class Callback, got {name}{remedy}.")
    renaming = next((type(callback).__name__ for callback in callbacks if is_a(callback, ModelPruning)), None)
    for callback in callbacks:
        require(
            renaming is None or is_a(callback, ModelPruning) or not prunes(callback),
            f"{renaming} renames parameters that {type(callback).__name__} prunes, too: leave one out.",
        )
        require(
            renaming is None or not is_a(callback, WeightAveraging, StochasticWeightAveraging),
            f"{renaming} moves parameters within their layers, and {type(callback).__name__} averages them by their order: leave "
            "one out.",
        )
        if overrides("state_dict", callback):
            require(
                by_key.setdefault(callback.state_key, callback) is callback,
                f"there are two {type(callback).__name__} among the callbacks, of which a checkpoint keeps one state: leave one "
                "out, or give each its own state_key.",
            )
        for refused, reason in (REFUSED_CALLBACKS | ({} if by_lightning else OF_STEPS)).items():
            require(not is_a(callback, refused), f"{type(callback).__name__} {reason}.")
        # A federation stops only after a round: clients that are trained at once make no separate steps.
        if is_a(callback, Timer):
            callback._interval = "epoch"
        if is_a(callback, LearningRateMonitor) and not by_lightning:
            if callback.logging_interval == "step":
                rank_zero_info(
                    "LearningRateMonitor logs once a round, the rate of a client's first step, because a federation logs rounds."
                )
            callback.logging_interval = "epoch"


def say_when_callbacks_act(callbacks: Iterable[Callback]) -> None:
    """Print notes on callbacks of Lightning that act after rounds, where their users may expect something else."""
    for callback in callbacks:
        name = type(callback).__name__
        if is_a(callback, ModelPruning) and callback._use_lottery_ticket_hypothesis is True:
            rank_zero_warn(
                f"{name} resets the weights that it keeps to their first values after each round, so nothing is learned from "
                "round to round: use_lottery_ticket_hypothesis=False goes on with the trained values, and a function of the "
                "round chooses when to reset them."
            )
        if not is_a(callback, ModelCheckpoint):
            continue
        if (every := callback._every_n_train_steps) > 1:
            rank_zero_warn(
                f"{name} saves only after rounds at whose end the steps of all clients are a multiple of "
                f"every_n_train_steps={every}, which may be none: every_n_epochs counts rounds."
            )
        if callback._train_time_interval is not None:
            rank_zero_info(
                f"{name} looks at its train_time_interval after each round, because it saves the server's model."
            )


def check_averaging(callbacks: Iterable[Callback], module: LightningModule) -> None:
    """Refuse averages of weights if parameters are added later, or if batch normalisation needs one more epoch.

    Raises:
        UserError: a callback averages such weights.
    """
    own = type(module).__name__
    for callback in callbacks:
        if not is_a(callback, WeightAveraging, StochasticWeightAveraging):
            continue
        name, average = type(callback).__name__, vars(callback).get("_average_model")
        require(
            not (is_a(callback, StochasticWeightAveraging) and callback.pl_module_contains_batch_norm(module)),
            f"{name} trains one more epoch for the statistics of batch normalisation in {own}, which a federation does not have: "
            "use Lightning's WeightAveraging, which averages them.",
        )
        require(
            average is None or _shapes(getattr(average, "module", average)) == _shapes(module),
            f"{name} averages the parameters that {own} has at first, to which another callback, such as the gates of FedDP, "
            "adds others: leave one out.",
        )


def _shapes(module: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in module.parameters()]


def check_finetuning(callbacks: Iterable[Callback], module: LightningModule) -> None:
    """Refuse callbacks of Lightning that would freeze nothing, or a part that the module does not have.

    Raises:
        UserError: there is such a callback.
    """
    for callback in callbacks:
        if not is_a(callback, BaseFinetuning):
            continue
        name, frozen = type(callback).__name__, getattr(module, "backbone", None)
        defined_in = type(callback).freeze_before_training.__qualname__.partition(".")[0]  # of either name of Lightning
        require(
            defined_in != "BaseFinetuning",
            f"{name} does not say what it freezes: use BackboneFinetuning, or a class of your own with freeze_before_training.",
        )
        require(
            defined_in != "BackboneFinetuning" or isinstance(frozen, nn.Module),
            f"{name} freezes the part 'backbone', which {type(module).__name__} does not have: give that part this name, or use "
            "a BaseFinetuning of your own.",
        )


def check_monitors(callbacks: Iterable[Callback], logged: Iterable[str]) -> None:
    """Find a misspelt `monitor` before training.

    Training may still log a name that validation did not, so only near misses are refused.

    Raises:
        UserError: a callback monitors a name that differs in a letter or two from a logged one.
    """
    names = list(logged)
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and monitor not in names and get_close_matches(monitor, names, cutoff=0.9):
            raise UserError(
                f"{type(callback).__name__} monitors {monitor!r}, which is not logged; {nearest(monitor, names)}."
            )


def build_fabric(accelerator: Any, strategy: Any, devices: Any, num_nodes: int, precision: Any, plugins: Any) -> Fabric:
    """Return the Fabric that drives a run.

    Raises:
        UserError: a federation cannot use the strategy, the precision or the number of devices.
    """
    check_whole("num_nodes", num_nodes, 1)
    if is_whole(devices):
        check_whole("devices", devices, -1)
    precision = PRECISION_ALIASES.get(str(precision), str(precision or "32-true"))
    require(
        precision in PRECISIONS,
        f"precision {precision!r} is not available in a federation; {nearest(precision, PRECISIONS)}.",
    )
    name = strategy if isinstance(strategy, str) else type(strategy).__name__.lower()
    require(
        not any(sharded in name.replace("_", "") for sharded in SHARDED_STRATEGIES),
        f"strategy {name!r} shards one model over accelerators, which a federation of whole client models cannot use; "
        f"allowed: {', '.join(STRATEGIES)}.",
    )
    # Fabric checks the names of ddp's variants; those that fork or spawn processes are refused below.
    is_known = not isinstance(strategy, str) or name in STRATEGIES or name.startswith("ddp_")
    require(is_known, f"strategy {name!r} is not available in a federation; {nearest(name, STRATEGIES)}.")
    try:
        fabric = Fabric(
            # `auto` would choose Apple's MPS, which has no float64, in which the updates are summed.
            accelerator="cpu" if accelerator == "auto" and MPSAccelerator.is_available() else accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=None if plugins is not None and precision == "32-true" else precision,
            plugins=plugins,
        )
    except (RuntimeError, ValueError, TypeError, MisconfigurationException) as error:
        name = accelerator if isinstance(accelerator, str) else type(accelerator).__name__
        require(
            not any(words in str(error) for words in ("No supported gpu backend found", "can not run on your system")),
            f"accelerator {name!r} finds no device on this machine that torch can use: set accelerator cpu "
            "(--trainer.accelerator cpu).",
        )
        raise UserError(
            f"Fabric cannot be set up with accelerator={accelerator!r}, strategy={strategy!r}, devices={devices!r}: {error}"
        ) from error
    require(
        fabric.device.type != "mps",
        f"accelerator {accelerator!r} is Apple's MPS, which has no float64, in which the updates are summed; "
        "allowed on this machine: cpu.",
    )
    plugin = fabric.strategy.precision
    require(
        not str(plugin.precision).startswith("16"),
        f"the plugin {type(plugin).__name__} computes in {plugin.precision!r}, whose gradients are scaled, which the steps of "
        f"federated methods do not undo; give no such plugin, and one of these as precision: {', '.join(PRECISIONS)}.",
    )
    launcher = fabric.strategy.launcher
    require(
        not isinstance(launcher, MultiProcessingLauncher),
        f"strategy {name!r} forks or spawns its processes, which cannot return the trained model; "
        "allowed: auto and ddp, in a script or at the command line.",
    )
    return fabric


def build_loggers(logger: Logger | Iterable[Logger] | bool | None, root: str) -> list[Logger]:
    """Return the given loggers and the logger of `metrics.csv`; none if `logger` is False."""
    if logger is False:
        return []
    listed_loggers = [] if logger is None or logger is True else listed(logger, Logger)  # type: ignore[type-abstract]
    for one in listed_loggers:
        require(
            not isinstance(one, str | type),
            f"logger must be true, false or objects of Lightning's loggers, got {one!r}.",
        )
    return [*listed_loggers, RoundCSVLogger(root)]


def build_profiler(profiler: Profiler | str | None) -> Profiler:
    """Return the profiler of this name.

    Raises:
        UserError: there is no profiler of this name.
    """
    if isinstance(profiler, str):
        if profiler not in PROFILERS:
            raise UserError(f"profiler {profiler!r} is unknown; {nearest(profiler, PROFILERS)}.")
        return PROFILERS[profiler]()
    return profiler or PassThroughProfiler()


def build_timer(max_time: str | timedelta | dict[str, int] | None) -> Timer | None:
    """Return Lightning's timer, which stops the run after `max_time`.

    Raises:
        UserError: `max_time` is not a duration.
    """
    if max_time is None:
        return None
    try:
        timer = Timer(duration=max_time, interval="epoch")
    except (MisconfigurationException, TypeError, OverflowError) as error:
        raise UserError(f"max_time {max_time!r} is not a duration: use DD:HH:MM:SS, such as 00:02:30:00.") from error
    left = timer.time_remaining()
    require(left is None or left > 0, f"max_time must be longer than 0 seconds, got {max_time!r}.")
    return timer
