"""Test in which forms data name classes, and which targets are quantities and no classes."""

from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from lightning_fl.algorithms import FedKT
from lightning_fl.data import IID, Arrays, Dirichlet, Federated, Shards
from lightning_fl.data.samples.dataset_samples import dataset_labels, named_labels
from lightning_fl.errors import UserError
from lightning_fl.modules import ImageClassifier

NUMBERS = np.arange(60) % 3
NAMES = ["dog", "cat", "emu"]
BY_NAME = np.array([1, 0, 2])[NUMBERS]
"""Classes of the names in sorted order."""


class Labelled(Dataset):
    def __init__(self, labels: Any, num: int = 60) -> None:
        self.labels, self.num = labels, num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(2), 0


class Source(L.LightningDataModule):
    def __init__(self, dataset: Dataset) -> None:
        super().__init__()
        self.dataset = dataset

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, batch_size=5)


def of_objects(values: Any) -> np.ndarray:
    return np.array(list(values), dtype=object)


TEXT = [NAMES[number] for number in NUMBERS]
ALWAYS = {
    "whole numbers": (NUMBERS, NUMBERS),
    "bytes": (NUMBERS.astype(np.uint8), NUMBERS),
    "a column": (NUMBERS[:, None], NUMBERS),
    "a column of tensors": (torch.from_numpy(NUMBERS)[:, None], NUMBERS),
    "true and false": ((NUMBERS > 0).tolist(), NUMBERS > 0),
    "objects": (of_objects(NUMBERS.tolist()), NUMBERS),
}
WHERE_NEEDED = {
    "text": (TEXT, BY_NAME),
    "an array of text": (np.array(TEXT), BY_NAME),
    "objects of text": (of_objects(TEXT), BY_NAME),
    "a column of text": (np.array(TEXT)[:, None], BY_NAME),
    "whole floats": (NUMBERS.astype(float), NUMBERS),
}
NEVER = {
    "floats": NUMBERS + 0.5,
    "no numbers": np.where(NUMBERS > 0, np.nan, 1.0),
    "mixed objects": of_objects([*TEXT[:59], 1]),
    "missing objects": of_objects([*TEXT[:59], None]),
    "several": np.zeros((60, 2), dtype=int),
    "too few": NUMBERS[:59],
}


@pytest.mark.parametrize("kind", [*ALWAYS, *WHERE_NEEDED, *NEVER])
def test_classes_are_found_in_many_forms(kind: str) -> None:
    values, wanted = {**ALWAYS, **WHERE_NEEDED, **{name: (values, None) for name, values in NEVER.items()}}[kind]
    source = Source(Labelled(values))
    data = Federated(source, num_clients=3, partition=IID())
    data.setup("fit")
    found = data.train.labels
    assert (found is None) == (kind not in ALWAYS)
    assert found is None or found.tolist() == wanted.astype(int).tolist()
    divided = Federated(source, num_clients=3, partition=Shards(2))
    if wanted is None:
        with pytest.raises(UserError, match="needs the class of each sample, but the data have none"):
            divided.setup("fit")
        return
    divided.setup("fit")
    assert divided.train.labels is not None
    assert divided.train.labels.tolist() == wanted.astype(int).tolist()
    assert divided.num_classes == wanted.max() + 1
    assert divided.label_histograms is not None
    assert divided.label_histograms.sum(0).tolist() == np.bincount(wanted).tolist()


def test_servers_classes_need_classes_too() -> None:
    data = Federated(Source(Labelled(TEXT)), num_clients=3, server_fraction=0.2, server_classes=1)
    data.setup("fit")
    assert data.server_histogram is not None
    assert (data.server_histogram > 0).sum() == 1


def test_text_is_numbered_once_for_all_parts() -> None:
    one, other = Labelled(["b", "c", "b"], 3), Labelled(["a", "c"], 2)
    joined = ConcatDataset([Subset(one, [2, 1]), other])
    assert dataset_labels(joined) is None
    found = named_labels(joined)
    assert found is not None
    assert (found[0].tolist(), found[1]) == ([1, 2, 0, 2], ["a", "b", "c"])
    assert named_labels(ConcatDataset([one, Labelled([0, 1], 2)])) is None


@pytest.mark.parametrize(
    "values", [TEXT, np.array(TEXT), of_objects(TEXT), "labels"], ids=["list", "array", "objects", "name"]
)
def test_given_classes_may_be_text(values: Any) -> None:
    data = Federated(Source(Labelled(TEXT)), num_clients=3, class_of=values)
    data.setup("fit")
    assert data.train.labels is not None
    assert data.train.labels.tolist() == BY_NAME.tolist()
    assert data.train.class_names == sorted(NAMES)


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]).squeeze(1), batch[1].float())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-9)


def test_methods_that_train_on_classes_refuse_text(make_trainer: MakeTrainer) -> None:
    data = Federated(Source(Labelled(TEXT)), num_clients=3, class_of=TEXT, server_fraction=0.5)
    with pytest.raises(UserError, match="theirs are text, which only the data set numbers: give Federated class_of"):
        make_trainer(max_rounds=1, clients_per_round=2).fit(Wide(), data, FedKT())


class Wide(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)


X = torch.randn(80, 3, generator=torch.Generator().manual_seed(0))
QUANTITIES = {
    "degrees": torch.arange(80) % 40 - 10,
    "unlabelled": torch.where(torch.arange(80) % 4 == 0, -1, torch.arange(80) % 3),
    "ignored": torch.where(torch.arange(80) % 4 == 0, -100, torch.arange(80) % 3),
    "prices": 4_955 - 13 * torch.arange(80),
    "large": torch.arange(80) % 3 * 10_000,
}


@pytest.mark.parametrize("kind", QUANTITIES)
def test_whole_quantities_are_trained_on(
    kind: str, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    y = QUANTITIES[kind]
    for data in (
        Federated(Source(TensorDataset(X, y)), num_clients=4),
        Arrays(train=(X, y), test=(X[:20], y[:20]), num_clients=4),
    ):
        caplog.clear()
        with caplog.at_level("INFO"):
            make_trainer(max_rounds=1, clients_per_round=2).fit(Regression(), data)
        assert data.num_classes is data.label_histograms is data.server_histogram is None
        assert not data.has_classes
        assert f"from {y.min():,} to {y.max():,}, so they are taken for quantities; give" in caplog.text


@pytest.mark.parametrize("kind", QUANTITIES)
@pytest.mark.parametrize(
    ("options", "asking"),
    [({"partition": Dirichlet()}, "Dirichlet"), ({"server_fraction": 0.1, "server_classes": 2}, "server_classes=2")],
    ids=["partition", "server"],
)
def test_quantities_are_refused_where_classes_are_needed(kind: str, options: dict[str, Any], asking: str) -> None:
    y = QUANTITIES[kind]
    found = rf"{asking}.* needs the class of each sample, but the targets of .* so they are quantities; give"
    with pytest.raises(UserError, match=f"{found} Federated class_of or num_classes if they are classes"):
        Federated(Source(TensorDataset(X, y)), num_clients=4, **options).setup("fit")
    with pytest.raises(UserError, match=f"{found} num_classes if they are classes"):
        Arrays(train=(X, y), test=(X, y), num_clients=4, **options).setup()


@pytest.mark.parametrize("y", [torch.arange(80) % 80, torch.arange(80) % 40 + 30, torch.arange(80) % 7])
def test_fewer_numbers_than_samples_are_classes(y: Tensor) -> None:
    data = Federated(Source(TensorDataset(X, y)), num_clients=4)
    data.setup("fit")
    assert data.num_classes == y.max() + 1
    assert data.has_classes


def test_a_negative_label_is_none_of_a_classifiers_classes(make_trainer: MakeTrainer) -> None:
    x, y = torch.rand(80, 3, 32, 32), QUANTITIES["unlabelled"]
    module = ImageClassifier(network="lenet5", num_classes=3)
    for data in (
        Federated(Source(TensorDataset(x, y)), num_clients=4),
        Arrays(train=(x, y), test=(x, y), num_clients=4),
    ):
        with pytest.raises(UserError, match="20 of 80 labels of the training samples are none of the 3 classes"):
            make_trainer(max_rounds=1, clients_per_round=2).fit(module, data)
