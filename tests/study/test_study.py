"""Test studies as users run them: from the command line, killed and resumed, with the package's own files."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import rising, write_run

from lightning_fl.cli import main
from lightning_fl.cli.planned_fit import resolve
from lightning_fl.errors import UserError
from lightning_fl.outputs.figures import Look
from lightning_fl.outputs.plan import Plan
from lightning_fl.report.flags import build_parser
from lightning_fl.study.command import _reported, part_of, study
from lightning_fl.study.searches import open_searches
from lightning_fl.study.study_file import PlannedRun, read_study

pytestmark = pytest.mark.usefixtures("types_of_a_new_process")

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))
SMALL = [
    "--trainer.max_rounds=6",
    "--trainer.clients_per_round=2",
    "--trainer.local_steps=1",
    "--trainer.accelerator=cpu",
    "--model=ImageClassifier",
    "--model.network=linear",
    "--data=Digits",
    "--data.num_clients=20",
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(**content: Any) -> Path:
    grid = {"method": {"FedAvg": [], "FedProx": ["--algorithm=FedProx", "--algorithm.mu=1"]}}
    path = Path("study.yaml")
    path.write_text(yaml.safe_dump({"base": SMALL, "seeds": [0, 1], "grid": grid, **content}, sort_keys=False))
    return path


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process to cores")
def test_a_study_divides_the_cores_of_its_job_and_is_planned_with_as_many_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plan(arguments: Sequence[str]) -> Plan:
        seen.append(arguments[0])
        raise UserError("no plan.")

    seen = list[str]()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(6)})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    words = [str(written(grid={"method": {"FedAvg": []}})), "--dry_run"]
    for more in ([], ["--json"]):
        said, _ = study([*words, *more], lambda _: {"trainer": {"max_rounds": 1}}, plan=plan)
        assert seen.pop() == "--trainer.threads=3"
        assert said.count("--trainer.threads=3") == 2, "two runs at once share six cores"


def rows(folder: Path) -> list[str]:
    """Return the rows of a run without its measured times."""
    head, *lines = (folder / "metrics.csv").read_text().splitlines()
    timed = [i for i, name in enumerate(head.split(",")) if name == "time/round_seconds"]
    return [",".join(cell for i, cell in enumerate(line.split(",")) if i not in timed) for line in lines]


@pytest.mark.process
def test_a_study_that_is_killed_goes_on_and_gives_what_fit_gives(capsys: pytest.CaptureFixture[str]) -> None:
    claims = [{"text": "a pull changes little", "better": "FedProx", "than": "FedAvg", "paper": 0.5}]
    # So many rounds that the first run has not ended when it is killed; and the threads decide the last digits.
    base = [*SMALL, "--trainer.max_rounds=80", "--trainer.threads=1"]
    written(base=base, claims=claims, seeds=[1], budget=[1e3, 1e6], chance=0.1)
    ordinary, is_over = signal.getsignal(signal.SIGTERM), threading.Event()

    def has_saved() -> bool:
        with suppress(OSError):  # of files that are replaced at this moment
            return bool(list(Path("runs").rglob("last.ckpt")))
        return False

    def kill() -> None:
        """End the study after the first complete round of its first run."""
        while not has_saved() and not is_over.is_set():
            time.sleep(0.02)
        if signal.getsignal(signal.SIGTERM) is not ordinary:  # the study waits for the signal
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(SystemExit) as ended:
        main(["study", "study.yaml", "--jobs", "1"])
    is_over.set()
    thread.join()
    assert ended.value.code
    assert not list(Path("runs").rglob("done.json"))

    main(["study", "study.yaml"])
    done = sorted(Path("runs/studies/study").rglob("done.json"))
    assert [path.parts[3] for path in done] == ["FedAvg", "FedProx"]
    said = capsys.readouterr().out
    assert re.search(r"^\| FedAvg +\| +1 \|.*\n\| FedProx +\| +1 \|", said, re.MULTILINE), (
        "lines have the choices' names"
    )
    claim = r"\| a pull changes little +\| final: FedProx − FedAvg \| (one seed: |ceiling effect)"
    assert re.search(claim, said)
    assert re.search(claim, Path("runs/studies/study/report/report.md").read_text(encoding="utf-8"))
    page = Path("runs/studies/study/report/report.html").read_text(encoding="utf-8")
    assert ">final: FedProx − FedAvg</td>" in page
    assert "<h2>Accuracy per byte, 1.00 kB to 1.00 MB of uplink</h2>" in page
    assert re.search(r"^\| FedProx \| undecided +\| +0\.\d{3}\*? \|", said, re.MULTILINE)
    assert Path("runs/studies/study/report/front.png").is_file()

    quiet = ["--trainer.enable_progress_bar=false", "--seed_everything=1", "--data.seed=1"]
    chosen = {"FedAvg": [], "FedProx": ["--algorithm=FedProx", "--algorithm.mu=1"]}  # the first was resumed
    for path, (name, method) in zip(done, chosen.items(), strict=True):
        main(["fit", *base, *method, *quiet, f"--trainer.default_root_dir=direct-{name}"])
        assert rows(path.parent) == rows(Path(f"direct-{name}"))

    before = {path: path.stat().st_mtime_ns for path in done}
    main(["study", "study.yaml"])
    assert {path: path.stat().st_mtime_ns for path in done} == before, "what is done is skipped"


@pytest.mark.matrix
def test_a_run_that_cannot_be_compared_is_left_out_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Look, "formats", ("svg",))
    claims = [{"text": "a pull changes little", "better": "FedProx", "than": "FedAvg"}]
    regime = {"paper": "VGG-9, 50 clients", "here": "a linear model, 20 clients"}
    file = read_study(written(claims=claims, budget=[1e3, 1e6], regime=regime))
    runs = [PlannedRun(cell, seed, Path(cell, str(seed)), (), 9) for seed in (0, 1) for cell in ("FedAvg", "FedProx")]
    for run in runs:
        write_run(run.folder, rising(9), run.cell, run.seed)
    diverged, without_settings = runs[0].folder, runs[3].folder
    rows = (diverged / "metrics.csv").read_text()
    (diverged / "metrics.csv").write_text(re.sub(r"\n(\d),[^,]+,", r"\n\1,nan,", rows))
    (without_settings / "config.yaml").write_text("trainer: &a [*a]")
    given = build_parser().parse_args(["study.yaml", "--out", "out/report", "--html"])
    said = _reported(file, "study.yaml", Path("out"), runs, given, None)
    assert "## Left out\n\n- val/accuracy of the run in FedAvg/0 has no finite value; choose another" in said
    assert re.search(r"^\| FedAvg +\| +1 \|.*\n\| FedProx +\| +2 \|", said, re.MULTILINE)
    assert "FedProx/1: its config.yaml is ignored" in said
    page = Path("out/report/report.md").read_text(encoding="utf-8")
    assert page.startswith("# study: accuracy\n\n## Commands\n\n```bash\nlightning-fl study study.yaml --out out\n")
    assert "## Claims\n\nIn the paper: VGG-9, 50 clients. Here: a linear model, 20 clients.\n\n| claim" in page


def test_faults_of_all_cells_are_told_before_the_first_run(capsys: pytest.CaptureFixture[str]) -> None:
    grid = {"mu": {"small": ["--algorithm=FedProx", "--algorithm.mu=-1"], "word": ["--algorithm=FedPrx"], "fine": []}}
    written(grid=grid)
    with pytest.raises(SystemExit) as ended:
        main(["study", "study.yaml"])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("lightning-fl: error: small: ")
    assert "got -1" in error
    assert "; word: " in error
    assert "did you mean 'FedProx'" in error
    assert "fine" not in error
    assert not Path("runs").exists()


@given(num_runs=st.integers(0, 30), count=st.integers(1, 12))
@settings(max_examples=40)
def test_parts_have_every_run_once_and_are_of_nearly_equal_size(num_runs: int, count: int) -> None:
    runs = [PlannedRun(str(number), 0, Path(str(number)), (), 1) for number in range(num_runs)]
    parts = [part_of(runs, f"{index}/{count}") for index in range(1, count + 1)]
    assert sorted((run for part in parts for run in part), key=runs.index) == runs == part_of(runs, None)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.process
def test_machines_that_train_parts_at_once_end_with_the_whole_report() -> None:
    path = written()
    words = [sys.executable, "-c", "from lightning_fl.cli import main; main()", "study", str(path), "--jobs", "1"]
    parts = [
        subprocess.Popen([*words, "--part", part], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for part in ("1/2", "2/2")
    ]
    printed = [part.communicate(timeout=300) for part in parts]
    assert [part.returncode for part in parts] == [0, 0], printed
    for index, (_, progress) in enumerate(printed):
        assert progress.count(": done in") == 2, printed[index]
    assert any("runs of the study are not done" not in out for out, _ in printed), printed


@pytest.mark.slow
def test_a_run_that_fails_is_said_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    written(seeds=[0], grid={"method": {"avg": [], "server": ["--algorithm=FedDUS"]}})
    with pytest.raises(SystemExit) as ended:
        main(["study", "study.yaml"])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "server, seed 0 failed: lightning-fl: error: " in out
    assert "`--retry` tries failed runs again." in out
    (failed,) = Path("runs").rglob("failed.json")
    assert "server_fraction" in json.loads(failed.read_text())["said"]


def test_a_dry_run_prints_commands_that_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    written(seeds=[3], grid={"method": {"avg": []}})
    main(["study", "study.yaml", "--dry_run", "--out", "here"])
    line, *table = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in table[:3]] == [["#", "runs"], ["#", "avg"], ["#", "all"]]
    assert all(row.startswith("# ") and len(row) <= 80 for row in table)
    assert re.match(r"lightning-fl fit --trainer\.threads=\d+ --trainer\.max_rounds=6 ", line)
    assert "--seed_everything=3 --data.seed=3 --trainer.default_root_dir=here/avg/seed-3-" in line
    assert not Path("here").exists()


@pytest.mark.parametrize("flag", ["--print_config", "--help", "--dry_run", "--json"])
def test_a_flag_that_trains_nothing_is_refused_in_a_study(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="leave it out"):
        resolve([*SMALL, flag])
    assert capsys.readouterr().out == ""


def test_a_part_without_runs_says_so() -> None:
    def resolved(_: Sequence[str]) -> dict[str, Any]:
        return {"trainer": {"max_rounds": 1}}

    def plan(_: Sequence[str]) -> Plan:
        raise AssertionError("nothing to plan")

    words = [str(written(seeds=[0], grid={"method": {"FedAvg": []}})), "--part=2/2"]
    assert study([*words, "--dry_run"], resolved, plan=plan) == ("# This part has no runs.", True)
    assert study(words, resolved) == ("This part has no runs.", True)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_dry_run_shows_on_a_terminal_how_far_it_is(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(seeds=[3], grid={"method": {"avg": [], "prox": ["--algorithm=FedProx"]}})
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    main(["study", "study.yaml", "--dry_run"])
    shown = capsys.readouterr()
    for word in ("Checking", "Planning"):
        assert (f"{word}:   0%|" in shown.err and "0/2" in shown.err) == is_terminal
        assert word not in shown.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.yaml"], "there is no study file 'none.yaml'; among the package's studies, allowed: "),
        (["fedldf_smal"], "did you mean 'fedldf_small'"),
        (["study.yaml", "--out", "study.yaml"], "cannot be written to"),
        (["study.yaml", "--jobs", "0"], "--jobs must be a whole number of at least 1, got 0"),
        (["study.yaml", "--part", "0/2"], "--part must be I/N with I from 1 to N, such as 3/8, got 0/2"),
        (["study.yaml", "--part", "3"], "--part must be I/N with I from 1 to N, such as 3/8, got 3"),
        (["study.yaml", "--job", "2"], "has no flag --job; did you mean '--jobs'"),
        ([], "the following arguments are required: FILE"),
    ],
)
def test_mistakes_of_the_command(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    written()
    with pytest.raises(SystemExit) as ended:
        main(["study", *words])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.process
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_packages_studies_fit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that every choice makes a configuration, and that no two are the same but those of a method beside itself."""
    monkeypatch.setitem(os.environ, "PL_GLOBAL_SEED", "0")
    labels = np.arange(20) % 10
    for name, shape in {"cifar10.npz": (20, 32, 32, 3), "fashion_mnist.npz": (20, 28, 28)}.items():
        images = np.zeros(shape, np.uint8)
        np.savez(name, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    study = read_study(path)
    seen: set[str] = set()
    cells = tuple(
        cell for cell in study.cells if not seen.issuperset(cell.arguments) and not seen.update(cell.arguments)
    )
    runs = replace(study, cells=cells, seeds=(0,)).runs(Path("out"), resolve)
    if study.search is not None:
        assert len(open_searches(study, Path("out"), resolve).by_cell) == len(study.cells)
    again = {second for _, second in study.floor}
    assert (
        len({run.folder.name for run in runs if run.cell not in again})
        == len({cell.name for cell in cells} - again)
        > 1
    )
