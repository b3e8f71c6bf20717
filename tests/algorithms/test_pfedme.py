"""Test pFedMe: the paper's loop, its limit, what clients predict with, repeated minibatches, refusals."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from roster import problem
from toys import SIZES, Normalised, Perceptron, federation, own_models, vector

from lightning_fl import UserError
from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms import Algorithm, Ditto, FedBN, PFedMe
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.features.clock.simulated_clock import SimulatedClock
from lightning_fl.features.loss_guard import LossGuard, RoundGuard
from lightning_fl.slots import LocalTraining, Message, Rule

OPTIONS = {"strength": 6.0, "inner_steps": 3, "inner_learning_rate": 0.05, "server_learning_rate": 0.7}


@pytest.mark.parametrize("straggler_rate", [0.0, 0.6])
def test_is_the_papers(straggler_rate: float, make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    given = problem(5, epochs=2, straggler_rate=straggler_rate)
    w, models = oracle.pfedme(given, vector(module), 6.0, 3, alpha=0.05, beta=0.7)
    trainer = make_trainer(max_rounds=5, local_epochs=2, precision="64-true", straggler_rate=straggler_rate)
    trainer.fit(module, federation(), PFedMe(**OPTIONS))  # type: ignore[arg-type]
    np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-10)
    assert own_models(trainer).keys() == models.keys()
    for client, model in models.items():
        np.testing.assert_allclose(own_models(trainer)[client], model, rtol=0, atol=1e-10)
    assert trainer.callback_metrics["comm/uplink_bits"] == 3 * 26 * 64


def test_a_layer_that_the_optimiser_lacks_stays_in_every_model(make_trainer: MakeTrainer) -> None:
    module = Perceptron(configure=lambda m: torch.optim.SGD(m.output.parameters(), lr=0.1))
    hidden, output = vector(module.hidden), vector(module.output)
    trainer = make_trainer()
    trainer.fit(module, federation(), PFedMe(**OPTIONS))  # type: ignore[arg-type]
    assert np.array_equal(vector(module.hidden), hidden)
    for model in own_models(trainer).values():
        assert np.array_equal(model[: len(hidden)], hidden)
        assert not np.array_equal(model[len(hidden) :], output)


def test_a_learning_rate_of_0_moves_no_model(make_trainer: MakeTrainer) -> None:
    """Check a round in which all parameters have the learning rate 0, as at the start of a warm-up."""
    module = Perceptron(lr=0.0)
    before = vector(module)
    trainer = make_trainer(max_rounds=1)
    trainer.fit(module, federation(), PFedMe(**OPTIONS))  # type: ignore[arg-type]
    assert np.array_equal(vector(module), before)
    assert own_models(trainer)
    for model in own_models(trainer).values():
        assert np.array_equal(model, before)


def test_the_inner_rate_keeps_the_precision_of_the_model() -> None:
    """Check the rate of parameters whose groups have rates of their own, in float64."""
    params = torch.zeros(3, dtype=torch.float64)
    local = LocalTraining(None, {}, params, params.clone(), lambda: None)  # type: ignore[arg-type]
    local.learning_rate = torch.tensor([0.1, 0.0, 0.2], dtype=torch.float64)
    rate = local.where_it_learns(0.03)
    assert isinstance(rate, torch.Tensor)
    assert rate.tolist() == [0.03, 0.0, 0.03]
    local.learning_rate = 0.1
    assert local.where_it_learns(0.03) == 0.03
    local.learning_rate = 0.0
    assert local.where_it_learns(0.03) == 0


def test_with_one_inner_step_it_is_fedavg_with_equal_weights(make_trainer: MakeTrainer) -> None:
    """Check ηλ = 1 and β = 1, where u lands on θ: FedAvg with learning rate α."""
    fitted = []
    for algorithm, rate in (
        (PFedMe(strength=10.0, inner_steps=1, inner_learning_rate=0.07), 0.1),
        (Algorithm(aggregator=WeightedMean("uniform")), 0.07),
    ):
        torch.manual_seed(0)
        module = Perceptron(lr=rate)
        make_trainer(max_rounds=4, local_epochs=2, precision="64-true", runner="serial").fit(
            module, federation(), algorithm
        )
        fitted.append(vector(module))
    np.testing.assert_allclose(*fitted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [{"local_epochs": 2}, {"local_steps": 4, "local_epochs": None}], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_step_is_repeated_on_the_same_batches(
    length: dict[str, Any], accumulate: int, make_trainer: MakeTrainer
) -> None:
    """Compare the batches with those of FedAvg, in the order of steps; the counts of steps and batches agree with them."""

    class Watch(Callback):
        def __init__(self) -> None:
            self.sums: list[float] = []
            self.indices: list[int] = []
            self.planned = 0

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.planned = trainer.num_training_batches

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.sums.append(float(batch[0].sum()))
            self.indices.append(batch_idx)

    runs = []
    for algorithm in (Algorithm(), PFedMe(**OPTIONS)):  # type: ignore[arg-type]
        watch = Watch()
        flags = {"max_rounds": 1, "clients_per_round": 1, "runner": "serial", "callbacks": watch, **length}
        trainer = make_trainer(accumulate_grad_batches=accumulate, **flags)
        trainer.fit(Perceptron(), federation(sizes=(11,)), algorithm)
        runs.append((watch, trainer))
    (plain, before), (repeated, after) = runs
    steps, batches = [], [*plain.sums]
    while batches:  # a pass has three batches, so its last step may have fewer
        left = len(batches) % 3 or 3
        size = min(accumulate, left)
        steps.append([batches.pop(0) for _ in range(size)])
    assert repeated.sums == [x for step in steps for _ in range(3) for x in step]
    assert repeated.indices == list(range(len(repeated.sums)))
    assert repeated.planned == len(repeated.sums)
    assert after.run.num_steps == 3 * before.run.num_steps


@dataclass(frozen=True)
class Twice(Rule):
    """Rule of two steps on each minibatch, whose upload is its change times the steps in a pass."""

    @property
    def repeats(self) -> int:
        return 2

    def finish(self, local: LocalTraining) -> Message:
        return {"model": (local.params - local.received["model"]) * local.steps_in_pass}


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_any_rule_may_repeat_its_steps_in_any_runner(runner: str, make_trainer: MakeTrainer) -> None:
    module = Perceptron(lr=0.01)
    given, w = replace(problem(2, epochs=2), learning_rate=0.01), vector(module)
    for t in range(2):
        total = np.zeros_like(w)
        for k in given.cohort(t):
            y = w
            for batch in given.batches(t, k):
                for _ in range(2):
                    y = y - 0.01 * oracle.gradient(y, *batch)
            total += SIZES[k] * 2 * -(-SIZES[k] // 4) * (y - w)
        w = w + total / sum(SIZES[k] for k in given.cohort(t))
    trainer = make_trainer(max_rounds=2, local_epochs=2, precision="64-true", runner=runner)
    trainer.fit(module, federation(), Algorithm(Twice()))
    np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-10)


class Recording(Perceptron):
    """Module that keeps its losses, and the number of steps that it is told when it configures its optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.planned = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        self.planned = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_repeated_steps_count_for_schedulers_and_the_loss_guard(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a client with two minibatches and three steps on each."""
    found: list[float | None] = []
    monkeypatch.setattr(RoundGuard, "rejects", lambda guard, result: found.append(result.last_loss))
    module, flags = Recording(), {"max_rounds": 1, "clients_per_round": 1, "loss_guard": LossGuard(clients=10.0)}
    make_trainer(**flags).fit(module, federation(sizes=(8,)), PFedMe(**OPTIONS))  # type: ignore[arg-type]
    assert module.planned == len(module.losses) == 6
    assert found == [pytest.approx(np.mean(module.losses), rel=1e-6)]


@pytest.mark.parametrize("num_steps", [None, 9, 13])
def test_lengths_count_repeated_batches(num_steps: int | None) -> None:
    """Check two passes of three minibatches over eleven samples, with three steps on each: nine steps are a pass."""
    schedule = LocalSchedule(batch_size=4, epochs=2, steps=None, repeat=3)
    steps = schedule.num_steps(3) if num_steps is None else num_steps
    assert schedule.num_steps(3) == 18
    assert schedule.num_batches(11, num_steps) == steps
    assert schedule.num_samples(11, num_steps) == {18: 66, 9: 33, 13: 33 + 4 * 4}[steps]


def test_each_step_takes_simulated_time(make_trainer: MakeTrainer) -> None:
    seconds = []
    for algorithm in (Algorithm(), PFedMe(**OPTIONS)):  # type: ignore[arg-type]
        trainer = make_trainer(clock=SimulatedClock(computation_seconds=5.0))
        trainer.fit(Perceptron(), federation(), algorithm)
        seconds.append(trainer.run.simulated_seconds)
    assert seconds[1] - seconds[0] == pytest.approx(2 * (3 - 1) * 5.0)


@pytest.mark.parametrize(
    ("make", "flags", "words"),
    [
        (lambda: PFedMe(strength=10.1), {}, ["above 1, got 0.1 times 10.1", "use a smaller one"]),
        (lambda: PFedMe(strength=0.0), {}, ["strength", "0.0"]),
        (lambda: PFedMe(inner_steps=0), {}, ["inner_steps", "0"]),
        (lambda: PFedMe(inner_learning_rate=-1.0), {}, ["inner_learning_rate", "-1.0"]),
        (lambda: PFedMe(server_learning_rate=0.0), {}, ["server learning rate", "0.0"]),
        (lambda: PFedMe(1.0), {"runner": "stacked"}, ["runner 'stacked'", "'serial'"]),
        (lambda: Ditto(PFedMe(1.0)), {}, ["base", "one model of each client", "PFedMe"]),
        (lambda: FedBN(PFedMe(1.0)), {}, ["FedBN's clients", "'norm.weight'", "personal parts"]),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    make: Callable[[], Algorithm], flags: dict[str, Any], words: list[str], make_trainer: MakeTrainer
) -> None:
    with pytest.raises(UserError) as error:
        make_trainer(**flags).fit(Normalised(), federation(), make())
    assert [word for word in words if word not in str(error.value)] == []
