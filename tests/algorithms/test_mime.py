"""Test Mime: two turns in a round, and gradients corrected by those of the same batches at the received model."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import RUNNERS, MakeTrainer, agree, assert_same, bits_of, fits, ran
from lightning.pytorch import Callback
from roster import problem
from torch import Tensor, nn
from toys import SIZES, Convolved, Normalised, Perceptron, Statistics, Tied, federation, samples, vector

from lightning_fl import UserError
from lightning_fl.aggregators import NormalisedMean
from lightning_fl.algorithms import Algorithm, DeviceM, FedAvg
from lightning_fl.callbacks import MagnitudePruning
from lightning_fl.codecs import ErrorFeedback, SharedTopK, TopK
from lightning_fl.rules import CorrectedMomentum, Thresholded
from lightning_fl.slots import LocalTraining, State
from lightning_fl.steps import Apply, DynamicServerUpdate, GradientMomentum


@RUNNERS
def test_one_local_step_is_one_of_the_cohorts_full_gradient(runner: Any, make_trainer: MakeTrainer) -> None:
    """Compare, for any batches, with centralised SGD with momentum on the samples of the round's clients."""
    module = Perceptron()
    w, m, given = vector(module), np.zeros(26), problem(rounds=4)
    for t in range(4):
        x, y = (np.concatenate([of[k] for k in given.cohort(t)]) for of in (given.x, given.y))
        g = oracle.gradient(w, x, y)
        w = w - 0.1 * (0.7 * m + 0.3 * g)
        m = 0.7 * m + 0.3 * g
    trainer = make_trainer(max_rounds=4, local_steps=1, precision="64-true", runner=runner)
    trainer.fit(module, federation(), DeviceM(local_beta=0.7, variant="mime"))
    np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-12)


@dataclass(frozen=True)
class Notes(CorrectedMomentum):
    """Rule that records the difference of the two gradients of each step, and their size."""

    seen: list[tuple[float, float]] = field(default_factory=list)

    def correct(self, local: LocalTraining) -> None:
        difference = (local.gradient - local.gradient_at_received).abs().max()
        self.seen.append((float(difference), float(local.gradient.abs().max())))
        super().correct(local)


class Dropping(Perceptron):
    """Perceptron that drops half of its hidden units at random."""

    def forward(self, x: Tensor) -> Tensor:
        return self.output(nn.functional.dropout(torch.tanh(self.hidden(x)), training=self.training))


def decayed(module: Any) -> torch.optim.Optimizer:
    """Return an optimiser with weight decay of one layer only."""
    groups = [{"params": module.hidden.parameters()}, {"params": module.output.parameters(), "weight_decay": 0.3}]
    return torch.optim.SGD(groups, lr=0.0)


def still(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.0)


@RUNNERS
@pytest.mark.parametrize(
    ("kind", "configure", "flags"),
    [
        (Perceptron, still, {}),
        (Dropping, still, {}),
        (Normalised, still, {}),
        (Perceptron, still, {"gradient_clip_val": 0.05}),
        (Perceptron, still, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
        (Perceptron, decayed, {}),
        (Perceptron, still, {"accumulate_grad_batches": 2}),
        (Dropping, still, {"accumulate_grad_batches": 2}),
        (Dropping, decayed, {"gradient_clip_val": 0.05, "callbacks": MagnitudePruning(rate=0.4, prune_epoch=0)}),
    ],
    ids=["plain", "dropout", "batch norm", "norm", "value", "decay", "accumulated", "accumulated dropout", "masked"],
)
def test_at_the_received_model_the_two_gradients_are_one(
    kind: Any, configure: Any, flags: dict[str, Any], runner: Any, make_trainer: MakeTrainer
) -> None:
    """Check every step of a training at learning rate 0, with all options that change gradients."""
    module, rule = kind(), Notes(beta=0.5)
    module.configure = configure
    algorithm = Algorithm(rule=rule, steps=(Apply(), GradientMomentum(beta=0.5)))
    trainer = make_trainer(local_epochs=2, precision="64-true", runner=runner, **flags)
    trainer.fit(module, federation(sizes=(8, 9, 16)), algorithm)
    assert len(rule.seen) > 2 * 4
    for difference, size in rule.seen:
        assert difference < 1e-14
        assert size > 1e-3


class Centred(Statistics):
    """Module whose loss depends on its running mean."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        super().training_step(batch, batch_idx)
        return self.loss((batch[0] - self.mean, batch[1]))


@pytest.mark.parametrize("module", [Centred(True), Centred(False), Tied()], ids=["written", "replaced", "tied"])
def test_both_runners_take_the_received_buffers_to_the_received_model(module: Any, make_trainer: MakeTrainer) -> None:
    assert_same(fits(make_trainer, module, federation, DeviceM(variant="mime"), local_epochs=2))


@RUNNERS
def test_what_training_leaves_behind_is_that_of_the_training_alone(runner: Any, make_trainer: MakeTrainer) -> None:
    """Check that the passes at the received model do not change running statistics, the module's logs and steps."""

    class Logs(Normalised):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("first", batch[0].sum())
            self.log("batches", 1.0, reduce_fx="sum")
            return loss

    one = Logs()
    other, trainers = copy.deepcopy(one), []
    # The learning rate is 0, so both see the same model: running statistics depend only on the batches.
    for module, algorithm in ((one, FedAvg()), (other, DeviceM(variant="mime"))):
        module.configure = still
        trainer = make_trainer(max_rounds=1, local_epochs=2, runner=runner)
        trainer.fit(module, federation(), algorithm)
        trainers.append(trainer)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-6, atol=1e-7, msg=name)
    assert one.norm.num_batches_tracked > 0
    names = ("first", "batches", "train/loss")
    for name in names:
        here, there = (trainer.callback_metrics[name] for trainer in trainers)
        assert float(here) == pytest.approx(float(there), rel=1e-6), name
    assert trainers[0].global_step == trainers[1].global_step


def test_running_statistics_cross_once(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1)
    trainer.fit(Normalised(), federation(), DeviceM(variant="mime"))
    d, buffers, clients = 32, 6, 3
    assert bits_of(trainer, "up") == {"model": 32 * d * clients, "moments": 32 * d * clients, "buffers": 192 * clients}
    assert bits_of(trainer, "down") == {
        "model": 32 * d * clients,
        "moments": 2 * 32 * d * clients,
        "buffers": 32 * buffers * clients,
    }


@RUNNERS
def test_clients_train_what_they_own_by_their_own_gradient(runner: Any, make_trainer: MakeTrainer) -> None:
    """Check one step: w moves by the mean gradient of all, the client's own parameters as in FedAvg."""
    one = Perceptron()
    other, owned = copy.deepcopy(one), []
    for module, algorithm in (
        (one, Algorithm(personal=["output"])),
        (
            other,
            Algorithm(rule=CorrectedMomentum(beta=0.0), steps=(Apply(), GradientMomentum()), personal=["output"]),
        ),
    ):
        trainer = make_trainer(max_rounds=1, local_steps=1, precision="64-true", runner=runner)
        trainer.fit(module, federation(), algorithm)
        owned.append({client: dict(state) for client, state in trainer.run.clients.items()})
    assert owned[0].keys() == owned[1].keys()
    for client, state in owned[0].items():
        for name, x in state.items():
            torch.testing.assert_close(owned[1][client][name], x, rtol=0, atol=1e-14)
    assert not torch.equal(one.hidden.weight, other.hidden.weight)


@RUNNERS
def test_a_lossy_uplink_thins_out_both_turns(runner: Any, make_trainer: MakeTrainer) -> None:
    """Count ⌊0.3 · 26⌋ = 7 numbers and a mask: the gradient in the first turn and the delta in the second."""
    algorithm = Algorithm(
        rule=CorrectedMomentum(), steps=(Apply(), GradientMomentum()), uplink=ErrorFeedback(TopK(alpha=0.3))
    )
    trainer = make_trainer(max_rounds=2, runner=runner)
    trainer.fit(Perceptron(), federation(), algorithm)
    assert bits_of(trainer, "up") == {"model": 3 * 7 * 32, "moments": 3 * 7 * 32, "mask": 2 * 3 * 26}
    for memory in trainer.run.client_memory.values():
        assert set(memory) == {"residual/model", "residual/moments/gradient"}


def test_who_is_out_after_the_first_turn_does_not_train(make_trainer: MakeTrainer) -> None:
    trained = []

    class Broken(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * (torch.nan if (batch[0] > 100).any() else 1.0)

    class Watch(Callback):
        def on_client_upload(self, trainer: Any, pl_module: Any, client: int, place: int, total: int) -> None:
            trained.append((client, total))

    x, y = samples(sum(SIZES))
    data = federation(train=(x, y))
    data.setup("fit")
    x[data.client_indices[3][0]] = 1000.0
    trainer = make_trainer(max_rounds=1, clients_per_round=6, callbacks=Watch())
    trainer.fit(Broken(), federation(train=(x, y)), DeviceM(variant="mime"))
    assert sorted(trained) == [(client, 5) for client in (0, 1, 2, 4, 5)]
    assert trainer.callback_metrics["clients/rejected"] == 1


@pytest.mark.slow
def test_in_two_processes_the_mean_is_that_of_all(tmp_path: Path) -> None:
    words = ("--model.network", "linear")
    method = "DeviceM --algorithm.variant mime"
    one = ran(tmp_path / "one", *words, algorithm=method)
    assert any(int(row["clients/dropped"]) for row in one[0])
    agree(one, ran(tmp_path / "two", *words, num_processes=2, algorithm=method))


@dataclass(frozen=True)
class Keeping(CorrectedMomentum):
    """Rule that counts the rounds of its client."""

    def init(self, params: Tensor) -> State:
        return {"turns": torch.zeros(1)}

    def finish(self, local: LocalTraining) -> Any:
        local.state = {"turns": local.state["turns"] + 1}
        return super().finish(local)


@RUNNERS
def test_the_first_turn_leaves_what_clients_keep_alone(runner: Any, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=3, clients_per_round=6, runner=runner)
    trainer.fit(Perceptron(), federation(), Algorithm(rule=Keeping(), steps=(Apply(), GradientMomentum())))
    assert [state["turns"].tolist() for state in trainer.run.clients.values()] == [[3.0]] * 6


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"steps": (Apply(),)}, ["CorrectedMomentum needs 'moments/momentum', which no step shares"]),
        (
            {"aggregator": NormalisedMean()},
            ["NormalisedMean needs 'scalars/normaliser'", "do not send before the training"],
        ),
        ({"uplink": SharedTopK(0.3)}, ["SharedTopK needs 'model'", "do not send before the training"]),
        (
            {"steps": (Apply(), DynamicServerUpdate(rule=CorrectedMomentum()), GradientMomentum())},
            ["CorrectedMomentum needs 'moments/gradient', which no step shares"],
        ),
    ],
)
def test_parts_that_do_not_fit_it_are_named(parts: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        Algorithm(**{"rule": CorrectedMomentum(), "steps": (Apply(), GradientMomentum()), **parts})
    for word in words:
        assert word in str(error.value)


def test_another_rule_around_it_keeps_the_two_turns(make_trainer: MakeTrainer) -> None:
    one, two = Convolved(), Convolved()
    two.load_state_dict(one.state_dict())
    steps = (Apply(), GradientMomentum())
    for module, rule in ((one, CorrectedMomentum()), (two, Thresholded(CorrectedMomentum(), threshold=0.0))):
        make_trainer(max_rounds=3).fit(module, federation(), Algorithm(rule=rule, steps=steps))
    np.testing.assert_array_equal(vector(one), vector(two))
