"""From rates to filters."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from lightning_fl.pruning.rates import (
    kept_filters,
    layer_rate,
    magnitude_threshold,
    mean_rate,
    num_dropped,
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
    assert layer_rate(weight, 0.2) == Fraction(1, 4)
    assert layer_rate(weight, 0.25) == Fraction(3, 4)
    assert layer_rate(weight, 0.0) == 0


def test_filters_dropped_are_counted_exactly():
    # 0.7 · 10 is 6.999… in floats.
    assert num_dropped(Fraction(7, 10), 10) == 7
    assert num_dropped(Fraction(1), 5) == 4  # one stays
    assert num_dropped(Fraction(9, 10), 1) == 0
    assert num_dropped(Fraction(0), 5) == 0


def test_lowest_scores_go_first_and_of_equal_ones_the_first():
    scores = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0])
    assert kept_filters(scores, 0).tolist() == [0, 1, 2, 3, 4]
    assert kept_filters(scores, 1).tolist() == [0, 2, 3, 4]
    assert kept_filters(scores, 3).tolist() == [2, 4]
