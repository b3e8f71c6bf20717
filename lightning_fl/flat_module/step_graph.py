"""A module's training step and its gradient as one graph, which torch compiles.

The graph reads parameters, changing buffers and a batch, and returns the loss, its gradient, and what the step returns and logs.
Logs, hooks, callbacks and the optimiser stay outside. A first run on tensors without data tells what the graph has to return,
and whether there is something that it cannot hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad_and_value
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric

from lightning_fl.checks.evaluation_mode import keeping_attributes
from lightning_fl.flat_module.plain_attributes import PlainAttributes

BACKEND = "inductor"
OF_PACKAGES = "G['__import_torch", "G['__import_lightning_fl", "__import__('torch')"
"""Prefixes of the names of torch's guards on packages, whose code does not change."""
INSIDE = "module."
"""Prefix of the names of the module's tensors in `TrainingStep`."""


class CannotCompile(Exception):  # noqa: N818 -- a decision, after which the step runs eagerly
    """The step does something that a graph cannot hold."""


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


class StepGraph:
    """Compiled function of loss and gradient for batches of one shape."""

    def __init__(self, step: TrainingStep, flat_module: Any) -> None:
        self._step, self._flat_module, self._module = step, flat_module, flat_module.module
        self.is_compiled = self.is_outdated = False

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
        sizes = [
            (name in facts.trained, size)
            for name, size in zip(flat_module.layout.names, flat_module.layout.sizes, strict=True)
        ]
        self._compute = self._compiled(_function(self._step, len(self._personal_names), sizes, self._returns_loss))

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
        flat_module, module = self._flat_module, self._module
        fakes, logs = FakeTensorMode(allow_non_fake_inputs=True), []
        names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        present = {name: flat_module.holders(name)[0][0][flat_module.holders(name)[0][1]] for name in names}
        lent = {name: fakes.from_tensor(tensor.detach()) for name, tensor in present.items()}
        leaves = {name: lent[name].requires_grad_() for name, p in module.named_parameters() if p.requires_grad}
        versions = {name: lent[name]._version for name in lent}

        def record(name: str, value: Any, *how: Any, **named: Any) -> None:
            if isinstance(value, Metric):
                raise CannotCompile(f"training_step logs {name!r} as a torchmetrics object")
            if any(isinstance(x, Tensor) for x in tree_leaves((how, named))):
                raise CannotCompile(f"training_step logs {name!r} with a tensor as an argument of self.log")
            logs.append((name, how, named))

        with keeping_attributes(flat_module.own_parts):
            attributes, random_states = PlainAttributes(module), _host_random()
            metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
            updates = [metric.update_count for metric in metrics]
            with fakes, flat_module.lending(lent, record):
                given = tree_map(lambda x: fakes.from_tensor(x) if isinstance(x, Tensor) else x, batch)
                loss, output = flat_module.training_step(given, index)
                if loss is None:
                    raise CannotCompile("training_step returns no loss for some batches")
                if not loss.requires_grad:
                    raise CannotCompile("its loss has no gradient")
                now = {name: flat_module.holders(name)[0][0][flat_module.holders(name)[0][1]] for name in names}
                found = torch.autograd.grad(loss.reshape(()), list(leaves.values()), allow_unused=True)
            if changed := attributes.names_of(attributes.changed()):
                raise CannotCompile(f"training_step changes {' and '.join(map(repr, changed))} of the module")
            if updates != [metric.update_count for metric in metrics]:
                raise CannotCompile("training_step updates a torchmetrics object")
            if random_states != _host_random():
                raise CannotCompile("training_step draws random numbers of Python or NumPy")
        if replaced := [name for name in names if now[name] is not lent[name]]:
            raise CannotCompile(f"training_step replaces the buffer {replaced[0]!r} instead of writing to it")
        return _Facts(
            logs,
            frozenset(name for name, gradient in zip(leaves, found, strict=True) if gradient is not None),
            [name for name in names if name not in leaves and lent[name]._version != versions[name]],
            isinstance(output, Tensor),
        )

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function compiled, for one set of Python values only."""
        inner, has_begun = _backend(self._captures), False

        def compile_once(graph: Any, inputs: Any) -> Any:
            nonlocal has_begun
            if has_begun:
                self.is_outdated = True
                raise CannotCompile("training_step reads values of Python that change between its steps")
            has_begun = True
            return inner(graph, inputs)

        options: dict[str, Any] = {"guard_filter_fn": _guards}
        return torch.compile(function, fullgraph=True, dynamic=False, backend=compile_once, options=options)


@dataclass(frozen=True)
class _Facts:
    """Facts about a training step, by a step without data.

    Attributes:
        logs: name and arguments of each value that it logs.
        trained: names of the parameters that its loss depends on.
        changed_buffers: names of the buffers that it writes to.
        returns_loss: True if it returns the loss alone, False if it returns a mapping.
    """

    logs: list[tuple[str, tuple[Any, ...], dict[str, Any]]]
    trained: frozenset[str]
    changed_buffers: list[str]
    returns_loss: bool


def _function(
    step: TrainingStep, num_personal: int, sizes: Sequence[tuple[bool, int]], returns_loss: bool
) -> Callable[..., Any]:
    """Return the function to compile.

    Args:
        step: the training step.
        num_personal: number of personal parameters with a gradient, the last ones.
        sizes: for each shared parameter, whether it has a gradient, and its number of entries.
        returns_loss: True if the step returns the loss alone.
    """
    module = step.module

    def compute(params: dict[str, Tensor], buffers: dict[str, Tensor], arguments: tuple[Any, ...]) -> Any:
        def loss_of(params: dict[str, Tensor], buffers: dict[str, Tensor]) -> Any:
            logged: list[Tensor] = []

            def record(name: str, value: Any, *how: Any, **named: Any) -> None:
                logged.append(torch.as_tensor(value).detach().clone())

            changed = {name: buffer.clone() for name, buffer in buffers.items()}
            attributes = vars(module)  # here, where the graph knows whose they are
            log = attributes["log"]
            attributes["log"] = record
            output = functional_call(step, {**params, **changed}, arguments)
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
        for is_trained, size in sizes:
            pieces.append(parts[count].reshape(-1) if is_trained else loss.new_zeros(size))
            count += is_trained
        return loss, torch.cat(pieces), personal, logged, extra

    # Torch keeps its graphs by code: without a copy, those of all shapes and runs would share one limited list.
    return FunctionType(
        compute.__code__.replace(), compute.__globals__, compute.__name__, compute.__defaults__, compute.__closure__
    )


def _backend(captures: bool) -> Callable[[Any, Any], Any]:
    """Return torch's backend; random numbers of the module are drawn as without it."""
    if BACKEND != "inductor":
        return torch._dynamo.lookup_backend(BACKEND)
    from torch._inductor.compile_fx import compile_fx

    options = {"fallback_random": True, "triton.cudagraphs": captures}

    def inductor(graph: Any, inputs: Any) -> Any:
        return compile_fx(graph, inputs, config_patches=options)

    return inductor


def _guards(guards: Sequence[Any]) -> list[bool]:
    """Return which guards torch checks before each step: all but those on the code of torch and of this package."""
    return [not guard.name.startswith(OF_PACKAGES) for guard in guards]


def _host_random() -> tuple[Any, ...]:
    """Return the states of the global generators of Python and NumPy."""
    name, keys, *more = np.random.get_state()  # noqa: NPY002
    return random.getstate(), name, tuple(keys), *more
