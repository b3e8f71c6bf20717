"""Test estimates of energy against sums by hand, and the ranking of runs against every corner of the coefficients' ranges."""

from collections.abc import Callable
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from compared_runs import MakeTrainer, agree, ran
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback
from toys import SIZES, Perceptron, Served, federation, read_rows

from lightning_fl.algorithms import Algorithm, DeviceM, Ditto, FedKT
from lightning_fl.callbacks import EnergyMeter
from lightning_fl.callbacks.energy_meter import PROFILES, joules, takes_less
from lightning_fl.errors import UserError
from lightning_fl.outputs.run_folder import HPARAMS

LTE = PROFILES["lte"]
PARTS = ("uplink", "downlink", "network", "compute")
PLAIN = {
    name: (value / 2, value, 3 * value, "test") for name, value in zip(LTE, (2.0, 3.0, 5.0, 7.0, 11.0), strict=True)
}


class Watch(Callback):
    """Callback that counts the samples of a `Counting` module up to each round, also those of models of the clients' own."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.counted = 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.samples.append(self.counted)


class Counting(Perceptron):
    """Perceptron that tells a callback the samples of which it computes the loss, of clients one after the other."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.watch.counted += len(batch[0])
        return super().training_step(batch, batch_idx)


class Unlike(Perceptron):
    """Perceptron whose forward takes neither a batch nor its inputs."""

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:  # type: ignore[override]
        return scale * super().forward(x)

    def loss(self, batch: Any) -> torch.Tensor:
        return self(batch[0], scale=1.0).square().mean()


def energies(folder: Path) -> list[dict[str, float]]:
    return [
        {name: float(value) for name, value in row.items() if name.startswith("energy/")} for row in read_rows(folder)
    ]


def test_an_upload_and_an_epoch_of_lenet_5() -> None:
    assert joules({"uplink_joules_per_bit": 1_984_192}, LTE) == pytest.approx(0.870, abs=5e-4)
    assert joules({"joules_per_mac": 3 * 651_720 * 2_500}, LTE) == pytest.approx(0.489, abs=5e-4)


@pytest.mark.parametrize("name", PROFILES)
def test_the_ranges_of_the_profiles(name: str) -> None:
    assert list(PROFILES[name]) == list(LTE)
    for coefficient in PROFILES[name].values():
        assert 0 < coefficient.low < coefficient.value <= coefficient.high
        assert coefficient.source


def test_columns_by_hand(make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path) -> None:
    meter = EnergyMeter(PLAIN)
    trainer = make_trainer(callbacks=[meter], max_rounds=3, clients_per_round=4, local_epochs=2, **keeps_files)
    trainer.fit(Perceptron(), federation())
    rate, total = 8 * 2**20, 0.0
    for row in read_rows(tmp_path):
        up, down = float(row["comm/uplink_bits"]), float(row["comm/downlink_bits"])
        assert up == down == 4 * 32 * 26
        assert int(row["model/macs"]) == 3 * 4 + 4 * 2
        by_hand = {
            "uplink": 2 * up + 5 * up / rate / 6.25,
            "downlink": 3 * down + 5 * down / rate / 12.5,
            "network": 7 * (up + down),
            "compute": 11 * 3 * 20 * int(row["clients/samples"]),
        }
        for name in PARTS:
            assert float(row[f"energy/{name}_joules"]) == pytest.approx(by_hand[name], rel=1e-12)
        total += sum(by_hand.values())
        assert float(row["energy/total_joules"]) == pytest.approx(total, rel=1e-12)
    assert joules(meter.amounts, meter.profile) == pytest.approx(total, rel=1e-12)
    written = yaml.safe_load((tmp_path / HPARAMS).read_text())
    assert {name: written[f"energy/{name}"] for name in PLAIN} == {name: list(x) for name, x in PLAIN.items()}


@pytest.mark.parametrize(
    ("flags", "method"),
    [
        ({"local_epochs": 2}, Algorithm()),
        ({"local_steps": 7, "accumulate_grad_batches": 2, "straggler_rate": 0.5, "dropout_rate": 0.3}, Algorithm()),
        ({"local_epochs": 1}, Ditto()),
        ({"local_epochs": 2, "limit_train_batches": 2}, DeviceM(variant="mime_lite")),
        ({"local_steps": 7, "straggler_rate": 0.5, "dropout_rate": 0.3}, DeviceM(variant="mime")),
        ({"local_epochs": 1}, Ditto(DeviceM(variant="mime"))),
    ],
    ids=["epochs", "stragglers", "two models", "full gradients", "two gradients", "two models and gradients"],
)
def test_samples_are_those_of_all_gradients(
    flags: dict[str, Any], method: Algorithm, make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    watch = Watch()
    flags = {"max_rounds": 5, "clients_per_round": 5, "runner": "serial", **flags}
    make_trainer(callbacks=[watch], **flags, **keeps_files).fit(Counting(watch), federation(), method)
    assert list(accumulate(int(row["clients/samples"]) for row in read_rows(tmp_path))) == watch.samples


def test_rejected_clients_count(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path, says_lost: Callable[..., Any]
) -> None:
    trainer = make_trainer(
        callbacks=[EnergyMeter("lte")], max_rounds=1, clients_per_round=6, local_epochs=9, **keeps_files
    )
    with says_lost("were rejected"):
        trainer.fit(Perceptron(lr=1e30), federation())
    (row,) = read_rows(tmp_path)
    assert (int(row["clients/accepted"]), int(row["clients/samples"])) == (0, 9 * sum(SIZES))
    assert float(row["energy/compute_joules"]) == pytest.approx(1e-10 * 3 * 20 * 9 * sum(SIZES))


@given(factor=st.floats(0.1, 10), bits=st.integers(0, 10**9), macs=st.integers(0, 10**12))
def test_energy_is_linear_in_the_coefficients(factor: float, bits: int, macs: int) -> None:
    amounts = {"uplink_joules_per_bit": bits, "radio_watts": bits / 1e6, "joules_per_mac": macs}
    scaled = {name: x._replace(value=factor * x.value) for name, x in LTE.items()}
    assert joules(amounts, scaled) == pytest.approx(factor * joules(amounts, LTE))
    for name, x in LTE.items():
        one = LTE | {name: x._replace(value=2 * x.value)}
        assert joules(amounts, one) - joules(amounts, LTE) == pytest.approx(amounts.get(name, 0) * x.value, abs=1e-9)


def test_without_bits_the_radio_takes_nothing(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    trainer = make_trainer(callbacks=[EnergyMeter("wifi")], max_rounds=1, dropout_rate=0.999, **keeps_files)
    trainer.fit(Perceptron(), federation())
    (found,), (row,) = energies(tmp_path), read_rows(tmp_path)
    assert (int(row["comm/uplink_bits"]), int(row["clients/samples"])) == (0, 0)
    assert found["energy/uplink_joules"] == found["energy/compute_joules"] == 0
    assert found["energy/downlink_joules"] > 0


@given(
    first=st.lists(st.floats(0, 10), min_size=5, max_size=5),
    second=st.lists(st.floats(0, 10), min_size=5, max_size=5),
    near=st.floats(0, 1),
)
def test_an_order_holds_at_every_corner(first: list[float], second: list[float], near: float) -> None:
    profile = EnergyMeter(PLAIN).profile
    second = [a + near * (b - a) for a, b in zip(first, second, strict=True)]
    a, b = dict(zip(profile, first, strict=True)), dict(zip(profile, second, strict=True))
    corners = [
        sum(value * (a[name] - b[name]) for name, value in zip(profile, corner, strict=True))
        for corner in product(*((x.low, x.high) for x in profile.values()))
    ]
    assert len(corners) == 32
    if all(abs(corner) > 1e-6 for corner in corners):
        expected = "first" if max(corners) < 0 else "second" if min(corners) > 0 else "depends"
        assert takes_less(a, b, profile) == expected


def test_the_first_round_pays_for_the_set_up(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    method = FedKT(mode="one_shot", s=1, t=2, epochs=1, batch_size=4)
    make_trainer(callbacks=[EnergyMeter(PLAIN)], max_rounds=3, **keeps_files).fit(Perceptron(), Served(9), method)
    (row,) = read_rows(tmp_path)
    assert int(row["comm/uplink_bits"]) == 0
    bits = int(row["comm/setup_uplink_bits"]) + int(row["comm/setup_downlink_bits"])
    assert float(row["energy/network_joules"]) == 7 * bits > 0


def test_runs_are_compared(make_trainer: MakeTrainer) -> None:
    one, two, other = (EnergyMeter("lte") for _ in range(3))
    for meter, rounds in ((one, 1), (two, 2)):
        make_trainer(callbacks=[meter], max_rounds=rounds).fit(Perceptron(), federation())
    assert one.compare(two) == "less"
    assert two.compare(one) == "more"
    assert one.compare(one) == "depends"
    other.amounts["joules_per_mac"] = 1e9  # 0.01 to 1 J, while the bits of a round take 0.004 to 0.14 J in the network
    assert one.compare(other) == other.compare(one) == "depends"
    with pytest.raises(UserError, match="with the same profile"):
        one.compare(EnergyMeter("wifi"))


def test_a_resumed_run_equals_one_that_was_not_interrupted(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    folders = {name: {**keeps_files, "default_root_dir": tmp_path / name} for name in ("whole", "resumed")}
    for name, rounds in (("whole", 4), ("resumed", 2)):
        trainer = make_trainer(callbacks=[EnergyMeter("lte")], max_rounds=rounds, **folders[name])
        trainer.fit(Perceptron(), federation())
    again = make_trainer(callbacks=[EnergyMeter("lte")], max_rounds=4, **folders["resumed"])
    again.fit(Perceptron(), federation(), ckpt_path="last")
    assert energies(tmp_path / "resumed") == energies(tmp_path / "whole")
    totals = [row["energy/total_joules"] for row in energies(tmp_path / "whole")]
    assert totals == sorted(set(totals))


@pytest.mark.slow
def test_two_processes_estimate_as_one(tmp_path: Path) -> None:
    words = "FedAvg --trainer.clients_per_round 9 --trainer.callbacks+=EnergyMeter --trainer.callbacks.profile lte"
    one, two = ran(tmp_path / "one", algorithm=words), ran(tmp_path / "two", algorithm=words, num_processes=2)
    agree(one, two)
    assert energies(tmp_path / "one") == energies(tmp_path / "two")
    assert energies(tmp_path / "one")[0]["energy/total_joules"] > 0


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("5g", "which 5G needs"),
        ("wfi", "did you mean 'wifi'"),
        ({**PLAIN, "radio_wats": (1, 1, 1, "")}, "did you mean 'radio_watts'"),
        ({"radio_watts": (1.0, 1.0, 1.0, "")}, "lacks uplink_joules_per_bit, "),
        (PLAIN | {"radio_watts": (2.0, 1.0, 3.0, "")}, "low ≤ value ≤ high"),
        (PLAIN | {"radio_watts": (-1.0, 1.0, 3.0, "")}, "at least 0"),
        (PLAIN | {"radio_watts": (1.0, 1.0, 3.0)}, "source"),
    ],
)
def test_wrong_profiles_are_refused(profile: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        EnergyMeter(profile)


def test_it_needs_clients(make_stock_trainer: Any) -> None:
    with pytest.raises(UserError, match="use FederatedTrainer"):
        make_stock_trainer(callbacks=[EnergyMeter("lte")]).fit(Perceptron(), datamodule=federation())


def test_it_needs_the_multiply_accumulates(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match="needs the multiply-accumulates"):
        make_trainer(callbacks=[EnergyMeter("lte")], max_rounds=1).fit(Unlike(), federation())
