"""The validation and test steps of a run by compiled graphs, which return what a step returns and logs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fl.flat_module.compiled_graphs import CompiledGraphs
from lightning_fl.flat_module.graph import Graph, compiled, guard
from lightning_fl.flat_module.step_trial import CannotCompile, Log, try_step


@final
class CompiledEvaluation(CompiledGraphs):
    """Compute `validation_step` and `test_step` by compiled graphs."""

    what, does = "evaluation", "is evaluated"

    def __call__(self, batch: Any, step_name: str, more: tuple[Any, ...]) -> tuple[Any] | None:
        """Return what a step returns, alone in a tuple; None if it has to run eagerly.

        Args:
            batch: the batch.
            step_name: `validation_step` or `test_step`.
            more: further arguments of the step: the index of the batch, and that of the loader if there are several.
        """
        if self.why_not:
            return None
        if any(part._forward_hooks or part._forward_pre_hooks for part in self._flat_module.module.modules()):
            self.end("hooks of its layers see what they compute")
            return None
        new_graph = partial(EvaluationGraph, step_name, self._flat_module)
        # Without inference mode, so that one graph serves the server's model and those of clients, whose tensors may stay.
        with torch.inference_mode(False), torch.no_grad():
            return self._computed(new_graph, tree_map(_usual, batch), more, (step_name, more[1:]))


@final
class EvaluationGraph(Graph):
    """Compiled evaluation of batches of one shape."""

    def __init__(self, step_name: str, flat_module: Any) -> None:
        self.step_name, self._flat_module, self._module = step_name, flat_module, flat_module.module
        self._logs: list[Log] = []

    def prepare(self, batch: Any, more: tuple[Any, ...]) -> None:
        """Find out by a step without data what the step logs, and make the function that torch compiles.

        Raises:
            CannotCompile: a graph cannot hold the step.
        """
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(batch)):
            raise CannotCompile("its batches contain no tensors")
        step = getattr(self._module, self.step_name)
        _, self._logs, written = try_step(
            self._flat_module, self.step_name, batch, lambda given, leaves: step(given, *more)
        )
        if written:
            raise CannotCompile(f"{self.step_name} writes to {written[0]!r}")
        self._compute = compiled(_function(self._module, self.step_name), self)

    def __call__(self, batch: Any, more: tuple[Any, ...]) -> tuple[Any]:
        """Return what the step returns, alone in a tuple."""
        with self._flat_module.dropping_logs():
            output, values = self._compute((batch, *more))
        for (name, how, named), value in zip(self._logs, values, strict=True):
            self._module.log(name, value, *how, **named)
        return (output,)


def _function(module: LightningModule, step_name: str) -> Callable[..., Any]:
    """Return the function to compile, which returns what the step returns and the values that it logs."""

    def compute(arguments: tuple[Any, ...]) -> Any:
        values: list[Any] = []

        def record(name: str, value: Any, *how: Any, **named: Any) -> None:
            guard(name, *how, *named.values())
            values.append(value.detach().clone() if isinstance(value, Tensor) else value)

        attributes = vars(module)  # here, where the graph knows whose they are
        log = attributes["log"]
        attributes["log"] = record
        output = getattr(module, step_name)(*arguments)
        attributes["log"] = log
        return output, values

    return compute


def _usual(value: Any) -> Any:
    """Return a tensor that is used outside inference mode, too; any other value itself."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value
