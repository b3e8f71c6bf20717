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

from lightning_fl.aggregators import CoordinateMedian
from lightning_fl.algorithms import Centralised, DataSharing, FedAvg, HybridFL
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


class Ones(L.LightningDataModule):
    """Samples that are all one, so that all batches have one gradient."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.num = num

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.ones(self.num, 1)), batch_size=SIZE, shuffle=True, drop_last=True)


class Mean(L.LightningModule):
    """Module whose gradient is the mean input, whatever the weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.weight * batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


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
    module, trainer = Seen(), make_trainer(max_rounds=1, clients_per_round=1.0)
    trainer.fit(module, federated(Dropping(in_batches=in_batches), drop_last=drop_last))
    assert sorted(module.sizes) == expected


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize("method", [FedAvg(), FedAvg(aggregator=CoordinateMedian())], ids=["mean", "median"])
def test_a_client_without_a_full_batch_does_not_count_in_the_mean(
    method: FedAvg, runner: str, make_trainer: MakeTrainer
) -> None:
    """Each client with a batch moves the weight by -0.1, also beside three clients that would not move it."""
    module, trainer = Mean(), make_trainer(max_rounds=1, clients_per_round=1.0, runner=runner)
    with pytest.warns(
        UserWarning, match="3 of 5 clients have no full batch and are never selected: set drop_last=False"
    ):
        trainer.fit(module, federated(Ones(17), sizes=(4, 3, 4, 3, 3)), method)
    torch.testing.assert_close(module.weight.detach(), torch.tensor([-0.1]))


def test_clients_without_a_full_batch_are_clients_without_samples(make_trainer: MakeTrainer) -> None:
    data = federated()
    data.setup("fit")
    assert data.client_sizes.tolist() == [0, 5, 4, 9]
    assert data.description().startswith("Federated: 21 training samples over 4 clients")
    assert "3-9 each" in data.description()
    with (
        pytest.warns(UserWarning, match="1 of 4 clients have no full batch"),
        pytest.raises(UserError, match="clients_per_round is 4, but the federation has 3 clients with samples"),
    ):
        make_trainer(max_rounds=1, clients_per_round=4).fit(Perceptron(), data)
    module = Seen()
    make_trainer(max_rounds=1, clients_per_round=4).fit(module, federated(), Centralised())
    assert sum(module.sizes) == 20  # the pooled samples have full batches


def test_samples_of_the_server_can_fill_a_batch(make_trainer: MakeTrainer) -> None:
    data = federated(Dropping(8), sizes=(3, 3), client_fraction=6 / 8, server_fraction=1 / 3)
    module = Seen()
    make_trainer(max_rounds=1, clients_per_round=2).fit(module, data, DataSharing(cap=1.0))
    assert module.sizes == [4, 4]


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
    with pytest.warns(
        UserWarning, match=r"leaves out 5 of the clients' 21 .*; 1 of 4 clients have no full batch and are"
    ):
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
    """The server's steps leave attributes of the module as they were, so the batches are counted outside it."""
    seen: list[int] = []

    class Telling(Perceptron):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(len(batch[0]))

    data = federated(Dropping(22), sizes=(8, 8), client_fraction=16 / 22, server_fraction=6 / 16)
    make_trainer(max_rounds=1, clients_per_round=2).fit(Telling(), data, HybridFL())
    assert sorted(seen) == [2, 4, 4, 4, 4, 4]


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
