"""A module's training step and its gradient as one graph, which torch compiles.

The graph reads parameters, changing buffers and a batch, and returns the loss, its gradient, and what the step returns and logs.
Logs, hooks, callbacks and the optimiser stay outside. A first run on tensors without data tells what the graph has to return,
and whether there is something that it cannot hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.utils._pytree import tree_map

from lightning_fl.flat_module.graph import Graph, compiled
from lightning_fl.flat_module.step_trial import CannotCompile, Log, try_step
from lightning_fl.vectors.layout import Tree

INSIDE = "module."
"""Prefix of the names of the module's tensors in `TrainingStep`."""


@dataclass(frozen=True)
class Gradient:
    """Gradient of a loss.

    Attributes:
        shared: gradient (d,) of the parameters that are trained together.
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


class StepGraph(Graph):
    """Compiled function of loss and gradient for batches of one shape."""

    step_name = "training_step"

    def __init__(self, step: TrainingStep, flat_module: Any) -> None:
        super().__init__()
        self._step, self._flat_module, self._module = step, flat_module, flat_module.module

    def __call__(self, batch: Any, index: int) -> tuple[Tensor, Any, Gradient]:
        """Return the loss (), the complete output of the training step, and the gradient."""
        flat_module, captures = self._flat_module, self._captures
        arguments = (batch, index) if flat_module.takes_index else (batch,)
        if captures:
            torch.compiler.cudagraph_mark_step_begin()
        with flat_module.chains.in_graph():
            loss, shared, personal, logged, extra = self._compute(self._params, self._buffers(), arguments)
        for (name, how, named), value in zip(self._logs, logged, strict=True):
            self._module.log(name, value, *how, **named)
        if captures:  # whose outputs are overwritten by the next step
            loss, extra = loss.clone(), tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, extra)
        output = loss if self._returns_loss else {"loss": loss, **extra}
        return loss, output, Gradient(shared, self._names, dict(zip(self._personal_names, personal, strict=True)))

    def prepare(self, batch: Any, index: int) -> None:
        """Determine the graph's inputs and outputs by a step without data, and make the function that torch compiles.

        Raises:
            CannotCompile: a graph cannot hold the step.
        """
        flat_module = self._flat_module
        self._check_hooks()
        facts = self._try(batch, index)
        self._logs, self._returns_loss = facts.logs, facts.returns_loss
        self._names = [name for name in flat_module.layout.names if name in facts.trained]
        self._personal_names = [name for name in flat_module.personal_layout.names if name in facts.trained]
        views = flat_module.layout.views(flat_module.params)
        views |= flat_module.personal_layout.views(flat_module.personal)
        trained = [*self._names, *self._personal_names]
        self._params = {f"{INSIDE}{name}": views[name] for name in trained}
        self._homes = [(name, *flat_module.holders(name)[0]) for name in facts.changed_buffers]
        self._captures = flat_module.fabric.device.type == "cuda"
        if self._captures:  # so that a CUDA graph reads and changes them in their place
            for tensor in (*self._params.values(), *self._buffers().values()):
                torch._dynamo.mark_static_address(tensor)
        layout = flat_module.layout
        entries = zip(layout.names, layout.sizes, layout.dim_orders, strict=True)
        pieces = [(name in facts.trained, size, order) for name, size, order in entries]
        function = _function(self._step, len(self._personal_names), pieces, self._returns_loss)
        self._compute = compiled(function, self, self._captures)

    def _buffers(self) -> dict[str, Tensor]:
        return {f"{INSIDE}{name}": home[leaf] for name, home, leaf in self._homes}

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


def _function(
    step: TrainingStep, num_personal: int, layout: Sequence[tuple[bool, int, tuple[int, ...]]], returns_loss: bool
) -> Callable[..., Any]:
    """Return the function to compile.

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

    def compute(params: dict[str, Tensor], buffers: dict[str, Tensor], arguments: tuple[Any, ...]) -> Any:
        def loss_of(params: dict[str, Tensor], buffers: dict[str, Tensor]) -> Any:
            logged: list[Tensor] = []

            def record(name: str, value: Any, *how: Any, **named: Any) -> None:
                logged.append(torch.as_tensor(value).detach().clone())

            changed = {name: buffer.clone() for name, buffer in buffers.items()}
            attributes = vars(module)  # here, where the graph knows whose they are
            log = attributes["log"]
            attributes["log"] = record
            given = {**params, **changed}
            # All names of tied tensors are given: torch would look at every tensor of the module to find them, and guard these.
            tied = {alias: given[name] for alias, name in aliases.items() if name in given}
            output = functional_call(step, tied, arguments, tie_weights=False)
            attributes["log"] = log
            loss = output if returns_loss else output["loss"]
            extra = {} if returns_loss else {name: value for name, value in output.items() if name != "loss"}
            return loss.reshape(()), (loss, changed, logged, extra)

        gradients, (_, (loss, changed, logged, extra)) = grad_and_value(loss_of, has_aux=True)(params, buffers)
        for name, buffer in buffers.items():
            buffer.copy_(changed[name])
        parts = list(gradients.values())
        personal = parts[len(parts) - num_personal :]
        pieces, count = [], 0
        for is_trained, size, order in layout:
            pieces.append(parts[count].permute(order).reshape(-1) if is_trained else loss.new_zeros(size))
            count += is_trained
        return loss, torch.cat(pieces), personal, logged, extra

    return compute
