"""Test that parts written for version 0.2 work, with a warning that gives the present name."""

import copy
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from compared_runs import equal_states
from torch import nn
from toys import Normalised, Perceptron, federation

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms import Algorithm
from lightning_fl.rules import LocalOptimizer, Pulled
from lightning_fl.slots import ServerTurn, State, Step
from lightning_fl.slots.former_names import FormerSetting

FORMER = {
    "slots": {"Setting": "RoundContext", "MEMBERS": "UPLOADS", "MEMBER_WEIGHTS": "UPLOAD_WEIGHTS"},
    "aggregators": {"Members": "KeepUploads"},
}


def test_former_names_are_present_ones_with_a_warning() -> None:
    for package, names in FORMER.items():
        module = import_module(f"lightning_fl.{package}")
        for former, present in names.items():
            with pytest.warns(DeprecationWarning, match=f"lightning_fl.{package}.{former} is now {present}"):
                assert getattr(module, former) is getattr(module, present)
        with pytest.raises(AttributeError, match="has no attribute 'Absent'"):
            module.Absent  # noqa: B018


@dataclass(frozen=True)
class Mean(Step):
    """FedAvg's mean, by the former names."""

    needs = frozenset({"uploads/model"})

    def __call__(self, turn: ServerTurn, state: State) -> State:
        slots: Any = sys.modules["lightning_fl.slots"]
        models, weights = turn.merged[slots.MEMBERS], turn.merged[slots.MEMBER_WEIGHTS]
        assert isinstance(turn.setting, slots.Setting)
        turn.proposal = turn.params + (weights.float() @ models / weights.sum()).float()
        return state


class KeepsNames(Algorithm):
    """FedAvg whose clients keep the output layer and the statistics of a norm, as a method of version 0.2 says it."""

    def personal_parameters(self, module: nn.Module) -> list[str]:
        return [name for name, _ in module.named_parameters() if name.startswith("output.")]

    def personal_buffers(self, module: nn.Module) -> list[str]:
        return [name for name, _ in module.named_buffers() if name.endswith("_mean")]


def test_personal_names_of_a_method_are_personal(make_trainer: Callable[..., FederatedTrainer]) -> None:
    module, states = Normalised(), []
    means = [name for name, _ in module.named_buffers() if name.endswith("_mean")]
    assert means
    for method in (Algorithm(personal=["output", *means]), KeepsNames()):
        trainer = make_trainer(max_rounds=2)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.fit(copy.deepcopy(module), federation(), method)
        assert any("are now the slot personal" in str(each.message) for each in said) == bool(states)
        states.append(trainer.run.state_dict())
    assert equal_states(*states)


class WithCompanion(Algorithm):
    companion = Pulled(0.5)


@dataclass(frozen=True)
class InPhases(LocalOptimizer):
    in_phases = True


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (WithCompanion(), "WithCompanion.companion was of version 0.2: use lightning_fl.personal.PersonalModel"),
        (Algorithm(rule=InPhases()), "InPhases.in_phases was of version 0.2: use lightning_fl.personal.HeadThenBody"),
    ],
)
def test_what_nothing_reads_any_more_is_refused(
    method: Algorithm, sentence: str, make_trainer: Callable[..., FederatedTrainer]
) -> None:
    with pytest.raises(UserError, match=sentence):
        make_trainer().fit(Perceptron(), federation(), method)


def test_a_warning_shows_the_line_that_has_the_former_name() -> None:
    turn = FormerSetting()
    turn.context = 3
    with pytest.warns(DeprecationWarning, match=r"works until version 0\.4") as said:
        assert turn.setting == 3
    with pytest.warns(DeprecationWarning, match="RoundContext") as imported:
        exec("from lightning_fl.slots import Setting", {})
    assert said[0].filename == __file__
    assert imported[0].filename == "<string>"


def test_a_step_of_version_0_2_trains_as_before(make_trainer: Callable[..., FederatedTrainer]) -> None:
    members: Any = vars(import_module("lightning_fl.aggregators"))["__getattr__"]
    module, vectors = Perceptron(), []

    def train(algorithm: Algorithm) -> None:
        trainer = make_trainer(max_rounds=2)
        trainer.fit(copy.deepcopy(module), federation(), algorithm)
        vectors.append(trainer.run.params)

    train(Algorithm())
    with pytest.warns(DeprecationWarning, match="ServerTurn.setting is now ServerTurn.context"):
        train(Algorithm(aggregator=members("Members")(WeightedMean()), steps=(Mean(),)))
    torch.testing.assert_close(*vectors)
