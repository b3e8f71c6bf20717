"""Test stochastic Lanczos quadrature and the rates of spectra against matrices with known eigenvalues."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from lightning_fl.pruning.curvature.spectral_rates import gap_rate, lipschitz_constant, plateau_rate
from lightning_fl.pruning.curvature.spectrum import (
    Spectrum,
    exact_spectrum,
    lanczos,
    spectral_norm,
    spectrum,
)


def diagonal(values):
    entries = torch.as_tensor(values, dtype=torch.float64)
    return (lambda vector: entries.to(vector.dtype) * vector), torch.empty(len(entries), dtype=torch.float64)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_ritz_values_and_weights_of_a_full_krylov_space_are_the_eigenvalues():
    generator = np.random.default_rng(0)
    basis = np.linalg.qr(generator.normal(size=(12, 12)))[0]
    eigenvalues = np.sort(generator.normal(size=12))
    matrix = torch.from_numpy(basis @ np.diag(eigenvalues) @ basis.T)
    found = spectrum(lambda vector: matrix @ vector, torch.empty(12, dtype=torch.float64), draws(3), steps=50)
    np.testing.assert_allclose(found.values, eigenvalues, atol=1e-10)
    # ω_i is the squared component of the random vector along eigenvector i.
    signs = torch.randint(0, 2, (12,), generator=draws(3), dtype=torch.int8).numpy() * 2.0 - 1
    np.testing.assert_allclose(found.weights, (basis.T @ signs / 12**0.5) ** 2, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("probes", [1, 3])
def test_mass_is_one_and_means_are_traces(dtype, probes):
    values = torch.linspace(-1, 3, 400) ** 3
    product, start = diagonal(values)
    found = spectrum(product, start.to(dtype), draws(), steps=50, probes=probes)
    assert len(found.values) == 50 * probes
    assert (np.diff(found.values) >= 0).all()
    assert found.weights.sum() == pytest.approx(1, abs=1e-9)
    # For a diagonal matrix every vector of signs gives the exact trace.
    assert found.weights @ found.values == pytest.approx(float(values.mean()), abs=1e-4)
    assert found.weights @ found.values**2 == pytest.approx(float((values**2).mean()), abs=1e-3)


def test_basis_stays_orthogonal_where_plain_lanczos_repeats_itself():
    # An eigenvalue far from all others converges first; without re-orthogonalisation copies of it would appear.
    product, start = diagonal(np.r_[np.linspace(0, 1, 299), 1000.0])
    found = spectrum(product, start.float(), draws(), steps=50)
    assert (found.values > 500).sum() == 1


def test_exhausted_krylov_space_ends_early():
    product, start = diagonal([2.0] * 30 + [5.0] * 10)
    found = spectrum(product, start, draws(), steps=50)
    np.testing.assert_allclose(found.values, [2, 5], atol=1e-12)
    np.testing.assert_allclose(found.weights, [0.75, 0.25], atol=1e-12)
    alone, _ = diagonal([0.0] * 4)
    assert spectrum(alone, torch.empty(4, dtype=torch.float64), draws()).values.tolist() == [0]


def test_tridiagonal_is_the_projected_matrix():
    generator = np.random.default_rng(1)
    matrix = generator.normal(size=(9, 9))
    matrix = matrix + matrix.T
    first = generator.normal(size=9)
    first /= np.linalg.norm(first)
    # Basis of the Krylov space, by Gram-Schmidt on its powers.
    basis = np.linalg.qr(np.stack([np.linalg.matrix_power(matrix, j) @ first for j in range(4)], axis=1))[0]
    expected = basis.T @ matrix @ basis
    diagonal_part, off_diagonal = lanczos(lambda vector: torch.from_numpy(matrix) @ vector, torch.from_numpy(first), 4)
    np.testing.assert_allclose(diagonal_part, np.diag(expected), atol=1e-9)
    np.testing.assert_allclose(off_diagonal, np.abs(np.diag(expected, 1)), atol=1e-9)


def test_exact_spectrum():
    product, start = diagonal([3.0, 1.0, 2.0])
    found = exact_spectrum(product, start)
    np.testing.assert_allclose(found.values, [1, 2, 3])
    np.testing.assert_allclose(found.weights, [1 / 3] * 3)


def test_spectral_norm():
    product, start = diagonal([-4.0, 1.0, 2.0, 0.5])
    assert spectral_norm(product, start, draws(), iterations=40) == pytest.approx(4)
    assert spectral_norm(product, start, draws(), iterations=3) <= 4
    nothing, _ = diagonal([0.0] * 4)
    assert spectral_norm(nothing, start, draws()) == 0


def test_what_is_not_finite_is_told():
    def product(vector):
        return vector * float("nan")

    start = torch.empty(5)
    assert not spectrum(product, start, draws()).is_finite
    assert not exact_spectrum(product, start).is_finite
    assert np.isnan(plateau_rate(spectrum(product, start, draws())))
    assert np.isnan(gap_rate(spectrum(product, start, draws()), 0.1))
    assert np.isnan(gap_rate(Spectrum(np.array([0.0, 1]), np.array([0.5, 0.5])), float("inf")))


# -- the paper's rule ----------------------------------------------------------------------------------------------------

SEVEN = (0, 0.001, 0.002, 0.003, 0.5, 0.6, 2)


def test_gap_of_a_known_spectrum():
    product, start = diagonal(SEVEN)
    assert gap_rate(exact_spectrum(product, start), 0.05) == pytest.approx(3 / 6)  # the eigenvalue 0 counts in neither
    assert gap_rate(exact_spectrum(product, start), 0.05, of_all=True) == pytest.approx(4 / 7)
    assert gap_rate(exact_spectrum(product, start), 0.2) == pytest.approx(5 / 6)
    assert gap_rate(exact_spectrum(product, start), 0.2, max_rate=0.5) == 0.5
    assert gap_rate(exact_spectrum(product, start), 0.5) == 0  # no gap above 2
    assert gap_rate(exact_spectrum(product, start), 0.0) == pytest.approx(1 / 6)
    # Every vector of signs has the same share of each eigenvector of a diagonal matrix, so quadrature is the same.
    assert gap_rate(spectrum(product, start, draws()), 0.05) == pytest.approx(3 / 6)


@pytest.mark.parametrize("nullity", [0, 1, 30])
def test_directions_without_curvature_do_not_change_the_gap(nullity):
    """Check the paper's denominator, the rank: null directions, up to rounding, leave the rate as it is."""
    product, start = diagonal([*SEVEN[1:], *(1e-9 * i for i in range(nullity))])
    assert gap_rate(exact_spectrum(product, start), 0.05) == pytest.approx(3 / 6)
    assert gap_rate(spectrum(product, start, draws()), 0.05) == pytest.approx(3 / 6)


def test_gap_of_a_flat_spectrum():
    assert gap_rate(Spectrum(np.array([1.0]), np.array([1.0])), 0.0) == 0
    assert gap_rate(Spectrum(np.zeros(3), np.full(3, 1 / 3)), 0.0) == 0
    assert gap_rate(Spectrum(np.array([1.0, 1.0]), np.array([0.5, 0.5])), 0.0) == 0


def test_lipschitz_constant_is_the_largest_change_of_the_hessian():
    hessian, start = diagonal([1.0, 2.0, 3.0])

    def along_the_path(share):  # changes by 4s(1 − s) + 2, which is 3 at s = ½, and by −2s
        return diagonal([1.0 + 4 * share * (1 - share) + 2, 2.0 - 2 * share, 3.0])[0]

    assert lipschitz_constant(hessian, along_the_path, start, draws(), iterations=60) == pytest.approx(3)
    assert lipschitz_constant(hessian, lambda share: hessian, start, draws()) == 0


# -- the authors' code ---------------------------------------------------------------------------------------------------


def plateau_by_hand(values, weights, p_max=0.95):
    """Compute the plateau rate of the authors' code, step by step."""
    low, high = min(values) - 0.01, max(values) + 0.01
    grid = [low + (high - low) * i / 9999 for i in range(10000)]
    variance = 1e-5 * max(1, high - low)
    density = np.array(
        [sum(w * np.exp(-((x - v) ** 2) / 2 / variance) for v, w in zip(values, weights, strict=True)) for x in grid]
    )
    density /= density.sum()

    def ratio(s):
        return 1 - density[[x <= s for x in grid]].sum()

    inc = 0.1
    while inc >= 1e-5:
        ratios, s = [], 0
        while True:
            ratios.append(ratio(s * inc))
            if ratios[-1] < ratio(0) / 2:
                inc /= 2
                break
            last = ratios[-4:]
            if len(last) == 4 and all(abs(a - b) < 0.005 for a, b in pairwise(last)):
                return min(max(ratios[-1], 0), p_max)
            s += 1
    return min(max(ratio(0), 0), p_max)


@pytest.mark.long
@pytest.mark.parametrize(
    ("values", "weights"),
    [
        ([-0.2, 0.0, 0.01, 0.2, 2.5], [0.1, 0.3, 0.2, 0.3, 0.1]),
        ([0.0, 0.02, 0.3, 40.0], [0.5, 0.2, 0.2, 0.1]),
        ([-1.0, -0.5], [0.5, 0.5]),
        ([0.001, 0.0012], [0.5, 0.5]),
        ([5.0, 6.0], [0.5, 0.5]),
    ],
)
def test_plateau_step_by_step(values, weights):
    assert plateau_rate(Spectrum(np.array(values), np.array(weights))) == pytest.approx(
        plateau_by_hand(values, weights), abs=1e-9
    )


def test_plateau_of_clear_spectra():
    def rate(values, weights):
        return plateau_rate(Spectrum(np.array(values, dtype=float), np.array(weights)))

    # The share clearly above 0; the smoothed peaks at both ends are cut off slightly where the grid ends.
    assert rate([0, 5], [0.6, 0.4]) == pytest.approx(0.4, abs=0.01)
    assert rate([0, 0.05, 5], [0.5, 0.1, 0.4]) == pytest.approx(0.4, abs=0.01)  # 0.05 lies before the plateau
    assert rate([0, 0.5, 5], [0.5, 0.1, 0.4]) == pytest.approx(0.5, abs=0.01)
    assert rate([-2, -1], [0.5, 0.5]) == 0
    assert rate([5, 6], [0.5, 0.5]) == 0.95  # p_max
