"""Test Scaffnew: its theorem, the number of local steps, control variates, rates that change, refusals."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from quadratics import Quadratics, Regression
from roster import problem
from toys import SIZES, Perceptron, federation, vector

from lightning_fl import UserError
from lightning_fl.algorithms import Algorithm, FedAvg, FedBuff, Scaffnew
from lightning_fl.codecs import ErrorFeedback, TopK
from lightning_fl.features.privacy import ClientPrivacy
from lightning_fl.rules import ProxSkip

N = len(SIZES)


class Distances(Callback):
    """Callback that keeps ‖w − w*‖ after each round."""

    def __init__(self, optimum: np.ndarray) -> None:
        self.optimum, self.found = optimum, list[float]()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.found.append(float(np.linalg.norm(vector(pl_module) - self.optimum)))


def distances(problem: Quadratics, algorithm: Algorithm, make_trainer: MakeTrainer, **flags: Any) -> list[float]:
    """Return the distances to the optimum after each round of full gradients with η = 1/L = 1."""
    watch, num_clients = Distances(problem.optimum), len(problem.optima)
    flags = {"clients_per_round": num_clients, "precision": "64-true", "callbacks": watch, **flags}
    make_trainer(**flags).fit(Regression(problem.optima.shape[1]), problem.data(), algorithm)
    return watch.found


@pytest.mark.matrix
def test_converges_linearly_to_the_optimum_of_all_in_fewer_rounds_than_gradient_descent(
    make_trainer: MakeTrainer,
) -> None:
    """Check p = 1/√κ, where a step contracts by 1 − p² = 1 − 1/κ in the mean, and a round has √κ steps."""
    given = Quadratics.drawn(num_clients=3, least=1 / 36)
    ours = distances(given, Scaffnew(p=1 / 6), make_trainer, max_rounds=90)
    descent = distances(given, FedAvg(), make_trainer, max_rounds=90, local_steps=1, local_epochs=None)
    drifted = distances(given, FedAvg(), make_trainer, max_rounds=90, local_steps=6, local_epochs=None)
    assert ours[89] < 1e-3 * ours[29], "linear: no floor"
    assert ours[89] < 1e-5
    assert descent[89] > 1e3 * ours[89]
    assert drifted[89] > 0.01, "clients whose steps are not corrected end elsewhere"
    assert drifted[89] == pytest.approx(drifted[88], rel=1e-3)


def test_with_p_of_1_it_is_gradient_descent(make_trainer: MakeTrainer) -> None:
    given = Quadratics.drawn(num_clients=3, least=0.1)
    ours = distances(given, Scaffnew(p=1.0), make_trainer, max_rounds=8)
    descent = distances(given, FedAvg(), make_trainer, max_rounds=8, local_steps=1, local_epochs=None)
    np.testing.assert_allclose(ours, descent, rtol=1e-9)


class Counts(Callback):
    """Callback that counts the batches of each client in each round."""

    def __init__(self) -> None:
        self.rounds: list[list[int]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.rounds.append([])

    def on_client_download(self, trainer: Any, pl_module: Any, client: int) -> None:
        self.rounds[-1].append(0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rounds[-1][-1] += 1


@pytest.mark.matrix
def test_all_clients_make_one_drawn_number_of_steps_whatever_the_flags(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[tuple[str, str], list[int]] = {}
    drawn: dict[int, set[int]] = {}
    steps_in_round = ProxSkip.steps_in_round

    def watched(rule: ProxSkip, context: Any) -> int:
        number = steps_in_round(rule, context)
        drawn.setdefault(context.round, set()).add(number)
        return number

    for seed, flags in (("0", {"local_epochs": 3}), ("0", {"local_steps": 1}), ("1", {})):
        counts = Counts()
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        trainer = make_trainer(max_rounds=4, clients_per_round=N, callbacks=counts, runner="serial", **flags)
        trainer.fit(Perceptron(), federation(), Scaffnew(p=0.4))
        assert all(len(clients) == N and len(set(clients)) == 1 for clients in counts.rounds)
        assert trainer.run.num_steps == N * sum(clients[0] for clients in counts.rounds)
        found[seed, str(flags)] = [clients[0] for clients in counts.rounds]
    first, second, other = found.values()
    assert first == second != other
    monkeypatch.setattr(ProxSkip, "steps_in_round", watched)
    make_trainer(max_rounds=400, clients_per_round=1, val_every_n_rounds=400).fit(
        Perceptron(), federation((1,)), Scaffnew(p=0.4)
    )
    # Several parts of a round ask for the number, and must get the same.
    assert len(drawn) >= 400
    assert all(len(numbers) == 1 for numbers in drawn.values())
    rounds = np.array([numbers.pop() for _, numbers in sorted(drawn.items())])
    assert rounds.mean() == pytest.approx(1 / 0.4, abs=4 * (0.6**0.5 / 0.4) / 20), "4 standard errors"
    assert np.mean(rounds == 1) == pytest.approx(0.4, abs=4 * (0.24**0.5) / 20)


class OneCycle(Perceptron):
    """Module whose learning rate makes one cycle in a client's training."""

    def __init__(self, total_steps: int | None) -> None:
        super().__init__()
        self.total_steps, self.lengths = total_steps, []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches if self.total_steps is None else self.total_steps
        self.lengths.append(steps)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps, cycle_momentum=False)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_a_schedule_by_step_spans_the_longest_round(make_trainer: MakeTrainer) -> None:
    counts, module, flags = Counts(), OneCycle(None), {"max_rounds": 6, "clients_per_round": N, "runner": "serial"}
    make_trainer(**flags, callbacks=counts).fit(module, federation(), Scaffnew(p=0.3))
    longest = max(clients[0] for clients in counts.rounds)
    assert module.lengths == [longest]
    assert longest > min(clients[0] for clients in counts.rounds)
    with pytest.raises(UserError, match=f"total_steps={longest - 1}, but client . makes {longest} steps in a round"):
        make_trainer(**flags).fit(OneCycle(longest - 1), federation(), Scaffnew(p=0.3))


def test_control_variates_add_up_to_0_again_after_clients_have_dropped_out(make_trainer: MakeTrainer) -> None:
    gaps, present = [], []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            present.append(int(trainer.callback_metrics["clients/accepted"]))
            kept = torch.stack([state["sent"] for state in trainer.run.clients.values()])
            gaps.append(float((kept.mean(0) - trainer.run.params).abs().max()))

    flags = {"max_rounds": 12, "clients_per_round": N, "dropout_rate": 0.1, "callbacks": Watch()}
    make_trainer(**flags, precision="64-true").fit(Perceptron(), federation(), Scaffnew(p=0.4))
    assert 2 < present.count(N) < 12
    assert max(gap for gap, count in zip(gaps, present, strict=True) if count == N) < 1e-12
    assert max(gap for gap, count in zip(gaps, present, strict=True) if count < N) > 1e-4


def halving(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_control_variates_are_gradients_whatever_the_learning_rate_becomes(
    runner: str, make_trainer: MakeTrainer
) -> None:
    module = Perceptron(configure=halving)
    given = problem(rounds=4, cohort_size=N)
    expected = oracle.scaffnew(given, vector(module), p=0.4, uniform=False, rate=lambda t: 0.1 * 0.5**t)
    trainer = make_trainer(max_rounds=4, clients_per_round=N, precision="64-true", runner=runner)
    trainer.fit(module, federation(), Scaffnew(p=0.4, weighting="samples"))
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)


def test_a_layer_that_the_optimiser_lacks_stays(make_trainer: MakeTrainer) -> None:
    module = Perceptron(configure=lambda m: torch.optim.SGD(m.output.parameters(), lr=0.1))
    before = copy.deepcopy(module)
    make_trainer(max_rounds=3, clients_per_round=N).fit(module, federation(), Scaffnew())
    assert np.array_equal(vector(module.hidden), vector(before.hidden))
    assert not np.array_equal(vector(module.output), vector(before.output))


@pytest.mark.parametrize(
    ("make", "flags", "words"),
    [
        (lambda: Scaffnew(p=0.0), {}, ["p, the probability", "0.0"]),
        (lambda: Scaffnew(p=1.5), {}, ["p, the probability", "1.5"]),
        (lambda: Scaffnew(), {"clients_per_round": 5}, ["all 6 clients in each round", "5", "clients_per_round 6"]),
        (lambda: Scaffnew(uplink=TopK(0.3)), {}, ["keep a copy of 'model'", "ErrorFeedback(TopK(…))"]),
        (
            lambda: Scaffnew(),
            {"privacy": ClientPrivacy(noise_multiplier=1.0)},
            ["keep a copy of what they sent, which was clipped"],
        ),
        (lambda: FedBuff(rule=ProxSkip()), {}, ["FedBuff does not wait", "ProxSkip keep a copy of their upload"]),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    make: Callable[[], Algorithm], flags: dict[str, Any], words: list[str], make_trainer: MakeTrainer
) -> None:
    with pytest.raises(UserError) as error:
        make_trainer(**{"clients_per_round": N, **flags}).fit(Perceptron(), federation(), make())
    assert [word for word in words if word not in str(error.value)] == []


def test_a_codec_with_error_feedback_is_taken(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(clients_per_round=N)
    trainer.fit(Perceptron(), federation(), Scaffnew(uplink=ErrorFeedback(TopK(0.3))))
    assert trainer.run.ledger.bits("up") == N * min(7 * 32 + 26, 7 * (32 + 5))
