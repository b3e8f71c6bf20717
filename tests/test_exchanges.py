"""Test what processes exchange: objects without tensors, few collectives in a round, and one model."""

import atexit
import json
import pickle
import subprocess
import warnings
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from torch import Tensor
from torchmetrics import MeanMetric
from toys import Perceptron, Statistics, federation

from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import SCAFFOLD, FedAvg
from lightning_fl.processes import checksum

MOST_BYTES = 64_000
COLLECTIVES = ("all_gather_object", "broadcast_object_list", "all_reduce", "broadcast", "barrier")


class Sent(pickle.Pickler):
    """Pickles an object, and refuses tensors in it."""

    def reducer_override(self, obj: Any) -> Any:
        assert not isinstance(obj, Tensor), "a tensor is inside an object that is sent"
        return NotImplemented


class Counting(Callback):
    """Counts the collectives of each round, and checks what crosses in pickles."""

    def __init__(self) -> None:
        self.counts, self.rounds = Counter[str](), list[dict[str, int]]()
        for name in COLLECTIVES:
            setattr(torch.distributed, name, self._watched(name, getattr(torch.distributed, name)))

    def _watched(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self.counts[name] += 1
            if "object" in name:
                written = BytesIO()
                Sent(written, protocol=5).dump(arguments[1] if name == "all_gather_object" else arguments[0])
                assert len(written.getvalue()) < MOST_BYTES
            return collective(*arguments, **options)

        return watched

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.rounds.append(dict(self.counts))
        self.counts.clear()


class Logging(Statistics):
    """Module with buffers and counters that logs means, a maximum, a function and a metric; other clients log other names."""

    def __init__(self) -> None:
        super().__init__(True)
        self.metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/largest", loss, reduce_fx="max")
        self.log("train/width", loss, reduce_fx=lambda values: values.amax() - values.amin())
        self.log(f"train/of_{len(batch[0])}", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.metric(batch[1].abs().mean())
        self.log("val/metric", self.metric)


class Drifting(Callback):
    """Moves the model of the second process a little before the second round."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1 and trainer.global_rank == 1:
            pl_module.hidden.weight.data.add_(1e-6)


def fit_thrice(folder: str, num_processes: int) -> None:
    """Fit with states, with none, and with models that drift apart; write metrics, weights, warnings and the counts."""
    found = []
    for number, algorithm in enumerate((SCAFFOLD(), FedAvg(), FedAvg())):
        torch.manual_seed(0)
        module = Logging() if number == 0 else Perceptron()
        counting: list[Any] = []
        if num_processes > 1:
            counting = [Drifting() if number == 2 else Counting()]
        trainer = FederatedTrainer(
            max_rounds=3,
            clients_per_round=5,
            accelerator="cpu",
            devices=num_processes,
            default_root_dir=f"{folder}/{number}",
            enable_progress_bar=False,
            enable_model_summary=False,
            runner="serial",
            callbacks=counting,
        )
        if num_processes > 1 and trainer.global_rank == 1:
            for parameter in module.parameters():
                parameter.data.zero_()  # as an unseeded script initialises it differently
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, federation(), algorithm)
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k != "time/round_seconds"}
        found.append({"metrics": metrics, "warnings": [str(one.message) for one in caught]})
        if num_processes > 1 and number < 2:
            found[-1]["rounds"] = counting[0].rounds
        found[-1]["weights"] = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    Path(folder, f"{trainer.global_rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what one process, and the first and second of two, have written."""
    folders = [tmp_path_factory.mktemp(f"by{num_processes}") for num_processes in (1, 2)]
    for num_processes, folder in enumerate(folders, start=1):
        processes.run(fit_thrice, str(folder), num_processes, num_processes=num_processes)
    paths = {"one": folders[0] / "0.json", "first": folders[1] / "0.json", "second": folders[1] / "1.json"}
    return {name: json.loads(path.read_text()) for name, path in paths.items()}


@pytest.mark.process
def test_no_tensor_crosses_in_an_object_and_the_answer_is_that_of_one_process(found: dict[str, Any]) -> None:
    for one, two in zip(found["one"], found["first"], strict=True):
        assert one["metrics"] == pytest.approx(two["metrics"], rel=1e-4)
        assert one["weights"] == pytest.approx(two["weights"], rel=1e-4, abs=1e-5)


@pytest.mark.process
def test_a_round_exchanges_little(found: dict[str, Any]) -> None:
    """Check the last whole round: training, validation and the end of the round gather once each; uploads are reduced once."""
    with_states, without = (entry["rounds"][-1] for entry in found["first"][:2])
    assert without == {"all_gather_object": 3, "all_reduce": 1}
    assert with_states["all_reduce"] == 1
    assert (
        with_states["broadcast"] <= 5 + 2 * 2
    )  # the states of five clients, and the metric's two states in each process
    assert "barrier" not in with_states


@pytest.mark.process
def test_models_that_drift_apart_are_noticed_and_brought_together(found: dict[str, Any]) -> None:
    first, second = (found[name][2] for name in ("first", "second"))
    assert first["weights"] == second["weights"]
    said = [sentence for sentence in first["warnings"] if "began with different models" in sentence]
    assert len(said) == 1
    assert said[0].startswith("Round 2")
    assert not any("differ, most likely" in sentence for entry in found["first"][:2] for sentence in entry["warnings"])


class Failing(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        raise RuntimeError("only here")


def test_a_failed_run_ends_the_processes_that_it_has_started(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda function, *arguments: at_exit.append((function, arguments)))
    trainer = make_trainer(callbacks=[Failing()])
    with subprocess.Popen(["sleep", "60"]) as child:
        trainer.fabric.strategy._launcher = SimpleNamespace(procs=[child])
        with pytest.raises(RuntimeError, match="only here"):
            trainer.fit(Perceptron(), federation())
        try:
            ((function, (children, _)),) = at_exit
            function(children, 0.1)
            assert child.poll() is not None
        finally:
            child.kill()


def test_a_checksum_sees_the_last_bit() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        vector = torch.randn(100).to(dtype)
        other = vector.clone()
        other[17] = torch.nextafter(other[17], torch.tensor(9.0, dtype=dtype))
        assert checksum(vector) == checksum(vector.flip(0))
        assert checksum(vector) != checksum(other)
