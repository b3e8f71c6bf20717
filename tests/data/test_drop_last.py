"""Test loaders that drop a last batch that is not full: kept for each client, or overridden by the user's word."""

import logging
from typing import Any

import lightning as L  # noqa: N812
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Subset, TensorDataset
from toys import Perceptron, Sizes, samples

from lightning_fl.algorithms import FedAvg, HybridFL
from lightning_fl.data import Federated
from lightning_fl.errors import UserError

CLIENTS, SIZE = (3, 5, 4, 9), 4


class Rows(Dataset):
    """Dataset that reads whole batches, given their indices in a list."""

    tensors = samples(sum(CLIENTS))

    def __len__(self) -> int:
        return sum(CLIENTS)

    def __getitem__(self, indices: list[int]) -> list[Tensor]:
        return [tensor[indices] for tensor in self.tensors]


class Dropping(L.LightningDataModule):
    def __init__(self, num: int = sum(CLIENTS), in_batches: bool = False) -> None:
        super().__init__()
        self.num, self.in_batches = num, in_batches

    def train_dataloader(self) -> DataLoader:
        if self.in_batches:
            return DataLoader(Rows(), batch_size=None, sampler=BatchSampler(RandomSampler(Rows()), SIZE, True))
        return DataLoader(TensorDataset(*samples(self.num)), batch_size=SIZE, shuffle=True, drop_last=True)


class Seen(Perceptron):
    """Perceptron that keeps the sizes of its batches, unless several clients train at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))


def federated(source: Any = None, sizes: tuple[int, ...] = CLIENTS, **options: Any) -> Federated:
    given = Dropping(sum(sizes)) if source is None else source
    return Federated(given, num_clients=len(sizes), partition=Sizes(sizes=sizes), **options)


@pytest.mark.parametrize("in_batches", [False, True], ids=["samples", "batches"])
@pytest.mark.parametrize(
    ("drop_last", "expected"), [(None, [4, 4, 4, 4]), (True, [4, 4, 4, 4]), (False, [1, 1, 3, 4, 4, 4, 4])]
)
def test_each_client_drops_what_a_stock_trainer_would(
    drop_last: bool | None, expected: list[int], in_batches: bool, make_trainer: MakeTrainer
) -> None:
    module, trainer = Seen(), make_trainer(max_rounds=1, clients_per_round=4)
    trainer.fit(module, federated(Dropping(in_batches=in_batches), drop_last=drop_last))
    assert sorted(module.sizes) == expected


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_one_client_is_a_stock_trainer(runner: str, make_trainer: MakeTrainer, make_stock_trainer: Any) -> None:
    """Compare the weights after a pass over 13 samples, which reads 12."""
    ours, stock = Perceptron(), Perceptron()
    stock.load_state_dict(ours.state_dict())
    data = federated(sizes=(13,))
    make_trainer(max_rounds=1, clients_per_round=1, runner=runner).fit(ours, data)
    indices = data.client_indices[0]
    problem = oracle.Problem([indices], [indices], SIZE, cohort_size=1, rounds=1)
    order = [int(index) for batch, _ in problem.batches(0, 0) for index in batch]
    in_order = Subset(TensorDataset(*samples(13)), order)
    make_stock_trainer(max_epochs=1).fit(stock, DataLoader(in_order, batch_size=SIZE, drop_last=True))
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-7)


def test_what_is_dropped_is_counted_and_said(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    trainer = make_trainer(max_rounds=1, clients_per_round=2)
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trainer.fit(Perceptron(), federated(sizes=(6, 13)))
    assert "drop_last=True leaves out 3 of the clients' 19 samples in each pass: set drop_last=False" in caplog.text
    with pytest.warns(UserWarning, match=r"leaves out 5 of the clients' 21 .*; 1 of 4 clients have no full batch and"):
        trainer.fit(Perceptron(), federated())
    with pytest.raises(
        UserError, match=r"leaves no client a batch: each has at most 3 samples, and a batch has 4: set"
    ):
        trainer.fit(Perceptron(), federated(sizes=(3, 2)))
    with pytest.raises(UserError, match="drop_last 'yes' is unknown; allowed: False, None, True"):
        federated(drop_last="yes")
    caplog.clear()
    trainer.fit(Perceptron(), federated(drop_last=False))
    assert "drop_last" not in caplog.text
    assert "drop_last" not in repr(federated())
    assert "drop_last=False" in repr(federated(drop_last=False))


def test_the_server_reads_all_of_its_samples(make_trainer: MakeTrainer) -> None:
    module, sizes = Seen(), (8, 8)
    data = federated(Dropping(22), sizes=sizes, client_fraction=16 / 22, server_fraction=6 / 16)
    make_trainer(max_rounds=1, clients_per_round=2).fit(module, data, HybridFL())
    assert sorted(module.sizes) == [2, 4, 4, 4, 4, 4]


def test_the_pooled_samples_drop_their_last_batch() -> None:
    for drop_last, expected in ((None, [4] * 5), (False, [4] * 5 + [1])):
        data = federated(drop_last=drop_last)
        data.setup("fit")
        loader = data.train_dataloader()
        assert [len(batch[0]) for batch in loader] == expected
        assert (len(loader), loader.num_samples) == (len(expected), sum(expected))


def test_a_resumed_run_is_a_whole_run_and_may_change_its_word(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any]
) -> None:
    def fit(max_rounds: int, drop_last: bool | None = None, **options: Any) -> Perceptron:
        torch.manual_seed(0)
        module = Perceptron()
        make_trainer(max_rounds=max_rounds, **keeps_files).fit(
            module, federated(drop_last=drop_last), FedAvg(), **options
        )
        return module

    whole = fit(3).state_dict()
    fit(2)
    resumed = fit(3, ckpt_path="last").state_dict()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    fit(4, drop_last=False, ckpt_path="last")
