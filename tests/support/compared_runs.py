"""Runs that tests compare: two runners, one process and two, before and after."""

import copy
import csv
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from toys import Perceptron, federation, read_rows

from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import FedAvg
from lightning_fl.engine.roles import Roles, Train
from lightning_fl.features.asynchrony.without_barrier import WithoutBarrier
from lightning_fl.features.clock import simulated_time
from lightning_fl.features.clock.client_devices import RoundTimes
from lightning_fl.features.clock.simulated_time import SimulatedTime

MakeTrainer = Callable[..., FederatedTrainer]
RUNNERS = pytest.mark.parametrize("runner", ["serial", "stacked"])

SCRIPT = """
import sys
from lightning_fl.cli import main

main(sys.argv[1:])
"""
COMMAND = (
    "fit --data Digits --data.num_clients 12 --data.image_size 16 --data.partition Dirichlet --data.partition.min_samples 1 "
    "--data.client_fraction 0.9 --data.server_fraction 0.1 "
    "--model ImageClassifier --model.network resnet32 --model.learning_rate 0.05 --trainer.clients_per_round 5 "
    "--trainer.local_steps 1 --trainer.max_rounds 2 --trainer.dropout_rate 0.3 --trainer.accelerator cpu "
    "--trainer.enable_progress_bar false --trainer.enable_model_summary false"
)


def bits_of(trainer: FederatedTrainer, direction: str) -> dict[str, int]:
    bits = trainer.run.ledger.round_bits[direction]
    return {kind: count for kind, count in bits.items() if count}


def equal_states(a: Any, b: Any) -> bool:
    """True if two nested dictionaries contain bitwise equal tensors."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_states(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def ends_as_fedavg(algorithm: Any, runner: str, make_trainer: MakeTrainer) -> bool:
    """True if three rounds of a method end in the model and the bits of FedAvg's."""
    ends = []
    for one in (algorithm, FedAvg()):
        torch.manual_seed(0)
        module = Perceptron()
        trainer = make_trainer(max_rounds=3, runner=runner)
        trainer.fit(module, federation(), one)
        ends.append({**module.state_dict(), "bits": trainer.run.ledger.total_bits})
    return equal_states(*ends)


def resumed_like_whole(
    make_trainer: MakeTrainer,
    folder: Path,
    module: Callable[[], Any],
    data: Callable[[], Any] = federation,
    algorithm: Callable[[], Any] = FedAvg,
    later: Callable[[], Any] | None = None,
    stop: int = 2,
    end: int = 4,
    **flags: Any,
) -> tuple[Any, FederatedTrainer]:
    """Check that a run that goes on after `stop` rounds ends bit for bit like one that was never interrupted.

    Args:
        make_trainer: factory of trainers.
        folder: folder for the runs, which are `whole` and `resumed`.
        module: factory of the module.
        data: factory of the data.
        algorithm: factory of the algorithm.
        later: factory of the module that goes on, to which all must come from the checkpoint; None for `module`.
        stop: rounds before the interruption.
        end: rounds of the run.
        flags: further flags of the trainers.

    Returns:
        Module and trainer of the resumed run.
    """
    start, ends = module(), []
    for part, stops in {"whole": (end,), "resumed": (stop, end)}.items():
        for number, rounds in enumerate(stops):
            fitted = (later or module)() if number else copy.deepcopy(start)
            files = {"default_root_dir": folder / part, "logger": True, "enable_checkpointing": True}
            trainer = make_trainer(max_rounds=rounds, **files, **flags)
            trainer.fit(fitted, data(), algorithm(), ckpt_path="last" if number else None)
        run = trainer.run
        read = {
            "clients": dict(run.clients.items()),
            "client_memory": dict(run.client_memory.items()),
        }  # also from disk
        ends.append({"module": fitted.state_dict(), "rows": read_rows(folder / part), **run.state_dict(), **read})
    whole, resumed = ends
    assert [name for name in whole | resumed if not equal_states(whole.get(name), resumed.get(name))] == []
    return fitted, trainer


def fits(make_trainer: MakeTrainer, module: Any, data: Callable[[], Any], algorithm: Any = None, **flags: Any) -> Any:
    """Train copies of a module by both runners; returns (serial, stacked), each (module, trainer)."""
    pair = []
    for runner in ("serial", "stacked"):
        fitted = copy.deepcopy(module)
        flags = {"max_rounds": 3, "clients_per_round": 4, **flags}
        flags.setdefault("val_every_n_rounds", flags["max_rounds"])  # only the last validation is compared
        at_once = {} if runner == "stacked" else {"clients_at_once": None}
        trainer = make_trainer(**{**flags, "runner": runner, **at_once})
        trainer.fit(fitted, data(), copy.deepcopy(algorithm))
        pair.append((fitted, trainer))
    return pair


def assert_same(pair: Any, tolerance: float = 1e-5, of_metrics: float = 1e-4) -> None:
    (serial, by_serial), (stacked, by_stacked) = pair
    for name, value in serial.state_dict().items():
        torch.testing.assert_close(stacked.state_dict()[name], value, rtol=tolerance, atol=tolerance, msg=name)
    left_out = ("time/round_seconds",)
    for name, value in by_serial.callback_metrics.items():
        if name not in left_out:
            torch.testing.assert_close(
                by_stacked.callback_metrics[name], value, rtol=of_metrics, atol=of_metrics, msg=name
            )
    assert by_serial.global_step == by_stacked.global_step


def ran(
    folder: Path, *words: str, num_processes: int = 1, launcher: tuple[str, ...] = (), algorithm: str = "FedDUSM"
) -> tuple[list[dict[str, str]], dict[str, torch.Tensor]]:
    """Return metrics and weights of a run in separate processes, one thread each; a launcher starts its own processes."""
    command = [*COMMAND.split(), "--trainer.default_root_dir", str(folder), *words, "--algorithm", *algorithm.split()]
    if num_processes > 1:
        command += ["--trainer.devices", str(num_processes)]
    if launcher:
        launch(launcher, command, folder.parent / "script.py")
    else:
        processes.run_command(command, num_processes)
    return result(folder)


def launch(launcher: tuple[str, ...], command: list[str], script: Path) -> None:
    """Start the run like a user."""
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PL_", "LOCAL_", "MASTER_", "WORLD_"))}
    done = subprocess.run(
        [*launcher, str(script), *command],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def result(folder: Path) -> tuple[list[dict[str, str]], dict[str, torch.Tensor]]:
    """Return the metrics and weights of a finished run."""
    with (folder / "metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if k != "time/round_seconds"} for row in csv.DictReader(file)]
    return rows, torch.load(folder / "model.ckpt", weights_only=True)["state_dict"]


def agree(one: tuple[list, dict], two: tuple[list, dict]) -> None:
    """Check that counts are equal, and averages and weights equal up to the order of summation."""
    for here, there in zip(one[0], two[0], strict=True):
        assert here.keys() == there.keys()
        for name in here:
            exact = name.startswith(("round", "step", "comm", "clients", "model"))
            assert float(here[name]) == pytest.approx(float(there[name]), rel=0 if exact else 1e-5), name
    for name, value in one[1].items():
        torch.testing.assert_close(value, two[1][name], rtol=1e-5, atol=1e-6, msg=name)


NOTHING: Any = None
"""What a part of a run is given that it does not read."""


def roles_that_train(train: Train) -> Roles:
    """Return roles of which only the training is called."""
    return Roles(NOTHING, NOTHING, train, NOTHING, NOTHING)


def time_of(trainer: FederatedTrainer) -> SimulatedTime:
    """Return the simulated time of a trainer's last fit."""
    features = trainer.fit_loop.engine.features
    clocks = (feature.clock if isinstance(feature, WithoutBarrier) else feature for feature in features)
    return next(clock for clock in clocks if isinstance(clock, SimulatedTime))


def recorded_times(monkeypatch: pytest.MonkeyPatch) -> list[RoundTimes]:
    """Return a list that will have the times of each round of later runs, with the bits of each client."""
    found = list[RoundTimes]()
    monkeypatch.setattr(simulated_time, "RoundTimes", lambda *given: found.append(RoundTimes(*given)) or found[-1])
    return found
