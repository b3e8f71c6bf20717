"""Test that one process at a time writes to a run's folder."""

import errno
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_fl.errors import FileError, UserError
from lightning_fl.outputs import reservation
from lightning_fl.outputs.reservation import Reservation


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def held(root: str) -> Iterator[Reservation]:
    """Return a reservation that this process holds."""
    first = Reservation(root)
    first.begin()
    yield first
    first.end()


def test_a_second_run_is_refused_until_the_first_ends(root: str) -> None:
    first, second = Reservation(root), Reservation(root)
    first.begin()
    with pytest.raises(UserError, match=rf"process {os.getpid()} on {socket.gethostname()}, since \d+-\d+-\d+ \d+:\d+"):
        second.begin()
    second.end()
    with pytest.raises(UserError, match="in use by another run"):
        second.begin()
    first.end()
    second.begin()
    assert len(list(Path(root).iterdir())) == 1
    second.end()
    assert not Path(root).exists(), "a folder in which nothing was written must go"


@pytest.mark.long
def test_a_process_that_dies_holds_nothing_even_if_it_has_forked(root: str) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        mine = Reservation(root)
        mine.begin()
        worker = os.fork()
        os.write(writer, f"{worker}\n".encode() if worker else b"")
        signal.pause()
    worker = int(os.read(reader, 100))
    try:
        with pytest.raises(UserError, match=f"process {child} on"):
            Reservation(root).begin()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.kill(worker, 0)  # it lives
        mine = Reservation(root)
        mine.begin()
        mine.end()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_temporary_files_of_dead_processes_are_removed(root: str) -> None:
    left = [".metrics.csv.1.writing", "checkpoints/.last.ckpt.23.writing", "checkpoints/.previous.ckpt.23.linking"]
    kept = ["metrics.csv", "checkpoints/last.ckpt", "notes.writing", ".notes.writing", ".draft.v2.linking"]
    Path(root, "checkpoints").mkdir(parents=True)
    for name in left + kept:
        Path(root, name).touch()
    mine = Reservation(root)
    mine.begin()
    mine.end()
    assert sorted(str(path.relative_to(root)) for path in Path(root).rglob("*") if path.is_file()) == sorted(kept)


@pytest.mark.parametrize(
    "name", ["metrics.csv", "hparams.yaml", "config.yaml", "communication.json", "model.ckpt", "checkpoints/last.ckpt"]
)
def test_a_folder_in_the_place_of_a_file_is_refused(name: str, root: str) -> None:
    Path(root, name).mkdir(parents=True)
    mine = Reservation(root)
    with pytest.raises(UserError, match=f"{name} is a folder"):
        mine.begin()
    mine.end()


def test_a_file_in_the_place_of_the_checkpoints_is_refused(root: str) -> None:
    Path(root).mkdir()
    Path(root, "checkpoints").touch()
    mine = Reservation(root)
    with pytest.raises(UserError, match=r"checkpoints cannot be written to \(File exists\)"):
        mine.begin()
    mine.end()


def test_a_file_system_without_locks_is_used_with_a_warning(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, *, blocking: bool) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(reservation, "lock_descriptor", refuse)
    mine = Reservation(root)
    with pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\)"):
        mine.begin()
    assert list(Path(root).iterdir()) == []
    mine.renew()
    mine.end()


def test_a_folder_that_is_deleted_is_made_again(root: str, held: Reservation, says_lost: Callable[..., Any]) -> None:
    held.renew()
    Path(root, reservation.LOCK).unlink()
    held.renew()
    os.rename(root, f"{root}-moved")
    with says_lost("was deleted or moved during the run"):
        held.renew()
    with pytest.raises(UserError, match="in use by another run"):
        Reservation(root).begin()


def test_a_folder_that_another_run_has_taken_ends_this_one(root: str, held: Reservation) -> None:
    shutil.rmtree(root)
    other = Reservation(root)
    other.begin()
    with pytest.raises(FileError, match=f"another run uses it now: process {os.getpid()}"):
        held.renew()
    held.end()
    other.renew()
    assert Path(root, reservation.LOCK).is_file()
    other.end()
