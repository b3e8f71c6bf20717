"""Test rounds in which clients differ: who is in time, how long a round lasts, and who is there."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, equal_states, recorded_times, time_of
from lightning.pytorch import Callback
from roster import COVERING, ROSTER
from toys import Normalised, Perceptron, Pruning, Served, federation, read_rows

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import SCAFFOLD, Algorithm, Centralised, FedAvg, FedKT, FedLDF, LocalOnly
from lightning_fl.callbacks import EnergyMeter
from lightning_fl.codecs import QSGD, EntropyCoded
from lightning_fl.exchanges.layer_choice import LayerChoice
from lightning_fl.features.clock import ClientClock, SimulatedClock
from lightning_fl.features.privacy import LocalPrivacy
from lightning_fl.outputs import checkpoint_file

NEW = {"time/slowest_client", "time/utilisation", "clients/late"}
PHONES = ClientClock(devices="phones")
BITS = 32 * 26
"""Bits of the perceptron."""


class Answered(Callback):
    """Callback that keeps the clients that have answered, by round."""

    def __init__(self) -> None:
        self.clients: dict[int, list[int]] = {}

    def on_client_upload(self, trainer: Any, pl_module: Any, client: int, position: int, total: int) -> None:
        self.clients.setdefault(trainer.current_epoch, []).append(client)


class Killed(Callback):
    """Callback that ends the process's run in a round, in the middle of it or before it."""

    def __init__(self, when: int, in_the_middle: bool) -> None:
        self.when, self.in_the_middle = when, in_the_middle

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.when and not self.in_the_middle:
            raise RuntimeError("killed")

    def on_client_upload(self, trainer: Any, pl_module: Any, client: int, position: int, total: int) -> None:
        if trainer.current_epoch == self.when:
            raise RuntimeError("killed")


@pytest.fixture
def fitted(make_trainer: MakeTrainer) -> Callable[..., FederatedTrainer]:
    """Return a function that trains twenty clients, ten of them in each round."""

    def fit(algorithm: Algorithm | None = None, *, sizes: tuple[int, ...] = (6,) * 20, **flags: Any) -> Any:
        torch.manual_seed(0)
        ckpt_path = flags.pop("ckpt_path", None)
        trainer = make_trainer(**{"clients_per_round": 10, "max_rounds": 3, "clock": ClientClock(), **flags})
        trainer.fit(Perceptron(), federation(sizes), algorithm, ckpt_path=ckpt_path)
        return trainer

    return fit


def rows_of(trainer: FederatedTrainer) -> list[dict[str, float]]:
    return [{name: x for name, x in row.items() if name != "time/round_seconds"} for row in trainer.fit_loop.rows]


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize("clock", [ClientClock(), PHONES], ids=["alike", "phones"])
def test_without_deadline_a_clock_of_clients_changes_no_model(
    clock: ClientClock, runner: str, make_trainer: MakeTrainer
) -> None:
    runs = []
    for given in ({}, {"clock": clock}):
        torch.manual_seed(0)
        trainer = make_trainer(runner=runner, dropout_rate=0.2, straggler_rate=0.5, local_epochs=3, **given)
        trainer.fit(Perceptron(), federation(), SCAFFOLD())
        runs.append(trainer)
    plain, timed = runs
    assert torch.equal(plain.run.params, timed.run.params)
    assert equal_states(plain.run.state_dict()["server"], timed.run.state_dict()["server"])
    for before, after in zip(rows_of(plain), rows_of(timed), strict=True):
        assert after.keys() - before.keys() == NEW
        assert {k: v for k, v in before.items() if k != "time/simulated_seconds"} == {
            k: v for k, v in after.items() if k not in {"time/simulated_seconds", *NEW}
        }


def test_clients_that_are_alike_take_the_time_of_one(fitted: Callable[..., FederatedTrainer]) -> None:
    speeds = {"uplink_mebibytes_per_second": 0.5, "downlink_mebibytes_per_second": 2.0, "macs_per_second": 1e3}
    trainer = fitted(clock=ClientClock(**speeds), sizes=(6,) * 19 + (12,), clients_per_round=20)
    one = BITS / 8 / 2**20 * (1 / 0.5 + 1 / 2) + 3 * (3 * 4 + 4 * 2) * 12 / 1e3
    six = one - 3 * (3 * 4 + 4 * 2) * 6 / 1e3
    for number, row in enumerate(rows_of(trainer), start=1):
        assert row["time/simulated_seconds"] == pytest.approx(number * one)
        assert row["time/slowest_client"] == pytest.approx(one)
        assert row["time/utilisation"] == pytest.approx((19 * six + one) / 20 / one)


def test_speeds_times_c_leave_the_models_and_divide_the_times(fitted: Callable[..., FederatedTrainer]) -> None:
    def run(scale: float) -> FederatedTrainer:
        speeds = {"macs_per_second": 1e5, "uplink_mebibytes_per_second": 6.25, "downlink_mebibytes_per_second": 12.5}
        clock = ClientClock(**{name: scale * speed for name, speed in speeds.items()}, devices="phones")
        return fitted(clock=clock, over_selection=1.3, deadline=1e-3 / scale)

    one, fast = run(1.0), run(4.0)
    assert torch.equal(one.run.params, fast.run.params)
    assert one.run.simulated_seconds == pytest.approx(4 * fast.run.simulated_seconds)
    assert sum(row["clients/late"] for row in rows_of(one)) > 9


def test_of_13_clients_that_download_the_10_fastest_upload(fitted: Callable[..., FederatedTrainer]) -> None:
    answered = Answered()
    trainer = fitted(clock=PHONES, over_selection=1.3, callbacks=[answered])
    devices = time_of(trainer).devices
    for number, row in enumerate(rows_of(trainer)):
        assert (row["clients/selected"], row["clients/accepted"], row["clients/late"]) == (13, 10, 3)
        assert (row["clients/rejected"], row["clients/dropped"]) == (0, 0)
        assert (row["comm/downlink_bits"], row["comm/uplink_bits"]) == (13 * BITS, 10 * BITS)
        assert len(set(answered.clients[number])) == 10
        assert row["time/slowest_client"] > row["time/simulated_seconds"] - (
            rows_of(trainer)[number - 1]["time/simulated_seconds"] if number else 0
        )
    assert len({devices.device(client) for client in range(20)}) == 20


def test_the_first_to_answer_do_not_change_with_who_else_is_asked(fitted: Callable[..., FederatedTrainer]) -> None:
    """Check that each client has its own draw: with all clients selected, the ten fastest of the federation answer."""
    answered = Answered()
    trainer = fitted(clock=ClientClock(uplink_sigma=1.0), over_selection=2.0, callbacks=[answered])
    device = time_of(trainer).devices.device
    fastest = sorted(range(20), key=lambda client: -device(client).uplink)[:10]
    assert all(set(clients) == set(fastest) for clients in answered.clients.values())


def test_jitter_changes_the_times_of_a_client_from_round_to_round(fitted: Callable[..., FederatedTrainer]) -> None:
    times = [row["time/slowest_client"] for row in rows_of(fitted(clock=ClientClock(jitter_sigma=0.5), max_rounds=5))]
    assert len(set(times)) == 5
    steady = [row["time/slowest_client"] for row in rows_of(fitted(max_rounds=5))]
    assert len(set(steady)) == 1


def test_a_round_in_which_nobody_is_in_time_lasts_until_the_deadline(
    fitted: Callable[..., FederatedTrainer], says_lost: Callable[..., Any]
) -> None:
    with says_lost(r"Round 1: none of the 10 clients .* deadline of 1e-09 simulated seconds.* would need"):
        trainer = fitted(deadline=1e-9)
    for number, row in enumerate(rows_of(trainer), start=1):
        assert (row["clients/accepted"], row["clients/late"]) == (0, 10)
        assert (row["comm/downlink_bits"], row["comm/uplink_bits"]) == (10 * BITS, 0)
        assert row["time/simulated_seconds"] == pytest.approx(number * 1e-9)
    torch.manual_seed(0)
    assert torch.equal(trainer.run.params, torch.cat([p.detach().flatten() for p in Perceptron().parameters()]))


@pytest.mark.parametrize(
    "clock",
    [
        SimulatedClock(macs_per_second=1e3),
        SimulatedClock(computation_seconds=2.0),
        ClientClock(computation_seconds=2.0),
    ],
    ids=["estimated", "measured", "of clients"],
)
def test_a_round_to_which_nobody_comes_takes_no_computation(
    clock: SimulatedClock, fitted: Callable[..., FederatedTrainer]
) -> None:
    trainer = fitted(clock=clock, sizes=(6,) * 6, clients_per_round=2, dropout_rate=0.6, max_rounds=8)
    seconds = np.diff([row["time/simulated_seconds"] for row in rows_of(trainer)], prepend=0.0)
    accepted = np.array([row["clients/accepted"] for row in rows_of(trainer)])
    assert 0 < (accepted == 0).sum() < 8
    assert (seconds[accepted == 0] < 1e-3).all()
    assert (seconds[accepted > 0] > 0.1).all()


@pytest.mark.parametrize(
    "flags",
    [{"clock": SimulatedClock(computation_seconds=2.0)}, {"clock": PHONES, "deadline": 2.0}],
    ids=["measured", "deadline"],
)
def test_a_round_without_clients_takes_no_time(flags: dict[str, Any], make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**flags)
    trainer.fit(Perceptron(), Served(9), FedKT(mode="one_shot", s=1, t=2, epochs=1, batch_size=4))
    assert trainer.run.round == 1
    assert trainer.run.simulated_seconds == 0


def test_a_round_closes_with_the_last_answer_or_at_the_deadline(fitted: Callable[..., FederatedTrainer]) -> None:
    late = on_time = 0
    before = 0.0
    for row in rows_of(fitted(clock=PHONES, deadline=7e-5, dropout_rate=0.3, max_rounds=12, over_selection=1.2)):
        seconds, before = row["time/simulated_seconds"] - before, row["time/simulated_seconds"]
        assert row["clients/selected"] == 12 == sum(row[f"clients/{k}"] for k in ("accepted", "dropped", "late"))
        if row["clients/late"] and row["clients/accepted"] < 10:
            assert seconds == pytest.approx(7e-5)
            late += 1
        else:
            assert 0 < seconds < 7e-5
            on_time += not row["clients/late"]
    assert late, "no round was closed by the deadline"


@pytest.mark.parametrize("name", COVERING)
def test_a_plan_knows_the_bits_of_every_method(name: str, make_trainer: MakeTrainer) -> None:
    entry = ROSTER[name]
    clock = ClientClock(macs_per_second=1e30, uplink_sigma=1.0, downlink_sigma=0.5)
    trainer = make_trainer(clock=clock, deadline=1e9, clients_per_round=5, max_rounds=3)
    trainer.fit(Perceptron(), entry.federation(), entry.algorithm())
    planned = time_of(trainer).planned
    slowest = rows_of(trainer)[-1]["time/slowest_client"]
    most = max(planned.values(), default=0.0)
    exchange = entry.algorithm().exchange
    if isinstance(exchange, LayerChoice):  # whoever is chosen for every layer sends as much as was planned
        assert slowest < most
    else:
        assert slowest == pytest.approx(most) or not exchange.uses_link


@pytest.mark.parametrize("buffers", ["keep", "clip"])
def test_a_plan_knows_whether_clients_send_buffers(buffers: Any, make_trainer: MakeTrainer) -> None:
    clock = ClientClock(macs_per_second=1e30, uplink_sigma=1.0)
    privacy = LocalPrivacy(noise_multiplier=0, buffers=buffers)
    trainer = make_trainer(clock=clock, deadline=1e9, privacy=privacy, clients_per_round=5, max_rounds=1)
    trainer.fit(Normalised(), federation())
    planned = time_of(trainer).planned
    assert rows_of(trainer)[-1]["time/slowest_client"] == pytest.approx(max(planned.values()))


@pytest.mark.parametrize("name", COVERING)
def test_the_bits_of_all_clients_are_those_of_the_ledger(
    name: str, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, found = ROSTER[name], recorded_times(monkeypatch)
    trainer = make_trainer(clock=ClientClock(), clients_per_round=6, max_rounds=3)
    trainer.fit(Perceptron(), entry.federation(), entry.algorithm())
    for row, times in zip(rows_of(trainer), found, strict=True):
        for position, direction in enumerate(("up", "down")):
            assert sum(bits[position] for bits in times.bits.values()) == row[f"comm/{direction}link_bits"]


def test_sizes_that_depend_on_values_are_booked_as_they_are(fitted: Callable[..., FederatedTrainer]) -> None:
    pytest.importorskip("constriction", reason="needs the extra entropy")
    clock = ClientClock(macs_per_second=1e30, downlink_mebibytes_per_second=1e30, uplink_mebibytes_per_second=1.0)
    (row,) = rows_of(fitted(Algorithm(uplink=EntropyCoded(QSGD())), clock=clock, max_rounds=1, clients_per_round=1))
    assert row["time/simulated_seconds"] == pytest.approx(row["comm/uplink_bits"] / 8 / 2**20)


def test_a_straggler_takes_the_time_of_its_own_steps(fitted: Callable[..., FederatedTrainer]) -> None:
    fast = {"uplink_mebibytes_per_second": 1e30, "downlink_mebibytes_per_second": 1e30}
    for clock in (ClientClock(macs_per_second=60.0, **fast), ClientClock(computation_seconds=6 * 5 * 2.0, **fast)):
        flags = {"clients_per_round": 1, "local_epochs": 5, "straggler_rate": 0.7, "max_rounds": 8}
        rows, before = rows_of(fitted(clock=clock, sizes=(6,) * 20, **flags)), 0.0
        assert {row["clients/straggling"] for row in rows} == {0, 1}
        for row in rows:
            each = 2.0 if clock.computation_seconds else 1.0
            assert row["time/simulated_seconds"] - before == pytest.approx(each * row["clients/samples"])
            before = row["time/simulated_seconds"]


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Return a file in which the clients 0 to 9 are there for the first half of 4 seconds, and 10 to 19 for the second."""
    path = tmp_path / "there.csv"
    rows = [f"{client},{2 * (client // 10)},{2 * (client // 10) + 2}" for client in range(20)]
    path.write_text("\n".join(("client,start_seconds,end_seconds", *rows)))
    return path


def test_only_clients_that_are_there_are_selected(fitted: Callable[..., FederatedTrainer], there: Path) -> None:
    answered = Answered()
    clock = ClientClock(computation_seconds=1.5)
    fitted(clock=clock, availability=there, clients_per_round=4, max_rounds=6, callbacks=[answered])
    for number, clients in answered.clients.items():
        assert {client // 10 for client in clients} == {int((1.5 * number) % 4 >= 2)}


@pytest.mark.parametrize(("if_too_few", "waits"), [(None, True), ("wait", True), ("fewer", False)])
def test_a_round_waits_for_clients_or_goes_on_with_fewer(
    if_too_few: Any, waits: bool, fitted: Callable[..., FederatedTrainer], tmp_path: Path
) -> None:
    path = tmp_path / "there.csv"
    path.write_text("client,start_seconds,end_seconds\n0,0,50\n1,40,50\n")
    clock = ClientClock(computation_seconds=1.0)
    flags = {"availability": path, "availability_period": 100.0, "if_too_few": if_too_few, "clients_per_round": 2}
    trainer = fitted(clock=clock, max_rounds=12, **flags)
    rows = rows_of(trainer)
    assert [row["clients/selected"] for row in rows] == [2 if waits else 1] * 12
    begins = [int(row["time/simulated_seconds"]) - 1 for row in rows]
    assert begins == ([*range(40, 50), 140, 141] if waits else [*range(12)])


def test_too_few_clients_are_refused_before_anything_is_trained(
    fitted: Callable[..., FederatedTrainer], there: Path
) -> None:
    with pytest.raises(UserError, match="never more than 10, at second 0: give clients_per_round at most 10"):
        fitted(availability=there, clients_per_round=11)


FLAGS: dict[str, Any] = {
    "clock": ClientClock(devices="phones", computation_seconds=0.5),
    "over_selection": 1.3,
    "deadline": 1.5,
    "dropout_rate": 0.1,
    "straggler_rate": 0.3,
    "local_epochs": 2,
    "clients_per_round": 6,
    "max_rounds": 5,
}


@pytest.mark.parametrize("in_the_middle", [False, True], ids=["before a round", "in a round"])
@pytest.mark.parametrize("when", [1, 2, 3, 4])
def test_a_run_that_was_killed_goes_on_as_if_it_were_not(
    when: int, in_the_middle: bool, fitted: Callable[..., Any], there: Path, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    method = SCAFFOLD if when % 2 else FedLDF
    flags = FLAGS | {"availability": there, **keeps_files}

    def fit(folder: str, *callbacks: Callback, **more: Any) -> FederatedTrainer:
        given = [Pruning(when=2), *callbacks]
        return fitted(method(), **flags, default_root_dir=tmp_path / folder, callbacks=given, **more)

    whole = fit("whole")
    with pytest.raises(RuntimeError, match="killed"):
        fit("two", Killed(when, in_the_middle))
    resumed = fit("two", ckpt_path="last")
    assert read_rows(tmp_path / "two") == read_rows(tmp_path / "whole")
    assert any(row["clients/late"] for row in rows_of(whole))
    paths = [tmp_path / name / "checkpoints" / "last.ckpt" for name in ("whole", "two")]
    one, other = (checkpoint_file.load(path)["federation"]["run"] for path in paths)
    assert one["simulated_seconds"] == other["simulated_seconds"] == resumed.run.simulated_seconds
    assert torch.equal(one["params"], other["params"])


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_a_pruning_changes_the_times_and_its_messages_take_theirs(
    runner: str, fitted: Callable[..., FederatedTrainer]
) -> None:
    speeds = {"uplink_mebibytes_per_second": 1.0, "downlink_mebibytes_per_second": 1.0, "macs_per_second": 1e30}
    flags = {"clock": ClientClock(**speeds), "deadline": 1e9, "callbacks": [Pruning(when=1)], "runner": runner}
    rows = rows_of(fitted(FedAvg(), **flags))
    assert [row["model/parameters"] for row in rows] == [26, 20, 20]
    seconds = [rows[0]["time/simulated_seconds"]]
    seconds += [b["time/simulated_seconds"] - a["time/simulated_seconds"] for a, b in pairwise(rows)]
    mib = 8 * 2**20
    units = 4  # bits that announce which hidden units remain
    assert seconds == pytest.approx([2 * 32 * 26 / mib, (2 * 32 * 20 + units) / mib, 2 * 32 * 20 / mib])


def test_one_place_with_all_samples_has_the_clocks_own_speeds(
    fitted: Callable[..., FederatedTrainer], there: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"over_selection": 1.3, "deadline": 1e-12, "availability": there}
    trainer = fitted(Centralised(), clock=ClientClock(devices="phones", macs_per_second=1e3), **flags)
    seconds = [row["time/simulated_seconds"] for row in rows_of(trainer)]
    assert seconds == pytest.approx([3 * 20 * 60 / 1e3 * number for number in (1, 2, 3)])
    assert "it ignores over_selection, deadline, availability" in caplog.text


def test_clients_alone_send_nothing_and_take_their_time(fitted: Callable[..., FederatedTrainer]) -> None:
    clock = ClientClock(macs_per_second=1e3, computation_sigma=1.0)
    (row,) = rows_of(fitted(LocalOnly(), clock=clock, over_selection=1.3, max_rounds=1))
    assert (row["comm/downlink_bits"], row["clients/late"], row["clients/accepted"]) == (0, 3, 10)
    assert 0 < row["time/simulated_seconds"] < row["time/slowest_client"]


def test_energy_of_the_radios_is_that_of_the_clients_own_rates(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    coefficients = {
        "uplink_joules_per_bit": 0.0,
        "downlink_joules_per_bit": 0.0,
        "radio_watts": 3.0,
        "network_joules_per_bit": 0.0,
        "joules_per_mac": 0.0,
    }
    meter = EnergyMeter({name: (value, value, value, "test") for name, value in coefficients.items()})
    answered = Answered()
    flags = {"clock": PHONES, "over_selection": 1.5, "callbacks": [meter, answered], "clients_per_round": 4}
    trainer = make_trainer(max_rounds=2, **flags, **keeps_files)
    trainer.fit(Perceptron(), Served(9))
    device = time_of(trainer).devices.device
    mib = BITS / 8 / 2**20
    for row in read_rows(tmp_path):
        clients = answered.clients[int(row["round"])]
        by_hand = sum(3.0 * mib / device(client).uplink for client in clients)
        assert float(row["energy/uplink_joules"]) == pytest.approx(by_hand)
        assert float(row["energy/downlink_joules"]) > 3.0 * sum(mib / device(client).downlink for client in clients)


def test_a_plan_counts_downloads_of_clients_that_are_late(make_trainer: MakeTrainer, there: Path) -> None:
    trainer = make_trainer(**FLAGS | {"dropout_rate": 0.0, "availability": there, "deadline": 1e9})
    plan = trainer.plan(Perceptron(), federation((6,) * 20))
    assert (plan.round_downlink_bytes, plan.round_uplink_bytes) == (8 * BITS / 8, 6 * BITS / 8)
    assert plan.rehearsed_rounds == 5


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"over_selection": 1.3}, "over_selection needs a clock that knows each client's time"),
        ({"deadline": 3.0}, "deadline needs a clock"),
        ({"availability": "x.csv"}, "availability needs a clock"),
        ({"clock": PHONES, "over_selection": 0.9}, "over_selection must be at least 1"),
        ({"clock": PHONES, "deadline": 0}, "deadline must be positive"),
        ({"clock": PHONES, "if_too_few": "wait"}, "if_too_few wait is about trainer.availability, which is not given"),
        ({"clock": PHONES, "availability_period": 5.0}, "availability_period 5.0 is about trainer.availability"),
        ({"clock": PHONES, "availability": "x.csv", "if_too_few": "waits"}, "did you mean 'wait'"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: dict[str, Any], sentence: str, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=sentence):
        make_trainer(**flags)


@pytest.mark.long
def test_a_hundred_thousand_clients_get_their_speeds_when_they_take_part(tmp_path: Path) -> None:
    count = 100_000
    path = tmp_path / "trace.csv"
    path.write_text("client,computation,communication\n" + "".join(f"{k},{k % 90 + 10},5000\n" for k in range(count)))
    device = ClientClock(trace=path).read_trace(count, lambda rows: torch.arange(rows).numpy())
    assert device(count - 1).seconds_per_sample == ((count - 1) % 90 + 10) / 1000
