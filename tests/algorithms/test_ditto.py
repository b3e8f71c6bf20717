"""Test Ditto: the paper's loop, its limits, and what clients predict with."""

from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from roster import problem
from toys import Perceptron, federation, own_models, vector

from lightning_fl import UserError
from lightning_fl.algorithms import Algorithm, Ditto


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
    assert own_models(trainer).keys() == models.keys()
    for client, model in models.items():
        np.testing.assert_allclose(own_models(trainer)[client], model, rtol=0, atol=1e-10)


def test_without_a_pull_clients_train_alone(make_trainer: MakeTrainer) -> None:
    """Check λ = 0 with all clients in every round: v is SGD on the client's own batches from the first model on."""
    module, given = Perceptron(), problem(rounds=3, epochs=2, cohort_size=6)
    start = vector(module)
    trainer = make_trainer(max_rounds=3, clients_per_round=6, local_epochs=2, precision="64-true")
    trainer.fit(module, federation(), Ditto(strength=0))
    for client, model in own_models(trainer).items():
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
    for model in own_models(trainer).values():
        np.testing.assert_allclose(model, received[-1], rtol=0, atol=1e-6)


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
