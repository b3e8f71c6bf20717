"""Masks: which numbers of a network stay, those of largest magnitude, while all others are 0 and remain so.

A mask changes neither shapes nor multiply-accumulates of a network, unlike the cut of `lightning_fl.pruning.apply_plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_fl.pruning.plan import Plan

MASKS = "pruning_masks"

Masks = dict[str, Tensor]
"""For each parameter that loses some of its numbers, by its name, bools of its shape: which stay."""


def masks_of(module: nn.Module) -> Masks:
    """The masks under which a module is being trained; {} if there are none."""
    return dict(vars(module).get(MASKS, {}))


def prunable(module: nn.Module, exclude: Sequence[str] = ()) -> dict[str, list[str]]:
    """The layers whose numbers a mask may leave out: all that are trained but normalisation.

    Args:
        module: a network.
        exclude: layers with one of these words as a part of their name are left alone.

    Returns:
        Names of parameters by the name of their layer, in the network's order.
    """
    layers: dict[str, list[str]] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
            continue
        if not set(path.split(".")) & set(exclude):
            own = [name for name, x in layer.named_parameters(path, recurse=False) if x.requires_grad]
            layers |= {path: own} if own else {}
    return layers


def largest(tensors: Mapping[str, Tensor], rate: float, kept: Mapping[str, Tensor] | None = None) -> Masks:
    """Which numbers of some tensors stay: those above the ⌈rate · R⌉-th smallest magnitude, counted from 0, of all R.

    Of every tensor with two axes or more the largest number stays in any case, so that no layer is cut off.

    Args:
        tensors: weights and biases by name.
        rate: share of the numbers to leave out, in [0, 1); 0 leaves out none.
        kept: an earlier mask; only what it has kept counts, and what it has not stays out.

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
    # The decimal fraction that was written, not the binary one nearest to it.
    threshold = joined[min(ceil(Fraction(str(rate)) * len(joined)), len(joined) - 1)]
    found = {name: mask & (magnitudes[name] > threshold) for name, mask in masks.items()}
    for name, mask in found.items():
        if mask.dim() > 1 and not mask.any():
            mask.view(-1)[magnitudes[name].argmax()] = True
    return found


@torch.no_grad()
def apply_masks(module: nn.Module, masks: Masks, optimizers: Iterable[Optimizer] = ()) -> None:
    """Make a module's parameters, and every state of the optimisers that has a parameter's shape, 0 outside their masks.

    The masks, and those of others who have pruned it, are remembered (`masks_of`) until `forget_masks`.
    """
    known = masks_of(module)
    parameters = dict(module.named_parameters())
    for name, mask in masks.items():
        parameters[name].mul_(mask)
        for optimizer in optimizers:
            state: dict[str, Any] = optimizer.state.get(parameters[name], {})
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == mask.shape:
                    value.mul_(mask)
    vars(module)[MASKS] = known | {name: mask & known[name] if name in known else mask for name, mask in masks.items()}


def cut_masks(module: nn.Module, plan: Plan) -> None:
    """Let the masks of a module follow a cut of its layers."""
    if masks := masks_of(module):
        vars(module)[MASKS] = {name: plan.cut(name, mask) for name, mask in masks.items()}


def forget_masks(module: nn.Module) -> None:
    """The module is trained without masks from now on; its zeros stay where they are."""
    vars(module).pop(MASKS, None)


def hold_masks(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[RemovableHandle]:
    """Keep a module under the masks that it has in an ordinary training, until the returned handles are removed.

    Parameters get no gradient outside their masks, so that clipping by norm and moments know nothing of it, and after each
    step of an optimiser they are 0 there, whatever momentum and weight decay have made of them.
    """
    parameters = dict(module.named_parameters())

    def masked(name: str, gradient: Tensor) -> Tensor:
        return gradient * vars(module)[MASKS][name]

    @torch.no_grad()
    def after_step(*arguments: Any) -> None:
        for name, mask in vars(module)[MASKS].items():
            parameters[name].mul_(mask)

    handles = [parameters[name].register_hook(partial(masked, name)) for name in masks_of(module)]
    return handles + [optimizer.register_step_post_hook(after_step) for optimizer in optimizers]
