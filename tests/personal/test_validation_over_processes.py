"""Test that processes share the clients to validate, and find what one process finds."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from torchmetrics import MeanSquaredError
from toys import Normalised, federation

from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import Algorithm, FedBN, PerFedAvg
from lightning_fl.evaluation import validation


class Measured(Normalised):
    """Module that also logs a torchmetrics object, whose processes would wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.error(self(batch[0]), batch[1])
        self.log("val/error", self.error)


def fit_adapted(folder: Path) -> None:
    fit(folder, PerFedAvg())


def fit(folder: Path, algorithm: Algorithm | None = None) -> None:
    torch.manual_seed(0)
    clients: list[int] = []
    plain = validation.ModelValidation._measure

    def noted(self: Any, client: int, *rest: Any) -> dict[str, float]:
        clients.append(client)
        return plain(self, client, *rest)

    validation.ModelValidation._measure = noted  # type: ignore[method-assign]
    trainer = FederatedTrainer(
        max_rounds=2,
        clients_per_round=6,
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        accelerator="cpu",
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Measured(), federation(), algorithm or FedBN())
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    (folder / f"{trainer.global_rank}.json").write_text(json.dumps({"values": values, "clients": clients}))


@pytest.mark.process
@pytest.mark.parametrize("train", [fit, fit_adapted])
def test_processes_share_the_clients_and_agree_with_one(train: Callable[[Path], None], tmp_path: Path) -> None:
    found = {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        processes.run(train, folder, num_processes=count)
        found[count] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
    ((alone,), (first, second)) = found[1], found[2]
    assert {"val/loss", "val/accuracy", "val/error"} <= alone["values"].keys()
    assert first["values"] == second["values"]
    assert first["values"] == pytest.approx(alone["values"], rel=1e-6)
    assert len(alone["clients"]) == 2 * 6, "six clients in each of two rounds"
    assert len(first["clients"]) == len(second["clients"]) == 2 * 3
