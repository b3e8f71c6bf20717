"""The spectrum of a matrix that is known by its products alone: stochastic Lanczos quadrature.

From a random vector of signs, v₁ = ±1/√d, m steps of Lanczos give an orthonormal basis of the Krylov space and in it the matrix
as a tridiagonal T. The eigenvalues θ_i of T are the Ritz values, and with the first components u_i of its eigenvectors

    (1/d) tr f(A)  ≈  Σ_i ω_i f(θ_i),   ω_i = u_i²,   Σ_i ω_i = 1

(Ubaru, Chen and Saad, SIAM J. Matrix Anal. Appl. 2017; for networks: Ghorbani, Krishnan and Xiao, ICML 2019). In rounding
arithmetic the basis loses its orthogonality and Ritz values come twice, so every vector is made orthogonal to all before it,
twice. Memory: m vectors of d numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_fl.pruning.curvature.products import Product


@dataclass(frozen=True)
class Spectrum:
    """A distribution of eigenvalues.

    Attributes:
        values: Ritz values, ascending, float64 (m,).
        weights: share of the spectrum at each, float64 (m,), sum 1.
    """

    values: np.ndarray
    weights: np.ndarray

    @property
    def is_finite(self) -> bool:
        """Whether every product was."""
        return bool(np.isfinite(self.values).all())


def spectrum(product: Product, start: Tensor, generator: torch.Generator, steps: int = 50, probes: int = 1) -> Spectrum:
    """The spectrum as seen from random vectors.

    Args:
        product: the matrix (d, d).
        start: any vector (d,): its length, dtype and device are those of the vectors that are multiplied.
        generator: of the CPU; draws the signs.
        steps: Lanczos steps m, at least 1; fewer are made where they are enough, at most d.
        probes: random vectors, whose spectra are averaged.
    """
    found = [_tridiagonal_spectrum(*lanczos(product, _signs(start, generator), steps)) for _ in range(probes)]
    values = np.concatenate([spectrum.values for spectrum in found])
    weights = np.concatenate([spectrum.weights for spectrum in found]) / probes
    order = np.argsort(values, kind="stable")
    return Spectrum(values[order], weights[order])


def exact_spectrum(product: Product, start: Tensor) -> Spectrum:
    """All d eigenvalues, each of weight 1/d, from d products; for a small d.

    Args:
        product: the matrix (d, d).
        start: as in `spectrum`.
    """
    matrix = torch.stack([product(unit) for unit in torch.eye(len(start), dtype=start.dtype, device=start.device)])
    dense = matrix.double().cpu().numpy()
    count = len(dense)
    if not np.isfinite(dense).all():
        return Spectrum(np.full(count, np.nan), np.full(count, 1 / count))
    return Spectrum(np.linalg.eigvalsh((dense + dense.T) / 2), np.full(count, 1 / count))


def spectral_norm(product: Product, start: Tensor, generator: torch.Generator, iterations: int = 10) -> float:
    """The largest magnitude of an eigenvalue, from below, by power iterations.

    Args:
        product: the matrix (d, d).
        start: as in `spectrum`.
        generator: of the CPU; draws the first vector.
        iterations: products to make.
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
    """Lanczos steps with full re-orthogonalisation.

    Args:
        product: the matrix (d, d).
        start: the first vector (d,), of length 1.
        steps: m, at least 1.

    Returns:
        Diagonal (m,) and off-diagonal (m − 1,) of T, float64; shorter where the Krylov space is exhausted.
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
        known = basis[: step + 1]
        for _ in range(2):
            vector = vector - known.T @ (known @ vector)
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
