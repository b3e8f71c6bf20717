"""Test the command line where files cannot be written, and where processes cannot start; each command has its own process."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import yaml
from test_cli import SMALL, metrics

from lightning_fl.cli import main
from lightning_fl.outputs import checkpoint_file


def heard(folder: str, words: list[str], limit: int) -> None:
    """Run a command in `folder`, whose files may have at most `limit` bytes; write its output and exit code to files."""
    os.chdir(folder)
    os.dup2(os.open("heard", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    code: Any = 0
    try:
        main(words)
    except SystemExit as ended:
        code = ended.code
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    Path("code").write_text(str(code or 0))


def ended(folder: Path, *words: str, limit: int = resource.RLIM_INFINITY) -> tuple[str, str]:
    """Return exit code and last line of a command with a configuration of five rounds."""
    given = {**SMALL, "trainer": {**SMALL["trainer"], "max_rounds": 5}}  # type: ignore[dict-item]
    (folder / "small.yaml").write_text(yaml.safe_dump(given))
    processes.run(heard, str(folder), [words[0], "--config", "small.yaml", *words[1:]], limit)
    text = (folder / "heard").read_text()
    assert "Traceback" not in text
    return (folder / "code").read_text(), text.splitlines()[-1]


def hidden(folder: Path) -> list[Path]:
    return list(folder.rglob(".*"))


@pytest.mark.slow
def test_a_file_size_limit_ends_a_run_with_one_line_and_it_goes_on_without(tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "limited"
    whole.mkdir()
    folder.mkdir()
    assert ended(whole, "fit")[0] == "0"
    assert ended(folder, "fit", "--trainer.max_rounds", "2")[0] == "0"
    last = folder / "run" / "checkpoints" / "last.ckpt"
    saved = last.read_bytes()
    assert ended(folder, "fit", "--ckpt_path", "last", limit=5_000) == (
        "1",
        f"lightning-fl: error: {last} cannot be written (File too large); "
        "--ckpt_path last resumes after the last complete round.",
    )
    assert last.read_bytes() == saved
    assert hidden(folder) == []
    assert ended(folder, "fit", "--ckpt_path", "last")[0] == "0"
    assert metrics(str(folder / "run")) == metrics(str(whole / "run"))
    code, line = ended(folder, "predict", "--ckpt_path", "last", limit=1_000)
    assert (code, line) == (
        "1",
        f"lightning-fl: error: {folder}/run/predictions.pt cannot be written (File too large).",
    )
    assert hidden(folder) == []
    assert not (folder / "run" / "predictions.pt").exists()


@pytest.mark.slow
def test_a_full_disk_ends_a_run_with_one_line_and_it_goes_on_with_more_room(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    mount = [shutil.which("mount") or "mount", "-t", "tmpfs"]
    try:
        subprocess.run([*mount, "-o", "size=48k", "none", root], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a file system")
    try:
        code, line = ended(tmp_path, "fit")
        last = root / "checkpoints" / "last.ckpt"
        assert line.startswith(
            f"lightning-fl: error: {last} cannot be written (No space left on device); --ckpt_path last"
        )
        assert code == "1"
        assert checkpoint_file.load(last)["epoch"] > 0
        assert hidden(root) == []
        subprocess.run([*mount, "-o", "remount,size=1m", "none", root], check=True)
        assert ended(tmp_path, "fit", "--ckpt_path", "last")[0] == "0"
        assert [row["round"] for row in metrics(str(root))] == list("01234")
    finally:
        subprocess.run(["umount", root], check=False)


@pytest.mark.parametrize("place", ["predictions.pt", ""])
def test_predictions_that_cannot_be_saved_are_refused_before_they_are_made(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run", place).mkdir(parents=True) if place else Path("run").touch()
    Path("small.yaml").write_text(yaml.safe_dump(SMALL))
    words = ["predict", "--config", "small.yaml", "--trainer.limit_predict_batches", "0.7"]
    monkeypatch.setattr(sys, "argv", ["lightning-fl", *words])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"lightning-fl: error: {tmp_path}/run/predictions.pt is a folder, but predictions are written to a file of this name: "
        "move it away."
        if place
        else f"lightning-fl: error: the folder {tmp_path}/run cannot be written to (File exists): use another default_root_dir."
    )
