"""Test what the server's own training reports: its share of a step, and the steps that it is worth."""

import warnings
from math import ceil
from typing import Any

import pytest
from compared_runs import MakeTrainer
from toys import BATCH_SIZE, Perceptron, Served

from lightning_fl import UserError
from lightning_fl.algorithms import FedDU, FedDUS
from lightning_fl.steps import DynamicServerUpdate, StaticServerUpdate

STEPS = 2 * ceil(9 / BATCH_SIZE)
"""Steps of the server in a round of two epochs on nine samples."""


def reported(make_trainer: MakeTrainer, algorithm: FedDU | FedDUS) -> tuple[float, float]:
    trainer = make_trainer(max_rounds=1, local_epochs=2, precision="64-true")
    trainer.fit(Perceptron(), Served(9), algorithm)
    return float(trainer.callback_metrics["feddu/alpha"]), float(trainer.callback_metrics["feddu/tau_eff"])


def test_feddu_reports_its_share_and_its_steps(make_trainer: MakeTrainer) -> None:
    alpha, steps = reported(make_trainer, FedDU(alpha_max=0.25, C=100.0))
    assert (alpha, steps) == pytest.approx((0.25, 0.25 * STEPS))
    assert reported(make_trainer, FedDU(C=0.0)) == (0, 0)


@pytest.mark.parametrize(("given", "alpha"), [(0, 0.0), (0.5, 0.5 / STEPS), (1, 1 / STEPS), ("full", 1.0)])
def test_feddus_reports_the_share_of_its_steps(given: float, alpha: float, make_trainer: MakeTrainer) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "tau_eff")
        found = reported(make_trainer, FedDUS(tau_eff=given))
    assert found == pytest.approx((alpha, alpha * STEPS))


def test_one_step_of_the_server_is_one_step(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1, local_steps=1)
    trainer.fit(Perceptron(), Served(9), FedDUS(tau_eff=1))
    assert trainer.callback_metrics["feddu/alpha"] == 1


def test_feddus_warns_of_more_steps_than_there_are(make_trainer: MakeTrainer) -> None:
    with pytest.warns(UserWarning, match=rf"tau_eff={STEPS + 1} is more than the {STEPS} steps"):
        assert reported(make_trainer, FedDUS(tau_eff=STEPS + 1)) == pytest.approx((1 + 1 / STEPS, STEPS + 1))


def test_a_negative_number_of_steps_is_refused() -> None:
    assert StaticServerUpdate(tau_eff=0).tau_eff == 0
    with pytest.raises(UserError, match="got -1"):
        StaticServerUpdate(tau_eff=-1)


@pytest.mark.parametrize(
    ("step", "given", "alpha"),
    [
        (DynamicServerUpdate(), (0.6, 0.3, 0.1, 1000, 3000, 0), 0.4 * 1 / 2),
        (DynamicServerUpdate(), (0.6, 0.3, 0.3, 1000, 3000, 0), 0.4 * 1 / 4),
        (DynamicServerUpdate(), (0.6, 0.0, 0.0, 1000, 3000, 0), 0.4 * 1 / 4),
        (DynamicServerUpdate(C=20.0, decay=0.5), (0.6, 0.3, 0.3, 1000, 3000, 1), 0.4 * 20 / 8),
        (DynamicServerUpdate(alpha_max=0.05), (0.6, 0.3, 0.3, 1000, 3000, 0), 0.05),
        (DynamicServerUpdate(f="inverse", epsilon=0.2), (0.3, 0.3, 0.3, 1000, 3000, 0), 2 / 4),
        (DynamicServerUpdate(f="inverse", epsilon=0.05), (0.05, 0.3, 0.3, 1000, 3000, 0), 1.0),
        (DynamicServerUpdate(f="inverse", epsilon=0.05, alpha_max=2.0), (0.05, 0.3, 0.3, 1000, 3000, 0), 2.0),
    ],
)
def test_alpha_is_that_of_the_formula_by_hand(step: DynamicServerUpdate, given: Any, alpha: float) -> None:
    assert step.alpha(*given) == pytest.approx(alpha)
