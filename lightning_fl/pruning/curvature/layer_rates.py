"""Turn the pruning rates of many sources of data into a rate for each layer: the second part of FedAP.

Liu et al., Efficient Federated Learning Using Dynamic Update and Adaptive Pruning with Momentum on Shared Server Data,
ACM TIST 2024, equation (15):

    p* = Σ_k a_k p*_k / Σ_k a_k,   a_k = n_k / (D(P_k) + ε)          D: the non-IID degree of the source's labels
    𝒱  = the ⌊R p*⌋-th smallest |v| of all R parameters
    p*_l = share of |v| < 𝒱 among the weights of layer l, without its bias

Layer l then loses ⌊p*_l c_l⌋ of its c_l filters, and keeps at least one (`filters_to_keep`).
The paper's sum over clients runs to n; it should run to the number of clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor


def source_weights(num_samples: Sequence[float], degrees: Sequence[float], epsilon: float = 1e-4) -> np.ndarray:
    """Return a_k, which is large for sources with many samples and typical labels.

    Args:
        num_samples: n_k of each source.
        degrees: D(P_k) of each, in [0, 1].
        epsilon: ε > 0, which bounds the weight of a source with D(P_k) near 0.

    Returns:
        (N,) float64.
    """
    return np.asarray(num_samples, dtype=np.float64) / (np.asarray(degrees, dtype=np.float64) + epsilon)


def mean_rate(rates: Sequence[float] | np.ndarray, weights: np.ndarray) -> float:
    """Return p*, the mean of the sources' rates (N,) with weights (N,)."""
    return float(np.average(np.asarray(rates, dtype=np.float64), weights=weights))


def magnitude_threshold(parameters: Iterable[Tensor], rate: float) -> float:
    """Return 𝒱, such that about a share `rate` of all numbers is smaller in magnitude.

    Args:
        parameters: all parameters of the network: weights and biases, also of fully connected layers.
        rate: p* in [0, 1).

    Returns:
        The ⌊R p*⌋-th smallest magnitude, counted from 1; 0 if ⌊R p*⌋ is 0.

    >>> magnitude_threshold([torch.tensor([[3.0, -1.0]]), torch.tensor([-2.0, 4.0])], 0.6)
    2.0
    """
    magnitudes = torch.cat([parameter.detach().abs().reshape(-1) for parameter in parameters])
    # Use the decimal fraction as written, not the nearest binary one: 0.29 · 100 is 29.
    position = int(Fraction(str(rate)) * len(magnitudes))
    return float(magnitudes.kthvalue(position).values) if position else 0.0


def layer_rate(weight: Tensor, threshold: float) -> float:
    """Return p*_l, the share of a layer's weights below the threshold in magnitude.

    Args:
        weight: weight of the layer, without bias.
        threshold: 𝒱.
    """
    return int((weight.detach().abs() < threshold).sum()) / weight.numel()
