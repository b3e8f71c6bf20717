"""Every test of the engine starts from the same seeds."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    torch.manual_seed(0)
