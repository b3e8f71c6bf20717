"""Test every algorithm of the roster: oracle, bits, resuming; and every part: order of clients, drop-outs, broken uploads."""

import copy
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, bits_of, equal_states, resumed_like_whole
from lightning.pytorch import Callback
from roster import COVERING, EVERY_OPTION, ROSTER, WHOLE, Entry, Turn, problem, properties_of
from toys import SIZES, Normalised, Perceptron, Poisoned, federation, samples, vector

from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import FedAvg
from lightning_fl.codecs import QSGD, Followed
from lightning_fl.engine.population import Population
from lightning_fl.features.attacks import Adversary, GaussianUpload
from lightning_fl.features.clock import ClientClock
from lightning_fl.steps import Compress

each_algorithm = pytest.mark.parametrize("name", ROSTER)
each_part = pytest.mark.parametrize("name", COVERING)
FEDERATED = [name for name in COVERING if ROSTER[name].algorithm().exchange.uses_link]
"""Those whose clients send something; the bounds without a link have one client, or a server's model that never changes."""


@pytest.mark.parametrize(("covering", "with_options"), [(COVERING, False), (EVERY_OPTION, True)])
def test_the_coverings_have_every_part_and_pair_and_are_smaller(covering: list[str], with_options: bool) -> None:
    whole, chosen = (
        {found for name in names for found in properties_of(ROSTER[name].algorithm(), with_options)}
        for names in (ROSTER, covering)
    )
    assert chosen == whole
    assert {("LocalOptimizer",), ("MaskedMean", "Apply"), ("FedKT.prepare",)} <= whole
    assert (("OneBit l1 global",) in whole) == with_options
    assert 20 < len(covering) < len(ROSTER)


@pytest.mark.parametrize(
    ("name", "width", "rounds", "tolerance"),
    [
        *((name, 64, 5, 1e-10) for name in ROSTER),
        *((name, 32, 3, 1e-5) for name in COVERING[:6]),
        *(pytest.param(name, 32, 3, 1e-5, marks=pytest.mark.matrix) for name in COVERING[6:]),
    ],
)
@pytest.mark.sampled(inf)
def test_matches_its_oracle_and_costs_what_the_papers_say(
    name: str, width: int, rounds: int, tolerance: float, make_trainer: MakeTrainer
) -> None:
    module = Perceptron()
    entry = ROSTER[name]
    expected = entry.oracle(problem(rounds=rounds, epochs=2, num_server=entry.num_server), vector(module))
    trainer = make_trainer(max_rounds=rounds, local_epochs=2, precision=f"{width}-true")
    trainer.fit(module, entry.federation(), algorithm=entry.algorithm())
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=tolerance)
    require_bits(trainer, entry, width)


def require_bits(trainer: FederatedTrainer, entry: Entry, width: int) -> None:
    """Check the bits of the last round by kind, and those of all rounds."""
    ledger = trainer.run.ledger
    costs_of_rounds = [entry.costs(Turn(round, clients=3, width=width)) for round in range(trainer.max_rounds)]
    for place, direction in enumerate(("up", "down")):
        costs = [both[place] for both in costs_of_rounds]
        if costs[-1] is None:
            continue
        assert ledger.bits(direction) == sum(costs[-1].values())
        assert "" in costs[-1] or bits_of(trainer, direction) == costs[-1]
        in_rounds = 8 * ledger.total_bytes(direction) - ledger.setup().get(direction, 0)
        assert in_rounds == sum(sum(kinds.values()) for kinds in costs)


@each_part
@pytest.mark.sampled(6)
def test_matches_its_oracle_where_clients_straggle(name: str, make_trainer: MakeTrainer) -> None:
    module, entry = Perceptron(), ROSTER[name]
    expected = entry.oracle(
        problem(rounds=5, epochs=3, num_server=entry.num_server, straggler_rate=0.6), vector(module)
    )
    trainer = make_trainer(max_rounds=5, local_epochs=3, straggler_rate=0.6, precision="64-true")
    trainer.fit(module, entry.federation(), algorithm=entry.algorithm())
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "where"),
    [*((name, "in the first cohort") for name in EVERY_OPTION), *((name, "everywhere") for name in COVERING)],
)
@pytest.mark.sampled(8)
def test_matches_its_oracle_where_an_input_is_zero(name: str, where: str, make_trainer: MakeTrainer) -> None:
    """Check coordinates without a gradient, in all rounds or in the first: their moments and changes are 0 until then."""
    module, entry = Perceptron(), ROSTER[name]
    x, y = samples(entry.num_samples)
    given = problem(rounds=4, epochs=2, num_server=entry.num_server)
    data = entry.federation()
    data.setup("fit")
    for client in range(len(given.x)) if where == "everywhere" else given.cohort(0):
        x[data.client_indices[client], 1] = 0
        given.x[client][:, 1] = 0
    if where == "everywhere":
        x[data.server_indices, 1] = 0
        given.server_x[:, 1] = 0
    expected = entry.oracle(given, vector(module))
    trainer = make_trainer(max_rounds=4, local_epochs=2, precision="64-true")
    trainer.fit(module, entry.federation(train=(x, y)), algorithm=entry.algorithm())
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in FEDERATED
        if name in WHOLE and name not in ("FedLDF-map", "FedBN", "IFCA") and "FedADP" not in name
    ],
)
def test_running_statistics_are_means_of_the_clients(name: str, make_trainer: MakeTrainer) -> None:
    """Check a feature that is 5 in every sample: its running mean rises from 0 towards 5 in every round, and never beyond.

    FedLDF's map names the layers of another network, FedADP sends no unit that hardly changes, FedBN no statistics, nor do
    methods whose clients train smaller networks, and IFCA refuses them.
    """
    entry = ROSTER[name]
    x, y = samples(entry.num_samples)
    x[:, 0] = 5
    means = [0.0]

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            means.append(float(pl_module.norm.running_mean[0]))

    trainer = make_trainer(max_rounds=3, precision="64-true", callbacks=Watch())
    trainer.fit(Normalised(), entry.federation(train=(x, y)), entry.algorithm())
    assert len(means) == 4
    assert means == sorted(set(means)), "it rises"
    assert means[-1] < 5


def test_the_seed_decides_cohort_and_order(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    module = Perceptron()
    start = vector(module)
    make_trainer(max_rounds=3, precision="64-true").fit(module, federation())
    matches = [
        np.abs(vector(module) - ROSTER["FedAvg"].oracle(problem(rounds=3, seed=seed), start)).max() < 1e-10
        for seed in (7, 0)
    ]
    assert matches == [True, False]


@each_algorithm
@pytest.mark.sampled(6)
def test_resumed_equals_uninterrupted_bit_for_bit(name: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    resumed_like_whole(make_trainer, tmp_path, Perceptron, ROSTER[name].federation, ROSTER[name].algorithm)


@each_part
def test_order_of_the_cohort_does_not_matter(
    name: str, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Perceptron()
    second = copy.deepcopy(first)
    make_trainer(max_rounds=3, clients_per_round=6).fit(first, ROSTER[name].federation(), ROSTER[name].algorithm())
    select = Population.select
    monkeypatch.setattr(Population, "select", lambda self, run: sorted(select(self, run)))
    make_trainer(max_rounds=3, clients_per_round=6).fit(second, ROSTER[name].federation(), ROSTER[name].algorithm())
    np.testing.assert_allclose(vector(first), vector(second), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FEDERATED)
def test_a_round_that_nobody_survives_changes_nothing(
    name: str, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering = Population.answering
    monkeypatch.setattr(
        Population, "answering", lambda self, run, selected: [] if run.round == 1 else answering(self, run, selected)
    )
    states: dict[tuple[int, str], Any] = {}

    class Watch(Callback):
        def note(self, trainer: Any, moment: str) -> None:
            run = trainer.run
            kept = {"params": run.params, "server": run.server, "clients": run.clients, "counters": run.counters}
            states[trainer.current_epoch, moment] = copy.deepcopy(kept)
            states[trainer.current_epoch, moment]["metrics"] = dict(trainer.callback_metrics)

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.note(trainer, "start")

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.note(trainer, "end")

    make_trainer(max_rounds=3, callbacks=Watch()).fit(Perceptron(), ROSTER[name].federation(), ROSTER[name].algorithm())
    metrics = states[1, "end"].pop("metrics")
    states[1, "start"].pop("metrics")
    assert equal_states(states[1, "start"], states[1, "end"])
    assert [int(metrics[f"clients/{x}"]) for x in ("selected", "accepted", "rejected", "dropped")] == [3, 0, 0, 3]
    assert metrics["comm/uplink_bits"] == 0
    assert metrics["comm/downlink_bits"] > 0
    assert not torch.equal(states[2, "start"]["params"], states[2, "end"]["params"])


@pytest.mark.parametrize("name", [name for name in (*FEDERATED, "LocalOnly") if name != "PerFedAvg"])
def test_a_nan_upload_is_as_if_its_client_were_absent(name: str, make_trainer: MakeTrainer) -> None:
    """Check all methods but one whose clients leave out a last minibatch that has no second one."""
    entry = ROSTER[name]
    x, y = samples(entry.num_samples)
    data = entry.federation()
    data.setup("fit")
    bad = 3
    x[data.client_indices[bad][0]] = 1000.0
    rejected = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            metrics = trainer.callback_metrics
            rejected.append((int(metrics["clients/rejected"]), int(metrics["clients/accepted"])))
            up, _ = entry.costs(Turn(trainer.current_epoch, clients=6, rejected=1, width=64))
            bits = metrics["comm/uplink_bits"]
            assert up is None or bits == sum(up.values()), "bits of a rejected upload still count"
            assert torch.isfinite(metrics["train/loss"])

    module = Poisoned()
    given = problem(rounds=3, cohort_size=6, absent=frozenset({bad}), num_server=entry.num_server)
    expected = entry.oracle(given, vector(module))
    trainer = make_trainer(max_rounds=3, clients_per_round=6, precision="64-true", callbacks=Watch())
    trainer.fit(module, entry.federation(train=(x, y)), entry.algorithm())
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)
    assert rejected == [(1, 5)] * 3


@pytest.mark.filterwarnings("ignore:.*has no batch norm")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in COVERING else pytest.mark.slow) for name in ROSTER]
)
def test_a_client_without_samples_changes_nothing(name: str, make_trainer: MakeTrainer) -> None:
    """The run of the others is the same bit for bit: N, wherever a method has it, is the number of clients with samples."""
    entry, start, ends = ROSTER[name], Perceptron(), []
    for num_empty in (0, 2):
        module = copy.deepcopy(start)
        trainer = make_trainer(max_rounds=3, clients_per_round=0.5, local_epochs=2)
        trainer.fit(module, entry.federation(num_empty=num_empty), algorithm=entry.algorithm())
        values = {key: float(value) for key, value in trainer.callback_metrics.items() if not key.startswith("time/")}
        ends.append(((vector(module).tolist(), values), trainer.run))
    (without, run), (beside, other) = ends
    assert beside == without
    assert equal_states(dict(other.clients), dict(run.clients))
    assert equal_states(other.server, run.server)
    assert other.ledger.total_bytes("up") == run.ledger.total_bytes("up")
    assert other.ledger.total_bytes("down") == run.ledger.total_bytes("down")


def test_clients_without_samples_change_no_draw(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Attackers, devices, the server's random codec and drop-outs are drawn as without them."""
    start, ends = Perceptron(), []
    (tmp_path / "devices.csv").write_text(
        "computation,communication\n" + "".join(f"{10**k},{1000 * (k + 1)}\n" for k in range(9))
    )
    for sizes in (SIZES, (*SIZES, 0, 0)):
        module, algorithm = copy.deepcopy(start), FedAvg(steps=[Compress(QSGD())], downlink=Followed(QSGD()))
        trainer = make_trainer(
            max_rounds=4,
            clients_per_round=0.7,
            dropout_rate=0.2,
            adversary=Adversary(GaussianUpload(), 0.4),
            clock=ClientClock(trace=tmp_path / "devices.csv"),
        )
        trainer.fit(module, federation(sizes), algorithm=algorithm)
        ends.append((vector(module).tolist(), list(trainer.history["attack/attackers"]), trainer.run.simulated_seconds))
    assert ends[0] == ends[1]
