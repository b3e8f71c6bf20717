"""Shared fixtures of all tests."""

import logging
import os
import re
import sys
import typing
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch

from lightning_fl import FederatedTrainer

# Tests run in parallel and start programs of their own, so each uses one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed every test alike."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _keep_log_level() -> Iterator[None]:
    """Restore the level of Lightning's logger, which benchmarks raise to be quiet."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _types_of_a_new_process() -> None:
    """Empty typing's caches, in which types that differ only in their order are the same.

    The parser makes `Optional[int | float | None]` of a type, and would get the `Optional[float | int | None]` of a test before.
    """
    for clear in typing._cleanups:  # type: ignore[attr-defined]
        clear()


@pytest.fixture(autouse=True)
def _no_open_run_of_wandb() -> Iterator[None]:
    """Finish W&B's run, as the end of a process does; the next test would go on with it."""
    yield
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()


@pytest.fixture
def says_lost(caplog: pytest.LogCaptureFixture) -> Callable[[str], AbstractContextManager[None]]:
    """Return a context manager that checks that its block logs, whatever the filters of warnings, that something is lost."""

    @contextmanager
    def check(pattern: str) -> Iterator[None]:
        caplog.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert any(re.search(pattern, sentence) for sentence in said), said

    return check


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., FederatedTrainer]:
    """Return a factory of quiet trainers on the CPU that write nothing, unless given `**keeps_files` or other flags."""

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
    """Return a factory of Lightning's own trainers, as quiet as those of `make_trainer`."""

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
    """Return the flags of a trainer that writes metrics.csv and checkpoints."""
    return {"logger": True, "enable_checkpointing": True}
