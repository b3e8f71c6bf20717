"""Test Weights & Biases offline: read a run back from its own file; a failing logger does not end the run."""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import processes
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger
from sweeps import trial_command

from lightning_fl import FederatedTrainer
from lightning_fl.cli import main
from lightning_fl.data import Digits
from lightning_fl.modules import ImageClassifier
from lightning_fl.outputs.metric import spend
from lightning_fl.outputs.metrics_csv import read_rows
from lightning_fl.outputs.wandb_run import has_key

if TYPE_CHECKING:
    from wandb.proto.wandb_internal_pb2 import Record

pytestmark = pytest.mark.usefixtures("types_of_a_new_process")

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
CONFIGS = Path(__file__).parents[2] / "configs"
BLOCK, CHUNK = 32768, struct.Struct("<IHB")


def records(file: Path) -> list[Record]:
    """Read a `.wandb` file: seven bytes, then LevelDB's log format, a record in one chunk (1) or several (2, 3 … 4)."""
    from wandb.proto.wandb_internal_pb2 import Record  # W&B is imported by the tests that use it

    content, place, whole = file.read_bytes(), 7, b""
    found = []
    while place + CHUNK.size <= len(content):
        if BLOCK - place % BLOCK < CHUNK.size:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = CHUNK.unpack_from(content, place)
        place += CHUNK.size
        if place + length > len(content):
            break  # W&B's process is still writing this record
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
    found: dict[str, Any] = {"rows": [], "axes": {}, "config": {}, "artifacts": {}, "summary": {}, "best": {}}
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["id"], found["name"] = record.run.run_id, record.run.display_name
            found["group"], found["tags"] = record.run.run_group, list(record.run.tags)
            found["sweep"] = record.run.sweep_id
        if kind in ("run", "config"):
            updates = record.run.config.update if kind == "run" else record.config.update
            found["config"] |= {"/".join(u.nested_key) or u.key: json.loads(u.value_json) for u in updates}
        elif kind == "history":
            found["rows"].append(
                {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            )
        elif kind == "metric" and record.metric.name:
            found["axes"][record.metric.name] = record.metric.step_metric
            kept = record.metric.summary
            found["best"][record.metric.name] = {kind for kind in ("min", "max", "last") if getattr(kept, kind)}
        elif kind == "summary":
            found["summary"] |= {
                "/".join(u.nested_key) or u.key: json.loads(u.value_json) for u in record.summary.update
            }
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

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
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


@pytest.mark.process
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
    for name in (
        "comm/total_uplink_bytes",
        "comm/total_downlink_bytes",
        "comm/total_bytes",
        "time/simulated_seconds",
        "round",
    ):
        assert axes[name] == ""
    for row in rows:
        assert row["comm/total_bytes"] == row["comm/total_uplink_bytes"] + row["comm/total_downlink_bytes"]
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
    accuracies = [line["val/accuracy"] for line in expected]
    assert first["summary"]["metric"] == "val/accuracy"
    assert first["summary"]["final"] == first["summary"]["last"] == pytest.approx(accuracies[-1])
    assert first["summary"]["best"] == pytest.approx(max(accuracies))
    assert first["summary"]["best_round"] == accuracies.index(max(accuracies)) + 1
    assert first["best"]["val/accuracy"] == {"max", "last"}
    assert first["best"]["val/loss"] == set()
    assert first["name"] == "FedProx Digits Shards(2) seed 0"
    assert first["group"] == "FedProx Digits Shards(2)"
    assert first["tags"] == ["FedProx", "Digits", "Shards(2)", "seed 0"]

    run(monkeypatch, "--trainer.max_rounds", "3", "--ckpt_path", "last")
    (other,) = eventually(lambda: [path for path in (tmp_path / "wandb").glob("offline-run-*") if path != folder])
    again = written(other)
    assert again["id"] == first["id"]
    assert again["name"] == "", "a resumed run keeps the name that it has, perhaps another by now"
    assert [row["round"] for row in again["rows"] if "val/accuracy" in row] == [2]


@pytest.mark.process
def test_the_costs_that_callbacks_ask_for_are_numbers_of_the_summary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    callbacks = (
        "[{class_path: TargetReached, init_args: {target: 0.12, stop: false}}, {class_path: CommunicationMeter, %s}]"
    )
    run(
        monkeypatch,
        *("--trainer.max_rounds", "9", "--trainer.logger.name", "mine", "--trainer.logger.tags", "[a, b]"),
        *("--trainer.callbacks", callbacks % "init_args: {max_uplink_bytes: 30000}"),
    )
    (folder,) = eventually(lambda: list((tmp_path / "wandb").glob("offline-run-*")))
    found = written(folder)
    rows = [row for row in found["rows"] if "val/accuracy" in row]
    reached = next(row for row in rows if row["val/accuracy"] >= 0.12)
    within = [row["val/accuracy"] for row in rows if row["comm/total_uplink_bytes"] <= 30000]
    assert 1 < len(within) < len(rows)
    assert found["summary"]["bytes_to_target"] == reached["comm/total_uplink_bytes"]
    assert found["summary"]["downlink_bytes_to_target"] == reached["comm/total_downlink_bytes"]
    assert found["summary"]["total_bytes_to_target"] == reached["comm/total_bytes"]
    assert found["summary"]["rounds_to_target"] == reached["round"] + 1
    assert found["summary"]["accuracy_at_budget"] == max(within)
    assert found["summary"]["bytes_to_target_penalised"] == reached["comm/total_uplink_bytes"]
    curve = [row["comm/total_uplink_bytes"] for row in rows], [row["val/accuracy"] for row in rows]
    assert found["summary"]["area"] == pytest.approx(spend(*curve, low=300, high=30000).area)
    assert 0 < found["summary"]["area"] < max(within)
    assert (found["name"], found["tags"]) == ("mine", ["a", "b"])
    assert found["group"] == "FedProx Digits Shards(2)"


@pytest.mark.process
def test_names_in_the_environment_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {"WANDB_NAME": "mine", "WANDB_RUN_GROUP": "ours", "WANDB_TAGS": "a,b"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    run(monkeypatch, "--trainer.max_rounds", "1")
    (folder,) = eventually(lambda: list((tmp_path / "wandb").glob("offline-run-*")))
    found = written(folder)
    assert (found["name"], found["group"], found["tags"]) == ("mine", "ours", ["a", "b"])


@pytest.mark.process
def test_a_module_s_hyper_parameters_are_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Test a module without the parameters that the command line takes from the data."""
    Path("own_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own.yaml").write_text("model: own_module.Own\n")
    run(monkeypatch, "--config", "own.yaml", "--trainer.max_rounds", "2")
    (folder,) = eventually(lambda: list((tmp_path / "wandb").glob("offline-run-*")))
    found = written(folder)
    assert found["config"].keys() - {"_wandb"} == {"seed_everything", "trainer", "model", "data", "algorithm", "lr"}
    assert "null" not in json.dumps(found["config"])
    assert found["config"]["model"] == {"class_path": "own_module.Own", "init_args": {"lr": 0.1}}
    assert found["best"]["val_err"] == {"min", "last"}, "the first value of the validation is what the run is about"
    assert found["best"]["train/loss"] == found["best"]["val_err_sum"] == set()
    assert "lr" in Path("run/hparams.yaml").read_text()
    assert "num_classes" not in Path("run/hparams.yaml").read_text()


OWN = """
import lightning as L
import torch
from torch import nn


class Own(L.LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def validation_step(self, batch, batch_idx):
        error = (self.layer(batch[0].flatten(1)).argmax(1) != batch[1]).float()
        self.log("val_err", error.mean())
        self.log("val_err_sum", error.sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
"""


def run_trial(folder: str, words: list[str], variables: dict[str, str]) -> None:
    """Run a trial in a process of its own, as an agent does."""
    import wandb

    os.chdir(folder)
    os.environ.update(variables)
    sys.argv = words
    main()
    wandb.finish()  # as W&B does at the end of a program


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((CONFIGS / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_trials_of_a_sweep_run_side_by_side(path: Path, tmp_path: Path) -> None:
    """Test the command that an agent builds from a sweep file, with its variables, twice at the same time in one folder."""
    sweep = yaml.safe_load(path.read_text())
    (tmp_path / "configs").symlink_to(CONFIGS)
    rng = np.random.default_rng(0)
    base = next(word for word in sweep["command"] if word.startswith("--config=")).removeprefix("--config=")
    channels, size = (1, 28) if "fashionmnist" in base else (3, 32)
    images = {
        f"{part}_images": rng.integers(256, size=(count, size, size, channels), dtype=np.uint8)
        for part, count in (("train", 2000), ("test", 10))
    }
    labels = {f"{part}_labels": np.arange(count) % 10 for part, count in (("train", 2000), ("test", 10))}
    np.savez(tmp_path / "few.npz", **images, **labels)
    small = (
        "--data Arrays --data.path few.npz --data.batch_size 4 --trainer.max_rounds 2 --trainer.clients_per_round 10 "
        "--trainer.limit_train_batches 1 --trainer.limit_val_batches 1 --trainer.local_epochs 1 --trainer.local_steps null "
        "--trainer.enable_progress_bar false --trainer.enable_model_summary false --model.network lenet5"
    )
    started = []
    for number in (0, -1):
        run_id = f"{path.stem.replace('_', '')}{number + 1}"
        env, program, *words = trial_command(sweep, number)
        assert (env, program) == ("/usr/bin/env", "lightning-fl")
        variables = {
            "WANDB_SWEEP_ID": "sweep1",
            "WANDB_RUN_ID": run_id,
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "WANDB_SWEEP_PARAM_PATH": str(tmp_path / f"{run_id}.yaml"),
        }
        given = dict(word.removeprefix("--").split("=", 1) for word in words[1:] if "algorithm." in word)
        content = {"wandb_version": 1, **{name: {"value": yaml.safe_load(value)} for name, value in given.items()}}
        (tmp_path / f"{run_id}.yaml").write_text(yaml.safe_dump(content))
        process = processes.CONTEXT.Process(
            target=run_trial, args=(str(tmp_path), [program, *words, *small.split()], variables)
        )
        process.start()
        started.append((process, run_id, given))
    for process, run_id, given in started:
        process.join(processes.LIMIT_S)
        assert process.exitcode == 0
        (folder,) = tmp_path.glob(f"runs/**/trial-{run_id}")
        header, *lines = (folder / "metrics.csv").read_text().splitlines()
        assert len(lines) == 2
        assert sweep["metric"]["name"] in header.split(",")
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert f"--data.val_fraction={config['data']['init_args']['val_fraction']}" in sweep["command"]
        for name, value in given.items():
            assert config["algorithm"]["init_args"][name.removeprefix("algorithm.")] == yaml.safe_load(value)
        found = written(next(iter((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))))
        assert (found["id"], found["sweep"], found["name"], found["group"]) == (run_id, "sweep1", "", "")
        assert found["summary"]["metric"] == "val/accuracy"
    assert not list(tmp_path.rglob("earlier-*"))


class Fails(CSVLogger):
    """Logger whose service fails in the second round."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if step:
            raise ConnectionResetError("the service is gone")

    def finalize(self, status: str) -> None:
        raise ConnectionResetError("the service is gone")


def test_a_logger_that_fails_costs_neither_rows_nor_checkpoints(
    make_trainer: Callable[..., FederatedTrainer], tmp_path: Path, says_lost: Callable[..., Any]
) -> None:
    trainer = make_trainer(max_rounds=3, logger=Fails(tmp_path / "elsewhere"), enable_checkpointing=True)
    with says_lost(r"Fails failed .* metrics.csv and the checkpoints are still written .*the service is gone"):
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


@pytest.mark.process
def test_the_evaluation_of_clients_is_a_histogram_over_bytes_and_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    callback = "{class_path: ClientEvaluation, init_args: {every_n_rounds: 2, finetune_epochs: 1}}"
    words = ("--trainer.max_rounds", "3", "--data.val_fraction", "0.2", "--trainer.callbacks", f"[{callback}]")
    run(monkeypatch, *words)
    (folder,) = eventually(lambda: list((tmp_path / "wandb").glob("offline-run-*")))
    found = written(folder)
    shown = [row for row in found["rows"] if "val/accuracy_clients/values" in row]
    rows = read_rows(Path("run/clients.csv"))[1]
    by_round = {index: [row for row in rows if row["round"] == index] for index in ("1", "2")}
    spent = {row["round"]: row["comm/total_uplink_bytes"] for row in found["rows"] if "round" in row}
    for row, (index, clients) in zip(shown, by_round.items(), strict=True):
        assert row["comm/total_uplink_bytes"] == spent[int(index)]
        for end in ("", "_tuned"):
            counts, edges = (row[f"val/accuracy_clients{end}/{part}"] for part in ("values", "bins"))
            values = [float(client[f"val/accuracy{end}"]) for client in clients]
            assert counts == np.histogram(values, bins=edges)[0].tolist()
            assert sum(counts) == 10
    for name in ("val/accuracy_clients", "val/accuracy_clients_worst10", "val/loss_clients_gain_mean"):
        assert found["axes"][name] == "comm/total_uplink_bytes"
    (table,) = eventually(lambda: list((folder / "files" / "media" / "table").glob("clients*.json")))
    content = json.loads(table.read_text())
    assert content["columns"] == list(rows[0])
    assert [[str(cell) for cell in line] for line in content["data"]] == [list(row.values()) for row in by_round["2"]]
