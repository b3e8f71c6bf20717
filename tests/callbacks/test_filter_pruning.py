"""Test filter pruning in a stock `L.Trainer`: against a small network built by hand; saved, loaded and resumed."""

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.callbacks import AdaptivePruning, FilterPruning, MagnitudePruning
from lightning_fl.callbacks.pruning._training_samples import _reread, calibration_images, sources_of
from lightning_fl.data import Arrays
from lightning_fl.modules import ImageClassifier
from lightning_fl.pruning import Prunable, load_pruned, masks_of, plan_for, plans_of, prune

OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
}


def small_network(first: int = 6, second: int = 8) -> nn.Sequential:
    """Return two convolutions with and without batch normalisation on 8×8 images, flattened maps of 2×2."""
    return nn.Sequential(
        nn.Conv2d(1, first, 3),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * second, 3),
    )


class Classifier(L.LightningModule):
    """User's module without any code for pruning."""

    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = small_network()
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(30, 1, 8, 8, generator=generator), torch.randint(3, (30,), generator=generator)


def loader(shuffle: bool = False) -> DataLoader:
    return DataLoader(TensorDataset(*samples()), batch_size=10, shuffle=shuffle)


def fit(
    module: L.LightningModule, callbacks: Any = None, epochs: int = 4, shuffle: bool = False, **options: Any
) -> L.Trainer:
    trainer = L.Trainer(max_epochs=epochs, callbacks=callbacks, **{**QUIET, **options})
    trainer.fit(module, loader(shuffle))
    return trainer


def train(net: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    net.train()
    for _ in range(epochs):
        for images, labels in loader():
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()


def best(scores: list[float], count: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda j: (scores[j], j))[-count:])


def chosen_by_hand(net: nn.Sequential, importance: str) -> tuple[list[int], list[int]]:
    """Return the filters that stay at rate 0.4: 4 of 6 and 5 of 8."""
    convolutions = (net[0], net[4])
    if importance == "magnitude":
        scores = [[float(w.detach().abs().sum()) for w in conv.weight] for conv in convolutions]  # type: ignore[union-attr]
    else:
        frozen = copy.deepcopy(net).eval()
        with torch.no_grad():
            maps = [frozen[:3](samples()[0]), frozen[:6](samples()[0])]
        scores = [
            [np.mean([np.linalg.matrix_rank(image[j].numpy()) for image in m]) for j in range(m.shape[1])] for m in maps
        ]
    return best(scores[0], 4), best(scores[1], 5)


def cut_by_hand(name: str, tensor: Tensor, first: list[int], second: list[int]) -> Tensor:
    columns = [4 * c + pixel for c in second for pixel in range(4)]
    if name.startswith(("0.", "1.")):
        return tensor[first].clone() if tensor.dim() else tensor.clone()
    if name == "4.weight":
        return tensor[second][:, first].clone()
    if name == "4.bias":
        return tensor[second].clone()
    return tensor[:, columns].clone() if name == "7.weight" else tensor.clone()


def by_hand(optimizer_name: str, importance: str) -> nn.Module:
    """Train two dense epochs, then two of a smaller network that starts with the slices of weights and moments."""
    module = Classifier(optimizer_name)
    dense, optimizer = module.net, module.configure_optimizers()
    train(dense, optimizer, 2)
    first, second = chosen_by_hand(dense, importance)
    small = small_network(4, 5)
    small.load_state_dict({name: cut_by_hand(name, x, first, second) for name, x in dense.state_dict().items()})
    slim = OPTIMIZERS[optimizer_name](small.parameters())
    for (name, old), new in zip(dense.named_parameters(), small.parameters(), strict=True):
        for key, value in optimizer.state[old].items():
            slim.state[new][key] = cut_by_hand(name, value, first, second) if value.dim() else value.clone()
    train(small, slim, 2)
    return small


@pytest.mark.parametrize("importance", ["feature_rank", "magnitude"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_on_as_a_network_built_small(optimizer: str, importance: Any) -> None:
    module = Classifier(optimizer)
    before = list(module.parameters())
    callback = FilterPruning(0.4, prune_epoch=2, importance=importance)
    trainer = fit(module, callback)
    expected = by_hand(optimizer, importance)
    for (name, mine), theirs in zip(module.net.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-6), name
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
    assert trainer.callback_metrics["prune/rate"] == pytest.approx((2 + 3) / 14)
    assert trainer.callback_metrics["prune/parameters"] == (9 * 4 + 4) + 2 * 4 + (4 * 4 * 5 + 5) + (20 * 3 + 3)
    assert callback.widths == {"net.0": 6, "net.4": 8}
    assert len(plans_of(module)) == 1


def test_each_of_two_prunings_reports_its_own_rate() -> None:
    trainer = fit(Classifier(), [FilterPruning(0.4, prune_epoch=0), MagnitudePruning(0.5, prune_epoch=0)], epochs=1)
    weights = (9 * 4 + 4) + (4 * 4 * 5 + 5) + (20 * 3 + 3)
    assert trainer.callback_metrics["prune/rate"] == pytest.approx((2 + 3) / 14)
    assert trainer.callback_metrics["prune/rate_2"] == pytest.approx((weights // 2 + 1) / weights)
    assert trainer.callback_metrics["prune/kept"] == weights // 2 - 1 + 2 * 4


@pytest.mark.parametrize("saved_after", [1, 3])
def test_resumes_before_and_after_pruning_to_the_same_result(saved_after: int, tmp_path: Path) -> None:
    whole = Classifier()
    uninterrupted = FilterPruning(0.4, prune_epoch=2)
    fit(whole, uninterrupted)
    trainer = fit(Classifier(), FilterPruning(0.4, prune_epoch=2), epochs=saved_after)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    resumed, callback = Classifier(), FilterPruning(0.4, prune_epoch=2)
    L.Trainer(max_epochs=4, callbacks=callback, **QUIET).fit(resumed, loader(), ckpt_path=tmp_path / "saved.ckpt")
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert callback.widths == uninterrupted.widths
    assert {n: k.tolist() for n, k in callback.filters.items()} == {
        n: k.tolist() for n, k in uninterrupted.filters.items()
    }


def test_a_pruned_checkpoint_is_small_and_loads_everywhere(tmp_path: Path) -> None:
    dense = fit(Classifier(), epochs=1)
    dense.save_checkpoint(tmp_path / "dense.ckpt")
    module = Classifier()
    trainer = fit(module, FilterPruning(0.4, prune_epoch=0), epochs=1)
    trainer.save_checkpoint(tmp_path / "pruned.ckpt")
    sizes = [
        sum(x.numel() for x in torch.load(tmp_path / name, weights_only=True)["state_dict"].values())
        for name in ("dense.ckpt", "pruned.ckpt")
    ]
    assert sizes[1] < 0.6 * sizes[0]
    images = samples()[0]
    expected = module.eval()(images)

    loss = F.cross_entropy(expected, samples()[1]).item()
    for stage in ("validate", "test"):
        fresh = Classifier()
        evaluation = L.Trainer(callbacks=FilterPruning(), **QUIET)
        (metrics,) = getattr(evaluation, stage)(
            fresh, DataLoader(TensorDataset(*samples()), batch_size=30), ckpt_path=tmp_path / "pruned.ckpt"
        )
        assert metrics["val/loss"] == pytest.approx(loss, rel=1e-5)
        assert torch.equal(fresh.eval()(images), expected)
    with pytest.raises(RuntimeError, match="size mismatch"):  # without the callback the module stays dense
        L.Trainer(**QUIET).test(Classifier(), loader(), ckpt_path=tmp_path / "pruned.ckpt", verbose=False)

    loaded = load_pruned(Classifier, tmp_path / "pruned.ckpt", optimizer="momentum")
    assert type(loaded) is Classifier
    assert loaded.optimizer == "momentum"
    assert torch.equal(loaded.eval()(images), expected)
    assert torch.equal(load_pruned(Classifier, tmp_path / "dense.ckpt").net[0].weight, dense.model.net[0].weight)  # type: ignore[union-attr]

    class Mixed(Prunable, Classifier):
        pass

    assert torch.equal(Mixed.load_from_checkpoint(tmp_path / "pruned.ckpt").eval()(images), expected)

    trainer.test(module, loader(), ckpt_path=tmp_path / "dense.ckpt", verbose=False)  # dense again
    assert torch.equal(module.net[0].weight, dense.model.net[0].weight)  # type: ignore[union-attr]
    assert plans_of(module) == []


def test_the_best_of_several_checkpoints_is_tested_whatever_its_size(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, monitor="prune/rate", mode="min")
    module = Classifier()
    trainer = fit(module, [FilterPruning(0.4, prune_epoch=1), keeper], epochs=2, enable_checkpointing=True)
    assert (tmp_path / "epoch=1.ckpt").stat().st_size < (tmp_path / "epoch=0.ckpt").stat().st_size
    assert keeper.best_model_path.endswith("epoch=0.ckpt")
    trainer.test(module, loader(), ckpt_path="best", verbose=False)
    assert module.net[0].weight.shape[0] == 6  # type: ignore[union-attr]


def test_a_resumed_training_tests_a_checkpoint_from_before_its_pruning(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    fit(Classifier(), [FilterPruning(0.4, prune_epoch=1), keeper], epochs=2, enable_checkpointing=True)
    module = Classifier()
    trainer = L.Trainer(max_epochs=3, callbacks=FilterPruning(0.4, prune_epoch=1), **QUIET)
    trainer.fit(module, loader(), ckpt_path=tmp_path / "epoch=1.ckpt")
    for epoch, width in ((0, 6), (1, 4), (0, 6)):
        trainer.test(module, loader(), ckpt_path=tmp_path / f"epoch={epoch}.ckpt", verbose=False)
        assert module.net[0].weight.shape[0] == width  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "make", [lambda: FilterPruning(0.4, prune_epoch=0), lambda: AdaptivePruning(0, rate_mode="fixed", rate=0.5)]
)
def test_the_callback_of_a_failed_training_loads_pruned_weights_into_another_module(make: Any, tmp_path: Path) -> None:
    class Fails(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("simulated failure")

    pruned, callback, module = Classifier(), make(), Classifier()
    fit(pruned, make(), epochs=1).save_checkpoint(tmp_path / "pruned.ckpt")
    with pytest.raises(RuntimeError, match="simulated failure"):
        fit(Fails(), callback)
    trainer = L.Trainer(max_epochs=1, callbacks=callback, **QUIET)
    trainer.fit(module, loader(), ckpt_path=tmp_path / "pruned.ckpt")
    assert module.net[0].weight.shape == pruned.net[0].weight.shape  # type: ignore[union-attr]
    assert len(module.net[0].weight) < 6  # type: ignore[arg-type]


def test_an_image_classifier_loads_from_its_pruned_checkpoint(tmp_path: Path) -> None:
    model = ImageClassifier("lenet5", num_classes=3)
    x = torch.randn(6, 3, 32, 32)
    trainer = L.Trainer(max_epochs=1, callbacks=FilterPruning({"network.conv2": 0.5}, prune_epoch=0), **QUIET)
    trainer.fit(model, DataLoader(TensorDataset(x, torch.arange(6) % 3), batch_size=3))
    trainer.save_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert loaded.network.conv2.weight.shape == (8, 6, 5, 5)  # type: ignore[union-attr]
    assert loaded.network.fc1.in_features == 8 * 25  # type: ignore[union-attr]
    assert torch.equal(loaded.eval()(x), model.eval()(x))
    # Other differences between network and checkpoint still raise the usual error.
    with pytest.raises(RuntimeError, match="size mismatch"):
        ImageClassifier.load_from_checkpoint(tmp_path / "model.ckpt", num_classes=4)


def test_rate_zero_changes_nothing() -> None:
    plain, pruned = Classifier(), Classifier()
    torch.manual_seed(7)
    fit(plain, shuffle=True)
    torch.manual_seed(7)
    trainer = fit(pruned, FilterPruning(0.0, prune_epoch=1, every_n_epochs=1), shuffle=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), pruned.parameters(), strict=True))
    assert plans_of(pruned) == []
    assert trainer.callback_metrics["prune/rate"] == 0


def test_prunes_again_and_remembers_the_first_filters() -> None:
    module = Classifier("momentum")
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)  # type: ignore[method-assign]
    before = module.net[0].weight.detach().clone()  # type: ignore[union-attr]
    callback = FilterPruning(0.3, prune_epoch=1, every_n_epochs=2, importance="magnitude")
    fit(module, callback, epochs=4)
    kept = callback.filters["net.0"]
    assert len(kept) == 4  # 6 − ⌊0.3 · 6⌋ = 5, then 5 − ⌊0.3 · 5⌋ = 4
    assert torch.equal(module.net[0].weight, before[kept])  # type: ignore[union-attr]
    norms = [float(w.abs().sum()) for w in before]
    assert kept.tolist() == best(norms, 4)


def test_the_last_filter_of_a_layer_stays() -> None:
    module = Classifier()
    callback = FilterPruning({"net.0": 0.9}, prune_epoch=0, every_n_epochs=1, importance="magnitude")
    fit(module, callback, epochs=3)
    assert {name: len(kept) for name, kept in callback.filters.items()} == {"net.0": 1}
    assert module.net[4].weight.shape == (8, 1, 2, 2)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "make",
    [
        lambda: FilterPruning(0.9, prune_epoch=0, every_n_epochs=1, importance="magnitude"),
        lambda: AdaptivePruning(0, every_n_epochs=1, rate_mode="fixed", rate=0.95),
    ],
)
def test_a_network_of_one_filter_a_layer_resumes(make: Any, tmp_path: Path) -> None:
    fit(pruned := Classifier(), make(), epochs=3).save_checkpoint(tmp_path / "pruned.ckpt")
    assert [len(pruned.net[layer].weight) for layer in (0, 4)] == [1, 1]  # type: ignore[arg-type]
    resumed = Classifier()
    trainer = L.Trainer(max_epochs=4, callbacks=make(), **QUIET)
    trainer.fit(resumed, loader(), ckpt_path=tmp_path / "pruned.ckpt")
    fit(whole := Classifier(), make(), epochs=4)
    assert all(torch.equal(x, whole.state_dict()[name]) for name, x in resumed.state_dict().items())


def test_keeps_the_memory_format() -> None:
    module = Classifier().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    trainer = fit(module, FilterPruning(0.4, prune_epoch=1), epochs=2)
    weight = module.net[4].weight
    assert weight.shape == (5, 4, 2, 2)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert trainer.optimizers[0].state[weight]["exp_avg"].shape == weight.shape


def test_samples_of_the_server_come_before_training_samples() -> None:
    x, y = samples()
    data = Arrays(train=(x, y), test=(x, y), num_clients=2, client_fraction=0.8, server_fraction=0.2, batch_size=5)
    seen = {}

    class Look(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen["images"] = calibration_images(trainer, 3, 2)

    L.Trainer(max_epochs=1, callbacks=Look(), **QUIET).fit(Classifier(), datamodule=data)
    held = data.train.stored(data.server_indices)[0]
    assert torch.equal(torch.cat(seen["images"]), held[:3])
    pooled = Arrays(train=(x, y), test=(x, y), num_clients=2, batch_size=5)
    L.Trainer(max_epochs=1, callbacks=Look(), **QUIET).fit(Classifier(), datamodule=pooled)
    assert [len(images) for images in seen["images"]] == [2, 1]


def test_a_data_set_of_whole_batches_is_read_as_it_is() -> None:
    """Without automatic batching the items of a data set are batches already."""
    images, labels = samples()
    batches = [(images[start : start + 8], labels[start : start + 8]) for start in (0, 8)]
    pruning = FilterPruning(0.5, prune_epoch=0, num_batches=1, batch_size=4)
    trainer = L.Trainer(max_epochs=1, callbacks=pruning, **QUIET)
    trainer.fit(Classifier(), DataLoader(batches, batch_size=None))
    assert [len(kept) for kept in pruning.filters.values()] == [3, 4]
    assert [len(x) for x in calibration_images(trainer, num_samples=10, batch_size=4)] == [4, 4, 2]


def test_samples_that_a_sampler_holds_out_are_not_read() -> None:
    images = torch.arange(16.0)[:, None]
    loader = DataLoader(TensorDataset(images), 4, sampler=SubsetRandomSampler(range(12)))
    trainer: Any = SimpleNamespace(train_dataloader=loader)
    drawn = sources_of(trainer)[0].batch(16, np.random.default_rng(0))[0]
    reread = torch.cat([batch[0] for batch in _reread(loader, 4)])
    assert sorted(drawn.flatten().tolist()) == sorted(reread.flatten().tolist()) == list(range(12))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return zip(*samples(), strict=True)


def test_a_stream_is_read_as_it_comes() -> None:
    module = Classifier()
    trainer = L.Trainer(max_epochs=1, callbacks=FilterPruning(0.4, prune_epoch=0), **QUIET)
    trainer.fit(module, DataLoader(Stream(), batch_size=10))
    assert module.net[0].weight.shape[0] == 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"rate": 1.0}, r"every layer loses, must lie in \[0, 1\), got 1.0"),
        ({"rate": -0.1}, "got -0.1"),
        ({"rate": {"net.0": 1.5}}, r"net.0 loses, must lie in \[0, 1\), got 1.5"),
        ({"importance": "feature_ranks"}, "importance 'feature_ranks' is unknown; did you mean 'feature_rank'"),
        ({"prune_epoch": -1}, "at least 0, got -1"),
        (
            {"every_n_epochs": 0},
            "every_n_epochs, unless it is None to prune once, must be a whole number of at least 1, got 0",
        ),
        ({"num_batches": 0}, "num_batches must be a whole number of at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        FilterPruning(**arguments)


def test_what_cannot_be_pruned_is_said_before_training() -> None:
    with pytest.raises(UserError, match=r"'net\.5' is not a convolution of this network; did you mean 'net\.[04]'"):
        fit(Classifier(), FilterPruning({"net.5": 0.3}, prune_epoch=1))
    linear = Classifier()
    linear.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(UserError, match="no layer of Classifier can lose filters"):
        fit(linear, FilterPruning(0.3, prune_epoch=1))
    try:
        with pytest.raises(UserError, match="inside DDPStrategy"):
            fit(Classifier(), FilterPruning(0.3, prune_epoch=1), strategy="ddp", devices=1)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("pruning", "averaging", "federated"),
    [
        (FilterPruning(0.3, prune_epoch=1), EMAWeightAveraging(), False),
        (FilterPruning(0.3, prune_epoch=1), EMAWeightAveraging(), True),
        (FilterPruning(0.3, prune_epoch=1), StochasticWeightAveraging(1e-2), False),
        (AdaptivePruning(prune_epoch=1), WeightAveraging(), False),
        (AdaptivePruning(prune_epoch=1), WeightAveraging(), True),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else type(value).__name__,
)
def test_averaged_weights_are_refused_before_training(
    pruning: L.Callback, averaging: L.Callback, federated: bool, tmp_path: Path
) -> None:
    sentence = (
        f"{type(pruning).__name__} cannot remove filters from the averaged weights that {type(averaging).__name__}"
    )
    module = Classifier()
    before = copy.deepcopy(module.state_dict())
    flags: dict[str, Any] = {"callbacks": [averaging, pruning], "default_root_dir": tmp_path, **QUIET}
    trainer = (
        FederatedTrainer(max_rounds=2, clients_per_round=2, **flags) if federated else L.Trainer(max_epochs=2, **flags)
    )
    data = Arrays(train=samples(), test=samples(), num_clients=2, batch_size=5)
    with pytest.raises(UserError, match=sentence):
        trainer.fit(module, data)
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())


def test_averaged_weights_are_allowed_without_a_pruning_and_after_one() -> None:
    module = Classifier()
    fit(module, [FilterPruning(0.4, prune_epoch=5), EMAWeightAveraging()], epochs=2)
    fit(module, [FilterPruning(0.4, prune_epoch=0)], epochs=1)
    fit(module, [EMAWeightAveraging()], epochs=1)
    assert module.net[0].weight.shape[0] == 4  # type: ignore[union-attr]


def test_a_pruning_after_the_end_is_reported() -> None:
    with pytest.warns(UserWarning, match="after 30 epochs, but the run ends after 2 epochs"):
        fit(Classifier(), FilterPruning(0.3), epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", category=UserWarning)
        warnings.filterwarnings("ignore", ".*(does not have many workers|no `val_dataloader`).*")
        fit(Classifier(), FilterPruning(0.3, prune_epoch=1), epochs=2)


def test_a_federation_without_server_data_has_no_maps_to_judge_by(tmp_path: Path) -> None:
    data = Arrays(train=samples(), test=samples(), num_clients=2, batch_size=5)
    trainer = FederatedTrainer(
        max_rounds=2,
        clients_per_round=2,
        callbacks=FilterPruning(0.4, prune_epoch=1),
        default_root_dir=tmp_path,
        **QUIET,
    )
    with pytest.raises(UserError, match="give the data a server_fraction above 0, or use importance 'magnitude'"):
        trainer.fit(Classifier(), data)


@pytest.mark.parametrize("filters_first", [True, False])
@pytest.mark.parametrize("federated", [False, True])
def test_masks_are_cut_with_the_network(filters_first: bool, federated: bool, tmp_path: Path) -> None:
    """Test both orders, and both prunings before the same epoch."""
    seen: list[tuple[bool, bool]] = []

    class Look(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            masks, parameters = masks_of(pl_module), dict(pl_module.named_parameters())
            assert all(mask.shape == parameters[name].shape for name, mask in masks.items())
            assert all(not parameters[name][~mask].any() for name, mask in masks.items())
            seen.append((bool(masks), len(parameters["net.0.weight"]) == 4))

    cut, masked = (1, 2) if filters_first else (2, 1)
    prunings = [
        FilterPruning(0.4, prune_epoch=cut, importance="magnitude"),
        MagnitudePruning(0.3, prune_epoch=masked, every_n_epochs=1),
    ]
    callbacks = [*(prunings if filters_first else prunings[::-1]), Look()]
    module = Classifier("momentum")
    if federated:
        data = Arrays(train=samples(), test=samples(), num_clients=2, batch_size=5)
        FederatedTrainer(
            max_rounds=4, clients_per_round=2, callbacks=callbacks, default_root_dir=tmp_path, **QUIET
        ).fit(module, data)
    else:
        fit(module, callbacks)
    assert seen == [(epoch >= masked, epoch >= cut) for epoch in range(4)]


class Named(Classifier):
    """Module whose batches are dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(1, 1, 8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch["image"], batch["label"]), batch_idx)


class Weighted(Classifier):
    """Module whose forward takes two parts of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = (torch.zeros(1, 1, 8, 8), torch.ones(1, 1))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return self.net(x) * weight


@pytest.mark.parametrize(("kind", "sentence"), [(Named, "got dict; FilterPruning with"), (Weighted, "does not take: ")])
@pytest.mark.parametrize("pruning", [FilterPruning, AdaptivePruning])
def test_images_that_cannot_be_ranked_are_refused_before_the_training(kind: Any, sentence: str, pruning: Any) -> None:
    images, labels = torch.rand(6, 1, 8, 8), torch.arange(6) % 3
    batches = [{"image": image, "label": label} for image, label in zip(images, labels, strict=True)]
    data = DataLoader(batches if kind is Named else TensorDataset(images, labels), batch_size=3)
    trainer = L.Trainer(max_epochs=2, callbacks=pruning(prune_epoch=1), **QUIET)
    with pytest.raises(UserError, match=sentence):
        trainer.fit(kind(), data)
    assert trainer.global_step == 0


@pytest.mark.parametrize("pruning", [FilterPruning, AdaptivePruning])
@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (torch.optim.LBFGS, "LBFGS keeps it in vectors for the whole network: use another"),
        (torch.optim.Adafactor, "Adafactor keeps it by row and column: use another"),
    ],
)
def test_an_optimiser_without_state_of_single_weights_is_refused(pruning: Any, optimizer: Any, said: str) -> None:
    class Own(Classifier):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters())

    trainer = L.Trainer(max_epochs=2, callbacks=pruning(prune_epoch=1), **QUIET)
    with pytest.raises(UserError, match=said):
        trainer.fit(Own(), loader())
    assert trainer.global_step == 0


def test_state_of_another_shape_is_refused_before_anything_is_cut() -> None:
    net = small_network()
    optimizer = torch.optim.Adafactor(net.parameters())
    net(torch.rand(2, 1, 8, 8)).sum().backward()
    optimizer.step()
    shapes = [p.shape for p in net.parameters()]
    plan = plan_for(net, {"0": [1, 2]}, torch.rand(1, 1, 8, 8))
    with pytest.raises(
        UserError, match=r"'\w+.weight' cannot lose filters, because Adafactor keeps its '\w+' in another"
    ):
        prune(net, plan, [optimizer])
    assert [p.shape for p in net.parameters()] == shapes
