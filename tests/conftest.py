"""Fixtures that every room may use."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch

from lightning_fl import FederatedTrainer

# Tests run side by side, and start programs of their own: one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts from the same seeds."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    torch.manual_seed(0)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., FederatedTrainer]:
    """Make a quiet trainer on the CPU that writes nothing; give `**keeps_files` or other flags to change that."""

    def make(**flags: Any) -> FederatedTrainer:
        quiet = {
            "accelerator": "cpu",
            "default_root_dir": tmp_path,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "logger": False,
            "num_sanity_val_steps": 0,
        }
        return FederatedTrainer(**{**quiet, "max_rounds": 2, "clients_per_round": 3, **flags})

    return make


@pytest.fixture
def make_stock_trainer(tmp_path: Path) -> Callable[..., L.Trainer]:
    """Make Lightning's own trainer, as quiet as that of `make_trainer`."""

    def make(**flags: Any) -> L.Trainer:
        quiet = {
            "accelerator": "cpu",
            "default_root_dir": tmp_path,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "logger": False,
            "num_sanity_val_steps": 0,
        }
        return L.Trainer(**{**quiet, "max_epochs": 2, **flags})

    return make


@pytest.fixture
def keeps_files() -> dict[str, Any]:
    """Flags of a trainer that writes metrics.csv and checkpoints."""
    return {"logger": True, "enable_checkpointing": True}
