"""Recurrent layers as one operation of a traced graph; torch would show torch-pruning every step of their sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


@contextmanager
def as_one_operation(module: nn.Module) -> Iterator[None]:
    """Let each recurrent layer of torch compute its outputs in one operation, which passes no gradient on."""
    layers: list[Any] = [part for part in module.modules() if type(part) in (nn.RNN, nn.LSTM, nn.GRU)]
    try:
        for layer in layers:
            vars(layer)["forward"] = partial(_forward, layer)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _forward(layer: nn.RNNBase, *inputs: Any, **named: Any) -> Any:
    """Return the layer's outputs, as outputs of one operation that reads all inputs."""
    with torch.no_grad():
        outputs, structure = tree_flatten(type(layer).forward(layer, *inputs, **named))
    if not all(isinstance(output, Tensor) for output in outputs):  # packed sequences
        return type(layer).forward(layer, *inputs, **named)
    read = [x for x in tree_leaves((inputs, named)) if isinstance(x, Tensor)]
    return tree_unflatten(list(_Operation.apply(len(read), *read, *outputs)), structure)


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.num_gradients = 1 + len(tensors)
        return tuple(output.clone() for output in tensors[num_inputs:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        return (None,) * ctx.num_gradients
