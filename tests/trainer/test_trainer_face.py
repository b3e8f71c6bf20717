"""Test that modules and callbacks find on `FederatedTrainer` what they read on `lightning.Trainer`, with the same meaning."""

import copy
import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset
from toys import OnlyTrains, Perceptron, Served, federation, read_rows, samples, vector

from lightning_fl import UserError
from lightning_fl.algorithms import HybridFL
from lightning_fl.callbacks import CommunicationMeter, FilterPruning, TargetReached
from lightning_fl.data import Federated
from lightning_fl.outputs.last_checkpoint import LastCheckpoint
from lightning_fl.outputs.progress_bar import RoundProgressBar
from lightning_fl.trainer.lightning_parts import REFUSED_CALLBACKS

MakeStock = Callable[..., L.Trainer]


def public(trainer: Any) -> set[str]:
    return {name for name in dir(trainer) if not name.startswith("_")}


def test_every_public_name_of_lightnings_trainer_is_there(
    make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    trainer = make_trainer()
    assert isinstance(trainer, L.Trainer)
    assert {name for name in public(make_stock_trainer()) if not hasattr(trainer, name)} == set()


def test_other_names_are_refused_in_a_sentence(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    with pytest.raises(AttributeError, match=r"has no attribute 'curent_epoch'; did you mean 'current_epoch'\?$"):
        trainer.curent_epoch  # noqa: B018
    with pytest.raises(AttributeError, match=r"^FederatedTrainer has no attribute 'zzzzzz'\.$"):
        trainer.zzzzzz  # noqa: B018
    with pytest.raises(AttributeError, match="has no run before a fit has begun"):
        trainer.run  # noqa: B018
    copy.copy(trainer)


def test_settings_under_lightnings_names_take_effect_or_are_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1, val_every_n_rounds=2)
    for owner, name, value, flag in (
        (trainer.fit_loop, "max_epochs", 3, "max_rounds"),
        (trainer.fit_loop, "min_epochs", 2, "min_rounds"),
        (trainer.fit_loop.epoch_loop, "max_steps", 9, "max_steps"),
        (trainer.fit_loop.epoch_loop, "min_steps", 4, "min_steps"),
    ):
        setattr(owner, name, value)
        assert getattr(owner, name) == getattr(trainer, flag) == value
        with pytest.raises(UserError, match=f"^{flag} must be a whole number of at least -?[01], got -2"):
            setattr(owner, name, -2)
    trainer.fit_loop.epoch_loop.min_steps = None

    class Within(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            with pytest.raises(UserError, match=r"^max_rounds cannot change during a fit, got 9"):
                trainer.fit_loop.max_epochs = 9
            with pytest.raises(UserError, match=r"^max_rounds cannot change during a fit, got 9"):
                trainer.max_rounds = 9

    trainer.callbacks.append(Within())
    trainer.fit(Perceptron(), federation())
    assert trainer.run.round == 3
    assert (trainer.check_val_every_n_epoch, trainer.val_check_interval) == (2, 1.0)
    with pytest.raises(UserError, match=r"^check_val_every_n_epoch is a flag of .*: use val_every_n_rounds"):
        trainer.check_val_every_n_epoch = 1
    with pytest.raises(UserError, match=r"^val_check_interval is a flag of .*: use val_every_n_rounds"):
        trainer.val_check_interval = 0.5


SAME = (  # names whose value must be that of the stock trainer in every hook
    *("barebones", "check_val_every_n_epoch", "current_epoch", "device_ids", "distributed_sampler_kwargs"),
    *("enable_autolog_hparams", "enable_validation", "evaluating", "fast_dev_run"),
    *("global_step", "global_rank", "gradient_clip_val", "interrupted", "is_global_zero", "limit_predict_batches"),
    *(
        "limit_test_batches",
        "limit_train_batches",
        "limit_val_batches",
        "local_rank",
        "log_every_n_steps",
        "max_epochs",
    ),
    *("max_steps", "min_epochs", "node_rank", "num_devices", "num_nodes", "num_sanity_val_batches"),
    *("num_training_batches", "num_val_batches", "overfit_batches", "precision", "predicting", "received_sigterm"),
    *(
        "sanity_checking",
        "scaler",
        "should_stop",
        "testing",
        "training",
        "validating",
        "val_check_interval",
        "world_size",
    ),
)


class Reader(Callback):
    """Callback that reads the trainer in every hook."""

    def __init__(self) -> None:
        self.read: dict[str, list[dict[str, Any]]] = {}

    def note(self, hook: str, trainer: Any) -> None:
        read = {name: getattr(trainer, name) for name in SAME}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in read.items()}
        loaders = (trainer.train_dataloader, trainer.val_dataloaders)
        values["loaders"] = [None if loader is None else len(loader) for loader in loaders]
        loop = trainer.fit_loop
        values["batches"] = [
            loop.batch_idx,
            loop.total_batch_idx,
            loop._should_accumulate(),
            loop.epoch_loop.global_step,
        ]
        if hook in ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"):
            values["is_last_batch"] = trainer.is_last_batch
        self.read.setdefault(hook, []).append(values)


def _reads(hook: str) -> Callable[..., None]:
    def read(self: Reader, trainer: Any, *arguments: Any) -> None:
        self.note(hook, trainer)

    return read


HOOKS = ("train_batch_start", "before_optimizer_step", "train_batch_end", "validation_start", "validation_end")
for name in ("fit_start", "train_start", "train_epoch_start", *HOOKS, "train_epoch_end", "train_end", "fit_end"):
    setattr(Reader, f"on_{name}", _reads(f"on_{name}"))


class Validates(OnlyTrains):
    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*samples(10)), batch_size=4)


class ValidatesOnNothing(OnlyTrains):
    def val_dataloader(self) -> Any:
        return []


@pytest.mark.parametrize(
    ("data", "flags"),
    [
        (Validates, {}),
        (Validates, {"limit_val_batches": 0}),
        (Validates, {"accumulate_grad_batches": 2, "limit_train_batches": 3}),
        (OnlyTrains, {}),
        (ValidatesOnNothing, {}),
    ],
)
def test_one_client_with_all_data_reads_what_a_stock_trainer_reads(
    make_trainer: MakeTrainer, make_stock_trainer: MakeStock, data: type, flags: dict[str, Any]
) -> None:
    """Compare the values of all names in all hooks over three rounds of two batches and three epochs of two batches.

    A stock trainer reads them with the divided data, too.
    """
    ours, stock, divided = Reader(), Reader(), Reader()
    divided_data = Federated(data(), num_clients=1)
    make_trainer(max_rounds=3, clients_per_round=1, callbacks=ours, **flags).fit(Perceptron(), divided_data)
    make_stock_trainer(max_epochs=3, callbacks=stock, **flags).fit(Perceptron(), datamodule=data())
    make_stock_trainer(max_epochs=3, callbacks=divided, **flags).fit(Perceptron(), datamodule=divided_data)
    assert ours.read.keys() == stock.read.keys()
    assert divided.read == stock.read
    for hook, expected in stock.read.items():
        assert len(ours.read[hook]) == len(expected)
        for values, other in zip(ours.read[hook], expected, strict=True):
            if hook == "on_fit_start":  # Lightning loads its data only then
                counts = ("num_training_batches", "num_sanity_val_batches", "num_val_batches")
                for name in ("loaders", *counts, "enable_validation"):
                    other[name] = stock.read["on_train_start"][0][name]
            assert values == other, hook


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize("num_accumulated", [1, 2])
def test_the_loop_counts_the_batches_of_a_client(
    num_accumulated: int, runner: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """The clients have 1, 2, 1, 3, 3 and 2 batches, so that a round has three, one after the other, also in a resumed run."""
    seen: set[tuple[int, ...]] = set()

    class Records(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loop = self.trainer.fit_loop
            seen.add((self.current_epoch, loop.batch_idx, loop.total_batch_idx))
            return self.loss(batch)

    flags = {"clients_per_round": 6, "runner": runner, "accumulate_grad_batches": num_accumulated} | keeps_files
    make_trainer(max_rounds=2, **flags).fit(Records(), federation())
    assert seen == {(t, i, 3 * t + i) for t in range(2) for i in range(3)}
    last = tmp_path / "checkpoints" / "last.ckpt"
    make_trainer(max_rounds=3, **flags).fit(Records(), federation(), ckpt_path=last)
    assert {each for each in seen if each[0] == 2} == {(2, i, 6 + i) for i in range(3)}


def test_clients_that_train_at_once_share_no_end_of_accumulation(make_trainer: MakeTrainer) -> None:
    class Asks(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch) * (1 + self.trainer.fit_loop._should_accumulate())

    flags = {"clients_per_round": 2, "accumulate_grad_batches": 2, "max_rounds": 1}
    models = []
    for runner in ("serial", "stacked"):
        torch.manual_seed(0)
        module = Asks()
        make_trainer(runner=runner, **flags).fit(module, federation((12, 12)))
        models.append(vector(module))
    np.testing.assert_allclose(models[0], models[1], rtol=0, atol=1e-6)
    with pytest.raises(UserError, match=r"_should_accumulate\(\) differs between clients that train at once"):
        make_trainer(runner="stacked", **flags).fit(Asks(), federation((12, 6)))


def test_a_loader_may_be_set_up_outside_a_fit(make_trainer: MakeTrainer) -> None:
    trainer, module = make_trainer(), Perceptron()
    trainer.strategy.connect(module)
    loader = DataLoader(TensorDataset(*samples(10)), batch_size=4)
    trainer._data_connector.attach_data(module, train_dataloaders=loader)
    trainer.fit_loop.setup_data()
    assert trainer.num_training_batches == 3


def test_the_first_round_is_not_set_by_hand(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.fit_loop.epoch_progress.current.completed = 2
    with pytest.raises(
        UserError, match=r"^trainer.fit_loop.epoch_progress was set to 2, but a fit begins with round 0"
    ):
        trainer.fit(Perceptron(), federation())
    trainer.fit_loop.epoch_progress.current.completed = 0
    trainer.fit(Perceptron(), federation())


def recording(seen: dict[int, set[int]]) -> Perceptron:
    """Return a module that records the steps that it sees in the training of each round, and after it under -1."""

    class Records(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.setdefault(self.current_epoch, set()).add(self.global_step)
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            seen.setdefault(-1, set()).add(self.global_step)

    return Records()


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_the_global_step_counts_a_clients_own_steps(
    runner: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """The clients have 1, 2, 1, 3, 3 and 2 batches, so a round has three steps one after the other, and twelve in all."""
    seen: dict[int, set[int]] = {}
    flags = {"clients_per_round": 6, "runner": runner, **keeps_files}
    trainer = make_trainer(max_rounds=2, **flags)
    trainer.fit(recording(seen), federation())
    assert seen == {0: {0, 1, 2}, 1: {3, 4, 5}, -1: {12, 24}}
    trainer = make_trainer(max_rounds=3, **flags)
    trainer.fit(recording(seen), federation(), ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert seen[2] == {6, 7, 8}
    assert trainer.global_step == 36


def test_the_servers_training_goes_on_from_the_clients_steps(make_trainer: MakeTrainer) -> None:
    seen: dict[int, set[int]] = {}
    make_trainer(max_rounds=2, clients_per_round=6).fit(recording(seen), Served(20), HybridFL())
    assert seen[0] == {0, 1, 2} | {3 + step for step in range(5)}
    assert seen[1] == {3, 4, 5} | {6 + step for step in range(5)}


def test_an_annealing_schedule_reaches_its_end(make_trainer: MakeTrainer) -> None:
    """The share of the training that is done, computed as modules do, grows from 0 to the last step's share."""
    shares: list[float] = []

    class Anneals(Perceptron):
        def on_train_start(self) -> None:
            self.total = self.trainer.num_training_batches * self.trainer.max_epochs

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            shares.append(self.global_step / self.total)
            return self.loss(batch)

    make_trainer(max_rounds=4, clients_per_round=6).fit(Anneals(), federation())
    assert (min(shares), max(shares)) == (0, 11 / 12)


def test_checkpoints_keep_the_steps_of_all_clients_in_their_names(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    saves = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=12, save_top_k=-1)
    make_trainer(max_rounds=3, clients_per_round=6, callbacks=saves, **keeps_files).fit(Perceptron(), federation())
    files = {path.name for path in (tmp_path / "kept").iterdir()}
    assert files == {f"epoch={t}-step={12 * (t + 1)}.ckpt" for t in range(3)}
    for t in range(3):
        saved = torch.load(tmp_path / "kept" / f"epoch={t}-step={12 * (t + 1)}.ckpt", weights_only=True)
        assert (saved["epoch"], saved["global_step"]) == (t, 12 * (t + 1))  # as in Lightning


def test_a_checkpoint_every_few_steps_or_seconds_says_when_it_saves(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(callbacks=ModelCheckpoint(every_n_train_steps=7), enable_checkpointing=True)
    with pytest.warns(UserWarning, match=r"a multiple of every_n_train_steps=7, which may be none: every_n_epochs"):
        trainer.fit(Perceptron(), federation())
    saves = ModelCheckpoint(train_time_interval=timedelta(hours=1))
    with caplog.at_level("INFO"):
        make_trainer(callbacks=saves, enable_checkpointing=True).fit(Perceptron(), federation())
    assert "looks at its train_time_interval after each round" in caplog.text


def test_a_checkpoint_saved_on_an_exception_keeps_the_steps_of_all_clients(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    class Breaks(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.global_step == 4:
                raise RuntimeError("simulated failure")
            return self.loss(batch)

    saves = ModelCheckpoint(dirpath=tmp_path / "kept", save_on_exception=True)
    with pytest.raises(RuntimeError, match="simulated failure"):
        make_trainer(clients_per_round=6, callbacks=saves, **keeps_files).fit(Breaks(), federation())
    assert any("step=12" in path.name for path in (tmp_path / "kept").iterdir())
    assert not any("step=4" in path.name for path in (tmp_path / "kept").iterdir())


def halving(module: L.LightningModule) -> Any:
    """Halve the learning rate in every step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.parametrize("interval", ["step", None])
@pytest.mark.parametrize("given", ["trainer", "module"])
def test_a_learning_rate_monitor_of_steps_logs_once_a_round(
    interval: Any,
    given: str,
    make_trainer: MakeTrainer,
    tmp_path: Path,
    keeps_files: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor, module = LearningRateMonitor(interval), Perceptron(configure=halving)
    others = CSVLogger(tmp_path / "other", flush_logs_every_n_steps=1)
    flags = {**keeps_files, "logger": others}
    if given == "module":
        module.configure_callbacks = lambda: [monitor]  # type: ignore[method-assign]
    else:
        flags["callbacks"] = monitor
    with caplog.at_level(logging.INFO):
        make_trainer(max_rounds=3, clients_per_round=6, **flags).fit(module, federation())
    rows = read_rows(tmp_path)
    assert [row["round"] for row in rows] == ["0", "1", "2"]
    assert [float(row["lr-SGD"]) for row in rows] == [0.5] * 3
    logged = [row for row in read_rows(Path(others.log_dir)) if row["lr-SGD"]]
    assert [row["step"] for row in logged] == ["0", "1", "2"], "its axis must be that of all other rows"
    said = "LearningRateMonitor logs once a round" in caplog.text
    assert said == (interval == "step")


class Plain(Callback):
    """Callback whose subclasses replace it."""


class Special(Plain):
    """Callback of a subclass."""


class Other(Callback):
    """Callback that replaces none."""


@pytest.mark.parametrize(
    ("given", "configured"),
    [
        ([Special()], [Special()]),
        ([Special()], [Plain()]),
        ([Callback(), Plain()], [Special()]),
        ([Plain()], [Other()]),
    ],
)
def test_callbacks_of_the_module_replace_those_that_they_replace_in_lightning(
    given: list[Callback], configured: list[Callback], make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    module, boring = Perceptron(), BoringModel()
    for one in (module, boring):
        one.configure_callbacks = lambda: configured  # type: ignore[method-assign]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    theirs = L.Trainer(max_epochs=0, callbacks=[*given], logger=False, accelerator="cpu", **quiet)
    theirs.fit(boring)
    ours = make_trainer(max_rounds=1, callbacks=[*given])
    with caplog.at_level(logging.INFO):
        ours.fit(module, federation())
    known = (Plain, Other)
    kept = [[one for one in trainer.callbacks if isinstance(one, known)] for trainer in (ours, theirs)]
    assert kept[0] == kept[1]
    replaced = [type(one).__name__ for one in given if one not in kept[0] and isinstance(one, known)]
    said = f"configure_callbacks of Perceptron replaces the trainer's {''.join(replaced)}."
    assert (said in caplog.text) == bool(replaced)


class Watch(Callback):
    """Callback that records count and total of a TQDM bar after every client and round."""

    def __init__(self, bar: TQDMProgressBar) -> None:
        self.bar = bar
        self.counts: list[tuple[int, int]] = []

    def on_client_upload(self, *arguments: Any) -> None:
        self.counts.append((self.bar.train_progress_bar.n, self.bar.train_progress_bar.total))

    def on_train_epoch_end(self, *arguments: Any) -> None:
        self.on_client_upload()


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_lightnings_bars_count_the_batches_of_the_round(runner: str, make_trainer: MakeTrainer) -> None:
    """The clients have 1, 2, 1, 3, 3 and 2 batches, in the cohort's order; those of a stack end together."""
    bar = TQDMProgressBar()
    watch = Watch(bar)
    flags = {"clients_per_round": 6, "enable_progress_bar": True, "runner": runner}
    make_trainer(callbacks=[bar, watch], **flags).fit(Perceptron(), federation())
    assert len(watch.counts) == 2 * 7
    for of_round in (watch.counts[:7], watch.counts[7:]):
        after_clients = [count for count, _ in of_round[:6]]
        own = [count - before for before, count in zip([0, *after_clients], after_clients, strict=False)]
        assert sorted(own) == ([1, 1, 2, 2, 3, 3] if runner == "serial" else [0, 0, 0, 0, 0, 12])
        assert of_round[-1] == (12, 12)


def test_lightnings_bars_leave_out_the_servers_batches(make_trainer: MakeTrainer) -> None:
    bar = TQDMProgressBar()
    watch = Watch(bar)
    flags = {"clients_per_round": 6, "enable_progress_bar": True}
    make_trainer(callbacks=[bar, watch], **flags).fit(Perceptron(), Served(20), HybridFL())
    assert watch.counts[-1] == (12, 12)


def test_the_rich_bar_is_full_after_a_round(make_trainer: MakeTrainer) -> None:
    pytest.importorskip("rich")
    bar, ends = RichProgressBar(), []

    class Ends(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            ends.append((bar.train_progress_bar.completed, bar.train_progress_bar.total))

    flags = {"clients_per_round": 6, "enable_progress_bar": True}
    make_trainer(callbacks=[bar, Ends()], **flags).fit(Perceptron(), federation())
    assert ends == [(12, 12)] * 2


def test_callbacks_that_a_checkpoint_cannot_tell_apart_are_refused(make_trainer: MakeTrainer) -> None:
    """Test what `L.Trainer` refuses, too: two callbacks with a state and one `state_key`."""
    targets = [TargetReached(0.5), TargetReached(0.8)]
    make_trainer(callbacks=[*targets, CommunicationMeter()])
    for two in ([TargetReached(0.5), TargetReached(0.5)], [FilterPruning(0.5), FilterPruning(0.2)]):
        with pytest.raises(UserError, match=f"there are two {type(two[0]).__name__} among the callbacks"):
            make_trainer(callbacks=two)
        with pytest.raises(RuntimeError, match="more than one stateful callback"):
            L.Trainer(callbacks=[*two], accelerator="cpu", logger=False)


@pytest.mark.parametrize("kind", REFUSED_CALLBACKS, ids=lambda kind: kind.__name__)
def test_callbacks_that_need_a_stock_trainer_are_refused(kind: type[Callback], make_trainer: MakeTrainer) -> None:
    callback = type("Own", (kind,), {"__init__": lambda self: None})()
    with pytest.raises(UserError, match=r"^Own .*, (but|which|what) .*: "):
        make_trainer(callbacks=callback).fit(Perceptron(), federation())


def test_callbacks_that_the_module_configures_are_checked(make_trainer: MakeTrainer) -> None:
    module, trainer = Perceptron(), make_trainer()
    module.configure_callbacks = lambda: 1 / 0  # type: ignore[assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, federation())
    assert trainer.interrupted
    assert not trainer.fitting
    module.configure_callbacks = lambda: [BatchSizeFinder()]  # type: ignore[method-assign]
    with pytest.raises(UserError, match="BatchSizeFinder tries batch sizes in a separate training"):
        trainer.fit(module, federation())
    assert not trainer.fitting


def test_the_list_of_callbacks_is_the_users(make_trainer: MakeTrainer) -> None:
    """Test that it is whole from the beginning, stays so, and does not lose what the user puts into it or takes out of it."""

    class Bringing(Perceptron):
        def configure_callbacks(self) -> Any:
            return [brought]

    first, second, replaced, brought = Callback(), Callback(), LambdaCallback(), LambdaCallback()
    flags = {"enable_progress_bar": True, "enable_model_summary": True, "enable_checkpointing": True}
    trainer = make_trainer(callbacks=[first, replaced], **flags)
    kinds = [ModelSummary, RoundProgressBar, LastCheckpoint]
    assert [type(one) for one in trainer.callbacks] == [Callback, LambdaCallback, *kinds]
    before = list(trainer.callbacks)
    trainer.fit(Bringing(), federation())
    assert trainer.callbacks == [first, *before[2:4], brought, before[4]]
    trainer.test(Perceptron(), federation(), verbose=False)
    assert trainer.callbacks == before
    trainer.callbacks.append(second)
    trainer.callbacks.remove(first)
    trainer.validate(Perceptron(), federation(), verbose=False)
    assert trainer.callbacks == [replaced, second, *before[2:]]
    assert trainer.given_callbacks == [replaced, second]


def test_a_rich_bar_brings_a_rich_summary(make_trainer: MakeTrainer) -> None:
    pytest.importorskip("rich")
    rich = make_trainer(callbacks=RichProgressBar(), enable_model_summary=True)
    assert any(isinstance(one, RichModelSummary) for one in rich.callbacks)


def test_a_timer_among_the_callbacks_replaces_max_time(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    timer = Timer("00:01:00:00")
    with caplog.at_level("INFO"):
        trainer = make_trainer(callbacks=timer, max_time="00:00:00:01")
    assert [one for one in trainer.callbacks if isinstance(one, Timer)] == [timer]
    assert "max_time '00:00:00:01' is ignored" in caplog.text
    trainer.fit(Perceptron(), federation())


def test_the_tuner_is_refused_and_helps_beside_a_federation(
    make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    module, data, trainer = Perceptron(), federation(), make_trainer()
    for find in (Tuner(trainer).lr_find, Tuner(trainer).scale_batch_size):
        with pytest.raises(UserError, match=r"Lightning's Tuner .*: give it a lightning.Trainer and your own loader"):
            find(module, datamodule=data)
    assert trainer.callbacks == []
    loader = DataLoader(TensorDataset(*samples(40)), batch_size=4)
    finder = Tuner(make_stock_trainer(max_epochs=9)).lr_find(module, loader, loader, num_training=20, min_lr=1e-4)
    assert finder is not None
    assert module.hparams["lr"] == finder.suggestion() not in (None, 0.1)
    trainer.fit(module, data)
    assert trainer.learning_rates is not None
    assert trainer.learning_rates["round_rates"] == [module.hparams["lr"]]
