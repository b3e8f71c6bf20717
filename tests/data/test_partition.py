"""Test partitions: each sample exactly once, the stated sizes, termination in every case."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fl.data import (
    IID,
    Arrays,
    Classes,
    ClassPriors,
    Dirichlet,
    GivenIndices,
    LogNormalSizes,
    Partition,
    QuantitySkew,
    Shards,
    Sizes,
)
from lightning_fl.data.partitions.sizes import rounded_sizes
from lightning_fl.errors import UserError

PARTITIONS = [
    IID(),
    Shards(1),
    Shards(3),
    Dirichlet(5.0, min_samples=1),
    Dirichlet(5.0, skip_full_clients=False, min_samples=1),
    Dirichlet(5.0, min_samples=1, block=3),
    ClassPriors(0.1),
    ClassPriors(5.0, LogNormalSizes(1.0)),
    QuantitySkew(5.0, min_samples=1),
    LogNormalSizes(1.0),
]


def drawn_partitions() -> st.SearchStrategy[Partition]:
    """Return partitions of any concentration and spread that hardly ever refuse eight clients."""
    any_alpha, alpha = st.floats(1e-6, 1e9), st.floats(1.0, 1e9)
    sizes = st.one_of(st.just(IID()), st.builds(LogNormalSizes, st.floats(0, 1.5)))
    return st.one_of(
        st.just(IID()),
        st.builds(Shards, st.integers(1, 3)),
        st.builds(Dirichlet, alpha, skip_full_clients=st.booleans(), min_samples=st.just(1)),
        st.builds(Dirichlet, alpha, min_samples=st.just(1), block=st.integers(2, 9)),
        st.builds(ClassPriors, any_alpha, sizes),
        st.builds(QuantitySkew, alpha, min_samples=st.just(1)),
        sizes,
    )


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.long
@settings(max_examples=80)
@given(
    partition=drawn_partitions(),
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


@pytest.mark.parametrize("partition", [*PARTITIONS, Classes(2)])
def test_another_seed_is_another_partition(partition: Partition) -> None:
    labels = np.arange(300) % 5
    one, two = partition(labels, 8, rng(0)), partition(labels, 8, rng(1))
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


@pytest.mark.parametrize(
    "partition",
    [
        IID(),
        Shards(),
        Dirichlet(min_samples=1),
        ClassPriors(),
        Classes(1),
        QuantitySkew(min_samples=1),
        LogNormalSizes(),
    ],
)
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
        lambda: ClassPriors(0.0),
        lambda: Classes(0),
        lambda: QuantitySkew(-1.0),
        lambda: QuantitySkew(min_samples=0),
        lambda: LogNormalSizes(min_samples=0),
        lambda: IID()(np.zeros(5), 0, rng()),
    ],
)
def test_values_out_of_range(wrong) -> None:
    with pytest.raises(UserError, match=r"must be (a whole number of at least 1|positive.*), got"):
        wrong()


@pytest.mark.long
def test_a_hundred_thousand_clients() -> None:
    labels = rng().integers(0, 10, 200_000)
    for partition in (IID(), Shards(2)):
        parts = partition(labels, 100_000, rng())
        assert {len(part) for part in parts} == {2}


def test_blocks_give_all_clients_even_sizes() -> None:
    labels = np.arange(2003) % 10
    parts = Dirichlet(0.1, block=10)(labels, 25, rng())
    assert {len(part) for part in parts} == {80, 81}
    assert np.mean([len(set(labels[part])) for part in parts]) < 6


def test_a_block_of_all_clients_is_the_split_of_one_block_joined_and_cut() -> None:
    labels = rng(5).integers(0, 5, 400)
    order = rng().permutation(400)
    generator = rng()
    generator.permutation(400)
    split = Dirichlet(0.5, min_samples=20)(labels[order], 10, generator)  # half an even share
    parts = Dirichlet(0.5, block=10)(labels, 10, rng())
    assert np.array_equal(np.concatenate(parts), order[np.concatenate(split)])
    assert {len(part) for part in parts} == {40}


def test_blocks_skip_full_clients() -> None:
    with pytest.raises(UserError, match="block=10 skips clients that are full"):
        Dirichlet(0.5, skip_full_clients=False, block=10)
    with pytest.raises(UserError, match="block must be a whole number of at least 2"):
        Dirichlet(0.5, block=1)
    with pytest.raises(UserError, match="leave out block"):
        Dirichlet(1e-30, block=10, min_samples=1, max_tries=5)(np.arange(100) % 10, 10, rng())


@pytest.mark.long
@settings(max_examples=40)
@given(num_clients=st.integers(1, 12), num_classes=st.integers(1, 6), seed=st.integers(0, 99), data=st.data())
def test_a_client_has_exactly_its_number_of_classes(
    num_clients: int, num_classes: int, seed: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, num_classes))
    labels = rng(seed).permutation(np.arange(40 * num_classes) % num_classes) * 3  # labels need not be 0, 1, 2 …
    if num_clients < num_classes and count < num_classes:
        return  # some class may be without a client, which is refused
    parts = Classes(count)(labels, num_clients, rng(seed))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    counts = np.array([np.bincount(labels[part] // 3, minlength=num_classes) for part in parts])
    assert ((counts > 0).sum(1) == count).all()
    for client in range(num_clients):
        assert counts[client, client % num_classes] > 0
    for held in counts.T:  # evenly to its holders
        assert held[held > 0].max() - held[held > 0].min() <= 1


def test_all_classes_for_each_client_are_even() -> None:
    labels = rng(1).integers(0, 7, 500)
    counts = np.array([np.bincount(labels[part], minlength=7) for part in Classes(7)(labels, 9, rng())])
    assert (counts.max(0) - counts.min(0) <= 1).all()


def test_classes_that_cannot_be_dealt_are_refused() -> None:
    labels = np.arange(100) % 10
    with pytest.raises(UserError, match="classes_per_client=11 is more than the 10 classes that the samples have"):
        Classes(11)(labels, 10, rng())
    with pytest.raises(UserError, match="to 0 of 3 clients: use more clients or a larger classes_per_client"):
        Classes(1)(labels, 3, rng())
    with pytest.raises(UserError, match="which has 10 samples, to 11 of 11 clients: use fewer clients"):
        Classes(10)(labels, 11, rng())


NUM_DRAWS = 600


@pytest.mark.matrix
def test_class_priors_are_drawn_one_by_one_without_replacement() -> None:
    """A plain loop, one sample at a time, has the same mean and spread of class counts."""
    labels, sizes, alpha = np.repeat(np.arange(3), [30, 20, 10]), [20, 20, 20], 1.0

    def loop(generator: np.random.Generator) -> np.ndarray:
        left, taken = np.array([30.0, 20.0, 10.0]), np.zeros((3, 3))
        for client, size in enumerate(sizes):
            shares = generator.dirichlet(alpha * np.array([3, 2, 1]) / 6)
            for _ in range(size):
                shares = shares * (left > 0)
                if shares.sum() == 0:
                    shares = left / left.sum()
                drawn = generator.choice(3, p=shares / shares.sum())
                taken[client, drawn] += 1
                left[drawn] -= 1
        return taken

    def ours(generator: np.random.Generator) -> np.ndarray:
        return np.array([np.bincount(labels[part], minlength=3) for part in ClassPriors(alpha)(labels, 3, generator)])

    expected = np.array([loop(rng(seed)) for seed in range(NUM_DRAWS)])
    found = np.array([ours(rng(10_000 + seed)) for seed in range(NUM_DRAWS)])
    error = np.sqrt((expected.var(0) + found.var(0)) / NUM_DRAWS)
    assert (np.abs(expected.mean(0) - found.mean(0)) < 5 * error).all()
    assert np.allclose(expected.std(0), found.std(0), rtol=0.15, atol=0.3)


def test_class_priors_keep_the_sizes_and_skew_the_labels() -> None:
    labels = np.arange(5000) % 10

    def classes_of(alpha: float) -> float:
        parts = ClassPriors(alpha)(labels, 50, rng())
        assert {len(part) for part in parts} == {100}
        return float(np.mean([len(set(labels[part])) for part in parts]))

    assert classes_of(0.1) < classes_of(1.0) < 9.5 < classes_of(1e6)
    drawn = LogNormalSizes(0.8).sizes(5000, 50, rng())
    assert [len(part) for part in ClassPriors(0.5, LogNormalSizes(0.8))(labels, 50, rng())] == drawn.tolist()


@pytest.mark.long
@settings(max_examples=60)
@given(
    alpha=st.floats(1e-6, 1e9),
    sigma=st.floats(0, 1.5),
    labels=st.lists(st.integers(0, 4), min_size=60, max_size=150),
    num_clients=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_class_priors_keep_the_sizes_for_every_alpha(
    alpha: float, sigma: float, labels: list[int], num_clients: int, seed: int
) -> None:
    for sizes in (IID(), LogNormalSizes(sigma)):
        parts = ClassPriors(alpha, sizes)(np.array(labels), num_clients, rng(seed))
        assert [len(part) for part in parts] == sizes.sizes(len(labels), num_clients, rng(seed)).tolist()


@pytest.mark.parametrize("alpha", [1e-37, 1e-6])
def test_class_priors_of_one_class_take_what_is_left(alpha: float) -> None:
    labels = np.arange(100) % 4
    parts = ClassPriors(alpha)(labels, 10, rng())
    assert {len(part) for part in parts} == {10}
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(100))


def test_class_priors_need_sizes() -> None:
    with pytest.raises(UserError, match=r"sizes=Shards.* must be IID\(\), LogNormalSizes\(\) or QuantitySkew\(\)"):
        ClassPriors(0.5, Shards())  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [IID(), LogNormalSizes(0.7), QuantitySkew(0.5)])
def test_partitions_by_size_leave_the_labels_alone(sizes: Sizes) -> None:
    parts = [sizes(labels, 7, rng()) for labels in (np.zeros(700, dtype=np.int64), np.arange(700) % 10)]
    assert all(np.array_equal(one, two) for one, two in zip(*parts, strict=True))
    assert [len(part) for part in parts[0]] == sizes.sizes(700, 7, rng()).tolist()


@pytest.mark.long
@given(num_clients=st.integers(1, 200), more=st.integers(0, 5000), seed=st.integers(0, 99))
def test_log_normal_sizes_without_spread_are_those_of_iid(num_clients: int, more: int, seed: int) -> None:
    num_samples = num_clients + more
    even = IID().sizes(num_samples, num_clients, rng())
    assert np.array_equal(LogNormalSizes(0).sizes(num_samples, num_clients, rng(seed)), even)


def test_sizes_spread_as_asked() -> None:
    spread = np.log(LogNormalSizes(0.5).sizes(10_000_000, 2000, rng())).std()
    assert 0.46 < spread < 0.54
    shares = QuantitySkew(2.0, min_samples=1).sizes(10_000_000, 2000, rng()) / 10_000_000
    assert shares.var() == pytest.approx(1 / 2000**2 / 2, rel=0.15)  # of Dir(2, …, 2): about p² / alpha, p = 1/2000


@pytest.mark.parametrize("sizes", [QuantitySkew(0.01), LogNormalSizes(4.0, min_samples=10), LogNormalSizes(1e30)])
def test_sizes_that_are_never_large_enough_are_refused(sizes: Sizes) -> None:
    with pytest.raises(
        UserError, match=r"In 1,000 draws some client had fewer than \d+ of the 600 samples .*(raise|lower)"
    ):
        sizes.sizes(600, 50, rng())


@pytest.mark.long
@settings(max_examples=60)
@given(
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(lambda w: sum(w) > 1e-3),
    total=st.integers(0, 999),
)
def test_rounded_sizes_add_up_and_lie_next_to_the_exact_ones(weights: list[float], total: int) -> None:
    exact = np.array(weights) / np.sum(weights) * total
    sizes = rounded_sizes(exact, total)
    assert sizes.sum() == total
    assert (np.abs(sizes - exact) < 1 + 1e-6).all()


# ---------------------------------------------------------------------------------------------------- index lists

SPLIT = [[0, 1, 2], [4, 3], [9, 5, 7, 8, 6]]


@dataclass(frozen=True)
class Own(Partition):
    """Partition of a user's own, which knows the indices that it returns."""

    needs_labels = False

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return [np.array(part) for part in SPLIT]


@dataclass(frozen=True)
class Seen(Partition):
    """Partition that gives client k the samples of class k, in their order."""

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return [np.flatnonzero(labels == client) for client in range(num_clients)]


def split(partition: Partition, num_clients: int | None = 3, **settings: Any) -> Arrays:
    """Return ten samples, the i-th of which is i and has class i mod 3, divided over clients."""
    x = torch.arange(10.0)[:, None]
    data = Arrays(
        train=(x, torch.arange(10) % 3),
        test=(x, torch.arange(10) % 3),
        num_clients=num_clients,
        **settings,
        partition=partition,
    )
    data.setup("fit")
    return data


def held(data: Arrays) -> list[list[int]]:
    """Return the values of each client's samples, in the order of its indices."""
    return [data.train.stored(part)[0].flatten().int().tolist() for part in data.client_indices]


@pytest.mark.parametrize("seed", range(3))
def test_indices_are_places_in_the_data_set(seed: int) -> None:
    assert held(split(Own(), seed=seed)) == SPLIT
    assert held(split(Seen(), seed=seed)) == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


def test_a_partition_of_ones_own_sees_the_samples_that_the_server_leaves_in_their_order() -> None:
    data = split(Seen(), server_fraction=0.25)
    assert len(data.server_indices) == 2
    for client, part in enumerate(held(data)):
        assert part == [i for i in range(10) if i % 3 == client and i not in data.server_indices]


def in_file(path: Path, lists: Any) -> Path:
    """Write index lists as JSON, or as CSV with a row for each sample, and return the path."""
    if path.suffix == ".json":
        path.write_text(json.dumps(lists))
    else:
        named = lists if isinstance(lists, dict) else dict(enumerate(lists))
        path.write_text("index,client\n" + "".join(f"{i},{name}\n" for name, part in named.items() for i in part))
    return path


@pytest.mark.parametrize("num_clients", [3, None])
@pytest.mark.parametrize("kind", ["lists", "arrays", "json", "csv"])
def test_given_indices_are_what_the_clients_hold(kind: str, num_clients: int | None, tmp_path: Path) -> None:
    lists: Any = {"lists": SPLIT, "arrays": [np.array(part) for part in SPLIT]}.get(kind)
    lists = in_file(tmp_path / f"split.{kind}", SPLIT) if lists is None else lists
    data = split(GivenIndices(lists), num_clients)
    assert held(data) == SPLIT
    assert data.num_clients == 3


@pytest.mark.parametrize("suffix", ["json", "csv"])
@pytest.mark.parametrize(("names", "order"), [(("10", "2", "1"), (2, 1, 0)), (("zoe", "al", "2"), (0, 1, 2))])
def test_clients_with_numbers_come_in_their_order(
    names: tuple[str, ...], order: tuple[int, ...], suffix: str, tmp_path: Path
) -> None:
    path = in_file(tmp_path / f"split.{suffix}", dict(zip(names, SPLIT, strict=True)))
    assert held(split(GivenIndices(path))) == [SPLIT[place] for place in order]


@pytest.mark.long
def test_given_indices_may_leave_samples_and_clients_out() -> None:
    data = split(GivenIndices([[1], [], [9, 0]], leave_out=True))
    assert held(data) == [[1], [], [9, 0]]
    assert "; 7 others left out; " in data.description()
    assert "left out" not in split(GivenIndices(SPLIT)).description()
    assert repr(GivenIndices([[0] * 10**6])) == "GivenIndices(lists=<1,000,000 indices of 1 clients>, leave_out=False)"


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        (
            [[0, 1], [2], [3, 10]],
            r"the index list of client 2 has the index 10 \(given as lists\), but there are 10 training samples",
        ),
        ([[0, -1], [2], [3]], "the index list of client 0 has the index -1"),
        ([[0, 1], [1], [2]], "sample 1 is in the index lists of clients 0 and 1"),
        ([[0, 1], [2, 2], [3]], "sample 2 is twice in the index list of client 1"),
        (
            [[0, 1, 2], [3, 4], [5, 7, 8, 9]],
            "1 of the 10 training samples are in no index list, the first of which is 6",
        ),
        (SPLIT[:2], r"num_clients=3, but the number of index lists is 2"),
        ([], "must have an index list for each client"),
        ([0, 1, 2], "must have a list of whole numbers for client 0, got 0"),
        ([[0], [1.5], [2]], r"must have a list of whole numbers for client 1, got \[1.5\]"),
        ([[0], [True], [2]], "must have a list of whole numbers for client 1"),
        ([[0], [[1], [2, 3]], [2]], "must have a list of whole numbers for client 1"),
        ([[0], [10**30], [2]], "must have a list of whole numbers for client 1"),
        ("split.pkl", "'split.pkl' is neither a .json nor a .csv file"),
        ("none.json", r"the index lists none.json cannot be read \(No such file"),
    ],
)
def test_index_lists_that_do_not_fit_are_refused(lists: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        split(GivenIndices(lists))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([[0, 1], [1], [2]], r"sample 1 is in the index lists of clients 0 and 1 \(as Fixed divides\)"),
        (SPLIT[:2], "num_clients=3, but the number of index lists is 2"),
        ([[0], [-1], [2]], "the index list of client 1 has the index -1"),
        ([[0], [1.5], [2]], "what Fixed returns must have a list of whole numbers for client 1"),
        ([], "what Fixed returns must have an index list for each client"),
    ],
)
def test_parts_of_ones_own_partition_that_do_not_fit_are_refused(parts: Any, said: str) -> None:
    @dataclass(frozen=True)
    class Fixed(Partition):
        def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Any:
            return parts

    with pytest.raises(UserError, match=said):
        split(Fixed())


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "[[0]", "are no JSON"),
        ("a.json", "[" * 100_000, "are no JSON"),
        ("a.json", "3", "must have a list or an object of index lists, got 3"),
        ("a.json", "{}", "must have an index list for each client"),
        ("a.csv", "user,index\n", "need the columns client and index, and have .'user', 'index'."),
        ("a.csv", "client,index\n0,1\n0,x\n", "line 3 of .*a.csv must have a client and an index, got '0' and 'x'"),
        ("a.csv", "client,index\n0\n", "line 2 of .*a.csv must have a client and an index, got '0' and ''"),
        ("a.csv", "client,index\n", "must have an index list for each client"),
    ],
)
def test_files_of_index_lists_that_are_damaged_are_refused(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        split(GivenIndices(tmp_path / name))


@pytest.mark.parametrize(
    ("setting", "value"), [("server_fraction", 0.2), ("client_fraction", 0.5), ("server_groups", 0.5)]
)
def test_given_indices_leave_nothing_for_the_server(setting: str, value: float) -> None:
    groups = {"groups": list("aabbccddee")} if setting == "server_groups" else {}
    with pytest.raises(UserError, match=rf"{setting}={value} would take samples away from the clients"):
        split(GivenIndices(SPLIT), **{setting: value}, **groups)


# ----------------------------------------------------------------------------------- draws again, and classes of nobody


@pytest.mark.parametrize("partition", [QuantitySkew(0.3, min_samples=5), LogNormalSizes(2.0, min_samples=5)])
def test_sizes_are_drawn_as_often_as_max_tries_says(partition: Any) -> None:
    """The draw that fits is the same with any limit that reaches it."""

    def sizes(max_tries: int) -> list[int]:
        parts = replace(partition, max_tries=max_tries)(np.zeros(200), 8, rng(1))
        return [len(part) for part in parts]

    with pytest.raises(UserError, match=r"In 1 draws some client had fewer than 5 .*max_tries"):
        sizes(1)
    assert sizes(1000) == sizes(100_000)
    assert min(sizes(1000)) >= 5
    with pytest.raises(UserError, match="max_tries must be"):
        replace(partition, max_tries=0)


def test_classes_of_nobody_are_left_out_if_that_is_wanted() -> None:
    labels = np.repeat(np.arange(10), 30)
    with pytest.raises(UserError, match=r"gives class .* to 0 of 3 clients: .*leave_out to True"):
        Classes(2)(labels, 3, rng())
    parts = Classes(2, leave_out=True)(labels, 3, rng())
    taken = np.concatenate(parts)
    assert len(set(taken.tolist())) == len(taken)
    assert all(len(set(labels[part])) == 2 for part in parts)
    for label in set(labels[taken].tolist()):
        assert (labels[taken] == label).sum() == 30, "a class that somebody has is shared out as a whole"
    whole, same = Classes(2)(labels, 20, rng(5)), Classes(2, leave_out=True)(labels, 20, rng(5))
    assert all(np.array_equal(one, two) for one, two in zip(whole, same, strict=True))
