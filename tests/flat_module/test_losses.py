"""Test that a training_step without a loss to train on is said or refused, by every runner."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer
from toys import Perceptron, Served, federation

from lightning_fl import UserError
from lightning_fl.algorithms import Algorithm, FedDU
from lightning_fl.features.privacy import ClientPrivacy, LocalPrivacy
from lightning_fl.rules import CorrectedMomentum
from lightning_fl.steps import Apply, GradientMomentum

Loss = Callable[[Perceptron, Any], Any]
RUNNERS = pytest.mark.parametrize("runner", ["serial", "auto", "stacked"])
REFUSED: dict[str, tuple[Loss, str]] = {
    "no gradient": (lambda m, b: m.loss(b).detach(), "returns a loss without a gradient"),
    "a constant": (lambda m, b: torch.tensor(1.0), "returns a loss without a gradient"),
    "a number": (lambda m, b: m.loss(b).detach().mean().numel(), "returns int: return the loss"),
    "another key": (lambda m, b: {"losses": m.loss(b), "n": 1}, "returns a mapping of 'losses', 'n': return the loss"),
}


class Returning(Perceptron):
    """Module whose training_step returns what a function makes of it and a batch."""

    def __init__(self, make: Loss) -> None:
        super().__init__()
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.make(self, batch)


@RUNNERS
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_loss_is_refused_in_a_sentence(name: str, runner: str, make_trainer: MakeTrainer) -> None:
    make, said = REFUSED[name]
    with pytest.raises(UserError, match=f"training_step of Returning {said}"):
        make_trainer(runner=runner).fit(Returning(make), federation())


@pytest.mark.parametrize("method", ["FedAvg", "FedDU", "Mime"])
def test_a_forgotten_return_is_said_once(method: str, make_trainer: MakeTrainer) -> None:
    algorithm = {
        "FedDU": FedDU(),
        "Mime": Algorithm(rule=CorrectedMomentum(), steps=(Apply(), GradientMomentum())),
    }.get(method)
    with pytest.warns(UserWarning, match="returned None for every batch") as warned:
        make_trainer(max_rounds=3).fit(Returning(lambda m, b: None), Served(9), algorithm)
    (said,) = [str(warning.message) for warning in warned if "returned None" in str(warning.message)]
    assert said == (
        "Round 1: training_step of Returning returned None for every batch of all clients, so nothing was trained: end it with "
        "`return loss`."
    )


def test_a_batch_without_a_loss_is_no_mistake(make_trainer: MakeTrainer) -> None:
    def of_large_batches(module: Perceptron, batch: Any) -> Any:
        return module.loss(batch) if len(batch[0]) == 4 else None

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Round 1")
        make_trainer().fit(Returning(of_large_batches), federation())


@pytest.mark.parametrize(
    ("make", "rate", "why"),
    [
        (lambda m, b: torch.ones((), requires_grad=True) * 2, 0.1, "the loss does not depend on what is trained"),
        (lambda m, b: 0 * m.loss(b), 0.1, "the loss does not depend on what is trained"),
        (lambda m, b: m.loss(b), 0.0, "the learning rate is 0"),
    ],
    ids=["another leaf", "times zero", "rate 0"],
)
def test_a_round_that_changes_nothing_is_said(make: Loss, rate: float, why: str, make_trainer: MakeTrainer) -> None:
    module = Returning(make)
    module.configure = lambda m: torch.optim.SGD(m.parameters(), lr=rate)
    with pytest.warns(UserWarning, match=f"Round 1: .* changed no parameter of the model; .*{why}"):
        make_trainer().fit(module, federation())


@pytest.mark.parametrize(
    ("rate", "flags", "why"),
    [
        (1e-12, {}, "the learning rate is 1e-12, so that steps are too small for float32"),
        (1e-300, {"precision": "64-true"}, "the learning rate is 1e-300, so that steps are too small for float64"),
        (0.1, {"gradient_clip_val": 1e-12}, "gradient_clip_val is 1e-12, so that"),
        (1e-9, {"gradient_clip_val": 1e-9}, "the learning rate is 1e-09 and gradient_clip_val is 1e-09, so that"),
        (0.1, {"privacy": ClientPrivacy(clip=1e-12, noise_multiplier=0.0)}, "privacy.clip is 1e-12, so that"),
        (0.1, {"privacy": LocalPrivacy(clip=1e-12, noise_multiplier=0.0)}, "privacy.clip is 1e-12, so that"),
    ],
)
def test_steps_that_are_too_small_are_said(
    rate: float, flags: dict[str, Any], why: str, make_trainer: MakeTrainer
) -> None:
    module = Returning(lambda m, b: m.loss(b))
    module.configure = lambda m: torch.optim.SGD(m.parameters(), lr=rate)
    with pytest.warns(UserWarning, match=f"Round 1: .* changed no parameter of the model; {why}"):
        make_trainer(**flags).fit(module, federation())


def test_a_validation_that_logs_nothing_is_said_once(make_trainer: MakeTrainer) -> None:
    class Quiet(Perceptron):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

    with pytest.warns(UserWarning, match="validation_step of Quiet logs nothing") as warned:
        make_trainer(max_rounds=3).fit(Quiet(), federation())
    assert sum("logs nothing" in str(warning.message) for warning in warned) == 1
