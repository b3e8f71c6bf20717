"""A copy of a network with random weights, whose graph torch-pruning traces, and on which plans are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from lightning_fl.errors import UserError
from lightning_fl.pruning.apply_plan import prune, reads_along
from lightning_fl.pruning.plan import Plan
from lightning_fl.pruning.recurrent import as_one_operation
from lightning_fl.pruning.trial import (
    are_alike,
    arguments_of,
    call,
    call_as_in_training,
    fit_norms,
    modules_run,
    random_like,
    randomise,
    restored,
    tensors_of,
    traced_outputs,
    twin_of,
)


@contextmanager
def graphs() -> Iterator[None]:
    """Enable autograd, whose graph is traced, even while the caller evaluates, and restore the caller's random state.

    Parts that were compiled run without `torch.compile`, so that each of their layers is traced.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


class TracedTwin:
    """A copy of a network with random weights.

    Args:
        module: the network; it does not change.
        example_input: a batch (a tensor, a tuple or dictionary of arguments) for its forward; None:
            `example_input_array`.

    Attributes:
        module: the copy, on the CPU in float64.
        inputs: random arguments of its forward, of the example's shapes.
        calls: modes in which pruned networks must compute the same: the first is traced.
        evaluated: parts of the copy that evaluation uses.
    """

    @graphs()
    def __init__(self, module: nn.Module, example_input: Any = None) -> None:
        self.module = twin_of(module)
        self._example = arguments_of(module, example_input)
        self.calls = self._find_calls()
        torch.manual_seed(0)
        with torch.no_grad():
            for part in self.module.modules():
                randomise(part)
            self.inputs = random_like(self._example)
            with suppress(
                Exception
            ):  # a forward that refuses random numbers also fails in every trial, which reports it
                fit_norms(self.module, lambda: call(self.module, self.inputs))

    def _find_calls(self) -> tuple[Callable[[nn.Module, Any], Any], ...]:
        def layers_of(way: Callable[[nn.Module, Any], Any]) -> set[nn.Module]:
            with restored(self.module):
                return modules_run(self.module, lambda: way(self.module, self._example))

        try:
            self.evaluated = layers_of(call)
        except Exception as error:
            raise UserError(
                f"pruning: the network's forward does not take its example input: {_said(error).rstrip('.')}; set its "
                "example_input_array, or pass example_input."
            ) from None
        try:
            trained = layers_of(call_as_in_training)
        except Exception:  # a forward that needs more than the example while it trains, such as targets
            return (call,)
        return (call_as_in_training, call) if trained - self.evaluated else (call,)

    @torch.no_grad()
    def holds(self, plan: Plan) -> bool:
        """True if the copy cut to the plan computes the same as the whole one with lost inputs set to zero."""
        twin = self.module
        with restored(twin):
            prune(twin, plan)
            cut = [way(twin, self.inputs) for way in self.calls]
        with restored(twin):
            for name, tensor in tensors_of(twin).items():
                for axis, indices in plan.axes.get(name, {}).items():
                    if reads_along(twin, name, axis):
                        lost = torch.ones(tensor.shape[axis], dtype=torch.bool).index_fill(0, indices, False)
                        tensor.data = tensor.data.index_fill(axis, lost.nonzero().flatten(), 0.0)
            whole = [way(twin, self.inputs) for way in self.calls]
        return are_alike(cut, whole)

    def graph(self) -> Any:
        """Return torch-pruning's `DependencyGraph` of the copy.

        Raises:
            UserError: torch-pruning is missing, or cannot trace the network.
        """
        pruning = _torch_pruning()
        graph = pruning.DependencyGraph()
        try:
            with as_one_operation(self.module):
                graph.build_dependency(
                    self.module, self._example, forward_fn=self.calls[0], output_transform=traced_outputs, verbose=False
                )
        except Exception as error:
            name = type(self.module).__name__
            raise UserError(
                f"pruning: torch-pruning cannot read the graph of {name}, probably because it splits, reshapes or shuffles "
                f"channels in a way that torch-pruning does not know (its own words: {_said(error)})."
            ) from None
        return graph


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _torch_pruning() -> Any:
    try:
        import torch_pruning
    except ImportError:
        raise UserError(
            "pruning filters needs the package torch-pruning: pip install 'torch-pruning>=1.6.1,<2'."
        ) from None
    return torch_pruning
