"""Test the server's data: size, classes, degree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fl.data import non_iid_degree
from lightning_fl.data.server_samples import counts_for_degree, draw_classes, draw_degree, draw_uniform
from lightning_fl.errors import UserError

# As in CIFAR-10: the clients hold about, not exactly, 4,000 of each class, and the server's pool about 1,000.
REFERENCE = np.array([4020, 3960, 4010, 4000, 3995, 3990, 4040, 3950, 4025, 4010])
LABELS = np.random.default_rng(5).permutation(np.repeat(np.arange(10), 5000 - REFERENCE))
POOL = np.arange(len(LABELS))


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_uniform_draw_is_without_replacement_from_the_pool() -> None:
    pool = np.arange(100, 200)
    drawn = draw_uniform(pool, 60, rng())
    assert len(set(drawn)) == 60
    assert set(drawn) <= set(pool)
    with pytest.raises(UserError, match=r"server data \(101 samples\) are larger than their pool \(100\)"):
        draw_uniform(pool, 101, rng())


def test_classes_in_equal_parts() -> None:
    drawn = draw_classes(POOL, LABELS, 2003, 5, 10, rng())
    held, counts = np.unique(LABELS[drawn], return_counts=True)
    assert counts.tolist() == [400] * 5
    assert len(set(drawn)) == 2000
    others = draw_classes(POOL, LABELS, 2003, 5, 10, np.random.default_rng(1))
    assert set(LABELS[others]) != set(held)


def test_too_few_of_a_class_is_reported() -> None:
    with pytest.warns(UserWarning, match=r"The server holds 1,9\d\d samples instead of 4,000"):
        drawn = draw_classes(POOL, LABELS, 4000, 2, 10, rng())
    held = set(LABELS[drawn])
    assert len(held) == 2
    assert len(drawn) == np.isin(LABELS, list(held)).sum()


def test_impossible_classes() -> None:
    with pytest.raises(UserError, match="server_classes=11 is not allowed: the data have 10 classes"):
        draw_classes(POOL, LABELS, 400, 11, 10, rng())
    with pytest.raises(UserError, match="The server's 4 samples cannot cover server_classes=5"):
        draw_classes(POOL, LABELS, 4, 5, 10, rng())


@pytest.mark.parametrize("seed", range(8))
def test_classes_without_samples_are_not_drawn(seed: int) -> None:
    """Test labels from 1, as in EMNIST's letters, and with gaps, as after a choice of some classes."""
    labels = np.repeat([1, 2, 5, 6], 20)
    pool, reference = np.arange(80), np.bincount(labels, minlength=9) * 4
    drawn = draw_classes(pool, labels, 30, 3, 9, np.random.default_rng(seed))
    assert np.unique(labels[drawn], return_counts=True)[1].tolist() == [10, 10, 10]
    even = draw_degree(pool, labels, 40, 0.0, reference, np.random.default_rng(seed))
    assert np.bincount(labels[even]).tolist() == [0, 10, 10, 0, 0, 10, 10]


@pytest.mark.parametrize(("degree", "num_classes"), [(0.61, 2), (0.31, 5), (9.0e-6, 10)])
def test_the_degrees_of_the_paper(degree: float, num_classes: int) -> None:
    counts = counts_for_degree(1000, degree, REFERENCE, rng().permutation(10))
    assert (counts > 50).sum() == num_classes
    assert non_iid_degree(counts, REFERENCE) == pytest.approx(degree, abs=0.003)


@pytest.mark.long
@settings(max_examples=40)
@given(degree=st.floats(0.0, 0.755), seed=st.integers(0, 20))
def test_any_degree_is_reached(degree: float, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(10)
    counts = counts_for_degree(10**7, degree, REFERENCE, order)
    assert counts.sum() == 10**7
    assert counts.min() >= 0
    # 2e-5 is the clients' own imbalance; half a percent allows for whole classes, which are taken unchanged.
    assert non_iid_degree(counts, REFERENCE) == pytest.approx(degree, abs=max(2e-5, 0.0051 * degree))


def test_a_degree_between_those_of_whole_classes_is_met_to_1e_4() -> None:
    counts = counts_for_degree(10**7, 0.55, REFERENCE, np.arange(10))
    assert non_iid_degree(counts, REFERENCE) == pytest.approx(0.55, abs=1e-4)
    # l = 3 is the smallest with D <= 0.55: two classes in equal parts, and a few samples of all others.
    assert counts[0] == counts[1] > 10 * counts[2]
    assert counts[2:].max() - counts[2:].min() <= 1


def test_drawn_degree() -> None:
    drawn = draw_degree(POOL, LABELS, 1000, 0.4, REFERENCE, rng())
    assert len(set(drawn)) == 1000
    histogram = np.bincount(LABELS[drawn], minlength=10)
    assert non_iid_degree(histogram, REFERENCE) == pytest.approx(0.4, abs=2e-3)


def test_impossible_degrees() -> None:
    with pytest.raises(UserError, match=r"needs 2,000 of class \d, but the server's pool has (9|10)\d\d"):
        draw_degree(POOL, LABELS, 4000, 0.61, REFERENCE, rng())
    with pytest.raises(UserError, match=r"server_degree=0\.9 is not reachable"):
        counts_for_degree(100, 0.9, REFERENCE, np.arange(10))
    with pytest.raises(UserError, match=r"server_degree must lie in \[0, 1\], got 1\.2"):
        counts_for_degree(100, 1.2, REFERENCE, np.arange(10))
    with pytest.raises(UserError, match="larger than their pool"):
        draw_degree(POOL, LABELS, 20_000, 0.3, REFERENCE, rng())


def test_a_degree_few_images_cannot_realise_is_reported() -> None:
    with pytest.warns(UserWarning, match=r"The server's 3 samples have non-IID degree 0\.\d+ instead of"):
        draw_degree(POOL, LABELS, 3, 0.1, REFERENCE, rng())
