"""Importance scores of a network's filters, and the choice of filters to keep.

- `feature_map_ranks`: HRank (Lin et al., CVPR 2020): the score of filter j is the mean over images of
  rank(ReLU(map_j)), with map_j the H×W feature map after the convolution and its batch or group normalisation.
- `filter_magnitudes`: the L1 or L2 norm of the filter's weights (Li et al., ICLR 2017).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fl.checks import whole_share
from lightning_fl.checks.evaluation_mode import evaluating
from lightning_fl.checks.float32 import full_float32
from lightning_fl.errors import UserError, require

NORMS = (_BatchNorm, nn.GroupNorm)
"""Normalisations whose outputs are the feature maps of the convolution before them."""

Scores = Mapping[str, Tensor]
"""Scores (c_l,) of the filters of each layer, by the name of its module; filters with low scores are removed first."""


@full_float32()
def feature_map_ranks(module: nn.Module, batches: Iterable[Any], layers: Sequence[str]) -> dict[str, Tensor]:
    """Return the mean rank (c_l,) of every filter's feature map after ReLU, over all images of the batches.

    The module is evaluated without gradients and keeps its mode. A map whose height or width is 1 has rank 0 or 1; a
    map of zeros has rank 0. Ranks are those of `torch.linalg.matrix_rank` with its tolerance σ_max · max(H, W) · ε.

    Args:
        module: network that takes the images.
        batches: images (B, …), or tuples that begin with them, at least one batch; HRank reads five batches of 128.
        layers: names of convolutions.

    Raises:
        UserError: there are no images, forward does not use a layer, or feature maps are not finite.
    """
    totals: dict[str, Tensor] = {}
    num_images = 0
    for batch in batches:
        images = _images(module, batch)
        num_images += len(images)
        for name, maps in _feature_maps(module, images, layers).items():
            ranks = _ranks(name, maps).sum(0, dtype=torch.float64).cpu()
            totals[name] = totals.get(name, 0) + ranks
    require(num_images > 0, "feature-map ranks need at least one batch of images, got none.")
    return {name: (totals[name] / num_images).float() for name in layers}


def filter_magnitudes(module: nn.Module, layers: Sequence[str], norm: float = 1) -> dict[str, Tensor]:
    """Return the L1 norm (c_l,), or the norm of order `norm`, of every filter's weights, without biases."""
    weights: dict[str, Any] = {name: module.get_submodule(name).weight for name in layers}
    return {
        name: torch.linalg.vector_norm(weight.detach().flatten(1), norm, dim=1, dtype=torch.float64).float().cpu()
        for name, weight in weights.items()
    }


def lowest(scores: Tensor, count: int) -> Tensor:
    """Return the indices (ascending) of the `count` lowest scores: ties go to the lower index; one always remains.

    >>> lowest(torch.tensor([2.0, 1.0, 1.0, 5.0]), 1)
    tensor([1])
    >>> lowest(torch.tensor([2.0, 1.0, 1.0, 5.0]), 9)
    tensor([0, 1, 2])
    """
    count = min(count, len(scores) - 1)
    return scores.argsort(stable=True)[:count].sort().values


def filters_to_keep(
    scores: Scores, rates: float | Mapping[str, float], blocks: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the filters (ascending indices) of each layer that stay when the ⌊rate · c_l⌋ with the lowest scores are removed.

    A layer with blocks loses whole blocks, the lowest mean scores first, of at most ⌊rate · c_l⌋ filters together; one block
    always remains.

    Args:
        scores: scores of each layer's filters (c_l,).
        rates: share of filters that a layer loses, in [0, 1): one for all, or one per layer (other layers lose none).
        blocks: number of each filter's block (c_l,), by layer; filters of a block stay or are removed together. None: every
            filter is a block of its own.

    >>> filters_to_keep({"conv1": torch.tensor([3.0, 1.0, 2.0, 4.0])}, 0.5)
    {'conv1': tensor([0, 3])}
    >>> filters_to_keep({"conv1": torch.tensor([3.0, 1.0, 2.5, 4.0])}, 0.5, {"conv1": torch.tensor([0, 0, 2, 2])})
    {'conv1': tensor([2, 3])}
    """
    kept_filters = {}
    for name, layer_scores in scores.items():
        rate = rates.get(name, 0.0) if isinstance(rates, Mapping) else rates
        quota = whole_share(rate, len(layer_scores))
        lost = (
            lowest(layer_scores, quota)
            if blocks is None
            else _lowest_blocks(layer_scores, blocks[name].to(layer_scores.device), quota)
        )
        is_kept = torch.ones(len(layer_scores), dtype=torch.bool)
        is_kept[lost] = False
        kept_filters[name] = is_kept.nonzero().flatten()
    return kept_filters


def _lowest_blocks(scores: Tensor, blocks: Tensor, quota: int) -> Tensor:
    """Return the filters (ascending) of the blocks with the lowest mean scores, at most `quota` filters and not all blocks."""
    _, number, sizes = blocks.unique(return_inverse=True, return_counts=True)
    means = scores.new_zeros(len(sizes), dtype=torch.float64).index_add_(0, number, scores.double()) / sizes
    order = means.argsort(stable=True)[: len(sizes) - 1]
    taken = order[sizes[order].cumsum(0) <= quota]
    return torch.isin(number, taken).nonzero().flatten()


def _feature_maps(module: nn.Module, images: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
    """Return outputs (B, c_l, …) of the layers in one forward pass, or of the normalisations that read them."""
    maps: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda part, inputs, output: maps.__setitem__(name, output)

    def normalised(part: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        maps.update({name: output for name, output_of in maps.items() if output_of is inputs[0]})

    handles = [module.get_submodule(name).register_forward_hook(keep(name)) for name in layers]
    handles += [part.register_forward_hook(normalised) for part in module.modules() if isinstance(part, NORMS)]
    try:
        with torch.no_grad(), evaluating(module):
            module(images)
    finally:
        for handle in handles:
            handle.remove()
    for name in layers:
        require(name in maps, f"feature-map ranks: forward does not use the layer {name!r}.")
    return maps


def _ranks(name: str, maps: Tensor) -> Tensor:
    """Return the ranks (B, c_l) of maps (B, c_l, H, W), computed in float32 or wider."""
    maps = maps.float() if maps.dtype in (torch.float16, torch.bfloat16) else maps
    require(bool(maps.isfinite().all()), f"feature-map ranks: the feature maps of {name!r} are not finite.")
    maps = maps.relu().reshape(*maps.shape[:2], maps.shape[2] if maps.dim() > 2 else 1, -1)
    if 1 in maps.shape[2:]:
        return (maps != 0).flatten(2).any(-1).long()
    return torch.linalg.matrix_rank(maps)


def _images(module: nn.Module, batch: Any) -> Tensor:
    images = batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(images, Tensor):
        raise UserError(
            f"feature-map ranks need batches of images, or tuples that begin with them, got {type(images).__name__}; "
            "FilterPruning with importance 'magnitude' needs no images."
        )
    parameter = next((p for p in module.parameters() if p.is_floating_point()), images)
    return images.to(parameter.device, parameter.dtype) if images.is_floating_point() else images.to(parameter.device)
