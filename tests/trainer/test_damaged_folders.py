"""Test runs whose folder is damaged, deleted or used by another run."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer
from toys import Perceptron, federation, read_rows

from lightning_fl import UserError
from lightning_fl.algorithms import SCAFFOLD
from lightning_fl.errors import FileError
from lightning_fl.outputs import checkpoint_file, run_folder


class At(L.Callback):
    """Callback that does something at the end of one round."""

    def __init__(self, round_index: int, action: Callable[[], Any]) -> None:
        self.round_index, self.action = round_index, action

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.round_index:
            self.action()


def another_header(path: Path) -> None:
    path.write_text(path.read_text().replace("round", "number", 1))


def another_coding(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"\n1,", b"\n1\xff,", 1))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str, list[str]]] = {
    "missing": (Path.unlink, "lacks 3 of the 3 rows", ["3"]),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-40]), "lacks 1 of the 3 rows", ["0", "1", "3"]),
    "another header": (another_header, "lacks 3 of the 3 rows", ["3"]),
    "not UTF-8": (another_coding, "lacks 1 of the 3 rows", ["0", "2", "3"]),
    "binary": (lambda path: path.write_bytes(bytes(range(256)) * 9), "lacks 3 of the 3 rows", ["3"]),
}


@pytest.mark.parametrize(("damage", "said", "rounds"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_resumed_run_says_which_rows_are_lost(
    damage: Callable[[Path], Any],
    said: str,
    rounds: list[str],
    make_trainer: MakeTrainer,
    tmp_path: Path,
    keeps_files: dict[str, Any],
    says_lost: Callable[..., Any],
) -> None:
    make_trainer(max_rounds=3, **keeps_files).fit(Perceptron(), federation())
    path = tmp_path / "metrics.csv"
    damage(path)
    damaged = path.read_bytes() if path.exists() else None
    with says_lost(said):
        make_trainer(max_rounds=4, **keeps_files).fit(Perceptron(), federation(), ckpt_path="last")
    assert [row["round"] for row in read_rows(tmp_path)] == rounds
    kept = tmp_path / "metrics-damaged.csv"
    assert (kept.read_bytes() if kept.exists() else None) == damaged


def test_rows_that_were_never_logged_are_not_missed(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(max_rounds=2, **{**keeps_files, "logger": False}).fit(Perceptron(), federation())
    make_trainer(max_rounds=5, log_every_n_rounds=2, **keeps_files).fit(Perceptron(), federation(), ckpt_path="last")
    make_trainer(max_rounds=6, **keeps_files).fit(Perceptron(), federation(), ckpt_path="last")
    assert "rows that the run logged" not in caplog.text


@pytest.mark.parametrize(
    "damage",
    [Path.unlink, lambda path: path.write_text("round\r\n"), lambda path: path.write_bytes(b"\xff\xfe")],
    ids=["deleted", "cut", "not UTF-8"],
)
def test_a_file_that_is_changed_during_the_run_is_written_again(
    damage: Callable[[Path], Any],
    make_trainer: MakeTrainer,
    tmp_path: Path,
    keeps_files: dict[str, Any],
    says_lost: Callable[..., Any],
) -> None:
    trainer = make_trainer(max_rounds=3, callbacks=At(1, lambda: damage(tmp_path / "metrics.csv")), **keeps_files)
    with says_lost("changed or deleted by another program"):
        trainer.fit(Perceptron(), federation())
    assert [row["round"] for row in read_rows(tmp_path)] == ["0", "1", "2"]


def test_a_folder_that_is_deleted_during_the_run_is_written_again(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any], says_lost: Callable[..., Any]
) -> None:
    root = tmp_path / "run"
    trainer = make_trainer(
        max_rounds=4, default_root_dir=root, callbacks=At(2, lambda: shutil.rmtree(root)), **keeps_files
    )
    with says_lost("was deleted or moved during the run"):
        trainer.fit(Perceptron(), federation())
    assert [row["round"] for row in read_rows(root)] == ["0", "1", "2", "3"]
    assert checkpoint_file.load(root / "checkpoints" / "last.ckpt")["epoch"] == 4
    assert sorted(path.name for path in root.iterdir()) == [
        "checkpoints",
        "communication.json",
        "metrics.csv",
        "model.ckpt",
    ]


def test_a_run_in_a_folder_that_is_in_use_touches_nothing(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    def second(ckpt_path: str | None) -> None:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(UserError, match="is in use by another run"):
            make_trainer(max_rounds=5, **keeps_files).fit(Perceptron(), federation(), ckpt_path=ckpt_path)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        make_trainer().fit(Perceptron(), federation())  # a run that writes nothing

    callbacks = [At(1, lambda: second(None)), At(2, lambda: second("last"))]
    make_trainer(max_rounds=4, callbacks=callbacks, **keeps_files).fit(Perceptron(), federation())
    assert [row["round"] for row in read_rows(tmp_path)] == ["0", "1", "2", "3"]
    make_trainer(max_rounds=5, **keeps_files).fit(Perceptron(), federation(), ckpt_path="last")


@pytest.mark.parametrize("name", ["metrics.csv", "checkpoints/last.ckpt"])
def test_a_file_that_cannot_be_written_ends_the_run_and_the_last_checkpoint_stays(
    name: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    path, saved = tmp_path / name, tmp_path / "saved"

    def block() -> None:
        path.rename(saved)
        path.mkdir()

    trainer = make_trainer(max_rounds=4, callbacks=At(2, block), **keeps_files)
    with pytest.raises(FileError, match=rf"{name} cannot be written \(\w"):
        trainer.fit(Perceptron(), federation())
    assert not list(tmp_path.rglob(".*"))
    path.rmdir()
    saved.rename(path)
    make_trainer(max_rounds=4, **keeps_files).fit(Perceptron(), federation(), ckpt_path="last")
    assert [row["round"] for row in read_rows(tmp_path)] == ["0", "1", "2", "3"]


def test_a_client_states_folder_that_cannot_be_written_is_named(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(run_folder, "TemporaryFile", refuse)
    (tmp_path / "states").mkdir()
    trainer = make_trainer(client_states=tmp_path / "states")
    with pytest.raises(UserError, match=r"states cannot be written to \(Read-only.*\): use another client_states"):
        trainer.fit(Perceptron(), federation())


def test_a_checkpoint_without_permission_is_not_called_truncated(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trainer(**keeps_files).fit(Perceptron(), federation())

    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"last.ckpt cannot be read \(Permission denied\); other .*previous.ckpt"):
        make_trainer(logger=False).fit(Perceptron(), federation(), ckpt_path="last")


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_deleted_folder_gets_the_client_states_again_or_the_run_ends_with_their_path(
    place: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any], says_lost: Callable[..., Any]
) -> None:
    flags: dict[str, Any] = {"max_rounds": 4, "clients_per_round": 6, "client_states": place, **keeps_files}
    whole, resumed = Perceptron(), Perceptron()
    resumed.load_state_dict(whole.state_dict())
    make_trainer(default_root_dir=tmp_path / "whole", **flags).fit(whole, federation(), SCAFFOLD())
    root = tmp_path / "run"
    deleting = At(1, lambda: shutil.rmtree(root))
    trainer = make_trainer(default_root_dir=root, callbacks=deleting, **{**flags, "max_rounds": 3})
    if place == "disk":
        with pytest.raises(FileError, match=r"client-states-.* cannot be"):
            trainer.fit(resumed, federation(), SCAFFOLD())
        return
    with says_lost("was deleted or moved"):
        trainer.fit(resumed, federation(), SCAFFOLD())
    make_trainer(default_root_dir=root, **flags).fit(resumed, federation(), SCAFFOLD(), ckpt_path="last")
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items())
    assert read_rows(root) == read_rows(tmp_path / "whole")
