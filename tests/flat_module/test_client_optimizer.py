"""Test plain SGD in place of the module's optimiser against modules that have it."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from roster import ROSTER
from scheduled import SCHEDULERS, MakeOptimizer, MakeScheduler, MakeTrainer, Scheduled, of, sgd
from torch.optim import Optimizer, lr_scheduler
from toys import federation, vector

from lightning_fl import UserError
from lightning_fl.algorithms import SCAFFOLD, FedAvg

OWN_STEPS = [name for name, entry in ROSTER.items() if any(rule.own_step for rule in entry.algorithm().rules())]
ADAM = of(torch.optim.Adam, lr=0.02, weight_decay=0.3)
SGD = of(torch.optim.SGD, lr=0.02)


def groups(module: Any) -> Optimizer:
    named = [
        {"params": module.hidden.parameters(), "lr": 0.2},
        {"params": module.output.parameters(), "weight_decay": 0.1},
    ]
    return torch.optim.SGD(named, lr=0.1)


def trained(make_trainer: MakeTrainer, module: Scheduled, client_optimizer: str, **flags: Any) -> np.ndarray:
    """Return the weights after three rounds of a copy of the module."""
    own = copy.deepcopy(module)
    algorithm, data = flags.pop("algorithm", FedAvg()), flags.pop("data", federation())
    make_trainer(max_rounds=3, client_optimizer=client_optimizer, **flags).fit(own, data, algorithm)
    return vector(own)


@pytest.mark.parametrize("name", OWN_STEPS)
def test_methods_with_steps_of_their_own_take_any_module(name: str, make_trainer: MakeTrainer) -> None:
    entry, module = ROSTER[name], Scheduled(ADAM)
    with pytest.raises(UserError, match=r"makes the clients' steps itself.* has Adam.*--trainer.client_optimizer sgd"):
        trained(make_trainer, module, "module", algorithm=entry.algorithm(), data=entry.federation())
    results = []
    for make, choice in ((ADAM, "sgd"), (SGD, "module")):
        module.make = make
        results.append(trained(make_trainer, module, choice, algorithm=entry.algorithm(), data=entry.federation()))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    ("given", "same"), [(ADAM, SGD), (sgd, groups), (of(torch.optim.Adafactor, lr=torch.tensor(0.02)), SGD), (SGD, SGD)]
)
def test_sgd_has_the_rates_of_the_module(given: MakeOptimizer, same: MakeOptimizer, make_trainer: MakeTrainer) -> None:
    module = Scheduled(given)
    actual = trained(make_trainer, module, "sgd")
    module.make = same
    np.testing.assert_allclose(actual, trained(make_trainer, module, "module"), rtol=0, atol=1e-7)


def without_momentum(name: str) -> MakeScheduler:
    options: dict[str, Any] = {"cycle_momentum": False}
    return {
        "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=6, **options),
        "CyclicLR": lambda o: lr_scheduler.CyclicLR(
            o, 0.02, 0.2, step_size_up=2, mode="exp_range", gamma=0.9, **options
        ),
    }.get(name, SCHEDULERS[name])


@pytest.mark.filterwarnings("error:.*lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("interval", ["by_epoch", "by_step"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_modules_schedulers_move_sgd(name: str, interval: str, make_trainer: MakeTrainer) -> None:
    start = Scheduled(SGD)
    given, same = Scheduled(ADAM, **{interval: SCHEDULERS[name]}), Scheduled(SGD, **{interval: without_momentum(name)})
    results, rates = [], []
    for module, choice in ((given, "sgd"), (same, "module")):
        module.load_state_dict(start.state_dict())
        make_trainer(max_rounds=5, client_optimizer=choice, runner="serial").fit(module, federation())
        results.append(vector(module))
        rates.append([step[0] for step in module.record.steps])
    np.testing.assert_allclose(*rates, rtol=1e-12)
    np.testing.assert_allclose(*results, rtol=0, atol=1e-7)


def test_the_choice_is_said(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        trained(make_trainer, Scheduled(ADAM), "sgd")
    said = (
        "Clients step by plain SGD at Adam's learning rate 0.02, without its weight decay, because trainer.client_optimizer is "
        "sgd."
    )
    assert said in caplog.messages


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (of(torch.optim.Adam, maximize=True), "minimises the loss, but Adam has maximize=True"),
        (lambda m: without_rate(m), "takes the learning rate .*but Adam has lr=None"),
    ],
)
def test_what_sgd_cannot_take_is_refused(make: MakeOptimizer, said: str, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=said):
        trained(make_trainer, Scheduled(make), "sgd")


def without_rate(module: Any) -> Optimizer:
    optimizer = torch.optim.Adam(module.parameters())
    optimizer.param_groups[0]["lr"] = None
    return optimizer


def test_another_scheduler_class_is_refused(make_trainer: MakeTrainer) -> None:
    class Other:
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(UserError, match="cannot give SGD to Other, which is not a torch LRScheduler"):
        trained(make_trainer, Scheduled(ADAM, by_epoch=Other), "sgd")


def test_a_run_resumes_with_the_same_optimiser(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(client_optimizer="sgd", **keeps_files).fit(Scheduled(ADAM), federation(), SCAFFOLD())
    path = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(UserError, match=r"trainer\.client_optimizer sgd → module"):
        make_trainer(max_rounds=3, **keeps_files).fit(Scheduled(SGD), federation(), SCAFFOLD(), ckpt_path=path)


def test_another_name_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"client_optimizer.*'sgdd'.*sgd"):
        make_trainer(client_optimizer="sgdd")
