"""Test that held-out samples and the server's are evaluated without the transforms and the collate function of training."""

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate, random_split

from lightning_fl.algorithms import FedDU
from lightning_fl.callbacks import AdaptivePruning, ClientEvaluation
from lightning_fl.data import ByGroup, Federated, Noise
from lightning_fl.errors import UserError

X = torch.randn(120, 3, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1)


def turned(x: Tensor) -> Tensor:
    """Return the input of another class: a model that reads it is always wrong."""
    return x.roll(1)


def clean(x: Tensor) -> Tensor:
    return x


class Rows(Dataset):
    """Data set with a transform, as torchvision's have it."""

    def __init__(self, transform: Callable[[Tensor], Tensor] | None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return (X[index] if self.transform is None else self.transform(X[index])), Y[index]


class OtherRows(Rows):
    pass


class Wrapper(Dataset):
    """Data set around another, with a transform of its own."""

    def __init__(self, rows: Dataset, transform: Callable[[Tensor], Tensor]) -> None:
        self.rows, self.transform = rows, transform

    def __len__(self) -> int:
        return len(self.rows)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.rows[index]
        return self.transform(x), y


class Turning(Dataset):
    """Data set that changes its samples without an attribute `transform`."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return turned(X[index]), Y[index]


def mixed(samples: list) -> Any:
    """Return inputs and soft labels that are mixed, as MixUp's are."""
    x, y = default_collate(samples)
    soft = nn.functional.one_hot(y, 3).float()
    return x.roll(1, 1), 0.5 * soft + 0.5 * soft.roll(1, 0)


def in_pairs(samples: list) -> Any:
    """Return inputs, and their classes, of a data set without classes."""
    x = default_collate(samples)
    return x, x.argmax(1)


class Loaders(L.LightningDataModule):
    def __init__(self, train: Dataset, collate: Any = None, **others: DataLoader) -> None:
        super().__init__()
        self.train_set, self.collate = train, collate
        for stage, loader in others.items():
            setattr(self, f"{stage}_dataloader", lambda loader=loader: loader)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, batch_size=10, shuffle=True, collate_fn=self.collate)


class Perfect(L.LightningModule):
    """Model whose class is the largest input: its accuracy is 1 on samples as they are, whatever it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def loader(dataset: Dataset, collate: Any = None) -> DataLoader:
    return DataLoader(dataset, batch_size=7, collate_fn=collate)


def inputs_of(source: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the inputs of all training and of all held-out samples, in the order of the held-out data set."""
    data = Federated(source, num_clients=3, val_fraction=0.25, **options)
    data.setup("fit")
    trained = torch.cat([batch[0] for k in range(3) for batch in data.client(k).batches(40, torch.Generator())])
    return trained, torch.cat([batch[0] for batch in data.val_dataloader()])


def are_rows(inputs: Tensor, change: Callable[[Tensor], Tensor] = clean) -> bool:
    """True if each input is a changed row of the data."""
    changed = torch.stack([change(x) for x in X])
    return bool((inputs[:, None] == changed).all(2).any(1).all())


SHOWN = {
    "the same class": (Rows(turned), Rows(clean)),
    "no transform": (Rows(turned), Rows(None)),
    "parts": (Subset(Rows(turned), range(90)), Subset(Rows(clean), range(90, 120))),
    "part of a part": (Subset(Subset(Rows(turned), range(90)), range(60)), Rows(clean)),
    "joined": (ConcatDataset([Rows(turned), Rows(turned)]), Rows(clean)),
    "both joined": (ConcatDataset([Rows(turned), Rows(clean)]), ConcatDataset([Rows(clean), Rows(clean)])),
    "a wrapper": (Wrapper(Rows(clean), turned), Wrapper(Subset(Rows(clean), range(9)), clean)),
    "inside a wrapper": (Wrapper(Rows(turned), clean), Wrapper(Subset(Rows(None), range(9)), clean)),
    "among others": (Rows(turned), ConcatDataset([OtherRows(turned), Rows(clean)])),
}


@pytest.mark.parametrize("case", SHOWN)
@pytest.mark.parametrize("stage", ["val", "test"])
def test_held_out_samples_have_the_transforms_of_validation(
    case: str, stage: str, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    train, shown = SHOWN[case]
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trained, held_out = inputs_of(Loaders(train, **{stage: loader(shown)}))
    assert len(held_out) == 3 * round(len(train) / 12)  # type: ignore[arg-type]
    assert are_rows(held_out)
    assert not are_rows(trained)
    assert "held-out samples" not in caplog.text + "".join(str(one.message) for one in recwarn)


@pytest.mark.parametrize("rows", [X.numpy(), list(X), tuple(X)])
def test_a_data_set_without_attributes_is_read_as_in_training(rows: Any) -> None:
    """In validation other samples of the same kind are read."""
    _, held_out = inputs_of(Loaders(rows, in_pairs, val=loader(rows[:9], in_pairs)))
    assert are_rows(held_out)


def test_sources_read_samples_as_evaluation_does_and_draw_by_their_own_seed() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.randn(3)

    def batches(source: Any, seed: int, asks: bool = False) -> list[Tensor]:
        data = Federated(source, num_clients=3, val_fraction=0 if asks else 0.25)
        data.trainer = SimpleNamespace(callbacks=[AdaptivePruning()] if asks else [])
        data.setup("fit")
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        drawn = [source.batch(5, np.random.default_rng(0))[0] for source in data.sources()]
        assert torch.equal(torch.get_rng_state(), before)
        return drawn

    for asks in (False, True):
        assert are_rows(torch.cat(batches(Loaders(Rows(noisy), val=loader(Rows(clean))), 0, asks)))
    unknown = Loaders(Rows(noisy))
    assert all(map(torch.equal, batches(unknown, 0), batches(unknown, 1)))


def test_the_transforms_of_training_stay_where_validation_has_them_too(recwarn: pytest.WarningsRecorder) -> None:
    parts = random_split(Rows(turned), [90, 30], torch.Generator().manual_seed(0))
    trained, held_out = inputs_of(Loaders(parts[0], val=loader(parts[1])))
    assert are_rows(trained, turned)
    assert are_rows(held_out, turned)
    assert not [one for one in recwarn if "held-out samples" in str(one.message)]


def test_a_given_transform_and_collate_function_come_first() -> None:
    def negated(x: Tensor) -> Tensor:
        return -x

    source = Loaders(Subset(Rows(turned), range(100)), mixed, val=loader(Rows(clean)))
    trained, held_out = inputs_of(source, eval_transform=negated)
    assert are_rows(held_out, negated)
    assert not are_rows(trained)
    data = Federated(source, num_clients=3, val_fraction=0.25, eval_transform=negated, eval_collate_fn=list)
    data.setup("fit")
    first = next(iter(data.val_dataloader()))
    assert are_rows(torch.stack([x for x, _ in first]), negated)
    assert isinstance(source.train_set, Subset)
    assert source.train_set.dataset.transform is turned  # type: ignore[attr-defined]
    for train in (Wrapper(Turning(), turned), ConcatDataset([Rows(turned), Rows(turned)])):
        assert not are_rows(inputs_of(Loaders(train), eval_transform=negated)[1], turned)
    with pytest.raises(UserError, match=r"Turning has no attribute transform, in whose place it would be used: give"):
        inputs_of(Loaders(Turning()), eval_transform=negated)


def test_torchvisions_pair_of_transforms_is_replaced() -> None:
    from torchvision.datasets import FakeData

    def numbers(image: Any) -> Tensor:
        return torch.full((3,), 7.0)

    train, shown = FakeData(20, (3, 4, 4), transform=turned), FakeData(20, (3, 4, 4), transform=numbers)
    for source, given in ((Loaders(train, val=loader(shown)), None), (Loaders(train), numbers)):
        data = Federated(source, num_clients=2, val_fraction=0.5, eval_transform=given)
        data.setup("fit")
        assert {value for x, _ in data.val_dataloader() for value in x.flatten().tolist()} == {7.0}
        assert data.evaluated.dataset.transforms.transform is numbers  # type: ignore[attr-defined]


UNKNOWN = {
    "a transform": (Loaders(Rows(turned)), True, "through the transform of Rows: give eval_transform if"),
    "another class": (
        Loaders(Rows(turned), val=loader(OtherRows(clean))),
        True,
        "through the transform of Rows: give eval_transform if",
    ),
    "no attribute": (
        Loaders(Turning()),
        False,
        "through Turning.__getitem__: give eval_transform, for which the data set needs an attribute transform, if",
    ),
    "a collate function": (
        Loaders(TensorDataset(X, Y), mixed),
        True,
        "through the collate_fn mixed: give eval_collate_fn if",
    ),
    "both": (
        Loaders(Rows(turned), mixed),
        True,
        "and the collate_fn mixed: give eval_transform and eval_collate_fn if",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_unknown_is_said_once(
    case: str, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    source, warns, sentence = UNKNOWN[case]
    data = Federated(source, num_clients=3, val_fraction=0.25)
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        data.setup("fit")
        data.val_dataloader()
        data.val_dataloader()
    warnings = [str(one.message) for one in recwarn if "held-out samples" in str(one.message)]
    notices = [one for one in caplog.messages if "held-out samples" in one]
    assert (len(warnings), len(notices)) == ((1, 0) if warns else (0, 1))
    assert sentence in (warnings + notices)[0]


def test_nothing_is_said_of_tensors_or_without_held_out_samples(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        inputs_of(Loaders(TensorDataset(X, Y)))
        data = Federated(Loaders(Rows(turned), mixed), num_clients=3)
        data.setup("fit")
    assert "held-out" not in caplog.text + "".join(str(one.message) for one in recwarn)


def test_a_validation_loader_that_fails_shows_nothing() -> None:
    class Failing(Loaders):
        def val_dataloader(self) -> DataLoader:
            raise RuntimeError("no data for validation")

    with pytest.warns(UserWarning, match="through the transform of Rows: give eval_transform"):
        inputs_of(Failing(Rows(turned)))


@pytest.mark.parametrize("whole", ["one", "list", "mapping", "combined"])
def test_the_first_loader_of_the_same_class_is_taken(whole: str) -> None:
    loaders = [loader(OtherRows(turned)), loader(Rows(clean))]
    shown: Any = {
        "one": loaders[1],
        "list": loaders,
        "mapping": {"first": loaders[0], "second": loaders[1]},
        "combined": L.pytorch.utilities.CombinedLoader(loaders, "sequential"),
    }[whole]
    assert are_rows(inputs_of(Loaders(Rows(turned), val=shown))[1])


def test_batches_of_the_data_set_itself_are_evaluated_with_its_transforms() -> None:
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

    class Batches(Rows):
        def __getitem__(self, indices: Any) -> tuple[Tensor, Tensor]:
            assert self.transform is not None
            return torch.stack([self.transform(x) for x in X[indices]]), Y[indices]

    class Source(Loaders):
        def train_dataloader(self) -> DataLoader:
            sampler = BatchSampler(RandomSampler(self.train_set), 10, drop_last=False)  # type: ignore[arg-type]
            return DataLoader(self.train_set, batch_size=None, sampler=sampler)

    shown = Batches(clean)
    in_batches = DataLoader(shown, batch_size=None, sampler=BatchSampler(SequentialSampler(shown), 10, drop_last=False))
    trained, held_out = inputs_of(Source(Batches(turned), val=in_batches))
    assert are_rows(held_out)
    assert are_rows(trained, turned)


def test_a_collate_function_of_validation_alone_is_used() -> None:
    def doubled(samples: list) -> Any:
        x, y = default_collate(samples)
        return 2 * x, y

    train: Dataset
    for train in (TensorDataset(X, Y), Rows(None)):
        shown = copy.copy(train)
        trained, held_out = inputs_of(Loaders(train, val=loader(shown, doubled)))
        assert are_rows(held_out / 2)
        assert are_rows(trained)


@pytest.mark.parametrize("train", [TensorDataset(X, Y), Rows(None)], ids=["tensors", "a class"])
def test_a_collate_function_for_another_data_set_is_not_used(train: Dataset) -> None:
    def fails(samples: list) -> Any:
        raise AssertionError("read with the collate function of another data set")

    trained, held_out = inputs_of(Loaders(train, val=loader(Turning(), fails)))
    assert are_rows(held_out)
    assert are_rows(trained)


def test_a_shift_changes_held_out_samples_that_are_read_in_another_way() -> None:
    def noise(train: Callable[[Tensor], Tensor]) -> Tensor:
        _, held_out = inputs_of(Loaders(Rows(train), val=loader(Rows(clean))), shift=Noise(0.5))
        return held_out

    shifted = noise(turned)
    assert torch.equal(shifted, noise(clean))
    assert not are_rows(shifted)


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_a_perfect_model_is_perfect_on_held_out_samples(runner: str, make_trainer: MakeTrainer) -> None:
    source = Loaders(Rows(turned), mixed, val=loader(Rows(clean)))
    callback = ClientEvaluation(every_n_rounds=1)
    trainer = make_trainer(max_rounds=2, clients_per_round=3, runner=runner, callbacks=[callback])
    data = Federated(source, num_clients=3, val_fraction=0.25)
    trainer.fit(Perfect(), data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "accuracy" in name}
    assert metrics["val/accuracy"] == 1
    assert metrics["val/accuracy_clients_mean"] == 1
    assert trainer.validate(Perfect(), data)[0]["val/accuracy"] == 1


def test_clients_own_models_are_measured_on_samples_as_they_are(make_trainer: MakeTrainer) -> None:
    from lightning_fl.algorithms import LocalOnly

    trainer = make_trainer(max_rounds=1, clients_per_round=3)
    source = Loaders(Rows(turned), mixed, val=loader(Rows(clean)))
    trainer.fit(Perfect(), Federated(source, num_clients=3, val_fraction=0.25), LocalOnly())
    measured = {name: float(value) for name, value in trainer.callback_metrics.items() if "accuracy" in name}
    assert measured
    assert set(measured.values()) == {1.0}


def test_the_accuracy_of_the_servers_samples_is_that_without_transforms(make_trainer: MakeTrainer) -> None:
    seen = []

    class Seeing(Perfect):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(are_rows(batch[0]))
            super().validation_step(batch, batch_idx)

    source = Loaders(Rows(turned), mixed, val=loader(Rows(clean)))
    data = Federated(source, num_clients=3, server_fraction=0.25, class_of=Y)
    make_trainer(max_rounds=1, clients_per_round=3).fit(Seeing(), data, FedDU())
    assert len(data.server_indices) == 24
    assert len(seen) > 120 // 7 + 1  # more batches than those of the validation loader
    assert all(seen)


def test_groups_and_pooled_clients_read_the_same_samples() -> None:
    groups = np.arange(120) % 4
    source = Loaders(Rows(turned), val=loader(Rows(clean)))
    data = Federated(source, num_clients=None, partition=ByGroup(), groups=groups, val_fraction=0.25)
    data.setup("fit")
    for held in (data, data.pooled()):
        assert are_rows(torch.cat([x for x, _ in held.val_dataloader()]))
