"""Pruning rates from the spectrum of the Hessian: FedAP's expected rates.

Liu et al., Efficient Federated Learning Using Dynamic Update and Adaptive Pruning with Momentum on Shared Server Data,
ACM TIST 2024. With H the Hessian at the model w_T, Δ = w_0 − w_T the step to the initial model, and 𝓛 the Lipschitz
constant of B(Δ) = HΔ − ∇L(w_T + Δ) (the paper prints H without this Δ):

    p* = m / R,   m the first with λ_{m+1} − λ_m > 4𝓛    the paper's rule                            `gap_rate`
    p* = share of the spectrum clearly above 0            the rule of the authors' code, a heuristic  `plateau_rate`

The paper's rule needs all R eigenvalues other than 0, where R is the rank of H; for a large network, the Ritz values and
their weights replace them. Values within rounding of 0 count as 0, as in `numpy.linalg.matrix_rank` in single precision.
𝓛 is estimated as the largest spectral norm of H(w_T) − H(w_T + sΔ) over four s in (0, 1].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lightning_fl.pruning.curvature.products import Product
from lightning_fl.pruning.curvature.spectrum import Spectrum, spectral_norm

GRID = 10_000
MARGIN = 0.01
VARIANCE = 1e-5
FIRST_INCREMENT, LAST_INCREMENT = 0.1, 1e-5
PLATEAU = 0.005
WAY = (0.25, 0.5, 0.75, 1.0)


def plateau_rate(spectrum: Spectrum, max_rate: float = 0.95) -> float:
    """Return the share of the spectrum above the first level s at which this share has stopped falling.

    The Ritz values are smoothed to a density, ratio(s) = 1 − ∫_{λ ≤ s} density. s rises from 0 in steps of 0.1 until
    three steps in a row change the ratio by less than 0.005 each. If the ratio falls below half of ratio(0) before
    that, the search starts again with steps half as long; with steps below 1e-5, the result is ratio(0).

    Args:
        spectrum: spectrum of the Hessian.
        max_rate: upper limit of the rate.

    Returns:
        A rate in [0, max_rate]; NaN if the spectrum is not finite.

    >>> two = Spectrum(np.array([0.0, 5.0]), np.array([0.6, 0.4]))
    >>> round(plateau_rate(two), 6)
    0.4
    """
    if not spectrum.is_finite:
        return float("nan")
    above = _share_above(spectrum)
    increment, first = FIRST_INCREMENT, above(0.0)
    while increment >= LAST_INCREMENT:
        ratios = [first]
        while ratios[-1] >= first / 2:
            falls = -np.diff(ratios[-4:])
            if len(falls) == 3 and bool((falls < PLATEAU).all()):
                return float(np.clip(ratios[-1], 0.0, max_rate))
            ratios.append(above(len(ratios) * increment))
        increment /= 2
    return float(np.clip(first, 0.0, max_rate))


def gap_rate(spectrum: Spectrum, lipschitz: float, max_rate: float = 0.95, of_all: bool = False) -> float:
    """Return the share of the eigenvalues other than 0 below their first gap of more than 4𝓛; 0 if there is none.

    Args:
        spectrum: spectrum of the Hessian.
        lipschitz: 𝓛 ≥ 0.
        max_rate: upper limit of the rate.
        of_all: count the eigenvalues that are 0, too: m / d instead of m / R.

    Returns:
        A rate in [0, max_rate]; NaN if the spectrum or 𝓛 is not finite.

    >>> values = np.array([0, 0.001, 0.002, 0.003, 0.5, 0.6, 2])
    >>> round(gap_rate(Spectrum(values, np.full(7, 1 / 7)), 0.05), 9)
    0.5
    >>> round(gap_rate(Spectrum(values, np.full(7, 1 / 7)), 0.05, of_all=True), 6)
    0.571429
    """
    if not (spectrum.is_finite and np.isfinite(lipschitz)):
        return float("nan")
    sizes = np.abs(spectrum.values)
    counts = of_all | (sizes > len(sizes) * np.finfo(np.float32).eps * sizes.max())
    values, weights = spectrum.values[counts], spectrum.weights[counts]
    gaps = np.diff(values) > 4 * lipschitz
    if not gaps.any():
        return 0.0
    return float(min(weights[: int(gaps.argmax()) + 1].sum() / weights.sum(), max_rate))


def lipschitz_constant(
    hessian: Product,
    on_the_way: Callable[[float], Product],
    start: Tensor,
    generator: torch.Generator,
    iterations: int = 10,
) -> float:
    """Return 𝓛, the largest change of the Hessian between w_T and points towards the initial model.

    Args:
        hessian: product with H(w_T).
        on_the_way: product with H(w_T + sΔ) for s in (0, 1].
        start: as in `spectrum`.
        generator: a CPU generator.
        iterations: iterations of the power method at each of the four points.
    """

    def norm_at(share: float) -> float:
        moved_hessian = on_the_way(share)
        return spectral_norm(lambda vector: hessian(vector) - moved_hessian(vector), start, generator, iterations)

    return float(np.max([norm_at(share) for share in WAY]))


def _share_above(spectrum: Spectrum) -> Callable[[float], float]:
    """Return the function ratio(s) of the smoothed spectrum, which has area 1."""
    grid = np.linspace(spectrum.values.min() - MARGIN, spectrum.values.max() + MARGIN, GRID)
    variance = VARIANCE * max(1.0, grid[-1] - grid[0])
    density = np.zeros(GRID)
    for value, weight in zip(spectrum.values, spectrum.weights, strict=True):
        density += weight * np.exp(-((grid - value) ** 2) / (2 * variance))
    below = np.concatenate([[0.0], np.cumsum(density) / density.sum()])
    return lambda level: float(1 - below[np.searchsorted(grid, level, side="right")])
