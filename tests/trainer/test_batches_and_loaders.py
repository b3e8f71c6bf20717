"""Compare one client that holds all data with `L.Trainer`: a round is an epoch, whatever batches and loaders look like."""

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)
from toys import Perceptron, federation, samples

from lightning_fl import FederatedTrainer
from lightning_fl.data import Federated
from lightning_fl.errors import UserError

MakeStock = Callable[..., L.Trainer]
NUM_SAMPLES, BATCH_SIZE, ROUNDS = 13, 4, 2


class Numbers(Dataset):
    """Samples (x, y, name) with x = (i, cos i) / 13 and y = sin i."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, str]:
        number = torch.tensor(float(i))
        return torch.stack([number, number.cos()]) / NUM_SAMPLES, number.sin().reshape(1), f"sample {i}"


@dataclass
class Pair:
    x: Tensor
    y: Tensor


class Own:
    """Batch of a class that neither Lightning nor PyTorch can look into."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def xy(samples: list) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _, _ in samples]), torch.stack([y for _, y, _ in samples])


class Structure(NamedTuple):
    collate: Callable[[list], Any]
    unpack: Callable[[Any], tuple[Tensor, Tensor]]
    has_size: bool = True
    """True if Lightning infers the right number of samples."""


STRUCTURES = {
    "tensor": Structure(lambda s: torch.cat(xy(s), 1), lambda b: (b[:, :2], b[:, 2:])),
    "tuple": Structure(xy, lambda b: b),
    "dict": Structure(lambda s: dict(zip("xy", xy(s), strict=True)), lambda b: (b["x"], b["y"])),
    "nested": Structure(
        lambda s: {"in": [(xy(s)[0],)], "out": {"y": xy(s)[1]}, "weight": torch.ones(2)},
        lambda b: (b["in"][0][0], b["out"]["y"]),
        has_size=False,
    ),
    "ragged": Structure(
        lambda s: ([x.repeat(1 + i % 3, 1) for i, (x, _, _) in enumerate(s)], xy(s)[1]),
        lambda b: (torch.stack([x.mean(0) for x in b[0]]), b[1]),
        has_size=False,
    ),
    "dataclass": Structure(lambda s: Pair(*xy(s)), lambda b: (b.x, b.y)),
    "own class": Structure(lambda s: Own(*xy(s)), lambda b: (b.x, b.y), has_size=False),
    "strings": Structure(lambda s: (*xy(s), [name for _, _, name in s]), lambda b: b[:2], has_size=False),
}


class Line(L.LightningModule):
    """Linear regression that records the samples it trains with, and the arguments of its validation steps."""

    def __init__(self, structure: Structure) -> None:
        super().__init__()
        self.structure = structure
        self.layer = nn.Linear(2, 1)
        self.order: list[int] = []
        self.validated: list[Any] = []

    def loss(self, batch: Any) -> tuple[Tensor, list[int]]:
        x, y = self.structure.unpack(batch)
        return (self.layer(x) - y).square().mean(), (x[:, 0] * NUM_SAMPLES).round().int().tolist()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, indices = self.loss(batch)
        self.order += indices
        return loss

    def on_validation_batch_start(self, batch: Any, *place: int) -> None:
        self.validated.append(place)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        parts = self.parts(batch)
        losses = [self.loss(part) for part in parts]
        loss, size = torch.stack([loss for loss, _ in losses]).sum(), len(losses[0][1])
        self.validated.append((batch_idx, dataloader_idx, [indices for _, indices in losses]))
        inferred = self.structure.has_size and parts[0] is batch
        self.log("val/loss", loss, **({} if inferred else {"batch_size": size}))
        self.log("val/largest", loss, reduce_fx="max")

    def on_validation_epoch_end(self) -> None:
        self.log("val/constant", 3.0)

    def parts(self, batch: Any) -> list[Any]:
        """Return the batches of all loaders of a CombinedLoader, which are None after a loader's end."""
        if isinstance(batch, dict) and "a" in batch:
            batch = list(batch.values())
        return [part for part in batch if part is not None] if isinstance(batch, list) else [batch]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class InTurn(Sampler):
    """The given samples, as many in each epoch as there are."""

    def __init__(self, order: list[int]) -> None:
        self.order, self.begin = order, 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.begin += NUM_SAMPLES
        return iter(self.order[self.begin - NUM_SAMPLES : self.begin])


class Data(L.LightningDataModule):
    def __init__(self, structure: Structure, validation: Callable[[], Any], **options: Any) -> None:
        super().__init__()
        self.structure, self.validation, self.options = structure, validation, {"shuffle": True, **options}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Numbers(), batch_size=BATCH_SIZE, collate_fn=self.structure.collate, **self.options)

    def val_dataloader(self) -> Any:
        return self.validation()


def compare(
    make_trainer: MakeTrainer,
    make_stock_trainer: MakeStock,
    structure: Structure,
    validation: Callable[[], Any],
    kind: type[Data] = Data,
    **limits: Any,
) -> None:
    """Train both, the stock trainer with the federation's order of the samples, and compare weights, steps and values."""
    ours = Line(structure)
    stock = copy.deepcopy(ours)
    federated = make_trainer(max_rounds=ROUNDS, clients_per_round=1, num_sanity_val_steps=1, **limits)
    federated.fit(ours, Federated(kind(structure, validation), num_clients=1))
    assert sorted(ours.order) == sorted([*range(NUM_SAMPLES)] * ROUNDS)
    trainer = make_stock_trainer(max_epochs=ROUNDS, num_sanity_val_steps=1, **limits)
    trainer.fit(stock, kind(structure, validation, sampler=InTurn(ours.order), shuffle=None))
    assert stock.order == ours.order
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=1e-6)
    assert ours.validated == stock.validated
    names = {name for name in federated.callback_metrics if name.startswith("val/")}
    assert names == set(trainer.callback_metrics)
    for name in names:
        assert float(federated.callback_metrics[name]) == pytest.approx(float(trainer.callback_metrics[name]), abs=1e-6)
    ours.validated, stock.validated = [], []
    values = federated.validate(ours, Federated(kind(structure, validation), num_clients=1), verbose=False)
    expected = trainer.validate(stock, kind(structure, validation), verbose=False)
    assert ours.validated == stock.validated
    assert values == [pytest.approx(of_loader, abs=1e-6) for of_loader in expected]


@pytest.mark.parametrize("kind", STRUCTURES)
def test_any_structure_of_batches(kind: str, make_trainer: MakeTrainer, make_stock_trainer: MakeStock) -> None:
    structure = STRUCTURES[kind]
    compare(make_trainer, make_stock_trainer, structure, lambda: loader(10, structure))


class Table(Numbers):
    """Numbers that are read many at once."""

    def __getitem__(self, indices: list[int]) -> Any:
        return xy([Numbers()[i] for i in indices])


class ReadInBatches(Data):
    def train_dataloader(self) -> DataLoader:
        sampler = self.options.get("sampler") or RandomSampler(Table())
        return DataLoader(Table(), batch_size=None, sampler=BatchSampler(sampler, BATCH_SIZE, drop_last=False))


def test_a_dataset_that_reads_batches(make_trainer: MakeTrainer, make_stock_trainer: MakeStock) -> None:
    structure = STRUCTURES["tuple"]
    compare(make_trainer, make_stock_trainer, structure, lambda: loader(10, structure), kind=ReadInBatches)


def test_a_value_without_batch_size_of_a_batch_of_an_own_class(make_trainer: MakeTrainer) -> None:
    structure = STRUCTURES["own class"]._replace(has_size=True)
    module, data = Line(structure), Federated(Data(structure, lambda: loader(10, structure)), num_clients=1)
    with pytest.raises(MisconfigurationException, match="could not infer the batch_size from the batch") as raised:
        make_trainer(clients_per_round=1, num_sanity_val_steps=2).fit(module, data)
    assert raised.value.__notes__ == ["validation_step read batch 0: Own."]
    assert module.order == []


class Stream(IterableDataset):
    """Samples without a length."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        return map(Numbers().__getitem__, range(self.num_samples))


def loader(num_samples: int, structure: Structure = STRUCTURES["tuple"], **options: Any) -> DataLoader:
    return DataLoader(Numbers(num_samples), batch_size=BATCH_SIZE, collate_fn=structure.collate, **options)


def stream(num_samples: int) -> DataLoader:
    return DataLoader(Stream(num_samples), batch_size=BATCH_SIZE, collate_fn=xy)


LOADERS: dict[str, Callable[[], Any]] = {
    "none": list,
    "one": lambda: loader(10),
    "list": lambda: [loader(10), loader(3)],
    "dict": lambda: {"a": loader(10), "b": loader(3)},
    "nested": lambda: {"a": loader(10), "b": [loader(3), loader(5)]},
    "sequential": lambda: CombinedLoader({"a": loader(10), "b": loader(3)}, "sequential"),
    "min_size": lambda: CombinedLoader({"a": loader(10), "b": loader(6)}, "min_size"),
    "max_size": lambda: CombinedLoader([loader(10), loader(3)], "max_size"),
    "max_size_cycle": lambda: CombinedLoader({"a": loader(3), "b": loader(10)}, "max_size_cycle"),
    "stream": lambda: stream(10),
    "streams": lambda: [stream(10), loader(6), stream(3)],
    "streams together": lambda: CombinedLoader({"a": stream(10), "b": loader(20)}, "min_size"),
    "workers": lambda: loader(10, num_workers=2),
}


def test_loaders_that_a_limit_of_0_leaves_out_are_no_reason_to_warn(make_trainer: MakeTrainer) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Total length")
        make_trainer(max_rounds=1, limit_val_batches=0).fit(Perceptron(), federation(), verbose=False)


@pytest.mark.parametrize("limit", [1.0, 2])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.process if kind == "workers" else ()) for kind in LOADERS]
)
def test_any_validation_loaders(
    kind: str, limit: int | float, make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    compare(make_trainer, make_stock_trainer, STRUCTURES["tuple"], LOADERS[kind], limit_val_batches=limit)


@pytest.mark.parametrize(
    ("validation", "limit", "sentence"),
    [
        (LOADERS["stream"], 0.5, "Stream has no length, like any `IterableDataset`, so"),
        (LOADERS["one"], 0.2, "a limit of 0.2 of the 3 batches of Numbers is less than one"),
    ],
)
def test_limits_that_cannot_be_kept(
    validation: Callable[[], Any], limit: float, sentence: str, make_trainer: MakeTrainer
) -> None:
    structure = STRUCTURES["tuple"]
    data = Federated(Data(structure, validation), num_clients=1)
    module = Line(structure)
    with pytest.raises(UserError, match=sentence):
        make_trainer(clients_per_round=1, limit_val_batches=limit).fit(module, data)
    assert module.order == []


class Predicting(Data):
    def predict_dataloader(self) -> Any:
        return self.validation()


class Predictor(Line):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch_idx, dataloader_idx, self.loss(batch)[1]


@pytest.mark.parametrize("kind", ["one", "list", "dict", "streams", "sequential"])
def test_predictions_of_any_loaders(kind: str, make_trainer: MakeTrainer, make_stock_trainer: MakeStock) -> None:
    module = Predictor(STRUCTURES["tuple"])
    data = Predicting(STRUCTURES["tuple"], LOADERS[kind])
    expected = make_stock_trainer().predict(module, data)
    assert make_trainer().predict(module, Federated(data, num_clients=1)) == expected


def test_predictions_are_made_loader_by_loader(make_trainer: MakeTrainer) -> None:
    data = Federated(Predicting(STRUCTURES["tuple"], LOADERS["max_size"]), num_clients=1)
    with pytest.raises(ValueError, match=r"only supports the `CombinedLoader\(mode=.sequential.\)` mode"):
        make_trainer().predict(Predictor(STRUCTURES["tuple"]), data)


class Recorded(Data):
    """Data module that records its hooks, those for batches with the loader's index and the trainer's stage."""

    def __init__(self) -> None:
        super().__init__(STRUCTURES["tuple"], LOADERS["list"], shuffle=False)
        self.calls: list[Any] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(("setup", stage))

    def teardown(self, stage: str) -> None:
        self.calls.append(("teardown", stage))

    def on_exception(self, exception: BaseException) -> None:
        self.calls.append(("on_exception", str(exception).partition("\n")[0]))

    def train_dataloader(self) -> DataLoader:
        self.calls.append("train_dataloader")
        return super().train_dataloader()

    def val_dataloader(self) -> Any:
        self.calls.append("val_dataloader")
        return super().val_dataloader()

    def test_dataloader(self) -> Any:
        self.calls.append("test_dataloader")
        return self.validation()

    def predict_dataloader(self) -> Any:
        self.calls.append("predict_dataloader")
        return self.validation()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("before", dataloader_idx)
        return batch[0], batch[1] + 5

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.note(f"transfer to {device}", dataloader_idx)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("after", dataloader_idx)
        return batch[0], batch[1] * 2

    def note(self, *call: Any) -> None:
        stage = self.trainer.state.stage
        if stage is not None:
            self.calls.append((*call, str(stage.value)))


class Begins(Line):
    """Module that tells the data module when the training begins, and can break it off."""

    breaks = False

    def on_train_start(self) -> None:
        self.trainer.datamodule.calls.append("on_train_start")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.breaks:
            raise ValueError("broken off")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return batch[1]


def without_trial(calls: list[Any]) -> Iterator[Any]:
    """Yield the calls without those for the batch that a federation reads before training, to count the model's operations."""
    trains = True
    for call in calls:
        trains = call != ("setup", "fit") if call[0] == "setup" else trains or call == "on_train_start"
        if trains or len(call) != 3:
            yield call


def test_hooks_of_the_data_module(make_trainer: MakeTrainer, make_stock_trainer: MakeStock) -> None:
    """Compare the hooks, as often and in the same order, in all four stages, in another fit, and after an error."""
    recorded = []
    trainers = make_stock_trainer(max_epochs=2), make_trainer(max_rounds=2, clients_per_round=1)
    for trainer in trainers:
        own = Recorded()
        data = Federated(own, num_clients=1) if isinstance(trainer, FederatedTrainer) else own
        module = Begins(STRUCTURES["tuple"])
        trainer.fit(module, data)
        trainer.validate(module, data, verbose=False)
        trainer.test(module, data, verbose=False)
        batches = trainer.predict(module, data)
        module.breaks = True
        with pytest.raises(ValueError, match="broken off"):
            trainer.test(module, data, verbose=False)
        if trainer is trainers[0]:
            trainer = make_stock_trainer(max_epochs=2)  # the first one has done its epochs
        trainer.fit(module, data)
        recorded.append((own.calls, batches))
    (expected, batches), (calls, ours) = recorded
    assert len(calls) > len(expected)
    assert list(without_trial(calls)) == expected
    torch.testing.assert_close(ours, batches)
    assert (ours[0][0] > 5).all()


def test_each_fit_trains_on_what_its_setup_does_not_hold_back(make_trainer: MakeTrainer) -> None:
    class Splits(Data):
        held_back: int = NUM_SAMPLES

        def setup(self, stage: str) -> None:
            if stage == "fit":
                self.held_back -= 3

        def train_dataloader(self) -> DataLoader:
            own = [i for i in range(NUM_SAMPLES) if i not in range(self.held_back, self.held_back + 3)]
            return DataLoader(Numbers(), batch_size=BATCH_SIZE, collate_fn=xy, sampler=SubsetRandomSampler(own))

    data = Federated(Splits(STRUCTURES["tuple"], LOADERS["none"]), num_clients=1)
    for expected in ([*range(10)], [*range(7), 10, 11, 12]):
        module = Line(STRUCTURES["tuple"])
        make_trainer(max_rounds=1, clients_per_round=1).fit(module, data)
        assert sorted(module.order) == expected


class NamesLoaders(Perceptron):
    """Module that names the loader itself."""

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("index", float(dataloader_idx))
        self.log(f"of loader {dataloader_idx}", 1.0, add_dataloader_idx=False)

    def on_test_epoch_end(self) -> None:
        self.log("of all", 2.0)


class TwoTests(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*samples(8)), batch_size=4)

    def test_dataloader(self) -> list[DataLoader]:
        return [self.train_dataloader(), self.train_dataloader()]


def test_results_of_a_loader_are_those_that_its_steps_logged(
    make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    expected = make_stock_trainer().test(NamesLoaders(), datamodule=TwoTests(), verbose=False)
    results = make_trainer().test(NamesLoaders(), Federated(TwoTests(), num_clients=2), verbose=False)
    of_all = [result.pop("of all") for result in results]  # which Lightning gives to the last loader
    assert of_all == [2.0, 2.0]
    for result in expected:
        result.pop("of all", None)
    assert results == expected
