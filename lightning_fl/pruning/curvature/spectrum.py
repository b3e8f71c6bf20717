"""Stochastic Lanczos quadrature: the spectrum of a matrix from its products with vectors only.

From a random vector of signs, v₁ = ±1/√d, m Lanczos steps build an orthonormal basis of the Krylov space, in which the
matrix is a tridiagonal T. The eigenvalues θ_i of T are the Ritz values, and with the first components u_i of its
eigenvectors

    (1/d) tr f(A)  ≈  Σ_i ω_i f(θ_i),   ω_i = u_i²,   Σ_i ω_i = 1

(Ubaru, Chen and Saad, SIAM J. Matrix Anal. Appl. 2017; for networks: Ghorbani, Krishnan and Xiao, ICML 2019). Rounding
makes the basis lose its orthogonality and repeats Ritz values, so every vector is orthogonalised against all earlier
ones, twice. Memory: m vectors of d numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_fl.pruning.curvature.products import Product


@dataclass(frozen=True)
class Spectrum:
    """Distribution of eigenvalues.

    Attributes:
        values: Ritz values, ascending, float64 (m,).
        weights: share of the spectrum at each value, float64 (m,), sum 1.
    """

    values: np.ndarray
    weights: np.ndarray

    @property
    def is_finite(self) -> bool:
        """True if all values are finite, and so every product was."""
        return bool(np.isfinite(self.values).all())


def spectrum(product: Product, start: Tensor, generator: torch.Generator, steps: int = 50, probes: int = 1) -> Spectrum:
    """Estimate the spectrum from random vectors.

    Args:
        product: product with the matrix (d, d).
        start: any vector (d,) with the length, dtype and device of the vectors to multiply.
        generator: a CPU generator that draws the signs.
        steps: number of Lanczos steps m, at least 1; at most d, and fewer if the Krylov space is exhausted.
        probes: number of random vectors, whose spectra are averaged.
    """
    spectra = [_tridiagonal_spectrum(*lanczos(product, _signs(start, generator), steps)) for _ in range(probes)]
    values = np.concatenate([spectrum.values for spectrum in spectra])
    weights = np.concatenate([spectrum.weights for spectrum in spectra]) / probes
    order = np.argsort(values, kind="stable")
    return Spectrum(values[order], weights[order])


def exact_spectrum(product: Product, start: Tensor) -> Spectrum:
    """Return all d eigenvalues, each of weight 1/d, from d products; for small d.

    Args:
        product: product with the matrix (d, d).
        start: as in `spectrum`.
    """
    matrix = torch.stack([product(unit) for unit in torch.eye(len(start), dtype=start.dtype, device=start.device)])
    dense = matrix.double().cpu().numpy()
    count = len(dense)
    if not np.isfinite(dense).all():
        return Spectrum(np.full(count, np.nan), np.full(count, 1 / count))
    return Spectrum(np.linalg.eigvalsh((dense + dense.T) / 2), np.full(count, 1 / count))


def spectral_norm(product: Product, start: Tensor, generator: torch.Generator, iterations: int = 10) -> float:
    """Return a lower estimate of the largest magnitude of an eigenvalue, by power iterations.

    Args:
        product: product with the matrix (d, d).
        start: as in `spectrum`.
        generator: a CPU generator that draws the first vector.
        iterations: number of products.
    """
    vector, norm = _signs(start, generator), 0.0
    for _ in range(iterations):
        vector = product(vector)
        norm = float(torch.linalg.vector_norm(vector))
        if norm == 0 or not np.isfinite(norm):
            break
        vector = vector / norm
    return norm


def lanczos(product: Product, start: Tensor, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Run Lanczos steps with full re-orthogonalisation.

    Args:
        product: product with the matrix (d, d).
        start: the first vector (d,), of norm 1.
        steps: number of steps m, at least 1.

    Returns:
        Diagonal (m,) and off-diagonal (m − 1,) of T, float64; shorter if the Krylov space is exhausted.
    """
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    steps = min(steps, len(start))
    basis = start.new_empty(steps, len(start))
    basis[0] = start
    for step in range(steps):
        vector = product(basis[step])
        diagonal.append(float(vector @ basis[step]))
        if step + 1 == steps or not np.isfinite(diagonal[-1]):
            break
        orthogonal = basis[: step + 1]
        for _ in range(2):
            vector = vector - orthogonal.T @ (orthogonal @ vector)
        norm = float(torch.linalg.vector_norm(vector))
        if norm <= torch.finfo(start.dtype).eps * max(map(abs, diagonal + off_diagonal)):
            break
        off_diagonal.append(norm)
        basis[step + 1] = vector / norm
    return np.array(diagonal), np.array(off_diagonal)


def _tridiagonal_spectrum(diagonal: np.ndarray, off_diagonal: np.ndarray) -> Spectrum:
    if not (np.isfinite(diagonal).all() and np.isfinite(off_diagonal).all()):
        return Spectrum(np.full(len(diagonal), np.nan), np.full(len(diagonal), 1 / len(diagonal)))
    values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1))
    return Spectrum(values, vectors[0] ** 2)


def _signs(start: Tensor, generator: torch.Generator) -> Tensor:
    signs = torch.randint(0, 2, start.shape, generator=generator, dtype=torch.int8)
    return (signs.to(start.device, start.dtype) * 2 - 1) / len(start) ** 0.5
