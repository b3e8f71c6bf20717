"""Test that a round keeps no more vectors as long as the model than it needs, by counting storages of tensors."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from roster import ROSTER, WHOLE

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

MOST = {  # storages in a client's step and at Apply, models at the peak beyond the one that is trained
    "Centralised": (5, 4, 5),
    "LocalOnly": (6, 4, 6),
    "FedProx": (5, 5, 6),
    "Ditto": (6, 5, 7),
    "APFL": (7, 5, 11),
    "PFedMe": (7, 5, 9),
    "FedBN": (5, 4, 5),
    "ServerM-yogi": (10, 9, 10),
    "ServerAdam": (10, 9, 10),
    "ServerAdagrad": (10, 9, 10),
    "FedOpt": (6, 7, 9),
    "DeviceM-mime-lite": (9, 8, 13),
    "DeviceM-mime": (9, 8, 12),
    "FedDUDA": (9, 8, 12),
    "SCAFFOLD": (10, 8, 15),
    "FedNova": (5, 5, 6),
    "FedDUS": (6, 6, 7),
    "FedDUM": (9, 8, 10),
    "FedDUM-two-stage": (9, 8, 10),
    "FedDUSM": (8, 7, 8),
    "DataSharing": (5, 4, 5),
    "HybridFL": (6, 6, 8),
    "FedDF": (8, 9, 17),
    "FedKT": (5, 4, 5),
    "FedLDF": (8, 7, 9),
    "RandomLayers": (8, 7, 9),
    "HDFL": (9, 8, 10),
    "FedADP": (6, 5, 10),
    "IMC": (9, 8, 11),
    "PruneFL": (12, 10, 16),
    "FedAdamTop": (11, 11, 18),
    "FedAdamSSM": (11, 11, 18),
    "FedAdamSSM-second": (17, 14, 24),
    "FairnessTop": (11, 11, 25),
    "OneBitAdam": (13, 15, 19),
    "EfficientAdam": (11, 10, 20),
    "DASHA": (9, 8, 18),
    "FedDyn": (9, 7, 13),
    "FedExP-samples": (6, 5, 6),
    "FedSAM": (6, 5, 10),
    "IFCA": (11, 11, 14),
    "MOON": (6, 4, 7),
    "PerFedAvg": (6, 5, 7),
    "ProxSkip": (6, 5, 8),
}
QUICK = ("FedProx", "SCAFFOLD", "FedAdamSSM")


@pytest.fixture
def live_vectors(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import `benchmarks/live_vectors.py`."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("live_vectors")


def check(name: str, live_vectors: ModuleType) -> None:
    row = live_vectors.measure(ROSTER[name].algorithm(), num_clients=4, server_fraction=0.2)
    step, apply, peak = MOST[name]
    assert row.step.storages <= step
    assert row.apply.storages <= apply
    assert row.peak <= peak + 0.1


@pytest.mark.trains
@pytest.mark.parametrize("name", QUICK)
@pytest.mark.matrix
def test_a_round_keeps_few_vectors(name: str, live_vectors: ModuleType) -> None:
    check(name, live_vectors)


def test_every_method_of_the_slow_test_has_its_numbers() -> None:
    assert set(WHOLE) <= set(MOST)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(WHOLE) - set(QUICK)))  # the model has no hidden layer that others could cut
def test_a_round_of_any_method_keeps_few_vectors(name: str, live_vectors: ModuleType) -> None:
    check(name, live_vectors)


@pytest.mark.trains
def test_full_fine_tuning_with_fedavg_takes_five_models_beyond_the_one_that_is_trained(
    live_vectors: ModuleType,
) -> None:
    row = live_vectors.measure("FedAvg")
    assert row.step.storages <= 5
    assert row.apply.storages <= 6
    assert row.peak <= 5.1


@pytest.mark.trains
@pytest.mark.matrix
def test_states_on_disk_are_never_in_memory_together(live_vectors: ModuleType) -> None:
    in_memory, on_disk = (live_vectors.measure("SCAFFOLD", states=place).states for place in ("memory", "disk"))
    assert in_memory == pytest.approx(8), "old and new states of four clients"
    assert on_disk == 0


def test_what_only_autograd_holds_is_counted(live_vectors: ModuleType) -> None:
    with live_vectors.LiveStorages(4_000) as storages:
        leaf = torch.ones(1_000, requires_grad=True)
        total = (leaf.exp() * 2).sum()  # autograd keeps the exponentials
        assert storages.now == (2, 2)
        total.backward()
        assert storages.now == (2, 2), "the leaf and its gradient"
        leaf.grad = None
        del total
        assert storages.now == (1, 1)
    assert storages.peak >= 3
