"""Test searches with programs that stand for fits, and one with fits."""

import json
import re
import signal
import subprocess
import sys
import time
from glob import glob
from math import log10
from pathlib import Path
from typing import Any

import pytest
import searched
import yaml
from searched import FIT, MU, RATE, opened, trained

from lightning_fl import UserError
from lightning_fl.cli import main
from lightning_fl.outputs.figures import Look
from lightning_fl.outputs.units import significant
from lightning_fl.study import runner, searches
from lightning_fl.study.search import Trial
from lightning_fl.study.search_report import costs_table, flags_table, search_parts
from lightning_fl.study.searches import Searches

pytestmark = pytest.mark.process
SMALL = [
    "--trainer.max_rounds=300",
    "--trainer.clients_per_round=2",
    "--trainer.local_steps=1",
    "--trainer.accelerator=cpu",
    "--trainer.threads=1",
    "--model=ImageClassifier",
    "--model.network=linear",
    "--model.learning_rate=0.01",
    "--data=Digits",
    "--data.num_clients=20",
]
SUPPORT = Path(searched.__file__).parent


@pytest.fixture(autouse=True)
def _fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PROGRAM", FIT)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)


def trials_of(searches: Searches) -> dict[str, list[Trial]]:
    return {name: each.trials() for name, each in searches.by_cell.items()}


def accuracies(rate: float, mu: float = 0.0) -> list[float]:
    """Return the values of all rounds of a program that stands for a fit."""
    return [i / 20 * (1 - abs(log10(rate) + 1) / 4 - mu / 10) + (rate if i < 6 else 0) for i in range(10)]


def value_of(trial: Trial, num_rounds: int) -> float:
    """Return the mean of the last tenth of the evaluations, which is the last one of fewer than 20."""
    return accuracies(trial.flags["model.learning_rate"], trial.flags.get("algorithm.mu", 0.0))[num_rounds - 1]


def test_all_combinations_have_as_many_trials_and_the_first_is_the_default(tmp_path: Path) -> None:
    searches = trained(opened(tmp_path))
    trials = trials_of(searches)
    assert {name: [trial.number for trial in of] for name, of in trials.items()} == {
        name: [*range(6)] for name in trials
    }
    assert trials["FedAvg"][0].flags == {"model.learning_rate": 0.03}
    assert trials["FedProx"][0].flags == {"model.learning_rate": 0.03, "algorithm.mu": 0.5}
    for of in trials.values():
        for trial in of:  # within 850 bytes, although the ninth round ends with 900
            assert (trial.state, trial.uplink_bytes, trial.seconds) == ("COMPLETE", 900, 2.25)
            assert trial.value == pytest.approx(value_of(trial, 8))
        assert len({trial.flags["model.learning_rate"] for trial in of}) == 6
    winners = searches.winners()
    for name, of in trials.items():
        best = max(of, key=lambda trial: trial.value)
        assert winners[name] == tuple(f"--{flag}={value}" for flag, value in best.flags.items())
    for call in (path.read_text() for path in tmp_path.rglob("calls.txt")):
        assert call.count("\n") == 1
        assert "--seed_everything=1000 --data.seed=1000 " in call
        assert "--trainer.callbacks.max_uplink_bytes=850 " in call


def test_a_search_that_is_repeated_or_interrupted_has_the_same_trials(tmp_path: Path) -> None:
    """Check it also where halving stops trials, and the sampler has learnt from the first ones."""
    pruned = {"trials": 14, "halving": {"first": 200, "factor": 2}}
    first = trials_of(trained(opened(tmp_path / "first", search=pruned)))
    assert trials_of(trained(opened(tmp_path / "again", search=pruned))) == first
    for trials in (1, 5, 12, 14):
        interrupted = trials_of(trained(opened(tmp_path / "interrupted", search={**pruned, "trials": trials})))
    assert interrupted == first
    other = trials_of(trained(opened(tmp_path / "other", search={**pruned, "trials": 2, "seed": 7})))
    assert [of[0].flags == first[name][0].flags for name, of in other.items()] == [True, True]
    assert [of[1].flags == first[name][1].flags for name, of in other.items()] == [False, False]


def test_trials_of_one_number_begin_alike_in_all_combinations(tmp_path: Path) -> None:
    of = trials_of(trained(opened(tmp_path, search={"own_flags": None})))
    assert [trial.flags for trial in of["FedAvg"]] == [trial.flags for trial in of["FedProx"]]


def test_halving_stops_whom_the_rungs_say(tmp_path: Path) -> None:
    """Compare with successive halving written out: at each rung a trial goes on if it is of the best half, or the best."""
    searches = trained(opened(tmp_path, search={"trials": 12, "halving": {"first": 200, "factor": 2}}))
    for of in trials_of(searches).values():
        before: dict[int, list[float]] = {200: [], 400: [], 800: []}
        for trial in of:
            state, value = "COMPLETE", value_of(trial, 8)
            for rung, values in before.items():
                at_rung = value_of(trial, rung // 100)
                values.append(at_rung)
                if at_rung < sorted(values, reverse=True)[max(1, len(values) // 2) - 1]:
                    state, value = "PRUNED", at_rung
                    break
            assert (trial.state, trial.value) == (state, pytest.approx(value)), trial
        assert {trial.state for trial in of} == {"COMPLETE", "PRUNED"}
    for name, each in searches.by_cell.items():
        winner = each.winner()
        assert winner is not None
        assert winner.value == max(trial.value for trial in each.trials() if trial.state == "COMPLETE"), name


def test_a_trial_that_is_pruned_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a fit that would go on for ever is ended at a rung, and that its bytes count."""
    endless = FIT + "\nif rate < 0.03 - 1e-9:\n    time.sleep(600)\n"
    monkeypatch.setattr(runner, "PROGRAM", endless)
    content = {"own_flags": None, "halving": {"first": 200, "factor": 2}}
    searches = opened(tmp_path, search=content, grid={"method": {"FedAvg": []}})
    (of,) = trials_of(trained(searches)).values()
    stopped = [trial for trial in of if trial.flags["model.learning_rate"] < 0.03 - 1e-9]
    assert stopped
    assert {(trial.state, trial.uplink_bytes) for trial in stopped} == {("PRUNED", 900.0)}
    assert not list(tmp_path.rglob("failed.json"))


@pytest.mark.parametrize("kind", ["halving", "hyperband"])
def test_rungs_may_be_rounds(kind: str, tmp_path: Path) -> None:
    content = {"trials": 8, "budget": None, "rounds": 9, kind: {"first": 2, "factor": 2}}
    for of in trials_of(trained(opened(tmp_path, search=content))).values():
        assert of[0].state == "COMPLETE"
        for trial in of:
            possible = (9,) if trial.state == "COMPLETE" else (2, 4, 8)
            assert any(trial.value == pytest.approx(value_of(trial, rounds)) for rounds in possible), trial


def test_a_trial_that_fails_counts_and_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rate = {"model.learning_rate": {"low": 0.01, "high": 1.0}}  # half of which fails
    searches = trained(opened(tmp_path, search={"trials": 8, "flags": rate}))
    for name, of in trials_of(searches).items():
        failed = [trial for trial in of if trial.flags["model.learning_rate"] > 0.5]
        assert 0 < len(failed) < 8
        assert [trial for trial in of if trial.state == "FAIL"] == failed
        assert {trial.said for trial in failed} == {"lightning-fl: error: it diverges."}
        assert f"{name}, trial {failed[0].number}: failed" in capsys.readouterr().err or name != "FedAvg"
    assert [row[4:7] for row in costs_table(searches).rows] == [
        ["8 of 8", "0", str(sum(trial.state == "FAIL" for trial in of))] for of in trials_of(searches).values()
    ]
    searches.check_winners()


def test_a_search_without_a_winner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PROGRAM", "raise SystemExit('it does not fit.')")
    searches = trained(opened(tmp_path, search={"trials": 2}))
    folder = searches.by_cell["FedAvg"].folder
    said = "the search of FedAvg has no winner: all of its 2 trials failed, the last one with: it does not fit; remove "
    with pytest.raises(UserError, match=re.escape(f"{said}{folder} ")):
        searches.check_winners()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"search": {"flags": {**RATE, **MU}}},
            "FedAvg: search has a flag or a value that this combination does not take (FedAvg has",
        ),
        ({"search": {"flags": {**RATE, **MU}}}, "a flag that only some combinations take belongs to own_flags"),
        (
            {"search": {"flags": {"model.learning_rate": {"low": 0.01, "high": 3}}}},
            "FedAvg, FedProx: search has a flag or a value that this combination does not take (learning_rate must lie in (0, 1]",
        ),
        (
            {"search": {"flags": {"model.learning_rate": {"low": 0.1, "high": 0.3}}}},
            "model.learning_rate=0.03 is not in the range of search, 0.1 to 0.3: widen it",
        ),
        (
            {"search": {"flags": {"model.learning_rate": {"choices": [0.1, 0.3]}}}},
            "model.learning_rate=0.03 is not in the range of search, 0.1 or 0.3: widen it",
        ),
        (
            {"search": {"flags": {"model.momentum": {"low": 0.1, "high": 0.9}}}},
            "the first trial is the default, but model.momentum has no value: add --model.momentum=… to base",
        ),
        (
            {"base": ["--data.val_fraction=0"]},
            "is measured on test samples unless clients hold some out: add --data.val_fraction=0.1",
        ),
    ],
)
def test_mistakes_are_found_before_the_first_trial(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        opened(tmp_path, **change)
    assert said in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_optuna_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"search needs the package optuna.*pip install 'lightning-fl\[search\]'"):
        opened(tmp_path)


def test_a_trial_whose_end_was_not_told_is_told_and_not_trained_again(tmp_path: Path) -> None:
    content = {"trials": 3, "own_flags": None}
    grid = {"method": {"FedAvg": []}}
    killed = opened(tmp_path, search=content, grid=grid).by_cell["FedAvg"]
    run = killed.take()
    assert run is not None
    runner.train([run], 1, 1, False)  # and now the study is killed, before `ended`
    (of,) = trials_of(trained(opened(tmp_path, search=content, grid=grid))).values()
    assert [trial.state for trial in of] == ["COMPLETE"] * 3
    assert len((run.folder / "calls.txt").read_text().splitlines()) == 1
    fresh = trials_of(trained(opened(tmp_path / "fresh", search=content, grid=grid)))
    assert fresh["FedAvg"] == of


@pytest.fixture
def _study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types_of_a_new_process: None) -> None:
    """Write a study of 2 trials and one seed, whose runs send 5,200 bytes in each of 58 rounds, until 300 kB are spent."""
    monkeypatch.chdir(tmp_path)
    rate = {"model.learning_rate": {"low": 0.01, "high": 1.0, "log": True}}
    content = {"base": [*SMALL, "--data.val_fraction=0.2"], "seeds": [3], "grid": {"method": {"avg": []}}}
    content["search"] = {"trials": 2, "seed": 5, "budget": 3e5, "flags": rate, "halving": {"first": 150_000}}
    Path("study.yaml").write_text(yaml.safe_dump(content))


@pytest.mark.usefixtures("_study")
def test_a_search_from_the_command_line_that_is_killed_and_shared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from lightning_fl.cli import main; main()", "study", "study.yaml", *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    main(["study", "study.yaml", "--dry_run"])
    planned = capsys.readouterr().out
    assert (
        "# A search comes first: 2 trials of each combination, each of 300 kB of uplink with seed 5, with halving"
        in planned
    )
    assert re.search(r"^# avg +3 +905 +", planned, re.MULTILINE), "the rounds of 2 trials and one run"
    assert not Path("runs").exists()

    killed, deadline = started("--jobs=1"), time.monotonic() + 300
    # Unlike Path.rglob, glob ignores folders that vanish while it looks.
    while not glob("**/trial-0/metrics.csv", recursive=True) and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    both = [started("--jobs=1") for _ in range(2)]
    printed = [process.communicate(timeout=600) for process in both]
    assert sorted(process.returncode for process in both)[0] == 0, printed  # the other may leave the run to this one
    assert sum(err.count(": done in") + err.count(": stopped early in") for _, err in printed) == 3, printed

    main(["study", "study.yaml", "--jobs=1"])
    said = capsys.readouterr().out
    found, spent = (
        [cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\| avg .*", said, re.M)[:2]
    )
    assert found[:4] == ["avg", "model.learning_rate", "0.01 to 1.0 (log)", "0.0100"]
    # The worse trial is stopped early if the better one is ahead of it, which the two programs' speeds decide.
    stopped = sum(err.count(": stopped early in") for _, err in printed)
    assert spent[3:7] == ["1", "2 of 2", str(stopped), "0"]
    uplink = float(spent[7].removesuffix(" kB"))
    assert 400 < uplink <= 603 if stopped else uplink == 603, "a trial may spend its budget before the program stops it"
    won = found[4]
    assert float(won) > 0.05, "0.01 is too small for 58 steps"
    assert "ends after" not in said, "its budget is spent"
    (run,) = Path("runs/studies/study/avg").glob("seed-*/done.json")
    assert f"--model.learning_rate={won[:4]}" in " ".join(json.loads(run.read_text())["arguments"])
    page = Path("runs/studies/study/report/report.md").read_text(encoding="utf-8")
    assert "![Best accuracy on held-out samples by the number of trials](trials.png)" in page
    assert page.count("| avg ") >= 3

    main(["report", "study.yaml", "--out", "again"])
    assert f"| {won} |" in capsys.readouterr().out
    main(["study", "study.yaml", "--dry_run"])
    assert capsys.readouterr().out.endswith("# All runs are finished.\n")


@pytest.mark.usefixtures("_study")
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "--data.val_fraction=0.2",
            "--data.val_fraction=0",
            "avg: metric of search, val/accuracy, is measured on test samples",
        ),
        (
            "model.learning_rate:",
            "model.lerning_rate:",
            "avg: search has a flag or a value that this combination does not take (",
        ),
        ("seed: 5", "seed: 3", "seed of search is 3, which is one of the study's seeds"),
        (
            "low: 0.01",
            "low: 0.05",
            "model.learning_rate=0.01 is not in the range of search, 0.05 to 1.0 (log): widen it",
        ),
    ],
)
def test_a_mistake_in_a_search_ends_with_one_sentence(
    old: str, new: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("study.yaml")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(SystemExit) as ended:
        main(["study", "study.yaml"])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in error
    assert error.count("\n") == 1
    assert not Path("runs").exists()


STUDY = f"""
import sys
from pathlib import Path
sys.path.append({str(SUPPORT)!r})
from lightning_fl.study import runner
import searched
runner.PROGRAM, runner.POLL_SECONDS = searched.FIT, 0.02
searched.trained(searched.opened(Path(sys.argv[1]), search={{"trials": 8, "own_flags": None}}))
"""


def test_two_processes_share_a_search_of_which_one_was_killed(tmp_path: Path) -> None:
    """Check that no trial is lost, trained twice or too many, and that one that was under way goes on under its number."""

    def started() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", STUDY, str(tmp_path)], stderr=subprocess.DEVNULL)

    content = {"trials": 8, "own_flags": None}
    waiting = [each.folder / "wait" for each in opened(tmp_path, search=content).by_cell.values()]
    for path in waiting:
        path.parent.mkdir(parents=True)
        path.touch()
    killed, deadline = started(), time.monotonic() + 120
    while not list(tmp_path.rglob("calls.txt")) and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    (under_way,) = [path.parent for path in tmp_path.rglob("calls.txt")]
    for path in waiting:
        path.unlink()
    both = [started(), started()]
    assert [process.wait(300) for process in both] == [0, 0]
    searches = opened(tmp_path, search=content)
    assert searches.is_over()
    for of in trials_of(searches).values():
        assert [(trial.number, trial.state) for trial in of] == [(number, "COMPLETE") for number in range(8)]
    calls = {path.parent: len(path.read_text().splitlines()) for path in tmp_path.rglob("calls.txt")}
    assert len(calls) == 16
    assert calls.pop(under_way) == 2
    assert set(calls.values()) == {1}


def test_the_report_says_what_was_searched_found_and_spent(tmp_path: Path) -> None:
    searches = trained(opened(tmp_path, search={"trials": 8, "halving": {"first": 200, "factor": 2}}))
    trials = trials_of(searches)
    table = flags_table(searches)
    assert [row[:4] for row in table.rows] == [
        ["FedAvg", "model.learning_rate", "0.001 to 0.4 (log)", "0.0300"],
        ["FedProx", "model.learning_rate", "0.001 to 0.4 (log)", "0.0300"],
        ["FedProx", "algorithm.mu", "0.0 to 1.0", "0.500"],
    ]
    for row, (name, each) in zip(costs_table(searches).rows, searches.by_cell.items(), strict=True):
        winner, of = each.winner(), trials[name]
        assert winner is not None
        assert row[:4] == [name, significant(of[0].value), significant(winner.value), str(winner.number)]
        assert row[5] == str(sum(trial.state == "PRUNED" for trial in of))
        assert row[7] == f"{sum(trial.uplink_bytes for trial in of) / 1000:.2f} kB"
        best = each.best_so_far()
        assert [*best] == [*range(1, 9)]
        assert best[8] == winner.value
        assert [*best.values()] == sorted(best.values())
    text, *_, picture = search_parts(searches, Look())
    assert (
        "8 trials of each combination, each of 850 B of uplink with seed 1000, with halving after 200 B, 400 B, 800 B"
        in str(text)
    )
    (axes,) = picture.figure.axes  # type: ignore[union-attr]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert [*lines["FedProx"].get_ydata()] == [*searches.by_cell["FedProx"].best_so_far().values()]


def test_a_search_that_has_not_begun_has_no_picture(tmp_path: Path) -> None:
    parts = search_parts(opened(tmp_path), Look())
    assert not any(hasattr(part, "figure") for part in parts)
    assert not (tmp_path / "out").exists()
