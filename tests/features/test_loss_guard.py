"""Test the optional rejection of clients, server steps and rounds whose loss explodes."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import RUNNERS, MakeTrainer, agree, equal_states, ran, resumed_like_whole
from lightning.pytorch import Callback
from roster import ROSTER, Turn, problem
from toys import SIZES, Normalised, Perceptron, Remembering, Served, federation, read_rows, samples, vector

from lightning_fl import UserError
from lightning_fl.algorithms import (
    APFL,
    SCAFFOLD,
    Algorithm,
    Ditto,
    FedAvg,
    FedBN,
    FedDA,
    FedDU,
    FedDUM,
    FedOpt,
    PFedMe,
    PruneFL,
    ServerAdam,
    ServerM,
)
from lightning_fl.engine.roles import Roles
from lightning_fl.engine.server_steps import take_steps
from lightning_fl.features.loss_guard import LossGuard, RoundGuard
from lightning_fl.rules import DecoupledMomentum
from lightning_fl.slots import RoundContext, ServerTurn, State, Step
from lightning_fl.state.run_state import Run
from lightning_fl.steps import Apply, SharedMomentum
from lightning_fl.vectors.layout import NO_LAYOUT


def loss(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    return float(0.5 * np.square(oracle.output(w, x) - y).sum(1).mean())


def trained(w: np.ndarray, batches: Any) -> tuple[np.ndarray, list[float]]:
    """Return a client's model, and for every sample that it reads the mean loss of the sample's batch."""
    losses, y = [], w.copy()
    for batch in batches:
        losses += [loss(y, *batch)] * len(batch[0])
        y = y - 0.1 * oracle.gradient(y, *batch)
    return y, losses


@RUNNERS
@pytest.mark.parametrize(("num_server", "factor"), [(0, 1.02), (0, 1.2), (9, 1.01), (9, 1.1)])
def test_clients_whose_last_loss_explodes_do_not_count(
    num_server: int, factor: float, runner: Any, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    module = Perceptron()
    w, given = vector(module), problem(rounds=4, epochs=2, cohort_size=5, num_server=num_server)
    reference = loss(w, given.server_x, given.server_y) if num_server else None
    rejected = []
    for t in range(4):
        clients = [(SIZES[k], *trained(w, given.batches(t, k))) for k in given.cohort(t)]
        accepted = [
            (n, y) for n, y, losses in clients if reference is None or np.mean(losses[-n:]) < factor * reference
        ]
        rejected.append(5 - len(accepted))
        if accepted:
            w = sum(n * y for n, y in accepted) / sum(n for n, _ in accepted)
        if reference is None:
            reference = np.mean([value for _, _, losses in clients for value in losses])
    assert 0 < sum(rejected) < 20
    flags: dict[str, Any] = {"local_epochs": 2, "clients_per_round": 5, "precision": "64-true", "runner": runner}
    trainer = make_trainer(max_rounds=4, loss_guard=LossGuard(clients=factor), **flags, **keeps_files)
    trainer.fit(module, Served(num_server) if num_server else federation(), FedAvg())
    np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-10)
    rows = read_rows(tmp_path)
    assert [int(row["clients/rejected"]) for row in rows] == rejected
    assert [int(row["comm/uplink_bits"]) for row in rows] == [5 * 64 * 26] * 4, "bits of rejected uploads still count"


class Knows(Callback):
    """Callback that sets the initial loss, which otherwise is only known in the first round."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.run.features["loss_guard"] = {"initial_loss": 1.0}


@pytest.mark.parametrize("name", ["SCAFFOLD", "FedNova", "FedAdamSSM", "OneBitAdam", "PruneFL", "FedDUM"])
def test_an_exploding_client_is_as_if_it_were_absent(name: str, make_trainer: MakeTrainer) -> None:
    """Test methods with all kinds of states; the client's targets are a thousand times too large."""
    entry, bad = ROSTER[name], 3
    x, y = samples(entry.num_samples)
    data = entry.federation()
    data.setup("fit")
    y[data.client_indices[bad]] *= 1000
    module, rejected = Perceptron(), []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            metrics = trainer.callback_metrics
            rejected.append(int(metrics["clients/rejected"]))
            up, _ = entry.costs(Turn(trainer.current_epoch, clients=6, width=64))
            assert metrics["comm/uplink_bits"] == sum(up.values())

    given = problem(rounds=3, cohort_size=6, absent=frozenset({bad}), num_server=entry.num_server)
    expected = entry.oracle(given, vector(module))
    flags: dict[str, Any] = {"max_rounds": 3, "clients_per_round": 6, "precision": "64-true"}
    trainer = make_trainer(**flags, callbacks=[Knows(), Watch()], loss_guard=LossGuard(clients=100))
    trainer.fit(module, entry.federation(train=(x, y)), entry.algorithm())
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)
    assert rejected == [1, 1, 1]


@pytest.mark.parametrize("factor", [1.002, 1.05])
def test_a_server_step_that_makes_the_loss_explode_is_undone(factor: float, make_trainer: MakeTrainer) -> None:
    """Test FedDU with an α so large that some of its updates go far beyond the server's model."""
    module, undone = Perceptron(lr=0.3), []
    w, given = vector(module), problem(rounds=6, num_server=9)
    given.learning_rate = 0.3
    for t in range(6):
        half = oracle.average(given, t, w, oracle.sgd)
        w = oracle.dynamic_update(given, t, half, C=60)
        before, after = (loss(v, given.server_x, given.server_y) for v in (half, w))
        undone.append(after >= factor * before)
        w = half if undone[-1] else w
    assert 0 < sum(undone) < 6

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            reported.append(bool(trainer.callback_metrics["guard/undone_steps"]))

    reported: list[bool] = []
    trainer = make_trainer(
        max_rounds=6, precision="64-true", callbacks=Watch(), loss_guard=LossGuard(server_steps=factor)
    )
    trainer.fit(module, Served(9), FedDU(C=60))
    np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-9)
    assert reported == undone


def test_a_server_step_that_is_undone_leaves_no_counters_and_no_steps(make_trainer: MakeTrainer) -> None:
    initial = Normalised()
    plain, guarded = copy.deepcopy(initial), copy.deepcopy(initial)
    alone = make_trainer(max_rounds=3, dropout_rate=0.0)
    alone.fit(plain, Served(9))
    trainer = make_trainer(max_rounds=3, loss_guard=LossGuard(server_steps=1.0 + 1e-12))
    trainer.fit(guarded, Served(9), FedDU(C=1e6))
    assert trainer.callback_metrics["guard/undone_steps"] == 1
    assert equal_states(plain.state_dict(), guarded.state_dict())
    assert trainer.global_step == alone.global_step


@dataclass(frozen=True)
class Ruins(Step):
    """Step that multiplies the proposal by a hundred, and changes everything else that it can."""

    def init(self, params: torch.Tensor) -> State:
        return {"turns": torch.zeros(1)}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        turn.proposal, turn.mask = 100 * turn.proposal, torch.zeros_like(turn.proposal, dtype=torch.bool)
        turn.merged["moments/momentum"] = turn.proposal
        turn.metrics["ruins"] = 1.0
        return {"turns": state["turns"] + 1}


def test_a_step_that_is_undone_leaves_no_trace(make_trainer: MakeTrainer) -> None:
    one = Perceptron()
    other, fits = copy.deepcopy(one), []
    rule, steps = DecoupledMomentum(beta=0.8), (Apply(), Ruins(), SharedMomentum())
    for module, algorithm in ((one, FedDA(beta=0.8)), (other, Algorithm(rule=rule, steps=steps))):
        trainer = make_trainer(max_rounds=3, loss_guard=LossGuard(server_steps=10) if fits else LossGuard())
        trainer.fit(module, Served(9), algorithm)
        fits.append(trainer)
    np.testing.assert_array_equal(vector(one), vector(other))
    run = fits[1].run
    assert run.mask is None
    assert equal_states(run.server["2:SharedMomentum"], fits[0].run.server["1:SharedMomentum"])
    assert float(run.server["1:Ruins"]["turns"]) == 0
    assert fits[1].callback_metrics["guard/undone_steps"] == 1
    assert "ruins" not in fits[1].callback_metrics


@RUNNERS
def test_a_round_that_makes_the_loss_explode_is_undone(runner: Any, make_trainer: MakeTrainer) -> None:
    """Test a server step of eight times the clients' mean update."""
    module, losses, undone = Perceptron(), [], []
    start = w = vector(module)
    given = problem(rounds=8, num_server=9)
    for t in range(8):
        proposal = w + 8 * (oracle.average(given, t, w, oracle.sgd) - w)
        losses.append(loss(proposal, given.server_x, given.server_y))
        undone.append(losses[-1] >= 1.1 * loss(start, given.server_x, given.server_y))
        w = w if undone[-1] else proposal
    assert 0 < sum(undone) < 8

    reported: list[tuple[float, bool, int]] = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            metrics = trainer.callback_metrics
            reported.append(
                (float(metrics["guard/loss"]), bool(metrics["guard/undone"]), int(metrics["clients/accepted"]))
            )

    flags: dict[str, Any] = {"max_rounds": 8, "precision": "64-true", "runner": runner, "callbacks": Watch()}
    trainer = make_trainer(**flags, loss_guard=LossGuard(rounds=1.1))
    trainer.fit(module, Served(9), Algorithm(steps=(Apply(learning_rate=8.0),)))
    np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-9)
    np.testing.assert_allclose([value for value, _, _ in reported], losses, rtol=1e-6)
    assert [(flag, accepted) for _, flag, accepted in reported] == [(flag, 3) for flag in undone]
    assert trainer.run.ledger.total_bits["up"]["model"] == 8 * 3 * 64 * 26


def test_the_loss_is_that_of_the_proposal_whose_frozen_parts_stay() -> None:
    measured = []

    def loss(params: torch.Tensor, buffers: torch.Tensor) -> float:
        measured.append(params.tolist())
        return 1.0

    nothing: Any = None
    start, empty = torch.zeros(2), torch.zeros(0)
    server: Any = SimpleNamespace(loss=loss, counters={}, num_steps=0)
    context = RoundContext(NO_LAYOUT, NO_LAYOUT, num_clients=1)
    merged = {"model": torch.tensor([5.0, 7.0])}
    turn = ServerTurn(context, server, 0, [0], 1.0, {}, start, empty, merged, start, empty)
    guard = RoundGuard(LossGuard(rounds=2), Run(0, NO_LAYOUT, NO_LAYOUT, start, empty, {}))
    roles = guard.around(Roles(nothing, nothing, nothing, nothing, nothing), nothing)
    algorithm = Algorithm(steps=[Apply()])
    proposal = take_steps(algorithm, roles, turn, {key: {} for key in algorithm.step_names()}, untrained=[slice(0, 1)])
    assert measured == [proposal.params.tolist()] == [[0, 7]]


class Explodes(Callback):
    """Callback that allows no growth of the loss from round 1 on, and records the states."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        self.undone: list[bool] = []
        self.steps: list[int] = []

    def note(self, trainer: Any) -> None:
        run = trainer.run
        kept = {"params": run.params, "buffers": run.buffers, "server": run.server, "counters": run.counters}
        kept |= {"clients": dict(run.clients), "memory": dict(run.client_memory), "mask": run.mask}
        self.states.append(copy.deepcopy(kept))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer)
        if trainer.current_epoch == 1:
            trainer.run.features["loss_guard"] = {"initial_loss": 1e-9}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer)
        self.undone.append(bool(trainer.callback_metrics["guard/undone"]))
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        (Perceptron, SCAFFOLD),
        (Perceptron, Remembering),
        (Normalised, FedDUM),
        (Normalised, ServerM),
        (Normalised, ServerAdam),
        (Normalised, partial(FedOpt, torch.optim.Adam)),
        (Perceptron, partial(Algorithm, personal=["output"])),
        (Normalised, FedBN),
        (Normalised, Ditto),
        (Normalised, APFL),
        (Normalised, partial(PFedMe, strength=5.0)),
        (Perceptron, partial(PruneFL, interval=2, initial_passes=0, max_density=0.5)),
    ],
    ids=(
        *("SCAFFOLD", "Remembering", "FedDUM", "ServerM", "ServerAdam", "FedOpt"),
        *("personal", "FedBN", "Ditto", "APFL", "PFedMe", "PruneFL"),
    ),
)
def test_a_round_that_is_undone_leaves_no_trace(kind: Any, algorithm: Any, make_trainer: MakeTrainer) -> None:
    """Check the model and the states of server, clients and their codecs; steps and bits still count."""
    watch = Explodes()
    trainer = make_trainer(max_rounds=2, callbacks=watch, loss_guard=LossGuard(rounds=1e6))
    trainer.fit(kind(), Served(9), algorithm())
    assert watch.undone == [False, True]
    begin, first, second, end = watch.states
    assert not torch.equal(begin["params"], first["params"])
    assert equal_states(second, end)
    assert watch.steps[0] < watch.steps[1]
    assert sum(trainer.run.ledger.round_bits["up"].values()) > 0
    assert trainer.run.round == 2


def test_without_a_guard_nothing_is_measured(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fl.engine.server_side.ServerSide.loss", None)
    monkeypatch.setattr("lightning_fl.flat_module.module_logs.LogCollector.last_loss", None)
    trainer = make_trainer()
    trainer.fit(Perceptron(), Served(9), FedDU())
    assert "loss_guard" not in trainer.run.features
    assert not any(name.startswith("guard") for name in trainer.callback_metrics)


@pytest.mark.parametrize("num_server", [0, 9])
def test_resumed_equals_uninterrupted(num_server: int, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Check that the initial loss is saved and restored."""
    guard = LossGuard(clients=1.05, rounds=1.01) if num_server else LossGuard(clients=1.05)
    data = partial(Served, num_server) if num_server else federation
    method, flags = partial(ServerM, beta=0.5), {"clients_per_round": 5, "loss_guard": guard}
    _, trainer = resumed_like_whole(make_trainer, tmp_path, Perceptron, data, method, end=5, **flags)
    assert trainer.run.features["loss_guard"]["initial_loss"] > 0
    assert any(int(row["clients/rejected"]) for row in read_rows(tmp_path / "whole"))


@pytest.mark.slow
def test_two_processes_judge_alike(tmp_path: Path) -> None:
    words = ("--model.network", "linear", "--model.learning_rate", "0.5", "--trainer.local_steps", "3")
    guard = ("--trainer.loss_guard.clients", "2", "--trainer.loss_guard.rounds", "1.1", "--trainer.max_rounds", "4")
    one = ran(tmp_path / "one", *words, *guard, algorithm="ServerM")
    assert any(int(row["clients/rejected"]) for row in one[0])
    assert {float(row["guard/undone"]) for row in one[0]} == {0.0, 1.0}
    agree(one, ran(tmp_path / "two", *words, *guard, num_processes=2, algorithm="ServerM"))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda fit: LossGuard(clients=1.0), r"loss_guard.clients, the factor .*, must be a number above 1, got 1.0"),
        (lambda fit: LossGuard(rounds=-3), r"loss_guard.rounds, the factor .*, must be a number above 1, got -3"),
        (
            lambda fit: fit(LossGuard(rounds=3), federation(), FedAvg()),
            r"loss_guard.rounds needs the loss on .*server_fraction",
        ),
        (
            lambda fit: fit(LossGuard(server_steps=3), federation(), FedAvg()),
            r"loss_guard.server_steps needs the loss on .*server_fraction",
        ),
        (
            lambda fit: fit(LossGuard(server_steps=3), Served(9), ServerM()),
            "server_steps=3 needs a server step .* as in FedDU; the steps here are Apply, Momentum: use loss_guard.rounds",
        ),
    ],
)
def test_what_cannot_be_guarded_is_refused(
    make: Callable[[Any], Any], sentence: str, make_trainer: MakeTrainer
) -> None:
    def fit(guard: LossGuard, data: Any, algorithm: Algorithm) -> None:
        make_trainer(loss_guard=guard).fit(Perceptron(), data, algorithm)

    with pytest.raises(UserError, match=sentence):
        make(fit)
