"""Test classes that the user names: in an array, by a function, or by a name."""

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, RandomSampler, Subset, TensorDataset
from toys import Perceptron

from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import FedDU
from lightning_fl.data import Federated, Shards
from lightning_fl.errors import UserError

CLASSES = [0, 2, 1, 1, 0, 2, 2, 0]


class Graph(NamedTuple):
    """Sample like those of torch_geometric: its class is a tensor of one element."""

    x: Tensor
    y: Tensor


class Graphs(Dataset):
    def __len__(self) -> int:
        return len(CLASSES)

    def __getitem__(self, i: int) -> Any:
        return Graph(torch.rand(2), torch.tensor([CLASSES[i]]))


class Entries(Graphs):
    def __getitem__(self, i: int) -> Any:
        return {"x": torch.zeros(2), "y": np.int64(CLASSES[i])}


class Table(Graphs):
    """Data set that keeps a column of classes, and reads many rows at once."""

    y = torch.tensor(CLASSES).unsqueeze(1)

    def __getitem__(self, i: Any) -> Any:
        return torch.zeros(1 if isinstance(i, int) else len(i), 2)


class Renumbered(Subset):
    """Some samples of a data set under other classes, which it names itself."""

    y = (5, 4, 5)


class Source:
    def __init__(self, dataset: Any, in_batches: bool = False) -> None:
        self.dataset, self.in_batches = dataset, in_batches

    def train_dataloader(self) -> DataLoader:
        if self.in_batches:
            return DataLoader(
                self.dataset, batch_size=None, sampler=BatchSampler(RandomSampler(self.dataset), 2, False)
            )
        return DataLoader(self.dataset, batch_size=2, collate_fn=list)


def divided(source: Any, class_of: Any, **options: Any) -> Federated:
    data = Federated(source, num_clients=2, partition=Shards(1), class_of=class_of, **options)
    data.setup()
    return data


@pytest.mark.parametrize(
    ("source", "class_of", "expected"),
    [
        (Source(Graphs()), "y", CLASSES),
        (Source(Graphs()), lambda graph: graph.y, CLASSES),
        (Source(Graphs()), lambda graph: int(graph.y) % 2, [c % 2 for c in CLASSES]),
        (Source(Graphs()), CLASSES, CLASSES),
        (Source(Graphs()), torch.tensor(CLASSES), CLASSES),
        (Source([Graph(torch.zeros(2), torch.tensor(c)) for c in CLASSES]), "y", CLASSES),
        (Source(Entries()), "y", CLASSES),
        (Source(Table()), "y", CLASSES),
        (Source(Table(), in_batches=True), "y", CLASSES),
        (Source(Subset(Table(), [3, 0, 5, 1])), "y", [1, 0, 2, 2]),
        (Source(Subset(Graphs(), [3, 0, 5, 1])), "y", [1, 0, 2, 2]),
        (Source(Renumbered(Table(), [3, 0, 5])), "y", [5, 4, 5]),
        (Source(ConcatDataset([Table(), Subset(Table(), [1, 2])])), "y", [*CLASSES, 2, 1]),
    ],
)
def test_classes_wherever_they_are(source: Any, class_of: Any, expected: list[int]) -> None:
    before = torch.get_rng_state()
    data = divided(source, class_of)
    assert torch.equal(torch.get_rng_state(), before), "samples that draw random numbers change no others"
    assert data.train.labels is not None
    assert data.train.labels.tolist() == expected
    assert data.num_classes == max(expected) + 1
    assert data.label_histograms is not None
    assert data.label_histograms.sum() == len(expected)


def test_given_classes_go_before_those_of_the_data_set() -> None:
    class Labelled(Graphs):
        labels = CLASSES

    assert divided(Source(Labelled()), None).train.labels.tolist() == CLASSES  # type: ignore[union-attr]
    given = [1 - c % 2 for c in CLASSES]
    assert divided(Source(Labelled()), given).train.labels.tolist() == given  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("source", "class_of", "sentence"),
    [
        (Source(Graphs()), None, "data have none .*: give Federated class_of, a function"),
        (Source(Graphs()), "z", r"class_of='z' is neither an attribute of the data set nor of its samples \(Graph\)"),
        (Source(Entries()), "z", "class_of='z' is no key of the samples; allowed: x, y"),
        (Source(Graphs()), lambda graph: graph["y"], r"finds no class in sample 0, a Graph: TypeError"),
        (Source(Graphs()), lambda graph: 0.5, "must give whole numbers or text, but sample 0 has 0.5"),
        (Source(Graphs()), lambda graph: None, "must give whole numbers or text, but the classes are object"),
        (Source(Graphs()), lambda graph: graph.x, "finds no class in sample 0, a Graph: RuntimeError: a Tensor with 2"),
        (Source(Graphs()), [0, 1], r"must give one class per sample, \(8,\), but gives an array of shape \(2,\)"),
        (Source(Graphs()), 3, "must give one class per sample"),
        (Source(Graphs()), lambda graph: -1, "The labels go from -1 to -1"),
        (
            Source(Graphs()),
            [10**11] * 8,
            "numbers up to 100,000,000,000, but classes are numbered from 0: give them as text",
        ),
    ],
)
def test_what_names_no_class_is_said(source: Any, class_of: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        divided(source, class_of)
    assert "\n" not in str(caught.value)


class OfGraphs(Perceptron):
    """Classifier of graphs, whose classes FedDU weighs."""

    def loss(self, batch: Any) -> Tensor:
        x = torch.stack([torch.cat([graph.x, graph.x[:1]]) for graph in batch])
        return torch.nn.functional.cross_entropy(self(x), torch.cat([graph.y for graph in batch]) % 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/accuracy", 1 / (1 + self.loss(batch)), batch_size=len(batch))


def test_feddu_trains_on_graphs(make_trainer: Callable[..., FederatedTrainer]) -> None:
    class Both(L.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(Graphs(), batch_size=2, collate_fn=list)

        val_dataloader = train_dataloader

    def data(class_of: Any) -> Federated:
        return Federated(Both(), num_clients=2, class_of=class_of, client_fraction=0.5, server_fraction=0.5)

    trainer = make_trainer(max_rounds=2, clients_per_round=2)
    with pytest.raises(UserError, match=r"weighs the server's data by their labels, but .*: give Federated class_of"):
        trainer.fit(OfGraphs(), data(None), FedDU())
    trainer.fit(OfGraphs(), data("y"), FedDU())
    assert "feddu/tau_eff" in trainer.callback_metrics


@pytest.mark.parametrize(("largest", "taken"), [(9_999, True), (10_000, False), (10**8, False)])
def test_whole_numbers_too_large_for_classes_are_quantities(
    largest: int, taken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    y = torch.arange(20) % 5
    y[3] = largest
    source = Source(TensorDataset(torch.zeros(20, 3), y))
    data = Federated(source, num_clients=2)
    with caplog.at_level("INFO"):
        data.setup("fit")
    assert (data.train.labels is not None) == taken
    assert data.num_classes == (largest + 1 if taken else None)
    assert ("taken for quantities" in caplog.text) != taken
    named = Federated(source, num_clients=2, num_classes=largest + 1) if largest < 10**5 else None
    if named is not None:
        named.setup("fit")
        assert named.train.labels is not None
