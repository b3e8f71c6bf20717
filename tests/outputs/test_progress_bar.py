"""Test the progress bar with a clock that the test advances: the remaining time, and the processes that show it."""

import copy
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from lightning_utilities.core import rank_zero as rank_zero_module
from toys import Perceptron, federation
from tqdm import tqdm

from lightning_fl import FederatedTrainer
from lightning_fl.outputs import progress_bar

ROUNDS, CLIENTS, TRAINING_S, VALIDATION_S = 5, 6, 20.0, 40.0
ROUND_S = CLIENTS * TRAINING_S + VALIDATION_S


class Clock(Callback):
    """Clock on which a client trains for `TRAINING_S` seconds and a validation takes `VALIDATION_S`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def on_client_download(self, *arguments: Any) -> None:
        self.now += TRAINING_S

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.now += 0.0 if trainer.sanity_checking else VALIDATION_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tqdm.std.time", clock)
    monkeypatch.setattr(progress_bar, "time", SimpleNamespace(perf_counter=clock))
    return clock


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "rewrites_lines", lambda: True)


def seconds(shown: str) -> int:
    """Parse 'minutes:seconds'."""
    minutes, rest = shown.split(":")
    return 60 * int(minutes) + int(rest)


def bars(printed: str) -> list[tuple[int, int, int]]:
    """Return round, seconds since the start and remaining seconds, in the order shown."""
    shown = re.findall(r"Round (\d+)/\d+: .*?\[([\d:]+)<([\d:]+),", printed)
    return [(int(index), seconds(elapsed), seconds(left)) for index, elapsed, left in shown]


def test_the_time_left_is_right_at_every_moment_once_a_round_is_done(
    make_trainer: MakeTrainer, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(max_rounds=ROUNDS, clients_per_round=CLIENTS, callbacks=[clock], enable_progress_bar=True)
    trainer.fit(Perceptron(), federation())
    printed = capsys.readouterr().err
    shown = bars(printed)
    for index in range(1, ROUNDS + 1):
        assert len([row for row in shown if row[0] == index]) >= CLIENTS + 1, (
            "the bar must show each client and the end of the round"
        )
    for clients in range(1, CLIENTS):
        assert f"clients={clients}/{CLIENTS}" in printed
    for index, elapsed, left in shown:
        within = 1.5 if index > 1 else ROUNDS * VALIDATION_S + 1.5  # the time of a validation is still unknown
        assert left == pytest.approx(ROUNDS * ROUND_S - elapsed, abs=within)


def test_a_resumed_run_counts_its_own_rounds_alone(
    make_trainer: MakeTrainer, clock: Clock, capsys: pytest.CaptureFixture[str], keeps_files: dict[str, Any]
) -> None:
    flags = {"clients_per_round": CLIENTS, "callbacks": [clock], **keeps_files}
    make_trainer(max_rounds=2, **flags).fit(Perceptron(), federation())
    start = clock.now
    trainer = make_trainer(max_rounds=ROUNDS, enable_progress_bar=True, **flags)
    trainer.fit(Perceptron(), federation(), ckpt_path="last")
    shown = bars(capsys.readouterr().err)
    assert {index for index, _, _ in shown} == {3, 4, 5}
    assert clock.now - start == 3 * ROUND_S
    for index, elapsed, left in shown:
        if index > 3:
            assert left == pytest.approx(3 * ROUND_S - elapsed, abs=1.5)


def test_the_callbacks_of_a_run_can_be_copied_as_those_of_lightning(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(enable_progress_bar=True)
    trainer.fit(Perceptron(), federation())
    bars = list(tqdm._instances)
    assert [type(one) for one in copy.deepcopy(trainer.callbacks)] == [type(one) for one in trainer.callbacks]
    assert list(tqdm._instances) == bars


def test_no_bar_if_not_wanted_or_with_nothing_to_do(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str], keeps_files: dict[str, Any]
) -> None:
    make_trainer(max_rounds=2, enable_progress_bar=False, **keeps_files).fit(Perceptron(), federation())
    make_trainer(max_rounds=1, enable_progress_bar=True, **keeps_files).fit(
        Perceptron(), federation(), ckpt_path="last"
    )
    assert "%|" not in capsys.readouterr().err


def fit_with_bar(folder: str) -> None:
    trainer = FederatedTrainer(
        max_rounds=2,
        clients_per_round=4,
        accelerator="cpu",
        devices=2,
        default_root_dir=folder,
        enable_model_summary=False,
        callbacks=[Told(folder)],
    )
    trainer.fit(Perceptron(), federation())


class Told(Callback):
    """Callback that records whether this process shows a bar."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        bar = trainer.progress_bar_callback._bar
        (self.folder / f"rank-{trainer.global_rank}").write_text("silent" if bar.disable else "shown")


def lines(printed: str) -> list[str]:
    """Return the states of the bar in the order shown."""
    return [line.strip(" ") for line in re.split(r"[\r\n]", printed) if line.startswith("Round")]


@pytest.mark.parametrize(
    ("columns", "last"),
    [
        (30, r"Round 20/20: \[00:\d\d<00:00\]"),
        (46, r"Round 20/20: \[00:\d\d<00:00, accuracy=[\d.]+\]"),
        (60, r"Round 20/20: \[00:\d\d<00:00, accuracy=[\d.]+, up=12.5 kB\]"),
        (80, r"Round 20/20: 100%\|█{5,}\| \[00:\d\d<00:00, accuracy=[\d.]+, up=12.5 kB\]"),
        (
            120,
            r"Round 20/20: 100%\|█{16,}\| \[00:\d\d<00:00, accuracy=[\d.]+, up=12.5 kB, down=12.5 kB, clients/s=.*\]",
        ),
    ],
)
def test_a_narrow_terminal_lacks_the_least_important_and_cuts_nothing(
    columns: int,
    last: str,
    make_trainer: MakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda file: (columns, 24))
    make_trainer(max_rounds=20, clients_per_round=CLIENTS, enable_progress_bar=True).fit(Perceptron(), federation())
    shown = lines(capsys.readouterr().err)
    assert re.fullmatch(last, shown[-1]), shown[-1]
    assert all(len(line) <= columns and line.endswith("]") for line in shown)
    assert columns < 120 or all(re.search(r"%\|.{16,}\|", line) for line in shown)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_message_does_not_continue_the_bars_line(
    package: str,
    make_trainer: MakeTrainer,
    capsys: pytest.CaptureFixture[str],
    keeps_files: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second run moves the first one's files, and says so after its first round; whichever Lightning was imported last."""
    stream = sys.stderr
    logger, handler = logging.getLogger(package), logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    monkeypatch.setattr(rank_zero_module, "log", logging.getLogger(f"{package}.utilities.rank_zero"))
    monkeypatch.setattr(logger, "level", logging.INFO)
    try:
        for _ in range(2):
            make_trainer(max_rounds=2, enable_progress_bar=True, **keeps_files).fit(Perceptron(), federation())
    finally:
        logger.removeHandler(handler)
    assert re.search(r"(^|[\r\n])The earlier run", capsys.readouterr().err)
    assert handler.stream is stream, "as before the run"


def test_a_file_gets_a_line_a_round(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_bar, "rewrites_lines", lambda: False)
    make_trainer(max_rounds=3, clients_per_round=CLIENTS, enable_progress_bar=True).fit(Perceptron(), federation())
    printed = capsys.readouterr().err
    assert "\r" not in printed
    shown = [line for line in printed.splitlines() if "Round" in line]
    assert [re.match(r"Round (\d)/3: .*accuracy=.*up=.*\]$", line)[1] for line in shown] == ["1", "2", "3"]  # type: ignore[index]


@pytest.mark.process
def test_one_process_shows_it(tmp_path: Path) -> None:
    processes.run(fit_with_bar, str(tmp_path), num_processes=2)
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["shown", "silent"]
