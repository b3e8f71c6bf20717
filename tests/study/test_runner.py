"""Test the runner with programs that stand for fits."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_fl.study import runner
from lightning_fl.study.runner import command, train
from lightning_fl.study.study_file import PlannedRun

FIT = """
import os, pathlib, sys, time
flags = dict(word[2:].split("=", 1) for word in sys.argv[2:])
folder = pathlib.Path(flags["trainer.default_root_dir"])
(folder / "checkpoints").mkdir(exist_ok=True)
with (folder / "calls.txt").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + f" threads={os.environ['OMP_NUM_THREADS']}\\n")
(folder / "metrics.csv").write_text("round\\n0\\n1\\n")
(folder / "checkpoints" / "last.ckpt").touch()
while (folder / "wait").exists():
    time.sleep(0.01)
if (folder / "fails").exists():
    sys.exit("lightning-fl: error: it does not fit.")
"""


@pytest.fixture(autouse=True)
def _fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PROGRAM", FIT)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)


def planned(folder: Path, *cells: str) -> list[PlannedRun]:
    return [PlannedRun(cell, 0, folder / cell, ("--algorithm=FedAvg",), 2) for cell in cells]


def calls(run: PlannedRun) -> list[str]:
    return (run.folder / "calls.txt").read_text().splitlines()


def test_every_run_is_trained_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = planned(tmp_path, "a", "b", "c")
    for _ in range(2):
        outcome = train(runs, jobs=2, threads=3, retry=False)
        assert (outcome.done, outcome.failed, outcome.elsewhere) == (runs, {}, [])
    assert all(
        calls(run) == [" ".join(command(run, 3)).replace(" --ckpt_path=last", "") + " threads=3"] for run in runs
    )
    said = capsys.readouterr().err
    assert all(said.count(f"{run.cell}, seed 0: done in 0 s") == 1 for run in runs)


def test_threads_that_a_study_gives_are_not_overridden(tmp_path: Path) -> None:
    given = "--trainer.threads=1"
    words = command(PlannedRun("a", 0, tmp_path, ("--algorithm=FedAvg", given), 2), threads=2)
    assert [word for word in words if word.startswith("--trainer.threads")][-1] == given


def test_as_many_run_at_once_as_there_are_jobs(tmp_path: Path) -> None:
    runs = planned(tmp_path, "a", "b", "c")
    for run in runs:
        run.folder.mkdir()
        (run.folder / "wait").touch()
    thread = threading.Thread(target=_release, args=(runs,))
    thread.start()
    assert train(runs, jobs=2, threads=1, retry=False).done == runs
    thread.join()


def _release(runs: list[PlannedRun]) -> None:
    """Check that two of three runs have begun, and let them end."""
    first, second, third = runs
    while not all((run.folder / "calls.txt").exists() for run in (first, second)):
        time.sleep(0.01)
    time.sleep(0.1)
    assert not (third.folder / "calls.txt").exists()
    for run in runs:
        (run.folder / "wait").unlink()


def test_a_run_that_failed_is_tried_again_when_told(tmp_path: Path) -> None:
    (run,) = runs = planned(tmp_path, "a")
    run.folder.mkdir()
    (run.folder / "fails").touch()
    for _ in range(2):
        outcome = train(runs, jobs=1, threads=1, retry=False)
        assert outcome.failed == {run: "lightning-fl: error: it does not fit."}
        assert len(calls(run)) == 1
    (run.folder / "fails").unlink()
    assert train(runs, jobs=1, threads=1, retry=True).done == runs
    assert calls(run)[1].split()[-2] == "--ckpt_path=last", "it goes on after its last round"
    assert not (run.folder / "failed.json").exists()
    assert json.loads((run.folder / "done.json").read_text())["arguments"] == ["--algorithm=FedAvg"]


STUDY = """
import sys
from pathlib import Path
from lightning_fl.study import runner
from lightning_fl.study.study_file import PlannedRun
runner.PROGRAM = sys.argv[1]
runner.train([PlannedRun("a", 0, Path(sys.argv[2]), (), 2)], 1, 1, False)
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_study_that_is_stopped_does_not_train_a_run_twice(sent: signal.Signals, tmp_path: Path) -> None:
    """Check that SIGTERM ends the fits, and that a fit that outlives its study keeps its folder."""
    (run,) = runs = planned(tmp_path, "a")
    run.folder.mkdir()
    (run.folder / "wait").touch()
    process = subprocess.Popen([sys.executable, "-c", STUDY, FIT, str(run.folder)], stderr=subprocess.DEVNULL)
    while not (run.folder / "checkpoints" / "last.ckpt").exists():
        time.sleep(0.01)
    process.send_signal(sent)
    assert process.wait(30) != 0
    if sent == signal.SIGKILL:
        assert train(runs, jobs=1, threads=1, retry=False).elsewhere == runs
        (run.folder / "wait").unlink()
        deadline = time.monotonic() + 30
        while train(runs, jobs=1, threads=1, retry=False).elsewhere and time.monotonic() < deadline:
            time.sleep(0.05)
    else:
        (run.folder / "wait").unlink()
    assert train(runs, jobs=1, threads=1, retry=False).done == runs
    assert len(calls(run)) == 2


def test_a_run_that_another_study_trains_meanwhile_is_not_trained_again(tmp_path: Path) -> None:
    first, second = runs = planned(tmp_path, "a", "b")
    first.folder.mkdir()
    (first.folder / "wait").touch()
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(train(runs, jobs=1, threads=1, retry=False)))
    # Signals are only handled in the main thread, where the other study is.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", lambda *_: None)
        thread.start()
        while not (first.folder / "calls.txt").exists():
            time.sleep(0.01)
        other = train(runs, jobs=1, threads=1, retry=False)
        assert (other.done, other.elsewhere) == ([second], [first])
        (first.folder / "wait").unlink()
        thread.join()
    assert (outcomes[0].done, outcomes[0].elsewhere) == (runs, [])
    assert [len(calls(run)) for run in runs] == [1, 1]


def test_each_line_says_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = planned(tmp_path, "a", "b", "c")
    train(runs[:1], jobs=1, threads=1, retry=False)
    runs[1].folder.mkdir()
    (runs[1].folder / "fails").touch()
    capsys.readouterr()
    train(runs, jobs=1, threads=1, retry=False)
    failed, done = capsys.readouterr().err.splitlines()
    said = r"b, seed 0: failed \(1 of 2 left, about \d+ s\): lightning-fl: error: it does not fit\."
    assert re.fullmatch(said, failed)
    assert re.fullmatch(r"c, seed 0: done in \d+ s", done)


def test_several_accelerators_are_given_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "import os, pathlib, sys; f = next(x for x in sys.argv if 'root_dir' in x).split('=', 1)[1]; "
    said += "pathlib.Path(f, 'device').write_text(os.environ.get('CUDA_VISIBLE_DEVICES', 'all'))"
    monkeypatch.setattr(runner, "PROGRAM", said)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for num_accelerators, expected in ((2, {"0", "1"}), (1, {"all"})):
        runs = [PlannedRun(cell, 0, tmp_path / str(num_accelerators) / cell, (), 1) for cell in "ab"]
        train(runs, jobs=2, threads=1, retry=False, num_accelerators=num_accelerators)
        assert {(run.folder / "device").read_text() for run in runs} == expected
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
