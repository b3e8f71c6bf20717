"""Test FedDyn: its fixed point, its states, clients that drop out or never take part, refusals."""

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from roster import problem
from torch import Tensor
from toys import SIZES, Perceptron, federation, vector
from unequal import Linear, optimum, quadratics, unequal

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms import Algorithm, FedAvg, FedBuff, FedDyn
from lightning_fl.codecs import QSGD, Cast, Dense, ErrorFeedback, TopK
from lightning_fl.rules import DynamicRegularisation
from lightning_fl.steps import CorrectedMean

N = len(SIZES)


def mean_gradient(trainer: FederatedTrainer) -> Tensor:
    return trainer.run.server["0:CorrectedMean"]["mean_gradient"]


@pytest.mark.parametrize(("cohort_size", "rounds", "runner"), [(3, 20, "serial"), (2, 40, "stacked")])
@pytest.mark.matrix
def test_its_fixed_point_is_the_optimum_and_that_of_fedavg_is_not(
    cohort_size: int, rounds: int, runner: str, make_trainer: MakeTrainer
) -> None:
    """Test clients with other minima, curvatures and numbers of samples, each of which counts alike."""
    flags = {"max_rounds": rounds, "clients_per_round": cohort_size, "local_steps": 5, "precision": "64-true"}
    distances = []
    for algorithm in (FedDyn(alpha=1.0), Algorithm(aggregator=WeightedMean("uniform"))):
        module = Linear(lr=0.3)
        make_trainer(**flags, runner=runner).fit(module, unequal(), algorithm)
        distances.append(np.abs(vector(module) - optimum()).max())
    assert distances[0] < 1e-4
    assert distances[1] > 0.1


def test_at_the_fixed_point_clients_keep_their_gradients(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=30, clients_per_round=3, local_steps=5, precision="64-true")
    trainer.fit(Linear(lr=0.3), unequal(), FedDyn(alpha=1.0))
    assert len(trainer.run.clients) == 3
    for (curvature, slope), state in zip(quadratics(), map(trainer.run.clients.get, range(3)), strict=True):
        gradient = curvature @ optimum() - slope
        np.testing.assert_allclose(state["gradient"].numpy(), gradient, rtol=0, atol=1e-4)
        assert np.abs(gradient).max() > 0.1
    assert mean_gradient(trainer).abs().max() < 1e-4


def test_states_are_those_of_the_paper(make_trainer: MakeTrainer) -> None:
    module, expected = Perceptron(), {}
    oracle.feddyn(problem(rounds=6), vector(module), alpha=0.5, gradients=expected)
    trainer = make_trainer(max_rounds=6, precision="64-true")
    trainer.fit(module, federation(), FedDyn(alpha=0.5))
    np.testing.assert_allclose(mean_gradient(trainer).numpy(), expected.pop(-1), rtol=0, atol=1e-10)
    assert trainer.run.clients.keys() == expected.keys()
    for client, gradient in expected.items():
        np.testing.assert_allclose(trainer.run.clients[client]["gradient"].numpy(), gradient, rtol=0, atol=1e-10)


UPLINKS = [Dense(), QSGD(2), TopK(0.2), ErrorFeedback(TopK(0.3)), Cast()]


@pytest.mark.parametrize("uplink", UPLINKS, ids=repr)
def test_the_servers_state_is_the_mean_of_all_clients_whatever_the_uplink(
    uplink: Any, make_trainer: MakeTrainer
) -> None:
    """Test that those that drop out keep theirs, and those that have never taken part count with 0."""
    gaps, present = [], []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            states = trainer.run.clients
            total = sum(state["gradient"] for state in states.values()) / N if states else torch.zeros(26)
            gaps.append(float((mean_gradient(trainer) - total).abs().max()))
            present.append(len(states))

    trainer = make_trainer(max_rounds=8, clients_per_round=2, dropout_rate=0.3, callbacks=Watch())
    trainer.fit(Perceptron(), federation(), FedDyn(0.5, uplink=uplink))
    assert present[0] < N
    assert present[0] < present[-1] <= N
    assert max(gaps) < 1e-6
    assert mean_gradient(trainer).abs().max() > 0.01


@pytest.mark.matrix
def test_the_fixed_point_is_the_optimum_with_a_lossy_uplink_too(make_trainer: MakeTrainer) -> None:
    """Test that the errors of a quantiser, which add up in h, move no fixed point, because clients know them."""
    module = Linear(lr=0.3)
    trainer = make_trainer(max_rounds=60, clients_per_round=3, local_steps=5, precision="64-true", runner="serial")
    trainer.fit(module, unequal(), FedDyn(alpha=1.0, uplink=QSGD(4)))
    assert np.abs(vector(module) - optimum()).max() < 1e-3


def test_the_first_round_is_fedavg_with_a_proximal_term_and_twice_the_step(make_trainer: MakeTrainer) -> None:
    """With all clients in it, h/α is less the mean change, which counts twice."""
    torch.manual_seed(3)
    module = Perceptron()
    start = vector(module)
    given = problem(rounds=1, cohort_size=N)
    expected = oracle.average(given, 0, start, oracle.proximal_sgd(0.5), uniform=True)
    make_trainer(max_rounds=1, clients_per_round=N, precision="64-true").fit(module, federation(), FedDyn(0.5))
    np.testing.assert_allclose(vector(module) - start, 2 * (expected - start), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: FedDyn(alpha=0), "alpha, the weight of FedDyn's regulariser, must be positive, got 0"),
        (lambda: Algorithm(rule=DynamicRegularisation()), "half of a method, which needs CorrectedMean besides"),
        (lambda: FedBuff(rule=DynamicRegularisation()), "half of a method, which needs CorrectedMean besides"),
        (lambda: Algorithm(steps=CorrectedMean()), "half of a method, which needs DynamicRegularisation besides"),
        (
            lambda: Algorithm(
                rule=DynamicRegularisation(0.1), steps=CorrectedMean(0.2), aggregator=FedDyn().aggregator
            ),
            "has alpha=0.1, but CorrectedMean has 0.2",
        ),
        (
            lambda: Algorithm(rule=DynamicRegularisation(), steps=CorrectedMean()),
            "needs the mean of 'model' with equal weights",
        ),
    ],
)
def test_refuses_what_would_move_the_fixed_point(make: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()


def test_is_not_fedavg(make_trainer: MakeTrainer) -> None:
    models = []
    for algorithm in (FedDyn(), FedAvg()):
        torch.manual_seed(3)
        module = Perceptron()
        make_trainer(max_rounds=2).fit(module, federation(), algorithm)
        models.append(vector(module))
    assert np.abs(models[0] - models[1]).max() > 1e-3
