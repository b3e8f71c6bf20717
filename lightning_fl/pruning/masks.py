"""Masks that keep the weights of largest magnitude in a network; all others become 0 and stay 0.

A mask changes neither the shapes nor the multiply-accumulates of a network, unlike `lightning_fl.pruning.apply_plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from math import ceil
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_fl.pruning.plan import Plan

MASKS = "pruning_masks"

Masks = dict[str, Tensor]
"""Masks of the parameters that lose weights, by name: bools of the parameter's shape, True where a weight stays."""


def masks_of(module: nn.Module) -> Masks:
    """Return the masks under which a module is trained; {} if there are none."""
    return dict(vars(module).get(MASKS, {}))


def prunable(module: nn.Module, exclude: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the layers that a mask may prune: all trained layers except normalisations.

    Args:
        module: a network.
        exclude: name parts, such as `fc1`, of layers to leave out.

    Returns:
        Names of parameters by the name of their layer, in the network's order. A parameter that several layers share belongs to
        the first of them.
    """
    layers: dict[str, list[str]] = {}
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for path, layer in module.named_modules():
        if isinstance(layer, (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
            continue
        if not set(path.split(".")) & set(exclude):
            names = [name for name, _ in layer.named_parameters(path, recurse=False) if name in trained]
            layers |= {path: names} if names else {}
    return layers


def largest(tensors: Mapping[str, Tensor], rate: float, kept: Mapping[str, Tensor] | None = None) -> Masks:
    """Return masks of the numbers above the ⌈rate · R⌉-th smallest magnitude, counted from 0, of all R in the tensors.

    Every tensor with two axes or more keeps at least its largest number, so that no layer is disconnected. A warning says if
    many numbers of equal magnitude are pruned beyond the rate.

    Args:
        tensors: weights and biases by name.
        rate: share of the numbers to prune, in [0, 1); 0 prunes none.
        kept: earlier masks; R counts only the numbers that they keep, and the others stay pruned.

    >>> largest({"weight": torch.tensor([[3.0, -1.0], [0.5, 2.0]]), "bias": torch.tensor([0.1])}, rate=0.3)
    {'weight': tensor([[ True, False],
            [False,  True]]), 'bias': tensor([False])}
    """
    kept = kept or {}
    masks = {name: kept.get(name, torch.ones_like(x, dtype=torch.bool)).to(x.device) for name, x in tensors.items()}
    magnitudes = {name: x.detach().abs() for name, x in tensors.items()}
    joined = torch.cat([magnitudes[name][mask] for name, mask in masks.items()]).sort().values
    if not rate or not len(joined):
        return masks
    # Use the decimal fraction as written, not the nearest binary one.
    place = min(ceil(Fraction(str(rate)) * len(joined)), len(joined) - 1)
    threshold = joined[place]
    smaller_masks = {name: mask & (magnitudes[name] > threshold) for name, mask in masks.items()}
    for name, mask in smaller_masks.items():
        if mask.dim() > 1 and mask.numel() and not mask.any():
            mask[torch.unravel_index(magnitudes[name].argmax(), mask.shape)] = True
    num_pruned = len(joined) - sum(int(mask.sum()) for mask in smaller_masks.values())
    if num_pruned > place + 1:
        rank_zero_warn(
            f"{num_pruned / len(joined):.1%} of the weights are pruned instead of {rate:.1%}, because many have the same "
            f"magnitude {float(threshold):g}: exclude layers that start at 0, such as LoRA's, or prune after they have been "
            "trained."
        )
    return smaller_masks


@torch.no_grad()
def apply_masks(module: nn.Module, masks: Masks, optimizers: Iterable[Optimizer] = ()) -> None:
    """Set a module's parameters, and all optimiser state that has a parameter's shape, to 0 outside the masks.

    The module records these masks, combined with earlier ones (`masks_of`), until `forget_masks`.
    """
    present_masks = masks_of(module)
    parameters = dict(module.named_parameters())
    for name, mask in masks.items():
        parameters[name].mul_(mask)
        for optimizer in optimizers:
            state: dict[str, Any] = optimizer.state.get(parameters[name], {})
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == mask.shape:
                    value.mul_(mask)
    vars(module)[MASKS] = present_masks | {
        name: mask & present_masks[name] if name in present_masks else mask for name, mask in masks.items()
    }


def cut_masks(module: nn.Module, plan: Plan) -> None:
    """Cut the masks of a module in the same way as its layers."""
    if masks := masks_of(module):
        vars(module)[MASKS] = {name: plan.cut(name, mask) for name, mask in masks.items()}


def forget_masks(module: nn.Module) -> None:
    """Remove a module's masks, so that later training may change its zeros."""
    vars(module).pop(MASKS, None)


def hold_masks(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[RemovableHandle]:
    """Keep a module under its masks in an ordinary training, until the returned handles are removed.

    Parameters get no gradient outside their masks, so norm clipping and moments ignore those positions. After each
    optimiser step the parameters are set to 0 there, because momentum and weight decay may have changed them. Frozen
    parameters need no hook.
    """
    parameters = dict(module.named_parameters())

    def masked(name: str, gradient: Tensor) -> Tensor:
        return gradient * vars(module)[MASKS][name]

    @torch.no_grad()
    def after_step(*arguments: Any) -> None:
        for name, mask in vars(module)[MASKS].items():
            parameters[name].mul_(mask)

    trained = [name for name in masks_of(module) if parameters[name].requires_grad]
    handles = [parameters[name].register_hook(partial(masked, name)) for name in trained]
    return handles + [optimizer.register_step_post_hook(after_step) for optimizer in optimizers]
