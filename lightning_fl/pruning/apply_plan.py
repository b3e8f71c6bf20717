"""Cut a network, and the state of its optimisers, down to a plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fl.errors import require
from lightning_fl.pruning.masks import cut_masks
from lightning_fl.pruning.plan import Plan

PLANS = "pruning_plans"


def prune(module: nn.Module, plan: Plan, optimizers: Iterable[Optimizer] = ()) -> None:
    """Cut the parameters and buffers of a module in place, and all optimiser state that has a parameter's shape.

    Parameters stay the same objects, so references to them stay valid; their gradients are dropped. The module records
    the plan (`plans_of`).

    Raises:
        UserError: an optimiser has state of another shape than its parameter, raised before anything is cut.
    """
    optimizers = list(optimizers)
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    for name in plan.axes.keys() & parameters.keys():
        _check_state(name, parameters[name], optimizers)
    for name in plan.axes:
        if name in parameters:
            _cut_parameter(name, parameters[name], plan, optimizers)
        else:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, plan.cut(name, buffers[name]))
    for owner in {name.rpartition(".")[0] for name in plan.axes}:
        tell_shape(module.get_submodule(owner))
    cut_masks(module, plan)
    vars(module).setdefault(PLANS, []).append(plan)


def plans_of(module: nn.Module) -> list[Plan]:
    """Return the plans by which a module was cut in this process, in order."""
    return list(vars(module).get(PLANS, []))


def _cut_parameter(name: str, parameter: nn.Parameter, plan: Plan, optimizers: Iterable[Optimizer]) -> None:
    shape = parameter.shape
    parameter.grad = None
    replace_data(parameter, plan.cut(name, parameter.data))
    for optimizer in optimizers:
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == shape:
                state[key] = plan.cut(name, value)


def _check_state(name: str, parameter: nn.Parameter, optimizers: Iterable[Optimizer]) -> None:
    """Raise `UserError` if an optimiser's state of a parameter has another shape, as Adafactor's rows and columns have."""
    for optimizer in optimizers:
        for key, value in optimizer.state.get(parameter, {}).items():
            require(
                not isinstance(value, Tensor) or value.numel() < 2 or value.shape == parameter.shape,
                f"{name!r} cannot lose filters, because {type(optimizer).__name__} keeps its {key!r} in another shape than the "
                "parameter's: use another optimiser, such as Adam.",
            )


def replace_data(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Give a parameter the data of a tensor, which may have another shape."""
    other = torch.float64 if tensor.dtype != torch.float64 else torch.float32
    # Without this change of dtype, an existing gradient node of the parameter rejects the new shape.
    parameter.data = torch.empty(0, dtype=other, device=tensor.device)
    parameter.data = tensor


def reads_along(module: nn.Module, name: str, axis: int) -> bool:
    """True if an axis of the tensor `name` of a module stands for the inputs of its layer.

    Weights have the axes (outputs, inputs, …); in a transposed convolution (inputs, outputs, …). The channels of a depthwise
    convolution are both inputs and outputs.
    """
    owner, _, leaf = name.rpartition(".")
    layer = module.get_submodule(owner)
    if isinstance(layer, nn.modules.conv._ConvTransposeNd) and leaf == "weight":
        return axis == 0 and layer.groups == 1
    return axis > 0


def tell_shape(layer: nn.Module) -> None:
    """Set a layer's size attributes, such as `out_channels`, from the shape of its weight."""
    if isinstance(layer, nn.modules.conv._ConvNd):
        if layer.groups == layer.in_channels > 1:  # depthwise
            layer.groups = layer.weight.shape[0]
        sizes = layer.weight.shape[0], layer.weight.shape[1] * layer.groups
        is_transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
        layer.in_channels, layer.out_channels = sizes if is_transposed else reversed(sizes)
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.modules.batchnorm._NormBase):
        tensor: Any = layer.weight if layer.weight is not None else layer.running_mean
        layer.num_features = tensor.numel()
    elif isinstance(layer, nn.GroupNorm):
        size = layer.num_channels // layer.num_groups
        layer.num_channels = layer.weight.numel()
        layer.num_groups = layer.num_channels // size
