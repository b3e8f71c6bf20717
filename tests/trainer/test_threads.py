"""Test the number of threads: a rule, the flag, OMP_NUM_THREADS, and what a checkpoint keeps."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from toys import Perceptron, federation

from lightning_fl.errors import UserError
from lightning_fl.trainer import threads
from lightning_fl.trainer.threads import WORK_OF_A_THREAD, WORK_OF_TWO, choose_threads


class Seen(Callback):
    """Note the number of threads in each round."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def on_train_epoch_start(self, *_: Any) -> None:
        self.threads.append(torch.get_num_threads())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend 16 threads of torch and no OMP_NUM_THREADS."""
    monkeypatch.setattr(threads, "IS_GIVEN", False)
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 16)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("work", "num_processes", "num_cores", "expected"),
    [
        (WORK_OF_TWO - 1, 1, 16, 1),
        (0, 1, 16, 1),
        (WORK_OF_TWO, 1, 16, 2),
        (3 * WORK_OF_A_THREAD, 1, 16, 3),
        (100 * WORK_OF_A_THREAD, 1, 16, 16),
        (100 * WORK_OF_A_THREAD, 4, 16, 4),
        (100 * WORK_OF_A_THREAD, 32, 16, 1),
        (100 * WORK_OF_A_THREAD, 2, 8, 4),
        (None, 1, 16, 16),
    ],
)
def test_larger_steps_get_more_threads_and_processes_share_the_cores(
    work: int | None, num_processes: int, num_cores: int, expected: int
) -> None:
    assert choose_threads(None, work, num_processes, num_cores) == expected


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process to cores")
def test_a_fit_counts_the_cores_of_its_job(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()
    monkeypatch.setattr(threads, "choose_threads", lambda *given: seen.append(given[-1]) or 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    make_trainer().fit(Perceptron(), federation())
    assert seen == [3]


@pytest.mark.usefixtures("machine")
def test_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_threads(3, 0, 1, 16) == 3
    monkeypatch.setattr(threads, "IS_GIVEN", True)
    assert choose_threads(None, 0, 1, 16) == 16


def test_fit_uses_them_and_gives_the_old_number_back(make_trainer: MakeTrainer) -> None:
    seen = Seen()
    make_trainer(threads=2, callbacks=seen).fit(Perceptron(), federation())
    assert seen.threads == [2, 2]
    assert torch.get_num_threads() == 1


def test_a_fit_on_fewer_threads_says_so(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "IS_GIVEN", False)
    seen = Seen()
    torch.set_num_threads(2)
    try:
        make_trainer(callbacks=seen).fit(Perceptron(), federation())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert seen.threads == [1, 1]
    work = 4 * (3 * 4 + 4 * 2)  # four samples through two linear layers
    assert f"Computing with 1 of 2 threads, because a step is small ({work} multiply-accumulates)" in caplog.text


@pytest.mark.parametrize(("load", "warns"), [(0.2, False), (1.5, True)])
def test_several_threads_on_a_busy_machine_are_pointed_out(
    load: float,
    warns: bool,
    make_trainer: MakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(threads, "choose_threads", lambda *_: 2)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(threads.os, "getloadavg", lambda: (load, load, load), raising=False)
    make_trainer().fit(Perceptron(), federation())
    assert ("trainer.threads 1 may be much faster" in caplog.text) == warns


def test_a_resumed_run_keeps_its_threads(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(threads=2, max_rounds=1, **keeps_files).fit(Perceptron(), federation())
    last, seen = tmp_path / "checkpoints" / "last.ckpt", Seen()
    make_trainer(callbacks=seen).fit(Perceptron(), federation(), ckpt_path=last)
    assert seen.threads == [2]
    make_trainer(callbacks=seen, threads=1).fit(Perceptron(), federation(), ckpt_path=last)
    assert seen.threads == [2, 1]
    assert "goes on with runner serial and 1 thread; its earlier rounds had runner serial and 2 threads." in caplog.text


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_they_must_be_a_whole_number(value: Any, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=f"threads must be a whole number of at least 1, got {value}"):
        make_trainer(threads=value)


def test_the_variable_is_read_before_lightning_sets_it() -> None:
    assert importlib.reload(threads).IS_GIVEN, "tests set OMP_NUM_THREADS"
