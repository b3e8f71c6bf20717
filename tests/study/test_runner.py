"""Test the runner with programs that stand for fits."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_fl.outputs.files import ends_of
from lightning_fl.study import runner
from lightning_fl.study.runner import changes_since, command, train
from lightning_fl.study.study_file import PlannedRun

pytestmark = pytest.mark.process
FIT = """
import os, pathlib, sys, time, zipfile
flags = dict(word[2:].split("=", 1) for word in sys.argv[2:])
folder = pathlib.Path(flags["trainer.default_root_dir"])
(folder / "checkpoints").mkdir(exist_ok=True)
with (folder / "calls.txt").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + f" threads={os.environ['OMP_NUM_THREADS']}\\n")
(folder / "metrics.csv").write_text("round\\n0\\n1\\n" if not (folder / "short").exists() else "round\\n0\\n")
zipfile.ZipFile(folder / "checkpoints" / "last.ckpt", "w").close()
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
    assert all(said.count(f"{run.cell}, seed 0: done in ") == 1 for run in runs)


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


def test_runs_whose_own_files_have_changed_are_kept_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "my_method.py"
    own.write_text("first")
    finished, failed, other = (replace(run, own_files=(own,)) for run in planned(tmp_path, "a", "b", "c"))
    failed.folder.mkdir()
    (failed.folder / "fails").touch()
    train([finished, failed], jobs=1, threads=1, retry=False)
    assert changes_since([finished, failed, other], tmp_path) is None
    own.write_text("second")
    told = changes_since([finished, failed, other], Path("runs"))
    assert told is not None
    assert told.startswith("my_method.py has changed since 2 runs of a, b began, ")
    assert told.endswith("remove their folders in runs.")
    (failed.folder / "fails").unlink()
    train([finished, failed], jobs=1, threads=1, retry=True)
    assert [len(calls(run)) for run in (finished, failed)] == [1, 2]
    assert changes_since([finished, failed], Path("runs")) == told, "the first rounds of a resumed run had the old code"
    shutil.rmtree(finished.folder)
    train([finished], jobs=1, threads=1, retry=False)
    assert changes_since([finished], Path("runs")) is None


ROWS = {"gone": None, "empty": b"", "only columns": b"round\r\n", "cut": b"round\r\n0", "no text": b"\xff\0\xfe"}


@pytest.mark.parametrize("content", ROWS.values(), ids=ROWS.keys())
def test_a_run_whose_rows_cannot_be_read_is_trained_again(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, other = runs = planned(tmp_path, "a", "b")
    train(runs, jobs=1, threads=1, retry=False)
    path = damaged.folder / "metrics.csv"
    path.unlink() if content is None else path.write_bytes(content)
    assert train(runs, jobs=1, threads=1, retry=False).done == runs
    assert [len(calls(run)) for run in runs] == [2, 1]
    assert "ckpt_path" not in calls(damaged)[1], "there is nothing to go on with"
    assert "a, seed 0: it was done, and is trained again from the beginning: " in capsys.readouterr().err
    assert calls(other) == calls(other)[:1]


def test_a_run_that_ends_without_rows_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = runs = planned(tmp_path, "a")
    monkeypatch.setattr(runner, "PROGRAM", FIT + "\n(folder / 'metrics.csv').unlink()")
    outcome = train(runs, jobs=1, threads=1, retry=False)
    assert outcome.done == []
    assert "it has no metrics.csv" in outcome.failed[run]
    monkeypatch.setattr(runner, "PROGRAM", FIT)
    assert train(runs, jobs=1, threads=1, retry=True).done == runs
    assert "ckpt_path" not in calls(run)[1]


@pytest.mark.parametrize("has_previous", [True, False])
def test_a_run_with_a_damaged_checkpoint_goes_on_from_the_previous_one(has_previous: bool, tmp_path: Path) -> None:
    (run,) = runs = planned(tmp_path, "a")
    train(runs, jobs=1, threads=1, retry=False)
    (run.folder / "done.json").unlink()
    checkpoints = run.folder / "checkpoints"
    if has_previous:
        (checkpoints / "previous.ckpt").write_bytes((checkpoints / "last.ckpt").read_bytes())
    (checkpoints / "last.ckpt").write_bytes((checkpoints / "last.ckpt").read_bytes()[:-5])
    assert train(runs, jobs=1, threads=1, retry=False).done == runs
    assert (f"--ckpt_path={checkpoints / 'previous.ckpt'} " in calls(run)[1]) == has_previous
    assert ("ckpt_path" in calls(run)[1]) == has_previous


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_a_damaged_note_of_a_failure_is_no_failure_of_the_study(content: bytes, tmp_path: Path) -> None:
    (run,) = runs = planned(tmp_path, "a")
    run.folder.mkdir()
    (run.folder / "failed.json").write_bytes(content)
    assert train(runs, jobs=1, threads=1, retry=False).failed == {run: "failed.json cannot be read"}
    assert train(runs, jobs=1, threads=1, retry=True).done == runs


def test_a_file_in_place_of_a_folder_costs_one_run(tmp_path: Path) -> None:
    runs = planned(tmp_path, "a", "b")
    runs[0].folder.write_text("mine")
    outcome = train(runs, jobs=1, threads=1, retry=False)
    assert outcome.failed == {runs[0]: f"{runs[0].folder} cannot be written (File exists)"}
    assert outcome.done == runs[1:]


def test_a_run_that_max_time_stopped_goes_on_when_it_is_raised(tmp_path: Path) -> None:
    (run,) = planned(tmp_path, "a")
    limited = replace(run, max_seconds=60.0)
    run.folder.mkdir()
    (run.folder / "short").touch()
    train([limited], jobs=1, threads=1, retry=False)
    for limit, num_calls in ((60.0, 1), (30.0, 1), (90.0, 2), (90.0, 2), (None, 3)):
        again = replace(run, max_seconds=limit)
        assert train([again], jobs=1, threads=1, retry=False).done == [again]
        assert len(calls(run)) == num_calls
    assert all("--ckpt_path=last" in call for call in calls(run)[1:])


def test_a_run_with_all_its_rounds_is_done_whatever_max_time_was(tmp_path: Path) -> None:
    (run,) = planned(tmp_path, "a")
    train([replace(run, max_seconds=60.0)], jobs=1, threads=1, retry=False)
    assert train([run], jobs=1, threads=1, retry=False).done == [run]
    assert len(calls(run)) == 1


STUDY = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
from lightning_fl.study import runner
from lightning_fl.study.study_file import PlannedRun
runner.PROGRAM = sys.argv[1]
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
runner.train([PlannedRun("a", 0, Path(sys.argv[2]), (), 2)], 1, 1, False)
"""


@pytest.mark.parametrize("sent", ["SIGTERM", "SIGHUP", "SIGKILL"])
def test_no_fit_outlives_its_study(sent: str, tmp_path: Path) -> None:
    """Check that a fit ends, however its study does, and that the run is then trained once more."""
    (run,) = runs = planned(tmp_path, "a")
    run.folder.mkdir()
    (run.folder / "wait").touch()
    process = subprocess.Popen([sys.executable, "-c", STUDY, FIT, str(run.folder)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (run.folder / "checkpoints" / "last.ckpt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(getattr(signal, sent))
    assert process.wait(60) != 0
    with (run.folder / runner.LOCK).open() as lock:  # which the fit holds too
        while not is_free(lock) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert is_free(lock), "the fit goes on without its study"
    (run.folder / "wait").unlink()
    assert train(runs, jobs=1, threads=1, retry=False).done == runs
    assert len(calls(run)) == 2


def is_free(lock: Any) -> bool:
    """True if nobody else holds a lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True


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
    said = r"b, seed 0: failed \(1 of 2 left(, about [1-9]\d* s)?\): lightning-fl: error: it does not fit\."
    assert re.fullmatch(said, failed)
    assert re.fullmatch(r"c, seed 0: done in \d+ s", done)


def test_what_is_left_is_counted_in_rounds_and_not_in_rows(tmp_path: Path) -> None:
    run = replace(planned(tmp_path, "a")[0], num_rounds=100)
    run.folder.mkdir()
    for rows, num_rounds in ((b"", 0), (b"round,loss\r\n", 0), (b"round,loss\r\n9,1\r\n19,1\r\n", 20)):
        (run.folder / "metrics.csv").write_bytes(rows)
        assert runner._rounds_logged(run) == num_rounds


def test_a_run_without_new_rows_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, read = planned(tmp_path, "a", "b", "c"), list[Path]()
    monkeypatch.setattr(runner, "ends_of", lambda path: read.append(path) or ends_of(path))
    for run in runs:
        run.folder.mkdir()
        (run.folder / "metrics.csv").write_bytes(b"round,loss\r\n0,1\r\n")
    listed = runner._Listed(runs, retry=False)
    (runs[0].folder / "metrics.csv").write_bytes(b"round,loss\r\n0,1\r\n1,1\r\n")
    for _ in range(2):
        listed.left(runs)
    assert [path.parent for path in read] == [run.folder for run in (*runs, runs[0])]


def test_the_checkpoint_of_a_done_run_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = planned(tmp_path, "a")
    checkpoint = run.folder / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"damaged")
    (run.folder / "metrics.csv").write_bytes(b"round,loss\r\n0,1\r\n")
    assert "--ckpt_path=last" not in runner.command(run, threads=1)
    (run.folder / "done.json").write_text('{"max_seconds": null}')
    monkeypatch.setattr(runner, "_is_whole", lambda _: pytest.fail("read"))
    assert "--ckpt_path=last" in runner.command(run, threads=1)


def test_runs_that_a_budget_ends_early_count_as_long_as_those_before(tmp_path: Path) -> None:
    done, same, other = (replace(run, num_rounds=800) for run in planned(tmp_path, "a", "b", "c"))
    same = replace(same, cell=done.cell)
    done.folder.mkdir()
    (done.folder / "metrics.csv").write_bytes(b"round,loss\r\n24,1\r\n")
    listed = runner._Listed([done, same, other], retry=False)
    assert listed.rounds_left([same, other]) == 800 + 800
    (done.folder / "done.json").write_text("{}")
    assert listed.rounds_left([same, other]) == 25 + 800
    same.folder.mkdir()
    (same.folder / "metrics.csv").write_bytes(b"round,loss\r\n9,1\r\n")
    assert listed.rounds_left([same]) == 15
    listed.known, listed.waiting = -10, []  # ten rounds trained
    listed.began -= 100
    assert ", about " in listed.left([same])
    assert ", at most " in listed.left([same, other]), "other may end early as well"


def test_a_fit_that_is_killed_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = runs = planned(tmp_path, "a")
    run.folder.mkdir()
    (run.folder / "output.txt").write_text("said by an earlier fit\n")
    monkeypatch.setattr(runner, "PROGRAM", "import os; os.kill(os.getpid(), 9)")
    outcome = train(runs, jobs=1, threads=1, retry=False)
    assert outcome.failed == {run: "SIGKILL ended it, which the system sends when memory runs out"}


def test_several_accelerators_are_given_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "import os, pathlib, sys; f = next(x for x in sys.argv if 'root_dir' in x).split('=', 1)[1]; "
    said += "pathlib.Path(f, 'device').write_text(os.environ.get('CUDA_VISIBLE_DEVICES', 'all')); "
    said += "pathlib.Path(f, 'metrics.csv').write_text('round\\n0\\n')"
    monkeypatch.setattr(runner, "PROGRAM", said)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for num_accelerators, expected in ((2, {"0", "1"}), (1, {"all"})):
        runs = [PlannedRun(cell, 0, tmp_path / str(num_accelerators) / cell, (), 1) for cell in "ab"]
        train(runs, jobs=2, threads=1, retry=False, num_accelerators=num_accelerators)
        assert {(run.folder / "device").read_text() for run in runs} == expected
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-7c2f")  # of a job
    runs = [PlannedRun(cell, 0, tmp_path / "job" / cell, (), 1) for cell in "ab"]
    train(runs, jobs=2, threads=1, retry=False, num_accelerators=2)
    assert {(run.folder / "device").read_text() for run in runs} == {"3", "GPU-7c2f"}
