"""Call Lightning's hooks in Lightning's order: callbacks, then the module.

A hook that nothing overrides costs nothing in the training loop, because its list is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, ProgressBar, WeightAveraging
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_fl.callbacks import TargetReached
from lightning_fl.checks import hook_owner, is_a, overrides
from lightning_fl.checks.swapped_attributes import swapped
from lightning_fl.data.wrapped_datamodule import BATCH_HOOKS
from lightning_fl.errors import UserError, nearest
from lightning_fl.outputs.clients.distribution import is_over_clients

# Hooks of a LightningModule that change the optimiser step, which only Lightning's own loop calls.
OF_STEPS = (
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
)
STEP_HOOKS = ("on_train_batch_start", "on_train_batch_end")
COUNTERS = ("epoch", "step")
"""Names that ModelCheckpoint may monitor although nobody logs them."""
SERVER_CALLBACKS = (Checkpoint, WeightAveraging)
"""Callbacks that save or average the model: in a federation the server's after a round, not a client's in training."""


class StepListeners(NamedTuple):
    """Functions to call during a client's step, by the name of the hook."""

    on_train_batch_start: Sequence[Callable[..., Any]]
    on_before_backward: Sequence[Callable[..., Any]]
    on_after_backward: Sequence[Callable[..., Any]]
    on_before_optimizer_step: Sequence[Callable[..., Any]]
    on_before_zero_grad: Sequence[Callable[..., Any]]
    on_train_batch_end: Sequence[Callable[..., Any]]

    def end_batch(self, loss: Tensor | None, output: Any, batch: Any, batch_index: int) -> None:
        """Call the listeners after a batch, with the loss and the other entries of a mapping from `training_step`."""
        extra = output if isinstance(output, Mapping) else {}
        outputs = {} if loss is None else {"loss": loss.detach(), **{n: x for n, x in extra.items() if n != "loss"}}
        for listener in self.on_train_batch_end:
            listener(outputs, batch, batch_index)


class Hooks:
    """Call the hooks of callbacks and module.

    Attributes:
        callbacks: all callbacks, also those that are left out while Lightning's own loop or a measurement runs.
        changes_batches: True if module or datamodule change batches on their way to the accelerator.
        hides_steps: True while the server trains before the first round, whose steps no callback sees.
    """

    def __init__(
        self, trainer: Any, module: LightningModule, datamodule: LightningDataModule, callbacks: Sequence[Callback]
    ) -> None:
        self._trainer = trainer
        self._module = module
        self.callbacks = self._callbacks = callbacks
        self.hides_steps = False
        self._listeners: dict[tuple[str, bool | None], list[Callable[..., Any]]] = {}
        self._reading: dict[str, bool] = {}
        # As in Lightning, the datamodule's batch hooks replace the module's.
        self._batch_hooks = [
            getattr(datamodule if overrides(name, datamodule) else module, name) for name in BATCH_HOOKS
        ]
        self.changes_batches = any(overrides(name, datamodule) or overrides(name, module) for name in BATCH_HOOKS)

    def listeners(self, name: str, monitoring: bool | None = None) -> list[Callable[..., Any]]:
        """Return the functions to call with the hook's arguments that follow (trainer, module); computed once for each hook.

        Args:
            name: name of the hook.
            monitoring: True for callbacks that monitor metrics (EarlyStopping, ModelCheckpoint), False for the others and the
                module, None for all.
        """
        if (name, monitoring) not in self._listeners:
            functions = [
                self._bound(callback, name)
                for callback in self._callbacks
                if monitoring in (None, is_a(callback, Checkpoint, EarlyStopping))
                and _overrides(callback, name)
                and not (name in STEP_HOOKS and is_a(callback, *SERVER_CALLBACKS))
            ]
            if not monitoring and self.module_overrides(name):
                hook = getattr(self._module, name)
                functions.append(_never_skipping(hook, self._module) if name == "on_train_batch_start" else hook)
            self._listeners[name, monitoring] = functions
        return self._listeners[name, monitoring]

    def module_overrides(self, name: str) -> bool:
        """True if the module has its own hook of this name, which is no hook that Lightning calls on callbacks only."""
        if name in vars(self._module):  # put on the object; Lightning leaves out None
            return callable(vars(self._module)[name])
        if hasattr(LightningModule, name):
            return overrides(name, self._module)
        return hasattr(self._module, name) and not hasattr(Callback, name)

    def _bound(self, callback: Callback, name: str) -> Callable[..., Any]:
        bound = partial(getattr(callback, name), self._trainer, self._module)
        return _counting_batches(bound, self._trainer) if name in STEP_HOOKS and is_a(callback, ProgressBar) else bound

    def read_targets(self) -> None:
        """Let `TargetReached` read what the module has logged in its own `on_train_epoch_end`."""
        for callback in self._callbacks:
            if isinstance(callback, TargetReached):
                callback.read_last(self._trainer, self._module)

    def after_round(self, num_batches: int) -> None:
        """Let the callbacks that save or average the server's model see the steps of a round."""
        for callback in self._callbacks:
            if is_a(callback, *SERVER_CALLBACKS):
                callback.on_train_batch_end(self._trainer, self._module, None, None, num_batches - 1)

    @property
    def probes(self) -> list[Callback]:
        """Callbacks that measure each model of a validation."""
        return [callback for callback in self._callbacks if getattr(callback, "probes_models", False)]

    def step_listeners(self) -> StepListeners:
        """Return the functions of all hooks within a local training."""
        with self.without_callbacks() if self.hides_steps else nullcontext():
            return StepListeners(*map(self.listeners, StepListeners._fields))

    def without_callbacks(self) -> AbstractContextManager[None]:
        """Call the hooks of the module alone, for a training that no callback should notice."""
        return swapped(self, _callbacks=(), _listeners={}, _reading={})

    def overridden_by(self, name: str) -> list[str]:
        """Return the class names of the hook's callbacks and module, without Lightning's own callbacks."""
        listening: list[Any] = [
            c
            for c in self._callbacks
            if not type(c).__module__.startswith(("lightning.", "pytorch_lightning.")) and _overrides(c, name)
        ]
        if self.module_overrides(name):
            listening.append(self._module)
        return [type(listener).__name__ for listener in listening]

    def reads_module(self, name: str) -> bool:
        """True if the module, or a callback other than a progress bar, has this hook, and so may read the module in it.

        Computed once for each hook.
        """
        if name not in self._reading:
            others = (callback for callback in self._callbacks if not is_a(callback, ProgressBar))
            overriding = any(_overrides(callback, name) for callback in others)
            self._reading[name] = overriding or self.module_overrides(name)
        return self._reading[name]

    def transfer_batch(self, batch: Any, device: torch.device) -> Any:
        """Move a batch to the accelerator with the hooks of module or datamodule."""
        before, transfer, after = self._batch_hooks
        return after(transfer(before(batch, 0), device, 0), 0)

    def call(self, name: str, *arguments: Any, monitoring: bool | None = None) -> None:
        """Call a hook of callbacks and module; `monitoring` selects among them as in `listeners`."""
        for listener in self.listeners(name, monitoring):
            listener(*arguments)


def _overrides(callback: Callback, name: str) -> bool:
    base = hook_owner(type(callback)) or Callback
    return name in vars(callback) or getattr(type(callback), name, None) is not getattr(base, name, None)


def _counting_batches(hook: Callable[..., Any], trainer: Any) -> Callable[..., Any]:
    """Count a progress bar's batches over all clients of the round, as its total does; the server's own batches are left out."""
    counted_round, count = -1, 0

    def call(*arguments: Any) -> None:
        nonlocal counted_round, count
        if trainer.current_epoch != counted_round:
            counted_round, count = trainer.current_epoch, 0
        if count < trainer.round_batches:
            hook(*arguments[:-1], count)
            count += 1

    return call


def _never_skipping(hook: Callable[..., Any], module: LightningModule) -> Callable[..., None]:
    """Refuse to skip the rest of an epoch, which Lightning does if the module's `on_train_batch_start` returns -1."""

    def call(*arguments: Any) -> None:
        if hook(*arguments) == -1:
            raise UserError(
                f"on_train_batch_start of {type(module).__name__} returns -1 to skip the rest of the epoch, but clients of a "
                "federation train on all their batches: use trainer.limit_train_batches, or return None from training_step."
            )

    return call


def changes_steps(module: LightningModule) -> list[str]:
    """Return the hooks by which a module changes its optimiser's steps, which only Lightning's own loop calls."""
    return [name for name in OF_STEPS if overrides(name, module)]


def check_module(module: LightningModule, by_lightning: bool) -> None:
    """Check that a federation can train a module.

    Args:
        module: the module.
        by_lightning: True if Lightning's own loop trains the clients.

    Raises:
        UserError: it cannot; the sentence lists all reasons at once.
    """
    hooks = [] if by_lightning else changes_steps(module)
    problems = [f"it overrides {name}, which only runner 'lightning' calls" for name in hooks]
    if not overrides("training_step", module):
        problems.append("it has no training_step")
    elif is_param_in_hook_signature(module.training_step, "optimizer_idx", explicit=True):
        problems.append(
            "its training_step takes optimizer_idx, which Lightning passed before 2.0: with automatic_optimization = False it "
            "steps several optimizers itself"
        )
    if not overrides("configure_optimizers", module):
        problems.append(
            "it has no configure_optimizers (at the command line, --optimizer SGD --optimizer.lr 0.1 stands in for it)"
        )
    if problems:
        raise UserError(f"{type(module).__name__} cannot be trained in this federation: {'; '.join(problems)}.")


def check_sizes(module: LightningModule) -> None:
    """Raise `UserError` if a lazy layer does not know its size yet."""
    lazy = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if is_lazy(tensor)]
    if lazy:
        raise UserError(
            f"{', '.join(map(repr, lazy))} of {type(module).__name__} belong to lazy layers without a size: call the module on a "
            "batch before the run, for instance in its configure_model."
        )


def check_real(module: LightningModule) -> None:
    """Raise `UserError` if a trainable parameter or a buffer is complex."""
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for name, tensor in [*trained, *module.named_buffers()]:
        if tensor.is_complex():
            raise UserError(
                f"{name!r} of {type(module).__name__} is {tensor.dtype}, but a federation averages real numbers: keep "
                "torch.view_as_real of it, or, if it is a constant, an attribute that is no buffer."
            )


def changed_shape(module: LightningModule, name: str, buffer: Tensor | None, shape: torch.Size) -> UserError:
    """Return the error that a buffer changed its shape in a training."""
    now = "became None" if buffer is None else f"changed its shape to {tuple(buffer.shape)}"
    return UserError(
        f"the buffer {name!r} of {type(module).__name__} of shape {tuple(shape)} {now}, but clients exchange "
        "buffers of constant shape: keep it as an attribute that is no buffer."
    )


def check_watched(callbacks: Iterable[Callback], logged: Iterable[str]) -> None:
    """Refuse callbacks that monitor a metric which the first validated round did not log.

    Raises:
        UserError: there is one; the sentence names the nearest logged metric.
    """
    names, callbacks = [*logged, *COUNTERS], list(callbacks)
    # It checks the names of its statistics itself, in the first round that has them.
    over_clients = any(getattr(callback, "logs_over_clients", False) for callback in callbacks)
    for callback in callbacks:
        needs = (
            (is_a(callback, EarlyStopping) and callback.strict)
            or (is_a(callback, ModelCheckpoint) and callback.save_top_k != 0)
            or isinstance(callback, TargetReached)
        )
        monitor = getattr(callback, "monitor", None)
        needs = needs and not (over_clients and is_over_clients(str(monitor)))
        if needs and monitor is not None and monitor not in names:
            raise UserError(
                f"{type(callback).__name__} monitors {monitor!r}, which is not logged; {nearest(monitor, names)}."
            )
