"""PruneFL's reconfiguration: keep the weights with which the loss falls fastest per second of training.

Jiang et al., Model Pruning Enables Efficient Federated Learning on Edge Devices, IEEE TNNLS 2023. With Z_j the squared
gradient of weight j, which measures how fast it lowers the loss, and t_j the seconds that it takes in a round,

    Γ(M) = (Z_fixed + Σ_{j ∈ M} Z_j) / (t_fixed + Σ_{j ∈ M} t_j)

is largest for the candidates with Z_j / t_j > Γ(M), which are found in descending order of Z_j / t_j.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_fl.checks import whole_share


def smallest_kept(weights: Tensor, kept: Tensor, layers: Iterable[slice], share: float) -> Tensor:
    """Return the weights that may be pruned: in each layer the ⌊share · kept⌋ kept weights of smallest magnitude.

    Args:
        weights: all weights, (d,).
        kept: weights that are kept so far, bools (d,).
        layers: slice of each layer in the weights; weights in no layer always stay.
        share: share of each layer's kept weights, in [0, 1).

    Returns:
        Bools (d,), True where a weight may be pruned. Ties go to the first weight.

    >>> weights, kept = torch.tensor([3.0, -1.0, 0.5, 2.0, 0.1]), torch.tensor([True, True, False, True, True])
    >>> smallest_kept(weights, kept, [slice(0, 4)], 0.7).tolist()
    [False, True, False, True, False]
    """
    removable = torch.zeros_like(kept)
    for layer in layers:
        positions = kept[layer].nonzero().squeeze(1)
        count = whole_share(share, len(positions))
        order = weights[layer][positions].abs().argsort(stable=True)[:count]
        removable[layer.start + positions[order]] = True
    return removable


def fastest(
    candidates: Tensor,
    importance: Tensor,
    seconds: Tensor,
    fixed_importance: float,
    fixed_seconds: float,
    most: int | None = None,
) -> Tensor:
    """Return the candidates M for which Γ is largest.

    Args:
        candidates: weights to choose from, bools (d,).
        importance: Z ≥ 0 (d,).
        seconds: t > 0 (d,), in seconds.
        fixed_importance: Z_fixed, of all weights that always stay.
        fixed_seconds: t_fixed, of all weights that always stay, in seconds.
        most: largest number of candidates to choose; None: no limit.

    Returns:
        Bools (d,), all False if no weight has any importance.

    >>> importance, seconds = torch.tensor([9.0, 1.0, 6.0, 4.0]), torch.tensor([1.0, 1.0, 2.0, 1.0])
    >>> fastest(torch.tensor([True, True, True, True]), importance, seconds, 0.0, 1.0).tolist()
    [True, False, False, False]
    """
    positions = candidates.nonzero().squeeze(1)
    gains, costs = importance[positions].double(), seconds[positions].double()
    order = (gains / costs).argsort(descending=True, stable=True)
    gains, costs = gains[order], costs[order]
    so_far = fixed_importance + gains.cumsum(0) - gains
    time_so_far = fixed_seconds + costs.cumsum(0) - costs
    better = gains * time_so_far > so_far * costs
    count = int(better.int().cumprod(0).sum())
    chosen = torch.zeros_like(candidates)
    chosen[positions[order[: count if most is None else max(0, min(count, most))]]] = True
    return chosen
