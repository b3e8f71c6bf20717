"""Test the rate of one source against dense Hessians."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lightning_fl.errors import UserError
from lightning_fl.pruning.curvature.products import hessian_product
from lightning_fl.pruning.curvature.source_rate import SourceRate
from lightning_fl.pruning.curvature.spectral_rates import gap_rate
from lightning_fl.pruning.curvature.spectrum import Spectrum

X = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3


def loss_of(weight, bias):
    return F.cross_entropy(X @ weight.T + bias, Y)


def curvature(point):
    return hessian_product(lambda parameters: loss_of(*parameters), point)


def at(scale):
    weight = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [scale * weight, scale * torch.ones(3, dtype=torch.float64)]


def dense(point):
    size = [9, 3]
    flat = torch.cat([part.flatten() for part in point])

    def function(vector):
        weight, bias = vector.split(size)
        return loss_of(weight.view(3, 3), bias)

    return torch.autograd.functional.hessian(function, flat).numpy()


def nonzero(values):
    return values[np.abs(values) > 12 * np.finfo(np.float32).eps * np.abs(values).max()]


@pytest.mark.long
@pytest.mark.parametrize("far", [0.02, 0.3])
def test_gap_of_a_small_network(far):
    now, before = at(1.0), at(1.0 + far)
    change = [
        np.linalg.norm(dense(now) - dense([a + s * (b - a) for a, b in zip(now, before, strict=True)]), 2)
        for s in (0.25, 0.5, 0.75, 1)
    ]
    every = np.linalg.eigvalsh(dense(now))
    for mode, values in (("gap", nonzero(every)), ("gap_of_all", every)):
        count = len(values)
        first = [i + 1 for i in range(count - 1) if values[i + 1] - values[i] > 4 * max(change)]
        rate = SourceRate(mode)(curvature, now, before, torch.Generator().manual_seed(0))
        assert rate == pytest.approx((first[0] if first else 0) / count)
        assert (rate > 0) == (far == 0.02)  # far from the initial model the rule gives 0


def test_gap_at_the_initial_model_is_the_lowest_eigenvalue():
    rate = SourceRate("gap")(curvature, at(1.0), None, torch.Generator().manual_seed(0))
    values = np.linalg.eigvalsh(dense(at(1.0)))
    assert rate == pytest.approx(gap_rate(Spectrum(values, np.full(12, 1 / 12)), 0.0))


def test_plateau_depends_on_the_seed_alone():
    def rate(seed):
        return SourceRate(steps=8)(curvature, at(1.0), None, torch.Generator().manual_seed(seed))

    assert rate(0) == rate(0)
    assert 0 <= rate(0) <= 0.95


def test_half_precision_is_multiplied_in_32_bits():
    point = [torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).bfloat16()]
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(2)).bfloat16()

    def curve(at):
        return hessian_product(lambda p: (x @ p[0].T).square().mean().float(), at)

    assert 0 <= SourceRate(steps=5)(curve, point, None, torch.Generator().manual_seed(0)) <= 0.95


def test_what_is_not_finite_is_told():
    point = [torch.full((3,), float("inf"))]
    curve = lambda at: hessian_product(lambda p: (p[0] ** 3).sum(), at)  # noqa: E731
    for mode in ("slq_plateau", "gap"):
        assert np.isnan(SourceRate(mode)(curve, point, None, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "gaps"}, "rate_mode 'gaps' is unknown; did you mean 'gap'"),
        ({"steps": 1}, "lanczos_steps must be a whole number of at least 2, got 1"),
        ({"probes": 0}, "probes must be a whole number of at least 1, got 0"),
        ({"max_rate": 1.0}, r"max_rate must lie in \[0, 1\), got 1.0"),
    ],
)
def test_bad_values(options, sentence):
    with pytest.raises(UserError, match=sentence):
        SourceRate(**options)
