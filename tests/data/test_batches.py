"""Test batches: what training_step and the other steps see of any data set is what the stock Trainer passes to them."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

from lightning_fl.algorithms import APFL, Algorithm, DeviceM, FedAvg, FedDU, PFedMe
from lightning_fl.data import Arrays, Federated


class Pair(NamedTuple):
    first: Any
    others: Any


class Named(Dataset):
    """Samples of several kinds: tensors, numbers, text, a mapping and a named tuple."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        return {"pair": Pair(sample[0], sample), "text": f"sample {index}", "number": index, "half": index / 2}


class Doubled(Subset):
    """Subset that changes the samples, as subsets with a transform do."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * part for part in super().__getitem__(index))

    def __getitems__(self, indices: list[int]) -> list:
        return [self[index] for index in indices]


def text_and_tuple(samples: list) -> Any:
    return [str(len(sample)) for sample in samples], tuple(default_collate(samples))


COLLATES: list[Callable[[list], Any] | None] = [
    None,
    default_collate,
    tuple,
    text_and_tuple,
    lambda samples: {"x": torch.stack([sample[0] for sample in samples])},
    lambda samples: Pair(default_collate(samples)[0], default_collate(samples)),
    lambda samples: default_collate(samples)[0],
]
WRAPPERS: list[Callable[[Dataset], Dataset]] = [
    lambda dataset: dataset,
    lambda dataset: Subset(dataset, range(len(dataset) - 1, -1, -1)),  # type: ignore[arg-type]
    lambda dataset: Doubled(dataset, range(len(dataset))),  # type: ignore[arg-type]
    lambda dataset: ConcatDataset([dataset, dataset]),
]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.complex64]


def tensors(num_samples: int, *dtypes: torch.dtype) -> TensorDataset:
    """Return a data set of one tensor for each type, whose values tell the samples apart."""
    values = torch.arange(1, num_samples + 1)
    return TensorDataset(*((values + 10 * n).to(dtype).view(-1, *[1] * n) for n, dtype in enumerate(dtypes)))


def structure(batch: Any) -> Any:
    """Return the types, lengths and shapes of a batch at every level."""
    if isinstance(batch, Tensor):
        return type(batch), batch.dtype, tuple(batch.shape)
    if isinstance(batch, (tuple, list)):
        return type(batch), [structure(part) for part in batch]
    if isinstance(batch, dict):
        return type(batch), [(name, structure(part)) for name, part in batch.items()]
    return type(batch)


def samples_in(batch: Any) -> list[Any]:
    """Return the values of each sample of a batch, in some order."""
    if isinstance(batch, Tensor):
        return batch.tolist() if batch.dim() else [batch.item()]
    if isinstance(batch, dict):
        batch = tuple(batch.values())
    if isinstance(batch, list) and all(isinstance(part, str) for part in batch):
        return batch
    if isinstance(batch, (tuple, list)):
        parts = [samples_in(part) for part in batch]
        return [*zip(*parts, strict=True)] if len({len(part) for part in parts}) == 1 else [repr(parts)]
    return [batch]


def seen(batches: Any) -> tuple[Counter, Counter]:
    """Return how often each structure of a batch and each sample occurs in batches."""
    batches = list(batches)
    values = Counter(repr(value) for batch in batches for value in samples_in(batch))
    return Counter(repr(structure(batch)) for batch in batches), values


class Loaders(L.LightningDataModule):
    """Data module of one data set."""

    def __init__(self, dataset: Dataset, batch_size: int, collate: Callable[[list], Any] | None) -> None:
        super().__init__()
        self.dataset, self.options = dataset, {"batch_size": batch_size, "collate_fn": collate}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, shuffle=True, **self.options)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, **self.options)

    test_dataloader = predict_dataloader = val_dataloader


@pytest.mark.long
@settings(max_examples=60)
@given(
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    num_samples=st.integers(1, 9),
    batch_size=st.integers(1, 4),
    wrap=st.sampled_from(WRAPPERS),
    named=st.booleans(),
    collate=st.sampled_from(COLLATES),
)
def test_a_client_reads_the_batches_of_the_loader(dtypes, num_samples, batch_size, wrap, named, collate) -> None:
    dataset = wrap(tensors(num_samples, *dtypes))
    if named:
        dataset, collate = Named(dataset), None
    data = Federated(Loaders(dataset, batch_size, collate), num_clients=1)
    data.setup("fit")
    # Custom functions may put all samples of a batch into one value, so the samples must be in one order.
    order = torch.arange(len(dataset))  # type: ignore[arg-type]
    expected = seen(DataLoader(dataset, batch_size, collate_fn=collate))
    assert seen(data.train.select(order.numpy()).batches(batch_size)) == expected
    assert seen(data.train.batches(batch_size)) == expected
    assert seen(data.train.batches(batch_size, order.numpy())) == expected
    shuffled = seen(data.client(0).batches(batch_size, torch.Generator().manual_seed(0)))
    assert shuffled[0] == expected[0]
    if collate in (None, default_collate):
        assert shuffled[1] == expected[1]
    (whole,) = DataLoader(dataset, len(dataset), collate_fn=collate)  # type: ignore[arg-type]
    assert structure(data.train_dataloader().draw(len(dataset), np.random.default_rng(0))) == structure(whole)  # type: ignore[arg-type]


class Recorder(L.LightningModule):
    """Module that records the batches of its steps; its weight ends at minus the sum of all numbers trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.trains = False
        self.batches: dict[str, list[Any]] = {"train": [], "val": [], "test": [], "predict": []}

    def on_train_start(self) -> None:
        self.trains = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trains:  # not before, when operations are counted and the runner is chosen
            self.batches["train"].append(batch)
        return self.weight * total(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.batches["val"].append(batch)
        self.log("val/accuracy", 0.5, batch_size=1)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.batches["test"].append(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.batches["predict"].append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def total(batch: Any) -> Any:
    """Return the sum of all numbers in tensors of a batch."""
    if isinstance(batch, Tensor):
        return batch.real.float().sum()
    parts = batch.values() if isinstance(batch, dict) else batch
    return sum(total(part) for part in parts) if isinstance(batch, (tuple, list, dict)) else 0.0


CASES = {
    "one tensor": (tensors(7, torch.float32), None),
    "two tensors": (tensors(7, torch.float32, torch.int64), None),
    "three tensors": (tensors(7, torch.float32, torch.int64, torch.float64), None),
    "bytes": (tensors(7, torch.uint8), None),
    "a mapping": (tensors(7, torch.float32, torch.float32), COLLATES[4]),
    "a named tuple": (tensors(7, torch.float32, torch.float32), COLLATES[5]),
    "a lone tensor": (tensors(7, torch.float32), COLLATES[6]),
    "text and numbers": (Named(tensors(7, torch.float32)), None),
}


@pytest.mark.parametrize("name", CASES)
def test_all_steps_see_the_batches_of_the_stock_trainer(name, make_trainer, make_stock_trainer) -> None:
    dataset, collate = CASES[name]
    stock = make_stock_trainer(max_epochs=1)
    expected, found = Recorder(), Recorder()
    stock.fit(expected, Loaders(dataset, 3, collate))
    stock.test(expected, Loaders(dataset, 3, collate), verbose=False)
    stock.predict(expected, Loaders(dataset, 3, collate))
    trainer = make_trainer(max_rounds=1, clients_per_round=1, runner="serial")
    data = Federated(Loaders(dataset, 3, collate), num_clients=1)
    trainer.fit(found, data)
    trainer.test(found, data)
    trainer.predict(found, data)
    for stage, batches in expected.batches.items():
        assert seen(found.batches[stage]) == seen(batches), stage
    assert found.weight.item() == expected.weight.item() != 0
    if name == "text and numbers":
        return  # text differs from batch to batch, but is one value for a stack
    stacked = Recorder()
    make_trainer(max_rounds=1, clients_per_round=1, runner="stacked").fit(stacked, data)
    assert {repr(_types(batch)) for batch in stacked.batches["train"]} == {
        repr(_types(batch)) for batch in expected.batches["train"]
    }
    assert stacked.weight.item() == expected.weight.item()


def _types(batch: Any) -> Any:
    """Return the types and lengths of a batch, in which a mapped tensor has its own shape."""
    if isinstance(batch, (tuple, list)):
        return type(batch), [_types(part) for part in batch]
    if isinstance(batch, dict):
        return type(batch), [(name, _types(part)) for name, part in batch.items()]
    return type(batch)


@pytest.mark.parametrize("form", ["x", "(x,)", "(x, y)"])
def test_arrays_give_one_form_of_batch_everywhere(form: str, make_trainer: Callable[..., Any]) -> None:
    x, y = torch.randn(12, 2), torch.arange(12) % 2
    part = {"x": x, "(x,)": (x,), "(x, y)": (x, y)}[form]
    module = Recorder()
    trainer = make_trainer(max_rounds=1, clients_per_round=1)
    data = Arrays(train=part, test=part, num_clients=2, batch_size=3, val_fraction=0.3)
    trainer.fit(module, data)
    trainer.test(module, data)
    trainer.predict(module, data)
    held_out = Arrays(train=part, test=part, num_clients=2, client_fraction=0.5, server_fraction=0.5)
    held_out.setup()
    server = held_out.server_data()
    assert server is not None
    source = held_out.sources()[0].batch(2, np.random.default_rng(0))
    every = [*module.batches.values(), list(held_out.train_dataloader()), list(server.batches(3)), [source]]
    for batches in every:
        assert batches
        for batch in batches:
            assert type(batch) is (Tensor if form == "x" else list)
            assert isinstance(batch, Tensor) or len(batch) == len(part)


def test_both_parts_of_arrays_have_one_form() -> None:
    x = torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"train and test must have the same form: \(x, y\), \(x,\) or x alone"):
        Arrays(train=x, test=(x,), num_clients=2).setup()


def test_the_server_steps_on_batches_of_the_same_form(make_trainer: Callable[..., Any]) -> None:
    """Test that FedDU's steps on the server, and its measurement of the accuracy, read what clients read."""
    x, y = torch.randn(24, 2), torch.arange(24) % 2
    module = Recorder()
    data = Arrays(train=(x, y), test=(x, y), num_clients=2, batch_size=3, client_fraction=0.5, server_fraction=0.5)
    make_trainer(max_rounds=2, clients_per_round=2).fit(module, data, algorithm=FedDU())
    assert {type(batch) for stage in ("train", "val") for batch in module.batches[stage]} == {list}
    assert {len(batch) for stage in ("train", "val") for batch in module.batches[stage]} == {2}


class Changing(L.LightningModule):
    """Regression that changes its batches in place, as augmentation and normalisation do, unless told not to."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)
        self.changes = changes

    def read(self, batch: Any) -> Tensor:
        if self.changes:
            batch[0] = batch[0] * 0.5
            batch[0] += 1
            batch[1].mul_(0.5).sub_(0.25)
            x, y = batch
        else:
            x, y = batch[0] * 0.5 + 1, batch[1] * 0.5 - 0.25
        return (self.layer(x)[:, 0] - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.read(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.read(batch), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


CHANGED = [FedAvg(), PFedMe(), APFL(), DeviceM(variant="mime"), DeviceM(variant="mime_lite")]
"""Algorithms whose clients read each batch once, several times at once, and a whole pass before the first step."""


@pytest.mark.parametrize("algorithm", CHANGED, ids=["once", "repeated", "beside", "again", "whole pass"])
def test_a_module_may_change_its_batches(algorithm: Algorithm, make_trainer: Callable[..., Any]) -> None:
    x, y = torch.randn(12, 2), torch.randn(12)
    answers = []
    for changes in (False, True):
        data = Arrays(train=(x.clone(), y.clone()), test=(x.clone(), y.clone()), num_clients=2, batch_size=3)
        module, trainer = Changing(changes), make_trainer(max_rounds=2, clients_per_round=2, runner="serial")
        trainer.fit(module, data, algorithm=algorithm)
        assert torch.equal(data.test._stored[0], x)
        answers.append([*module.parameters(), trainer.callback_metrics["val/loss"]])
    torch.testing.assert_close(answers[1], answers[0])
