"""Test single steps of the server's optimisers, on numbers that a federation rarely meets."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer, equal_states
from toys import Perceptron, federation, vector

from lightning_fl import UserError
from lightning_fl.algorithms import Algorithm, ServerAdagrad, ServerAdam, ServerYogi
from lightning_fl.slots import State, Step
from lightning_fl.steps import Adagrad, Adam, Apply, Momentum, MomentumInStages, Yogi


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


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (Adagrad(0.0, 0.01, 1e-3), (0.009900500, 0.016921745, 0.008790044)),
        (Adagrad(0.9, 0.01, 1e-3), (0.000990050, 0.002324086, 0.002206177)),
        (Adam(0.9, 0.99, 0.01, 1e-3), (0.009050283, 0.021598634, 0.020459307)),
        (Yogi(0.9, 0.99, 0.01, 1e-3), (0.009049876, 0.021568450, 0.020431877)),
    ],
    ids=repr,
)
def test_adaptive_steps_agree_with_numbers_made_by_hand(step: Step, expected: tuple[float, ...]) -> None:
    """Check three rounds of one parameter, with the changes 0.1, 0.1 and −0.2."""
    w = torch.zeros(1, dtype=torch.float64)
    state, models = step.init(w), []
    for change in (0.1, 0.1, -0.2):
        given: Any = SimpleNamespace(params=w, proposal=w + change)
        kept = {name: entry.clone() for name, entry in state.items()}
        after = step(given, state)
        assert equal_states(kept, state), "a step that is undone has left its state alone"
        state, w = after, given.proposal
        models.append(w.item())
    assert models == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("step", [Adam, Yogi])
@pytest.mark.parametrize("name", ["beta", "second_beta"])
def test_the_betas_are_below_1(name: str, step: Any) -> None:
    for value in (0.0, 0.999):
        assert getattr(step(**{name: value}), name) == value
    for value in (1.0, 1.5, -0.1):
        with pytest.raises(UserError, match=rf"\[0, 1\), got {value}"):
            step(**{name: value})


@pytest.mark.parametrize("step", [Adagrad, Adam, Yogi])
def test_the_square_of_epsilon_is_finite_in_float32(step: Any) -> None:
    assert step(epsilon=1e19).init(torch.zeros(2))["second"].isfinite().all()
    with pytest.raises(UserError, match=rf"{step.__name__}'s epsilon .* square.* at most 1.8e\+19, got 1e\+30"):
        step(epsilon=1e30)


@pytest.mark.parametrize("method", [ServerAdam, ServerAdagrad, ServerYogi])
def test_a_round_is_undone_if_a_huge_upload_makes_the_state_infinite(method: Any, make_trainer: MakeTrainer) -> None:
    models = []

    class Huge(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            factor = 1e21 if self.trainer.current_epoch == 1 else 0.0
            return super().training_step(batch, batch_idx) + factor * self.hidden.weight.sum()

        def on_train_epoch_end(self) -> None:
            models.append(vector(self))

    with pytest.warns(UserWarning, match=f"Round 2 is undone: the state of {method.__name__[6:]} would not be finite"):
        make_trainer(max_rounds=3).fit(Huge(), federation(), method(learning_rate=0.02))
    assert (models[1] == models[0]).all()
    assert (models[2] != models[1]).all()


class Least(Apply):
    """Step that keeps the least of something, of which it has seen none yet."""

    def __call__(self, turn: Any, state: State) -> State:
        super().__call__(turn, state)
        return {"least": torch.full((1,), torch.inf)}


def test_a_single_number_of_a_state_may_be_infinite(make_trainer: MakeTrainer) -> None:
    module, before = Perceptron(), Perceptron()
    before.load_state_dict(module.state_dict())
    make_trainer(max_rounds=1).fit(module, federation(), Algorithm(steps=[Least()]))
    assert (vector(module) != vector(before)).any()


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
