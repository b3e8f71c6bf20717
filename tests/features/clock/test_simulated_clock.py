"""Test the simulated clock against the round times that the authors publish."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toys import Perceptron, Served, federation, read_rows

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import Algorithm, Centralised, DataSharing, DeviceM, Ditto, FedAvg, FedBuff, FedDA, PFedMe
from lightning_fl.features.clock import ClientClock
from lightning_fl.features.clock.simulated_clock import SimulatedClock
from lightning_fl.modules import network


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "computation_seconds", "expected"),
    [("cnn", 2.3, 3.4222), ("vgg11", 8.0, 97.2724), ("lenet5", 1.3, 1.8677)],
)
def test_seconds_of_a_fedavg_round_of_ten_clients(name: str, computation_seconds: float, expected: float) -> None:
    bits = 10 * 32 * sum(parameter.numel() for parameter in network(name, num_classes=10).parameters())
    clock = SimulatedClock(computation_seconds=computation_seconds)
    assert clock.seconds(bits, bits, macs=1e12) == pytest.approx(expected, abs=5e-5)


def test_seconds_add_up_over_rounds(
    make_trainer: Callable[..., FederatedTrainer], tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    clock = SimulatedClock(computation_seconds=2.0, uplink_mebibytes_per_second=1.0, downlink_mebibytes_per_second=4.0)
    for stop, ckpt_path in ((2, None), (3, "last")):
        trainer = make_trainer(max_rounds=stop, clock=clock, **keeps_files)
        trainer.fit(Perceptron(), federation(), ckpt_path=ckpt_path)
    one = 2.0 + 3 * 26 * 4 / 2**20 * (1 + 1 / 4)
    seconds = [float(row["time/simulated_seconds"]) for row in read_rows(tmp_path)]
    assert seconds == pytest.approx([one, 2 * one, 3 * one], rel=1e-12)


def test_computation_is_estimated_from_the_largest_client(make_trainer: Callable[..., FederatedTrainer]) -> None:
    fast = {"uplink_mebibytes_per_second": 1e30, "downlink_mebibytes_per_second": 1e30}
    clock = SimulatedClock(macs_per_second=100.0, **fast)
    trainer = make_trainer(max_rounds=1, clients_per_round=2, local_epochs=5, clock=clock)
    trainer.fit(Perceptron(), federation(sizes=(4, 7)))
    macs = 3 * 4 + 4 * 2
    assert trainer.run.simulated_seconds == pytest.approx(3 * macs * 7 * 5 / 100)
    assert trainer.callback_metrics["model/macs"] == macs


def test_steps_count_as_many_samples_as_they_read(make_trainer: Callable[..., FederatedTrainer]) -> None:
    fast = {"uplink_mebibytes_per_second": 1e30, "downlink_mebibytes_per_second": 1e30}
    times = []
    for local_steps in (2, 20):
        clock = SimulatedClock(macs_per_second=100.0, **fast)
        trainer = make_trainer(max_rounds=1, clients_per_round=1, local_steps=local_steps, clock=clock)
        trainer.fit(Perceptron(), federation(sizes=(8,)))
        times.append(trainer.run.simulated_seconds)
    assert times[1] == pytest.approx(10 * times[0])


def test_shared_samples_take_their_time(make_trainer: Callable[..., FederatedTrainer]) -> None:
    """Check the authors' factor, 1 + shared / own samples: 6 for 2,000 images beside 400 of one's own."""
    seconds = {}
    for name, algorithm in {"FedAvg": FedAvg(), "DataSharing": DataSharing(cap=1.0)}.items():
        trainer = make_trainer(max_rounds=1, clock=SimulatedClock(computation_seconds=2.3))
        trainer.fit(Perceptron(), Served(9), algorithm)
        seconds[name] = trainer.run.simulated_seconds
    sizes = trainer.data.client_sizes
    assert seconds["DataSharing"] - seconds["FedAvg"] == pytest.approx(2.3 * len(sizes) * 9 / sizes.sum())
    bits = 10 * 32 * sum(parameter.numel() for parameter in network("cnn", num_classes=10).parameters())
    clock = SimulatedClock(computation_seconds=2.3)
    assert clock.seconds(bits, bits, macs=1e12, work=(400 + 2000) / 400) == pytest.approx(14.92, abs=5e-3)


@pytest.mark.parametrize("clock", [SimulatedClock, ClientClock])
@pytest.mark.parametrize(
    ("flags", "of_fedavg"),
    [
        ({"local_epochs": 2}, 16),
        ({"local_steps": 3}, 12),
        ({"local_epochs": 2, "limit_train_batches": 1}, 8),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else "",
)
@pytest.mark.parametrize(
    "method",
    [
        FedAvg(),
        FedBuff(2),
        Centralised(),
        DataSharing(cap=1.0),
        DeviceM(variant="mime_lite"),
        DeviceM(variant="mime"),
        Ditto(DeviceM(variant="mime")),
        PFedMe(strength=1.0, inner_steps=3),
        FedDA(full_batch_last=1),
    ],
    ids=lambda method: f"{method!r}",
)
def test_measured_seconds_grow_as_estimated_ones(
    method: Algorithm,
    flags: dict[str, Any],
    of_fedavg: int,
    clock: type[SimulatedClock],
    make_trainer: Callable[..., FederatedTrainer],
) -> None:
    """Compare both with the seconds measured for FedAvg, whose clients, alike, read so many samples in a round."""
    fast = {"uplink_mebibytes_per_second": 1e30, "downlink_mebibytes_per_second": 1e30}
    seconds = []
    for given in ({"macs_per_second": 3 * 20.0}, {"computation_seconds": float(of_fedavg)}):
        trainer = make_trainer(max_rounds=2, clock=clock(**given, **fast), **flags)
        trainer.fit(Perceptron(), Served(8, sizes=(8,) * 6), method)
        seconds.append([row["time/simulated_seconds"] for row in trainer.fit_loop.rows])
    assert seconds[1] == pytest.approx(seconds[0])
    if isinstance(method, FedAvg | FedBuff):
        assert seconds[1] == pytest.approx([of_fedavg, 2 * of_fedavg])


@pytest.mark.parametrize("seconds", [0, 0.5])
def test_short_computations_are_allowed(seconds: float) -> None:
    assert SimulatedClock(computation_seconds=seconds).seconds(0, 0, macs=1e12) == seconds


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("computation_seconds", -1.0),
        ("macs_per_second", 0.0),
        ("uplink_mebibytes_per_second", -2.0),
        ("downlink_mebibytes_per_second", 0.0),
    ],
)
def test_impossible_clocks_are_refused(field: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{field}.*{value}"):
        SimulatedClock(**{field: value})
