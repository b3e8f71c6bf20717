"""Test adaptive pruning in a stock `L.Trainer`: the rate, the filters, the epochs, and no other changes."""

from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import BaseFinetuning
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_fl import UserError
from lightning_fl.callbacks import AdaptivePruning
from lightning_fl.data import Arrays
from lightning_fl.pruning import SourceRate, TrainingLoss


class Classifier(L.LightningModule):
    """Module (B, 1, 8, 8) → (B, 3)."""

    def __init__(self, lr: float = 0.1, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.example_input_array = torch.zeros(1, 1, 8, 8)
        self.net = nn.Sequential(
            nn.Conv2d(1, 6, 3),
            nn.ReLU(),
            nn.Conv2d(6, 4, 3),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(64, 3),
        )
        self.lr = lr
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch_idx)
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.rand(40, 1, 8, 8, generator=generator), torch.randint(0, 3, (40,), generator=generator))


def fit(module: Classifier, *callbacks: L.Callback, epochs: int = 2, data: Any = None, **options: Any) -> L.Trainer:
    L.seed_everything(3)
    trainer = L.Trainer(max_epochs=epochs, callbacks=list(callbacks), **{**QUIET, **options})
    trainer.fit(module, DataLoader(samples(), batch_size=8, shuffle=True) if data is None else data)
    return trainer


def widths(module: Classifier) -> list[int]:
    return [module.net[0].weight.shape[0], module.net[2].weight.shape[0], module.net[6].weight.shape[1]]


def test_filters_of_a_fixed_rate_by_hand():
    module, rate = Classifier(lr=0.0), 0.5
    dense = {name: x.clone() for name, x in module.state_dict().items()}
    trainer = fit(module, AdaptivePruning(prune_epoch=1, rate_mode="fixed", rate=rate, rank_samples=40))
    values = np.sort(np.concatenate([np.abs(x.numpy()).ravel() for x in dense.values()]))
    threshold = values[int(len(values) * rate) - 1]
    assert trainer.callback_metrics["prune/rate"] == rate
    assert float(trainer.callback_metrics["prune/threshold"]) == threshold
    whole = Classifier()
    whole.load_state_dict(dense)
    kept, maps = {}, samples().tensors[0]
    with torch.no_grad():
        for place in (0, 2):
            weight = dense[f"net.{place}.weight"].numpy()
            share = (np.abs(weight) < threshold).sum() / weight.size
            assert float(trainer.callback_metrics[f"prune/rate/net.{place}"]) == pytest.approx(share)
            maps = whole.net[place](maps).relu()
            ranks = [np.mean([np.linalg.matrix_rank(image[j].numpy()) for image in maps]) for j in range(len(weight))]
            order = sorted(range(len(weight)), key=lambda j: (ranks[j], j))
            kept[place] = sorted(order[int(share * len(weight)) :])
    assert 0 < len(kept[0]) < 6
    assert 0 < len(kept[2]) < 4
    columns = [channel * 16 + position for channel in kept[2] for position in range(16)]
    expected = {
        "net.0.weight": dense["net.0.weight"][kept[0]],
        "net.0.bias": dense["net.0.bias"][kept[0]],
        "net.2.weight": dense["net.2.weight"][kept[2]][:, kept[0]],
        "net.2.bias": dense["net.2.bias"][kept[2]],
        "net.6.weight": dense["net.6.weight"][:, columns],
        "net.6.bias": dense["net.6.bias"],
    }
    found = module.state_dict()
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


def test_rate_is_that_of_the_training_data():
    class Spy(AdaptivePruning):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                loss = TrainingLoss(pl_module)
                rng = np.random.default_rng([3, 1, 0])
                rows = rng.choice(40, 16, replace=False)
                x, y = samples().tensors
                curvature = loss.curvature((x[rows], y[rows]))
                generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
                self.expected = SourceRate(steps=6)(curvature, loss.point, None, generator)
            super().on_train_epoch_start(trainer, pl_module)

    pruning = Spy(prune_epoch=1, batch_size=16, lanczos_steps=6)
    trainer = fit(Classifier(), pruning)
    assert float(trainer.callback_metrics["prune/rate"]) == pytest.approx(pruning.expected)
    assert trainer.callback_metrics["prune/sources"] == 1
    assert trainer.callback_metrics["prune/nonfinite_sources"] == 0
    assert pruning.asked == []


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_asking_changes_nothing(curvature):
    asked, plain = Classifier(dropout=0.3), Classifier(dropout=0.3)
    fit(asked, AdaptivePruning(prune_epoch=1, curvature=curvature, lanczos_steps=4, max_rate=0.0), epochs=3)
    fit(plain, epochs=3)
    for name, x in plain.state_dict().items():
        assert torch.equal(asked.state_dict()[name], x), name
    assert asked.seen == plain.seen
    assert asked.training


def test_it_prunes_once_before_the_training_of_its_epoch():
    class Widths(L.Callback):
        def __init__(self):
            self.found: list[list[int]] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
            if trainer.is_last_batch or batch[-1] == 0:
                self.found.append(widths(pl_module))

    seen = Widths()
    fit(Classifier(), AdaptivePruning(prune_epoch=1, rate_mode="fixed", rate=0.6), seen, epochs=4)
    assert seen.found[:2] == [[6, 4, 64]] * 2
    assert seen.found[2] != [6, 4, 64]
    assert seen.found[2:] == [seen.found[2]] * 6


@pytest.mark.matrix
def test_gap_knows_the_initial_model_also_after_a_resumption(tmp_path):
    def pruning():
        return AdaptivePruning(prune_epoch=2, rate_mode="gap", lanczos_steps=5)

    whole, first, second = (Classifier(lr=1e-4) for _ in range(3))
    trainer = fit(whole, pruning(), epochs=3, data=DataLoader(samples(), batch_size=8))
    half = fit(first, pruning(), epochs=1, data=DataLoader(samples(), batch_size=8))
    half.save_checkpoint(tmp_path / "half.ckpt")
    L.seed_everything(3)
    resumed = L.Trainer(max_epochs=3, callbacks=[pruning()], **QUIET)
    resumed.fit(second, DataLoader(samples(), batch_size=8), ckpt_path=tmp_path / "half.ckpt")
    for name, x in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], x), name
    assert resumed.callback_metrics["prune/rate"] == trainer.callback_metrics["prune/rate"] > 0


@pytest.mark.parametrize("prune_epoch", [1, 2])
def test_gap_knows_the_initial_model_of_layers_that_are_unfrozen_later(prune_epoch):
    class Thawing(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.1)

    module = Classifier()
    adaptive = AdaptivePruning(prune_epoch=prune_epoch, every_n_epochs=1, rate_mode="gap", lanczos_steps=3)
    fit(module, Thawing(), adaptive, epochs=3)
    assert module.net[0].weight.requires_grad


class HalfOfTheInitialModel(SourceRate):
    """Rate 0.5, of a model that has not moved from the initial one."""

    def __call__(self, curvature: Any, point: Any, initial: Any, generator: torch.Generator) -> float:
        assert all(torch.equal(now, before) for now, before in zip(point, initial, strict=True))
        return 0.5


@pytest.mark.parametrize("done", [2, 3])
def test_the_initial_model_follows_every_pruning_also_after_a_resumption(done, tmp_path):
    def pruning():
        callback = AdaptivePruning(prune_epoch=1, every_n_epochs=1, rate_mode="gap")
        callback.adaptive_rate.source_rate = HalfOfTheInitialModel("gap")
        return callback

    whole, first, second = (Classifier(lr=0.0) for _ in range(3))
    fit(whole, pruning(), epochs=5)
    fit(first, pruning(), epochs=done).save_checkpoint(tmp_path / "half.ckpt")
    resumed = L.Trainer(max_epochs=5, callbacks=[pruning()], **QUIET)
    resumed.fit(second, DataLoader(samples(), batch_size=8), ckpt_path=tmp_path / "half.ckpt")
    assert sum(widths(first)) > sum(widths(whole))
    assert widths(second) == widths(whole)


def test_what_is_not_finite_counts_as_zero():
    module = Classifier(lr=0.0)
    module.net[6].bias.data[0] = float("nan")
    trainer = fit(module, AdaptivePruning(prune_epoch=0, lanczos_steps=3), epochs=1)
    assert trainer.callback_metrics["prune/rate"] == 0
    assert trainer.callback_metrics["prune/nonfinite_sources"] == 1
    assert widths(module) == [6, 4, 64]


def test_other_loaders():
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter([samples()[i] for i in range(24)])

    module = Classifier()
    fit(module, AdaptivePruning(prune_epoch=0, lanczos_steps=3), data=DataLoader(Stream(), batch_size=8), epochs=1)
    images, labels = samples().tensors
    data = Arrays(train=(images, labels), test=(images, labels), num_clients=4)
    # A stock trainer pools the data of a federation into one source, and the order of training does not change.
    orders = []

    class Order(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.training:
                orders.append(batch[1].tolist())
            return super().training_step(batch, batch_idx)

    trainer = fit(Order(), AdaptivePruning(prune_epoch=0, lanczos_steps=3, max_rate=0.0), data=data, epochs=1)
    assert trainer.callback_metrics["prune/sources"] == 1
    again = Arrays(train=(images, labels), test=(images, labels), num_clients=4)
    fit(Order(), data=again, epochs=1)
    assert orders[: len(orders) // 2] == orders[len(orders) // 2 :]


def test_too_late_is_told():
    with pytest.warns(UserWarning, match="AdaptivePruning would prune after 2 epochs, but the run ends after 2 epochs"):
        fit(Classifier(), AdaptivePruning(prune_epoch=2, rate_mode="fixed", rate=0.5))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"prune_epoch": -1}, "prune_epoch, the epoch before which .* at least 0, got -1"),
        ({"rate_mode": "slq_platau"}, "rate_mode 'slq_platau' is unknown; did you mean 'slq_plateau'"),
        ({"rate_mode": "fixed"}, r"the rate that rate_mode='fixed' needs must lie in \[0, 1\), got None"),
        ({"rate_mode": "fixed", "rate": 1.0}, r"rate that rate_mode='fixed' needs must lie in \[0, 1\), got 1.0"),
        ({"rate_mode": "fixed", "rate": -0.1}, r"rate that rate_mode='fixed' needs must lie in \[0, 1\), got -0.1"),
        ({"rate": 0.3}, "rate=0.3 is for rate_mode='fixed'; 'slq_plateau' finds the rate itself"),
        ({"max_sources": 0}, "max_sources must be a whole number of at least 1, got 0"),
        ({"epsilon": 0.0}, "epsilon must be positive, got 0.0"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"rank_samples": 0}, "rank_samples must be a whole number of at least 1, got 0"),
        ({"curvature": "hesse"}, "curvature 'hesse' is unknown; did you mean 'hessian'"),
        ({"lanczos_steps": 1}, "lanczos_steps must be a whole number of at least 2, got 1"),
        ({"max_rate": 1.0}, r"max_rate must lie in \[0, 1\), got 1.0"),
    ],
)
def test_bad_values(options, sentence):
    with pytest.raises(UserError, match=sentence):
        AdaptivePruning(**options)


def test_what_cannot_be_pruned_is_refused_before_the_training():
    class Manual(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    class Flat(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    class WithoutSecondDerivative(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net.insert(1, nn.Hardsigmoid())

    for module, sentence in (
        (Manual(), "Manual steps its optimisers itself"),
        (Flat(), "no layer of Flat can lose"),
        (
            WithoutSecondDerivative(),
            "the loss of WithoutSecondDerivative cannot be differentiated twice: .*hardsigmoid",
        ),
    ):
        with pytest.raises(UserError, match=sentence):
            fit(module, AdaptivePruning(prune_epoch=1))
        assert module.seen == []
