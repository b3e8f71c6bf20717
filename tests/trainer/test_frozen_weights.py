"""Test that what no client trains is written once a run, and that checkpoints without it resume, export and fail as before."""

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer
from torch import Tensor, nn
from toys import Perceptron, federation

from lightning_fl import UserError
from lightning_fl.outputs import checkpoint_file, frozen_weights
from lightning_fl.state import saved_frozen

WIDTH = 600
FROZEN_BYTES = 4 * WIDTH**2


class OnFrozenBody(Perceptron):
    """Perceptron beside a large frozen layer under two names, which does not change what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.body.weight


class Teacher(OnFrozenBody):
    """The same with a frozen layer that moves in every round, as that of a teacher may."""

    def on_train_epoch_end(self) -> None:
        self.body.weight.mul_(0.5)


class Stopping(L.Callback):
    """Raises an error when a round begins, and notes the files of frozen weights before each round."""

    def __init__(self, round: int) -> None:
        self.round = round
        self.files: list[set[tuple[str, int]]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.files.append(files_of(Path(trainer.default_root_dir)))
        if trainer.current_epoch == self.round:
            raise KeyboardInterrupt


@pytest.fixture
def module() -> OnFrozenBody:
    torch.manual_seed(0)
    return OnFrozenBody()


def files_of(folder: Path) -> set[tuple[str, int]]:
    """Return name and inode of each file of frozen weights; one that is written again has another inode."""
    return {(path.name, path.stat().st_ino) for path in (folder / "checkpoints" / "frozen").glob("*")}


def size(path: Path) -> int:
    return path.stat().st_size


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def interrupted(make_trainer: MakeTrainer, module: L.LightningModule, **flags: Any) -> Stopping:
    """Train two of three rounds."""
    stopping = Stopping(2)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(max_rounds=3, callbacks=stopping, **flags).fit(module, federation())
    return stopping


def test_frozen_weights_are_written_once_and_the_exported_model_is_whole(
    make_trainer: MakeTrainer, module: OnFrozenBody, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    stopping = Stopping(-1)
    make_trainer(max_rounds=3, callbacks=stopping, **keeps_files).fit(module, federation())
    before, *others = stopping.files
    assert not before
    assert len({frozenset(files) for files in others}) == 1
    (file,) = (tmp_path / "checkpoints" / "frozen").iterdir()
    assert FROZEN_BYTES <= size(file) < FROZEN_BYTES + 5_000, "tied weights are there once"
    for name in ("last.ckpt", "previous.ckpt"):
        assert size(tmp_path / "checkpoints" / name) < 30_000
    assert FROZEN_BYTES <= size(tmp_path / "model.ckpt") < FROZEN_BYTES + 30_000
    assert equal(OnFrozenBody.load_from_checkpoint(tmp_path / "model.ckpt"), module)
    whole = checkpoint_file.load(tmp_path / "checkpoints" / "last.ckpt")
    assert list(whole["state_dict"]) == list(module.state_dict())
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in whole["state_dict"].items())


@pytest.mark.parametrize("kind", [OnFrozenBody, Teacher])
def test_a_run_that_was_interrupted_resumes_bit_for_bit(
    kind: type[OnFrozenBody], make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    start = kind()
    whole, resumed, other = (copy.deepcopy(start) for _ in range(3))
    make_trainer(max_rounds=3).fit(whole, federation())
    written = interrupted(make_trainer, resumed, **keeps_files).files[-1]
    assert len(written) == (2 if kind is Teacher else 1), "a file for each of the last two checkpoints where it changes"
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "copy")
    for model, path in ((resumed, "last"), (other, tmp_path / "copy" / "previous.ckpt")):
        model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
        make_trainer(max_rounds=3, **keeps_files).fit(model, federation(), ckpt_path=path)
        assert equal(model, whole)
        if path == "last" and kind is OnFrozenBody:
            assert files_of(tmp_path) == written, "the resumed run goes on with the file"
    assert len(files_of(tmp_path)) <= 2


def test_a_checkpoint_with_the_wrong_frozen_weights_is_refused_and_nothing_is_lost(
    make_trainer: MakeTrainer, module: OnFrozenBody, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    interrupted(make_trainer, module, **keeps_files)
    (file,) = (tmp_path / "checkpoints" / "frozen").iterdir()
    good = file.read_bytes()
    foreign = tmp_path / "foreign.pt"
    torch.save({name: torch.ones(WIDTH, WIDTH) for name in ("body.weight", "tied.weight")}, foreign)
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    wrong = {
        "is missing": None,
        "is truncated, damaged or no such file": good[:-100],
        "has other weights, because it is damaged or belongs to another run": foreign.read_bytes(),
        "has other weights, because": bytes(flipped),
    }
    foreign.unlink()
    for reason, bytes_of_file in wrong.items():
        file.unlink(missing_ok=True)
        if bytes_of_file is not None:
            file.write_bytes(bytes_of_file)
        before, trained = content(tmp_path), copy.deepcopy(module)
        for call in ("fit", "validate"):
            with pytest.raises(UserError, match=reason) as refused:
                getattr(make_trainer(max_rounds=3, **keeps_files), call)(trained, federation(), ckpt_path="last")
            assert str(file) in str(refused.value)
            assert "copy the folder of the checkpoints as a whole" in str(refused.value)
        assert content(tmp_path) == before
        assert equal(trained, module)
    file.write_bytes(good)
    make_trainer(max_rounds=3, **keeps_files).fit(module, federation(), ckpt_path="last")


def test_few_frozen_weights_stay_in_the_checkpoint(
    make_trainer: MakeTrainer,
    module: OnFrozenBody,
    tmp_path: Path,
    keeps_files: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frozen_weights, "LEAST_BYTES", FROZEN_BYTES + 1)
    make_trainer(max_rounds=2, **keeps_files).fit(module, federation())
    assert not files_of(tmp_path)
    assert equal(OnFrozenBody.load_from_checkpoint(tmp_path / "checkpoints" / "last.ckpt"), module)


def test_a_file_that_was_not_written_to_its_end_is_written_again(
    make_trainer: MakeTrainer, module: OnFrozenBody, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    first = copy.deepcopy(module)
    make_trainer(max_rounds=1, **keeps_files).fit(first, federation())
    ((name, _),) = files_of(tmp_path)
    (tmp_path / "checkpoints" / "frozen" / name).write_bytes(b"cut")
    weights = saved_frozen.SavedFrozen(tmp_path / "checkpoints")
    weights.moved_out({"state_dict": first.state_dict(), "federation": {}}, frozen_weights.frozen_names(first))
    assert (
        checkpoint_file.load(tmp_path / "checkpoints" / "last.ckpt")["state_dict"].keys() == first.state_dict().keys()
    )


def test_a_module_that_saves_its_adapters_only_stays_as_it_is(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    class AdaptersOnly(OnFrozenBody):
        strict_loading = False

        def state_dict(self, *arguments: Any, **named: Any) -> dict[str, Tensor]:
            state = super().state_dict(*arguments, **named)
            return {name: value for name, value in state.items() if "body" not in name and "tied" not in name}

    module = AdaptersOnly()
    make_trainer(max_rounds=2, **keeps_files).fit(module, federation())
    assert not files_of(tmp_path)
    assert not os.path.exists(tmp_path / "checkpoints" / "frozen")
    assert size(tmp_path / "model.ckpt") < 30_000


def test_a_plan_counts_frozen_weights_once(
    make_trainer: MakeTrainer, module: OnFrozenBody, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    trainer = make_trainer(max_rounds=2, **keeps_files)
    planned = trainer.plan(module, federation()).disk_bytes
    trainer.fit(module, federation())
    written = size(tmp_path / "model.ckpt") + sum(map(size, (tmp_path / "checkpoints").rglob("*.*t")))
    assert abs(planned - written) < 0.05 * written


class Following(Perceptron):
    """Module whose frozen layer follows a trained one while a client trains, through `.data` or not."""

    def __init__(self, hook: str, through_data: bool) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.hidden).requires_grad_(False)
        self.hook, self.through_data = hook, through_data

    def follow(self, hook: str) -> None:
        if hook == self.hook:
            with torch.no_grad():
                teacher = self.teacher.weight.data if self.through_data else self.teacher.weight
                teacher.lerp_(self.hidden.weight, 0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.follow("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.follow("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self.follow("on_train_epoch_end")


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("hook", ["training_step", "on_train_batch_end", "on_train_epoch_end"])
def test_frozen_weights_move_between_rounds_only(hook: str, through_data: bool, make_trainer: MakeTrainer) -> None:
    module = Following(hook, through_data)
    if hook == "on_train_epoch_end":
        make_trainer().fit(module, federation())
        return
    with pytest.raises(UserError, match=r"Following moves teacher\.weight while a client trains.*as a buffer"):
        make_trainer().fit(module, federation())
