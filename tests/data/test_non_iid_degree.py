"""Test the non-IID degree: the FedDUMAP paper's values, and theorems of the Jensen-Shannon divergence."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from lightning_fl.data import divergence, label_histograms, non_iid_degree
from lightning_fl.data.non_iid_degree import held_classes_and_degrees
from lightning_fl.data.partitions.client_indices import ClientIndices
from lightning_fl.errors import UserError

PAPER = [0.7583, 0.6100, 0.4934, 0.3958, 0.3113, 0.2365, 0.1692, 0.1080, 0.0519, 0.0]
counts = st.lists(st.integers(0, 50), min_size=6, max_size=6).filter(any).map(np.array)


def test_degree_of_some_of_ten_classes() -> None:
    degrees = non_iid_degree(np.tri(10), np.full(10, 4000))
    assert np.round(degrees, 4).tolist() == PAPER
    assert (np.diff(degrees) < 0).all()


@pytest.mark.long
@given(p=counts, q=counts)
def test_divergence_is_symmetric_bounded_and_that_of_scipy(p: np.ndarray, q: np.ndarray) -> None:
    p, q = p / p.sum(), q / q.sum()
    value = divergence(p, q)
    assert value == divergence(q, p)
    assert 0 <= value <= 1
    assert divergence(p, p) == 0
    assert (value > 0) == (not np.allclose(p, q, atol=1e-12))
    assert value == pytest.approx(jensenshannon(p, q, base=2) ** 2, abs=1e-7)


def test_disjoint_distributions_have_divergence_one() -> None:
    assert divergence(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 1


def test_leading_axes() -> None:
    histograms = np.random.default_rng(0).integers(1, 9, (4, 3, 5))
    reference = histograms.sum((0, 1))
    together = non_iid_degree(histograms, reference)
    assert together.shape == (4, 3)
    assert together[2, 1] == non_iid_degree(histograms[2, 1], reference)


def test_empty_histogram() -> None:
    with pytest.raises(UserError, match="without samples"):
        non_iid_degree(np.array([[1, 2], [0, 0]]), np.array([1, 1]))


def test_label_histograms_count() -> None:
    labels = np.array([0, 2, 2, 1, 0, 2])
    parts = [np.array([0, 1, 2]), np.array([], dtype=np.int64), np.array([5, 4, 3])]
    histograms = label_histograms(labels, parts, 4)
    assert histograms.dtype == np.int64
    assert histograms.tolist() == [[1, 0, 2, 0], [0, 0, 0, 0], [1, 1, 1, 0]]


def test_degrees_of_the_held_classes_are_those_of_whole_histograms() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 30, 200)
    parts = ClientIndices.by_owner(np.where(rng.random(200) < 0.9, rng.integers(0, 40, 200) // 2 * 2, -1), 42)
    counts = label_histograms(labels, parts, 31)
    reference = counts.sum(0)
    held, degrees = held_classes_and_degrees(labels, parts, reference)
    filled = counts.any(1)
    assert 0 < filled.sum() < 42
    assert held.tolist() == (counts[filled] > 0).sum(1).tolist()
    np.testing.assert_allclose(degrees, non_iid_degree(counts[filled], reference), atol=1e-12)


def test_degrees_of_many_classes_and_clients_need_the_memory_of_the_labels() -> None:
    """Whole histograms would have 10,000 clients times 100,000 classes, 8 GB."""
    labels = np.arange(200_000) % 100_000
    parts = ClientIndices.by_owner(np.arange(200_000) % 10_000, 10_000)
    tracemalloc.start()
    try:
        held, degrees = held_classes_and_degrees(labels, parts, np.bincount(labels))
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert set(held.tolist()) == {10}
    assert (degrees > 0.99).all()
    assert most_bytes < 50e6
