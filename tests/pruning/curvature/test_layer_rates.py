"""Test the rates of layers that follow from those of sources."""

import numpy as np
import pytest
import torch

from lightning_fl.pruning.curvature.layer_rates import (
    layer_rate,
    magnitude_threshold,
    mean_rate,
    source_weights,
)


def test_mean_rate_trusts_large_and_typical_sources():
    weights = source_weights([100, 400, 50], [0.6, 0.3, 0.0])
    np.testing.assert_allclose(weights, [100 / 0.6001, 400 / 0.3001, 50 / 1e-4])
    expected = (0.2 * 100 / 0.6001 + 0.5 * 400 / 0.3001 + 0.9 * 50 / 1e-4) / (100 / 0.6001 + 400 / 0.3001 + 50 / 1e-4)
    assert mean_rate([0.2, 0.5, 0.9], weights) == pytest.approx(expected, abs=1e-15)
    assert mean_rate([0.3, 0.3], source_weights([1, 5], [0.1, 0.9], epsilon=1.0)) == pytest.approx(0.3)


def test_threshold_counts_from_one():
    parameters = [torch.tensor([0.5, -0.1]), torch.tensor([[0.3, -0.4], [0.2, 0.6]])]
    # Sorted: .1 .2 .3 .4 .5 .6
    assert magnitude_threshold(parameters, 0.5) == pytest.approx(0.3)  # ⌊6 · 0.5⌋ = 3, the third
    assert magnitude_threshold(parameters, 0.49) == pytest.approx(0.2)
    assert magnitude_threshold(parameters, 0.16) == 0  # ⌊0.96⌋ = 0
    assert magnitude_threshold(parameters, 0.0) == 0


def test_threshold_takes_rates_as_they_were_written():
    assert magnitude_threshold([torch.arange(1.0, 101)], 0.29) == 29


def test_layers_lose_what_is_strictly_below():
    weight = torch.tensor([[0.1, -0.2], [0.3, 0.2]])
    assert layer_rate(weight, 0.2) == 1 / 4
    assert layer_rate(weight, 0.25) == 3 / 4
    assert layer_rate(weight, 0.0) == 0
