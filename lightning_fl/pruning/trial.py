"""Copies of a network to try a pruning on: example input, forward pass, comparison of outputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.compile import to_uncompiled
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fl.errors import UserError, require
from lightning_fl.pruning.apply_plan import PLANS, replace_data

TOLERANCE = 1e-8
"""Relative difference, in float64, up to which the outputs of two networks count as equal."""


def twin_of(module: nn.Module) -> nn.Module:
    """Return a copy on the CPU in float64, without the trainer. All parameters that can require gradients do."""
    try:
        twin = eager_copy(module)
    except Exception as error:
        raise UserError(
            f"pruning finds the filters on a copy of the module, but {type(module).__name__} cannot be copied: {error}"
        ) from None
    vars(twin).pop(PLANS, None)
    twin = twin.cpu().double().eval()
    for parameter in twin.parameters():
        parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
    return twin


def eager_copy(module: nn.Module) -> nn.Module:
    """Return a copy without the trainer and the trainer's `log`, which computes without `torch.compile`."""
    attached = [vars(part).get(name) for part in module.modules() for name in ("_trainer", "_fabric", "log")]
    twin: Any = copy.deepcopy(module, {id(thing): None for thing in attached if thing is not None})
    for part in twin.modules():  # a copied LightningModule would call the compiled code of the original
        part._compiled_call_impl = None
        if isinstance(part, LightningModule):
            with suppress(ValueError):  # the part is not compiled
                to_uncompiled(part)
    return twin


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Restore the module's tensors and attributes at the end; faster than a copy of the module."""
    plain_parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    parts = [(part, dict(vars(part)), dict(part._parameters), dict(part._buffers)) for part in plain_parts]
    values: list[tuple[Any, Tensor]] = [(parameter, parameter.data) for parameter in module.parameters()]
    values += [(buffer, buffer.data.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for part, attributes, parameters, buffers in parts:
            contents: list[tuple[Any, Any]] = [
                (vars(part), attributes),
                (part._parameters, parameters),
                (part._buffers, buffers),
            ]
            for holder, content in contents:
                holder.clear()
                holder.update(content)
        for tensor, data in values:
            replace_data(tensor, data)


def arguments_of(module: nn.Module, batch: Any) -> Any:
    """Return the arguments of `forward` for one sample, on the CPU in float64.

    Args:
        module: module whose forward takes them.
        batch: batch to take the sample from; None for the module's `example_input_array`.

    Raises:
        UserError: there is no example.
    """
    batch = getattr(module, "example_input_array", None) if batch is None else batch
    require(
        batch is not None,
        f"pruning {type(module).__name__} needs an example input for its forward: set its example_input_array, or pass "
        "example_input.",
    )
    return tree_map(_first_sample, batch if isinstance(batch, (dict, tuple)) else (batch,))


def _first_sample(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach().cpu()
    leaf = (leaf[:1] if leaf.dim() else leaf).clone()
    return leaf.double() if leaf.is_floating_point() else leaf


def random_like(arguments: Any) -> Any:
    """Return arguments of the same shapes with random floats."""
    return tree_map(lambda x: torch.randn_like(x) if isinstance(x, Tensor) and x.is_floating_point() else x, arguments)


def call(module: nn.Module, arguments: Any) -> Any:
    """Call the module with positional or named arguments."""
    return module(**arguments) if isinstance(arguments, dict) else module(*arguments)


def call_as_in_training(module: nn.Module, arguments: Any) -> Any:
    """Call the module in training mode, but its layers (modules without children) in evaluation mode.

    Layers that only training uses then take part, but the result depends neither on chance nor on the size of the batch.
    """
    for part in module.modules():
        part.training = next(part.children(), None) is not None
    try:
        return call(module, arguments)
    finally:
        module.eval()


def modules_run(module: nn.Module, run: Callable[[], Any]) -> set[nn.Module]:
    """Return the parts of a module that take part in a forward pass."""
    used_parts: set[nn.Module] = set()
    handles = [part.register_forward_pre_hook(lambda part, inputs: used_parts.add(part)) for part in module.modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return used_parts


def traced_outputs(result: Any) -> list[Tensor]:
    """Return the tensors in a result of `call` that have an autograd graph."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def randomise(module: nn.Module) -> None:
    """Fill the module's floats with random numbers: no symmetries, and outputs about as large as inputs."""
    for name, tensor in module.named_parameters(recurse=False):
        if not tensor.is_floating_point():
            continue
        scale = (6 / max(1, math.prod(tensor.shape[1:]))) ** 0.5 if tensor.dim() > 1 else 0.1
        shift = 1.0 if tensor.dim() == 1 and name == "weight" else 0.0
        tensor.uniform_(shift - scale, shift + scale)
    if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None:
        module.running_mean.normal_(std=0.1)
        module.running_var.uniform_(0.5, 1.5)


def fit_norms(module: nn.Module, run: Callable[[], Any]) -> None:
    """Scale the statistics of each batch normalisation to the size of its input in a forward pass.

    Without it, outputs double from block to block in a deep residual network, and its gates then turn rounding errors of 1e-16
    into differences of 1e-4.
    """

    def fit(part: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        if part.running_mean is not None and part.running_var is not None:
            square = inputs[0].square().mean()
            part.running_mean.mul_(square.sqrt())
            part.running_var.mul_(square)

    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    handles = [part.register_forward_pre_hook(fit) for part in norms]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()


def are_alike(first: Any, second: Any) -> bool:
    """True if all tensors of two results have equal shapes and, up to rounding, equal values; of bools the shapes suffice."""
    pairs = list(zip(tree_leaves(first), tree_leaves(second), strict=True))
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor)]
    numbers = [(a, b) for a, b in tensors if a.dtype != torch.bool and a.numel()]
    return all(a.shape == b.shape for a, b in tensors) and all(
        bool((a - b).abs().max() <= TOLERANCE * b.abs().max()) for a, b in numbers
    )
