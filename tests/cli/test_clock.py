"""Test the clock of clients, deadlines and availability on the command line, in files and in the environment."""

import os
import random
import signal
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import processes
import pytest
import yaml
from command_line import Command
from compared_runs import equal_states, result
from lightning.pytorch import Callback

from lightning_fl.cli.planned_fit import _made
from lightning_fl.features.clock import ClientClock, SimulatedClock
from lightning_fl.outputs import checkpoint_file
from lightning_fl.trainer import FederatedTrainer

SHORT = ("--config=quickstart", "--trainer.max_rounds=2", "--model.network=linear", "--data.image_size=8")


def trainer_of(*words: str) -> FederatedTrainer:
    trainer: FederatedTrainer = _made([*SHORT, *words]).trainer
    return trainer


@pytest.mark.usefixtures("types_of_a_new_process")
@pytest.mark.parametrize(
    "words", [*permutations(["--trainer.clock.uplink_sigma=0.5", "--trainer.clock.macs_per_second=1e9"])]
)
def test_settings_of_a_clock_of_clients_make_one_in_any_order(words: Sequence[str]) -> None:
    assert trainer_of(*words).clock == ClientClock(uplink_sigma=0.5, macs_per_second=1e9)


@pytest.mark.usefixtures("types_of_a_new_process")
def test_files_and_the_environment_set_a_clock_of_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "clock.yaml"
    file.write_text(yaml.safe_dump({"trainer": {"clock": {"devices": "silos"}, "deadline": 3}}))
    monkeypatch.setenv("PL_FIT__TRAINER__OVER_SELECTION", "1.3")
    trainer = trainer_of("--trainer.clock.macs_per_second=1e9", f"--config={file}")
    assert trainer.clock == ClientClock(devices="silos", macs_per_second=1e9)
    assert (trainer.deadline, trainer.over_selection) == (3, 1.3)
    monkeypatch.delenv("PL_FIT__TRAINER__OVER_SELECTION")
    assert type(trainer_of("--trainer.clock.macs_per_second=1e9").clock) is SimulatedClock


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--trainer.clock=ClientClock",
            "are given without the name of a class, got 'ClientClock': give only the settings",
        ),
        ("--trainer.clock.devices=phone", "trainer.clock.devices must be phones or silos or null, got phone"),
        ("--trainer.deadline=3", "deadline needs a clock that knows each client's time"),
        ("--trainer.clock.trace=speeds.csv", "trace speeds.csv, line 3: uplink_mebibytes_per_second must be a number"),
        (
            "--trainer.clock.devices=silos --trainer.availability=there.csv",
            "there.csv, line 3: end_seconds must be after",
        ),
    ],
)
def test_mistakes_end_in_one_sentence_and_leave_the_folder(words: str, sentence: str, lightning_fl: Command) -> None:
    Path("speeds.csv").write_text(
        "macs_per_second,uplink_mebibytes_per_second,downlink_mebibytes_per_second\n1e9,1,2\n1e9,fast,2\n"
    )
    Path("there.csv").write_text("client,start_seconds,end_seconds\n0,0,9\n1,5,5\n")
    assert sentence in lightning_fl("fit", *SHORT, *words.split()).sentence
    assert {path.name for path in Path().iterdir()} == {"speeds.csv", "there.csv"}


def test_a_clock_of_clients_is_saved_and_goes_on(lightning_fl: Command) -> None:
    clock = ("--trainer.clock.devices=phones", "--trainer.over_selection=1.3")
    ended = lightning_fl("fit", *SHORT, *clock, "--trainer.default_root_dir=run")
    assert "simulated time" in ended.out
    again = ("fit", "--config=run/config.yaml", "--trainer.max_rounds=3", "--ckpt_path=last")
    ended = lightning_fl(*again)
    assert ended.code == 0, ended.err
    head, *rows = Path("run/metrics.csv").read_text().splitlines()
    late = head.split(",").index("clients/late")
    assert [row.split(",")[late] for row in rows] == ["3", "3", "3"]


class Killer(Callback):
    """Callback that kills the process when an upload has arrived."""

    def __init__(self, uploads: int) -> None:
        self.left = uploads

    def on_client_upload(self, *arguments: Any) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


KEPT = ("features", "simulated_seconds", "params", "server", "ledger")
"""State of a run that follows from all earlier rounds."""


@pytest.mark.process
@pytest.mark.parametrize(
    "words",
    [
        "--algorithm=FedBuff --algorithm.buffer_size=4 --algorithm.uplink=ErrorFeedback --algorithm.uplink.codec=TopK",
        "--algorithm=FedAsync --trainer.max_rounds=20",
        "--algorithm=SCAFFOLD --trainer.over_selection=1.5 --trainer.deadline=0.001",
    ],
    ids=["FedBuff", "FedAsync", "deadline"],
)
def test_a_command_that_is_killed_goes_on_as_if_it_were_not(words: str, tmp_path: Path) -> None:
    there = tmp_path / "there.csv"
    intervals = [f"{client},{client % 5 / 1e4},0.002" for client in range(40)]
    there.write_text("\n".join(("client,start_seconds,end_seconds", *intervals)))
    flags = (
        "--trainer.clock.devices=phones --trainer.straggler_rate=0.3 --trainer.dropout_rate=0.2 --data.num_clients=40"
    )
    command = [
        "fit",
        *SHORT,
        "--trainer.max_rounds=5",
        f"--trainer.availability={there}",
        *flags.split(),
        *words.split(),
    ]
    whole, killed = ([*command, f"--trainer.default_root_dir={tmp_path / name}"] for name in ("whole", "killed"))
    processes.run_command(whole)
    expected, weights = result(tmp_path / "whole")
    uploads = random.randint(1, sum(int(row["clients/accepted"]) for row in expected))
    killer = ("--trainer.callbacks+=test_clock.Killer", f"--trainer.callbacks.uploads={uploads}")
    processes.run_command([*killed, *killer], exit_codes=[-signal.SIGKILL])
    processes.run_command([*killed, "--ckpt_path=last"])
    rows, resumed = result(tmp_path / "killed")
    assert rows == expected, uploads
    assert equal_states(weights, resumed), uploads
    paths = [tmp_path / name / "checkpoints" / "last.ckpt" for name in ("whole", "killed")]
    runs = [checkpoint_file.load(path)["federation"]["run"] for path in paths]
    assert ("asynchrony" in runs[0]["features"]) == ("FedBuff" in words or "FedAsync" in words)
    for name in KEPT:
        assert equal_states(runs[0].get(name), runs[1].get(name)), (name, uploads)
