"""Test that a file is always the old one or the new one."""

import errno
import os
from pathlib import Path

import pytest
import torch

from lightning_fl.errors import FileError
from lightning_fl.outputs import checkpoint_file
from lightning_fl.outputs.communication_json import write_communication
from lightning_fl.outputs.files import append, ends_of, replacing, writing


def test_an_error_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path, "w") as file:
        file.write(str(1 / 0))
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("file", "old")]
    with replacing(path, "w", keep_as="previous") as file:
        file.write("new")
    assert (path.read_text(), (tmp_path / "previous").read_text()) == ("new", "old")


@pytest.mark.parametrize("middle", [b"", b"b\n", b"b\n" * 3000, b"\r" * 9000 + b"\n"], ids=len)
@pytest.mark.parametrize("last", [b"", b"c", b"c\r\n", b"c" * 10_000 + b"\n"], ids=len)
def test_the_first_and_the_last_line_of_a_file(middle: bytes, last: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for first in (b"", b"a", b"a\n", b"a" * 5000 + b"\n"):
        path.write_bytes(first + middle + last)
        lines = path.read_bytes().split(b"\n")
        lines = [*(line + b"\n" for line in lines[:-1]), *filter(None, lines[-1:])]
        assert ends_of(path) == (lines[0] if lines else b"", lines[-1] if len(lines) > 1 else b"")


def test_what_cannot_be_appended_whole_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old\n")
    append(path, "new\n")

    def fails(self: Path, *_: object, **options: object) -> None:
        with open(self, "a") as file:
            file.write("mo")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(FileError, match=r"file cannot be written \(No space left on device\)"):
        append(path, "more\n")
    monkeypatch.undo()
    assert path.read_text() == "old\nnew\n"


def test_two_processes_that_write_one_file_use_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with replacing(tmp_path / "file", "w") as mine:
        mine.write("mine")
        monkeypatch.setattr(os, "getpid", lambda: 12345)
        with replacing(tmp_path / "file", "w") as theirs:
            theirs.write("theirs")
        monkeypatch.undo()
        assert (tmp_path / "file").read_text() == "theirs"
    assert (tmp_path / "file").read_text() == "mine"


def test_a_long_name_may_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 250)
    with replacing(path, "w") as file:
        file.write("whole")
    assert path.read_text() == "whole"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write temporary files to a device that is always full."""
    path = tmp_path / "last.ckpt"
    checkpoint_file.save_atomically({"state_dict": {}}, path)
    before = path.read_bytes()
    monkeypatch.setattr(
        "builtins.open", lambda name, *arguments, **options: os.fdopen(os.open("/dev/full", os.O_WRONLY), *arguments)
    )
    with pytest.raises(FileError, match=r"last\.ckpt cannot be written \(No space left on device\)"):
        checkpoint_file.save_atomically({"state_dict": {"weight": torch.ones(10_000)}}, path, keep_previous=True)
    with pytest.raises(FileError, match=r"communication\.json cannot be written \(No space left on device\)"):
        write_communication(tmp_path, 1, {"up": {}, "down": {}})
    monkeypatch.undo()
    assert {found.name: found.read_bytes() for found in tmp_path.iterdir()} == {"last.ckpt": before}


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), writing("file"):
        raise RuntimeError("shapes differ")
    with (
        pytest.raises(FileError, match=r"^file cannot be written \(Is a directory\)$"),
        writing("file"),
        writing("folder/file"),
    ):
        raise FileError("file cannot be written (Is a directory)")
    with pytest.raises(FileError, match=r"file cannot be written \(Read-only file system\)"), writing("file"):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "file")


@pytest.mark.parametrize("sync", [True, False])
def test_the_disk_has_the_new_file_before_the_old_one_goes(
    sync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, replace = list[str](), os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("synced"))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("replaced"), replace(old, new)))
    with replacing(tmp_path / "file", "w", sync=sync) as file:
        file.write("new")
    assert done == (["synced", "replaced"] if sync else ["replaced"])
    assert (tmp_path / "file").read_text() == "new"
