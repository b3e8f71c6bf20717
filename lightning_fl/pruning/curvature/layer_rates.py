"""From the rates of many sources of data to the rate of each layer: the rest of FedAP.

Liu et al., Efficient Federated Learning Using Dynamic Update and Adaptive Pruning with Momentum on Shared Server Data, ACM TIST
2024, equations (14) and (15):

    p* = Σ_k a_k p*_k / Σ_k a_k,   a_k = n_k / (D(P_k) + ε)          D: the non-IID degree of the source's labels
    𝒱  = the ⌊R p*⌋-th smallest |v| of all R parameters
    p*_l = share of |v| < 𝒱 among the weights of layer l, without its bias

Layer l then loses ⌊p*_l c_l⌋ of its c_l filters, and keeps at least one (`filters_to_keep`).
The paper's sum over clients ends at n, which should be their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor


def source_weights(num_samples: Sequence[float], degrees: Sequence[float], epsilon: float = 1e-4) -> np.ndarray:
    """a_k, which trusts large sources, and those whose labels are like everyone's.

    Args:
        num_samples: n_k of each source.
        degrees: D(P_k) of each, in [0, 1].
        epsilon: ε > 0, so that no source outweighs all others for being typical.

    Returns:
        (N,) float64.
    """
    return np.asarray(num_samples, dtype=np.float64) / (np.asarray(degrees, dtype=np.float64) + epsilon)


def mean_rate(rates: Sequence[float] | np.ndarray, weights: np.ndarray) -> float:
    """p*, the sources' rates (N,) under their weights (N,)."""
    return float(np.average(np.asarray(rates, dtype=np.float64), weights=weights))


def magnitude_threshold(parameters: Iterable[Tensor], rate: float) -> float:
    """𝒱: about a share `rate` of all numbers is smaller in magnitude.

    Args:
        parameters: all of the network's: weights, biases, those of fully connected layers.
        rate: p* in [0, 1).

    Returns:
        The ⌊R p*⌋-th smallest magnitude, counted from 1; 0 where that is none.

    >>> magnitude_threshold([torch.tensor([[3.0, -1.0]]), torch.tensor([-2.0, 4.0])], 0.6)
    2.0
    """
    magnitudes = torch.cat([parameter.detach().abs().reshape(-1) for parameter in parameters])
    # The decimal fraction that was written, not the binary one nearest to it: 0.29 · 100 is 29.
    position = int(Fraction(str(rate)) * len(magnitudes))
    return float(magnitudes.kthvalue(position).values) if position else 0.0


def layer_rate(weight: Tensor, threshold: float) -> float:
    """p*_l.

    Args:
        weight: of the layer, without bias.
        threshold: 𝒱.
    """
    return int((weight.detach().abs() < threshold).sum()) / weight.numel()
