"""Test runs with selections: papers' loops, bits, theorems, states, failing and late clients, refusals."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import oracle_selection as oracle
import pytest
import torch
from compared_runs import MakeTrainer, agree, assert_same, bits_of, fits, ran, resumed_like_whole
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from oracle import turned_signs
from roster import problem
from torch import Tensor, nn
from toys import SIZES, Perceptron, Pruning, Served, federation, samples, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.aggregators import CoordinateMedian
from lightning_fl.algorithms import (
    IFCA,
    SCAFFOLD,
    Algorithm,
    Centralised,
    FedAvg,
    FedBuff,
    FedKT,
    FedLDF,
    FedNova,
    FedRep,
    HeteroFL,
    LocalOnly,
)
from lightning_fl.callbacks import EnergyMeter
from lightning_fl.codecs import QSGD, Cast, Followed
from lightning_fl.data import Federated
from lightning_fl.features.attacks import Adversary, SignFlip
from lightning_fl.features.clock import ClientClock
from lightning_fl.features.privacy import ClientPrivacy, LocalPrivacy
from lightning_fl.features.secure_aggregation import SecureAggregation
from lightning_fl.features.selection import (
    ByNorm,
    BySize,
    ClientSelection,
    Fastest,
    InTurn,
    PowerOfChoice,
    Reads,
    SelectionTurn,
    Uniform,
    senders,
)
from lightning_fl.steps import Compress

MODEL = 32 * 26
"""Bits of the perceptron."""
PHONES = ClientClock(devices="phones")
ORACLES: dict[str, tuple[ClientSelection, Callable[[], oracle.Round]]] = {
    "by size": (BySize(), lambda: oracle.by_size(replace=False)),
    "by size, with replacement": (BySize(replace=True), lambda: oracle.by_size(replace=True)),
    "unbiased": (BySize(unbiased=True), lambda: oracle.by_size(replace=True, alike=True)),
    "in turn": (InTurn(shuffled=False), lambda: oracle.in_order),
    "pow-d": (PowerOfChoice(5), lambda: oracle.power_of_choice(5)),
    "cpow-d": (PowerOfChoice(5, loss_samples=3), lambda: oracle.power_of_choice(5, 3)),
    "rpow-d": (PowerOfChoice(5, reuse_losses=True), lambda: oracle.reused_power_of_choice(5)),
    "optimal": (ByNorm(6), lambda: oracle.by_norm(6, unbiased=True)),
    "optimal of 4": (ByNorm(4), lambda: oracle.by_norm(4, unbiased=True)),
    "biased": (ByNorm(5, unbiased=False), lambda: oracle.by_norm(5, unbiased=False)),
    "approximate": (ByNorm(6, approximate=True), lambda: oracle.by_norm(6, unbiased=True, approximate=True)),
}
EACH = [Uniform(), *(selection for selection, _ in ORACLES.values())]
each_selection = pytest.mark.parametrize("selection", EACH, ids=[*map(str, EACH)])


class Cohorts(Callback):
    """Callback that keeps the clients that have trained, by round."""

    def __init__(self) -> None:
        self.rounds: list[list[int]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.rounds.append([])

    def on_client_upload(self, trainer: Any, pl_module: Any, client: int, position: int, total: int) -> None:
        self.rounds[-1].append(client)


@dataclass(frozen=True)
class Listed(ClientSelection):
    """ClientSelection of listed clients, of a user's own."""

    rounds: tuple[tuple[int, ...], ...] = field(default=())

    def draw(self, turn: SelectionTurn) -> tuple[int, ...]:
        return self.rounds[turn.round]


def rows_of(trainer: FederatedTrainer) -> list[dict[str, float]]:
    return [{name: x for name, x in row.items() if name != "time/round_seconds"} for row in trainer.fit_loop.rows]


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_matches_its_oracle(name: str, runner: str, make_trainer: MakeTrainer) -> None:
    selection, train_round = ORACLES[name]
    module = Perceptron()
    expected = oracle.run(problem(rounds=6), vector(module), train_round())
    trainer = make_trainer(max_rounds=6, selection=selection, precision="64-true", runner=runner)
    trainer.fit(module, federation())
    # Losses and norms cross as 32 bits.
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-6 if isinstance(selection, ByNorm) else 1e-10)


def test_clients_that_are_drawn_twice_train_once(make_trainer: MakeTrainer) -> None:
    cohorts = Cohorts()
    trainer = make_trainer(max_rounds=6, selection=BySize(replace=True), callbacks=cohorts)
    trainer.fit(Perceptron(), federation())
    drawn = [oracle.drawn_by_size(problem(rounds=6), t, 3, replace=True) for t in range(6)]
    assert any(len(set(clients)) < 3 for clients in drawn), "the test needs a client that is drawn twice"
    assert cohorts.rounds == [list(dict.fromkeys(clients)) for clients in drawn]
    assert trainer.history["clients/selected"].tolist() == [len(set(clients)) for clients in drawn]


@pytest.mark.parametrize("flags", [{}, {"dropout_rate": 0.4}])
@pytest.mark.parametrize(
    ("one", "other", "columns"),
    [
        (Uniform(), None, set()),
        (PowerOfChoice(3), BySize(), {"clients/asked", "clients/asked_samples"}),
        (PowerOfChoice(6), Listed(((5, 4, 3, 2, 1, 0),) * 3), None),
    ],
    ids=["Uniform", "PowerOfChoice with d = K", "a difference"],
)
def test_some_selections_are_others_bit_for_bit(
    one: ClientSelection, other: ClientSelection | None, columns: set[str] | None, flags: Any, make_trainer: MakeTrainer
) -> None:
    runs = []
    for selection in (one, other):
        torch.manual_seed(0)
        module, trainer = Perceptron(), make_trainer(max_rounds=3, selection=selection, **flags)
        trainer.fit(module, federation())
        runs.append(
            (vector(module), [{k: x for k, x in row.items() if k not in (columns or ())} for row in rows_of(trainer)])
        )
    (first, rows), (second, others) = runs
    assert (np.array_equal(first, second) and rows == others) == (columns is not None)


def test_if_all_candidates_send_the_model_is_that_of_uniform_draws(make_trainer: MakeTrainer) -> None:
    ends = []
    for selection in (None, ByNorm(3), ByNorm(3, unbiased=False)):
        torch.manual_seed(0)
        module, trainer = Perceptron(), make_trainer(max_rounds=3, selection=selection)
        trainer.fit(module, federation())
        ends.append(vector(module))
    assert np.array_equal(ends[0], ends[1])
    assert np.array_equal(ends[0], ends[2])


class Linear(L.LightningModule):
    """Module whose gradient is the mean of a client's inputs, whatever the model."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return -(batch[0] @ self.w).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Steps(Callback):
    """Callback that keeps the change of the model in each round."""

    def __init__(self) -> None:
        self.models: list[np.ndarray] = [np.zeros(3)]

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.models.append(vector(pl_module))


@pytest.mark.parametrize(
    ("selection", "is_unbiased"),
    [
        (BySize(unbiased=True), True),
        (ByNorm(6), True),
        (ByNorm(6, approximate=True), True),
        (ByNorm(6, unbiased=False), False),
    ],
    ids=str,
)
@pytest.mark.matrix
def test_the_expected_update_is_that_of_full_participation(
    selection: ClientSelection, is_unbiased: bool, make_trainer: MakeTrainer
) -> None:
    """Each round is an independent draw, since clients' updates depend neither on the model nor on the order of samples."""
    rounds, data = 150, federation(batch_size=32)
    data.setup("fit")
    x = samples(sum(SIZES))[0].double().numpy()
    x[data.client_indices[1]] *= 6  # one client with a large update
    data = federation(batch_size=32, train=(torch.from_numpy(x).float(), samples(sum(SIZES))[1]))
    steps = Steps()
    trainer = make_trainer(
        max_rounds=rounds,
        clients_per_round=2,
        selection=selection,
        precision="64-true",
        callbacks=steps,
        val_every_n_rounds=rounds,
    )
    trainer.fit(Linear(), data)
    changes = np.diff(np.array(steps.models), axis=0)
    full = np.concatenate([x[rows] for rows in data.client_indices]).mean(0)
    errors = np.abs(changes.mean(0) - full) / (changes.std(0, ddof=1) / np.sqrt(rounds))
    assert selection.is_unbiased == is_unbiased == bool(np.all(errors < 4)), errors


# -- bits ------------------------------------------------------------------------------------------------------------------


def test_the_bits_of_asking(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=2, selection=PowerOfChoice(5))
    trainer.fit(Perceptron(), federation())
    assert bits_of(trainer, "up") == {"model": 3 * MODEL, "scalars": 5 * 32}
    assert bits_of(trainer, "down") == {"model": 5 * MODEL}
    row = trainer.fit_loop.rows[-1]
    assert [row[f"clients/{name}"] for name in ("selected", "asked", "accepted", "dropped", "rejected")] == [
        5,
        5,
        3,
        0,
        0,
    ]


def test_losses_of_the_last_training_cost_nothing(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=2, selection=PowerOfChoice(5, reuse_losses=True))
    trainer.fit(Perceptron(), federation())
    assert (bits_of(trainer, "up"), bits_of(trainer, "down")) == ({"model": 3 * MODEL}, {"model": 3 * MODEL})


@pytest.mark.parametrize("is_approximate", [False, True])
def test_the_bits_of_norms(is_approximate: bool, make_trainer: MakeTrainer) -> None:
    """Up a norm; down p_k, or Σ_j u_j and in each turn of Algorithm 2 two numbers up and one down."""
    trainer = make_trainer(max_rounds=1, clients_per_round=2, selection=ByNorm(6, approximate=is_approximate))
    trainer.fit(Perceptron(), federation())
    up, down, row = bits_of(trainer, "up"), bits_of(trainer, "down"), trainer.fit_loop.rows[-1]
    turns = (up["scalars"] - 6 * 32) // (6 * 64)
    assert (0 < turns <= 4) == is_approximate
    assert up == {"model": row["clients/sending"] * MODEL, "scalars": 6 * 32 + turns * 6 * 64}
    assert down == {"model": 6 * MODEL, "scalars": 6 * 32 * (1 + turns)}
    assert [row[f"clients/{name}"] for name in ("selected", "accepted", "rejected")] == [6, 6, 0]


def test_in_a_secure_sum_the_model_is_the_same_and_each_turn_is_a_sum(make_trainer: MakeTrainer) -> None:
    protocol, ends, rows = SecureAggregation(), [], []
    for given in (None, protocol):
        torch.manual_seed(0)
        module = Perceptron()
        trainer = make_trainer(
            max_rounds=1, clients_per_round=2, selection=ByNorm(6, approximate=True), secure_aggregation=given
        )
        trainer.fit(module, federation())
        ends.append(vector(module))
        rows.append(trainer.fit_loop.rows[-1])
    assert np.array_equal(*ends)
    n, sending = 6, int(rows[0]["clients/sending"])
    turns = (int(rows[0]["comm/uplink_bits"]) - sending * MODEL - n * 32) // (n * 64)
    # Each sum has an agreement, and of each client's numbers and one weight; those that send no update help to remove masks.
    num_sums = 1 + turns + 1
    agreed_up, agreed_down = protocol.agreement_bits(n)
    numbers = n * (1 + 1) + turns * n * (2 + 1) + sending * 26 + n
    unmasking = num_sums * n * n * protocol.share_bits
    assert rows[1]["comm/uplink_bits"] == num_sums * n * agreed_up + numbers * protocol.width(n) + unmasking
    assert rows[1]["comm/downlink_bits"] == n * MODEL + num_sums * n * agreed_down + n * 32 * (1 + turns)
    # A clock plans one turn, and that each client sends its update.
    up = 3 * (agreed_up + n * protocol.share_bits) + (2 + 3 + 27) * protocol.width(n)
    down = MODEL + 3 * agreed_down + 2 * 32
    assert trainer.fit_loop.engine.planned_bits(range(n)) == dict.fromkeys(range(n), (up, down))


def test_a_secure_sum_to_which_one_client_alone_sends_is_lost(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    module, steps = Perceptron(), Steps()
    steps.models = [vector(module)]
    selection, protocol = ByNorm(6, approximate=True), SecureAggregation()
    trainer = make_trainer(
        max_rounds=8, clients_per_round=2, selection=selection, secure_aggregation=protocol, callbacks=steps
    )
    trainer.fit(module, federation())
    sending = trainer.history["clients/sending"].to_numpy()
    assert {1, 2} <= {*sending}, "the test needs rounds in which one client sends"
    assert trainer.history["clients/lost"].tolist() == [6 * (count == 1) for count in sending]
    assert trainer.history["clients/accepted"].tolist() == [6 * (count != 1) for count in sending]
    changed = np.diff(np.array(steps.models), axis=0).any(1)
    assert changed.tolist() == [count > 1 for count in sending]
    first = list(sending).index(1) + 1
    assert f"Round {first}: only one of 6 clients sent its update, and a sum over one is its upload" in caplog.text


# -- what stays as it is ---------------------------------------------------------------------------------------------------


class Drops(Perceptron):
    """Perceptron with batch normalisation and dropout, which logs in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.drop(self.norm(self.hidden(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train/loss", loss := self.loss(batch))
        return loss


@pytest.mark.parametrize("algorithm", [FedAvg, lambda: FedRep(personal=["output"])], ids=["FedAvg", "FedRep"])
def test_asking_leaves_no_trace(algorithm: Callable[[], Algorithm], make_trainer: MakeTrainer) -> None:
    module, cohorts = Drops(), Cohorts()
    again = copy.deepcopy(module)
    asking = make_trainer(max_rounds=4, selection=PowerOfChoice(5), callbacks=cohorts, local_epochs=2)
    asking.fit(module, federation(), algorithm())
    told = make_trainer(max_rounds=4, selection=Listed(tuple(map(tuple, cohorts.rounds))), local_epochs=2)
    told.fit(again, federation(), algorithm())
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in module.state_dict().items())
    same = ("train/loss", "val/loss", "clients/samples", "clients/accepted")
    assert [[row[name] for name in same] for row in rows_of(asking)] == [
        [row[name] for name in same] for row in rows_of(told)
    ]


class Received(Callback):
    """Callback that compares what clients receive with what those that are asked have received."""

    def __init__(self) -> None:
        self.received: list[Tensor] = []
        self.asked: list[Tensor] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        _, job = trainer.fit_loop.engine.dry_broadcast(range(5))
        self.asked.append(job.received["model"].clone())

    def on_client_download(self, trainer: Any, pl_module: Any, client: int) -> None:
        self.received.append(torch.from_numpy(vector(pl_module)))


@pytest.mark.parametrize(
    "slots",
    [
        {"downlink": Cast("float16")},
        {"steps": [Compress(QSGD(levels=2))], "downlink": Followed(QSGD(levels=2))},
    ],
    ids=["Cast", "Followed"],
)
def test_clients_are_asked_about_the_model_that_they_receive(slots: Any, make_trainer: MakeTrainer) -> None:
    received = Received()
    trainer = make_trainer(max_rounds=3, selection=PowerOfChoice(5), callbacks=received, precision="64-true")
    trainer.fit(Perceptron(), federation(), FedAvg(**slots))
    assert [len(received.asked), len(received.received)] == [3, 9]
    assert all(torch.equal(received.asked[number // 3], model) for number, model in enumerate(received.received))


class Overwrites(Callback):
    """Callback that replaces the model as a round starts."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.output.bias.fill_(3.0 * (-1) ** trainer.current_epoch)


def test_clients_are_asked_about_a_model_that_a_callback_has_changed(make_trainer: MakeTrainer) -> None:
    given, module = problem(rounds=4), Perceptron()
    w, expected = vector(module), []
    for t in range(4):
        w[-2:] = 3.0 * (-1) ** t
        candidates = oracle.drawn_by_size(given, t, 6)
        largest = sorted(candidates, key=lambda k: -oracle.loss(given, w, k))[:3]
        expected.append([k for k in candidates if k in largest])
        w = w + oracle.mean_of(given, t, w, expected[-1])
    cohorts = Cohorts()
    trainer = make_trainer(
        max_rounds=4, selection=PowerOfChoice(6), callbacks=[Overwrites(), cohorts], precision="64-true"
    )
    trainer.fit(module, federation())
    assert cohorts.rounds == expected


def test_clients_of_several_models_tell_the_smallest_loss(make_trainer: MakeTrainer) -> None:
    torch.manual_seed(3)
    given, module, cohorts = problem(rounds=1), Perceptron(), Cohorts()
    start = vector(module)
    models = [start, *(turned_signs(start, number) for number in (1, 2))]
    losses = {k: [oracle.loss(given, w, k) for w in models] for k in range(6)}
    by_the_first = {*sorted(losses, key=lambda k: -losses[k][0])[:2]}
    by_the_best = {*sorted(losses, key=lambda k: -min(losses[k]))[:2]}
    flags = {"max_rounds": 1, "clients_per_round": 2, "precision": "64-true"}
    trainer = make_trainer(selection=PowerOfChoice(6), callbacks=cohorts, **flags)
    trainer.fit(module, federation(), IFCA(clusters=3))
    assert {*cohorts.rounds[0]} == by_the_best != by_the_first
    assert trainer.fit_loop.rows[0]["clients/asked_samples"] == 3 * sum(SIZES)


@each_selection
def test_both_runners_select_alike(selection: ClientSelection, make_trainer: MakeTrainer) -> None:
    assert_same(fits(make_trainer, Perceptron(), federation, selection=selection, clients_per_round=3))


@each_selection
def test_a_resumed_run_selects_as_the_whole(
    selection: ClientSelection, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    resumed_like_whole(make_trainer, tmp_path, Perceptron, selection=selection, clock=PHONES)


@pytest.mark.parametrize(
    "selection", [PowerOfChoice(5), PowerOfChoice(5, reuse_losses=True), ByNorm(6), Fastest(5)], ids=str
)
def test_a_pruned_model_goes_on(selection: ClientSelection, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=4, selection=selection, callbacks=Pruning(), clock=PHONES)
    trainer.fit(Perceptron(), federation())
    assert trainer.history["model/parameters"].tolist() == [26, 26, 20, 20]


# -- clients that fail, or are late -----------------------------------------------------------------------------------------


def test_clients_that_drop_out_say_nothing(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=8, selection=PowerOfChoice(5), dropout_rate=0.6)
    trainer.fit(Perceptron(), federation())
    rows = trainer.fit_loop.rows
    asked, accepted = ([int(row[f"clients/{name}"]) for row in rows] for name in ("asked", "accepted"))
    assert len(set(asked)) > 2, "the test needs rounds that differ"
    assert accepted == [min(3, count) for count in asked]
    assert [row["clients/dropped"] for row in rows] == [5 - count for count in asked]
    assert [row["comm/uplink_bits"] for row in rows] == [
        32 * a + MODEL * b for a, b in zip(asked, accepted, strict=True)
    ]


class Poison(Perceptron):
    """Perceptron whose loss is not finite for inputs of 100."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * torch.where(batch[0].max() > 99, torch.nan, 1.0)


@pytest.mark.parametrize("reuse", [False, True])
def test_clients_whose_loss_is_not_finite_come_last(reuse: bool, make_trainer: MakeTrainer) -> None:
    data = federation()
    data.setup("fit")
    x, y = samples(sum(SIZES))
    x[data.client_indices[4]] = 100.0
    cohorts = Cohorts()
    trainer = make_trainer(max_rounds=6, selection=PowerOfChoice(6, reuse_losses=reuse), callbacks=cohorts)
    trainer.fit(Poison(), federation(train=(x, y)))
    trained = [4 in clients for clients in cohorts.rounds]
    assert trained == ([False] * 6 if not reuse else [*trained[:2], *[False] * 4])
    assert sum(trained) == reuse


def test_updates_that_will_not_be_sent_are_dropped_early_and_seldom_looked_for(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped, looks = [], []
    drop, most_probable = senders._without_update, ByNorm.most_probable
    monkeypatch.setattr(senders, "_without_update", lambda result: dropped.append(result.client) or drop(result))
    monkeypatch.setattr(
        ByNorm, "most_probable", lambda self, norms, k: looks.append(len(norms)) or most_probable(self, norms, k)
    )
    trainer = make_trainer(max_rounds=1, clients_per_round=20, selection=ByNorm(40), limit_val_batches=0)
    trainer.fit(Perceptron(), federation((2,) * 40))
    never_sent = 40 - trainer.history["clients/sending"].tolist()[0]
    assert len(set(dropped)) == never_sent < len(dropped) <= 2 * never_sent, "once early, once at the end"
    assert 0 < len(looks) < 20


def test_if_all_norms_are_0_nobody_sends(make_trainer: MakeTrainer) -> None:
    module = Perceptron(lr=0.0)
    start = vector(module)
    trainer = make_trainer(max_rounds=2, selection=ByNorm(6))
    trainer.fit(module, federation())
    assert np.array_equal(vector(module), start)
    assert trainer.history["clients/sending"].tolist() == [0, 0]
    assert bits_of(trainer, "up") == {"scalars": 6 * 32}


class Counting(Perceptron):
    """Perceptron with a buffer that is not finite after inputs of 100, which its loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(1))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        self.largest += torch.where(x.max() > 99, torch.inf, 1.0)
        return super().loss((x * (x <= 99), y))


@pytest.mark.parametrize("module", [Poison, Counting])
def test_a_client_whose_numbers_are_not_finite_sends_and_is_rejected(module: Any, make_trainer: MakeTrainer) -> None:
    data = federation()
    data.setup("fit")
    x, y = samples(sum(SIZES))
    x[data.client_indices[4]] = 100.0
    trainer = make_trainer(max_rounds=3, selection=ByNorm(6))
    trainer.fit(module(), federation(train=(x, y)))
    assert trainer.history["clients/rejected"].tolist() == [1, 1, 1]
    assert np.isfinite(trainer.run.params).all()


@pytest.mark.parametrize("selection", [*EACH, Fastest(6)], ids=str)
@pytest.mark.parametrize(
    "flags", [{"over_selection": 1.3}, {"deadline": 4e-5}, {"deadline": 4e-5, "dropout_rate": 0.3}], ids=str
)
def test_late_clients_of_a_selection_are_not_waited_for(
    selection: ClientSelection, flags: Any, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(max_rounds=4, selection=selection, clock=PHONES, **flags)
    trainer.fit(Perceptron(), federation())
    rows = trainer.fit_loop.rows
    for row in rows:
        reached = row["clients/accepted"] + row["clients/late"]
        assert row["clients/selected"] == (row.get("clients/asked") or reached) + row["clients/dropped"]
    are_late = sum(row["clients/late"] for row in rows) > 0
    assert are_late or selection.repeats or selection == Fastest(6) or "over_selection" in flags


def test_candidates_are_drawn_from_those_that_are_there(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    there = tmp_path / "there.csv"
    there.write_text("client,start_seconds,end_seconds\n" + "".join(f"{k},0,9\n" for k in (0, 2, 3, 5)))
    for selection in (PowerOfChoice(6), ByNorm(4), BySize(unbiased=True), Fastest(6)):
        cohorts = Cohorts()
        trainer = make_trainer(
            clients_per_round=2, selection=selection, clock=PHONES, availability=there, callbacks=cohorts
        )
        trainer.fit(Perceptron(), federation())
        assert {client for clients in cohorts.rounds for client in clients} <= {0, 2, 3, 5}
        assert trainer.history.get("clients/asked", [4, 4])[1] == 4


@pytest.mark.parametrize("most", [None, 4])
def test_the_time_of_asked_clients_by_hand(most: int | None, make_trainer: MakeTrainer) -> None:
    """All are asked, and need a forward pass, the model and a number; the K chosen ones train and send besides."""
    asked = [size if most is None else min(size, most) for size in SIZES]
    clock = ClientClock(macs_per_second=1e6, uplink_mebibytes_per_second=1e-3, downlink_mebibytes_per_second=1e-2)
    cohorts, meter, selection = Cohorts(), EnergyMeter("wifi"), PowerOfChoice(6, loss_samples=most)
    trainer = make_trainer(max_rounds=1, selection=selection, clock=clock, callbacks=[cohorts, meter])
    trainer.fit(Perceptron(), federation())
    row, mebibyte = trainer.fit_loop.rows[-1], 8 * 2**20
    macs = row["model/macs"]
    seconds = [
        MODEL / mebibyte / 1e-2
        + macs * asked[k] / 1e6
        + 32 / mebibyte / 1e-3
        + (k in cohorts.rounds[0]) * (3 * macs * size / 1e6 + MODEL / mebibyte / 1e-3)
        for k, size in enumerate(SIZES)
    ]
    assert row["time/simulated_seconds"] == pytest.approx(max(seconds))
    trained = sum(SIZES[k] for k in cohorts.rounds[0])
    assert meter.amounts["joules_per_mac"] == pytest.approx(macs * (3 * trained + sum(asked)))
    assert row["clients/asked_samples"] == sum(asked)
    radio = (6 * 32 + 3 * MODEL) / mebibyte / 1e-3 + 6 * MODEL / mebibyte / 1e-2
    assert meter.amounts["radio_watts"] == pytest.approx(radio)


def test_a_wrapped_datamodule_gives_some_samples_of_a_client(make_trainer: MakeTrainer) -> None:
    data = Federated(BoringDataModule(), num_clients=4)
    trainer = make_trainer(max_rounds=1, clients_per_round=2, selection=PowerOfChoice(4, loss_samples=3))
    trainer.fit(BoringModel(), data)
    assert trainer.fit_loop.rows[-1]["clients/asked_samples"] == 4 * 3


def test_with_the_plain_clock_the_slowest_client_is_asked_and_trains(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1, selection=PowerOfChoice(6))
    trainer.fit(Perceptron(), federation())
    without = make_trainer(max_rounds=1, selection=Listed(((0, 1, 2, 3, 4, 5),)))
    without.fit(Perceptron(), federation())
    assert trainer.fit_loop.rows[-1]["time/simulated_seconds"] > 0
    clock, row = trainer.clock, trainer.fit_loop.rows[-1]
    macs = row["model/macs"] / clock.macs_per_second
    bits = (
        row["comm/uplink_bits"] / clock.uplink_mebibytes_per_second
        + row["comm/downlink_bits"] / clock.downlink_mebibytes_per_second
    )
    computed = row["time/simulated_seconds"] - bits / 8 / 2**20
    assert any(computed == pytest.approx(macs * (3 * size + max(SIZES)), rel=1e-6) for size in SIZES)


def test_the_fastest_of_a_trace_are_selected(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    speeds = {0: 1e6, 1: 9e6, 2: 2e6, 3: 8e6, 4: 1e5, 5: 7e6}
    lines = [f"{client},{speed},1,1" for client, speed in speeds.items()]
    header = "client,macs_per_second,uplink_mebibytes_per_second,downlink_mebibytes_per_second"
    trace.write_text("\n".join((header, *lines)) + "\n")
    cohorts = Cohorts()
    trainer = make_trainer(
        selection=Fastest(6), clients_per_round=3, callbacks=cohorts, clock=ClientClock(trace=trace), straggler_rate=0.9
    )
    trainer.fit(Perceptron(), federation((6,) * 6))
    assert [set(clients) for clients in cohorts.rounds] == [{1, 3, 5}] * 2


# -- refusals ---------------------------------------------------------------------------------------------------------------


class ByHand(Perceptron):
    """Perceptron that makes its steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


LOCAL, CENTRAL, SUMS = LocalPrivacy(noise_multiplier=0.5), ClientPrivacy(noise_multiplier=0), SecureAggregation()
REFUSED: list[tuple[ClientSelection, dict[str, Any], Any, str]] = [
    (
        PowerOfChoice(2),
        {},
        FedAvg,
        "PowerOfChoice draws 2 candidates of the 6 clients with samples, and selects 3 of them: give",
    ),
    (
        Fastest(9),
        {"clock": PHONES},
        FedAvg,
        "Fastest draws 9 candidates of the 6 clients with samples, and selects 3 of them",
    ),
    (ByNorm(2), {}, FedAvg, "ByNorm draws 2 candidates"),
    (
        PowerOfChoice(4),
        {"clock": PHONES, "over_selection": 1.5},
        FedAvg,
        "selects 5 of them: give candidates in [5, 6].",
    ),
    (Fastest(5), {}, FedAvg, "trainer.selection Fastest needs a clock that knows each client's time"),
    (
        InTurn(),
        {"clock": PHONES, "availability": "there.csv"},
        FedAvg,
        "InTurn needs all clients to be there, and with",
    ),
    (BySize(), {}, Centralised, "BySize selects clients for rounds, and Centralised has all samples in one place"),
    (BySize(), {}, lambda: FedKT(mode="one_shot"), "and FedKT has no rounds with clients: leave it out."),
    (BySize(), {}, FedBuff, "FedBuff draws a client whenever a place becomes idle"),
    (PowerOfChoice(5), {}, LocalOnly, "and those of LocalOnly send nothing: leave it out."),
    (PowerOfChoice(5), {}, HeteroFL, "and those of HeteroFL have smaller networks, whose losses cannot be compared"),
    (ByNorm(5), {}, HeteroFL, "trainer.selection ByNorm weighs uploads anew, and MaskedMean needs more than weights"),
    (ByNorm(5), {}, LocalOnly, "clients of LocalOnly do not send their whole update once in a round"),
    (
        ByNorm(5),
        {},
        lambda: FedAvg(aggregator=CoordinateMedian()),
        "CoordinateMedian needs more than weights: use WeightedMean.",
    ),
    (
        BySize(unbiased=True),
        {},
        FedNova,
        "BySize weighs uploads anew, and NormalisedMean needs more than weights",
    ),
    (ByNorm(5), {}, SCAFFOLD, "ControlUpdate needs the mean with equal weights of all clients that train"),
    (BySize(replace=True), {}, FedLDF, "weighs uploads anew"),
    (
        ByNorm(5),
        {"adversary": Adversary(SignFlip())},
        FedAvg,
        "trainer.adversary knows weights by numbers of samples alone",
    ),
    (
        InTurn(),
        {"privacy": CENTRAL},
        FedAvg,
        "InTurn draws clients, of which the claim knows those of privacy.sampling alone",
    ),
    (
        PowerOfChoice(5),
        {"privacy": LOCAL},
        FedAvg,
        "trainer.selection PowerOfChoice reads clients' losses without noise",
    ),
    (
        Fastest(5),
        {"privacy": LOCAL, "clock": PHONES},
        FedAvg,
        "trainer.selection Fastest reads clients' seconds without noise",
    ),
    (PowerOfChoice(5), {"secure_aggregation": SUMS}, FedAvg, "trainer.selection PowerOfChoice reads something of each"),
    (PowerOfChoice(5, reuse_losses=True), {"secure_aggregation": SUMS}, FedAvg, "reads something of each"),
    (ByNorm(5), {"secure_aggregation": SUMS}, FedAvg, "use another selection, such as ByNorm with approximate."),
]


@pytest.mark.parametrize(("selection", "flags", "algorithm", "sentence"), REFUSED)
def test_refusals_of_fit_and_plan_are_the_same(
    selection: ClientSelection,
    flags: Any,
    algorithm: Callable[[], Algorithm],
    sentence: str,
    make_trainer: MakeTrainer,
    tmp_path: Path,
) -> None:
    if "availability" in flags:
        (tmp_path / "there.csv").write_text(
            "client,start_seconds,end_seconds\n" + "".join(f"{k},0,9\n" for k in range(6))
        )
        flags = flags | {"availability": tmp_path / "there.csv"}
    said = []
    for run in ("fit", "plan"):
        with pytest.raises(UserError, match=re.escape(sentence)) as refused:
            getattr(make_trainer(selection=selection, **flags), run)(Perceptron(), Served(8), algorithm())
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_a_module_that_makes_its_steps_itself_has_no_loss_to_tell(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match="training_step of ByHand makes optimiser steps itself"):
        make_trainer(selection=PowerOfChoice(5)).fit(ByHand(), federation())
    make_trainer(selection=PowerOfChoice(5, reuse_losses=True)).fit(ByHand(), federation())


@pytest.mark.parametrize("selection", [ByNorm(5), InTurn()], ids=str)
def test_local_noise_allows_what_reads_no_samples(selection: ClientSelection, make_trainer: MakeTrainer) -> None:
    make_trainer(selection=selection, privacy=LOCAL).fit(Perceptron(), federation())


@pytest.mark.parametrize("selection", ["PowerOfChoice", PowerOfChoice], ids=str)
def test_a_selection_is_an_object(selection: Any, make_trainer: MakeTrainer) -> None:
    with pytest.raises(
        UserError, match=r"selection must be a ClientSelection of lightning_fl\.features\.selection, such as"
    ):
        make_trainer(selection=selection)


@dataclass(frozen=True)
class Chooses(Listed):
    """ClientSelection that reads losses, of a user's own."""

    reads = Reads.LOSSES
    chosen: tuple[int, ...] | None = None

    def choose(self, losses: Mapping[int, float], num_clients: int) -> Sequence[int]:
        return super().choose(losses, num_clients) if self.chosen is None else self.chosen


@dataclass(frozen=True)
class Reports(Listed):
    """ClientSelection that reads norms, of a user's own: the clients with the largest norms send."""

    reads = Reads.NORMS

    def probabilities(self, norms: Mapping[int, float], num_clients: int) -> dict[int, float]:
        least = sorted(norms.values())[-num_clients]
        return {client: float(norm >= least) for client, norm in norms.items()}


@dataclass(frozen=True)
class CountsTwice(Reports):
    """ClientSelection with two weights for an upload."""

    counts_alike = True


@pytest.mark.parametrize(
    ("selection", "sentence"),
    [
        (CountsTwice(), "CountsTwice reads norms, by which uploads count, so that draws cannot count besides"),
        (Listed(((0, 1, 6),)), "Listed draws clients that are not among those of its turn, such as [6]."),
        (
            Listed(((0, 1, 1),)),
            "Listed draws a client twice in a round: draw without replacement, or let repeats return",
        ),
        (Chooses(((0, 1, 2, 3),)), "Chooses reads losses, so its class needs the method choose(losses, num_clients)."),
        (
            Chooses(((0, 1, 2, 3),), (4,)),
            "Chooses chooses clients that have not told their loss: choose among the keys",
        ),
    ],
)
def test_a_selection_of_ones_own_is_refused_where_it_fails(
    selection: ClientSelection, sentence: str, make_trainer: MakeTrainer
) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        make_trainer(selection=selection).fit(Perceptron(), federation())


def test_a_selection_of_ones_own_by_losses_or_norms(make_trainer: MakeTrainer) -> None:
    chooses, reports = Chooses(((0, 1, 2, 3, 4),), (1, 4)), Reports((tuple(range(6)),))
    for selection, columns in ((chooses, {"asked": 5, "accepted": 2}), (reports, {"sending": 3, "accepted": 6})):
        trainer = make_trainer(max_rounds=1, selection=selection)
        trainer.fit(Perceptron(), federation())
        assert {name: trainer.fit_loop.rows[0][f"clients/{name}"] for name in columns} == columns
    with pytest.raises(UserError, match="Reports weighs uploads anew, and CoordinateMedian needs more than weights"):
        make_trainer(selection=reports).fit(Perceptron(), federation(), FedAvg(aggregator=CoordinateMedian()))


# -- the command line --------------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize(
    "selection",
    [
        "PowerOfChoice --trainer.selection.candidates 9",
        "PowerOfChoice --trainer.selection.candidates 9 --trainer.selection.reuse_losses true",
        "ByNorm --trainer.selection.candidates 10",
        "BySize --trainer.selection.unbiased true",
        "Fastest --trainer.selection.candidates 9 --trainer.clock.devices phones",
    ],
)
def test_two_processes_select_as_one(selection: str, tmp_path: Path) -> None:
    words = ("--model.network", "linear", "--trainer.max_rounds", "3", *f"--trainer.selection {selection}".split())
    one = ran(tmp_path / "one", *words, algorithm="FedAvg")
    agree(one, ran(tmp_path / "two", *words, num_processes=2, algorithm="FedAvg"))
