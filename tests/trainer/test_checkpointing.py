"""Test runs that are killed, resumed, mixed up, moved aside and exported."""

import copy
import csv
import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import killed_run
import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer, resumed_like_whole
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import Perceptron, federation, read_rows, samples

from lightning_fl import UserError
from lightning_fl.algorithms import FedAvg, FedBuff, FedProx
from lightning_fl.callbacks import TargetReached
from lightning_fl.data import Federated
from lightning_fl.features.clock import ClientClock
from lightning_fl.outputs import checkpoint_file


def equal(a: L.LightningModule, b: L.LightningModule) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


@pytest.mark.process
def test_a_run_killed_at_any_moment_resumes_to_the_same_result(tmp_path: Path) -> None:
    kind = random.choice(["batch", "upload", "round"])
    moments = {kind: random.randint(2, killed_run.ROUNDS), "write": random.randint(2, killed_run.ROUNDS)}
    arguments = [f"{event}={count}" for event, count in moments.items()]
    program = [sys.executable, killed_run.__file__, str(tmp_path), *arguments]
    killed = subprocess.run(program, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=False)
    assert killed.returncode == 0, killed.stderr.decode()

    whole = killed_run.initial_module()
    killed_run.trainer_in(tmp_path / "whole").fit(whole, federation(), killed_run.algorithm())
    for event in moments:
        resumed = killed_run.initial_module()  # killed before the first checkpoint it starts anew
        trainer = killed_run.trainer_in(tmp_path / event)
        trainer.fit(resumed, federation(), killed_run.algorithm(), ckpt_path="last")
        assert equal(whole, resumed), moments
        assert read_rows(tmp_path / "whole") == read_rows(tmp_path / event), moments


def test_a_model_checkpoint_of_any_round_resumes_to_the_same_result(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """Test checkpoints saved after the validation and at the end of the round."""
    whole = Perceptron()
    start = copy.deepcopy(whole)
    saves = [
        ModelCheckpoint(tmp_path / "validated", filename="{epoch}", save_top_k=-1, monitor="val/loss"),
        ModelCheckpoint(tmp_path / "ended", filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True),
    ]
    make_trainer(max_rounds=3, callbacks=saves, **keeps_files).fit(whole, federation())
    for path in (tmp_path / "ended" / "epoch=0.ckpt", tmp_path / "validated" / "epoch=1.ckpt"):
        resumed = copy.deepcopy(start)
        trainer = make_trainer(max_rounds=3)
        trainer.fit(resumed, federation(), ckpt_path=path)
        assert trainer.run.ledger.total_bytes("up") == 3 * 3 * 26 * 4, path
        assert equal(whole, resumed), path


class CountsRounds(Callback):
    """Callback that counts rounds, keeps the model of each, and may fail at the end of one."""

    def __init__(self, fails_after: int = 0) -> None:
        self.fails_after, self.num_rounds, self.models = fails_after, 0, {}

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.models[trainer.current_epoch] = copy.deepcopy(pl_module.state_dict())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.num_rounds += 1
        pl_module.log("counted", float(self.num_rounds))
        if self.num_rounds == self.fails_after:
            raise ZeroDivisionError

    def state_dict(self) -> dict[str, Any]:
        return {"num_rounds": self.num_rounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_rounds = state_dict["num_rounds"]


def on_plateau(module: L.LightningModule) -> dict[str, Any]:
    """Return an optimiser whose rate falls after every round."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    falls = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9, threshold_mode="abs")
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falls, "monitor": "val/loss"}}


SAVING: dict[str, Callable[[Path], Callback]] = {
    "after the training": lambda path: ModelCheckpoint(path, "{epoch}", save_top_k=-1, every_n_train_steps=1),
    "after the validation": lambda path: ModelCheckpoint(path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=False),
    "at an error": lambda path: OnExceptionCheckpoint(path, "epoch=1"),
}


@pytest.mark.parametrize("moment", SAVING)
def test_a_round_that_is_saved_before_its_end_is_repeated(
    moment: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """The file has the model that was measured; the rows, the scheduler and the callbacks go on as in an uninterrupted run."""
    path = tmp_path / "begun" / "checkpoints"
    start, ends = Perceptron(configure=on_plateau), {}
    for folder, fails_after, ckpt_path in (
        ("whole", 0, None),
        ("begun", 2, None),
        ("resumed", 0, path / "epoch=1.ckpt"),
    ):
        module, counts = copy.deepcopy(start), CountsRounds(fails_after)
        callbacks = [counts, SAVING[moment](path)] if folder == "begun" else [counts]
        trainer = make_trainer(
            max_rounds=4, callbacks=callbacks, **keeps_files | {"default_root_dir": tmp_path / folder}
        )
        with pytest.raises(ZeroDivisionError) if fails_after else nullcontext():
            trainer.fit(module, federation(), ckpt_path=ckpt_path)
        ends[folder] = module
        if folder == "begun":
            saved = torch.load(path / "epoch=1.ckpt", weights_only=True)["state_dict"]
            assert all(torch.equal(value, saved[name]) for name, value in counts.models[1].items())
    assert equal(ends["whole"], ends["resumed"])
    assert read_rows(tmp_path / "whole") == read_rows(tmp_path / "resumed")


class BuiltWhenLoaded(Perceptron):
    """Module without a width of its own, which takes its layers and its rate from a checkpoint, as Lightning lets it."""

    def __init__(self, width: int | None = None, rate: float | None = None) -> None:
        super().__init__()
        self.width, self.rate = width, rate
        self.build()

    def build(self) -> None:
        self.hidden, self.output = nn.Linear(3, self.width or 1), nn.Linear(self.width or 1, 2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["built"] = self.width, self.rate

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.width is None:
            self.width, self.rate = checkpoint["built"]
            self.build()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)  # type: ignore[arg-type]


def test_a_module_is_built_from_the_checkpoint_that_it_resumes(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    whole = BuiltWhenLoaded(7, 0.05)
    start = copy.deepcopy(whole)
    make_trainer(max_rounds=3, default_root_dir=tmp_path / "whole", **keeps_files).fit(whole, federation())
    make_trainer(max_rounds=2, **keeps_files).fit(start, federation())
    resumed, tested = BuiltWhenLoaded(), BuiltWhenLoaded()
    trainer = make_trainer(max_rounds=3, **keeps_files)
    trainer.fit(resumed, federation(), ckpt_path="last")
    assert equal(whole, resumed)
    make_trainer(**keeps_files).test(tested, federation(), ckpt_path="last", verbose=False)
    assert equal(whole, tested)


def test_last_starts_from_the_beginning_where_nothing_is_saved(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any]
) -> None:
    first = Perceptron()
    second = copy.deepcopy(first)
    make_trainer().fit(first, federation())
    with pytest.warns(UserWarning, match="starts from the beginning"):
        make_trainer(**keeps_files).fit(second, federation(), ckpt_path="last")
    assert equal(first, second)


def test_a_finished_run_stays_as_it_is(make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]) -> None:
    first, second = Perceptron(), Perceptron()
    make_trainer(**keeps_files).fit(first, federation())
    rows = read_rows(tmp_path)
    make_trainer(**keeps_files).fit(second, federation(), ckpt_path="last")
    assert equal(first, second)
    assert read_rows(tmp_path) == rows


def test_the_callbacks_states_are_taken_up_again(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> None:
    class Counts(L.Callback):
        seen = 0

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.seen += 1

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    make_trainer(max_rounds=2, callbacks=Counts(), **keeps_files).fit(Perceptron(), federation())
    counts = Counts()
    make_trainer(max_rounds=5, callbacks=counts, **keeps_files).fit(Perceptron(), federation(), ckpt_path="last")
    assert counts.seen == 5


def test_the_checkpoint_before_is_kept(make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]) -> None:
    make_trainer(max_rounds=3, **keeps_files).fit(Perceptron(), federation())
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["last.ckpt", "previous.ckpt"]
    rounds = [torch.load(folder / name, weights_only=True)["epoch"] for name in ("previous.ckpt", "last.ckpt")]
    assert rounds == [2, 3]


def test_checkpoints_every_few_rounds_and_after_the_last(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(max_rounds=5, checkpoint_every_n_rounds=2, **keeps_files).fit(Perceptron(), federation())
    names = ("previous.ckpt", "last.ckpt")
    assert [torch.load(tmp_path / "checkpoints" / x, weights_only=True)["epoch"] for x in names] == [4, 5]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    checkpoint_file.save_atomically({"state_dict": {"a": torch.ones(1)}}, path)

    def half(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="no space"):
        checkpoint_file.save_atomically({"state_dict": {}}, path, keep_previous=True)
    assert checkpoint_file.load(path)["state_dict"]["a"] == 1


class Wider(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 5)
        self.output = nn.Linear(5, 2)


class Shifted(Perceptron):
    """Module with the same parameters, and one buffer more."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(3))


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


MISTAKES = {
    "damaged": r"last\.ckpt is damaged: its part .*data/0 is not what was written.*previous\.ckpt",
    "truncated": r"last\.ckpt cannot be read: it is truncated.*previous\.ckpt",
    "empty": r"last\.ckpt cannot be read",
    "text": r"last\.ckpt cannot be read",
    "no checkpoint": r"last\.ckpt is not a Lightning checkpoint.*state_dict",
    "missing": r"Checkpoint file not found: .*nowhere\.ckpt",
    "other parameters": r"another model.*'hidden\.weight' has shape \(4, 3\).*\(5, 3\)",
    "other buffers": r"another model.*shift",
    "other algorithm": r"written by FedAvg.*algorithm is FedProx.*--algorithm FedAvg",
    "other clients": r"data\.num_clients 6 → 3",
    "model only": r"model\.ckpt contains a model but no federation.*last\.ckpt",
    "newer format": r"last\.ckpt was written by a later version of lightning-fl .format 99.*: update lightning-fl",
    "earlier format": r"last\.ckpt was written by an earlier version of lightning-fl .format 3.*: use the version that wrote it",
}


def test_a_missing_checkpoint_is_the_file_that_python_and_lightning_do_not_find(make_trainer: MakeTrainer) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"^Checkpoint file not found: .*nowhere.ckpt; allowed: a file, last, best"
    ):
        make_trainer().fit(Perceptron(), federation(), ckpt_path="nowhere.ckpt")


def test_without_a_model_checkpoint_the_last_checkpoint_is_the_best_as_in_lightning(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any]
) -> None:
    module, fresh = Perceptron(), Perceptron()
    make_trainer(**keeps_files).fit(module, federation())
    with pytest.warns(UserWarning, match=r"this run has no ModelCheckpoint, so .*last\.ckpt is read"):
        make_trainer(**keeps_files).test(fresh, federation(), ckpt_path="best", verbose=False)
    assert equal(module, fresh)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_is_lost(
    mistake: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    trained = Shifted() if mistake == "other buffers" else Perceptron()
    make_trainer(**keeps_files).fit(trained, federation())
    last = tmp_path / "checkpoints" / "last.ckpt"
    content = torch.load(last, weights_only=True)
    if mistake == "damaged":
        with zipfile.ZipFile(last) as archive:
            part = next(name for name in archive.namelist() if name.endswith("data/0"))
            value = archive.read(part)
        damaged = bytearray(last.read_bytes())
        damaged[damaged.index(value)] ^= 1
        last.write_bytes(damaged)
    elif mistake == "truncated":
        last.write_bytes(last.read_bytes()[:-500])
    elif mistake in ("empty", "text"):
        last.write_bytes(b"" if mistake == "empty" else b"what is this?\n" * 99)
    elif mistake == "no checkpoint":
        torch.save({"weights": torch.ones(1)}, last)
    elif mistake.endswith("format"):
        content["federation"]["format"] = 99 if mistake == "newer format" else 3
        torch.save(content, last)
    module = Wider() if mistake == "other parameters" else Perceptron()
    before, files = copy.deepcopy(module.state_dict()), files_in(tmp_path)
    with pytest.raises(UserError, match=MISTAKES[mistake]):
        make_trainer(max_rounds=4, **keeps_files).fit(
            module,
            federation(sizes=(10, 10, 20)) if mistake == "other clients" else federation(),
            FedProx() if mistake == "other algorithm" else None,
            ckpt_path={"missing": tmp_path / "nowhere.ckpt", "model only": tmp_path / "model.ckpt"}.get(
                mistake, "last"
            ),
        )
    assert files_in(tmp_path) == files
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items()), (
        "the module must not change"
    )


def test_evaluating_with_a_foreign_checkpoint_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(**keeps_files).fit(Perceptron(), federation())
    with pytest.raises(UserError, match=r"another model than Wider.*hidden\.weight"):
        make_trainer(**keeps_files).test(Wider(), federation(), ckpt_path="last")
    with pytest.raises(UserError, match=r"no checkpoint at .*empty"):
        make_trainer(default_root_dir=tmp_path / "empty").test(Perceptron(), federation(), ckpt_path="last")


class WithPath(Perceptron):
    """Module with a hyper-parameter that is not a plain number."""

    def __init__(self, folder: Path = Path("somewhere")) -> None:
        super().__init__()
        self.save_hyperparameters("folder")


def test_hyper_parameters_may_be_any_object(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> None:
    make_trainer(max_rounds=1, **keeps_files).fit(WithPath(), federation())
    trainer = make_trainer(max_rounds=2, **keeps_files)
    trainer.fit(WithPath(), federation(), ckpt_path="last")
    assert trainer.run.round == 2


class WithScaler(Perceptron):
    """Module that saves an object of a class in its checkpoints, as forecasting packages save their scalers."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["scaler"] = Decimal("0.5")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.scaler = checkpoint["scaler"]


def test_objects_in_a_checkpoint_are_read_if_the_user_trusts_it(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    best = ModelCheckpoint(tmp_path / "best", monitor="val/loss")
    half, whole = WithScaler(), WithScaler()
    whole.load_state_dict(half.state_dict())
    make_trainer(max_rounds=3).fit(whole, federation())
    make_trainer(max_rounds=2, callbacks=best, **keeps_files).fit(half, federation())
    module, files = WithScaler(), files_in(tmp_path)
    refusal = r"contains an object of class decimal\.Decimal: if you trust .*, give weights_only=False to the trainer's method"
    for path in ("last", "best", tmp_path / "model.ckpt"):
        for run in ("fit", "validate", "test", "predict"):
            with pytest.raises(UserError, match=refusal):
                getattr(make_trainer(max_rounds=3, **keeps_files), run)(module, federation(), ckpt_path=path)
    assert files_in(tmp_path) == files
    for run in ("validate", "test", "predict"):
        for path in ("best", "last"):
            module = WithScaler()
            getattr(make_trainer(**keeps_files), run)(module, federation(), ckpt_path=path, weights_only=False)
            assert module.scaler == Decimal("0.5")
        assert equal(module, half)
    resumed = WithScaler()
    trainer = make_trainer(max_rounds=3, **keeps_files)
    trainer.fit(resumed, federation(), ckpt_path="last", weights_only=False)
    assert equal(resumed, whole)
    with pytest.raises(UserError, match=refusal):
        trainer.validate(ckpt_path="last")


def test_the_exported_model_loads_in_plain_lightning(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    module = Perceptron(lr=0.3)
    make_trainer(**keeps_files).fit(module, federation())
    x, _ = samples(5, seed=3)
    for path in (tmp_path / "model.ckpt", tmp_path / "checkpoints" / "last.ckpt"):
        loaded = Perceptron.load_from_checkpoint(path)
        assert loaded.hparams["lr"] == 0.3
        assert torch.equal(loaded(x), module(x))
    assert "federation" not in torch.load(tmp_path / "model.ckpt", weights_only=True)


class Annotated(nn.Linear):
    """Layer that saves words."""

    words = "none"

    def get_extra_state(self) -> dict[str, str]:
        return {"words": self.words}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.words = state["words"]


class Annotating(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.output = Annotated(4, 2)

    def on_train_epoch_end(self) -> None:
        self.output.words = f"round {self.current_epoch}"


def test_what_a_layer_saves_besides_tensors_is_in_the_checkpoint(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(max_rounds=2, **keeps_files).fit(Annotating(), federation())
    assert Annotating.load_from_checkpoint(tmp_path / "model.ckpt").output.words == "round 1"
    resumed = Annotating()
    make_trainer(max_rounds=2, **keeps_files).fit(resumed, federation(), ckpt_path="last")
    assert resumed.output.words == "round 1"


def test_a_stock_trainer_tests_the_exported_model(
    make_trainer: MakeTrainer,
    make_stock_trainer: Callable[..., L.Trainer],
    tmp_path: Path,
    keeps_files: dict[str, Any],
) -> None:
    make_trainer(**keeps_files).fit(Perceptron(), federation())
    stock = make_stock_trainer()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples(6)), batch_size=3)
    assert stock.test(Perceptron(), loader, ckpt_path=tmp_path / "model.ckpt", verbose=False)


def test_a_new_run_moves_the_earlier_ones_aside(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    kept = []
    for number in range(3):
        make_trainer(max_rounds=number + 1, **keeps_files).fit(Perceptron(), federation())
        kept.append(read_rows(tmp_path))
    assert [len(rows) for rows in kept] == [1, 2, 3]
    for number in (1, 2):
        aside = tmp_path / f"earlier-{number}"
        assert read_rows(aside) == kept[number - 1]
        assert (aside / "checkpoints" / "last.ckpt").is_file()
        assert (aside / "model.ckpt").is_file()
    assert not (tmp_path / "earlier-3").exists()


class Failing(L.Callback):
    """Callback that fails at a hook, like a user's callback."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.fail)

    def fail(self, *arguments: Any) -> None:
        raise ZeroDivisionError("of the user's own")


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("hook", ["on_train_start", "on_client_download", "on_client_upload", "on_train_epoch_end"])
def test_a_run_that_fails_before_it_has_done_a_round_leaves_the_earlier_one_where_it_is(
    hook: str, resumed: bool, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(max_rounds=3, callbacks=[KeepAll(tmp_path)], **keeps_files).fit(Perceptron(), federation())
    files = files_in(tmp_path)
    with pytest.raises(ZeroDivisionError):
        make_trainer(max_rounds=4, callbacks=[Failing(hook)], **keeps_files).fit(
            Perceptron(), federation(), ckpt_path=tmp_path / "kept-1.ckpt" if resumed else None
        )
    assert files_in(tmp_path) == files
    make_trainer(max_rounds=4, **keeps_files).fit(Perceptron(), federation(), ckpt_path="last")
    assert [row["round"] for row in read_rows(tmp_path)] == ["0", "1", "2", "3"]


class KeepAll(L.Callback):
    """Callback that keeps a checkpoint of each round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"kept-{trainer.current_epoch}.ckpt")


@pytest.mark.parametrize(
    "callback",
    [
        EarlyStopping("val/akkuracy"),
        ModelCheckpoint(monitor="val/akkuracy"),
        TargetReached(0.99, monitor="val/akkuracy"),
    ],
)
def test_a_misspelt_metric_is_refused_after_a_round_and_the_earlier_run_stays(
    callback: L.Callback, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(**keeps_files).fit(Perceptron(), federation())
    files = files_in(tmp_path)
    trainer = make_trainer(max_rounds=9, callbacks=[callback], **keeps_files)
    with pytest.raises(UserError, match="monitors 'val/akkuracy', which is not logged; did you mean 'val/accuracy'"):
        trainer.fit(Perceptron(), federation())
    assert trainer.run.round == 1
    assert files_in(tmp_path) == files


class Killed(BaseException):
    """Exception that no handler catches."""


@pytest.mark.parametrize("moves", range(6))
def test_a_kill_while_the_earlier_run_is_moved_loses_nothing(
    moves: int,
    make_trainer: MakeTrainer,
    tmp_path: Path,
    keeps_files: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kill after each number of files, and after the last; then `last` resumes the earlier run or starts the new one."""
    make_trainer(max_rounds=2, **keeps_files).fit(Perceptron(), federation())
    files = files_in(tmp_path)
    left = iter(range(moves))

    def replace(source: Any, target: Any) -> None:
        if next(left, None) is None:
            raise Killed
        os.rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace)
        with pytest.raises(Killed):
            make_trainer(max_rounds=2, **keeps_files).fit(Perceptron(), federation())
    make_trainer(max_rounds=3, **keeps_files).fit(Perceptron(), federation(), ckpt_path="last")
    assert [row["round"] for row in read_rows(tmp_path)] == ["0", "1", "2"]
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    if (tmp_path / "earlier-1").exists():
        assert files_in(tmp_path / "earlier-1") == files
        assert names == ["checkpoints", "earlier-1"]
    else:
        assert names == ["checkpoints"]
        assert read_rows(tmp_path)[:2] == rows_of(files["metrics.csv"])


def rows_of(text: bytes) -> list[dict[str, str]]:
    rows = list(csv.DictReader(text.decode().splitlines()))
    for row in rows:
        row.pop("time/round_seconds")
    return rows


@pytest.mark.parametrize("max_rounds", [2, 1])
def test_with_nothing_left_to_do_the_run_says_so_and_knows_what_it_reached(
    max_rounds: int,
    make_trainer: MakeTrainer,
    tmp_path: Path,
    keeps_files: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = make_trainer(max_rounds=2, **keeps_files)
    first.fit(Perceptron(), federation())
    files = files_in(tmp_path)
    again = make_trainer(max_rounds=max_rounds, **keeps_files)
    again.fit(Perceptron(), federation(), ckpt_path="last")
    assert files_in(tmp_path) == files
    said = [record.message for record in caplog.records if "Nothing is left to do" in record.message]
    assert len(said) == 1
    assert f"max_rounds is {max_rounds}, and" in said[0]
    assert said[0].endswith("contains 2 rounds.")
    for name in ("val/accuracy", "val/loss", "train/loss"):
        assert again.callback_metrics[name] == first.callback_metrics[name]


def test_the_bits_of_the_last_rounds_are_written_after_an_error(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """Check that no round is missing, although the file is not written after every short round."""

    class Failing(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 3:
                raise RuntimeError("the power is gone")

    trainer = make_trainer(max_rounds=5, callbacks=Failing(), **keeps_files)
    with pytest.raises(RuntimeError, match="the power is gone"):
        trainer.fit(Perceptron(), federation())
    written = json.loads((tmp_path / "communication.json").read_text())
    assert written["rounds"] == 3
    assert sum(written["uplink_bits"].values()) == sum(float(row["comm/uplink_bits"]) for row in read_rows(tmp_path))


def test_the_bits_of_a_run_that_was_killed_at_its_end_are_written_when_it_is_resumed(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(max_rounds=2, **keeps_files).fit(Perceptron(), federation())
    file = tmp_path / "communication.json"
    whole = file.read_text()
    file.write_text(whole.replace('"rounds": 2', '"rounds": 1'))  # of the write before the last
    make_trainer(max_rounds=2, **keeps_files).fit(Perceptron(), federation(), ckpt_path="last")
    assert file.read_text() == whole


def test_one_trainer_may_fit_twice(make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]) -> None:
    first = Perceptron()
    second = copy.deepcopy(first)
    trainer = make_trainer(**keeps_files)
    trainer.fit(first, federation())
    trainer.fit(second, federation())
    assert equal(first, second)
    assert read_rows(tmp_path) == read_rows(tmp_path / "earlier-1")


def test_a_trainer_that_failed_in_a_round_begins_anew(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    class FailsOnce(L.Callback):
        failed = False

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "start.ckpt")

        def on_client_upload(self, trainer: Any, *arguments: Any) -> None:
            if trainer.current_epoch == 1 and not self.failed:
                self.failed = True
                raise ZeroDivisionError

    trainer = make_trainer(callbacks=[FailsOnce()], **keeps_files)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Perceptron(), federation())
    module = Perceptron()
    weights = copy.deepcopy(module.state_dict())
    trainer.fit(module, federation())
    saved = checkpoint_file.load(tmp_path / "start.ckpt")
    assert saved["epoch"] == 0
    assert all(torch.equal(value, weights[name]) for name, value in saved["state_dict"].items())


@pytest.mark.parametrize("max_rounds", [4, 3])
def test_a_run_that_goes_on_in_another_folder_brings_its_rows_and_moves_what_is_there(
    max_rounds: int, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, rounds, clients in ((here, 2, 2), (there, 3, 3)):
        flags = {"max_rounds": rounds, "clients_per_round": clients, "default_root_dir": folder, **keeps_files}
        make_trainer(**flags).fit(Perceptron(), federation())
    of_here, of_there, rows = files_in(here), files_in(there), read_rows(there)
    trainer = make_trainer(max_rounds=max_rounds, default_root_dir=here, **keeps_files)
    trainer.fit(Perceptron(), federation(), ckpt_path=there / "checkpoints" / "last.ckpt")
    assert files_in(there) == of_there
    assert files_in(here / "earlier-1") == of_here
    assert read_rows(here)[:3] == rows
    assert len(read_rows(here)) == max_rounds
    communication = json.loads((here / "communication.json").read_text())
    assert communication["rounds"] == max_rounds
    assert sum(communication["uplink_bits"].values()) == 8 * float(read_rows(here)[-1]["comm/total_uplink_bytes"])


def test_resuming_cuts_a_metrics_file_that_ran_ahead(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(max_rounds=2, **keeps_files).fit(Perceptron(), federation())
    path = tmp_path / "metrics.csv"
    last = path.read_text().splitlines()[-1]
    path.write_text(path.read_text() + last.replace("1,", "2,", 1) + "\n" + last[: len(last) // 2])
    make_trainer(max_rounds=3, **keeps_files).fit(Perceptron(), federation(), ckpt_path="last")
    assert [row["round"] for row in read_rows(tmp_path)] == ["0", "1", "2"]
    assert len({row["train/loss"] for row in read_rows(tmp_path)}) == 3


class Halving(Callback):
    """Callback that halves the learning rate when a round ends."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [(FedAvg, {}), (FedAvg, {"dropout_rate": 0.7}), (lambda: FedBuff(1), {"clock": ClientClock(devices="phones")})],
    ids=["FedAvg", "rounds to which nobody comes", "FedBuff"],
)
def test_rates_that_a_callback_has_set_go_on(
    algorithm: Callable[[], Any], flags: dict[str, Any], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    resumed_like_whole(make_trainer, tmp_path, Perceptron, algorithm=algorithm, callbacks=[Halving()], **flags)


class HalvesWeights(Callback):
    """Callback that changes the server's model after a round."""

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.mul_(0.5)


def test_weights_that_a_callback_has_changed_go_on(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    resumed_like_whole(make_trainer, tmp_path, Perceptron, algorithm=FedAvg, callbacks=[HalvesWeights()])


class Interrupts(Callback):
    """Callback that interrupts a round, once."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 3 and trainer.ckpt_path is None:
            raise KeyboardInterrupt


@pytest.mark.parametrize("options", [{"save_last": True, "save_weights_only": True}, {"save_last": "link"}], ids=str)
def test_a_model_checkpoint_in_the_runs_own_folder_never_keeps_it_from_being_resumed(
    options: dict[str, Any], make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    whole = Perceptron()
    resumed = copy.deepcopy(whole)
    make_trainer(max_rounds=5).fit(whole, federation())
    for ckpt_path in (None, "last"):
        flags = {"max_rounds": 5, "checkpoint_every_n_rounds": 2, **keeps_files}
        trainer = make_trainer(callbacks=[ModelCheckpoint(monitor="val/loss", **options), Interrupts()], **flags)
        with suppress(KeyboardInterrupt):
            trainer.fit(resumed, federation(), ckpt_path=ckpt_path)
        assert trainer.run.round == (3 if ckpt_path is None else 5)
        for name in ("last.ckpt", "previous.ckpt"):
            checkpoint_file.federation_of(checkpoint_file.load(tmp_path / "checkpoints" / name), name, "FedAvg")
    assert equal(whole, resumed)


class Counts(L.LightningDataModule):
    """Data module with a state, and a name that is no text."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.save_hyperparameters({1: "one"})

    def train_dataloader(self) -> DataLoader:
        self.count += 1
        return DataLoader(TensorDataset(*samples(24)), batch_size=4)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = 100 + state_dict["count"]


def test_a_data_module_finds_its_state_under_its_own_name(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path, data = tmp_path / "run.ckpt", Counts()
    trainer = make_trainer(max_rounds=1)
    trainer.fit(Perceptron(), Federated(data, num_clients=4))
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=True)["Counts"]
    assert state["count"] > 0
    resumed = Counts()
    make_trainer(max_rounds=1).fit(Perceptron(), Federated(resumed, num_clients=4), ckpt_path=path)
    assert resumed.count == 100 + state["count"]


def test_a_missing_callback_is_named_as_in_lightning(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    stops, path = EarlyStopping("val/loss"), tmp_path / "run.ckpt"
    trainer = make_trainer(callbacks=stops)
    trainer.fit(Perceptron(), federation())
    trainer.save_checkpoint(path)
    with pytest.warns(UserWarning, match="Please add the following callbacks:") as said:
        make_trainer(max_rounds=3).fit(Perceptron(), federation(), ckpt_path=path)
    assert any(stops.state_key in str(one.message) for one in said)


class Receives(DummyLogger):
    """Logger that is offered models."""

    def __init__(self) -> None:
        super().__init__()
        self.offered: list[str] = []
        self.folder = ""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.offered.append(checkpoint_callback.best_model_path)
        self.folder = str(checkpoint_callback.dirpath)


def test_loggers_are_offered_the_final_model_or_those_of_a_model_checkpoint(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    for callbacks, count in (([], 1), ([ModelCheckpoint(tmp_path / "kept", save_top_k=-1)], 2)):
        logger = Receives()
        flags = {"logger": logger, "callbacks": callbacks, "enable_checkpointing": True}
        make_trainer(max_rounds=2, **flags).fit(Perceptron(), federation())
        assert len(logger.offered) == count
        assert logger.offered[-1] == str(callbacks[0].best_model_path if callbacks else tmp_path / "model.ckpt")
        assert logger.folder == str(Path(logger.offered[-1]).parent)
        assert "state_dict" in torch.load(logger.offered[-1], weights_only=True)


def test_a_run_that_an_error_ended_can_be_saved(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    class FailsInRound(L.Callback):
        def on_client_upload(self, trainer: Any, *arguments: Any) -> None:
            if trainer.current_epoch == 1:
                raise ZeroDivisionError

    whole = Perceptron()
    begun, resumed = copy.deepcopy(whole), copy.deepcopy(whole)
    make_trainer(max_rounds=3).fit(whole, federation(), FedProx())
    trainer = make_trainer(max_rounds=3, callbacks=FailsInRound())
    with pytest.raises(ZeroDivisionError):
        trainer.fit(begun, federation(), FedProx())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    assert saved["epoch"] == 1
    assert equal(begun, Perceptron.load_from_checkpoint(tmp_path / "saved.ckpt"))
    make_trainer(max_rounds=3).fit(resumed, federation(), FedProx(), ckpt_path=tmp_path / "saved.ckpt")
    assert equal(whole, resumed)


class FailsInPreparation(FedAvg):
    def prepare(self, *arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError


class FailsInSetup(Perceptron):
    def setup(self, stage: str) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize(("module", "method"), [(Perceptron(), FailsInPreparation()), (FailsInSetup(), FedAvg())])
def test_a_run_that_failed_before_its_rounds_is_not_saved(
    module: Perceptron, method: FedAvg, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer()
    trainer.fit(Perceptron(), federation())
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, federation(), method)
    with pytest.raises(UserError, match="no fit has begun its rounds"):
        trainer.save_checkpoint(tmp_path / "run.ckpt")
