"""Session of a fit, validation, test or prediction: attach model and data, and restore everything afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pydoc import locate
from typing import Any
from weakref import proxy

import torch
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities.compile import from_compiled
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch._dynamo import OptimizedModule
from torch.utils.data import DataLoader

from lightning_fl import algorithms
from lightning_fl.algorithms import Algorithm, FedAvg
from lightning_fl.checks import is_a, listed, overrides, parameters_of
from lightning_fl.checks.float32 import Float32, Float32Switches
from lightning_fl.checks.other_names import unknown_class
from lightning_fl.data import FederatedDataModule
from lightning_fl.engine.data_for_module import check_dtype, check_labels
from lightning_fl.errors import UserError, nearest, require
from lightning_fl.evaluation.loops import EvaluationLoop
from lightning_fl.features.loss_guard import LossGuard
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.hooks import Hooks, changes_steps, check_module
from lightning_fl.flat_module.optimizers.manual_optimizers import check_manual
from lightning_fl.internals import DataHookSelector, call, set_torch_flags
from lightning_fl.modules import ImageClassifier
from lightning_fl.outputs.loggers import tell
from lightning_fl.outputs.reservation import Reservation
from lightning_fl.outputs.wandb_run import WandbRun, is_used
from lightning_fl.processes import end_children, gather_objects, gather_tensors
from lightning_fl.trainer import checkpointing
from lightning_fl.trainer.flags import cohort_size
from lightning_fl.trainer.lightning_interface import TrainerInterface
from lightning_fl.trainer.lightning_parts import (
    OF_STEPS,
    check_averaging,
    check_callbacks,
    check_finetuning,
    say_when_callbacks_act,
)
from lightning_fl.trainer.memory_format import prefers_channels_last
from lightning_fl.vectors.pieces import BLOCKS

Given = Algorithm | str | Mapping[str, Any]
"""An algorithm, the name of one, or a mapping with `class_path` and, for its parameters, `init_args`."""


@contextmanager
def session(
    trainer: TrainerInterface,
    fn: TrainerFn,
    model: LightningModule | None,
    datamodule: LightningDataModule | None,
    algorithm: Given | None,
    ckpt_path: str | os.PathLike[str] | None,
    weights_only: bool | None,
) -> Iterator[None]:
    """Attach model, data and algorithm to the trainer, run the body, and restore everything, also after an error.

    Raises:
        UserError: an argument does not fit; raised before anything is trained or written.
    """
    try:
        model, datamodule = _attach(trainer, fn, model, datamodule, algorithm)
    except BaseException:
        trainer.state.status, trainer.state.stage = TrainerStatus.INTERRUPTED, None
        raise
    trainer.reservation = Reservation(trainer.default_root_dir)
    with _modes_of_torch(trainer):
        try:
            _begin(trainer, fn, model, datamodule, ckpt_path, weights_only)
            yield
            call._call_lightning_datamodule_hook(trainer, "teardown", stage=fn)
            call._call_callback_hooks(trainer, "teardown", stage=fn)
            call._call_lightning_module_hook(trainer, "teardown", stage=fn)
            trainer.profiler.describe()
            trainer.state.status = TrainerStatus.FINISHED
            status = "success"
        except BaseException as error:
            trainer.state.status = TrainerStatus.INTERRUPTED
            if trainer.flat_module is not None and not trainer.trains_only_client:
                trainer.flat_module.progress = None  # callbacks save the server's model under its own number of steps
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            for listener in trainer.hooks.listeners("on_exception"):
                with suppress(UserError):  # such as that there is no run to save yet; of two errors the first is shown
                    listener(error)
            datamodule.on_exception(error)
            trainer.fit_loop.delete_unused_states()
            end_children(trainer.fabric)
            if isinstance(error, torch.OutOfMemoryError):
                raise UserError(_memory_sentence(error)) from error
            raise
        finally:
            trainer.checkpoint = None
            tell(trainer, lambda logger: logger.finalize(status))
            trainer.reservation.end()
            _end_workers(trainer)
            _release(trainer)
            BLOCKS.release()
            trainer.state.stage = None


@contextmanager
def _modes_of_torch(trainer: TrainerInterface) -> Iterator[None]:
    """Set torch's global switches by the trainer's flags; restore them, and the number of threads, at the end."""
    detects, deterministic = torch.is_anomaly_enabled(), torch.are_deterministic_algorithms_enabled()
    only_warns, benchmark = torch.is_deterministic_algorithms_warn_only_enabled(), torch.backends.cudnn.benchmark
    float32, num_threads = Float32Switches.now(), torch.get_num_threads()
    caches = torch.is_autocast_cache_enabled()
    try:
        if isinstance(trainer.fabric.strategy.precision, MixedPrecision):
            torch.set_autocast_cache_enabled(False)  # a step may change weights and go on, as in Lightning's own plugin
        torch.autograd.set_detect_anomaly(trainer.detect_anomaly or detects)
        set_torch_flags(deterministic=trainer.deterministic, benchmark=trainer.benchmark)
        if trainer.float32_precision is not None:
            Float32.of(trainer.float32_precision).set()
        yield
    finally:
        torch.autograd.set_detect_anomaly(detects)
        torch.use_deterministic_algorithms(deterministic, warn_only=only_warns)
        torch.backends.cudnn.benchmark = benchmark
        float32.restore()
        torch.set_autocast_cache_enabled(caches)
        torch.set_num_threads(num_threads)


def _begin(
    trainer: TrainerInterface,
    fn: TrainerFn,
    model: LightningModule,
    datamodule: FederatedDataModule,
    ckpt_path: str | os.PathLike[str] | None,
    weights_only: bool | None,
) -> None:
    """Check what is attached to the trainer, set it up in Lightning's order, and move it to the accelerator."""
    check_callbacks(
        trainer.callbacks, trainer.by_lightning or not trainer.fitting
    )  # also those of module and algorithm
    brings_data = getattr(datamodule, "datamodule", None) is model
    _prepare_data(trainer, datamodule, *[] if brings_data else [model])
    trainer.fabric.barrier()
    check_finetuning(trainer.callbacks, model)
    if brings_data:  # which the data module sets up as its own
        call._call_callback_hooks(trainer, "setup", stage=fn)
    call._call_lightning_datamodule_hook(trainer, "setup", stage=fn)
    if trainer.fitting:
        if datamodule.reads_own_loaders:
            _take_own_loaders(trainer)
        else:
            _check_divided(trainer, model)
        check_module(model, trainer.by_lightning)
        _check_manual(trainer, model)
        _check_images(model, datamodule)
    check_labels(model, datamodule)
    if trainer.fitting:
        cohort_size(trainer.clients_per_round, int((datamodule.client_indices.sizes > 0).sum()))
        _reserve_folder(trainer)
    trainer.weights_only = weights_only is not False
    trainer._checkpoint_connector._ckpt_path = checkpointing.resolve(trainer, ckpt_path)
    vars(trainer.profiler)["_lightning_module"] = proxy(model)  # whose parts PyTorchProfiler names
    local_rank = trainer.local_rank if trainer.world_size > 1 else None  # of which Lightning names the file
    trainer.profiler.setup(stage=fn.value, local_rank=local_rank, log_dir=trainer.log_dir)
    _set_up(trainer, fn, model, brings_data)
    trainer.checkpoint = checkpointing.read_checkpoint(trainer)
    _place(trainer, model, datamodule)
    check_dtype(model, datamodule, trainer.fabric)


def _check_manual(trainer: TrainerInterface, model: LightningModule) -> None:
    """Raise `UserError` if the method or a flag does not leave the steps to a module with manual optimisation."""
    flags = {
        "accumulate_grad_batches": trainer.accumulate_grad_batches if trainer.accumulate_grad_batches > 1 else None,
        "gradient_clip_val": trainer.gradient_clip_val,
        "client_optimizer": "sgd" if trainer.client_optimizer == "sgd" else None,
        "loss_guard": None if trainer.loss_guard == LossGuard() else trainer.loss_guard,
    }
    method = trainer.algorithm
    check_manual(model, method.name, [*method.rules(), *method.personal], flags)


def _take_own_loaders(trainer: TrainerInterface) -> None:
    """Let Lightning's own loop train clients that read loaders of their own.

    Raises:
        UserError: a flag needs samples that are divided, or another runner.
    """
    require(
        trainer.runner in ("auto", "lightning"),
        f"runner {trainer.runner!r} reads divided samples, but here clients read loaders of their own: use runner "
        "'auto' or 'lightning'.",
    )
    for flag, given in (
        ("straggler_rate", trainer.straggler_rate > 0),
        ("loss_guard.clients", trainer.loss_guard.clients is not None),
        ("devices_per_client", trainer.devices_per_client > 1),
    ):
        require(
            not given,
            f"trainer.{flag} needs the number of each client's samples, which loaders of their own do not tell: leave it out.",
        )
    trainer.by_lightning = trainer.strategy.by_lightning = True


def _check_divided(trainer: TrainerInterface, model: LightningModule) -> None:
    """Raise `UserError` if a flag or the module needs clients that read loaders of their own, but samples are divided."""
    require(
        not trainer.reload_dataloaders_every_n_epochs,
        "reload_dataloaders_every_n_epochs requests loaders anew, but the samples of a client do not change in a run: leave it "
        "out, or let clients read loaders of their own (client_loaders of Federated).",
    )
    require(
        not is_param_in_hook_signature(model.training_step, "dataloader_iter", explicit=True),
        f"training_step of {type(model).__name__} takes dataloader_iter, which only clients with loaders of their own have: take "
        "(batch, batch_idx), or give Federated client_loaders.",
    )


def _memory_sentence(error: torch.OutOfMemoryError) -> str:
    """Say what one step needed, what there is, and what helps."""
    needed = " ".join(f"{' '.join(str(error).split())}. ".split(". ")[:3]).strip()
    where = " ".join(note.rstrip(".") for note in getattr(error, "__notes__", [])[:1])
    return (
        f"the accelerator's memory does not suffice{f' ({where})' if where else ''}: {needed.rstrip('.')}. Use a smaller "
        "data.batch_size (data.eval_batch_size in an evaluation), a smaller network, trainer.precision bf16-true, or an "
        "accelerator with more memory; a fit goes on from its checkpoint with --ckpt_path last."
    )


def _set_up(trainer: TrainerInterface, fn: TrainerFn, model: LightningModule, brings_data: bool) -> None:
    """Set up callbacks and the module, unless the module brings the data: then both are set up already."""
    if not brings_data:
        call._call_callback_hooks(trainer, "setup", stage=fn)
        call._call_lightning_module_hook(trainer, "setup", stage=fn)
    for name in ("configure_sharded_model", "configure_model"):  # the first is Lightning's old name
        if overrides(name, model):
            with trainer.fabric.strategy.precision.module_init_context():
                getattr(model, name)()
    if trainer.fitting:
        check_averaging(trainer.callbacks, model)
        if not trainer.trains_only_client:
            say_when_callbacks_act(trainer.callbacks)


def _prepare_data(trainer: TrainerInterface, *parts: LightningDataModule | LightningModule) -> None:
    """Call `prepare_data` once a machine, or once in all if `prepare_data_per_node` is False."""
    for part in parts:
        if trainer.local_rank == 0 and (part.prepare_data_per_node or trainer.node_rank == 0):
            part.prepare_data()


def _reserve_folder(trainer: TrainerInterface) -> None:
    """Reserve the run's folder in the process that writes to it; every process raises its refusal."""
    refusal = ""
    writes = trainer.enable_checkpointing or (trainer.loggers and not trainer.fast_dev_run)
    if trainer.is_global_zero and writes:
        try:
            trainer.reservation.begin()
        except UserError as error:
            refusal = str(error)
    refusal = trainer.fabric.broadcast(refusal)
    require(not refusal, refusal)


def _attach(
    trainer: TrainerInterface,
    fn: TrainerFn,
    model: LightningModule | None,
    datamodule: LightningDataModule | None,
    algorithm: Given | None,
) -> tuple[LightningModule, FederatedDataModule]:
    """Attach model, data and algorithm to the trainer; outside `fit`, those of the last session replace missing ones."""
    if fn != TrainerFn.FITTING:
        model = getattr(trainer, "lightning_module", None) if model is None else model
        datamodule = getattr(trainer, "datamodule", None) if datamodule is None else datamodule
        algorithm = getattr(trainer, "algorithm", None) if algorithm is None else algorithm
    if model is None:
        raise UserError("there is no model to evaluate: give one, or call fit first.")
    if isinstance(model, OptimizedModule):  # torch.compile(module)
        model = from_compiled(model)
    if not is_a(model, LightningModule):
        raise UserError(f"model must be a LightningModule, got {type(model).__name__}.")
    if not isinstance(datamodule, FederatedDataModule):
        raise UserError(
            f"datamodule must be a FederatedDataModule, got {type(datamodule).__name__}: "
            "lightning_fl.data.Federated(datamodule, num_clients=…) converts any other"
            f"{', also of a LightningDataModule with this loader' if isinstance(datamodule, DataLoader) else ''}"
            f"{'' if fn == TrainerFn.FITTING else f'; lightning.Trainer().{fn.value} takes the trained model and any data'}."
        )
    method = algorithm_of(algorithm)
    stage = RunningStage.TRAINING if fn == TrainerFn.FITTING else RunningStage(fn.value)
    trainer.state.fn, trainer.state.stage, trainer.state.status = fn, stage, TrainerStatus.RUNNING
    if fn == TrainerFn.FITTING:
        trainer.__dict__.pop("run", None)
        trainer.fit_loop.begin()
        trainer.estimated_steps = None
        trainer.metric, trainer.metric_mode = trainer.given_metric
    trainer.datamodule, trainer.algorithm = datamodule, method
    trainer.strategy.connect(model)
    trainer._data_connector._datahook_selector = _BatchHooks(model, datamodule)
    trainer.fit_loop._combined_loader = None
    for loop in _evaluation_loops(trainer):
        loop._combined_loader, loop._max_batches, loop._data_source.instance = None, [], datamodule
    trainer.predict_loop._combined_loader, trainer.predict_loop.max_batches = None, []
    trainer.predict_loop._data_source.instance = datamodule
    trainer.should_stop = False
    trainer._logger_connector.reset_metrics()
    for part in model.modules():  # parts may be of Lightning's other name, which the model does not know
        if is_a(part, LightningModule):
            part.trainer, part._device = trainer, trainer.strategy.root_device  # where it is after `setup`
    datamodule.trainer = trainer
    _arrange_callbacks(trainer, model)
    needs_lightning = bool(changes_steps(model)) or any(is_a(callback, *OF_STEPS) for callback in trainer.callbacks)
    by_lightning = trainer.runner == "lightning" or (trainer.runner == "auto" and needs_lightning)
    trainer.by_lightning = trainer.strategy.by_lightning = trainer.fitting and by_lightning
    trainer.hooks = trainer.strategy.hooks = Hooks(trainer, model, datamodule, trainer.callbacks)
    return model, datamodule


class _BatchHooks(DataHookSelector):
    """Selector of the owner of a batch hook: the data module if it has one, of either name of Lightning, else the module."""

    def get_instance(self, hook_name: str) -> Any:
        return self.datamodule if overrides(hook_name, self.datamodule) else self.model


def _evaluation_loops(trainer: TrainerInterface) -> list[EvaluationLoop]:
    """Return the loops that validate in a fit, validate and test."""
    return [trainer.fit_loop.val_loop, trainer.validate_loop, trainer.test_loop]


def algorithm_of(method: Given | None) -> Algorithm:
    """Return the algorithm that a user names; FedAvg for None.

    >>> algorithm_of({"class_path": "FedProx", "init_args": {"mu": 0.1}}).rule
    Proximal(mu=0.1)

    Raises:
        UserError: there is no such algorithm, or it has no such parameter.
    """
    if method is None:
        return FedAvg()
    if isinstance(method, Algorithm):
        return method
    own_name = getattr(method, "__name__", "")
    require(
        not isinstance(method, type),
        f"algorithm is the class {own_name}: give an object, {own_name}(…), or its name.",
    )
    method = {"class_path": method} if isinstance(method, str) else method
    require(
        isinstance(method, Mapping),
        f"algorithm must be an Algorithm, its name, or a mapping with class_path and init_args, got {method!r}.",
    )
    require(
        "class_path" in method and method.keys() <= {"class_path", "init_args"},
        f"algorithm as a mapping has the keys class_path and init_args, got {', '.join(map(str, method))}.",
    )
    name, arguments = str(method["class_path"]), method.get("init_args", {})
    methods = {methods: getattr(algorithms, methods) for methods in algorithms.__all__}
    method_class: Any = methods.get(name) or (locate(name) if "." in name else None)
    require(
        isinstance(method_class, type) and issubclass(method_class, Algorithm),
        f"algorithm {name!r} is unknown; {unknown_class(name, methods)}.",
    )
    require(
        isinstance(arguments, Mapping),
        f"init_args of {method_class.__name__} must be a mapping with its parameters, got {arguments!r}.",
    )
    parameters = parameters_of(method_class)
    for argument in arguments:
        require(
            argument in parameters,
            f"{method_class.__name__} has no parameter {argument!r}; {nearest(str(argument), parameters)}.",
        )
    inner = {
        name: algorithm_of(value) if isinstance(value, Mapping) and value.get("class_path") in methods else value
        for name, value in arguments.items()
    }
    return method_class(**inner)


def _check_images(model: LightningModule, data: FederatedDataModule) -> None:
    """Raise `UserError` if an image classifier of this package takes other images than the data have, or has fewer classes."""
    if not isinstance(model, ImageClassifier):
        return
    name, owner, classes = type(model).__name__, type(data).__name__, model.hparams.get("num_classes")
    require(
        classes is None or data.num_classes is None or classes >= data.num_classes,
        f"{name} has {classes} classes, but {owner} has {data.num_classes}: give it num_classes={data.num_classes}, or {owner} "
        f"num_classes={classes} if its samples have no others.",
    )
    channels, size, example = data.in_channels, data.image_size, model.example_input_array
    if not isinstance(example, torch.Tensor) or channels is None or size is None:
        return
    require(
        example.shape[1:] == (channels, size, size),
        f"{name} takes {'×'.join(map(str, example.shape[1:]))} images, but {owner} has {channels}×{size}×{size}: "
        f"give it in_channels={channels} and image_size={size}.",
    )


def _arrange_callbacks(trainer: TrainerInterface, model: LightningModule) -> None:
    """Put the callbacks of module and algorithm into the trainer's list."""
    of_module = listed(model.configure_callbacks(), Callback)
    if replaced := trainer.callback_list.replaced(of_module):
        names = " and ".join(sorted(kind.__name__ for kind in replaced))
        rank_zero_info(f"configure_callbacks of {type(model).__name__} replaces the trainer's {names}.")
    first = [WandbRun()] if trainer.fitting and is_used(trainer) else []
    trainer.callback_list.arrange(trainer, first, of_module, trainer.algorithm.configure_callbacks())


def _place(trainer: TrainerInterface, model: LightningModule, datamodule: FederatedDataModule) -> None:
    """Move model and data to the accelerator, and bind the model to flat storage."""
    precision = trainer.fabric.strategy.precision
    model.to(trainer.fabric.device)
    precision.convert_module(model)
    if not str(trainer.precision).endswith("mixed"):  # which leaves the module as it is
        # ModelSummary runs it through the converted module, without the conversion that every batch gets.
        model.example_input_array = precision.convert_input(model.example_input_array)
    channels_last = trainer.channels_last
    if channels_last is None:
        channels_last = not trainer.by_lightning and prefers_channels_last(model, trainer.fabric.device)
    owned = trainer.algorithm.owned(model)
    named = (*model.named_parameters(), *model.named_buffers())
    personal = [name for name, _ in named if name in owned.parameters | owned.buffers]
    require(
        trainer.algorithm.model_keeper is None or not personal,
        f"{trainer.algorithm.name}'s clients keep a whole model of their own, so they cannot keep {personal[:1]} of the "
        "server's, too: use a base method without personal parts.",
    )
    trainer.flat_module = FlatModule(model, trainer.fabric, trainer.hooks, channels_last, personal)
    datamodule.place(trainer.fabric.device)
    if trainer.world_size > 1:
        trainer.flat_module.logs.gather = partial(gather_objects, trainer.fabric)
        trainer.flat_module.logs.gather_tensors = partial(gather_tensors, trainer.fabric)
    model.log = trainer.flat_module.logs.log  # type: ignore[method-assign]
    for callback in trainer.callbacks:  # whose `log` is the module's, as in Lightning
        for name in ("log", "log_dict"):
            setattr(callback, name, partial(_call, model, name))


def _call(module: LightningModule, name: str, /, *arguments: Any, **options: Any) -> Any:
    """Call the module's present method: in a client's training another one than in an evaluation."""
    return getattr(module, name)(*arguments, **options)


def _end_workers(trainer: TrainerInterface) -> None:
    """End the workers of loaders, also those that a loader keeps from pass to pass, as Lightning does."""
    if "train" in vars(trainer.data):
        trainer.data.train.end_workers()
    loops = (trainer.fit_loop, *_evaluation_loops(trainer), trainer.predict_loop)
    for loaders in (*trainer.fit_loop.loaders_of_clients, *(loop._combined_loader for loop in loops)):
        if loaders is not None:
            loaders.reset()


def _release(trainer: TrainerInterface) -> None:
    """Give the module its own tensors (after a fit, with the server's values) and its own `log` again."""
    if trainer.flat_module is None:
        return
    # After an error the module may be pruned while the run is not.
    if trainer.fitting and "run" in vars(trainer) and trainer.flat_module.holds(trainer.run.layout):
        trainer.flat_module.load_server_model(trainer.run)
    trainer.lightning_module.__dict__.pop("log", None)
    trainer.lightning_module._metric_attributes = None  # `setup` of the next session may make other metrics
    for callback in trainer.callbacks:
        vars(callback).pop("log", None)
        vars(callback).pop("log_dict", None)
    trainer.flat_module.release()
    trainer.flat_module = None
    if not trainer.by_lightning:  # whose optimisers hold the module's own parameters, and stay as in Lightning
        trainer.strategy.adopt(None)
