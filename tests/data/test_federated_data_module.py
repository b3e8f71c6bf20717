"""Test FederatedDataModule: the split, its reproducibility, its loaders in a stock Trainer, its use in configurations."""

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonargparse
import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_fl.data import (
    IID,
    Arrays,
    Corruption,
    Digits,
    Dirichlet,
    Federated,
    FederatedDataModule,
    ImageDataModule,
    Partition,
    Shards,
    TensorSamples,
    label_histograms,
    non_iid_degree,
)
from lightning_fl.data.descriptions import degree_of_random_draws
from lightning_fl.errors import UserError

NUM_TRAIN, NUM_TEST = 600, 100


def toy(**arguments) -> Arrays:
    """Return 600 training samples (i, i) of 5 classes: a sample contains its own index."""
    x = torch.arange(NUM_TRAIN).float().unsqueeze(1).expand(-1, 2)
    y = torch.arange(NUM_TRAIN) % 5
    module = Arrays(train=(x, y), test=(x[:NUM_TEST], y[:NUM_TEST]), **{"num_clients": 10, **arguments})
    module.setup()
    return module


class Ordered(Arrays):
    shuffled_files = True


def test_clients_server_and_validation_parts_are_disjoint_and_complete() -> None:
    module = toy(client_fraction=0.8, server_fraction=0.2, val_fraction=0.25, partition=Shards(2))
    clients = np.concatenate(module.client_indices)
    held_out = np.concatenate(module.client_val_indices)
    together = np.concatenate([clients, held_out, module.server_indices])
    assert len(set(together)) == len(together)
    assert (len(clients), len(held_out), len(module.server_indices)) == (360, 120, 96)
    assert module.client_sizes.tolist() == [36] * 10
    assert {len(part) for part in module.client_val_indices} == {12}


def test_files_in_random_order_keep_their_order_others_are_shuffled() -> None:
    x, y = torch.zeros(NUM_TRAIN, 2), torch.arange(NUM_TRAIN) % 5
    kept = Ordered(train=(x, y), test=(x, y), num_clients=10, client_fraction=0.8, server_fraction=0.25)
    kept.setup()
    assert set(np.concatenate(kept.client_indices)) == set(range(480))
    assert set(kept.server_indices) == set(range(480, 600))
    mixed = toy(client_fraction=0.8)
    assert set(np.concatenate(mixed.client_indices)) != set(range(480))


@pytest.mark.long
@settings(max_examples=50)
@example(60, 0.1)  # 54.5 and 5.45 samples, which must not be rounded up both
@given(st.integers(20, 200), st.floats(0.06, 0.99))
def test_the_clients_get_all_that_the_server_s_share_leaves(num_train: int, server_fraction: float) -> None:
    x, y = torch.zeros(num_train, 2), torch.arange(num_train) % 5
    module = Arrays(train=(x, y), test=(x, y), num_clients=2, server_fraction=server_fraction)
    module.setup()
    num_clients, num_server = int(module.client_sizes.sum()), len(module.server_indices)
    assert num_train - 2 <= num_clients + num_server <= num_train
    assert num_server == pytest.approx(server_fraction * num_clients, abs=0.5 + 1e-9)


def test_the_seed_decides_everything_and_nothing_else_does() -> None:
    arguments = {"client_fraction": 0.8, "server_fraction": 0.1, "val_fraction": 0.1, "partition": Dirichlet(1.0)}
    one = toy(seed=3, **arguments)
    torch.manual_seed(99)
    same, other = toy(seed=3, **arguments), toy(seed=4, **arguments)

    def split(module: FederatedDataModule) -> list[list[int]]:
        return [part.tolist() for part in [*module.client_indices, *module.client_val_indices, module.server_indices]]

    assert split(one) == split(same) != split(other)
    more_server_data = toy(seed=3, **{**arguments, "server_fraction": 0.2})
    assert split(one)[:20] == split(more_server_data)[:20]


def test_setup_happens_once() -> None:
    module = toy()
    before = module.client_indices
    module.setup("fit")
    module.setup("test")
    assert module.client_indices is before


def test_histograms_and_sizes() -> None:
    module = toy(partition=Shards(1), client_fraction=0.8, server_fraction=0.125, server_classes=3, val_fraction=0.1)
    assert module.label_histograms is not None
    assert module.server_histogram is not None
    for indices, histogram in zip(module.client_indices, module.label_histograms, strict=True):
        assert np.bincount(indices % 5, minlength=5).tolist() == histogram.tolist()
    assert module.label_histograms.sum(1).tolist() == module.client_sizes.tolist()
    assert sorted(module.server_histogram.tolist()) == [0, 0, 20, 20, 20]


def test_server_data_at_a_degree() -> None:
    module = toy(client_fraction=0.5, server_fraction=0.5, server_degree=0.1)
    assert module.label_histograms is not None
    degree = non_iid_degree(module.server_histogram, module.label_histograms.sum(0))
    assert degree == pytest.approx(0.1, abs=0.01)


def test_a_client_reads_its_own_samples() -> None:
    module = toy(partition=Shards(2))
    for k in (0, 9):
        x = torch.cat([x for x, _ in module.client(k).batches(7, torch.Generator())])
        assert sorted(x[:, 0].int().tolist()) == sorted(module.client_indices[k].tolist())
    assert module.server_data() is None
    server = toy(client_fraction=0.5, server_fraction=0.1)
    assert len(server.server_data() or ()) == 30


def test_loaders_have_lengths_and_can_be_iterated_again() -> None:
    module = toy(val_fraction=0.2, client_fraction=0.5, batch_size=7, eval_batch_size=32)
    train, val, test = module.train_dataloader(), module.val_dataloader(), module.test_dataloader()
    for loader, expected in ((train, module.client_indices), (val, module.client_val_indices)):
        passes = [torch.cat([x[:, 0] for x, _ in loader]).int().tolist() for _ in range(2)]
        assert sorted(passes[0]) == sorted(passes[1]) == sorted(np.concatenate(expected).tolist())
        assert len(loader) == len(list(loader))
        assert (passes[0] == passes[1]) == (loader is val)
    assert torch.cat([x[:, 0] for x, _ in test]).tolist() == list(range(NUM_TEST))
    assert len(test) == 4
    assert len(toy().val_dataloader()) == len(toy().test_dataloader())


def test_a_large_shuffled_pass_needs_several_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fl.data.samples.loaders.ROWS_PER_GATHER", 50)
    loader = toy(batch_size=7).train_dataloader()
    sizes = [len(x) for x, _ in loader]
    assert len(sizes) == len(loader) == 86
    assert sum(sizes) == NUM_TRAIN


class Linear(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.num_seen: dict[str, int] = {}

    def _loss(self, batch: tuple[Tensor, Tensor], stage: str) -> Tensor:
        self.num_seen[stage] = self.num_seen.get(stage, 0) + len(batch[1])
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self._loss(batch, "train")

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val_loss", self._loss(batch, "val"))

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self._loss(batch, "test")

    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.layer(batch[0].flatten(1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_a_stock_trainer_takes_it_as_centralised_baseline(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    model, data = Linear(), Digits(val_fraction=0.1, batch_size=50)
    trainer = make_stock_trainer()
    trainer.fit(model, data)
    num_val = sum(map(len, data.client_val_indices))
    assert model.num_seen == {"train": 2 * (1437 - num_val), "val": 2 * num_val}
    assert trainer.global_step == 2 * len(data.train_dataloader())
    assert trainer.callback_metrics["val_loss"] < 1.5
    trainer.test(model, data, verbose=False)
    assert model.num_seen["test"] == 360
    assert sum(map(len, trainer.predict(model, data) or [])) == 360


def test_epochs_of_a_stock_trainer_have_the_batches_that_its_flags_say(
    make_stock_trainer: Callable[..., L.Trainer], tmp_path: Path
) -> None:
    seen: list[list[int]] = []

    class Notes(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch[0][:, 0].int().tolist())

    def read(epochs: int, ckpt_path: Path | None = None, **flags: Any) -> tuple[list[list[int]], L.Trainer]:
        seen.clear()
        model = Linear()
        model.layer = torch.nn.Linear(2, 5)
        trainer = make_stock_trainer(max_epochs=epochs, callbacks=Notes(), **{"limit_train_batches": 2, **flags})
        trainer.fit(model, toy(batch_size=7), ckpt_path=ckpt_path)
        return list(seen), trainer

    whole, _ = read(3)
    assert len({str(batch) for batch in whole}) == 6
    assert read(3, reload_dataloaders_every_n_epochs=1)[0] == whole
    read(1)[1].save_checkpoint(tmp_path / "first.ckpt")
    assert read(3, tmp_path / "first.ckpt")[0] == whole[2:]
    overfit, _ = read(3, limit_train_batches=1.0, overfit_batches=2)
    assert overfit == 3 * overfit[:2]
    assert overfit[0] != overfit[1]


def test_a_loader_alone_may_be_overfitted(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    model = Linear()
    model.layer = torch.nn.Linear(2, 5)
    make_stock_trainer(max_epochs=1, overfit_batches=1).fit(model, toy().train_dataloader())


@pytest.mark.long
@pytest.mark.parametrize("drop_last", [False, True])
def test_processes_of_a_stock_trainer_read_shares_of_the_samples(
    drop_last: bool, make_stock_trainer: Callable[..., L.Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = toy(batch_size=7)
    data.drop_last, own = drop_last, NUM_TRAIN // 4
    seen = []
    for rank in range(4):
        monkeypatch.setattr(L.Trainer, "distributed_sampler_kwargs", {"num_replicas": 4, "rank": rank})
        data.trainer = make_stock_trainer()
        loader = data.train_dataloader()
        seen += [x[:, 0] for x, _ in loader]
        assert len(seen) == (rank + 1) * len(loader)
    assert len(loader) == (own // 7 if drop_last else own // 7 + 1)
    assert len(torch.cat(seen).unique()) == len(torch.cat(seen)) == (4 * (own - own % 7) if drop_last else NUM_TRAIN)
    data.trainer = make_stock_trainer(use_distributed_sampler=False)
    assert data.train_dataloader().num_replicas == 1


def test_processes_that_overfit_read_shares_of_the_samples(
    make_stock_trainer: Callable[..., L.Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, seen = toy(batch_size=7), []
    for rank in range(4):
        monkeypatch.setattr(L.Trainer, "distributed_sampler_kwargs", {"num_replicas": 4, "rank": rank})
        data.trainer = make_stock_trainer(overfit_batches=0.5)
        seen += [x[:, 0] for x, _ in data.train_dataloader()]
    assert len(torch.cat(seen).unique()) == len(torch.cat(seen)) == NUM_TRAIN


def test_description_is_one_line_of_facts() -> None:
    plain = Digits(num_clients=100, partition=Shards(2))
    plain.setup()
    line = plain.description()
    assert line.startswith(
        "Digits: 1,437 training images over 100 clients by Shards(shards_per_client=2), 14-16 each ("
    )
    assert line.endswith("; no server data; 360 test images.")
    assert "\n" not in line
    module = toy(client_fraction=0.5, server_fraction=0.1, server_classes=5, val_fraction=0.1)
    degrees = non_iid_degree(module.label_histograms, module.label_histograms.sum(0))
    server_degree = non_iid_degree(module.server_histogram, module.label_histograms.sum(0))
    by_chance = degree_of_random_draws(module.label_histograms.sum(0), module.client_sizes)
    assert module.description() == (
        "Arrays: 270 training samples over 10 clients by IID(), 27 each (5.0 of 5 classes per client; "
        f"non-IID degree {degrees.mean():.2f}, where 0 means the same shares of classes everywhere, and random draws of these "
        f"sizes give {by_chance:.2f}); 30 held out for validation; 30 server samples "
        f"(non-IID degree {server_degree:.2g}); 100 test samples."
    )


@pytest.mark.parametrize(("num_clients", "size"), [(100, 13), (5, 300)])
def test_random_draws_have_the_degree_of_iid_clients(num_clients: int, size: int) -> None:
    """Compare the estimate with IID partitions of many seeds."""
    labels = np.arange(num_clients * size) % 10
    degrees = []
    for seed in range(40):
        parts = IID()(labels, num_clients, np.random.default_rng(seed))
        counts = label_histograms(labels, parts, 10)
        degrees.append(non_iid_degree(counts, counts.sum(0)).mean())
    assert degree_of_random_draws(counts.sum(0), counts.sum(1)) == pytest.approx(np.mean(degrees), rel=0.1)


@pytest.mark.long
def test_the_description_of_many_classes_needs_little_memory() -> None:
    """Test labels such as the words of a vocabulary, whose counts for all clients would take 160 MB."""
    x, y = torch.zeros(20_000, 1), torch.arange(20_000)
    data = Arrays(train=(x, y), test=(x, y), num_clients=1000)
    data.setup()
    tracemalloc.start()
    try:
        assert "(20.0 of 20000 classes per client; non-IID degree 0.99" in data.description()
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most_bytes < 150e6


def test_data_show_their_settings_in_one_line() -> None:
    data = Digits(num_clients=20, partition=Shards(3), val_fraction=0.1, normalize=True)
    assert (
        repr(data) == "Digits(num_clients=20, partition=Shards(shards_per_client=3), normalize=True, val_fraction=0.1)"
    )
    assert repr(data) == str(data)
    assert repr(Digits()) == "Digits(num_clients=100, partition=IID())"
    x = torch.randn(40, 3)
    assert repr(Arrays(train=(x, x), test=(x, x), num_clients=2, seed=4)) == (
        "Arrays(num_clients=2, partition=IID(), seed=4)"
    )
    assert repr(Federated(Digits(), num_clients=4)) == "Federated(Digits, num_clients=4, partition=IID())"
    data.setup()
    assert "\n" not in repr(data)


def test_partitions_and_shifts_are_shown_without_what_is_the_default() -> None:
    data = Digits(num_clients=20, partition=Dirichlet(min_samples=1), shift=Corruption(severity=2), image_size=8)
    assert repr(data) == "Digits(num_clients=20, partition=Dirichlet(alpha=0.5, min_samples=1))"
    data.setup()
    assert " over 20 clients by Dirichlet(alpha=0.5, min_samples=1), " in data.description()
    kinds = "('noise', 'blur', 'contrast', 'brightness')"
    assert f"; images changed by Corruption(kinds={kinds}, severity=2); " in data.description()

    @dataclass(frozen=True)
    class Given(Partition):
        order: np.ndarray
        seed: int = 3

        def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
            return np.array_split(self.order, num_clients)

    given_order = Digits(num_clients=20, partition=Given(np.arange(1437)), image_size=8)
    assert "partition=Given(order=array([   0, " in repr(given_order)
    assert "seed" not in repr(given_order)


class Unlabelled(FederatedDataModule):
    def load(self) -> tuple[TensorSamples, TensorSamples]:
        return TensorSamples(torch.randn(40, 3)), TensorSamples(torch.randn(8, 3))


def test_data_without_classes() -> None:
    module = Unlabelled(num_clients=4, client_fraction=0.5, server_fraction=0.5)
    module.setup()
    assert module.label_histograms is None
    assert module.description() == (
        "Unlabelled: 20 training samples over 4 clients by IID(), 5 each; 10 server samples; 8 test samples."
    )
    with pytest.raises(UserError, match=r"Shards\(shards_per_client=2\) needs the class of each sample"):
        Unlabelled(num_clients=4, partition=Shards()).setup()
    targets = (torch.randn(8, 3), torch.randn(8))
    with pytest.raises(UserError, match=r"data have none \(y of whole numbers, \(n,\)\): give train and test such a y"):
        Arrays(train=targets, test=targets, num_clients=2, partition=Shards()).setup()
    with pytest.raises(UserError, match="server_classes and server_degree need"):
        Unlabelled(num_clients=4, client_fraction=0.5, server_fraction=0.1, server_classes=2).setup()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_clients": 0}, r"num_clients must .*, got 0"),
        ({"num_clients": 2.5}, r"num_clients must .*, got 2\.5"),
        ({"batch_size": 0}, r"batch_size must .*, got 0"),
        ({"eval_batch_size": 0}, r"eval_batch_size must .*, got 0"),
        ({"client_fraction": 0.0}, r"client_fraction must lie in \(0, 1\], got 0\.0"),
        ({"client_fraction": 1.1}, r"client_fraction must .*, got 1\.1"),
        ({"server_fraction": 1.0, "client_fraction": 0.5}, r"server_fraction must lie in \[0, 1\), got 1\.0"),
        ({"server_fraction": 0.1, "client_fraction": 0.95}, r"lower client_fraction to 0\.909 or less"),
        ({"val_fraction": 1.0}, r"val_fraction must .*, got 1\.0"),
        ({"val_fraction": float("nan")}, r"val_fraction must .*, got nan"),
        ({"server_classes": 0}, r"server_classes must .*, got 0"),
        ({"server_degree": -0.1}, r"server_degree must .*, got -0\.1"),
        ({"server_classes": 2, "server_degree": 0.1}, "exclude each other"),
        ({"seed": -1}, r"seed must .*, got -1"),
        ({"partition": "Shards"}, "is not a Partition"),
        (
            {"partition": [[*range(900)], [*range(900, 1437)]]},
            r"^partition=\[\[0, .{,60}\]\] is .*; GivenIndices\(lists\) takes",
        ),
        ({"alpha": 0.1}, "^Digits has no parameter 'alpha'; allowed: augment, batch_size"),
        ({"num_clients": 2000}, "num_clients=2,000 is more than the 1,437 training samples"),
        ({"num_clients": 1437, "val_fraction": 0.1}, r"val_fraction=0\.1 holds out no sample of any client"),
        ({"client_fraction": 0.5, "server_fraction": 1e-4}, "less than one sample"),
        ({"client_fraction": 0.5, "server_fraction": 0.1, "server_classes": 11}, "server_classes=11 is not allowed"),
    ],
)
def test_user_mistakes(arguments: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Digits(**arguments).setup()


def test_labels_outside_the_classes() -> None:
    with pytest.raises(UserError, match="The labels go from 0 to 4, but num_classes=3 allows 0 to 2"):
        toy(num_classes=3)
    x, y = torch.zeros(8, 2), torch.arange(8) % 4
    numbered = "classes are numbered from 0: renumber them, or give Federated class_of"
    for test, found in (
        (torch.arange(8), "0 to 7, but num_classes=4 allows 0 to 3"),
        (y - 1, f"-1 to 2, but {numbered}"),
    ):
        with pytest.raises(UserError, match=f"labels of the test set go from {found}"):
            Arrays(train=(x, y), test=(x, test), num_classes=4, num_clients=2).setup()


def test_normalisation_sees_the_clients_training_images_only() -> None:
    x = torch.randint(0, 256, (40, 6, 6, 3), dtype=torch.uint8).numpy()
    y = np.arange(40) % 4
    module = Arrays(train=(x, y), test=(x, y), num_clients=4, client_fraction=0.5, val_fraction=0.2, normalize=True)
    module.setup()
    module.place(torch.device("cpu"))
    images = torch.cat([x for k in range(4) for x, _ in module.client(k).batches(5)])
    assert torch.allclose(images.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(images.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-4)
    (test_images, _) = next(iter(module.test_dataloader()))
    assert torch.allclose(test_images[module.client_indices[0]], torch.cat([x for x, _ in module.client(0).batches(5)]))


def test_augmentation_is_for_shuffled_training_only() -> None:
    module = Digits(num_clients=3, augment=True)
    module.setup()
    plain = torch.cat([x for x, _ in module.client(0).batches(50)])
    order = torch.randperm(len(plain), generator=torch.Generator().manual_seed(1))
    augmented = torch.cat([x for x, _ in module.client(0).batches(50, torch.Generator().manual_seed(1))])
    assert not torch.equal(plain[order], augmented)
    assert torch.equal(plain, torch.cat([x for x, _ in module.train.batches(50, module.client_indices[0])]))


def parse(*words: str) -> FederatedDataModule:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(FederatedDataModule, "data")
    return parser.instantiate(parser.parse_args(list(words))).data


@pytest.mark.long
def test_everything_can_be_configured() -> None:
    data = parse(
        "--data=Digits",
        "--data.num_clients=5",
        "--data.partition=Shards",
        "--data.partition.shards_per_client=3",
        "--data.image_size=16",
        "--data.augment=true",
    )
    assert isinstance(data, Digits)
    assert (data.num_clients, data.partition, data.image_size, data.augment) == (5, Shards(3), 16, True)
    assert parse("--data=CIFAR10", "--data.root=elsewhere", "--data.seed=7").seed == 7
    assert parse("--data=ImageFolder", "--data.root=x", "--data.partition=Dirichlet").partition == Dirichlet()
    assert parse("--data=Arrays", "--data.path=x.npz").partition == IID()
    federated = parse(
        "--data=Federated",
        "--data.datamodule=lightning.pytorch.demos.boring_classes.BoringDataModule",
        "--data.num_clients=4",
        "--data.seed=1",
    )
    assert federated.num_clients == 4
    with pytest.raises(jsonargparse.ArgumentError, match="shard_per_client"):
        parse("--data=Digits", "--data.partition=Shards", "--data.partition.shard_per_client=3")


@pytest.mark.parametrize("data", ["Digits", "CIFAR10", "SVHN", "ImageFolder", "Arrays", "Federated"])
def test_help_explains_every_argument(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(f"--data.help={data}")
    shown = capsys.readouterr().out
    for argument in ("num_clients", "partition", "server_degree", "seed"):
        assert f"--data.{argument}" in shown
    for argument in shown.split("  --data.")[1:]:
        explanation = " ".join(argument.split()[2:])
        assert not explanation.startswith(("(type:", "(required")), argument


def test_images_say_so() -> None:
    assert issubclass(Digits, ImageDataModule)
    assert (Digits().num_classes, Digits().in_channels) == (10, 1)
