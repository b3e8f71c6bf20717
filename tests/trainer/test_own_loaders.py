"""Test clients that read loaders of their own: they train as `lightning.Trainer` does on these loaders."""

import copy
import multiprocessing
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset, TensorDataset
from toys import Perceptron, federation, samples, vector

from lightning_fl import UserError
from lightning_fl.data import Federated, Shards
from lightning_fl.trainer import lightning_runner

MakeStock = Callable[..., L.Trainer]


class Stream(IterableDataset):
    """Samples without a length; without end if there is no number of them."""

    def __init__(self, num_samples: int | None = 10, seed: int = 0) -> None:
        self.num_samples, self.tensors = num_samples, samples(10, seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        indices = (index % 10 for index in count())
        return ((self.tensors[0][k], self.tensors[1][k]) for k in islice(indices, self.num_samples))


class Batches:
    """Loader of no class of torch's, without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(loader(10))


class ByEpoch(Sampler):
    """Five samples of ten, drawn anew for each epoch, as samplers for several processes do."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(10, generator=torch.Generator().manual_seed(self.epoch))[:5].tolist())


def loader(num_samples: int, seed: int = 0, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(*samples(num_samples, seed)), **{"batch_size": 4, **options})


def stream(num_samples: int | None = 10, seed: int = 0) -> DataLoader:
    return DataLoader(Stream(num_samples, seed), batch_size=4)


class Sums(Perceptron):
    """Module that adds the losses of all batches that a step gets, and keeps the number of samples of each step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches = batch.values() if isinstance(batch, dict) else [batch]
        parts = [part for part in batches if part is not None]
        self.sizes.append(sum(len(x) for x, _ in parts))
        loss = torch.stack([self.loss(part) for part in parts]).sum()
        self.log("steps", float(len(parts)), on_step=True, on_epoch=True, batch_size=1)
        return loss


class Data(L.LightningDataModule):
    """Training loaders that a function returns, and a validation loader."""

    def __init__(self, train: Callable[[], Any]) -> None:
        super().__init__()
        self.train, self.requested = train, 0

    def train_dataloader(self) -> Any:
        self.requested += 1
        return self.train()

    def val_dataloader(self) -> DataLoader:
        return loader(10, seed=1)


LOADERS: dict[str, Callable[[], Any]] = {
    "one": lambda: loader(10),
    "by epoch": lambda: loader(10, sampler=ByEpoch()),
    "stream": stream,
    "batches": Batches,
    "dict": lambda: {"a": loader(10), "b": loader(6, seed=2)},
    "shortest": lambda: CombinedLoader({"a": loader(10), "b": loader(6, seed=2)}, "min_size"),
    "longest": lambda: CombinedLoader({"a": stream(), "b": loader(6, seed=2)}, "max_size"),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(
    "flags", [{}, {"accumulate_grad_batches": 2}, {"limit_train_batches": 2}, {"overfit_batches": 1}], ids=str
)
def test_a_single_client_reads_any_loader_as_lightnings_trainer_does(
    kind: str, flags: dict[str, Any], make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    asked: list[float] = []

    class Asks(Sums):
        def configure_optimizers(self) -> Any:
            asked.append(self.trainer.num_training_batches)
            return super().configure_optimizers()

    ours, data = Asks(), Data(LOADERS[kind])
    stock = copy.deepcopy(ours)
    trainer, stock_trainer = make_trainer(runner="lightning", clients_per_round=1, **flags), make_stock_trainer(**flags)
    trainer.fit(ours, Federated(data, num_clients=1))
    assert data.requested == 1
    stock_trainer.fit(stock, datamodule=data)
    assert ours.sizes == stock.sizes
    assert trainer.num_training_batches == stock_trainer.num_training_batches == asked[0]
    assert trainer.num_val_batches == stock_trainer.num_val_batches
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(
        float(stock_trainer.callback_metrics["val/loss"])
    )
    torch.testing.assert_close(torch.tensor(vector(ours)), torch.tensor(vector(stock)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "num_epochs"),
    [({"local_epochs": 3}, 6), ({"local_steps": 5}, 6), ({"local_steps": 3, "accumulate_grad_batches": 2}, 6), ({}, 2)],
    ids=str,
)
def test_each_pass_over_a_clients_own_loader_is_an_epoch_of_its_sampler(
    flags: dict[str, int], num_epochs: int, make_trainer: MakeTrainer
) -> None:
    epochs: list[int] = []

    class Keeps(ByEpoch):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    data = Federated(Data(lambda: loader(10, sampler=Keeps())), num_clients=1)
    make_trainer(max_rounds=2, clients_per_round=1, runner="lightning", **flags).fit(Perceptron(), data)
    assert epochs == [*range(num_epochs)]


@pytest.mark.parametrize("num_samples", [None, (30, 10, 20)])
def test_clients_with_streams_are_averaged(
    num_samples: tuple[int, ...] | None, make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    """Compare with Lightning's trainer on each client's stream, and the mean of the weights that come out of it."""
    module, asked = Perceptron(), []

    def streams(client: int) -> DataLoader:
        asked.append(client)
        return stream(seed=client)

    average, weights = vector(module), torch.tensor(num_samples or (1, 1, 1), dtype=torch.float64)
    for _ in range(2):
        trained = []
        for client in range(3):
            alone = copy.deepcopy(module)
            torch.nn.utils.vector_to_parameters(torch.as_tensor(average).float(), alone.parameters())
            make_stock_trainer(max_epochs=1).fit(alone, stream(seed=client))
            trained.append(torch.as_tensor(vector(alone)).double())
        average = (torch.stack(trained) * (weights / weights.sum())[:, None]).sum(0)
    data = Federated(Data(lambda: None), num_clients=3, client_loaders=streams, num_samples=num_samples)
    make_trainer(clients_per_round=3).fit(module, data)
    torch.testing.assert_close(torch.as_tensor(vector(module)).double(), average, rtol=0, atol=1e-6)
    assert sorted(asked) == [0, 1, 2]


def test_a_number_of_steps_ends_on_a_stream_without_end(make_trainer: MakeTrainer) -> None:
    def sizes_of(client_loader: Any) -> list[int]:
        module = Sums()
        trainer = make_trainer(clients_per_round=1, local_steps=5, accumulate_grad_batches=2, max_rounds=1)
        trainer.fit(module, Federated(Data(list), num_clients=1, client_loaders=lambda _: client_loader))
        assert trainer.global_step == 5
        return module.sizes

    assert sizes_of(stream(None)) == [4] * 10
    assert sizes_of(loader(10)) == [4, 4, 2, 4, 4, 2, 4, 4]  # the end of a pass ends a step


@pytest.mark.parametrize("empty", [stream(0), loader(3, drop_last=True)], ids=["stream", "drop_last"])
def test_a_loader_without_a_batch_is_told(empty: Any, make_trainer: MakeTrainer) -> None:
    lightning_runner.WARNINGS.clear()
    data = Federated(Data(list), num_clients=2, client_loaders=lambda client: loader(8) if client else empty)
    with pytest.warns(UserWarning, match="A client has made no step on its own loader .* counts in the mean"):
        make_trainer(clients_per_round=2, max_rounds=1).fit(Perceptron(), data)


def test_a_resumed_run_equals_an_uninterrupted_one(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    def fitted(folder: str, rounds: list[int]) -> list[float]:
        for stop in rounds:
            L.seed_everything(0, verbose=False)
            module = Perceptron()
            data = Federated(Data(lambda: loader(10, shuffle=True)), num_clients=1)
            flags = {**keeps_files, "default_root_dir": tmp_path / folder, "max_rounds": stop, "runner": "lightning"}
            make_trainer(clients_per_round=1, **flags).fit(
                module, data, ckpt_path="last" if stop != rounds[0] else None
            )
        return vector(module).tolist()

    assert fitted("whole", [3]) == fitted("resumed", [2, 3])


def test_loaders_are_requested_anew(make_trainer: MakeTrainer) -> None:
    rounds: list[int] = []

    class Growing(Data):
        def val_dataloader(self) -> DataLoader:
            rounds.append(self.trainer.current_epoch)  # type: ignore[union-attr]
            return super().val_dataloader()

    module, data = Sums(), Growing(lambda: loader(4 * data.requested))
    trainer = make_trainer(runner="lightning", clients_per_round=1, max_rounds=4, reload_dataloaders_every_n_epochs=2)
    trainer.fit(module, Federated(data, num_clients=1))
    assert module.sizes == [4, 4, 4, 4, 4, 4]  # one batch in two rounds, then two
    assert rounds == [0, 2]


class Shows(Perceptron):
    """Module that keeps what the trainer shows of its loader."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        dataset = self.trainer.train_dataloader.dataset  # type: ignore[union-attr]
        assert isinstance(dataset, Subset)
        assert all(any(torch.equal(x, other) for other, _ in dataset) for x in batch[0])
        self.shown = dataset.dataset
        return super().training_step(batch, batch_idx)


def test_the_trainer_shows_the_loader_of_the_client_in_training(make_trainer: MakeTrainer) -> None:
    tables = loader(10)
    module = Shows()
    make_trainer(runner="lightning", clients_per_round=2).fit(module, Federated(Data(lambda: tables), num_clients=3))
    assert module.shown is tables.dataset
    whole = make_trainer(runner="lightning", clients_per_round=1)
    whole.fit(Perceptron(), Federated(Data(lambda: tables), num_clients=1))
    assert whole.train_dataloader is tables
    assert whole.val_dataloaders.dataset.tensors[0].shape == (10, 3)


class Iterates(Sums):
    """Module that takes the iterator of its loader."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


def test_a_step_may_take_the_iterator_of_a_clients_own_loader(make_trainer: MakeTrainer) -> None:
    module, data = Iterates(), Data(lambda: loader(8))
    make_trainer(clients_per_round=2).fit(module, Federated(data, num_clients=2, client_loaders=lambda _: loader(8)))
    assert module.sizes == [4] * 8
    with pytest.raises(UserError, match=r"Iterates takes dataloader_iter, .* client_loaders"):
        make_trainer(clients_per_round=2).fit(module, Federated(data, num_clients=2))


class Records(Perceptron):
    """Module that keeps the first input of each sample that it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.read.append(batch[0][:, 0].tolist())
        return super().training_step(batch, batch_idx)


def test_each_client_overfits_its_first_batches(make_trainer: MakeTrainer) -> None:
    data, flags = federation((8, 5, 11)), {"local_epochs": 2, "overfit_batches": 1, "max_rounds": 1}
    trained = {}
    for runner in ("serial", "lightning", "stacked"):
        L.seed_everything(0, verbose=False)
        module = Perceptron() if runner == "stacked" else Records()
        trainer = make_trainer(runner=runner, **flags)
        trainer.fit(module, data)
        assert trainer.num_val_batches == [1]
        trained[runner] = vector(module).tolist()
        if isinstance(module, Records):
            first = [next(data.client(k).batches(4))[0][:, 0].tolist() for k in range(3)]
            assert sorted(module.read) == sorted(first * 2)
    assert trained["lightning"] == pytest.approx(trained["serial"], abs=1e-7)
    assert trained["stacked"] == pytest.approx(trained["serial"], abs=1e-6)


@pytest.mark.parametrize(
    ("flags", "options", "sentence"),
    [
        ({"runner": "serial"}, {}, "runner 'serial' reads divided samples, but here clients read loaders of their own"),
        ({"straggler_rate": 0.5}, {}, "trainer.straggler_rate needs the number of each client's samples"),
        ({}, {"val_fraction": 0.1}, "client_loaders says what each client reads.*leave out val_fraction"),
        ({}, {"class_of": torch.zeros(8)}, "leave out class_of"),
        ({}, {"batch_size": 3, "partition": Shards()}, "leave out batch_size and partition"),
        ({}, {"num_samples": [1]}, "num_samples has 1 entries for 2 clients"),
        (
            {"limit_train_batches": 0.5},
            {},
            r"no length, like any `IterableDataset`, so .* must be `1.0` or an int, got 0.5",
        ),
        ({}, {"client_loaders": lambda _: CombinedLoader([loader(4)], "sequential")}, "of mode 'sequential'"),
    ],
)
def test_what_needs_divided_samples_is_refused(
    flags: dict[str, Any], options: dict[str, Any], sentence: str, make_trainer: MakeTrainer
) -> None:
    module = Sums()

    def fit() -> None:
        data = Federated(Data(stream), **{"num_clients": 2, "client_loaders": lambda _: stream(), **options})
        make_trainer(clients_per_round=1, **flags).fit(module, data)

    with pytest.raises(UserError, match=sentence):
        fit()
    assert module.sizes == []


def test_a_plan_needs_divided_samples(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match="plan needs the number of each client's batches"):
        make_trainer(clients_per_round=1).plan(Perceptron(), Federated(Data(stream), num_clients=1))


def test_divided_samples_are_not_requested_anew(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(reload_dataloaders_every_n_epochs=1)
    with pytest.raises(UserError, match="the samples of a client do not change in a run"):
        trainer.fit(Perceptron(), federation())


class Unfinished(L.LightningDataModule):
    """Data module with loaders of one stage."""


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("num_clients", [1, 4])
def test_an_evaluation_needs_no_training_data(stage: str, num_clients: int, make_trainer: MakeTrainer) -> None:
    data = Unfinished()
    setattr(data, f"{'val' if stage == 'validate' else stage}_dataloader", lambda: loader(10))
    module = Perceptron()
    result = getattr(make_trainer(), stage)(module, Federated(data, num_clients=num_clients))
    if stage == "predict":
        assert [len(batch) for batch in result] == [4, 4, 2]
    else:
        assert result[0][f"{'val' if stage == 'validate' else stage}/loss"] == pytest.approx(
            float(module.loss(samples(10)))
        )


@pytest.mark.parametrize("flag", ["limit_train_batches", "limit_val_batches", "overfit_batches"])
def test_whoever_catches_lightnings_exception_catches_ours(flag: str, make_trainer: MakeTrainer) -> None:
    with pytest.raises(MisconfigurationException, match=f"You have passed invalid value 1.2 for {flag}"):
        make_trainer(**{flag: 1.2})


def test_warnings_about_loaders_are_lightnings(make_trainer: MakeTrainer) -> None:
    data = Data(lambda: loader(4))
    data.val_dataloader = lambda: loader(10, shuffle=True)  # type: ignore[method-assign]
    trainer = make_trainer(runner="lightning", clients_per_round=1)
    with pytest.warns(UserWarning, match="Your `val_dataloader`'s sampler has shuffling enabled"):
        trainer.fit(Perceptron(), Federated(data, num_clients=1))


def test_a_stream_of_a_client_goes_on_in_the_next_round(make_trainer: MakeTrainer) -> None:
    class GoesOn:
        def __init__(self) -> None:
            self._iterator = iter([(x[None], y[None]) for x, y in zip(*samples(40), strict=True)])

            self.drawn = 0

        def __iter__(self) -> Any:
            for batch in islice(self._iterator, 3):
                self.drawn += 1
                yield batch

    streams = [GoesOn(), GoesOn()]
    data = Federated(Data(list), 2, client_loaders=lambda client: streams[client])
    make_trainer(max_rounds=2, clients_per_round=2, limit_val_batches=0).fit(Perceptron(), data)
    assert [stream.drawn for stream in streams] == [6, 6]


def test_workers_of_a_client_end_before_the_next_client_trains(make_trainer: MakeTrainer) -> None:
    """Check also that what they draw does not depend on earlier rounds, which a resumed run does not repeat."""

    class Workers(Callback):
        most = 0

        def __init__(self) -> None:
            self.others = {*multiprocessing.active_children()}  # of earlier tests

        def on_train_batch_start(self, *_: Any) -> None:
            self.most = max(self.most, len({*multiprocessing.active_children()} - self.others))

    start, models = Perceptron().state_dict(), []
    for keeps in (False, True):
        module, watch = Perceptron(), Workers()
        module.load_state_dict(start)
        options = {"batch_size": 2, "shuffle": True, "num_workers": 1, "persistent_workers": keeps}
        data = Federated(Data(list), 2, client_loaders=lambda _, o=options: DataLoader(TensorDataset(*samples(4)), **o))
        make_trainer(max_rounds=2, clients_per_round=2, limit_val_batches=0, callbacks=watch).fit(module, data)
        assert watch.most == 1
        models.append(vector(module).tolist())
    assert models[0] == models[1]
