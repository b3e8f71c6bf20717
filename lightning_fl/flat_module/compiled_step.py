"""The training steps of a run by compiled graphs, one for each shape of batches, until a step cannot be compiled."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils._pytree import tree_flatten

from lightning_fl.flat_module.step_graph import CannotCompile, Gradient, StepGraph, TrainingStep


class CompiledStep:
    """Compute the loss of a training step and its gradient by compiled graphs.

    After the first step that a graph cannot hold, the module runs eagerly for the rest of the run, and a line says why.

    Attributes:
        gradient: gradient of the last loss, until it is added to that of the step; None if there is none.
        why_not: why the module runs eagerly; "" while it is compiled.
    """

    def __init__(self, flat_module: Any, why_not: str = "") -> None:
        self._flat_module, self._step = flat_module, TrainingStep(flat_module.module)
        self._params: Tensor | None = None
        self._graphs: dict[Any, StepGraph] = {}
        self._seconds, self._num_compiled = 0.0, 0
        self.gradient: Gradient | None = None
        self.why_not = why_not

    def __call__(self, batch: Any, index: int) -> tuple[Tensor, Any] | None:
        """Return the loss and the complete output of `training_step`; None if it has to run eagerly."""
        self.gradient = None
        if self.why_not or not torch.is_grad_enabled():
            return None
        flat_module = self._flat_module
        flat_module.bind_replaced()
        if self._params is not flat_module.params:  # pruned, or trains more
            self._params = flat_module.params
            self._graphs.clear()
        leaves, structure = tree_flatten(batch)
        shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
        trained = tuple(p.requires_grad and not p._backward_hooks for p in flat_module.trainable)
        key = structure, shapes, trained, flat_module.module.training
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = StepGraph(self._step, flat_module)
        if graph.is_compiled:
            try:
                with _no_hooks():
                    loss, output, self.gradient = graph(batch, index)
            except Exception as error:
                if not graph.is_outdated:
                    raise
                self.end(_reason(error))
                return None
            return loss, output
        return self._compile(graph, batch, index)

    def _compile(self, graph: StepGraph, batch: Any, index: int) -> tuple[Tensor, Any] | None:
        started, restore_random = time.perf_counter(), self._flat_module.keep_random()
        try:
            with _no_hooks():
                graph.prepare(batch, index)
                restore_random()
                loss, output, self.gradient = graph(batch, index)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a user's module may raise anything
            restore_random()
            self.end(_reason(error))
            return None
        finally:
            self._seconds += time.perf_counter() - started
        graph.is_compiled = True
        self._num_compiled += 1
        return loss, output

    def end(self, why_not: str) -> None:
        """Let the module run eagerly from now on, and say why."""
        self.why_not, self.gradient = why_not, None
        self._graphs.clear()
        name = type(self._flat_module.module).__name__
        rank_zero_info(f"{name} trains without torch.compile from here on, because {why_not}.")

    def take_times(self) -> tuple[float, int]:
        """Return the seconds of compiling since the last call, and the number of compiled shapes of batches."""
        times = self._seconds, self._num_compiled
        self._seconds, self._num_compiled = 0.0, 0
        return times


def _no_hooks() -> AbstractContextManager[None]:
    """Forbid hooks of saved tensors within, as `torch.func.grad` does; it does not allow them again if it is traced and fails."""
    return disable_saved_tensors_hooks("torch.func.grad does not support hooks of saved tensors")


def _reason(error: Exception) -> str:
    """Say in a part of a sentence why a step cannot be compiled."""
    error = getattr(error, "inner_exception", error)  # of a backend, such as the one that compiles once
    if isinstance(error, CannotCompile):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"torch cannot compile its training step ({type(error).__name__}: {lines[0].rstrip('. ')})"
