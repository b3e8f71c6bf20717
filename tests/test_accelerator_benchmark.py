"""Test benchmarks/accelerator.py: in small on the CPU, without optional packages and without an installed lightning_fl."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from roster import ROSTER

from lightning_fl import algorithms

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MISSING = (
    "constriction",
    "jsonargparse",
    "lightning_fl",
    "matplotlib",
    "scikit_learn",
    "scipy",
    "sklearn",
    "torch_pruning",
    "wandb",
)
NETWORKS = ("lenet5", "cnn", "vgg11", "resnet18")
WAYS = ("serial", "stacked", "bare loop")


@pytest.fixture(autouse=True)
def _on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def methods() -> ModuleType:
    return importlib.import_module("gpu.methods")


def site_without_missing_packages(folder: Path) -> Path:
    """Link all installed packages except `MISSING` and editable installations into a folder."""
    for site in (Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")):
        for package in site.iterdir():
            name, link = package.name.lower().replace("-", "_"), folder / package.name
            if not (name.startswith((*MISSING, "__editable__")) or link.is_symlink()):
                link.symlink_to(package)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Content of accelerator.json after a run with `--tiny`, in an interpreter without the missing packages."""
    site, out = site_without_missing_packages(tmp_path_factory.mktemp("site")), tmp_path_factory.mktemp("out")
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    program = [sys.executable, "-S", str(BENCHMARKS / "accelerator.py")]  # -S: PYTHONPATH is the only site
    command = [*program, "--tiny", "--out", str(out)]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((out / "accelerator.json").read_text())
    table = [line for line in (out / "accelerator.md").read_text().splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(content["rows"])
    assert len({line.count("|") for line in table}) == 1
    return content


def rows_of(content: dict[str, Any], part: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["case"], row["way"]): row for row in content["rows"] if row["part"] == part}


@pytest.mark.slow
def test_every_method_has_the_numbers_of_the_cpu(tiny: dict[str, Any], methods: ModuleType) -> None:
    rows = rows_of(tiny, "methods")
    assert rows.keys() == {(name, runner) for name in methods.METHODS for runner in ("serial", "stacked")}
    for (name, runner), row in rows.items():
        if name in methods.NEED_TORCH_PRUNING:
            assert row["skipped"] == "torch-pruning is not installed"
            continue
        if runner == "stacked" and (reason := methods.why_serial(name)):
            assert reason in row["skipped"]
            continue
        assert row["numbers"]["differing"] == []
        # Without a GPU the serial run is a repetition of the reference.
        assert row["numbers"]["deviation"] <= (0 if runner == "serial" else tiny["tolerance"])


@pytest.mark.slow
def test_every_round_is_timed(tiny: dict[str, Any]) -> None:
    rows = rows_of(tiny, "rounds")
    cases = [f"{network} × {clients}" for network in NETWORKS for clients in (1, 2)]
    cases += ["resnet18 × 1, tf32", "resnet18 × 1, bf16"]
    assert rows.keys() == {(case, way) for case in cases for way in WAYS}
    for (case, way), row in rows.items():
        if "skipped" in row:  # on a CPU, mapped convolutions are not cast
            assert (case, way) == ("resnet18 × 1, bf16", "stacked")
            continue
        assert 0 < row["ms"][0] <= row["ms"][1] <= row["ms"][2]
        assert row["clients_per_second"] == pytest.approx(1e3 * int(case.split()[2].rstrip(",")) / row["ms"][1])


@pytest.mark.slow
def test_stacks_of_all_sizes_and_all_kinds_of_steps_are_timed(tiny: dict[str, Any]) -> None:
    stacks, steps = rows_of(tiny, "at-once"), rows_of(tiny, "step")
    assert stacks.keys() == {("lenet5 × 4", "1 at once"), ("lenet5 × 4", "4 at once")}
    assert all(row["clients_per_second"] > 0 for row in stacks.values())
    for case in ("lenet5 × 2", "resnet18 × 2"):
        assert steps[case, "our step"]["numbers"]["kernels"] > 100
        assert steps[case, "our step"]["ms"][0] > 0
    compiled = {way: row for (case, way), row in steps.items() if case == "lenet5 × 2" and way != "our step"}
    assert {way for way, row in compiled.items() if "GPU" in row.get("skipped", "")} == {
        "CUDA graph of our step",
        "functional step, compiled with CUDA graphs",
    }
    for way in ("functional step", "functional step, compiled"):
        assert compiled[way]["numbers"]["deviation"] < 1e-4
        assert compiled[way]["ms"][0] > 0


def test_all_methods_of_the_roster_are_covered(methods: ModuleType) -> None:
    names = {name.partition("-")[0] for name in methods.METHODS}
    assert names == set(algorithms.__all__) - {"Algorithm"}
    assert {type(entry.algorithm()).__name__ for entry in ROSTER.values()} <= names | {"Algorithm"}
    assert methods.ARGUMENTS.keys() <= set(methods.METHODS)


@pytest.mark.trains
@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize("name", ["FedAP", "FedDUAP", "FedDUMAP", "HRank"])
def test_methods_with_torch_pruning_have_the_numbers_of_the_cpu(name: str, runner: str, methods: ModuleType) -> None:
    assert name in methods.NEED_TORCH_PRUNING
    gpu, rows = importlib.import_module("gpu"), []
    methods.compare(gpu.Row("methods", name, runner), gpu.Plan("cpu", gpu.TINY, 0.0, rows.append), [])
    (row,) = rows
    assert row.failed is None
    assert row.numbers["deviation"] < methods.TOLERANCE


def test_differences_are_found(methods: ModuleType) -> None:
    start, end = torch.zeros(4), torch.tensor([3.0, 4.0, 0.0, 0.0])
    metrics = {"train/loss": 2.0, "comm/uplink_bits": 100_000.0}
    expected = methods.Outcome(start, end, metrics)
    assert methods.differences(expected, expected) == (0, [])
    close = replace(expected, end=end + torch.tensor([0.0, 0.0, 0.005, 0.0]), metrics={**metrics, "train/loss": 2.001})
    assert methods.differences(close, expected) == (pytest.approx(1e-3), [])
    other = {"train/loss": 2.1, "comm/uplink_bits": 100_001.0, "val/loss": 1.0}
    assert methods.differences(replace(expected, metrics=other), expected) == (0, sorted(other))
    assert methods.differences(replace(expected, end=torch.ones(3)), expected) == (float("inf"), [])
    unchanged = replace(expected, end=start)
    assert methods.differences(unchanged, unchanged) == (0, [])
    assert methods.differences(expected, unchanged) == (float("inf"), [])


@pytest.mark.trains
@pytest.mark.parametrize(("kind", "clients", "runner"), [("StackedStep", 2, "stacked"), ("SerialStep", 1, "serial")])
def test_the_step_that_is_timed_changes_the_model(kind: str, clients: int, runner: str) -> None:
    gpu, step, lengths = importlib.import_module("gpu"), importlib.import_module("gpu.step"), []

    def measure(federation: Any, work: Any) -> None:
        ours = getattr(step, kind)(federation)
        lengths.append(float(ours.update(ours).norm()))

    gpu.in_federation("lenet5", clients, gpu.Plan("cpu", gpu.TINY, 0.0, print), measure, runner=runner)
    assert len(lengths) == 1
    assert 0 < lengths[0] < float("inf")


@pytest.mark.trains
def test_a_difference_ends_in_exit_code_1(
    methods: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = importlib.import_module("accelerator")
    outcomes = {"serial": torch.ones(2), "stacked": torch.tensor([1.0, 1.1])}
    monkeypatch.setattr(methods, "METHODS", ["FedAvg"])
    monkeypatch.setattr(
        methods, "two_rounds", lambda name, runner, device: methods.Outcome(torch.zeros(2), outcomes[runner], {})
    )
    options = SimpleNamespace(out=tmp_path, only=["methods"], minutes=8.0, tiny=True)
    assert accelerator.run(options, accelerator.time.perf_counter()) == 1
    assert "methods  FedAvg  stacked  FAILED: distance of the models 7.1e-02" in capsys.readouterr().out
    serial, stacked = json.loads((tmp_path / "accelerator.json").read_text())["rows"]
    assert "failed" not in serial
    assert "failed" in stacked


def test_rows_without_a_measurement_say_why() -> None:
    gpu = importlib.import_module("gpu")
    label = gpu.Row("rounds", "cnn × 10", "serial")

    def fails(error: Exception) -> Any:
        raise error

    def added(measure: Any, deadline: float = float("inf")) -> list[Any]:
        rows: list[Any] = []
        gpu.Plan("cpu", gpu.TINY, deadline, rows.append).attempt(label, measure)
        return rows

    assert added(lambda: fails(RuntimeError()), deadline=0.0) == [replace(label, skipped="no time was left for it")]
    assert added(lambda: fails(ValueError("too few\nclients"))) == [replace(label, failed="ValueError: too few")]
    (row,) = added(lambda: fails(torch.OutOfMemoryError("CUDA out of memory")))
    assert row == replace(label, skipped="the GPU's memory does not suffice")


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let torch.cuda report the memory and the utilisation of a fake GPU."""
    fake = SimpleNamespace(allocated=50_000_000, peak=0, utilization=lambda: 40)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: fake.allocated)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(fake, "peak", fake.allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: fake.peak)
    monkeypatch.setattr(torch.cuda, "utilization", lambda: fake.utilization())
    return fake


def test_peak_memory_and_turns(fake_cuda: SimpleNamespace) -> None:
    gpu, calls = importlib.import_module("gpu"), []

    def way(name: str, mb: int) -> Any:
        def run() -> None:
            calls.append(name)
            fake_cuda.peak = max(fake_cuda.peak, fake_cuda.allocated + mb * 1_000_000)

        return run

    timed = gpu.in_turns({"a": way("a", 7), "b": way("b", 30)}, turns=2, seconds=60)
    assert calls == ["a", "b"] * 3
    assert {name: entry.peak_mb for name, entry in timed.items()} == pytest.approx({"a": 7, "b": 30})
    assert all(len(entry.seconds) == 2 for entry in timed.values())
    gpu.in_turns({"a": way("a", 7)}, turns=9, seconds=0)
    assert calls[6:] == ["a", "a"]  # one to warm up, and at least one turn


def test_utilisation_comes_from_nvml_or_from_a_profile(
    fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, gpu = importlib.import_module("gpu.rounds"), importlib.import_module("gpu")
    plan = gpu.Plan("cuda", gpu.TINY, float("inf"), add=print)
    assert rounds.busy_share(lambda: None, 20.0, plan, profiles=True) == 0.4
    del fake_cuda.utilization
    monkeypatch.setattr(rounds, "kernels", lambda way: (3, {"conv": 0.004, "add": 0.001}))
    assert rounds.busy_share(lambda: None, 20.0, plan, profiles=True) == pytest.approx(0.25)
    assert rounds.busy_share(lambda: None, 20.0, plan, profiles=False) is None


def test_without_a_gpu_only_tiny_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = importlib.import_module("accelerator")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = SimpleNamespace(out=tmp_path, only=list(accelerator.SHARES), minutes=8.0, tiny=False)
    assert accelerator.run(options, 0.0) == 2
    assert "--tiny runs everything in small on the CPU" in capsys.readouterr().err
