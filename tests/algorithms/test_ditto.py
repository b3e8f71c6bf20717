"""Test Ditto: the paper's loop, its limits, an untouched base method, and the clients' own models through every edge of a run."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import equal_states
from lightning.pytorch import Callback
from roster import problem
from torchmetrics import MeanMetric
from toys import SIZES, Normalised, Perceptron, Pruning, federation, read_rows, samples, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import SCAFFOLD, Algorithm, Ditto, FedAvg, FedBN, FedKT, FedProx, ServerM
from lightning_fl.callbacks import MagnitudePruning
from lightning_fl.communication.simulated_clock import SimulatedClock

MakeTrainer = Callable[..., FederatedTrainer]
OWN = "companion/model"


def own(trainer: FederatedTrainer) -> dict[int, np.ndarray]:
    return {client: state[OWN].double().numpy() for client, state in trainer.run.clients.items()}


@pytest.mark.parametrize("solver", ["explicit", "implicit"])
@pytest.mark.parametrize("straggler_rate", [0.0, 0.6])
def test_is_the_papers(solver: Any, straggler_rate: float, make_trainer: MakeTrainer) -> None:
    """Check the server's model and all clients' own; a straggler's own model makes as few steps as the other."""
    module = Perceptron()
    given = problem(rounds=5, epochs=3, straggler_rate=straggler_rate)
    w, models = oracle.ditto(given, vector(module), strength=0.7, implicit=solver == "implicit")
    trainer = make_trainer(max_rounds=5, local_epochs=3, precision="64-true", straggler_rate=straggler_rate)
    trainer.fit(module, federation(), Ditto(strength=0.7, solver=solver))
    np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-10)
    assert own(trainer).keys() == models.keys()
    for client, model in models.items():
        np.testing.assert_allclose(own(trainer)[client], model, rtol=0, atol=1e-10)


def test_without_a_pull_clients_train_alone(make_trainer: MakeTrainer) -> None:
    """Check λ = 0 with all clients in every round: v is SGD on the client's own batches from the first model on."""
    module, given = Perceptron(), problem(rounds=3, epochs=2, cohort_size=6)
    start = vector(module)
    trainer = make_trainer(max_rounds=3, clients_per_round=6, local_epochs=2, precision="64-true")
    trainer.fit(module, federation(), Ditto(strength=0))
    for client, model in own(trainer).items():
        v = start
        for t in range(3):
            v = oracle.sgd(v, given.batches(t, client), 0.1)
        np.testing.assert_allclose(model, v, rtol=0, atol=1e-10)


def test_with_the_strongest_pull_a_client_keeps_what_it_received(make_trainer: MakeTrainer) -> None:
    received: list[np.ndarray] = []

    class Watch(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            received.append(vector(pl_module))

    trainer = make_trainer(max_rounds=3, clients_per_round=6, callbacks=Watch())
    trainer.fit(Perceptron(), federation(), Ditto(strength=1e12, solver="implicit"))
    for model in own(trainer).values():
        np.testing.assert_allclose(model, received[-1], rtol=0, atol=1e-6)


class Logging(Normalised):
    """Module with dropout and a norm, which logs a value and a torchmetrics object."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss((torch.nn.functional.dropout(batch[0], 0.2), batch[1]))
        self.mean(loss)
        self.log("mean", self.mean)
        self.log("loss", loss)
        return loss


BASES: dict[str, Callable[[], Algorithm]] = {
    "FedAvg": FedAvg,
    "FedProx": partial(FedProx, mu=0.5),
    "SCAFFOLD": SCAFFOLD,
    "ServerM": ServerM,
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_the_server_does_not_notice_it(
    base: str, strength: float, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """Check models, bits, logs and the base method's states bit for bit; only what a client predicts with differs."""
    plain, runs = Logging(), []
    for name, algorithm in (("base", BASES[base]()), ("ditto", Ditto(BASES[base](), strength))):
        module = copy.deepcopy(plain)
        flags = {"max_rounds": 3, "local_epochs": 2, "straggler_rate": 0.3, "runner": "serial"}
        trainer = make_trainer(default_root_dir=tmp_path / name, **flags, **keeps_files)
        trainer.fit(module, federation(), algorithm)
        states = {
            k: {n: x for n, x in state.items() if not n.startswith("companion/")}
            for k, state in trainer.run.clients.items()
        }
        rows = [
            {n: x for n, x in row.items() if not n.startswith(("val/", "time/"))} for row in read_rows(tmp_path / name)
        ]
        ledger = trainer.run.ledger.state_dict()
        kept = {k: state for k, state in states.items() if state}
        runs.append([dict(module.state_dict()), trainer.run.server, kept, rows, ledger, trainer.run.num_steps])
    for expected, found in zip(*runs, strict=True):
        assert equal_states(expected, found)


def test_own_models_have_norms_of_their_own(make_trainer: MakeTrainer) -> None:
    """Check one client in one round at λ = 0: its own model, norm included, is that of FedAvg's client."""
    plain = Normalised()
    module = copy.deepcopy(plain)
    flags = {"max_rounds": 3, "clients_per_round": 1, "precision": "64-true"}
    make_trainer(**flags).fit(plain, federation(sizes=(10,)), FedAvg())
    trainer = make_trainer(**flags)
    trainer.fit(module, federation(sizes=(10,)), Ditto(strength=0))
    state = trainer.run.clients[0]
    np.testing.assert_allclose(state[OWN], vector(plain), rtol=0, atol=1e-12)
    statistics = torch.cat([plain.norm.running_mean, plain.norm.running_var])
    torch.testing.assert_close(state["companion/buffers"], statistics, rtol=0, atol=1e-12)
    assert torch.equal(state["companion/scalars/norm.num_batches_tracked"], plain.norm.num_batches_tracked)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_resumed_equals_uninterrupted_and_validate_gives_the_same(
    where: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    module, runs = Normalised(), {}
    for part, stops in {"whole": (4,), "resumed": (2, 4)}.items():
        for number, stop in enumerate(stops):
            flags = {"max_rounds": stop, "default_root_dir": tmp_path / part, "client_states": where}
            fitted = Normalised() if number else copy.deepcopy(module)
            trainer = make_trainer(**flags, **keeps_files)
            trainer.fit(fitted, federation(), Ditto(), ckpt_path="last" if number else None)
        runs[part] = dict(fitted.state_dict()), dict(trainer.run.clients.items()), read_rows(tmp_path / part)
    assert all(equal_states(whole, resumed) for whole, resumed in zip(runs["whole"], runs["resumed"], strict=True))
    checkpoint = tmp_path / "resumed" / "checkpoints" / "last.ckpt"
    (measured,) = make_trainer().validate(Normalised(), federation(), ckpt_path=checkpoint, algorithm=Ditto())
    row = runs["resumed"][2][-1]
    assert {name: float(row[name]) for name in measured} == pytest.approx(measured, abs=1e-7)


def test_each_client_predicts_with_its_own_model_and_newcomers_with_the_servers(make_trainer: MakeTrainer) -> None:
    module = Normalised()
    trainer = make_trainer(max_rounds=2, clients_per_round=2)
    trainer.fit(module, federation(), Ditto())
    losses = []
    for client in range(len(SIZES)):
        model = copy.deepcopy(module).eval()
        if client in trainer.run.clients:
            state = trainer.run.clients[client]
            torch.nn.utils.vector_to_parameters(state[OWN], model.parameters())
            model.norm.running_mean, model.norm.running_var = state["companion/buffers"].split(3)
        losses.append(float(model.loss(samples(10, seed=1))))
    assert 0 < len(own(trainer)) < len(SIZES)
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(np.mean(losses), rel=1e-5)
    assert float(module.eval().loss(samples(10, seed=1))) != pytest.approx(np.mean(losses), rel=1e-5)


class Poisoned(Perceptron):
    """Module whose loss may be NaN."""

    poisoned = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) * (torch.nan if self.poisoned else 1.0)


def test_a_rejected_client_keeps_its_own_model(make_trainer: MakeTrainer) -> None:
    kept: list[dict[int, np.ndarray]] = []

    class Watch(Callback):
        def on_client_download(self, trainer: Any, pl_module: Any, client: int) -> None:
            pl_module.poisoned = client == 0 and trainer.current_epoch == 1

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            kept.append(own(trainer))

    trainer = make_trainer(max_rounds=2, clients_per_round=6, callbacks=Watch())
    with pytest.warns(UserWarning, match="own model is not finite after its training, so the client keeps the earlier"):
        trainer.fit(Poisoned(), federation(), Ditto())
    assert trainer.callback_metrics["clients/rejected"] == 1
    np.testing.assert_array_equal(kept[0][0], kept[1][0])
    assert all((kept[0][k] != kept[1][k]).any() for k in range(1, 6))


def test_a_mask_and_a_pruning_reach_own_models(make_trainer: MakeTrainer) -> None:
    masked = make_trainer(max_rounds=4, callbacks=MagnitudePruning(rate=0.6, prune_epoch=1))
    masked.fit(Perceptron(), federation(), Ditto())
    assert masked.run.mask is not None
    assert 0 < int(masked.run.mask.sum()) < 26
    assert all((model[~masked.run.mask.numpy()] == 0).all() for model in own(masked).values())
    cut = make_trainer(max_rounds=4, callbacks=Pruning(when=2))
    module = Perceptron()
    cut.fit(module, federation(), Ditto())
    assert {len(model) for model in own(cut).values()} == {20}


def test_twice_the_work_takes_twice_the_simulated_time(make_trainer: MakeTrainer) -> None:
    seconds = []
    for algorithm in (FedAvg(), Ditto()):
        trainer = make_trainer(clock=SimulatedClock(computation_seconds=5.0))
        trainer.fit(Perceptron(), federation(), algorithm)
        seconds.append(trainer.run.simulated_seconds)
    assert seconds[1] - seconds[0] == pytest.approx(2 * 5.0)


@pytest.mark.parametrize(
    ("make", "flags", "words"),
    [
        (Ditto, {"runner": "stacked"}, ["runner 'stacked'", "'serial'"]),
        (lambda: Ditto(strength=20.0), {}, ["0.1 times 20", "solver='implicit'"]),
        (lambda: Ditto(strength=-1.0), {}, ["strength", "-1.0"]),
        (lambda: Ditto(solver="both"), {}, ["solver", "'both'", "implicit"]),
        (lambda: Ditto(Ditto()), {}, ["base", "Ditto itself"]),
        (lambda: Ditto(FedKT(mode="one_shot")), {}, ["base", "one model of each client", "FedKT"]),
        (lambda: Ditto(Algorithm(personal=["output"])), {}, ["Ditto's clients", "'output.weight'", "personal parts"]),
        (lambda: Ditto(FedBN()), {}, ["'norm.weight'", "personal parts"]),
        (lambda: FedBN(Ditto()), {}, ["FedBN's clients", "'norm.weight'", "personal parts"]),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    make: Callable[[], Algorithm], flags: dict[str, Any], words: list[str], make_trainer: MakeTrainer
) -> None:
    with pytest.raises(UserError) as error:
        make_trainer(**flags).fit(Normalised(), federation(), make())
    assert [word for word in words if word not in str(error.value)] == []
