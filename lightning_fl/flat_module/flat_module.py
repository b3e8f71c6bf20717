"""The one working module of a process: its parameters are views of flat vectors, so that one copy loads a client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_fl.data.descriptions import describe_batch
from lightning_fl.errors import UserError, add_note, require
from lightning_fl.flat_module.compiled_evaluation import CompiledEvaluation
from lightning_fl.flat_module.compiled_step import CompiledStep
from lightning_fl.flat_module.convolution_chains import ConvolutionChains
from lightning_fl.flat_module.form import Form
from lightning_fl.flat_module.global_generators import GlobalGenerators
from lightning_fl.flat_module.hooks import Hooks, changed_shape, check_real, check_sizes
from lightning_fl.flat_module.local_progress import LocalProgress
from lightning_fl.flat_module.module_buffers import ModuleBuffers, bind, unsaved_buffers
from lightning_fl.flat_module.module_gradient import ModuleGradient
from lightning_fl.flat_module.module_logs import LogCollector
from lightning_fl.flat_module.optimizers.manual_optimizers import ManualOptimizers
from lightning_fl.flat_module.optimizers.module_optimizer import ModuleOptimizer
from lightning_fl.flat_module.optimizers.personal_optimizer import PersonalOptimizer
from lightning_fl.flat_module.ordered_dropout import OrderedDropout
from lightning_fl.flat_module.personal_tensors import PersonalTensors
from lightning_fl.flat_module.plain_attributes import SharedByClients
from lightning_fl.flat_module.smaller_network import SmallerNetwork, SmallerNetworks
from lightning_fl.pruning import Plan, plans_of
from lightning_fl.pruning.apply_plan import PLANS, replace_data, tell_shape
from lightning_fl.slots import Width
from lightning_fl.state.run_state import Run
from lightning_fl.vectors import pieces
from lightning_fl.vectors.layout import Layout, Tree, common_dtype, holders_of
from lightning_fl.vectors.personal import initially_owned

ENTRIES = 64
"""Approximate number of entries of each frozen parameter that are compared after a round."""


class FlatModule:
    """A LightningModule bound to flat storage.

    Attributes:
        module: the module, on the accelerator.
        fabric: Lightning Fabric, for precision, autocast and backward.
        hooks: calls Lightning's hooks.
        logs: collects the values that the module logs.
        layout: positions of the trainable parameters, without the personal ones.
        parameters: the module's trainable parameters in the order of the layout; views of `params` (d,).
        personal: the parameters and buffers that each client owns.
        trainable: the trainable parameters of both.
        gradient: the gradients of all of them.
        buffer_layout, buffers: layout and vector (d_b,) of the shared float buffers.
        optimizer: drives the module's optimiser; set by `configure_optimizer`.
        personal_optimizer: steps the personal parameters; set by `configure_optimizer`.
        reads_gradient: True if gradients are gathered in one vector.
        own_parts: the module and its parts, without torch's own layers, whose attributes no training changes.
        trained_at_first: names of the parameters that needed a gradient when the module was bound.
        takes_index: True if `training_step` takes the batch's index.
        skips_single_samples: True if a last batch of one sample is left out.
        progress: progress of the present local training; None between trainings.
        shared_by_clients: says which attributes clients pass on to each other.
        chains: context in which the module computes its convolutions, within a step.
        generators: the global random generators that the module may draw from.
        smaller: smaller networks that clients train; None until they are asked for.
        dropout: draws the units of every step; None unless clients train with ordered dropout.
        compiled: computes losses and gradients by compiled graphs; None if the run asks for none.
        compiled_evaluation: the same for the steps of validation and test.
    """

    optimizer: ModuleOptimizer | ManualOptimizers
    personal_optimizer: PersonalOptimizer

    def __init__(
        self,
        module: LightningModule,
        fabric: Fabric,
        hooks: Hooks,
        channels_last: bool,
        personal: Collection[str] = (),  # names of parameters and buffers
    ) -> None:
        self.module = module
        self.fabric = fabric
        self.hooks = hooks
        self.logs = LogCollector(lambda: self.progress is not None, module)
        self._channels_last = channels_last
        self._personal_names = frozenset(personal)
        self.smaller: SmallerNetworks | None = None
        self.dropout: OrderedDropout | None = None
        self.compiled: CompiledStep | None = None
        self.compiled_evaluation: CompiledEvaluation | None = None
        self._forms: dict[Layout, Form] = {}
        self._whole: Form | None = None
        self.trained_at_first = trainable_names(module)
        self._trained = self.trained_at_first
        self._lay_out()
        self.takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self.progress: LocalProgress | None = None
        self.shared_by_clients = SharedByClients(module)
        self.generators = GlobalGenerators(fabric.device)
        self.skips_single_samples = has_batch_norm(module)

    def _lay_out(self) -> None:
        """Gather parameters and float buffers in flat vectors, and make the module's own tensors views of them."""
        check_sizes(self.module)
        self._plans = plans_of(self.module)
        self.own_parts = [part for part in self.module.modules() if not type(part).__module__.startswith("torch.nn.")]
        owned, place = self._personal_names, self.fabric.device
        named = {name: p for name, p in self.module.named_parameters() if name in self._trained}
        self._frozen = {name: p for name, p in self.module.named_parameters() if name not in named}
        trainable = {name: p for name, p in named.items() if name not in owned}
        dtype = common_dtype(named)
        self.layout = Layout.of(trainable)
        self.params = bind(self.layout, trainable, dtype, place)
        self.parameters = list(trainable.values())

        self._attributes = holders_of(self.module)
        buffers = dict(self.module.named_buffers())
        self._buffer_shapes = {name: (buffer.shape, buffer.dtype) for name, buffer in buffers.items()}
        shared = {name: buffer for name, buffer in buffers.items() if name not in owned}
        self._shared_buffers = ModuleBuffers(shared, dtype, place, self.buffer, unsaved_buffers(self.module))
        self.buffer_layout, self.buffers = self._shared_buffers.layout, self._shared_buffers.vector

        personal = {name: p for name, p in named.items() if name in owned}
        personal_buffers = {name: buffer for name, buffer in buffers.items() if name in owned}
        self.personal = PersonalTensors(personal, personal_buffers, dtype, place, self.buffer)
        self.gradient = self._new_gradient()
        self.trainable = [*self.parameters, *personal.values()]
        views = self.layout.views(self.params) | self.personal.layout.views(self.personal.vector)
        self._views = list(views.values())
        self._addresses = [view.data_ptr() for view in self._views]
        self.chains = ConvolutionChains(self.module, self._channels_last)
        for part in self.module.modules():
            if isinstance(part, nn.RNNBase):
                # On CUDA it moves the weights to storage of their own, in many a module's `forward` and in torch itself.
                part.flatten_parameters = _stay  # type: ignore[method-assign]

    @property
    def unfrozen(self) -> list[str]:
        """Names of parameters that have begun to train since the module was laid out, so that no message carries them yet."""
        return [name for name, parameter in self._frozen.items() if parameter.requires_grad]

    @property
    def untrained(self) -> list[str]:
        """Names in the layout that no gradient moves: the optimiser lacks them, or the module has frozen them since."""
        stepped, named = self.optimizer.names, zip(self.layout.names, self.parameters, strict=True)
        return [name for name, parameter in named if name not in stepped or not parameter.requires_grad]

    @property
    def trained_names(self) -> frozenset[str]:
        """Names of the parameters that need a gradient at present; they stay the same if something renames a parameter."""
        named = {**dict(zip(self.layout.names, self.parameters, strict=True)), **self.personal.leaves, **self._frozen}
        return frozenset(name for name, parameter in named.items() if parameter.requires_grad)

    def sample_frozen(self) -> Tree:
        """Return copies of a few entries of each frozen parameter, by name, which tell whether a training moves it."""
        frozen = {name: p.detach().flatten() for name, p in self._frozen.items() if type(p) is nn.Parameter}
        return {name: entries[:: max(1, len(entries) // ENTRIES)].clone() for name, entries in frozen.items()}

    def require_unmoved(self, before: Tree) -> None:
        """Raise `UserError` if clients have moved a frozen parameter, which they would pass on to each other without a message.

        Args:
            before: `sample_frozen` before their training.
        """
        for name, now in self.sample_frozen().items():
            moved = (now != before[name]) & ~(now.isnan() & before[name].isnan())
            require(
                not moved.any(),
                f"{type(self.module).__name__} moves {name} while a client trains, but it is frozen, so clients do not send it "
                "and the next client would start from it: register it as a buffer, which clients send and the server averages, "
                "or move it between rounds, in on_train_epoch_end.",
            )

    @property
    def new_plans(self) -> list[Plan]:
        """Prunings of the module since it was laid out."""
        return plans_of(self.module)[len(self._plans) :]

    def bind_replaced(self) -> None:
        """Adopt parameters whose data something has replaced (`parameter.data = …`), and make them views of the vectors again.

        A callback may do so between rounds, an optimiser such as SAM in any step, and a module, or torch for it, in any call of
        `forward`.
        """
        if [parameter.data_ptr() for parameter in self.trainable] == self._addresses:
            return
        for parameter, view in zip(self.trainable, self._views, strict=True):
            if parameter.data_ptr() != view.data_ptr() and parameter.shape == view.shape:
                view.copy_(parameter.data)
                parameter.data = view

    def adopt_plans(self, plans: list[Plan]) -> None:
        """Record these prunings for a module that has the resulting shapes, even if it was created with them."""
        vars(self.module)[PLANS] = list(plans)
        self._plans = plans

    def holders(self, name: str) -> list[tuple[dict[str, Any], str]]:
        """Return the dictionaries and keys that hold a parameter or buffer."""
        return self._attributes[name]

    def holds(self, layout: Layout) -> bool:
        """True if the module's parameters are views of vectors of this layout."""
        return self.layout == layout and not self.new_plans

    def lay_out_anew(self, unfrozen: Collection[str] = ()) -> None:
        """Bind a module that is pruned, or trains more, with its current values to other vectors, and its optimiser to them.

        Args:
            unfrozen: names of parameters that train from now on.
        """
        plans = self.new_plans
        present = dict(self.module.named_parameters())
        for name, parameter in zip(self.layout.names, self.parameters, strict=True):
            require(
                present.get(name) is parameter,
                f"a callback has pruned {name!r} by torch.nn.utils.prune, as ModelPruning does, so that no other can remove "
                "filters or let more parameters train afterwards: leave one out.",
            )
        pieces.BLOCKS.release()  # memory of the present vectors
        self._forms.clear()
        self._trained |= set(unfrozen)
        self._lay_out()
        if self.has_optimizer:
            self.optimizer.follow(plans, self.layout)
            self._make_personal_optimizer()
            self.bind_optimizer()

    def smaller_network(self, width: Width, example: Callable[[], Any]) -> SmallerNetwork:
        """Return the smaller network of a width.

        Args:
            width: part of every hidden layer to keep.
            example: returns a batch of inputs for the module's forward.

        Raises:
            UserError: the module cannot be cut.
        """
        if self.smaller is None:
            self.smaller = SmallerNetworks(self.module, example())
        return self.smaller.of(width, self.layout, self.buffer_layout, self.fabric.device)

    @contextmanager
    def cut_to(self, network: SmallerNetwork, trains: bool = True) -> Iterator[None]:
        """Let the module be a smaller network for a while, with flat vectors of its own, into which a model has yet to be loaded.

        The vectors of networks of one shape are made once, and used again.

        Args:
            network: the smaller network.
            trains: True if its hidden layers scale their outputs, and its steps draw narrower networks.
        """
        layers = network.layers if trains else ()
        hooks = [self.module.get_submodule(name).register_forward_hook(network.scale) for name in layers]
        if trains and network.in_steps:
            self.dropout = OrderedDropout(network.in_steps, network.width.distils)
            hooks += self.dropout.hook(self.module, self)
        whole, layout = Form.of(self), network.submodel.layout
        self._whole = whole
        try:
            if layout in self._forms:
                self._forms[layout].install(self)
            else:
                self._cut(network.plan)
            self._shared_buffers.adopt_unsaved_of(whole.attributes["_shared_buffers"])
            yield
            self._forms[layout] = Form.of(self)
        finally:
            self.dropout = None
            for hook in hooks:
                hook.remove()
            if self._whole is whole:
                self._become_whole()

    def _become_whole(self) -> None:
        """Restore the whole network after `cut_to`, or within it, as after an error outside the training."""
        if self._whole is not None:
            self._whole.install(self)
            self._whole = None

    def _cut(self, plan: Plan) -> None:
        """Cut the tensors of the module, and gather them in new vectors; `Form` restores the present ones."""
        for name, parameter in self.module.named_parameters():
            parameter.grad = None
            replace_data(parameter, plan.cut(name, parameter.data))
        for name, buffer in self.module.named_buffers():
            buffer.data = plan.cut(name, buffer.data)
        for owner in {name.rpartition(".")[0] for name in plan.axes}:
            tell_shape(self.module.get_submodule(owner))
        self._lay_out()
        if self.has_optimizer and isinstance(self.optimizer, ModuleOptimizer):
            self.optimizer.cut_to(plan, self.layout)
            self.bind_optimizer()

    @contextmanager
    def _as_whole(self) -> Iterator[None]:
        """Let the module be the whole network again for a while."""
        if self._whole is None:
            yield
            return
        present = Form.of(self)
        self._whole.install(self)
        try:
            yield
        finally:
            present.install(self)

    def configure_optimizer(
        self,
        flat_gradient: bool,
        by_plain_sgd: bool = False,
        by_lightning: bool = False,
        begins_frozen: bool = False,
    ) -> None:
        """Set up the module's optimiser, or plain SGD at its learning rates.

        With `flat_gradient`, gradients are gathered in one vector; with `by_lightning`, Lightning's own loop makes the steps;
        with `begins_frozen`, callbacks may unfreeze the first parameter.

        Raises:
            UserError: nothing is left to train together, there is not exactly one optimiser, or it lacks a personal parameter.
        """
        if not begins_frozen:
            self.require_trained()
        check_real(self.module)
        self.reads_gradient = flat_gradient
        if self.is_manual:
            self.optimizer = ManualOptimizers(self, self.layout)
        else:
            self.optimizer = ModuleOptimizer(self.module, self.layout, by_plain_sgd, by_lightning)
        trained = {name for names in self.optimizer.personal_names for name in names}
        for name in self.personal.leaves:
            require(
                name in trained,
                f"{name!r} is personal to each client, but configure_optimizers of {type(self.module).__name__} does not train "
                "it: pass all of self.parameters() to the optimizer.",
            )
        self._make_personal_optimizer()
        self.bind_optimizer()

    def require_trained(self) -> None:
        """Raise `UserError` if nothing is left to train together."""
        if not self.parameters:
            require(
                not self.personal.leaves,
                f"clients own all trainable parameters of {type(self.module).__name__}, so that none is left to federate: let "
                "personal name fewer of them, or train each client alone, with LocalOnly.",
            )
            raise UserError(f"{type(self.module).__name__} has no trainable parameter: there is nothing to federate.")

    def _make_personal_optimizer(self) -> None:
        source: Any = self.optimizer.optimizer
        self.personal_optimizer = PersonalOptimizer(source, self.optimizer.personal_names)

    def bind_optimizer(self) -> None:
        """Make the optimiser step this module, but only parameters that have had a gradient in the training that begins."""
        self.bind_replaced()
        self.personal_optimizer.bind(self.personal.leaves)
        is_bound = getattr(self.optimizer, "params", None) is self.params
        if is_bound and not self.gradient.is_outdated:
            if self.gradient.is_released:
                self.gradient.zero()
            return
        self.gradient = self._new_gradient()
        self.gradient.zero()
        if self.reads_gradient:
            self.gradient.flatten(self.layout, self.optimizer)
        self.optimizer.bind(self.params, self.gradient.vector if self.reads_gradient else None)

    def _new_gradient(self) -> ModuleGradient:
        return ModuleGradient(self.parameters, self.personal.leaves, self.params.new_empty(0))

    @property
    def is_manual(self) -> bool:
        """True if the module makes its steps itself, in `training_step`."""
        return not self.module.automatic_optimization

    @property
    def has_optimizer(self) -> bool:
        """True once `configure_optimizer` has been called."""
        return hasattr(self, "optimizer")

    def release(self) -> None:
        """Give the module its own tensors again, with its current values."""
        self._become_whole()
        for parameter in self.trainable:
            parameter.grad = None
            parameter.data = parameter.data.clone()
        for part in self.module.modules():
            if isinstance(part, nn.RNNBase) and vars(part).get("flatten_parameters") is _stay:
                del part.flatten_parameters
                part.flatten_parameters()
        for name, buffer in self.module.named_buffers():
            if name in self._shared_buffers.views or name in self.personal.buffers.views:
                buffer.data = buffer.data.clone()

    def load(self, params: Tensor, buffers: Tensor, counters: Mapping[str, Tensor]) -> None:
        """Load a model into the module: one copy of the parameters, one of the float buffers."""
        self.bind_replaced()
        self.params.copy_(params)
        self._shared_buffers.load(buffers, counters)

    def adopt_unsaved_buffers(self) -> None:
        """Let each client begin with the present values of the buffers that the module does not save."""
        self._shared_buffers.adopt_unsaved()

    def load_buffers(self, buffers: Tensor) -> None:
        """Load the shared float buffers (d_b,) into the module."""
        self._shared_buffers.load_floats(buffers)

    def load_server_model(self, run: Run) -> None:
        """Load the server's model into the module, with the initial personal values."""
        self.load(run.params, run.buffers, run.counters)
        self.personal.load(run.personal)

    def read_buffers(self) -> Tensor:
        """Return the module's shared float buffers (d_b,), including those that it replaced instead of writing to them."""
        return self._shared_buffers.read()

    def state_dict(self, run_state: dict[str, Any], uncopied: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the module's `state_dict` with the server's model in it, while a client's is loaded.

        Args:
            run_state: the server's `params`, `buffers` and `counters`, and the initial personal values.
            uncopied: names of entries to return themselves, if they are contiguous.
        """
        owned = self.personal.read()
        with self._as_whole(), self.other_model(run_state["params"], run_state["buffers"], run_state["counters"]):
            self.personal.load(initially_owned(run_state))
            copied = copied_state(self.module, uncopied)
        self.personal.load(owned)
        return copied

    @contextmanager
    def other_model(self, params: Tensor, buffers: Tensor, counters: Mapping[str, Tensor]) -> Iterator[None]:
        """Load another model, as `load` does, and load the present one again at the end; personal parameters stay."""
        present = self.params.clone(), self.read_buffers().clone(), self.read_counters()
        owned, unsaved = self.personal.read_buffers(), self._shared_buffers.read_unsaved()
        self.load(params, buffers, counters)
        try:
            yield
        finally:
            self.load(*present)
            self._shared_buffers.load_unsaved(unsaved)
            self.personal.load(owned)

    def read_counters(self) -> dict[str, Tensor]:
        """Return copies of the module's shared integer buffers, by name."""
        return self._shared_buffers.read_counters()

    def buffer(self, name: str) -> Tensor:
        """Return the module's current buffer of this name; raise `UserError` if it lost its shape, which is restored."""
        home, leaf = self._attributes[name][0]
        buffer, (shape, dtype) = home[leaf], self._buffer_shapes[name]
        if buffer is None or buffer.shape != shape:
            for home, leaf in self._attributes[name]:
                home[leaf] = torch.zeros(shape, dtype=dtype, device=self.fabric.device)
            raise changed_shape(self.module, name, buffer, shape)
        return buffer

    @contextmanager
    def lending(self, tensors: Tree, log: Callable[..., None]) -> Iterator[None]:
        """Let the module compute with other tensors in place of its parameters and buffers.

        Args:
            tensors: the other tensors, by the names of the parameters and buffers.
            log: replaces the module's `log`.
        """
        holders = [(home, leaf, name) for name in tensors for home, leaf in self._attributes[name]]
        originals = [home[leaf] for home, leaf, _ in holders]
        attributes = vars(self.module)
        previous = attributes.get("log")
        try:
            for home, leaf, name in holders:
                home[leaf] = tensors[name]
            attributes["log"] = log
            yield
        finally:
            attributes.pop("log")
            if previous is not None:
                attributes["log"] = previous
            for (home, leaf, _), tensor in zip(holders, originals, strict=True):
                home[leaf] = tensor

    def dropping_logs(self) -> AbstractContextManager[None]:
        """Let the module log nothing inside the context."""
        return self.lending({}, _drop)

    def training_step(self, batch: Any, index: int) -> tuple[Any, Any]:
        """Call the module's `training_step`.

        Returns:
            The loss (None if the module skips the batch), and the complete output of the step.

        Raises:
            UserError: it returns something else.
        """
        step = self.module.training_step
        try:
            with self.chains:
                output = step(batch, index) if self.takes_index else step(batch)
        except Exception as error:
            add_note(error, f"training_step read batch {index}: {describe_batch(batch)}.")
            raise
        # With manual optimisation the loss is only logged.
        loss = output.get("loss", None if self.is_manual else output) if isinstance(output, Mapping) else output
        if loss is not None and not isinstance(loss, Tensor):
            returned = (
                f"a mapping of {', '.join(map(repr, loss)) or 'nothing'}"
                if isinstance(loss, Mapping)
                else type(loss).__name__
            )
            raise UserError(
                f"training_step of {type(self.module).__name__} returns {returned}: return the loss, a tensor, or a mapping with "
                "'loss'."
            )
        return loss, output

    def loss_of(self, batch: Any, index: int) -> tuple[Any, Any]:
        """Return as `training_step` does the loss that `backward` differentiates, by a compiled graph if the run asks for it."""
        if self.compiled is not None and (computed := self.compiled(batch, index)) is not None:
            return computed
        return self.training_step(batch, index)

    def evaluation_step(self, name: str, batch: Any, *more: Any) -> Any:
        """Return what `validation_step` or `test_step` returns, by a compiled graph if the run asks for it.

        Args:
            name: name of the step.
            batch: the batch.
            more: further arguments of the step.
        """
        compiled = self.compiled_evaluation
        if compiled is not None and (computed := compiled(batch, name, more)) is not None:
            return computed[0]
        return getattr(self.module, name)(batch, *more)

    def backward(self, loss: Tensor, factor: float) -> bool:
        """Add the gradient of the last loss of `loss_of`, or of a sum of it and a penalty, to that of the step.

        Args:
            loss: the loss, multiplied by the factor.
            factor: the factor.

        Returns:
            True if the optimiser steps parameters from now on that got their first gradient.
        """
        if self.compiled is None or (gradient := self.compiled.gradient) is None:
            self.fabric.backward(loss)
            return self.after_backward()
        self.compiled.gradient = None
        return self.gradient.add(gradient, factor)

    def require_gradient(self, loss: Tensor) -> None:
        """Raise `UserError` if a loss does not depend on anything that is trained."""
        if not loss.requires_grad and (self.compiled is None or self.compiled.gradient is None):
            raise UserError(
                f"training_step of {type(self.module).__name__} returns a loss without a gradient: compute it from trainable "
                "parameters, without detach(), item() or torch.no_grad()."
            )

    def after_backward(self) -> bool:
        """Let the optimiser step parameters that got their first gradient; return True if there are any."""
        self.bind_replaced()  # `forward` may have moved what the optimiser is about to step
        return self.gradient.discover()

    def add_decay(self, gradient: Tensor, params: Tensor, missing: Sequence[str]) -> None:
        """Add weight decay to a gradient (..., d) in place, but not to the parameters `missing` in it."""
        if self.optimizer.decays:
            gradient.add_(params * self.optimizer.weight_decay)
            for part in self.layout.slices(missing):
                gradient[..., part].zero_()

    def step_without(self, missing: Sequence[str]) -> AbstractContextManager[None]:
        """Let the optimiser leave out parameters that have no gradient in this step, unless a rule has given them one."""
        if not missing or isinstance(self.optimizer, ManualOptimizers):
            return nullcontext()
        return self.optimizer.leaving_out(self.gradient.recheck_missing())

    def transfer(self, batch: Any, resident: bool) -> Any:
        """Move a batch to the accelerator, unless it is `resident` there, call the batch hooks, and convert its precision."""
        if not resident or self.hooks.changes_batches:
            batch = self.hooks.transfer_batch(batch, self.fabric.device)
        precision = self.fabric.strategy.precision
        if isinstance(precision, MixedPrecision):  # autocast converts what an operation needs, as in lightning.Trainer
            return batch
        return precision.convert_input(batch)

    def inputs(self, batch: Any, resident: bool) -> Any:
        """Return what `forward` takes of a batch that `transfer` moves: its first part, or the whole batch if it has no parts."""
        batch = self.transfer(batch, resident)
        return batch[0] if isinstance(batch, (tuple, list)) else batch


def copied_state(module: nn.Module, uncopied: Collection[str] = ()) -> dict[str, Any]:
    """Return copies of a module's state; entries that are one tensor, such as tied weights, share their copy.

    Args:
        module: the module.
        uncopied: names of entries to return themselves, if they are contiguous and alone in their memory.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copied(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):  # as that of a layer with `get_extra_state`
            return deepcopy(value)
        if name in uncopied and value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes:
            return value.detach()
        same = value.data_ptr(), value.dtype, value.shape, value.stride()
        if same not in copies or not value.numel():
            copies[same] = value.detach().clone()
        return copies[same]

    return {name: copied(name, value) for name, value in module.state_dict().items()}


def has_batch_norm(module: nn.Module) -> bool:
    """True if a module normalises batches, which it cannot train on a batch of one sample: that has no variance."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


def trainable_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that need a gradient."""
    return frozenset(name for name, parameter in module.named_parameters() if parameter.requires_grad)


def _stay() -> None:
    """Leave the weights of a recurrent layer where they are, in place of its `flatten_parameters`."""


def _drop(*arguments: Any, **options: Any) -> None:
    """Replace the module's `log`, and drop the values."""
