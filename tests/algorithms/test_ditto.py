"""Test Ditto: the paper's loop, its limits, and what clients predict with."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from lightning.pytorch import Callback
from roster import problem
from toys import SIZES, Normalised, Perceptron, federation, samples, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import Algorithm, Ditto, FedAvg

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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Ditto(strength=20.0), ["0.1 times 20", "solver='implicit'"]),
        (lambda: Ditto(strength=-1.0), ["strength", "-1.0"]),
        (lambda: Ditto(solver="both"), ["solver", "'both'", "implicit"]),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    make: Callable[[], Algorithm], words: list[str], make_trainer: MakeTrainer
) -> None:
    with pytest.raises(UserError) as error:
        make_trainer().fit(Perceptron(), federation(), make())
    assert [word for word in words if word not in str(error.value)] == []
