"""Test APFL: the paper's loop, its limits, what clients predict with, and their own models' norms."""

import copy
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from roster import problem
from toys import Perceptron, federation, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms import APFL, Algorithm, Ditto, FedAvg

OWN, SHARE = "own/model", "own/share/scalars"


def own(trainer: FederatedTrainer) -> dict[int, tuple[np.ndarray, float]]:
    return {k: (state[OWN].double().numpy(), float(state[SHARE])) for k, state in trainer.run.clients.items()}


@pytest.mark.parametrize(("alpha", "adaptive"), [(0.5, True), (0.05, True), (0.3, False)])
@pytest.mark.parametrize("straggler_rate", [0.0, 0.6])
def test_is_the_papers(alpha: float, adaptive: bool, straggler_rate: float, make_trainer: MakeTrainer) -> None:
    """Check the server's model, and every client's own model and share; a straggler's own model stops with the other."""
    module = Perceptron()
    given = problem(rounds=6, epochs=3, straggler_rate=straggler_rate)
    w, models = oracle.apfl(given, vector(module), alpha, adaptive)
    trainer = make_trainer(max_rounds=6, local_epochs=3, precision="64-true", straggler_rate=straggler_rate)
    trainer.fit(module, federation(), APFL(alpha=alpha, adaptive=adaptive))
    np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-10)
    found = own(trainer)
    assert found.keys() == models.keys()
    for client, (model, share) in models.items():
        np.testing.assert_allclose(found[client][0], model, rtol=0, atol=1e-10)
        assert found[client][1] == pytest.approx(share, abs=1e-10)
    assert any(abs(share - alpha) > 1e-4 for _, share in models.values()) == adaptive


@pytest.mark.parametrize("rate", [0.1, 300.0])
def test_shares_stay_between_0_and_1(rate: float, make_trainer: MakeTrainer) -> None:
    """Check that a step of α that is too long ends at 0 or 1; clients with one batch a round stay finite in two rounds."""
    trainer = make_trainer(max_rounds=2, clients_per_round=3, precision="64-true")
    trainer.fit(Perceptron(lr=rate), federation(sizes=(4, 4, 4)), APFL(alpha=0.5))
    shares = {share for _, share in own(trainer).values()}
    assert len(shares) >= 2 if rate < 1 else shares <= {0.0, 1.0}


def test_with_a_share_of_1_clients_train_alone(make_trainer: MakeTrainer) -> None:
    module, given = Perceptron(), problem(rounds=3, epochs=2, cohort_size=6)
    start = vector(module)
    trainer = make_trainer(max_rounds=3, clients_per_round=6, local_epochs=2, precision="64-true")
    trainer.fit(module, federation(), APFL(alpha=1.0, adaptive=False))
    for client, (model, _) in own(trainer).items():
        v = start
        for t in range(3):
            v = oracle.sgd(v, given.batches(t, client), 0.1)
        np.testing.assert_allclose(model, v, rtol=0, atol=1e-10)


def test_with_a_share_of_0_clients_predict_with_the_servers_model(make_trainer: MakeTrainer) -> None:
    metrics = []
    for algorithm in (FedAvg(), APFL(alpha=0.0, adaptive=False)):
        torch.manual_seed(0)
        trainer = make_trainer(max_rounds=2, runner="serial")
        trainer.fit(Perceptron(), federation(), algorithm)
        metrics.append(float(trainer.callback_metrics["val/loss"]))
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-6)


def test_steps_decay_are_clipped_and_add_up_like_those_of_the_server(make_trainer: MakeTrainer) -> None:
    """Check with α = 1 that v is Ditto's without a pull, under weight decay, clipping, accumulation and a scheduler."""

    def configure(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    flags = {"local_epochs": 2, "gradient_clip_val": 0.3, "accumulate_grad_batches": 2, "clients_per_round": 6}
    plain, models = Perceptron(configure=configure), []
    for algorithm in (APFL(alpha=1.0, adaptive=False), Ditto(strength=0.0)):
        trainer = make_trainer(max_rounds=3, precision="64-true", **flags)
        trainer.fit(copy.deepcopy(plain), federation(), algorithm)
        models.append({client: state[OWN] for client, state in trainer.run.clients.items()})
    for client, model in models[0].items():
        torch.testing.assert_close(model, models[1][client], rtol=0, atol=1e-12)


def test_equal_weights_as_in_the_paper(make_trainer: MakeTrainer) -> None:
    uniform, plain, fitted = Algorithm(aggregator=WeightedMean("uniform")), Perceptron(), []
    for algorithm in (uniform, APFL(uniform)):
        module = copy.deepcopy(plain)
        make_trainer(runner="serial").fit(module, federation(), algorithm)
        fitted.append(vector(module))
    np.testing.assert_array_equal(*fitted)


@pytest.mark.parametrize("alpha", [-0.1, 1.5, "half"])
def test_bad_shares_are_refused_in_a_sentence(alpha: Any) -> None:
    with pytest.raises(UserError, match=rf"alpha, .* must lie in \[0, 1\], got {alpha!r}"):
        APFL(alpha=alpha)


def test_another_optimiser_than_plain_sgd_is_refused_in_a_sentence(make_trainer: MakeTrainer) -> None:
    module = Perceptron(configure=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(UserError, match=r"APFL makes the clients' steps itself.* has SGD with momentum 0.9"):
        make_trainer().fit(module, federation(), APFL())
