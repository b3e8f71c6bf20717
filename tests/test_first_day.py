"""Test the parts of benchmarks/accelerator.py that look for what only a GPU can show, in small on the CPU."""

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_fl.checks.float32 import UNSET, Float32

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def first_day(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu.first_day")


def rows_of(first_day: ModuleType, part: str) -> list[Any]:
    """Return the rows of a part."""
    gpu, rows = importlib.import_module("gpu"), []
    getattr(first_day, part)(gpu.Plan("cpu", gpu.TINY, float("inf"), rows.append))
    return rows


@pytest.mark.long
def test_torchs_own_precision_is_compared(first_day: ModuleType) -> None:
    Float32.of("highest").set()
    rows = rows_of(first_day, "numerics")
    assert Float32.now() == Float32.of("highest")
    UNSET.set()
    assert [(row.failed, row.numbers["deviation"]) for row in rows] == [(None, 0.0)] * 3


@pytest.mark.long
def test_the_choice_of_auto_is_named_and_memory_that_runs_out_is_a_failure(
    first_day: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = rows_of(first_day, "choice")
    assert (row.case, row.result, row.numbers["wanted"]) == ("lenet5 × 2", "serial, 1 at once", "serial")
    assert row.ms[0] > 0

    def fails(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(importlib.import_module("lightning_fl.clients.serial"), "_train", fails)
    (row,) = rows_of(first_day, "choice")
    assert "memory does not suffice" in row.failed


@pytest.mark.slow
def test_modules_agree_with_the_cpu(first_day: ModuleType) -> None:
    rows = {(row.case, row.way): row for row in rows_of(first_day, "modules")}
    assert len(rows) == 8
    for (case, way), row in rows.items():
        assert row.failed is None, (case, way, row.failed)
        assert row.skipped is None or way == "stacked", (case, way, row.skipped)
    assert rows["LSTM", "serial"].numbers == {"deviation": 0.0}


@pytest.mark.long
def test_runs_repeat_and_resume(first_day: ModuleType) -> None:
    rows = rows_of(first_day, "repeats")
    assert [(row.case, row.way) for row in rows] == [
        (case, way) for case in ("torch's own", "deterministic") for way in ("repeated", "resumed")
    ]
    assert {row.result for row in rows} == {"equal, bit for bit"}


def test_what_needs_gpus_says_so(first_day: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {row.skipped for row in rows_of(first_day, "waits")} == {"needs a GPU"}
    gpu, rows = importlib.import_module("gpu"), []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    first_day.two_gpus(gpu.Plan("cuda", gpu.TINY, float("inf"), rows.append))
    assert rows[0].skipped == "needs two GPUs"


@pytest.mark.slow
def test_two_processes_agree_with_one(first_day: ModuleType) -> None:
    (row,) = rows_of(first_day, "two_gpus")
    assert row.failed is None, row.failed
    assert row.numbers["deviation"] < 1e-5


@pytest.mark.slow
def test_codecs_are_timed(first_day: ModuleType) -> None:
    rows = rows_of(first_day, "codecs")
    assert len(rows) > 20
    assert {(row.failed, row.result) for row in rows} == {(None, "as on the CPU")}


def test_the_serial_step_is_timed_and_is_that_of_a_run(first_day: ModuleType) -> None:
    gpu, step, rows = importlib.import_module("gpu"), importlib.import_module("gpu.step"), []
    plan, ends = gpu.Plan("cpu", gpu.TINY, float("inf"), rows.append), []

    def measure(federation: Any, work: Any) -> None:
        ours = step.SerialStep(federation)
        ends.append((ours.update(ours), federation.flat_module.optimizer.learning_rate, ours.job.received["model"]))
        step._profile(gpu.Row("step", "lenet5 × 1", "our serial step"), ours, plan)

    gpu.in_federation("lenet5", 1, plan, measure, runner="serial")
    update, rate, _ = ends[0]
    assert rows[0].numbers["kernels"] > 20
    assert 0 < float(update.norm()) < 100 * rate


def test_a_run_that_reaches_its_limit_names_what_it_left_out(
    first_day: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    accelerator, ended = importlib.import_module("accelerator"), []
    monkeypatch.setattr(accelerator.os, "_exit", ended.append)

    stops: list[Any] = []

    class Late:
        """Timer that runs out when the test calls its function."""

        def __init__(self, seconds: float, stop: Any) -> None:
            self.daemon = True
            stops.append(stop)

        def start(self) -> None:
            pass

        def cancel(self) -> None:
            pass

    monkeypatch.setattr(accelerator, "Timer", Late)
    monkeypatch.setattr(importlib.import_module("gpu.methods"), "METHODS", [])
    monkeypatch.setattr(first_day, "numerics", lambda plan: stops[0]())
    for part in ("choice", "modules"):
        monkeypatch.setattr(first_day, part, lambda plan: None)
    options = SimpleNamespace(out=tmp_path, only=["methods", "numerics", "choice", "modules"], minutes=8.0, tiny=True)
    accelerator.run(options, accelerator.time.perf_counter())
    table = (tmp_path / "accelerator.md").read_text()
    assert ended == [False]
    assert "| numerics | the rest |" in table
    assert "| choice | all |" in table
    assert "| methods |" not in table
