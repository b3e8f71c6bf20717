"""A module's training step and its gradient as one graph, which torch compiles, for one client or a stack of clients.

The graph reads parameters, changing buffers and a batch, and returns the loss, its gradient, and what the step returns and logs.
Logs, hooks, callbacks and the optimiser stay outside. A first run on tensors without data tells what the graph has to return,
and whether there is something that it cannot hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_fl.flat_module.graph import Graph, compiled, guard
from lightning_fl.flat_module.step_trial import CannotCompile, Log, try_step
from lightning_fl.vectors.layout import Tree

INSIDE = "module."
"""Prefix of the names of the module's tensors in `TrainingStep`."""


@dataclass(frozen=True)
class Gradient:
    """Gradient of a loss, or of each loss of a stack.

    Attributes:
        shared: gradient (d,) or (n, d) of the parameters that are trained together.
        names: those of them that have a gradient.
        personal: gradient of each personal parameter that has one, by name.
    """

    shared: Tensor
    names: Sequence[str]
    personal: Mapping[str, Tensor]


class TrainingStep(nn.Module):
    """The `training_step` of a module as a module, for `functional_call`."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module.training_step(*arguments)


class StackStep(NamedTuple):
    """Tensors of a stack of n clients, and the index of their batches.

    Attributes:
        params: parameters, shared and personal ones (n, …).
        buffers: buffers (n, …) before the step, which do not change.
        batch_index: index of the batches.
    """

    params: Tree
    buffers: Tree
    batch_index: int


class StackOutput(NamedTuple):
    """Result of a step of n clients.

    Attributes:
        losses: loss of each client (n,).
        logs: what the step logs, with the values of the clients (n,).
        buffers: buffers (n, …) after the step, by name.
        gradient: gradient of each client's loss.
    """

    losses: Tensor
    logs: list[tuple[Log, Tensor]]
    buffers: Tree
    gradient: Gradient


class _TrainingGraph(Graph):
    """Compiled function of a training step's loss and gradient."""

    step_name = "training_step"

    def __init__(self, step: TrainingStep, flat_module: Any) -> None:
        self._step, self._flat_module, self._module = step, flat_module, flat_module.module

    def _prepare(self, batch: Any, index: int) -> Row:
        """Determine inputs and outputs by a step without data; return the function of one client that they belong to."""
        flat_module = self._flat_module
        self._check_hooks()
        self._facts = facts = self._try(batch, index)
        layout = flat_module.layout
        self._names = [name for name in layout.names if name in facts.trained]
        self._personal_names = [name for name in flat_module.personal.layout.names if name in facts.trained]
        self._captures = flat_module.fabric.device.type == "cuda"
        entries = zip(layout.names, layout.sizes, layout.dim_orders, strict=True)
        pieces = [(name in facts.trained, size, order) for name, size, order in entries]
        return _row(self._step, len(self._personal_names), pieces, facts.returns_loss)

    def _gradient(self, shared: Tensor, personal: Sequence[Tensor]) -> Gradient:
        return Gradient(shared, self._names, dict(zip(self._personal_names, personal, strict=True)))

    def _further_arguments(self, index: int) -> tuple[int, ...]:
        """Return the arguments of `training_step` after the batch, in a tuple, of which a graph guards only what it reads."""
        return (index,) if self._flat_module.takes_index else ()

    def _check_hooks(self) -> None:
        """Raise `CannotCompile` if hooks of parameters or layers see single gradients."""
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._module.parameters()):
            raise CannotCompile("hooks of its parameters see their gradients")
        if any(part._backward_hooks or part._backward_pre_hooks for part in self._module.modules()):
            raise CannotCompile("hooks of its layers see their gradients")

    def _try(self, batch: Any, index: int) -> _Facts:
        """Make a step on tensors without data, which leaves no trace in the module."""

        def step(batch: Any, leaves: Tree) -> tuple[dict[str, bool], bool]:
            loss, output = self._flat_module.training_step(batch, index)
            if loss is None:
                raise CannotCompile("training_step returns no loss for some batches")
            if not loss.requires_grad:
                raise CannotCompile("its loss has no gradient")
            found = torch.autograd.grad(loss.reshape(()), list(leaves.values()), allow_unused=True)
            trained = {name: gradient is not None for name, gradient in zip(leaves, found, strict=True)}
            return trained, isinstance(output, Tensor)

        (trained, returns_loss), logs, written = try_step(self._flat_module, "training_step", batch, step)
        return _Facts(
            logs,
            frozenset(name for name, has_gradient in trained.items() if has_gradient),
            [name for name in written if name not in trained],
            returns_loss,
        )


@final
class StepGraph(_TrainingGraph):
    """Compiled function of loss and gradient for batches of one shape."""

    def __call__(self, batch: Any, index: int) -> tuple[Tensor, Any, Gradient]:
        """Return the loss (), the complete output of the training step, and the gradient."""
        captures = self._captures
        if captures:
            torch.compiler.cudagraph_mark_step_begin()
        with self._flat_module.chains.in_graph():
            computed = self._compute(self._params, self._buffers(), (batch, *self._further_arguments(index)))
        loss, shared, personal, logged, extra = computed
        for (name, how, named), value in zip(self._facts.logs, logged, strict=True):
            self._module.log(name, value, *how, **named)
        if captures:  # whose outputs are overwritten by the next step
            loss, extra = loss.clone(), tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, extra)
        output = loss if self._facts.returns_loss else {"loss": loss, **extra}
        return loss, output, self._gradient(shared, personal)

    def prepare(self, batch: Any, index: int) -> None:
        """Determine the graph's inputs and outputs by a step without data, and make the function that torch compiles.

        Raises:
            CannotCompile: a graph cannot hold the step.
        """
        flat_module, row = self._flat_module, self._prepare(batch, index)
        views = flat_module.layout.views(flat_module.params)
        views |= flat_module.personal.layout.views(flat_module.personal.vector)
        self._params = {f"{INSIDE}{name}": views[name] for name in (*self._names, *self._personal_names)}
        self._homes = [(name, *flat_module.holders(name)[0]) for name in self._facts.changed_buffers]
        if self._captures:  # so that a CUDA graph reads and changes them in their place
            for tensor in (*self._params.values(), *self._buffers().values()):
                torch._dynamo.mark_static_address(tensor)

        def compute(params: Tree, buffers: Tree, arguments: tuple[Any, ...]) -> Any:
            loss, shared, personal, changed, logged, extra = row(params, buffers, arguments, {})
            for name, buffer in buffers.items():
                buffer.copy_(changed[name])
            return loss, shared, personal, logged, extra

        self._compute = compiled(compute, self, self._captures)

    def _buffers(self) -> Tree:
        return {f"{INSIDE}{name}": home[leaf] for name, home, leaf in self._homes}


@final
class StackGraph(_TrainingGraph):
    """Compiled function of the losses and gradients of a stack of clients, for batches of one shape."""

    def __call__(self, batch: Any, step: StackStep) -> StackOutput:
        """Compute a step of n clients, whose batches have a leading axis (n, …)."""
        trained, given = [*self._names, *self._personal_names], {**step.params, **step.buffers}
        fixed = [name for name in step.params if name not in trained]
        params, buffers, constants = (
            {f"{INSIDE}{name}": given[name] for name in names} for names in (trained, step.buffers, fixed)
        )
        leaves = tree_leaves(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._further = self._further_arguments(step.batch_index)
        if self._captures:
            torch.compiler.cudagraph_mark_step_begin()
        losses, shared, personal, changed, logged = self._compute(params, buffers, constants, tensors, others)
        if self._captures:  # whose outputs are overwritten by the next step
            losses, logged = losses.clone(), [value.clone() for value in logged]
        return StackOutput(
            losses,
            list(zip(self._facts.logs, logged, strict=True)),
            {name.removeprefix(INSIDE): buffer for name, buffer in changed.items()},
            self._gradient(shared, personal),
        )

    def prepare(self, batch: Any, step: StackStep) -> None:
        """Determine the graph's inputs and outputs by a client's step without data, and make the function that torch compiles.

        Raises:
            CannotCompile: a graph cannot hold the step.
        """
        leaves, structure = tree_flatten(batch)
        positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        first = [leaf[0] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        row = self._prepare(tree_unflatten(first, structure), step.batch_index)

        def compute(params: Tree, buffers: Tree, constants: Tree, tensors: list[Tensor], others: list[Any]) -> Any:
            def of_client(params: Tree, buffers: Tree, constants: Tree, tensors: list[Tensor]) -> Any:
                content = list(others)
                for position, tensor in zip(positions, tensors, strict=True):
                    content[position] = tensor
                arguments = tree_unflatten(content, structure), *self._further
                loss, shared, personal, changed, logged, _ = row(params, buffers, arguments, constants)
                return loss, shared, personal, changed, logged

            return vmap(of_client, randomness="different")(params, buffers, constants, tensors)

        self._compute = compiled(compute, self, self._captures)


@dataclass(frozen=True)
class _Facts:
    """Facts about a training step, by a step without data.

    Attributes:
        logs: name and arguments of each value that it logs.
        trained: names of the parameters that its loss depends on.
        changed_buffers: names of the buffers that it writes to.
        returns_loss: True if it returns the loss alone, False if it returns a mapping.
    """

    logs: list[Log]
    trained: frozenset[str]
    changed_buffers: list[str]
    returns_loss: bool


Row = Callable[[Tree, Tree, tuple[Any, ...], Tree], tuple[Any, ...]]
"""Function of a client's trained parameters, buffers, arguments of `training_step`, and other parameters; see `_row`."""


def _row(
    step: TrainingStep,
    num_personal: int,
    layout: Sequence[tuple[bool, int, tuple[int, ...]]],
    returns_loss: bool,
) -> Row:
    """Return the function of one client's step, to compile.

    It returns the loss (), the gradient (d,), the gradients of personal parameters, the buffers after the step, the values that
    it logs, and what it returns besides the loss.

    Args:
        step: the training step.
        num_personal: number of personal parameters with a gradient, the last ones.
        layout: for each shared parameter, whether it has a gradient, its number of entries, and the order of its axes in
            the vector.
        returns_loss: True if the step returns the loss alone.
    """
    module = step.module
    names = {id(tensor): name for name, tensor in (*step.named_parameters(), *step.named_buffers())}
    tensors = (*step.named_parameters(remove_duplicate=False), *step.named_buffers(remove_duplicate=False))
    aliases = {name: names[id(tensor)] for name, tensor in tensors}

    def compute(params: Tree, buffers: Tree, arguments: tuple[Any, ...], constants: Tree) -> tuple[Any, ...]:
        def loss_of(params: Tree, buffers: Tree) -> Any:
            logged: list[Tensor] = []

            def record(name: str, value: Any, *how: Any, **named: Any) -> None:
                guard(name, *how, *named.values())
                logged.append(torch.as_tensor(value).detach().clone())

            changed = {name: buffer.clone() for name, buffer in buffers.items()}
            attributes = vars(module)  # here, where the graph knows whose they are
            log = attributes["log"]
            attributes["log"] = record
            given = {**constants, **params, **changed}
            # All names of tied tensors are given: torch would look at every tensor of the module to find them, and guard these.
            tied = {alias: given[name] for alias, name in aliases.items() if name in given}
            output = functional_call(step, tied, arguments, tie_weights=False)
            attributes["log"] = log
            loss = output if returns_loss else output["loss"]
            extra = {} if returns_loss else {name: value for name, value in output.items() if name != "loss"}
            return loss.reshape(()), (loss, changed, logged, extra)

        gradients, (_, (loss, changed, logged, extra)) = grad_and_value(loss_of, has_aux=True)(params, buffers)
        parts = list(gradients.values())
        personal = parts[len(parts) - num_personal :]
        pieces, count = [], 0
        for is_trained, size, order in layout:
            pieces.append(parts[count].permute(order).reshape(-1) if is_trained else loss.new_zeros(size))
            count += is_trained
        return loss, torch.cat(pieces), personal, changed, logged, extra

    return compute
