"""Test `fit --dry_run`: what the run would cost, and nothing written or kept."""

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Command

SHORT = ("fit", "--config=quickstart", "--trainer.max_rounds=2", "--model.network=linear", "--data.image_size=8")


def test_a_dry_run_prints_a_table_and_leaves_nothing(lightning_fl: Command) -> None:
    ended = lightning_fl(*SHORT, "--dry_run")
    lines = ended.out.splitlines()
    assert ended.code == 0
    assert lines[0] == "FedAvg: 2 rounds of 10 clients; nothing was trained."
    table = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    # 650 numbers of 4 bytes to and from ten clients
    assert table["uplink"] == table["downlink"] == ["26.0", "kB", "52.0", "kB"]
    assert {"steps", "MACs", "time", "memory", "disk"} <= table.keys()
    assert max(map(len, lines)) <= 80
    assert list(Path().iterdir()) == []
    assert "dry_run" not in lightning_fl(*SHORT, "--print_config").out


def test_a_dry_run_begins_with_the_first_round(lightning_fl: Command) -> None:
    ended = lightning_fl(*SHORT, "--dry_run", "--ckpt_path=last")
    assert ended.code == 2
    assert "--dry_run plans a run from its first round, but ckpt_path is last: leave it out." in ended.err


@pytest.mark.process
def test_processes_plan_the_same_bytes_and_steps(tmp_path: Path, lightning_fl: Command) -> None:
    command = [Path(sys.executable).with_name("lightning-fl"), *SHORT, "--trainer.accelerator=cpu", "--dry_run"]
    two = subprocess.run(
        [*command, "--trainer.devices=2"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    one = lightning_fl(*SHORT, "--trainer.accelerator=cpu", "--dry_run").out
    kept = ("uplink", "downlink", "steps", "MACs")
    # Without the spaces between the columns, whose width depends on the times of this machine.
    assert [line.split() for line in two.splitlines() if line.startswith(kept)] == [
        line.split() for line in one.splitlines() if line.startswith(kept)
    ]
