"""Which weights to keep so that training gains the most in a second: PruneFL's reconfiguration.

Jiang et al., Model Pruning Enables Efficient Federated Learning on Edge Devices, IEEE TNNLS 2023. With Z_j the squared gradient
of weight j, which tells how fast the loss falls by it, and t_j the seconds that it takes in a round,

    Γ(M) = (Z_fixed + Σ_{j ∈ M} Z_j) / (t_fixed + Σ_{j ∈ M} t_j)

is largest for the candidates with Z_j / t_j > Γ(M), which are found in descending order of Z_j / t_j.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_fl.checks import whole_share


def smallest_kept(weights: Tensor, kept: Tensor, layers: Iterable[slice], share: float) -> Tensor:
    """The weights that may go: of each layer ⌊share · kept⌋ of the smallest magnitudes that it keeps.

    Args:
        weights: (d,).
        kept: bools (d,).
        layers: where each layer lies; what is in none stays.
        share: in [0, 1).

    Returns:
        Bools (d,). Of equal magnitudes the first goes.

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
    """The candidates M for which Γ is largest.

    Args:
        candidates: bools (d,).
        importance: Z ≥ 0 (d,).
        seconds: t > 0 (d,).
        fixed_importance: Z of all that stays in any case.
        fixed_seconds: t of all that stays in any case.
        most: at most so many candidates.

    Returns:
        Bools (d,). Where nothing has any importance, none.

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
