"""Test partitions: each sample exactly once, the stated sizes, termination in every case."""

import jsonargparse
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fl.data import IID, Dirichlet, Partition, Shards
from lightning_fl.errors import UserError

PARTITIONS = [
    IID(),
    Shards(1),
    Shards(3),
    Dirichlet(5.0, min_samples=1),
    Dirichlet(5.0, skip_full_clients=False, min_samples=1),
]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@settings(max_examples=40, deadline=None)
@given(
    partition=st.sampled_from(PARTITIONS),
    num_clients=st.integers(1, 8),
    labels=st.lists(st.integers(0, 4), min_size=60, max_size=150),
    seed=st.integers(0, 99),
)
def test_every_sample_goes_to_exactly_one_client(
    partition: Partition, num_clients: int, labels: list[int], seed: int
) -> None:
    given_labels = np.array(labels)
    parts = partition(given_labels, num_clients, rng(seed))
    assert len(parts) == num_clients
    assert all(part.dtype == np.int64 and len(part) > 0 for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    again = partition(given_labels, num_clients, rng(seed))
    assert all(np.array_equal(one, two) for one, two in zip(parts, again, strict=True))


@pytest.mark.parametrize("partition", PARTITIONS)
def test_another_seed_is_another_partition(partition: Partition) -> None:
    labels = np.arange(300) % 5
    one, two = partition(labels, 5, rng(0)), partition(labels, 5, rng(1))
    assert any(not np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_iid_sizes_differ_by_at_most_one() -> None:
    assert sorted(len(part) for part in IID()(np.zeros(23), 5, rng())) == [4, 4, 5, 5, 5]


def test_shards_of_cifar10_are_200_images_of_consecutive_sorted_labels() -> None:
    labels = rng(3).integers(0, 10, 40_000)
    order = np.argsort(labels, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(40_000)
    shards_seen = set()
    for part in Shards(2)(labels, 100, rng()):
        assert len(part) == 400
        for shard in (part[:200], part[200:]):
            places = position[shard]
            assert places[0] % 200 == 0
            assert np.array_equal(places, np.arange(places[0], places[0] + 200))
            shards_seen.add(places[0])
        assert len(set(labels[part])) <= 4
    assert len(shards_seen) == 200


def test_uneven_shards_differ_by_at_most_one() -> None:
    sizes = [len(part) for part in Shards(2)(np.arange(1437) % 10, 100, rng())]
    assert set(sizes) <= {14, 15, 16}
    assert sum(sizes) == 1437


@pytest.mark.parametrize("skips", [True, False])
def test_dirichlet_keeps_the_minimum_size(skips: bool) -> None:
    labels = np.repeat(np.arange(10), 500)
    parts = Dirichlet(0.5, skip_full_clients=skips, min_samples=10)(labels, 20, rng())
    assert min(map(len, parts)) >= 10


def test_dirichlet_gives_a_full_client_nothing_more() -> None:
    labels = np.repeat(np.arange(10), 400)
    skipping = [len(part) for part in Dirichlet(0.5, min_samples=1)(labels, 10, rng())]
    plain = [len(part) for part in Dirichlet(0.5, skip_full_clients=False, min_samples=1)(labels, 10, rng())]
    # A client below its even share (400) can get at most one whole class (400) more.
    assert max(skipping) < 800
    assert np.std(skipping) < np.std(plain)


@pytest.mark.parametrize("skips", [True, False])
def test_the_earlier_name_of_skipping_gives_the_same_split(skips: bool) -> None:
    labels = np.repeat(np.arange(10), 100)
    expected = Dirichlet(0.5, skips)
    with pytest.warns(DeprecationWarning, match="Dirichlet's balanced is now skip_full_clients"):
        renamed = Dirichlet(0.5, balanced=skips)
    assert renamed == expected
    assert repr(renamed) == repr(expected)
    for own, other in zip(renamed(labels, 8, rng()), expected(labels, 8, rng()), strict=True):
        assert np.array_equal(own, other)
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(Partition, "partition")
    given = {"class_path": "lightning_fl.data.Dirichlet", "init_args": {"alpha": 0.5, "balanced": skips}}
    with pytest.warns(DeprecationWarning, match="skip_full_clients"):
        read = parser.instantiate(parser.parse_object({"partition": given})).partition
    assert read == expected


def test_small_alpha_is_less_iid() -> None:
    labels = np.repeat(np.arange(10), 400)

    def classes_per_client(alpha: float) -> float:
        parts = Dirichlet(alpha, min_samples=1)(labels, 10, rng())
        return float(np.mean([len(set(labels[part])) for part in parts]))

    assert classes_per_client(0.1) < classes_per_client(1.0) < classes_per_client(100.0) == 10


def test_dirichlet_gives_up_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"In 20 draws .* 50 clients 10 of the 500 samples .* raise alpha"):
        Dirichlet(0.01, max_tries=20)(np.arange(500) % 10, 50, rng())
    with pytest.raises(UserError, match="need at least 510 samples, but there are 500"):
        Dirichlet(1.0)(np.arange(500) % 10, 51, rng())


def test_dirichlet_survives_an_alpha_so_small_that_shares_vanish() -> None:
    with pytest.raises(UserError, match="draws"):
        Dirichlet(1e-30, min_samples=1, max_tries=20)(np.arange(100) % 10, 50, rng())


@pytest.mark.parametrize("partition", [IID(), Shards(), Dirichlet(min_samples=1)])
def test_more_clients_than_samples(partition: Partition) -> None:
    with pytest.raises(UserError, match="num_clients=11 is more than the 10 training samples"):
        partition(np.zeros(10, dtype=np.int64), 11, rng())


def test_too_few_samples_for_the_shards() -> None:
    with pytest.raises(UserError, match="10 clients with 2 shards each need at least 20 samples, but there are 19"):
        Shards(2)(np.zeros(19, dtype=np.int64), 10, rng())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Shards(0),
        lambda: Shards(1.5),  # type: ignore[arg-type]
        lambda: Shards(True),
        lambda: Dirichlet(0.0),
        lambda: Dirichlet(float("nan")),
        lambda: Dirichlet(float("inf")),
        lambda: Dirichlet(min_samples=0),
        lambda: Dirichlet(max_tries=0),
        lambda: IID()(np.zeros(5), 0, rng()),
    ],
)
def test_values_out_of_range(wrong) -> None:
    with pytest.raises(UserError, match=r"must be (a whole number of at least 1|positive.*), got"):
        wrong()


def test_a_hundred_thousand_clients() -> None:
    labels = rng().integers(0, 10, 200_000)
    for partition in (IID(), Shards(2)):
        parts = partition(labels, 100_000, rng())
        assert {len(part) for part in parts} == {2}
