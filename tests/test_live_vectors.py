"""Test that a round keeps no more vectors as long as the model than it needs, by counting storages of tensors."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

MOST = {  # storages in a client's step and at Apply, models at the peak beyond the one that is trained
    "FedAvg": (5, 4, 5),
    "FedProx": (5, 5, 6),
    "FedNova": (5, 5, 6),
    "ServerM": (8, 7, 8),
    "SCAFFOLD": (10, 8, 15),
    "FedAdam": (11, 11, 14),
    "FedAdamSSM": (11, 11, 16),
    "FedLDF": (9, 8, 10),
}


@pytest.fixture
def live_vectors(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import `benchmarks/live_vectors.py`."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("live_vectors")


@pytest.mark.trains
@pytest.mark.parametrize("method", MOST)
def test_a_round_keeps_few_vectors(method: str, live_vectors: ModuleType) -> None:
    row = live_vectors.measure(method, num_clients=4)
    step, apply, peak = MOST[method]
    assert row.step.storages <= step
    assert row.apply.storages <= apply
    assert row.peak <= peak + 0.1
