"""Test Weights & Biases offline: read a run back from its own file; a failing logger does not end the run."""

import json
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb", reason="needs W&B: pip install -e '.[wandb]'")

from lightning.pytorch.loggers import CSVLogger
from wandb.proto.wandb_internal_pb2 import Record

from lightning_fl import FederatedTrainer
from lightning_fl.cli import main
from lightning_fl.data import Digits
from lightning_fl.modules import ImageClassifier
from lightning_fl.outputs.wandb_run import has_key

CONFIG = """
model: {class_path: ImageClassifier, init_args: {network: linear}}
data: {class_path: Digits, init_args: {num_clients: 10, partition: Shards}}
algorithm: {class_path: FedProx, init_args: {mu: 0.25}}
trainer:
  clients_per_round: 3
  default_root_dir: run
  enable_progress_bar: false
  enable_model_summary: false
  logger: WandbLogger
"""
BLOCK, CHUNK = 32768, struct.Struct("<IHB")


def records(file: Path) -> list[Record]:
    """Read a `.wandb` file: seven bytes, then LevelDB's log format, a record in one chunk (1) or several (2, 3 … 4)."""
    content, place, whole = file.read_bytes(), 7, b""
    found = []
    while place + CHUNK.size <= len(content):
        if BLOCK - place % BLOCK < CHUNK.size:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = CHUNK.unpack_from(content, place)
        place += CHUNK.size
        whole += content[place : place + length]
        place += length
        if kind in (1, 4):
            found.append(Record.FromString(whole))
            whole = b""
    return found


def eventually(look: Callable[[], Any]) -> Any:
    """Wait until `look` finds something, and return it: W&B writes in a separate process, with a delay."""
    until = time.monotonic() + 120
    while not (found := look()) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def written(folder: Path) -> dict[str, Any]:
    """Return the run of one offline folder: its id, rows, axes, configuration and artefacts."""
    (file,) = eventually(lambda: list(folder.glob("*.wandb")))
    assert eventually(lambda: any(record.HasField("exit") for record in records(file)))
    found: dict[str, Any] = {"rows": [], "axes": {}, "config": {}, "artifacts": {}}
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["id"] = record.run.run_id
        if kind in ("run", "config"):
            updates = record.run.config.update if kind == "run" else record.config.update
            found["config"] |= {"/".join(u.nested_key) or u.key: json.loads(u.value_json) for u in updates}
        elif kind == "history":
            found["rows"].append(
                {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            )
        elif kind == "metric" and record.metric.name:
            found["axes"][record.metric.name] = record.metric.step_metric
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            artifact = record.request.log_artifact.artifact
            found["artifacts"][artifact.type] = [entry.path for entry in artifact.manifest.contents]
        elif kind == "artifact":
            found["artifacts"][record.artifact.type] = [entry.path for entry in record.artifact.manifest.contents]
    return found


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Remove the key, put every cache in the test's own folder, and start W&B's process there, which keeps its first folder."""
    import wandb

    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("CACHE_DIR", "DATA_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    wandb.teardown()
    yield
    wandb.teardown()


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    import wandb

    Path("small.yaml").write_text(CONFIG)
    monkeypatch.setattr(sys, "argv", ["lightning-fl", "fit", "--config", "small.yaml", *words])
    main()
    wandb.finish()


def test_a_run_is_written_offline_and_gone_on_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, "--trainer.max_rounds", "2")
    (folder,) = eventually(lambda: list((tmp_path / "wandb").glob("offline-run-*")))
    first = written(folder)
    rows = [row for row in first["rows"] if "val/accuracy" in row]
    header, *lines = Path("run/metrics.csv").read_text().splitlines()
    expected = [dict(zip(header.split(","), map(float, line.split(",")), strict=True)) for line in lines]
    for row, line in zip(rows, expected, strict=True):
        # Accuracy and bytes are in one row, so that a chart can plot one over the other.
        assert row.items() >= {name: line[name] for name in line if name != "step"}.items()
    axes = first["axes"]
    assert {axes["val/accuracy"], axes["val/loss"], axes["train/loss"]} == {"comm/total_uplink_bytes"}
    assert axes["clients/accepted"] == axes["comm/uplink_bits"] == axes["time/round_seconds"] == "round"
    for name in ("comm/total_uplink_bytes", "comm/total_downlink_bytes", "time/simulated_seconds", "round"):
        assert axes[name] == ""
    assert first["config"]["algorithm"] == {"class_path": "lightning_fl.algorithms.FedProx", "init_args": {"mu": 0.25}}
    assert first["config"]["trainer"]["max_rounds"] == 2
    assert first["config"]["data"]["init_args"]["num_clients"] == 10
    shown = next(row for row in first["rows"] if any(name.startswith("partition") for name in row))
    assert "images" in json.dumps(shown)
    assert eventually(lambda: list((folder / "files" / "media" / "images").glob("partition*.png")))
    assert first["artifacts"]["model"] == ["model.ckpt"]
    assert first["artifacts"]["config"] == ["config.yaml"]
    tables = eventually(lambda: list((folder / "files" / "media" / "table").glob("final*.json")))
    assert dict(json.loads(tables[0].read_text())["data"])["rounds"] == "2"

    run(monkeypatch, "--trainer.max_rounds", "3", "--ckpt_path", "last")
    (other,) = eventually(lambda: [path for path in (tmp_path / "wandb").glob("offline-run-*") if path != folder])
    again = written(other)
    assert again["id"] == first["id"]
    assert [row["round"] for row in again["rows"] if "val/accuracy" in row] == [2]


class Fails(CSVLogger):
    """Logger whose service fails in the second round."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if step:
            raise ConnectionResetError("the service is gone")

    def finalize(self, status: str) -> None:
        raise ConnectionResetError("the service is gone")


def test_a_logger_that_fails_costs_neither_rows_nor_checkpoints(
    make_trainer: Callable[..., FederatedTrainer], tmp_path: Path
) -> None:
    trainer = make_trainer(max_rounds=3, logger=Fails(tmp_path / "elsewhere"), enable_checkpointing=True)
    with pytest.warns(
        UserWarning, match=r"Fails failed .* metrics.csv and the checkpoints are still written .*the service is gone"
    ):
        trainer.fit(
            ImageClassifier(network="linear", num_classes=10, in_channels=1, image_size=8), Digits(num_clients=5)
        )
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 4
    assert trainer.run.round == 3
    assert (tmp_path / "model.ckpt").is_file()


def test_a_key_is_found_where_wandb_keeps_it(tmp_path: Path) -> None:
    named = {"NETRC": str(tmp_path / "netrc")}
    assert not has_key(named)
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password 0123\n")
    assert has_key(named)
    assert not has_key({**named, "WANDB_BASE_URL": "https://wandb.example.org"})
    assert has_key({"WANDB_API_KEY": "0123", "NETRC": str(tmp_path / "none")})
