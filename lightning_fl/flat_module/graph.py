"""Functions that torch compiles once, for one set of Python values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch

from lightning_fl.flat_module.step_trial import CannotCompile

BACKEND = "inductor"
OF_PACKAGES = "G['__import_torch", "G['__import_lightning_fl", "__import__('torch')"
"""Prefixes of the names of torch's guards on packages, whose code does not change."""


class Graph(ABC):
    """Compiled step for batches of one shape.

    Attributes:
        step_name: name of the module's step.
        is_outdated: True if it would have to be compiled again, for other Python values.
    """

    step_name: str
    is_outdated = False

    @abstractmethod
    def prepare(self, batch: Any, more: Any, /) -> None:
        """Find out by a step without data what the graph returns, and make the function that torch compiles.

        Args:
            batch: the first batch of this shape.
            more: what else the step gets.

        Raises:
            CannotCompile: a graph cannot hold the step.
        """

    @abstractmethod
    def __call__(self, batch: Any, more: Any, /) -> Any:
        """Compute a batch, and log what the step logs."""


def compiled(function: Callable[..., Any], graph: Graph, captures: bool = False) -> Callable[..., Any]:
    """Return a function compiled, for one set of Python values only.

    Args:
        function: the function.
        graph: gets `is_outdated` when the function is called with other values.
        captures: True for CUDA graphs.
    """
    inner, has_begun = _backend(captures), False

    def compile_once(traced: Any, inputs: Any) -> Any:
        nonlocal has_begun
        if has_begun:
            graph.is_outdated = True
            raise CannotCompile(f"{graph.step_name} reads values of Python that change between its steps")
        has_begun = True
        return inner(traced, inputs)

    # Torch keeps its graphs by code: without a copy, those of all shapes and runs would share one limited list.
    given: Any = function
    code, variables = given.__code__.replace(), given.__globals__
    copied = FunctionType(code, variables, given.__name__, given.__defaults__, given.__closure__)
    options: dict[str, Any] = {"guard_filter_fn": _guards}
    return torch.compile(copied, fullgraph=True, dynamic=False, backend=compile_once, options=options)


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


def guard(*values: Any) -> bool:
    """Let torch guard Python values that a graph does not compute with: it guards only those that something reads."""
    return any(value is NotImplemented for value in values)
