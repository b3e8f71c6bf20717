"""Test the trainer in a user's own program: Lightning's command line, and a module that torch compiles."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from toys import Perceptron, federation, read_rows, vector

from lightning_fl import FederatedTrainer
from lightning_fl.data import Federated

QUIET = "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"


class Tunable(BoringModel):
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.hparams["rate"])


def test_lightnings_command_line_takes_the_trainer(tmp_path: Path) -> None:
    folder = f"--trainer.default_root_dir={tmp_path}"
    data = f"--data.datamodule={BoringDataModule.__module__}.BoringDataModule", "--data.num_clients=4"
    rounds = "--trainer.max_rounds=2", "--trainer.clients_per_round=2"
    arguments = ["fit", "--model.rate=0.01", folder, *data, *rounds, *QUIET]
    LightningCLI(Tunable, Federated, trainer_class=FederatedTrainer, args=arguments)
    assert [row["clients/selected"] for row in read_rows(tmp_path)] == ["2", "2"]
    assert "rate: 0.01" in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize("runner", ["serial", "lightning"])
@pytest.mark.matrix
def test_a_compiled_module_trains_as_the_module(runner: str, tmp_path: Path) -> None:
    def fitted(compiles: bool) -> list[float]:
        torch.manual_seed(0)
        module: Any = Perceptron()
        given = torch.compile(module, backend="eager") if compiles else module
        flags: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = FederatedTrainer(
            max_rounds=2, clients_per_round=2, runner=runner, enable_checkpointing=False,
            default_root_dir=tmp_path, accelerator="cpu", **flags,
        )  # fmt: skip
        trainer.fit(given, federation(), verbose=False)
        assert trainer.lightning_module is module
        return vector(module).tolist()

    assert fitted(compiles=True) == pytest.approx(fitted(compiles=False))
