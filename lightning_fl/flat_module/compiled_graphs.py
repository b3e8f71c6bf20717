"""Compiled graphs of a module's steps in a run, one for each shape of batches, until a step cannot be compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils._pytree import tree_flatten

from lightning_fl.flat_module.graph import Graph
from lightning_fl.flat_module.step_trial import CannotCompile


class CompiledGraphs:
    """Compute steps of a module by compiled graphs.

    The first step that a graph cannot hold ends this for the rest of the run: the module then runs eagerly, and a line says why.

    Attributes:
        what: what the graphs compute, in a sentence.
        does: what the module does by them, in a sentence.
        why_not: why the module runs eagerly; "" while it is compiled.
    """

    what: str
    does: str

    def __init__(self, flat_module: Any) -> None:
        self._flat_module = flat_module
        self._params: Tensor | None = None
        self._graphs: dict[Any, Graph] = {}
        self._seconds, self._num_compiled = 0.0, 0
        self.why_not = ""

    def _computed(self, new_graph: Callable[[], Graph], batch: Any, more: Any, kind: Any = None) -> Any:
        """Return what the graph for a batch of this shape, and of this `kind` of step, returns; None if it cannot hold it."""
        flat_module = self._flat_module
        if self._params is not flat_module.params:  # pruned, or trains more
            self._params = flat_module.params
            self._graphs.clear()
        leaves, structure = tree_flatten(batch)
        shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
        trained = tuple(p.requires_grad and not p._backward_hooks for p in flat_module.trainable)
        key = kind, structure, shapes, trained, flat_module.module.training
        graph = self._graphs.get(key)
        if graph is None:
            return self._compile(key, new_graph(), batch, more)
        try:
            with _no_hooks():
                return graph(batch, more)
        except Exception as error:
            if not graph.is_outdated:
                raise
            self.end(_reason(error, graph))
            return None

    def _compile(self, key: Any, graph: Graph, batch: Any, more: Any) -> Any:
        started, restore_random = time.perf_counter(), self._flat_module.generators.keep()
        try:
            with _no_hooks():
                graph.prepare(batch, more)
                restore_random()
                computed = graph(batch, more)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a user's module may raise anything
            restore_random()
            self.end(_reason(error, graph))
            return None
        finally:
            self._seconds += time.perf_counter() - started
        self._graphs[key] = graph
        self._num_compiled += 1
        return computed

    def end(self, why_not: str) -> None:
        """Let the module run eagerly from now on, and say why."""
        self.why_not = why_not
        self._graphs.clear()
        name = type(self._flat_module.module).__name__
        rank_zero_info(f"{name} {self.does} without torch.compile from here on, because {why_not}.")

    def take_times(self) -> tuple[float, int]:
        """Return the seconds of compiling since the last call, and the number of compiled shapes of batches."""
        times = self._seconds, self._num_compiled
        self._seconds, self._num_compiled = 0.0, 0
        return times


def _no_hooks() -> AbstractContextManager[None]:
    """Forbid hooks of saved tensors within, as `torch.func.grad` does, which leaves them forbidden if tracing it fails."""
    return disable_saved_tensors_hooks("torch.func.grad does not support hooks of saved tensors")


def _reason(error: Exception, graph: Graph) -> str:
    """Say in a part of a sentence why a step cannot be compiled."""
    error = getattr(error, "inner_exception", error)  # of a backend, such as the one that compiles once
    if isinstance(error, CannotCompile):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    step = graph.step_name.replace("_", " ")
    return f"torch cannot compile its {step} ({type(error).__name__}: {lines[0].rstrip('. ')})"
