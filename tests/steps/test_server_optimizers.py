"""Test single steps of the server's optimisers, on numbers that a federation rarely meets."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_fl import UserError
from lightning_fl.slots import State, Step
from lightning_fl.steps import Apply, Momentum, MomentumInStages, Yogi


def turn(change: torch.Tensor) -> Any:
    """Return the turn of a server whose model is 0, with a proposed change."""
    return SimpleNamespace(params=torch.zeros_like(change), proposal=change)


def test_yogi_leaves_its_second_moment_where_it_equals_the_square() -> None:
    """Check sign(0) = 0: G² = u leaves u as it is; a larger G² raises it, a smaller one lowers it."""
    yogi = Yogi(beta=0.0, second_beta=0.75, epsilon=0.5, learning_rate=2.0)
    state = yogi(given := turn(torch.tensor([0.5, 1.0, 0.0])), yogi.init(torch.zeros(3)))
    assert state["second"].tolist() == [0.25, 0.25 + 0.25 * 1.0, 0.25]
    expected = [2.0 * 0.5 / (0.5 + 0.5), 2.0 * 1.0 / (0.5**0.5 + 0.5), 0.0]
    assert given.proposal.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["beta", "second_beta"])
def test_the_betas_of_yogi_are_below_1(name: str) -> None:
    for value in (0.0, 0.999):
        assert getattr(Yogi(**{name: value}), name) == value
    for value in (1.0, 1.5, -0.1):
        with pytest.raises(UserError, match=rf"\[0, 1\), got {value}"):
            Yogi(**{name: value})


class Keeping(Step):
    """Step with a state and nothing to share."""

    def init(self, params: torch.Tensor) -> State:
        return {"sum": torch.zeros_like(params)}

    def __call__(self, turn: Any, state: State) -> State:
        return state


class Sharing(Step):
    """Step with something to share and no state."""

    provides = frozenset({"moments/first"})

    def __call__(self, turn: Any, state: State) -> State:
        return state


@pytest.mark.parametrize("stage", [Keeping(), Sharing()], ids=lambda stage: type(stage).__name__)
def test_a_stage_with_a_state_or_with_something_to_share_is_refused(stage: Step) -> None:
    with pytest.raises(UserError, match=f"must not keep or share state, but {type(stage).__name__} does"):
        MomentumInStages(stages=(Apply(), stage), momentum=Momentum())
