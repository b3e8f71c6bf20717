"""Test Federated: ordinary data modules, divided among clients."""

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from lightning_fl.data import ByGroup, DatasetSamples, Federated, Shards, TensorSamples
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
        return DataLoader(self.val_set, batch_size=5, collate_fn=self.options.get("collate_fn"))

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


class TrainingOnly(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(8, 32)), batch_size=2, collate_fn=first_input)


def first_input(rows: list) -> torch.Tensor:
    return rows[0][0]


class SetsHooksInSetup(TrainingOnly):
    """Data module whose test loader appears in `setup`."""

    def setup(self, stage: str | None = None) -> None:
        self.test_dataloader = self.train_dataloader  # type: ignore[method-assign]


class OwnValidation(Federated):
    def val_dataloader(self) -> Any:
        return self.datamodule.train_dataloader()


def hooks_of(data: L.LightningDataModule) -> list[str]:
    """Return the evaluations for which a data module has a loader, as Lightning finds them."""
    return [stage for stage in ("val", "test", "predict") if is_overridden(f"{stage}_dataloader", data)]


def test_hooks_the_source_lacks_are_missing(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    data = Federated(TrainingOnly(), num_clients=2)
    assert hooks_of(data) == []
    data.setup()
    for same in (data, pickle.loads(pickle.dumps(data)), copy.deepcopy(data)):
        assert hooks_of(same) == []
        with pytest.raises(MisconfigurationException, match="`test_dataloader` must be implemented"):
            same.test_dataloader()
    trainer = make_stock_trainer(fast_dev_run=True)
    trainer.fit(BoringModel(), data)
    assert trainer.global_step == 1


def test_hooks_that_have_a_loader_are_there() -> None:
    assert hooks_of(Federated(TrainingOnly(), num_clients=2, val_fraction=0.5)) == ["val"]
    assert hooks_of(OwnValidation(TrainingOnly(), num_clients=2)) == ["val"]
    data = Federated(SetsHooksInSetup(), num_clients=2)
    data.setup()
    assert hooks_of(data) == ["test", "predict"]  # predictions are of the test samples


class Images(Dataset):
    labels = np.array([0, 1] * 5)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 4, 4), float(i)), int(self.labels[i])


class Tensors(Dataset):
    """Dataset that reads many samples at once, given their indices in a list, as sparse matrices and tables are read."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, indices: list[int]) -> tuple[torch.Tensor, np.ndarray]:
        return torch.stack([Images()[i][0] for i in indices]), Images.labels[indices]


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
    assert hooks_of(data) == []


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (Loader(DataLoader(Stream())), "Stream cannot be divided over clients"),
        (Loader([DataLoader(Images())]), r"train_dataloader\(\) returns a list"),
        (
            Loader(DataLoader(Images(), batch_sampler=[[0, 1], [2]])),
            r"a batch sampler of its own \(list\).*use DataLoader",
        ),
        (Loader(DataLoader(Images(), batch_size=None)), r"does not batch its samples .*: set its batch_size"),
        (object(), "object cannot be divided over clients: it has no train_dataloader"),
    ],
)
def test_what_cannot_be_divided(source: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Federated(source, num_clients=2).setup()  # type: ignore[arg-type]


def test_a_stray_label_is_said_unless_the_number_of_classes_is_given() -> None:
    stray = TensorDataset(X, torch.where(torch.arange(60) == 17, 77, Y))
    loader = Loader(DataLoader(stray, batch_size=4))
    with pytest.warns(
        UserWarning, match="the largest label is 77, but only 4 different labels occur, so the model gets 78"
    ):
        Federated(loader, num_clients=2).setup()  # type: ignore[arg-type]
    with pytest.raises(UserError, match="The labels go from 0 to 77, but num_classes=3 allows 0 to 2"):
        Federated(loader, num_clients=2, num_classes=3).setup()  # type: ignore[arg-type]


def test_a_loader_that_changes_its_batches_is_named() -> None:
    class Halving(DataLoader):
        def __iter__(self) -> Iterator:
            return (batch / 2 for batch in super().__iter__())

    with pytest.warns(UserWarning, match="is a Halving with an __iter__ of its own, which clients do not use"):
        Federated(Loader(Halving(X, batch_size=4)), num_clients=2).setup()  # type: ignore[arg-type]


def own_samples(data: Federated) -> list[int]:
    """Return what the clients train with: each sample of `Images` is filled with its index."""
    return sorted(int(image.mean()) for k in range(data.num_clients) for image, _ in data.client(k).batches(1))


def read_in_batches(sampler: Iterable[int]) -> Federated:
    loader = DataLoader(Tensors(), batch_size=None, sampler=BatchSampler(sampler, 4, drop_last=False))
    return Federated(Loader(loader), num_clients=2)  # type: ignore[arg-type]


def test_a_dataset_reads_batches_at_once() -> None:
    data = read_in_batches(SubsetRandomSampler([7, 1, 2, 8, 9, 0]))
    data.setup()
    assert own_samples(data) == [0, 1, 2, 7, 8, 9]
    for k in range(2):
        ((images, classes),) = data.client(k).batches(data.batch_size, torch.Generator())
        assert images.shape == (3, 3, 4, 4)
        assert classes.tolist() == (images[:, 0, 0, 0] % 2).tolist(), "the loader converts arrays to tensors"
    with pytest.raises(UserError, match="has a WeightedRandomSampler, but"):
        read_in_batches(WeightedRandomSampler([0.1] * 10, 10)).setup()


@pytest.mark.parametrize("indices", [[7, 1, 2, 8], torch.tensor([7, 1, 2, 8])], ids=["list", "tensor"])
def test_only_the_samples_of_a_subset_sampler_are_divided(indices: list[int] | torch.Tensor) -> None:
    data = Federated(Loader(DataLoader(Images(), 2, sampler=SubsetRandomSampler(indices))), num_clients=2)  # type: ignore[arg-type]
    data.setup()
    assert own_samples(data) == [1, 2, 7, 8]
    assert data.label_histograms is not None
    assert data.label_histograms.sum(0).tolist() == [2, 2]


WRITERS = [k % 3 for k in range(10)]


@pytest.mark.parametrize(
    "groups", [lambda k: WRITERS[k], WRITERS, np.array(WRITERS)], ids=["function", "list", "array"]
)
def test_samples_of_a_sampler_are_named_as_in_the_whole_data_set(groups: Any) -> None:
    loader = DataLoader(Images(), 2, sampler=SubsetRandomSampler([7, 1, 2, 8, 9]))
    classes = [int(k > 5) for k in range(10)]
    data = Federated(Loader(loader), partition=ByGroup(), num_clients=None, groups=groups, class_of=classes)  # type: ignore[arg-type]
    data.setup()
    assert [[int(x.mean()) for x, _ in data.client(k).batches(1)] for k in range(3)] == [[9], [7, 1], [2, 8]]
    assert data.label_histograms is not None
    assert data.label_histograms.tolist() == [[0, 1], [1, 1], [1, 1]]


def test_validation_samples_do_not_leak_into_training() -> None:
    """Split one set of tensors by two samplers, as tutorials of PyTorch do."""

    class Split(L.LightningDataModule):
        def loader(self, *bounds: int) -> DataLoader:
            return DataLoader(TensorDataset(X, Y), batch_size=8, sampler=SubsetRandomSampler(range(*bounds)))

        def train_dataloader(self) -> DataLoader:
            return self.loader(0, 48)

        def val_dataloader(self) -> DataLoader:
            return self.loader(48, 60)

    data = Federated(Split(), num_clients=6)
    data.setup()
    trained = [int(x) for k in range(6) for batch, _ in data.client(k).batches(8) for x in batch]
    validated = [int(x) for batch, _ in data.val_dataloader() for x in batch]
    assert sorted(trained) == [*range(48)]
    assert sorted(validated) == [*range(48, 60)]


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Images(), batch_size=2),
        DataLoader(Images(), batch_size=2, shuffle=True),
        DataLoader(Images(), batch_sampler=BatchSampler(RandomSampler(Images()), 2, drop_last=False)),
        DataLoader(Tensors(), None, sampler=BatchSampler(RandomSampler(Tensors()), 2, drop_last=False)),
    ],
    ids=["in order", "shuffled", "in batches", "read in batches"],
)
def test_loaders_of_all_samples(loader: DataLoader) -> None:
    data = Federated(Loader(loader), num_clients=2)  # type: ignore[arg-type]
    data.setup()
    assert own_samples(data) == [*range(10)]
    assert data.batch_size == 2
    pooled = data.train_dataloader()
    assert (pooled.dataset.dataset, sorted(pooled.dataset.indices)) == (data.train.source, [*range(10)])
    assert pooled.num_workers == 0


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (WeightedRandomSampler([0.1] * 10, 10), "a WeightedRandomSampler, but"),
        (RandomSampler(Images(), replacement=True), "a RandomSampler that does not read each sample once, but"),
        (RandomSampler(Images(), num_samples=5), "a RandomSampler that does not read each sample once, but"),
        (SequentialSampler(range(5)), "a SequentialSampler that does not read each sample once, but"),
        (DistributedSampler(Images(), num_replicas=2, rank=0), "a DistributedSampler, but"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_samplers_that_clients_would_not_follow(sampler: object, words: str) -> None:
    for given in (1, None):
        source = Loader(DataLoader(Images(), batch_size=2, sampler=sampler))  # type: ignore[arg-type]
        with pytest.raises(
            UserError, match=f"Loader's training loader has {words}.*use shuffle=True, .*weights in the loss"
        ):
            Federated(source, num_clients=2, batch_size=given).setup()  # type: ignore[arg-type]


class Vocabulary(Tables):
    def __init__(self, size: int = 5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.vocab = {"a": 0}

    @property
    def broken(self) -> int:
        return self.no_such_thing

    def state_dict(self) -> dict[str, int]:
        return {"size": len(self.vocab)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.vocab = dict.fromkeys(map(str, range(state_dict["size"])), 0)


def test_attributes_of_the_data_module_are_found() -> None:
    own = Vocabulary()
    data = Federated(own, num_clients=6)
    assert data.vocab is own.vocab
    assert data.hparams.size == 5
    with pytest.raises(AttributeError, match="'Vocabulary' object has no attribute 'words', and neither has Federated"):
        _ = data.words
    with pytest.raises(AttributeError, match="has no attribute 'no_such_thing'"):
        _ = data.broken
    assert not hasattr(data, "train"), "the samples are there after setup"
    data.setup()
    assert data.num_clients == copy.copy(data).num_clients == pickle.loads(pickle.dumps(data)).num_clients == 6
    assert copy.deepcopy(data).vocab == own.vocab
    assert copy.deepcopy(data).vocab is not own.vocab


@pytest.mark.parametrize("own_classes", [7, 2])
def test_the_data_modules_own_numbers_count_unless_samples_know_better(own_classes: int) -> None:
    own = Vocabulary()
    own.num_classes, own.in_channels, own.image_size = own_classes, 1, 5
    data = Federated(own, num_clients=6)
    for _ in range(2):
        assert (data.in_channels, data.image_size) == (1, 5)
        assert Federated(own, num_clients=6, num_classes=9).num_classes == 9
        data.setup()
    assert data.num_classes == max(own_classes, int(Y.max()) + 1)


@pytest.mark.parametrize(("size", "shown"), [(4, 4), (8, None)])
def test_a_size_that_images_do_not_have_is_not_shown(size: int, shown: int | None) -> None:
    samples = DataLoader(TensorDataset(torch.randn(8, 1, 4, 4), torch.arange(8) % 4), batch_size=8)
    data = Federated(SimpleNamespace(train_dataloader=lambda: samples, image_size=size), num_clients=2)  # type: ignore[arg-type]
    data.setup()
    assert (data.in_channels, data.image_size) == (1, shown)


@pytest.mark.parametrize(
    ("others", "is_said"),
    [([], False), ([X[:, 0]], False), ([Y], True), ([X, Y], True)],
    ids=["two", "float", "whole", "both"],
)
def test_it_is_said_which_of_several_tensors_are_the_classes(
    others: list[torch.Tensor], is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = TensorDataset(X, Y + 1, *others)
    sentence = (
        f"The classes of the samples are the second of {2 + len(others)} tensors; "
        "if another has them, give Federated class_of."
    )
    with caplog.at_level("INFO", "lightning.pytorch"):
        Federated(Loader(DataLoader(tensors, batch_size=4)), num_clients=2).setup()  # type: ignore[arg-type]
        assert (sentence in caplog.messages) == is_said
        caplog.clear()
        Federated(Loader(DataLoader(tensors, batch_size=4)), num_clients=2, class_of=Y.numpy()).setup()  # type: ignore[arg-type]
        assert sentence not in caplog.messages


def test_a_description_draws_nothing_from_the_global_generator() -> None:
    class Noisy(Images):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.randn(3, 8, 8), index % 2

    data = Federated(Loader(DataLoader(Noisy(), batch_size=2)), num_clients=2)  # type: ignore[arg-type]
    data.setup()
    before = torch.get_rng_state()
    assert data.description()
    assert data.in_channels == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_the_state_of_the_data_module_is_kept() -> None:
    data, other = Federated(Vocabulary(), num_clients=6), Federated(Vocabulary(), num_clients=6)
    data.vocab["b"] = 1
    other.load_state_dict(data.state_dict())
    assert len(other.vocab) == 2
    assert Federated(Loader([]), num_clients=6).state_dict() == {}  # type: ignore[arg-type]
