"""Test Federated: ordinary data modules, divided among clients."""

from collections.abc import Callable, Iterator

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split

from lightning_fl.data import DatasetSamples, Federated, Shards, TensorSamples
from lightning_fl.errors import UserError

X = torch.arange(60.0).unsqueeze(1)
Y = torch.arange(60) % 3


def collate(samples: list) -> dict:
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}


class Tables(L.LightningDataModule):
    """Typical user's data module: split in setup, loaders of its own."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.options = {"batch_size": 8, "shuffle": True, **options}
        self.stages: list[str | None] = []

    def setup(self, stage: str | None = None) -> None:
        self.stages.append(stage)
        generator = torch.Generator().manual_seed(0)
        self.train_set, self.val_set = random_split(TensorDataset(X, Y), [48, 12], generator=generator)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, **self.options)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_set, batch_size=5)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.val_set, batch_size=3)


def test_a_data_module_with_tensors() -> None:
    inner = Tables()
    data = Federated(inner, num_clients=6, partition=Shards(1))
    data.setup("fit")
    assert isinstance(data.train, TensorSamples)
    assert (data.batch_size, data.num_classes, data.in_channels) == (8, 3, None)
    assert data.client_sizes.tolist() == [8] * 6
    assert data.label_histograms is not None
    assert (data.label_histograms > 0).sum(1).max() <= 2
    for x, y in data.client(2).batches(3):
        assert torch.equal(y, x[:, 0].long() % 3)
    seen = torch.cat([x for k in range(6) for x, _ in data.client(k).batches(8)])[:, 0]
    assert sorted(seen.tolist()) == sorted(X[inner.train_set.indices, 0].tolist())
    assert [len(batch[0]) for batch in data.val_dataloader()] == [5, 5, 2]
    assert [len(batch[0]) for batch in data.test_dataloader()] == [3, 3, 3, 3]
    assert len(data.predict_dataloader()) == 4
    assert inner.stages == ["fit", "test"]
    assert data.description().endswith("no server data; test data as given.")


def test_the_loaders_own_collate_function_is_kept() -> None:
    data = Federated(Tables(collate_fn=collate), num_clients=6, batch_size=4, val_fraction=0.25)
    data.setup()
    assert isinstance(data.train, DatasetSamples)
    assert data.batch_size == 4
    assert next(data.client(0).batches(4, torch.Generator()))["x"].shape == (4, 1)
    assert sum(len(batch["y"]) for batch in data.val_dataloader()) == 12
    assert data.label_histograms is not None
    assert data.label_histograms.sum() == 36


def test_a_model_that_brings_its_data(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    model = BoringModel()
    data = Federated(BoringModel(), num_clients=4)
    data.prepare_data()
    data.setup()
    assert data.client_sizes.tolist() == [16] * 4
    assert (data.batch_size, data.num_classes, data.label_histograms) == (1, None, None)
    (batch,) = data.client(1).batches(16)
    assert batch.shape == (16, 32)
    with pytest.raises(UserError, match="needs the class of each sample"):
        Federated(model, num_clients=4, partition=Shards()).setup()
    trainer = make_stock_trainer(max_epochs=1)
    trainer.fit(model, data)
    assert trainer.global_step == 64
    trainer.test(model, data, verbose=False)


def test_hooks_the_source_lacks_are_empty(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    class TrainingOnly(L.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(TensorDataset(torch.randn(8, 32)), batch_size=2, collate_fn=lambda rows: rows[0][0])

    data = Federated(TrainingOnly(), num_clients=2)
    data.setup()
    assert data.val_dataloader() == data.test_dataloader() == data.predict_dataloader() == []
    trainer = make_stock_trainer(fast_dev_run=True)
    trainer.fit(BoringModel(), data)
    assert trainer.global_step == 1


class Images(Dataset):
    labels = np.array([0, 1] * 5)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 4, 4), float(i)), int(self.labels[i])


class Loader:
    """Object with train_dataloader() that is not a Lightning class."""

    def __init__(self, loader: object) -> None:
        self.loader = loader

    def train_dataloader(self) -> object:
        return self.loader


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_any_object_with_a_loader() -> None:
    data = Federated(Loader(DataLoader(Images(), batch_size=2)), num_clients=2, partition=Shards(1))  # type: ignore[arg-type]
    assert data.in_channels is None
    data.setup()
    assert (data.in_channels, data.num_classes) == (3, 2)
    assert sorted(data.label_histograms.tolist()) == [[0, 5], [5, 0]]
    assert data.test_dataloader() == []


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (Loader(DataLoader(Stream())), "Stream cannot be divided over clients"),
        (Loader([DataLoader(Images())]), r"train_dataloader\(\) returns a list"),
        (Loader(DataLoader(Images(), batch_sampler=[[0, 1], [2]])), "has its own batch sampler.: set batch_size"),
        (object(), "object cannot be divided over clients: it has no train_dataloader"),
    ],
)
def test_what_cannot_be_divided(source: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Federated(source, num_clients=2).setup()  # type: ignore[arg-type]
