"""Test that a run deletes and overwrites only what runs have written in its folder, and nothing through a link."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer
from torch import nn
from toys import Perceptron, Remembering, federation

from lightning_fl import UserError
from lightning_fl.outputs.reservation import Reservation
from lightning_fl.outputs.run_folder import bring_earlier_run_back
from lightning_fl.state.client_states import ClientStates
from lightning_fl.state.saved_states import SavedStates

ROUNDS = (2, 3, 6)
"""Rounds after which a run ends and is resumed: neither checkpoint of the last fit refers to files of the first."""

LINKS_MAY_BE_SAID = pytest.mark.filterwarnings("ignore:.*is a link, through which nothing is deleted")


class Frozen(Perceptron):
    """Perceptron beside a large frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(600, 600, bias=False).requires_grad_(False)


class Teacher(Frozen):
    """The same with a layer that moves in every round, so that each checkpoint has another file for it."""

    def on_train_epoch_end(self) -> None:
        self.body.weight.mul_(0.5)


class Once(L.Callback):
    """Callback that does something before one round."""

    def __init__(self, round_index: int, action: Callable[[], Any]) -> None:
        self.round_index, self.action = round_index, action

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.round_index:
            self.action()


@pytest.fixture
def go_on(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> Callable[..., None]:
    """Return a function that trains a run up to a round."""

    def train(rounds: int, **flags: Any) -> None:
        trainer = make_trainer(max_rounds=rounds, **{**keeps_files, **flags})
        trainer.fit(Teacher(), federation(), Remembering(), ckpt_path="last" if rounds > ROUNDS[0] else None)

    return train


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """Return what is below a folder by its path: a file's bytes, where a link leads to, None for a folder."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = kind
    return found


def put(folder: Path, elsewhere: Path) -> None:
    """Put what no run has written into a folder: names as of runs, others, and links."""
    (elsewhere / "clients").mkdir(parents=True)
    for name in ("clients/0.rows", "notes.txt", "0123456789abcdef.pt"):
        (elsewhere / name).write_text(name)
    shutil.copytree(elsewhere, folder / "7")
    shutil.copytree(elsewhere, folder / "archive")
    for name in ("9", "thesis.pt", "0123456789abcdef.pt", "fedcba9876543210.pt.bak", "\u0664", "with\nline", ".place"):
        (folder / name).write_text(name)
    for name in ("8", "linked", "fedcba9876543210.pt"):
        (folder / name).symlink_to(elsewhere)


@LINKS_MAY_BE_SAID
@pytest.mark.parametrize("kind", ["client_states", "frozen"])
@pytest.mark.parametrize("is_link", [False, True])
def test_what_no_run_has_written_stays(kind: str, is_link: bool, go_on: Callable[..., None], tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "checkpoints" / kind, tmp_path / "elsewhere"
    place = tmp_path / "scratch" if is_link else folder
    go_on(ROUNDS[0])
    if is_link:
        shutil.move(folder, place)
        folder.symlink_to(place)
    own = contents(place)
    put(place, elsewhere)
    before, linked = {name: x for name, x in contents(place).items() if is_link or name not in own}, contents(elsewhere)
    for rounds in ROUNDS[1:]:
        go_on(rounds)
    assert before.items() <= contents(place).items()
    assert contents(elsewhere) == linked


@LINKS_MAY_BE_SAID
@pytest.mark.parametrize("linked", ["checkpoints", "checkpoints/client_states", "checkpoints/frozen"])
def test_nothing_is_deleted_through_a_link_and_the_run_says_so(
    linked: str, go_on: Callable[..., None], tmp_path: Path
) -> None:
    """The folder of a run is moved away, as to a larger disk, and a link stands in its place."""
    go_on(ROUNDS[0])
    shutil.move(tmp_path / linked, tmp_path / "scratch")
    (tmp_path / linked).symlink_to(tmp_path / "scratch")
    kept = {path for path in contents(tmp_path / "scratch") if path.endswith((".rows", ".pt"))}
    go_on(ROUNDS[1])
    with pytest.warns(UserWarning, match=f"{linked} is a link, through which nothing is deleted"):
        go_on(ROUNDS[2])
    assert kept <= contents(tmp_path / "scratch").keys()


def test_states_of_another_run_that_were_copied_beside_a_runs_own_stay(
    go_on: Callable[..., None], tmp_path: Path
) -> None:
    go_on(ROUNDS[0], default_root_dir=tmp_path / "other")
    go_on(ROUNDS[0])
    states = tmp_path / "checkpoints" / "client_states"
    shutil.copytree(tmp_path / "other" / "checkpoints" / "client_states" / "1", states / "2")
    for rounds in ROUNDS[1:]:
        go_on(rounds)
    assert sorted(path.name for path in states.iterdir()) == ["2", "4"]
    assert contents(states / "2") == contents(tmp_path / "other" / "checkpoints" / "client_states" / "1")


def test_states_that_a_killed_fit_has_left_are_deleted_but_not_what_others_have_put_beside_them(tmp_path: Path) -> None:
    """A kill comes between the states and their checkpoint, to which nothing else refers."""
    states = ClientStates()
    states[0] = {"control": torch.ones(3)}
    for completes in (False, False, True):
        saved = SavedStates(tmp_path)
        saved.write({"clients": states, "client_memory": ClientStates()})
        notes = tmp_path / "client_states" / "1" / "clients" / "notes.txt"
        notes.write_text("mine")
        if completes:
            saved.release()
    left = contents(tmp_path / "client_states")
    assert [name for name, content in left.items() if content is not None] == [
        "1/clients/notes.txt",
        "3/.place",
        "3/clients/0.rows",
    ]


@pytest.mark.parametrize("name", ["checkpoints/frozen/*.pt", "checkpoints/client_states/1/clients/*.rows"])
def test_a_file_that_is_damaged_while_the_run_lives_is_written_again(
    name: str, make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    def damage() -> None:
        for path in tmp_path.glob(name):
            path.write_bytes(b"x" * path.stat().st_size)

    module = Frozen()
    flags = {"clients_per_round": 2, **keeps_files}
    trainer = make_trainer(max_rounds=3, callbacks=Once(1, damage), **flags)
    trainer.fit(module, federation(), Remembering())
    resumed = make_trainer(max_rounds=4, **{**flags, "clients_per_round": 6})  # which reads all states
    resumed.fit(Frozen(), federation(), Remembering(), ckpt_path="last")
    assert resumed.run.round == 4


@pytest.mark.parametrize("place", ["disk", "scratch"])
def test_a_refused_fit_leaves_no_folder_of_states(place: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    root = tmp_path / "run"
    if place != "disk":
        (tmp_path / place).mkdir()
    trainer = make_trainer(
        client_states=place if place == "disk" else tmp_path / place, default_root_dir=root, enable_checkpointing=True
    )
    (tmp_path / "damaged.ckpt").write_bytes(b"damaged")
    with pytest.raises(UserError, match="damaged"):
        trainer.fit(Perceptron(), federation(), Remembering(), ckpt_path=tmp_path / "damaged.ckpt")
    assert not list(tmp_path.rglob("client-states-*"))
    assert not root.exists()


def test_a_folder_that_looks_like_a_run_set_aside_stays(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (root / "earlier-1.moving", root / "earlier-x.moving", elsewhere):
        folder.mkdir(parents=True)
        for name in ("metrics.csv", "notes.txt"):
            (folder / name).write_text(str(folder))
    (root / "metrics.csv").write_text("of the new run")
    (root / "earlier-2.moving").symlink_to(elsewhere)
    before = contents(tmp_path)
    bring_earlier_run_back(str(root))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["checkpoints", "."])
def test_temporary_files_are_not_removed_through_a_link(name: str, tmp_path: Path) -> None:
    """The folder of the run itself may be a link."""
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".last.ckpt.23.writing").write_text("of another run")
    (elsewhere / ".metrics.csv.23.writing").symlink_to(elsewhere / ".last.ckpt.23.writing")
    if name != ".":
        root.mkdir()
    (root / name).symlink_to(elsewhere) if name != "." else root.symlink_to(elsewhere)
    mine = Reservation(str(root))
    mine.begin()
    mine.end()
    left = {path.name for path in elsewhere.iterdir()}
    assert left == ({".metrics.csv.23.writing"} | ({".last.ckpt.23.writing"} if name != "." else set()))


@pytest.mark.parametrize(
    "name", ["hparams.yaml", "config.yaml", "metrics-damaged.csv", "metrics.csv", "communication.json"]
)
def test_a_link_in_the_place_of_a_file_is_replaced(
    name: str, make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    """The run is resumed from another folder, after its last row was lost."""
    mine, first, second = tmp_path / "mine", tmp_path / "first", tmp_path / "second"
    mine.write_text("mine")
    make_trainer(max_rounds=2, default_root_dir=first, **keeps_files).fit(Perceptron(), federation())
    (first / "config.yaml").write_text("{}")
    shutil.copytree(first, second)
    for folder in (first, second):
        rows = (folder / "metrics.csv").read_text().splitlines(keepends=True)
        (folder / "metrics.csv").write_text("".join(rows[:-1]))
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(mine)
    for folder in (first, second, tmp_path / "third"):
        if folder.name == "third":
            folder.mkdir()
            (folder / name).symlink_to(mine)
        trainer = make_trainer(max_rounds=3, default_root_dir=folder, **keeps_files)
        trainer.fit(Perceptron(), federation(), ckpt_path=first / "checkpoints" / "last.ckpt")
    assert mine.read_text() == "mine"


def test_a_link_in_the_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / ".run.lock").symlink_to(mine)
    with pytest.raises(UserError, match=r"\.run\.lock is a link, but the run locks a file of this name: move it away"):
        Reservation(str(tmp_path)).begin()
    assert mine.read_text() == "mine"
