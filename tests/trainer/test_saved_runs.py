"""Test that runs of versions 0.1 and 0.2 that were stopped after two of four rounds load, and resume to equal numbers."""

import csv
import shutil
import sys
from pathlib import Path

import pytest

from lightning_fl.cli import main
from lightning_fl.outputs.communication_json import read_communication
from lightning_fl.report.records import read_run

pytestmark = pytest.mark.usefixtures("types_of_a_new_process")

SAVED = Path(__file__).parent / "saved_runs"
"""Folders with config.yaml and checkpoints/last.ckpt after two rounds, and metrics.csv of four rounds in one go."""
NUM_TEST_IMAGES = 360
NEW_COLUMN = "clients/samples"
"""Column that version 0.1 did not write."""


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", sorted(path.name for path in SAVED.iterdir()))
def test_a_run_of_an_earlier_version_goes_on_to_the_same_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SAVED / name, name)
    config = shutil.move(f"{name}/config.yaml", "config.yaml")
    lines = Path(name, "metrics.csv").read_text().splitlines(keepends=True)
    Path(name, "metrics.csv").write_text("".join(lines[:3]))
    before = read_run(name)
    assert before.bits is not None, "the bits by kind of such a run must be read from the checkpoint"

    words = ["fit", "--config", config, "--ckpt_path", "last", "--trainer.max_rounds", "4"]
    monkeypatch.setattr(sys, "argv", ["lightning-fl", *words])
    main()
    for here, there in zip(rows_of(Path(name, "metrics.csv")), rows_of(SAVED / name / "metrics.csv"), strict=True):
        assert here.keys() == there.keys() | {NEW_COLUMN}
        for key, text in there.items():
            if key == "time/round_seconds" or not text:
                continue
            if key.endswith("accuracy"):  # rounding on another processor may change an image or two
                assert float(here[key]) == pytest.approx(float(text), abs=2.5 / NUM_TEST_IMAGES), key
            elif key.startswith(("round", "step", "comm", "clients", "model")):
                assert float(here[key]) == float(text), key
            else:  # a loss near 0 is a difference of single-precision numbers near 1
                assert float(here[key]) == pytest.approx(float(text), rel=1e-3, abs=1e-7), key
    last = rows_of(Path(name, "metrics.csv"))[-1]
    bits = read_communication(name)
    assert bits is not None
    for direction, column in (("up", "comm/total_uplink_bytes"), ("down", "comm/total_downlink_bytes")):
        assert sum(bits[direction].values()) / 8 == float(last[column])
        assert sum(before.bits[direction].values()) / 8 == float(rows_of(SAVED / name / "metrics.csv")[1][column])
