"""Test that the classes of `pytorch_lightning`, which are those of `lightning.pytorch` under another name, are accepted alike."""

import copy
import csv
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toys import samples

from lightning_fl import UserError
from lightning_fl.algorithms import Ditto, FedAvg, FedLDF
from lightning_fl.checks import is_a, overrides
from lightning_fl.data import Federated

LOG = rank_zero.log
pl = pytest.importorskip("pytorch_lightning")
from pytorch_lightning import callbacks as pl_callbacks  # noqa: E402

rank_zero.log = LOG  # which both packages set to a logger of their own


def classes(lightning: Any) -> tuple[type, type, type]:
    """Return a module, a data module and a callback, written for one of the two names of Lightning."""

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(0)
            self.net = nn.Linear(3, 2)
            self.seen: list[str] = []

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = (self(batch[0]) - batch[1]).square().mean()
            self.log("train_loss", loss, on_epoch=True, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", self.training_step(batch, batch_idx))
            self.log("val/accuracy", ((self(batch[0]) > 0) == (batch[1] > 0)).double().mean())

        def on_train_epoch_start(self) -> None:
            self.seen.append(f"{self.current_epoch} {self.global_step} {len(self.trainer.callbacks) > 0}")

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}

        def configure_callbacks(self) -> Any:
            return lightning.callbacks.EarlyStopping("val/loss", patience=9)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = 7

    class Data(lightning.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.stages: list[Any] = []

        def setup(self, stage: Any = None) -> None:
            self.stages.append(stage)

        def train_dataloader(self) -> DataLoader:
            return DataLoader(TensorDataset(*samples(14)), batch_size=4)

        def val_dataloader(self) -> DataLoader:
            return DataLoader(TensorDataset(*samples(6)), batch_size=4)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] / 2, batch[1]]

        def state_dict(self) -> dict[str, Any]:
            return {"stages": self.stages}

    class Counting(lightning.Callback):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.calls.append(f"{trainer.state.fn} {trainer.current_epoch} {type(pl_module).__name__}")

    return Module, Data, Counting


def fit(lightning: Any, make_trainer: MakeTrainer, folder: Path, flags: dict[str, Any], **options: Any) -> Any:
    module, data, counting = (kind() for kind in classes(lightning))
    parts = {
        "callbacks": [
            counting,
            lightning.callbacks.ModelCheckpoint(monitor="val/loss", save_top_k=1),
            lightning.callbacks.LearningRateMonitor(),
            lightning.callbacks.ModelSummary(),
        ],
        "logger": lightning.loggers.CSVLogger(folder),
        "enable_checkpointing": True,
        "default_root_dir": folder,
        **flags,
    }
    method = parts.pop("method", FedAvg)
    trainer = make_trainer(**{"max_rounds": 3, "clients_per_round": 2, **parts})
    trainer.fit(module, Federated(data, num_clients=3), method(), **options)
    return trainer, module, counting


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_both_names_train_alike(runner: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    found = [fit(name, make_trainer, tmp_path / name.__name__, {"runner": runner}) for name in (L.pytorch, pl)]
    (ours, module, counting), (theirs, other, others) = found
    for name, value in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    assert module.seen == other.seen
    assert counting.calls == others.calls
    assert theirs.callback_metrics == ours.callback_metrics
    assert [c for c in theirs.callbacks if isinstance(c, pl_callbacks.ModelCheckpoint)] == theirs.checkpoint_callbacks
    assert Path(theirs.checkpoint_callback.best_model_path).name == Path(ours.checkpoint_callback.best_model_path).name
    assert isinstance(theirs.early_stopping_callback, pl_callbacks.EarlyStopping)
    assert len(theirs.early_stopping_callbacks) == 1
    loaded = type(other).load_from_checkpoint(tmp_path / pl.__name__ / "model.ckpt")
    assert torch.equal(loaded.net.weight, other.net.weight)
    assert theirs.validate(other, theirs.datamodule, verbose=False)
    assert not isinstance(other, L.LightningModule), "the classes stay as they are"
    assert list(tmp_path.glob("**/lightning_logs/version_0/metrics.csv")), "its logger writes"


@pytest.mark.parametrize("make_method", [FedAvg, lambda: FedLDF(n=1), Ditto], ids=["FedAvg", "FedLDF", "Ditto"])
def test_runs_resume(make_method: Any, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    flags = {"method": make_method, "logger": True}
    _, whole, _ = fit(pl, make_trainer, tmp_path / "whole", flags)
    fit(pl, make_trainer, tmp_path / "half", flags | {"max_rounds": 2})
    trainer, resumed, _ = fit(pl, make_trainer, tmp_path / "half", flags, ckpt_path="last")
    assert trainer.run.round == 3
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value)


def test_hooks_are_those_that_a_class_overrides() -> None:
    for name in (L, pl):
        module, data, counting = (kind() for kind in classes(name))
        assert [hook for hook in ("training_step", "test_step", "backward") if overrides(hook, module)] == [
            "training_step"
        ]
        assert [hook for hook in ("setup", "teardown") if overrides(hook, data)] == ["setup"]
        assert [hook for hook in ("on_fit_start", "on_train_epoch_end") if overrides(hook, counting)] == [
            "on_train_epoch_end"
        ]
        assert is_a(module, L.LightningModule)
        assert is_a(data, L.LightningDataModule, L.LightningModule)
        assert not is_a(data, L.LightningModule)
        assert is_a(name.pytorch.callbacks.Timer() if name is L else pl_callbacks.Timer(), L.Callback)
    assert not is_a(nn.Linear(1, 1), L.LightningModule)


def test_what_is_refused_is_refused_under_either_name(make_trainer: MakeTrainer) -> None:
    _, data, _ = classes(pl)
    with pytest.raises(UserError, match="BatchSizeFinder tries batch sizes"):
        make_trainer(callbacks=pl_callbacks.BatchSizeFinder())
    with pytest.raises(UserError, match="model must be a LightningModule, got Linear"):
        make_trainer().fit(nn.Linear(1, 1), Federated(data(), num_clients=2))
    with pytest.raises(UserError, match=r"datamodule must be a FederatedDataModule, got Data: .*Federated"):
        make_trainer().fit(classes(pl)[0](), data())

    class Clipping(classes(pl)[0]):  # type: ignore[misc]
        def configure_gradient_clipping(self, *arguments: Any, **options: Any) -> None:
            pass

    with pytest.raises(UserError, match="it overrides configure_gradient_clipping"):
        make_trainer(runner="serial", clients_per_round=2).fit(Clipping(), Federated(data(), num_clients=2))
    with pytest.raises(
        UserError, match=r"trains modules of lightning\.pytorch, and Clipping is one of pytorch_lightning"
    ):
        make_trainer(clients_per_round=2).fit(Clipping(), Federated(data(), num_clients=2))


def test_children_of_the_other_name_know_the_trainer(make_trainer: MakeTrainer) -> None:
    """A module of one name may hold modules of the other."""
    inner, data, _ = classes(pl)

    class Outer(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.inner(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    before = copy.deepcopy(module := Outer()).state_dict()
    trainer = make_trainer(max_rounds=1)
    trainer.fit(module, Federated(data(), num_clients=3))
    assert module.inner.trainer is trainer
    assert not torch.equal(module.inner.net.weight, before["inner.net.weight"])


def test_the_command_line_says_what_to_do(tmp_path: Path, lightning_fl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_other_name.py").write_text(
        "import pytorch_lightning as pl\nclass Own(pl.LightningModule): ...\nclass OwnData(pl.LightningDataModule): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    outcome = lightning_fl("fit", "--model", "of_other_name.Own", "--data", "Digits")
    assert outcome.code == 2
    assert (
        "of pytorch_lightning, which FederatedTrainer accepts in Python, but the command line does not" in outcome.err
    )


class Recorder:
    """Logger of no class of Lightning, which takes any object with these methods."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        self.rows.append((step, metrics))

    def log_hyperparams(self, params: Any) -> None: ...

    def log_graph(self, model: Any) -> None: ...

    def save(self) -> None: ...

    def finalize(self, status: str) -> None: ...


def test_loggers_of_any_class_get_the_rounds(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Loggers of `pytorch_lightning`, and of no class of Lightning's, get what those of `lightning.pytorch` get."""
    module, data, _ = classes(pl)
    recorder = Recorder()
    files = [lightning.loggers.CSVLogger(tmp_path / name) for lightning, name in ((L.pytorch, "one"), (pl, "other"))]
    make_trainer(max_rounds=2, clients_per_round=2, logger=[*files, recorder]).fit(
        module(), Federated(data(), num_clients=2)
    )
    one, other = (list(csv.DictReader(Path(each.log_dir, "metrics.csv").read_text().splitlines())) for each in files)
    assert one == other
    assert [row["step"] for row in one] == [str(step) for step, _ in recorder.rows]
    assert len(one) == 2
    assert [float(row["val/loss"]) for row in one] == [metrics["val/loss"] for _, metrics in recorder.rows]
