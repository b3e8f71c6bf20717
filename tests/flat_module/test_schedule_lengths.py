"""Test that schedules which do not fit a client's local training, or the rounds, are refused or said."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer
from torch.optim import lr_scheduler as schedulers
from toys import Perceptron, Served, federation

from lightning_fl import UserError
from lightning_fl.algorithms import FedDU
from lightning_fl.flat_module.optimizers.schedule_lengths import most_steps, schedule_length

MAKE: dict[str, Callable[[Any, int], Any]] = {
    "OneCycleLR": lambda o, n: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=n),
    "CosineAnnealingLR": lambda o, n: schedulers.CosineAnnealingLR(o, T_max=n),
    "CosineAnnealingWarmRestarts": lambda o, n: schedulers.CosineAnnealingWarmRestarts(o, T_0=n),
    "LinearLR": lambda o, n: schedulers.LinearLR(o, total_iters=n),
    "ConstantLR": lambda o, n: schedulers.ConstantLR(o, total_iters=n),
    "PolynomialLR": lambda o, n: schedulers.PolynomialLR(o, total_iters=n),
    "StepLR": lambda o, n: schedulers.StepLR(o, step_size=n),
    "MultiStepLR": lambda o, n: schedulers.MultiStepLR(o, milestones=[1, n]),
    "CyclicLR": lambda o, n: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=1, step_size_down=n - 1),
    "LambdaLR": lambda o, n: schedulers.LambdaLR(o, partial(linear, num_training_steps=n)),
    "SequentialLR": lambda o, n: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=2), schedulers.CosineAnnealingLR(o, T_max=n - 2)], milestones=[2]
    ),
    "ChainedScheduler": lambda o, n: schedulers.ChainedScheduler(
        [schedulers.ExponentialLR(o, 0.9), schedulers.OneCycleLR(o, max_lr=0.1, total_steps=n)]
    ),
}
STEPS = 3  # of the largest client of `federation()`, which has 12 samples


def linear(step: int, num_training_steps: int) -> float:
    return max(0.0, 1 - step / num_training_steps)


def module(make: Callable[[Any], Any], interval: str = "step", **options: Any) -> Perceptron:
    def configure(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
        return [optimizer], [{"scheduler": make(optimizer), "interval": interval, **options}]

    return Perceptron(configure=configure)


@pytest.mark.parametrize("name", MAKE)
def test_a_schedule_longer_than_a_local_training_is_said_once(name: str, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1)
    with pytest.warns(UserWarning, match=f"schedule of .* made for 200 steps.* at most {STEPS} in a round") as said:
        trainer.fit(module(lambda o: MAKE[name](o, 200)), federation())
    assert sum("is made for 200 steps" in str(warning.message) for warning in said) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The schedule of")
        trainer.fit(module(lambda o: MAKE[name](o, trainer.estimated_stepping_batches)), federation())
        make_trainer(max_rounds=1).fit(module(lambda o: MAKE[name](o, 200), interval="epoch"), federation())
        make_trainer(max_rounds=1).fit(module(lambda o: schedulers.ExponentialLR(o, 0.9)), federation())


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_too_few_steps_for_a_client_are_refused(runner: str, make_trainer: MakeTrainer) -> None:
    short = module(lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=5))
    before = copy.deepcopy(short.state_dict())
    with pytest.raises(UserError, match="OneCycleLR of Perceptron has total_steps=5, but client 4 makes 6 steps"):
        make_trainer(local_epochs=2, runner=runner).fit(short, federation())
    assert all(torch.equal(value, before[name]) for name, value in short.state_dict().items())
    make_trainer(max_rounds=1, local_epochs=2).fit(
        module(lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=3), frequency=2), federation()
    )


def test_too_few_steps_for_the_server_are_refused_in_a_sentence(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match="OneCycleLR fails after 4 batches of a local training: Tried to step 4 times"):
        make_trainer().fit(
            module(lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=STEPS, cycle_momentum=False)),
            Served(20),
            FedDU(),
        )


@pytest.mark.parametrize("name", ["OneCycleLR", "ChainedScheduler"])
def test_too_few_steps_for_the_rounds_are_refused(name: str, make_trainer: MakeTrainer) -> None:
    make_trainer(max_rounds=3).fit(module(lambda o: MAKE[name](o, 3), interval="epoch"), federation())
    make_trainer(max_rounds=3).fit(module(lambda o: MAKE[name](o, 1), interval="epoch", frequency=2), federation())
    with pytest.raises(
        UserError, match="OneCycleLR of Perceptron has total_steps=3, but steps 4 times, after each round"
    ):
        make_trainer(max_rounds=4).fit(module(lambda o: MAKE[name](o, 3), interval="epoch"), federation())


@pytest.mark.parametrize("first", [1, 2, 3, 5])
def test_the_limit_of_a_sequence_is_that_of_torch(first: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer._opt_called = True
    parts = [schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=n, cycle_momentum=False) for n in (3, 4)]
    sequence = schedulers.SequentialLR(optimizer, parts, milestones=[first])
    limit = most_steps(sequence)
    assert schedule_length(sequence) == first + 4
    for _ in range(int(limit)):
        sequence.step()
    with pytest.raises(ValueError, match="Tried to step"):
        sequence.step()
