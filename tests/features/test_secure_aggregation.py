"""Test runs whose server sees only sums over the clients: the same model, the protocol's bits, lost sums, refusals."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer, agree, bits_of, equal_states, ran, time_of
from lightning.pytorch import Callback
from roster import COVERING, ROSTER
from torch import Tensor
from toys import Normalised, Perceptron, Poisoned, Served, federation, read_rows, samples

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.aggregators import KeepUploads, MaskedMean, NormBound
from lightning_fl.algorithms import (
    SCAFFOLD,
    Algorithm,
    DeviceM,
    Ditto,
    FedAP,
    FedAvg,
    FedBuff,
    FedDU,
    FedKT,
    FedLDF,
    FedNova,
    RandomLayers,
)
from lightning_fl.callbacks import CommunicationMeter
from lightning_fl.codecs import TopK
from lightning_fl.features.clock import ClientClock
from lightning_fl.features.loss_guard import LossGuard
from lightning_fl.features.privacy import ClientPrivacy
from lightning_fl.features.secure_aggregation import SecureAggregation
from lightning_fl.outputs import checkpoint_file
from lightning_fl.outputs.final_table import final_lines
from lightning_fl.slots import LocalTraining, Message, Rule, State

ON = SecureAggregation()
SUM_ONLY = [
    name
    for name in COVERING
    if not (method := ROSTER[name].algorithm()).readers_of_single_clients() and method.exchange.num_senders(4) > 1
] + ["RandomLayers-tensor"]
"""Methods that need no single clients, with all their parts; of RandomLayers one that has two clients for each layer."""
D, WIDTH = 26, 18  # 4 · (2^16 − 1) < 2^18
AGREED = 2 * 256 + 2 * 3 * 256, 2 * 3 * (256 + 256)
"""Bits up and down of one of four clients for keys and shares."""
UNMASKING = 4 * 256


def secure(make_trainer: MakeTrainer, **flags: Any) -> FederatedTrainer:
    return make_trainer(**{"clients_per_round": 4, "secure_aggregation": ON, **flags})


def fitted(
    trainer: FederatedTrainer, method: Algorithm | None = None, module: Any = Perceptron, data: Any = None
) -> Any:
    torch.manual_seed(0)
    trainer.fit(module(), federation() if data is None else data, method or FedAvg())
    return trainer


def rows(trainer: FederatedTrainer, name: str) -> list[int]:
    return [int(row[name]) for row in trainer.fit_loop.rows]


def compared(make_trainer: MakeTrainer, name: str, runner: str) -> tuple[FederatedTrainer, FederatedTrainer]:
    """Return two rounds of a method of the roster, without secure sums and with them."""
    entry = ROSTER[name]
    flags: dict[str, Any] = {"clients_per_round": 4, "runner": runner}
    one, other = (
        fitted(make_trainer(**flags, secure_aggregation=given), entry.algorithm(), data=entry.federation())
        for given in (None, ON)
    )
    return one, other


def differing(one: FederatedTrainer, other: FederatedTrainer) -> set[str]:
    """Return the columns that differ, but for bits and time, and the parts of the run that do."""
    columns = {
        key
        for before, after in zip(one.fit_loop.rows, other.fit_loop.rows, strict=True)
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key) and not key.startswith(("comm/", "time/"))
    }
    parts = [{"params": run.params, "server": run.server, "clients": dict(run.clients)} for run in (one.run, other.run)]
    return columns | {name for name in parts[0] if not equal_states(parts[0][name], parts[1][name])}


def expected_bits(name: str, up: dict[str, int], down: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bits of a round with secure sums, given those without them, at 32 bits a number."""
    method, numbers = ROSTER[name].algorithm(), {kind: count // 32 for kind, count in up.items()}
    sums = 1 + ("moments/gradient" in method.exchange.provides)
    weights = 4 * sums
    if method.exchange.num_senders(4) < 4:  # parts of the model, with a weight for each number
        weights += numbers["model"]
    if name.startswith("FedNova"):  # it sends its weight by itself
        weights = 0
    numbers["scalars"] = numbers.get("scalars", 0) + weights
    keys = 4 * sums * (AGREED[0] + UNMASKING), 4 * sums * AGREED[1]
    return {kind: WIDTH * count for kind, count in numbers.items()} | {"keys": keys[0]}, down | {"keys": keys[1]}


@pytest.mark.matrix
def test_all_methods_train_as_without_it_and_pay_by_the_number(make_trainer: MakeTrainer) -> None:
    """What costs 32 bits a number without it costs w with it; keys, shares and a weight come to each sum."""
    failures = []
    for name in SUM_ONLY:
        one, other = compared(make_trainer, name, "serial")
        before, after = ([bits_of(run, way) for way in ("up", "down")] for run in (one, other))
        if differing(one, other) != {"clients/lost"} or after != list(expected_bits(name, *before)):
            failures.append((name, differing(one, other), after))
    assert not failures
    assert len(SUM_ONLY) > 10


@pytest.mark.parametrize("name", ["SCAFFOLD", "DeviceM-mime", "RandomLayers-tensor", "PruneFL"])
def test_stacks_train_as_without_it(name: str, make_trainer: MakeTrainer) -> None:
    one, other = compared(make_trainer, name, "stacked")
    assert differing(one, other) == {"clients/lost"}
    assert bits_of(other, "up") == bits_of(compared(make_trainer, name, "serial")[1], "up")


def test_float_buffers_and_other_sizes(make_trainer: MakeTrainer) -> None:
    protocol = SecureAggregation(key_bits=10, share_bits=20, value_bits=8)
    trainer = fitted(secure(make_trainer, secure_aggregation=protocol, max_rounds=1), module=Normalised)
    width = 10  # 4 · 255 < 2^10
    assert bits_of(trainer, "up") == {
        "model": 4 * width * (D + 6),
        "buffers": 4 * width * 6,
        "scalars": 4 * width,
        "keys": 4 * (2 * 10 + (3 * 4 - 2) * 20),
    }
    assert bits_of(trainer, "up") != bits_of(fitted(secure(make_trainer, max_rounds=1), module=Normalised), "up")


def test_clients_that_drop_out_have_sent_keys_and_shares(make_trainer: MakeTrainer) -> None:
    trainer = fitted(secure(make_trainer, max_rounds=8, dropout_rate=0.3))
    plain = fitted(make_trainer(max_rounds=8, clients_per_round=4, dropout_rate=0.3))
    dropped = rows(trainer, "clients/dropped")
    assert dropped == rows(plain, "clients/dropped")
    assert {1, 2} <= set(dropped)
    upload = UNMASKING + WIDTH * (D + 1)
    assert rows(trainer, "comm/uplink_bits") == [4 * AGREED[0] + (4 - gone) * upload for gone in dropped]
    assert rows(trainer, "comm/downlink_bits") == [4 * (32 * D + AGREED[1])] * 8
    # Of four, three must answer.
    assert rows(trainer, "clients/lost") == [4 - gone if gone > 1 else 0 for gone in dropped]
    assert rows(trainer, "clients/accepted") == [4 - gone if gone < 2 else 0 for gone in dropped]
    assert rows(trainer, "clients/rejected") == [0] * 8


class Models(Callback):
    """Callback that keeps the model before each round, and after the last."""

    def __init__(self) -> None:
        self.models: list[torch.Tensor] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.models.append(trainer.run.params.clone())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.models.append(trainer.run.params.clone())


@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD, Ditto])
def test_a_lost_sum_leaves_model_and_clients_as_they_were(
    method: Callable[[], Algorithm], make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Models()
    trainer = fitted(secure(make_trainer, max_rounds=8, dropout_rate=0.4, callbacks=watch), method())
    stays = [torch.equal(before, after) for before, after in zip(watch.models, watch.models[1:], strict=False)]
    lost = [count > 0 for count in rows(trainer, "clients/lost")]
    assert stays == [
        bool(gone == 4 or is_lost) for gone, is_lost in zip(rows(trainer, "clients/dropped"), lost, strict=True)
    ]
    assert 0 < sum(lost) < 8
    assert ["train/loss" in row for row in trainer.fit_loop.rows] == [
        not stay for stay in stays
    ] or method is not FedAvg
    first = lost.index(True)
    message = f"Round {first + 1}: {rows(trainer, 'clients/lost')[first]} of 4 clients answered, and a secure sum over 4 needs 3"
    assert sum("needs 3" in record.message for record in caplog.records) == 1
    assert message in caplog.text
    num_lost = sum(rows(trainer, "clients/lost"))
    assert dict(final_lines(trainer, trainer.fit_loop.rows))["lost"].startswith(
        f"{num_lost} uploads, in {sum(lost)} of 8 rounds"
    )
    assert trainer.run.num_rejected == 0


@pytest.mark.parametrize(
    ("flags", "module", "said"),
    [
        (
            {"dropout_rate": 0.8},
            Perceptron,
            "a secure sum over 4 needs 3, so it is lost and only noise changed the model.",
        ),
        ({"secure_aggregation": None}, Poisoned, "were rejected (not finite), so only noise changed the model."),
    ],
    ids=["lost", "rejected"],
)
def test_noise_moves_the_model_in_rounds_without_an_upload(
    flags: dict[str, Any], module: Any, said: str, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    x, y = samples(40)
    if module is Poisoned:
        x = x + 1000
    watch, privacy = Models(), ClientPrivacy(noise_multiplier=1.0, sampling="fixed")
    trainer = secure(make_trainer, max_rounds=3, callbacks=watch, privacy=privacy, **flags)
    trainer = fitted(trainer, data=federation(train=(x, y)), module=module)
    assert rows(trainer, "clients/accepted") == [0, 0, 0]
    assert not any(torch.equal(before, after) for before, after in zip(watch.models, watch.models[1:], strict=False))
    assert said in caplog.text


def test_clients_of_a_lost_sum_keep_their_old_state(make_trainer: MakeTrainer) -> None:
    one = fitted(secure(make_trainer, max_rounds=1, clients_per_round=6, dropout_rate=0.6), SCAFFOLD())
    assert rows(one, "clients/lost") != [0]
    assert not one.run.clients.snapshot()


def test_whose_numbers_are_not_finite_sends_nothing(make_trainer: MakeTrainer) -> None:
    """A client whose loss is NaN costs what one costs that drops out, and is rejected as ever."""
    x, y = samples(40)
    data = federation(train=(x, y))
    data.setup("fit")
    x[data.client_indices[2], 0] = 1000.0
    trainers = [make_trainer(max_rounds=1, clients_per_round=6, secure_aggregation=given) for given in (None, ON)]
    runs = [fitted(trainer, data=federation(train=(x, y)), module=Poisoned) for trainer in trainers]
    assert [rows(run, "clients/rejected") for run in runs] == [[1], [1]]
    assert torch.equal(runs[0].run.params, runs[1].run.params)
    assert rows(runs[1], "comm/uplink_bits") == [6 * ON.agreement_bits(6)[0] + 5 * (6 * 256 + 19 * (D + 1))]


@dataclass(frozen=True)
class Spoilt(Rule):
    """Rule whose clients with more than eight samples keep a NaN."""

    def init(self, params: Tensor) -> State:
        return {"kept": params.new_zeros(1)}

    def finish(self, local: LocalTraining) -> Message:
        local.state["kept"] = local.state["kept"] + (torch.nan if local.num_samples > 8 else 0.0)
        return super().finish(local)


def test_who_would_keep_such_numbers_sends_nothing_either(make_trainer: MakeTrainer) -> None:
    trainer = fitted(secure(make_trainer, max_rounds=1, clients_per_round=6, runner="serial"), Algorithm(rule=Spoilt()))
    assert rows(trainer, "clients/rejected") == [2]
    assert rows(trainer, "comm/uplink_bits") == [6 * ON.agreement_bits(6)[0] + 4 * (6 * 256 + 19 * (D + 1))]


def test_two_sums_in_a_round_are_over_those_that_are_left(make_trainer: MakeTrainer) -> None:
    """Mime's mean gradient is the first; for the second those that answered agree on keys anew."""
    trainer = fitted(secure(make_trainer, max_rounds=8, clients_per_round=6, dropout_rate=0.3), DeviceM(variant="mime"))
    dropped, lost = rows(trainer, "clients/dropped"), rows(trainer, "clients/lost")
    assert {0, 2, 3} <= set(dropped)

    def bits(n: int, senders: int) -> tuple[int, int]:
        up, down = ON.agreement_bits(n)
        return n * up + senders * (n * 256 + ON.width(n) * (D + 1)), n * down

    for round, gone in enumerate(dropped):
        left = 6 - gone
        up, down = bits(6, left)
        vectors = 2 * 6  # model and momentum
        if left >= 4:
            further = bits(left, left)
            up, down, vectors = up + further[0], down + further[1], vectors + left
        assert trainer.fit_loop.rows[round]["comm/uplink_bits"] == up
        assert trainer.fit_loop.rows[round]["comm/downlink_bits"] == down + 32 * D * vectors
        assert lost[round] == (0 if left >= 4 else left)


def test_a_resumed_run_is_the_same(make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]) -> None:
    flags = {"dropout_rate": 0.35, **keeps_files}
    one = fitted(secure(make_trainer, default_root_dir=tmp_path / "one", max_rounds=6, **flags), SCAFFOLD())
    for num_rounds, checkpoint in ((3, None), (6, "last")):
        torch.manual_seed(0)
        other = secure(make_trainer, default_root_dir=tmp_path / "two", max_rounds=num_rounds, **flags)
        other.fit(Perceptron(), federation(), SCAFFOLD(), ckpt_path=checkpoint)
    assert differing(one, other) == set()
    assert one.run.ledger.state_dict() == other.run.ledger.state_dict()
    assert read_rows(tmp_path / "one") == read_rows(tmp_path / "two")
    assert any(rows(one, "clients/lost"))
    saved = checkpoint_file.load(tmp_path / "one" / "checkpoints" / "last.ckpt")["federation"]
    assert saved["settings"]["trainer.secure_aggregation.value_bits"] == 16


def test_a_resumed_run_may_begin_with_it(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> None:
    fitted(make_trainer(max_rounds=2, clients_per_round=4, **keeps_files))
    trainer = secure(make_trainer, max_rounds=3, **keeps_files)
    trainer.fit(Perceptron(), federation(), FedAvg(), ckpt_path="last")
    assert bits_of(trainer, "up")["keys"] == 4 * (AGREED[0] + UNMASKING)
    assert trainer.run.ledger.total_bits["up"]["keys"] == 4 * (AGREED[0] + UNMASKING)


@pytest.mark.parametrize("method", [FedAvg, lambda: DeviceM(variant="mime"), lambda: RandomLayers(n=2)])
def test_a_plan_knows_its_cost(method: Callable[[], Algorithm], make_trainer: MakeTrainer) -> None:
    flags = {"max_rounds": 4, "dropout_rate": 0.3, "clients_per_round": 5}
    plan = secure(make_trainer, **flags).plan(Perceptron(), federation(), method())
    trainer = fitted(secure(make_trainer, **flags), method())
    assert plan.uplink_bytes == trainer.run.ledger.total_bytes("up")
    assert plan.downlink_bytes == trainer.run.ledger.total_bytes("down")


def test_a_clock_of_clients_knows_keys_before_the_round(make_trainer: MakeTrainer) -> None:
    """Late clients have sent keys and shares; with them a client's time is that of all its bits."""
    flags = {"clock": ClientClock(devices="phones"), "over_selection": 1.5, "max_rounds": 3}
    trainer = fitted(secure(make_trainer, **flags))
    assert rows(trainer, "clients/late") == [2] * 3
    protocol_up, protocol_down = ON.agreement_bits(6)
    assert rows(trainer, "comm/uplink_bits") == [6 * protocol_up + 4 * (6 * 256 + 19 * (D + 1))] * 3
    assert rows(trainer, "comm/downlink_bits") == [6 * (32 * D + protocol_down)] * 3
    plain = fitted(make_trainer(clients_per_round=4, **flags))
    assert trainer.run.simulated_seconds > plain.run.simulated_seconds
    planned = time_of(trainer).planned
    slowest = trainer.fit_loop.rows[-1]["time/slowest_client"]
    assert any(seconds == pytest.approx(slowest, rel=1e-9) for seconds in planned.values())


def test_a_meter_splits_the_bits(make_trainer: MakeTrainer) -> None:
    trainer = fitted(secure(make_trainer, max_rounds=1, callbacks=CommunicationMeter(per_layer=True)))
    found = {
        name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("comm/uplink_bits/")
    }
    assert found == {
        "comm/uplink_bits/model": 4 * WIDTH * D,
        "comm/uplink_bits/scalars": 4 * WIDTH,
        "comm/uplink_bits/keys": 4 * (AGREED[0] + UNMASKING),
        "comm/uplink_bits/layer/hidden": 4 * WIDTH * 16,
        "comm/uplink_bits/layer/output": 4 * WIDTH * 10,
        "comm/uplink_bits/layer/shared": 4 * (WIDTH + UNMASKING),
    }


REFUSED: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "exchange": (FedLDF(), {}, ["FedLDF's exchange (LayerDivergence)", "sum-only"]),
    "uplink": (FedAvg(uplink=TopK(0.1)), {}, ["FedAvg's uplink (TopK)"]),
    "aggregator": (FedAvg(aggregator=NormBound()), {}, ["aggregator (NormBound)"]),
    "step": (FedDU(), {}, ["FedDU's steps (DynamicServerUpdate)"]),
    "pace": (FedBuff(), {}, ["FedBuff's pace (Pace)"]),
    "callback of the method": (FedAP(), {}, ["FedAP's callbacks (AdaptivePruning)"]),
    "several": (
        Algorithm(
            exchange=FedLDF().exchange, aggregator=KeepUploads(MaskedMean()), steps=ROSTER["FedDF"].algorithm().steps
        ),
        {},
        ["exchange (LayerDivergence), aggregator (KeepUploads), steps (Distillation)"],
    ),
    "loss guard": (FedAvg(), {"loss_guard": LossGuard(clients=3.0)}, ["loss_guard.clients"]),
    "one client": (FedAvg(), {"clients_per_round": 1}, ["at least 2 clients", "clients_per_round is 1"]),
    "one sender": (RandomLayers(n=1), {}, ["at least 2 clients", "RandomLayers's n is 1"]),
    "no round": (FedKT(mode="one_shot"), {}, ["FedKT(mode='one_shot')", "leave it out"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_reads_single_clients_is_refused_before_training(case: str, make_trainer: MakeTrainer) -> None:
    method, flags, words = REFUSED[case]
    trainer = secure(make_trainer, **flags)
    with pytest.raises(UserError) as caught:
        trainer.fit(Perceptron(), Served(9), copy.deepcopy(method))
    assert all(word in str(caught.value) for word in ["trainer.secure_aggregation", *words])
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(("cohort", "most"), [(2, 1.5), (3, 1.33), (4, 1.5), (5, 1.4)])
def test_over_selection_that_would_lose_every_sum_is_refused(
    cohort: int, most: float, make_trainer: MakeTrainer
) -> None:
    """Test that just the runs that are refused select more clients than a sum over them can spare."""
    data = federation((3,) * 9)
    for over_selection in (1.0, most, most + 0.01, 1.8):
        flags = {"clients_per_round": cohort, "over_selection": over_selection, "clock": ClientClock(devices="phones")}
        trainer = secure(make_trainer, max_rounds=1, **flags)
        if over_selection <= most:
            assert rows(fitted(trainer, data=data), "clients/lost") == [0]
        else:
            said = rf"a round closes after {cohort}, so that .* would lose every sum: use an over_selection of {most:g} or less\."
            with pytest.raises(UserError, match=said):
                fitted(trainer, data=data)
            assert ON.threshold(ceil(over_selection * cohort)) > cohort


def test_a_wrong_value_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"SecureAggregation\(\).* got True"):
        make_trainer(secure_aggregation=True)


def test_a_callback_that_asks_a_client_is_refused_when_it_does(make_trainer: MakeTrainer) -> None:
    class Asking(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.sources()[0].answer(1)

    with pytest.raises(UserError, match="a callback asks one client"):
        fitted(secure(make_trainer, callbacks=Asking()))


def test_it_is_said_that_the_set_up_is_not_covered(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fitted(secure(make_trainer), ROSTER["FedKT-light"].algorithm(), data=Served(9))
    assert "before the first, FedKT's clients send what the server reads one by one" in caplog.text


def test_nothing_is_new_without_it(make_trainer: MakeTrainer) -> None:
    trainer = fitted(make_trainer(clients_per_round=4), FedNova())
    assert not any("lost" in name for row in trainer.fit_loop.rows for name in row)
    assert bits_of(trainer, "up").keys() == {"model", "scalars"}


@pytest.mark.process
def test_two_processes_lose_the_same_sums(tmp_path: Path) -> None:
    """Test two sums in each round, drop-outs, and keys that every process counts for its own clients."""
    words = (
        "--trainer.secure_aggregation",
        "SecureAggregation",
        "--model.network",
        "linear",
        "--trainer.max_rounds",
        "5",
    )
    mime = "DeviceM --algorithm.variant mime"
    runs = [ran(tmp_path / str(count), *words, num_processes=count, algorithm=mime) for count in (1, 2)]
    lost = [int(row["clients/lost"]) for row in runs[0][0]]
    assert 0 < sum(map(bool, lost)) < 5
    # Rounds whose sum is lost have no averages of the clients.
    agree(*(([{name: cell for name, cell in row.items() if cell} for row in rows], weights) for rows, weights in runs))
