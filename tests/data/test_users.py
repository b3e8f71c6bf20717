"""Test users of samples as clients: `groups`, `ByGroup`, `server_groups`."""

import subprocess
import sys
from pathlib import Path

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, RandomSampler, Subset, TensorDataset

from lightning_fl.data import (
    IID,
    Arrays,
    ByGroup,
    ClientIndices,
    Dirichlet,
    Federated,
    FederatedDataModule,
    Groups,
    Pool,
)
from lightning_fl.errors import UserError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def toy(users, **arguments) -> FederatedDataModule:
    """Return data whose samples contain their own index, a client for each user."""
    x, y = torch.arange(len(users)).float().unsqueeze(1), torch.arange(len(users)) % 3
    arguments = {"groups": users, "partition": ByGroup(), "num_clients": None, **arguments}
    data = Arrays(train=(x, y), test=(x, y), num_classes=3, **arguments)
    data.setup()
    return data


class Written(Dataset):
    """Samples with an attribute that names their users."""

    def __init__(self, name: str, users) -> None:
        setattr(self, name, users)
        self.length = len(users)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2,), float(index)), index % 3


class Module(L.LightningDataModule):
    def __init__(self, dataset) -> None:
        super().__init__()
        self.dataset = dataset

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, batch_size=4, shuffle=True)


users_lists = st.lists(st.sampled_from(["ann", "bob", "eve", "ian", "zoe", "a0", "a1"]), min_size=20, max_size=80)


@pytest.mark.long
@settings(max_examples=60)
@given(users=users_lists, min_samples=st.integers(1, 3), seed=st.integers(0, 99), shuffle=st.integers(0, 99))
def test_each_user_is_a_client_whatever_the_order_of_the_samples(users, min_samples, seed, shuffle) -> None:
    names = np.array(users)
    order = rng(shuffle).permutation(len(names))

    def held(given_names: np.ndarray, index: np.ndarray) -> dict[str, set[int]]:
        parts = ByGroup(min_samples).divide(Pool(given_names, Groups.of(given_names)), None, rng(seed))
        assert all(len(set(given_names[part])) == 1 for part in parts)
        return {str(given_names[part[0]]): set(index[part].tolist()) for part in parts}

    wanted = {user: set(np.flatnonzero(names == user).tolist()) for user in set(users)}
    wanted = {user: held_by for user, held_by in wanted.items() if len(held_by) >= min_samples}
    if not wanted:
        with pytest.raises(UserError, match="leaves out all"):
            held(names, np.arange(len(names)))
        return
    assert held(names, np.arange(len(names))) == wanted
    assert list(held(names, np.arange(len(names)))) == sorted(wanted)
    assert held(names[order], order) == wanted


@pytest.mark.long
@settings(max_examples=60)
@given(
    users=users_lists,
    assign=st.sampled_from(["one", "merge"]),
    seed=st.integers(0, 99),
    shuffle=st.integers(0, 99),
    data=st.data(),
)
def test_groups_stay_whole_and_the_file_s_order_does_not_matter(users, assign, seed, shuffle, data) -> None:
    names, num_groups = np.array(users), len(set(users))
    num_clients = data.draw(st.integers(1, num_groups))
    order = rng(shuffle).permutation(len(names))
    partition = ByGroup(assign=assign)
    parts = partition.divide(Pool(names, Groups.of(names)), num_clients, rng(seed))
    shuffled = partition.divide(Pool(names, Groups.of(names[order])), num_clients, rng(seed))
    assert [set(part.tolist()) for part in parts] == [set(order[part].tolist()) for part in shuffled]
    owners = ClientIndices.of(parts).owners(len(names))
    assert all(len(set(owners[names == user])) == 1 for user in set(users))
    counts = [len(set(names[part])) for part in parts]
    assert len(parts) == num_clients
    if assign == "merge":
        assert sum(map(len, parts)) == len(names)
        assert max(counts) - min(counts) <= 1
    else:
        assert counts == [1] * num_clients


def test_merging_into_as_many_clients_as_groups_only_renames_them() -> None:
    names = rng(4).choice(list("abcdefgh"), 100)
    pool = Pool(names, Groups.of(names))
    one, merged = ByGroup().divide(pool, None, rng()), ByGroup(assign="merge").divide(pool, 8, rng())
    assert sorted(part.tolist() for part in one) == sorted(part.tolist() for part in merged)
    assert [part.tolist() for part in one] != [part.tolist() for part in merged]


def test_whole_numbers_are_sorted_by_value_and_names_are_kept() -> None:
    data = toy([10, 9, 10, 9, 9, 100])
    assert data.client_names.tolist() == ["9", "10", "100"]
    assert [sorted(part.tolist()) for part in data.client_indices] == [[1, 3, 4], [0, 2], [5]]
    assert data.num_clients == 3
    assert toy(["10", "9", "100"]).client_names.tolist() == ["9", "10", "100"]
    assert toy(["07", "7", "10"]).client_names.tolist() == ["07", "7", "10"]
    assert toy(["10", "9", "10"]).client_indices[0].tolist() == [1]
    numbered = Federated(Module(Subset(Written("users", [10, 9, 8]), [0, 1])), None, ByGroup())
    numbered.setup("fit")
    assert numbered.client_names.tolist() == ["9", "10"]
    assert toy([b"x", b"y"]).client_names.tolist() == ["x", "y"]
    assert toy([2.0**63, 2.0**64, float("inf"), -float("inf"), 1.0]).num_clients == 5, "too large for whole numbers"
    assert toy(np.array(["x", 3], dtype=object)).client_names.tolist() == ["3", "x"]
    assert toy(torch.tensor([2, 1])).client_names.tolist() == ["1", "2"]


def test_no_name_is_among_no_groups() -> None:
    assert Groups.of([]).codes_of(np.array(["a", "b"])).tolist() == [-1, -1]


def test_a_function_names_the_user_of_each_sample() -> None:
    x = torch.arange(6.0).unsqueeze(1)
    data = Arrays(
        train=(x, x),
        test=(x, x),
        groups=lambda index: "odd" if index % 2 else "even",
        partition=ByGroup(),
        num_clients=None,
    )
    data.setup()
    assert data.client_names.tolist() == ["even", "odd"]
    assert [sorted(part.tolist()) for part in data.client_indices] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("name", ["groups", "users", "client_ids"])
def test_the_dataset_names_the_users_also_through_subset_and_concat(name: str) -> None:
    first, second = Written(name, ["b", "a", "b", "c"]), Written(name, ["a", "d"])
    data = Federated(Module(ConcatDataset([Subset(first, [3, 0, 1]), second])), None, ByGroup())
    data.setup("fit")
    assert data.client_names.tolist() == ["a", "b", "c", "d"]
    assert [sorted(part.tolist()) for part in data.client_indices] == [[2, 3], [1], [0], [4]]


def test_an_attribute_may_have_any_name_and_a_plain_tensor_dataset_one_too() -> None:
    data = Federated(Module(Written("writer", ["b", "a", "b"])), None, ByGroup(), groups="writer")
    data.setup("fit")
    assert data.client_names.tolist() == ["a", "b"]
    plain = TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 0]))
    plain.users = ["u", "v", "u"]
    some = Subset(plain, [2, 1])
    data = Federated(Module(some), None, ByGroup())
    data.setup("fit")
    assert [part.tolist() for part in data.client_indices] == [[0], [1]]
    some.users = ["z", "y"]
    data = Federated(Module(some), None, ByGroup())
    data.setup("fit")
    assert data.client_names.tolist() == ["y", "z"]


def test_a_dataset_that_reads_whole_batches_names_the_users() -> None:
    class Tables(Module):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(
                self.dataset, batch_size=None, sampler=BatchSampler(RandomSampler(self.dataset), 2, False)
            )

    for name, given_groups in (("users", None), ("writer", "writer")):
        data = Federated(Tables(Written(name, ["b", "a", "b"])), None, ByGroup(), groups=given_groups)
        data.setup("fit")
        assert data.client_names.tolist() == ["a", "b"]
        assert [sorted(part.tolist()) for part in data.client_indices] == [[1], [0, 2]]


def test_a_datamodule_set_up_again_counts_its_groups_anew() -> None:
    module = Module(Written("users", ["b", "a", "b"]))
    data = Federated(module, None, ByGroup())
    data.setup("fit")
    module.dataset = Written("users", ["b", "a", "c"])
    data.teardown("fit")
    data.setup("fit")
    assert (data.num_clients, data.client_names.tolist()) == (3, ["a", "b", "c"])


def test_small_groups_are_left_out_with_their_samples_and_counted() -> None:
    data = toy(["a"] * 5 + ["b"] * 2 + ["c"] * 4 + ["d"], partition=ByGroup(3), val_fraction=0.25)
    assert data.client_names.tolist() == ["a", "c"]
    assert data.client_sizes.tolist() == [4, 3]
    assert "2 clients by ByGroup(min_samples=3), 3-4 each of 2 groups; 2 other groups with 3 samples left out" in (
        data.description()
    )
    some = toy(list("aabbcc"), num_clients=2)
    assert "2 groups; 1 other group with 2 samples left out" in some.description()


def test_test_data_of_the_same_users_are_the_clients_test_parts(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    images, labels = np.zeros((6, 4, 4), dtype=np.uint8), np.array([0, 1, 2, 0, 1, 2])
    np.savez(
        path,
        train_images=images,
        train_labels=labels,
        train_groups=list("bbaacd"),
        test_images=images,
        test_labels=labels,
        test_groups=list("eabcab"),
    )
    data = Arrays(str(path), partition=ByGroup(), num_clients=None)
    data.setup()
    assert data.client_names.tolist() == list("abcd")
    assert [part.tolist() for part in data.client_test_indices] == [[1, 4], [2, 5], [3], []]
    merged = Arrays(str(path), partition=ByGroup(assign="merge"), num_clients=2)
    merged.setup()
    assert merged.client_names is None
    users, tested = np.array(list("bbaacd")), np.array(list("eabcab"))
    for own, test in zip(merged.client_indices, merged.client_test_indices, strict=True):
        assert sorted(test.tolist()) == np.flatnonzero(np.isin(tested, users[own])).tolist()
    assert toy(list("ab")).client_test_indices.joined.size == 0


@pytest.mark.long
@settings(max_examples=40)
@given(users=users_lists, share=st.sampled_from([0.2, 0.5]), seed=st.integers(0, 9), shuffle=st.integers(0, 99))
def test_the_server_gets_whole_groups(users, share, seed, shuffle) -> None:
    names = np.array(users)
    num_groups = len(set(users))
    if not 0 < round(share * num_groups) < num_groups:
        with pytest.raises(UserError, match="need at least one each"):
            toy(users, server_groups=share, seed=seed)
        return
    data = toy(users, server_groups=share, seed=seed)
    of_server = set(names[data.server_indices])
    assert len(of_server) == round(share * num_groups)
    assert of_server.isdisjoint(data.client_names)
    assert of_server | set(data.client_names) == set(users)
    assert len(data.server_indices) + data.client_sizes.sum() == len(users)
    order = rng(shuffle).permutation(len(names))
    again = toy(names[order], server_groups=share, seed=seed)
    assert set(names[order][again.server_indices]) == of_server
    assert data.server_histogram.sum() == len(data.server_indices)


def test_the_server_may_draw_from_its_groups_and_clients_may_be_divided_otherwise() -> None:
    users = np.repeat(list("abcdefghij"), 10)
    data = toy(users, server_groups=0.4, server_fraction=0.1, partition=IID(), num_clients=4)
    assert (len(data.server_indices), data.client_sizes.tolist()) == (6, [15] * 4)
    assert set(users[data.server_indices]).isdisjoint(users[data.client_indices.joined])
    assert data.client_names is None


class Unknown:
    """Name that is neither equal to itself nor different, as pandas' NA."""

    def __ne__(self, other: object) -> bool:
        raise TypeError("boolean value of NA is ambiguous")

    __eq__ = __ne__
    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": None}, r"ByGroup\(.*\) needs the group of each sample, but the data have none in groups, users"),
        (
            {"groups": None, "partition": IID(), "num_clients": 2, "server_groups": 0.5},
            "server_groups=0.5 needs the group",
        ),
        ({"num_clients": 5}, "num_clients=5 is more than the 3 groups: use at most 3"),
        ({"num_clients": 3, "partition": ByGroup(3)}, "more than the 2 groups with min_samples=3"),
        ({"partition": ByGroup(9)}, "leaves out all 3 groups, because none has 9 samples"),
        ({"partition": ByGroup(assign="merge")}, "give their number instead of null"),
        ({"partition": IID()}, "num_clients is null, but only ByGroup finds it in the data"),
        ({"partition": Dirichlet(), "num_clients": 2}, "groups are given, but Dirichlet.* does not use them"),
        ({"client_fraction": 0.5}, "client_fraction=0.5 would take samples away .* server_groups"),
        ({"server_fraction": 0.5}, "server_fraction=0.5 would take samples away .* server_groups"),
        ({"client_fraction": 0.5, "server_groups": 0.5}, "exclude each other"),
        ({"server_groups": 1.0}, r"server_groups must lie in \[0, 1\)"),
        ({"groups": ["a", "b"]}, "groups names the groups of 2 samples, but the data have 8 training samples"),
        ({"groups": ["a", float("nan"), *"abcdef"]}, "groups has no name for 1 of 8 samples, .* sample 1: name"),
        ({"groups": [1.0, float("nan"), *range(6)]}, "groups has no name for 1 of 8 samples, .* sample 1: name"),
        ({"groups": np.array(["2026-01-01"] * 7 + ["NaT"], dtype="datetime64[D]")}, "no name for 1 of 8 .* sample 7"),
        ({"groups": np.array([*"abcdefg", np.datetime64("NaT")], dtype=object)}, "no name for 1 of 8 .* sample 7"),
        ({"groups": np.array([*"abcdefg", Unknown()], dtype=object)}, "no name for 1 of 8 .* sample 7"),
        ({"groups": np.ma.masked_equal(range(8), 3)}, "no name for 1 of 8 .* sample 3"),
        (
            {"groups": ["a", None, "b", "", *"abcd"]},
            "groups has no name for 2 of 8 samples, the first of which is sample 1",
        ),
        ({"groups": ["a", "", *"abcdef"]}, "the first of which is sample 1"),
        ({"groups": [1.0, 2.0, float("nan"), 1.0, 1.0, 1.0, 1.0, 1.0]}, "the first of which is sample 2"),
        ({"groups": [["a"]] * 8}, r"shape \(8, 1\)"),
        ({"groups": lambda index: {0: "a"}[index]}, "groups finds no name for sample 1: KeyError: 1"),
        ({"groups": "writer"}, "groups='writer' is no column of the data"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(arguments, message: str) -> None:
    with pytest.raises(UserError, match=message):
        toy(**{"users": list("aaabbbcc"), **({"groups": list("aaabbbcc")} | arguments)})


def test_an_unknown_assignment_is_refused() -> None:
    with pytest.raises(UserError, match="assign 'merged' is unknown; did you mean 'merge'"):
        ByGroup(assign="merged")


MEMORY = """
import resource, sys, tracemalloc
import numpy as np, torch
from lightning_fl.data import Arrays, ByGroup
num_users = int(sys.argv[1])
users = np.repeat(np.arange(num_users), 3)
x = torch.zeros(len(users), 1)
y = torch.zeros(len(users), dtype=torch.int64)
data = Arrays(train=(x, y), test=(x[:9], y[:9]), num_classes=2, groups=users, partition=ByGroup(), num_clients=None,
              val_fraction=0.4)
tracemalloc.start(1)
data.setup()
data.description()
assert data.num_clients == num_users and len(data.client(5)) == 2
left = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, "<none>")])
print(sum(trace.size for trace in left.traces), len(left.traces))
"""


@pytest.mark.process
def test_a_federation_allocates_nothing_for_each_user() -> None:
    """Count the objects that are left after setting up 1,000 and 10,000 users: their number must not grow."""
    left = []
    for num_users in (1_000, 10_000):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(num_users)], capture_output=True, text=True, check=True, timeout=300
        )
        left.append([int(number) for number in done.stdout.split()])
    (small, few), (large, many) = left
    assert many < few + 1_000, left
    assert (large - small) / 9_000 < 400, left
