"""Test methods that do not wait for the clients of a round: the order of events, an oracle, theorems, and resumed runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer, equal_states, time_of
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from roster import problem
from toys import SIZES, Drifting, Halves, Normalised, Perceptron, Recorded, federation, read_rows, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import SCAFFOLD, Algorithm, Ditto, FedAsync, FedAvg, FedBuff
from lightning_fl.callbacks import MagnitudePruning
from lightning_fl.codecs import QSGD, Cast, Changes, ErrorFeedback, TopK
from lightning_fl.features.asynchrony.arrivals import Arrival, Started, Update, next_update
from lightning_fl.features.clock import ClientClock, SimulatedClock
from lightning_fl.features.clock.availability import Availability
from lightning_fl.features.loss_guard import LossGuard
from lightning_fl.outputs.final_table import final_lines
from lightning_fl.personal import HeadThenBody, PersonalLayers
from lightning_fl.rules import LocalAdam, SharedAdam
from lightning_fl.slots import ServerTurn, State, Step

EQUAL = ClientClock(computation_seconds=1.0)
PHONES = ClientClock(devices="phones", jitter_sigma=0.0, macs_per_second=1e5)


def updates_of(
    seconds: Sequence[float], places: int, buffer_size: int, count: int, lost: Sequence[int] = ()
) -> list[Update]:
    """Return the first updates of clients that each need so many seconds, and are drawn by their index."""
    in_flight, now, updates = list[Arrival](), 0.0, list[Update]()

    def fill(now: float, busy: set[int], num: int, started: Sequence[Arrival]) -> tuple[float, list[Started]]:
        idle = [client for client in range(len(seconds)) if client not in busy][:num]
        return now, [Started(k, sum(one.client == k for one in started), seconds[k], k in lost) for k in idle]

    for version in range(count):
        updates.append(next_update(in_flight, now, version, places, buffer_size, fill))
        in_flight, now = updates[-1].in_flight, updates[-1].seconds
    return updates


# -------------------------------------------------------------------------------------------------------------- events


def test_order_of_events_by_hand() -> None:
    found = updates_of((1.0, 2.0, 3.0), places=3, buffer_size=1, count=8)
    assert [version - update.taken[0].version for version, update in enumerate(found)] == [0, 1, 1, 3, 1, 2, 1, 0]
    assert [update.seconds for update in found] == [1, 2, 2, 3, 3, 4, 4, 5]


@pytest.mark.long
@given(
    seconds=st.lists(st.integers(1, 4).map(float), min_size=2, max_size=6),
    buffer_size=st.integers(1, 4),
    unit=st.floats(1e-3, 1e3) | st.sampled_from([0.1, 0.7, 1 / 3, 1e-6]),
)
@settings(max_examples=80)
def test_order_of_events_does_not_depend_on_the_unit_of_time(
    seconds: list[float], buffer_size: int, unit: float
) -> None:
    """Check that uploads of one instant stay so where sums are rounded."""

    def order(unit: float) -> list[list[tuple[int, int, int]]]:
        updates = updates_of([unit * each for each in seconds], len(seconds), buffer_size, 12)
        return [[(entry.sequence, entry.client, entry.version) for entry in update.taken] for update in updates]

    assert order(unit) == order(1.0)


@pytest.mark.long
@given(
    seconds=st.lists(st.integers(1, 4).map(float), min_size=2, max_size=7),
    places=st.integers(1, 5),
    buffer_size=st.integers(1, 6),
    lost=st.integers(0, 1),
)
@settings(max_examples=80)
def test_no_client_trains_twice_at_once_and_no_place_is_lost(
    seconds: list[float], places: int, buffer_size: int, lost: int
) -> None:
    places = min(places, len(seconds))
    updates = updates_of(seconds, places, buffer_size, 12, [0][:lost] if places > 1 else [])
    every = [entry for update in updates for entry in (*update.taken, *update.lost)] + updates[-1].in_flight
    for entry in every:
        assert entry.seconds == entry.start + seconds[entry.client]
        overlapping = [one for one in every if one.start < entry.seconds and entry.start < one.seconds]
        assert sum(one.client == entry.client for one in overlapping) == 1
        assert sum(one.start <= entry.start < one.seconds for one in every) <= places
    assert sorted(entry[:1] for entry in every) == sorted(entry[:1] for u in updates for entry in u.started)
    times = [update.seconds for update in updates]
    assert times == sorted(times)
    for update in updates:
        assert len(update.taken) == buffer_size
        assert not any(entry.is_lost for entry in update.taken)
        spent = update.seconds - update.begin
        assert 0 <= update.busy_seconds <= places * spent + 1e-9
        whole = all(entry.start < entry.seconds for entry in update.started)
        if whole and spent:  # all places are filled at once, so that nobody idles
            assert update.busy_seconds == pytest.approx(places * spent)


@pytest.mark.long
@given(
    intervals=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), min_size=2, max_size=5),
    seconds=st.lists(st.integers(1, 15), min_size=5, max_size=5),
    places=st.integers(1, 4),
    buffer_size=st.integers(1, 3),
    unit=st.sampled_from([1.0, 0.1, 1 / 3]),
)
@settings(max_examples=80)
def test_no_place_is_idle_while_an_idle_client_is_there(
    intervals: list[tuple[int, int]], seconds: list[int], places: int, buffer_size: int, unit: float
) -> None:
    """Check it in the middle of each unit of time, in which nobody comes, leaves or ends."""
    starts, lengths = np.array(intervals).T
    clients, period = np.arange(len(intervals)), 12
    there = Availability("", starts * unit, (starts + lengths) * unit, clients, period * unit)

    def fill(now: float, busy: set[int], num: int, started: Sequence[Arrival]) -> tuple[float, list[Started]]:
        now, found = there.begin(now, 0 if busy else 1)
        idle = [int(client) for client in found if client not in busy][:num]
        return now, [Started(k, sum(one.client == k for one in started), seconds[k] * unit, False) for k in idle]

    in_flight, now, every = list[Arrival](), 0.0, list[Arrival]()
    for version in range(8):
        update = next_update(in_flight, now, version, places, buffer_size, fill, there.next_start)
        in_flight, now = update.in_flight, update.seconds
        every += update.taken
    for middle in np.arange(0.5, now / unit):
        busy = {entry.client for entry in every + in_flight if entry.start < middle * unit < entry.seconds}
        present = set(clients[(starts <= middle % period) & (middle % period < starts + lengths)].tolist())
        assert len(busy) <= places
        assert len(busy) == places or present <= busy


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture
def fit(make_trainer: MakeTrainer) -> Callable[..., tuple[np.ndarray, FederatedTrainer]]:
    """Return a function that trains the clients of `SIZES`, and returns the model and the trainer."""

    def fit(algorithm: Algorithm, module: Any = None, sizes: tuple[int, ...] = SIZES, **flags: Any) -> Any:
        torch.manual_seed(0)
        module = Perceptron() if module is None else module
        ckpt_path = flags.pop("ckpt_path", None)
        trainer = make_trainer(**{"clients_per_round": 3, "max_rounds": 6, "clock": PHONES, **flags})
        trainer.fit(module, federation(sizes), algorithm, ckpt_path=ckpt_path)
        return vector(module), trainer

    return fit


Fit = Callable[..., tuple[np.ndarray, FederatedTrainer]]


@pytest.mark.parametrize(
    ("method", "oracle_of"),
    [
        (FedBuff(2), {"buffer_size": 2, "factor": lambda s: (1 + s) ** -0.5}),
        (FedBuff(5, decay="hinge"), {"buffer_size": 5, "factor": lambda s: 1 if s <= 4 else 1 / (10 * (s - 4) + 1)}),
        (
            FedBuff(4, decay=2, weighting="samples"),
            {"buffer_size": 4, "factor": lambda s: (1 + s) ** -2.0, "by_samples": True},
        ),
        (FedBuff(1, learning_rate=0.5), {"buffer_size": 1, "factor": lambda s: 0.5 * (1 + s) ** -0.5}),
        (
            FedBuff(2, weighting="samples", max_staleness=0),
            {"buffer_size": 2, "factor": lambda s: 1, "by_samples": True, "max_staleness": 0},
        ),
        (FedAsync(mu=0), {"buffer_size": 1, "factor": lambda s: 0.6, "mixes": True}),
        (
            FedAsync(0.9, "polynomial", mu=0.3),
            {
                "buffer_size": 1,
                "factor": lambda s: 0.9 * (1 + s) ** -0.5,
                "mixes": True,
                "local": oracle.proximal_sgd(0.3),
            },
        ),
    ],
    ids=["pairs", "hinge", "by samples", "half", "none is stale", "FedAsync", "proximal FedAsync"],
)
@pytest.mark.parametrize("clock", [EQUAL, PHONES], ids=["equal", "phones"])
def test_is_that_of_the_paper(method: FedBuff, oracle_of: dict[str, Any], clock: ClientClock, fit: Fit) -> None:
    start = vector(_seeded())
    found, trainer = fit(method, clock=clock, max_rounds=9)
    devices, of = time_of(trainer).devices, problem(9)
    bits, macs = 32 * 26, trainer.fit_loop.engine.network.macs

    def seconds(client: int) -> float:
        device = devices.device(int(client))
        training = 3 * macs * SIZES[client] / device.macs_per_second
        if clock.computation_seconds is not None:
            training = clock.computation_seconds * clock.macs_per_second / device.macs_per_second
        return bits / 8 / 2**20 / device.downlink + training + bits / 8 / 2**20 / device.uplink

    expected, log = oracle.asynchronous(of, start.astype(np.float64), seconds, **oracle_of)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    history = trainer.history
    np.testing.assert_allclose(history["time/simulated_seconds"], [seconds for seconds, _ in log], rtol=1e-12)
    assert list(history["async/staleness_max"]) == [max(stale) for _, stale in log]
    np.testing.assert_allclose(history["async/staleness_mean"], [np.mean(stale) for _, stale in log])


def _seeded() -> Perceptron:
    torch.manual_seed(0)
    return Perceptron()


def halving() -> Perceptron:
    """Return a perceptron whose learning rate is halved after every round, from 1 on."""

    def configure(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    return Perceptron(configure=configure)


@pytest.mark.parametrize("module", [Perceptron, Normalised])
@pytest.mark.parametrize(("weighting", "sizes"), [("samples", SIZES), ("uniform", (6,) * len(SIZES))])
def test_with_equal_clients_and_a_full_buffer_it_is_fedavg(
    weighting: Any, sizes: tuple[int, ...], module: type, fit: Fit
) -> None:
    models, rows = [], []
    for method in (FedAvg(), FedBuff(3, weighting=weighting)):
        torch.manual_seed(0)
        found, trainer = fit(method, module(), sizes, clock=EQUAL, runner="serial")
        models.append(found)
        rows.append(trainer.history.drop(columns=["time/round_seconds"]))
        assert trainer.run.ledger.total_bytes("down") == trainer.run.ledger.total_bytes("up")
    np.testing.assert_array_equal(models[0], models[1])
    extra = set(rows[1].columns) - set(rows[0].columns)
    assert extra == {"async/staleness_mean", "async/staleness_max", "async/in_flight"}
    for name in rows[0].columns:
        np.testing.assert_allclose(rows[1][name], rows[0][name], rtol=1e-12, err_msg=name)


def test_of_one_client_it_mixes_the_whole_model_of_fedavg(fit: Fit) -> None:
    one = {"sizes": (9,), "clients_per_round": 1}
    expected, found = fit(FedAvg(), **one)[0], fit(FedAsync(1.0, mu=0), **one)[0]
    np.testing.assert_array_equal(found, expected)


def test_faster_clients_need_less_time_for_the_same_models(fit: Fit) -> None:
    def of(share: float) -> tuple[np.ndarray, Any]:
        clock = ClientClock(
            devices="phones",
            macs_per_second=1e5 * share,
            uplink_mebibytes_per_second=6.25 * share,
            downlink_mebibytes_per_second=12.5 * share,
        )
        found, trainer = fit(FedBuff(2), clock=clock)
        return found, np.array(trainer.history["time/simulated_seconds"])

    models, seconds = of(1.0)
    for factor in (0.5, 4.0):
        same, others = of(factor)
        np.testing.assert_array_equal(same, models)
        np.testing.assert_allclose(factor * others, seconds, rtol=1e-12)


def test_bits_are_those_of_what_starts_and_of_what_is_taken(fit: Fit) -> None:
    trainer = fit(FedBuff(2, uplink=QSGD(3)))[1]
    history = trainer.history
    in_flight = np.array([0, *history["async/in_flight"]])
    started = np.diff(in_flight) + 2
    np.testing.assert_array_equal(history["comm/downlink_bits"], 32 * 26 * started)
    np.testing.assert_array_equal(history["clients/selected"], started)
    assert set(history["clients/accepted"]) == {2}
    assert len(set(history["comm/uplink_bits"])) == 1
    assert (history["time/utilisation"] > 0.5).all()


def test_clients_that_drop_out_free_their_places(fit: Fit) -> None:
    trainer = fit(FedBuff(2), dropout_rate=0.5, max_rounds=20)[1]
    history = trainer.history
    started, taken, dropped = (history[f"clients/{name}"].sum() for name in ("selected", "accepted", "dropped"))
    assert dropped > 5
    assert started == taken + dropped + history["async/in_flight"].iloc[-1]
    assert (history["async/in_flight"] <= 3).all()


def test_stale_uploads_are_rejected_and_count(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    found, trainer = fit(FedBuff(1, max_staleness=1), max_rounds=12)
    history = trainer.history
    late = history["async/staleness_max"] > 1
    assert 0 < late.sum() < 12
    np.testing.assert_array_equal(history["clients/rejected"], late)
    everything, _ = fit(FedBuff(1), max_rounds=12)
    assert (found != everything).any()
    assert "were rejected" not in caplog.text
    rejected = dict(final_lines(trainer, []))["rejected"]
    assert rejected == f"{late.sum()} of 12 uploads, in {late.sum()} of 12 rounds: not finite or too stale"


@pytest.mark.parametrize(
    ("algorithm", "module"),
    [
        (FedBuff(2, uplink=ErrorFeedback(TopK(0.3))), Perceptron),
        (FedBuff(5, rule=LocalAdam()), Normalised),
        (FedAsync(decay="hinge", downlink=Cast("bfloat16")), Normalised),
        (Ditto(base=FedBuff(4)), Perceptron),
        (FedBuff(2), halving),
    ],
    ids=["error feedback", "two uploads of a client", "lossy downlink", "personal", "schedule"],
)
def test_a_run_that_was_killed_goes_on_identically(
    algorithm: Algorithm, module: Callable[[], Any], fit: Fit, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    files = {**keeps_files, "straggler_rate": 0.5, "dropout_rate": 0.2, "gradient_clip_val": 1.0}
    torch.manual_seed(0)
    whole, uninterrupted = fit(algorithm, module(), **files, default_root_dir=tmp_path / "whole")
    torch.manual_seed(0)
    fit(algorithm, module(), **files, max_rounds=3, default_root_dir=tmp_path / "part")
    torch.manual_seed(0)
    resumed, trainer = fit(algorithm, module(), **files, default_root_dir=tmp_path / "part", ckpt_path="last")
    np.testing.assert_array_equal(resumed, whole)
    assert equal_states(trainer.run.state_dict()["clients"], uninterrupted.run.state_dict()["clients"])
    assert trainer.run.features["asynchrony"]["in_flight"] == uninterrupted.run.features["asynchrony"]["in_flight"]
    rows, expected = (read_rows(tmp_path / name) for name in ("part", "whole"))
    for row, other in zip(rows, expected, strict=True):
        assert {k: v for k, v in row.items() if "round_seconds" not in k} == {
            k: v for k, v in other.items() if "round_seconds" not in k
        }


def test_a_checkpoint_in_the_middle_of_a_round_has_the_rates_of_the_round(
    fit: Fit, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """Save while a client trains with the rates of the earlier round in which it has received the model."""

    class Saving(Callback):
        def on_client_upload(self, trainer: Any, pl_module: Any, client: int, position: int, total: int) -> None:
            if trainer.current_epoch == 4:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    whole, trainer = fit(FedBuff(1), halving(), callbacks=[Saving()], **keeps_files)
    assert trainer.history["async/staleness_max"][4] > 0
    again = {**keeps_files, "default_root_dir": tmp_path / "again", "ckpt_path": tmp_path / "middle.ckpt"}
    np.testing.assert_array_equal(fit(FedBuff(1), halving(), **again)[0], whole)


def test_second_upload_of_an_update_goes_on_from_the_first(fit: Fit) -> None:
    recorded = Recorded()
    method = FedBuff(2, rule=Drifting(), uplink=Halves())
    trainer = fit(method, sizes=(9,), clients_per_round=1, max_rounds=3, callbacks=[recorded])[1]
    messages = [message for of_round in recorded.rounds.values() for message in of_round]
    sent, arrived = (sum(getattr(message, name)["model"] for message in messages) for name in ("sent", "decoded"))
    assert len(messages) == 6
    state, memory = trainer.run.clients[0], trainer.run.client_memory[0]
    assert state["turns"] == 6
    torch.testing.assert_close(state["sum"], sent)
    torch.testing.assert_close(arrived + memory["model"], sent)


class Topping(Perceptron):
    """Module that logs the maximum of numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("top", float(batch_idx), reduce_fx="max", on_step=False, on_epoch=True)
        return self.loss(batch)


def test_logs_of_a_second_upload_are_joined_with_those_of_the_first(fit: Fit) -> None:
    trainer = fit(FedBuff(2), Topping(), sizes=(9,), clients_per_round=1, max_rounds=2)[1]
    most = -(-9 // trainer.data.batch_size) - 1
    assert list(trainer.history["top"]) == [most, most]


@dataclass(frozen=True)
class Weighed(Step):
    """Step that keeps the number of samples of each round's uploads, and changes nothing."""

    seen: list[float] = field(default_factory=list)

    def __call__(self, turn: ServerTurn, state: State) -> State:
        self.seen.append(turn.num_samples)
        return state


@pytest.mark.parametrize("max_staleness", [None, 0])
def test_samples_of_a_client_count_for_each_of_its_uploads(max_staleness: int | None, fit: Fit) -> None:
    """Check that steps may weigh the server's samples against those of all uploads that the mean is over."""
    weighed = Weighed()
    trainer = fit(FedBuff(5, max_staleness=max_staleness, steps=[weighed]), sizes=(9, 9, 9), max_rounds=8)[1]
    accepted = trainer.history["clients/accepted"]
    assert weighed.seen == [9 * count for count in accepted if count]
    assert max_staleness is None or set(accepted) > {5}


@pytest.mark.parametrize("change", [{"buffer_size": 3}, {"max_staleness": 4}, {"decay": 1.0}], ids=str)
def test_a_resumed_run_keeps_its_pace(change: dict[str, Any], fit: Fit, keeps_files: dict[str, Any]) -> None:
    fit(FedBuff(2), **keeps_files, max_rounds=2)
    with pytest.raises(UserError, match=f"{next(iter(change))} .* → {next(iter(change.values()))}"):
        fit(FedBuff(**{"buffer_size": 2, **change}), **keeps_files, ckpt_path="last")


class Setting(Callback):
    """Callback that sets the learning rate of each round."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 0.5**trainer.current_epoch


@pytest.mark.parametrize(
    ("module", "callbacks"),
    [(halving, []), (Perceptron, [Setting()]), (halving, [Setting()])],
    ids=["schedule", "callback", "both"],
)
def test_clients_train_at_the_rate_of_the_version_that_they_received(
    module: Callable[[], Any], callbacks: list[Callback], fit: Fit
) -> None:
    rates: list[float] = []

    class Seen(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    history = fit(FedBuff(1), module(), callbacks=[*callbacks, Seen()])[1].history
    expected = [0.5 ** (round - stale) for round, stale in enumerate(history["async/staleness_max"])]
    assert rates == expected


@pytest.mark.parametrize("resumes", [False, True], ids=["in one go", "resumed"])
def test_clients_train_as_long_as_they_need_by_the_clock(
    resumes: bool, fit: Fit, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """Change the local training under way, by a callback or when the run is resumed: samples and seconds go together."""
    speeds = {"uplink_mebibytes_per_second": 1e30, "downlink_mebibytes_per_second": 1e30}
    flags = {"clock": ClientClock(macs_per_second=3 * 20.0, **speeds), "max_rounds": 8, **keeps_files}
    if resumes:
        fit(FedBuff(1), **{**flags, "max_rounds": 3})
        fit(FedBuff(1), **flags, local_epochs=10, ckpt_path="last")
    else:
        fit(FedBuff(1), **flags, local_steps=2, callbacks=[GradientAccumulationScheduler({0: 1, 2: 4})])
    rows = read_rows(tmp_path)
    assert [float(row["time/slowest_client"]) for row in rows] == pytest.approx(
        [float(row["clients/samples"]) for row in rows]
    )
    assert max(float(row["async/staleness_max"]) for row in rows[3:]) > 1


def test_phases_of_clients_under_way_are_those_of_their_own_passes(fit: Fit, keeps_files: dict[str, Any]) -> None:
    """Check that a client with more passes in later versions still trains the shared part in the last of its own."""
    recorded, method = Recorded(), FedBuff(1, personal=[PersonalLayers(["output"]), HeadThenBody()])
    fit(method, **keeps_files, local_epochs=2, max_rounds=3)
    trainer = fit(method, **keeps_files, local_epochs=4, max_rounds=8, callbacks=[recorded], ckpt_path="last")[1]
    assert trainer.history["async/staleness_max"].iloc[3:].max() > 1
    assert all(bool(message.sent["model"].any()) for (message,) in recorded.rounds.values())


def test_speeds_times_c_leave_the_models(fit: Fit, tmp_path: Path) -> None:
    models = []
    for number, scale in enumerate((1.0, 10.0, 1.7)):
        trace = tmp_path / f"{number}.csv"
        rows = [f"{client},{scale / (client + 1)},1e30,1e30" for client in range(3)]
        trace.write_text(
            "\n".join(("client,macs_per_second,uplink_mebibytes_per_second,downlink_mebibytes_per_second", *rows))
        )
        clock = ClientClock(trace=trace, macs_per_second=1.0, computation_seconds=1.0)
        models.append(fit(FedBuff(1), sizes=(6, 6, 6), clock=clock, max_rounds=12)[0])
    np.testing.assert_array_equal(models[1], models[0])
    np.testing.assert_array_equal(models[2], models[0])


@pytest.mark.parametrize("places", [1, 2, 5])
def test_clients_are_busy_at_most_all_the_time_of_the_places(
    places: int, fit: Fit, keeps_files: dict[str, Any]
) -> None:
    fit(FedBuff(1), **keeps_files, clients_per_round=4, max_rounds=3)
    trainer = fit(FedBuff(1), **keeps_files, clients_per_round=places, max_rounds=9, ckpt_path="last")[1]
    assert trainer.history["async/in_flight"].iloc[-1] == places - 1
    assert trainer.history["time/utilisation"].between(0, 1 + 1e-9).all()


def test_clients_that_are_not_there_are_not_drawn(fit: Fit, tmp_path: Path) -> None:
    table = tmp_path / "there.csv"
    table.write_text("client,start_seconds,end_seconds\n1,0,5\n4,0,5\n2,3,4\n")
    trainer = fit(FedBuff(1), clock=ClientClock(computation_seconds=1.0), availability=table, availability_period=10)[1]
    history = trainer.history
    assert (history["async/in_flight"] <= 2).all()
    assert trainer.run.simulated_seconds >= 2


def test_a_place_for_which_nobody_is_there_is_filled_when_a_client_comes(fit: Fit, tmp_path: Path) -> None:
    table = tmp_path / "there.csv"
    table.write_text("client,start_seconds,end_seconds\n0,0,1000\n1,1,1000\n2,3,1000\n")
    clock = ClientClock(computation_seconds=100.0, uplink_mebibytes_per_second=1e30, downlink_mebibytes_per_second=1e30)
    history = fit(FedBuff(1), clock=clock, availability=table, max_rounds=4)[1].history
    np.testing.assert_allclose(history["time/simulated_seconds"], [100, 101, 103, 200])
    assert list(history["async/in_flight"]) == [2, 2, 2, 2]
    np.testing.assert_allclose(history["time/utilisation"], [296 / 300, 1, 1, 1])


@pytest.mark.parametrize(
    ("algorithm", "flags", "said"),
    [
        (lambda: FedBuff(downlink=Changes()), {}, "the downlink Changes sends changes since the last broadcast"),
        (lambda: FedBuff(rule=SharedAdam()), {}, "SharedAdam"),
        (lambda: SCAFFOLD(aggregator="StaleMean"), {}, "SCAFFOLD fills the slot aggregator itself"),
        (FedBuff, {"runner": "stacked"}, "one after the other: use runner 'auto' or 'serial'"),
        (
            FedBuff,
            {"over_selection": 1.5},
            "FedBuff fills every place that becomes idle; leave out trainer.over_selection",
        ),
        (FedBuff, {"deadline": 3.0}, "leave out trainer.deadline"),
        (FedBuff, {"callbacks": [MagnitudePruning(0.5)]}, "would prune the server's model, and clients of FedBuff"),
        (lambda: FedBuff(0), {}, "buffer_size must be a whole number of at least 1, got 0"),
        (lambda: FedAsync(1.5), {}, r"alpha must lie in \(0, 1\], got 1.5"),
        (lambda: FedBuff(decay="linear"), {}, "decay 'linear' is unknown"),
        (lambda: FedBuff(max_staleness=-1), {}, "max_staleness must be a whole number of at least 0, got -1"),
    ],
)
def test_what_does_not_fit_is_refused(
    algorithm: Callable[[], Algorithm], flags: dict[str, Any], said: str, fit: Fit
) -> None:
    with pytest.raises(UserError, match=said):
        fit(algorithm(), **flags)


def test_the_default_clock_and_the_loss_guard_fit(fit: Fit) -> None:
    found, trainer = fit(FedBuff(2), clock=SimulatedClock(), loss_guard=LossGuard(clients=1e6))
    assert np.isfinite(found).all()
    assert trainer.run.simulated_seconds > 0
