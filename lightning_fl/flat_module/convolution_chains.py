"""Chains of convolutions, computed with their channels innermost (`torch.channels_last`), which is faster on a CPU.

A chain is a run of torch's own layers in an `nn.Sequential`. Its first convolution copies what it reads into this format, and
the result is copied back at its end. Batches, parameters, gradients, and whatever the user's code reads between two layers,
keep their layout, so that `x.view(len(x), -1)` works as in Lightning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

INSIDE = frozenset(
    {
        nn.Conv2d,
        nn.MaxPool2d,
        nn.AvgPool2d,
        nn.AdaptiveMaxPool2d,
        nn.AdaptiveAvgPool2d,
        nn.ReLU,
        nn.ReLU6,
        nn.LeakyReLU,
        nn.ELU,
        nn.SELU,
        nn.GELU,
        nn.SiLU,
        nn.Hardswish,
        nn.Tanh,
        nn.Sigmoid,
        nn.Identity,
    }
)
"""Layers that compute the same in both formats. Dropout draws its mask in the order of storage, so it is not one of them."""
INDICES = frozenset({nn.MaxPool2d, nn.AdaptiveMaxPool2d})
"""Layers that can return indices, too, in the order of the other format."""


class ConvolutionChains:
    """Context in which a module computes its chains with the channels innermost."""

    def __init__(self, module: nn.Module, is_used: bool = True) -> None:
        """Find the chains, if they are used; those that `torch.compile` has compiled are left to it."""
        compiled = {id(inner) for part in module.modules() if is_compiled(part) for inner in part.modules()}
        self._sequences = [
            part
            for part in module.modules()
            if is_used
            and type(part) is nn.Sequential
            and id(part) not in compiled
            and "forward" not in vars(part)
            and any(type(inner) is nn.Conv2d and inner.weight.is_contiguous() for inner in part.modules())
        ]

    def __enter__(self) -> None:
        """Let the sequences compute their chains."""
        for sequence in self._sequences:
            vars(sequence)["forward"] = partial(_forward, sequence)

    def __exit__(self, *exception: object) -> None:
        """Let them compute as torch does again."""
        for sequence in self._sequences:
            del vars(sequence)["forward"]

    @contextmanager
    def in_graph(self) -> Iterator[None]:
        """Let a graph that torch compiles compute the chains in the same format."""
        for sequence in self._sequences:
            vars(sequence)["forward"] = partial(_forward_in_graph, sequence)
        try:
            yield
        finally:
            self.__exit__()


def is_compiled(part: nn.Module) -> bool:
    """True if `torch.compile` or `compile` has compiled this part of a module."""
    return part._compiled_call_impl is not None or isinstance(part, torch._dynamo.OptimizedModule)


def _forward(sequence: nn.Sequential, x: Any) -> Any:
    """Return the output of a sequence of layers."""
    if torch.compiler.is_compiling():
        return nn.Sequential.forward(sequence, x)
    return _forward_in_graph(sequence, x)


def _forward_in_graph(sequence: nn.Sequential, x: Any) -> Any:
    """Return the same, with operations that torch compiles."""
    return _plain(*_through(sequence, x, is_innermost=False))


def _through(sequence: nn.Sequential, x: Any, is_innermost: bool) -> tuple[Any, bool]:
    """Return the output of a sequence of layers, and True if it has the channels innermost because a chain has begun."""
    for part in sequence:
        if type(part) is nn.Sequential and not _has_hooks(part):
            x, is_innermost = _through(part, x, is_innermost)
            continue
        if not _is_inside(part):
            x, is_innermost = _plain(x, is_innermost), False
        elif type(part) is nn.Conv2d and _can_begin(x):
            # A clone, because torch takes a tensor of one channel for both formats.
            x, is_innermost = x.clone(memory_format=torch.channels_last), True
        x = part(x)
    return x, is_innermost


def _plain(x: Any, is_innermost: bool) -> Any:
    """Return a tensor in the usual layout if a chain has changed it."""
    return x.contiguous() if is_innermost else x


def _can_begin(x: Any) -> TypeGuard[Tensor]:
    """True for usual images (B, C, H, W); a mapped tensor, as in a stack of clients, has no formats."""
    if torch.compiler.is_compiling():
        return x.dim() == 4 and x.is_contiguous()
    return (
        type(x) is Tensor
        and x.dim() == 4
        and x.is_contiguous()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def _is_inside(part: nn.Module) -> bool:
    """True if a chain goes on in this layer, whose output nobody else reads."""
    kind = type(part)
    return kind in INSIDE and not _has_hooks(part) and not (kind in INDICES and part.return_indices)


def _has_hooks(part: nn.Module) -> bool:
    """True if hooks see what the layer reads or returns."""
    return bool(part._forward_pre_hooks or part._forward_hooks or part._backward_pre_hooks or part._backward_hooks)
