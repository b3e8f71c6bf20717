"""Test rounds in which every local step uses all samples of the client (FedDA's last rounds)."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer, equal_states
from lightning.pytorch import Callback
from roster import problem
from toys import SIZES, Perceptron, Served, federation, vector

from lightning_fl import UserError
from lightning_fl.algorithms import FedDA, FedDUDA
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.features.clock.simulated_clock import SimulatedClock


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize("variant", ["evolving", "frozen"])
@pytest.mark.parametrize("last", [1, 3, 9])
def test_matches_its_oracle(variant: Any, last: int, runner: Any, make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    given = problem(rounds=4, epochs=2, cohort_size=5)
    expected = oracle.fedda(given, vector(module), beta=0.8, frozen=variant == "frozen", full_last=last)
    ordinary = oracle.fedda(given, vector(module), beta=0.8, frozen=variant == "frozen")
    flags: dict[str, Any] = {"max_rounds": 4, "local_epochs": 2, "clients_per_round": 5, "runner": runner}
    trainer = make_trainer(**flags, precision="64-true")
    trainer.fit(module, federation(), FedDA(beta=0.8, variant=variant, full_batch_last=last))
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)
    assert np.abs(expected - ordinary).max() > 1e-4
    steps = sum(2 * -(-SIZES[k] // 4) for t in range(4) for k in given.cohort(t))
    assert trainer.global_step == steps, "the number of steps does not change"
    assert trainer.run.ledger.total_bits["up"]["model"] == 4 * 5 * 64 * 26


def test_the_server_takes_all_of_its_samples_too(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    given = problem(rounds=4, num_server=9)
    expected = oracle.fedduda(given, vector(module), beta=0.8, full_last=2)
    make_trainer(max_rounds=4, precision="64-true").fit(module, Served(9), FedDUDA(beta=0.8, full_batch_last=2))
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize(
    ("flags", "num_steps", "of_a_pass"),
    [
        ({"local_steps": 2}, lambda batches: 2, None),
        # Every accumulated step uses all batches of a pass.
        ({"local_epochs": 2, "accumulate_grad_batches": 2}, lambda batches: 2 * -(-batches // 2), None),
        # A pass includes only the samples of two batches.
        ({"local_epochs": 1, "limit_train_batches": 2}, lambda batches: min(batches, 2), 2),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else "",
)
def test_every_plan_keeps_its_number_of_steps(
    flags: dict[str, Any],
    num_steps: Callable[[int], int],
    of_a_pass: int | None,
    runner: Any,
    make_trainer: MakeTrainer,
) -> None:
    module, models, all_steps = Perceptron(), [], 0
    given = problem(rounds=1, epochs=6, cohort_size=6)
    for k in given.cohort(0):
        w, batches_per_epoch = vector(module), -(-SIZES[k] // 4)
        passes = list(given.batches(0, k))
        for s in range(num_steps(batches_per_epoch)):
            batches = passes[s * batches_per_epoch : (s + 1) * batches_per_epoch][:of_a_pass]
            w = w - 0.1 * oracle.gradient(w, *map(np.concatenate, zip(*batches, strict=True)))
            all_steps += 1
        models.append(SIZES[k] * w)
    trainer = make_trainer(max_rounds=1, clients_per_round=6, precision="64-true", runner=runner, **flags)
    trainer.fit(module, federation(), FedDA(beta=0.0, full_batch_last=1))
    assert trainer.global_step == all_steps
    np.testing.assert_allclose(vector(module), sum(models) / sum(SIZES), rtol=0, atol=1e-10)


def test_what_is_read_is_counted(make_trainer: MakeTrainer) -> None:
    """Check the counts of batches for the progress bar and of samples for the simulated clock."""
    counted: list[int] = []
    seconds = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            counted.append(len(batch[0]))

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            assert len(counted) == trainer.round_batches
            seconds.append(sum(counted))
            counted.clear()

    flags: dict[str, Any] = {"max_rounds": 2, "clients_per_round": 1, "local_epochs": 2, "callbacks": Watch()}
    fast = {"uplink_mebibytes_per_second": 1e30, "downlink_mebibytes_per_second": 1e30}
    trainer = make_trainer(**flags, clock=SimulatedClock(macs_per_second=1.0, **fast))
    trainer.fit(Perceptron(), federation(sizes=(9,)), FedDA(full_batch_last=1))
    assert seconds == [2 * 9, 2 * 3 * 9]
    assert trainer.run.simulated_seconds == pytest.approx(3 * 20 * sum(seconds))
    plan = LocalSchedule(batch_size=4, epochs=2, steps=None, full_batch=True)
    assert (plan.num_samples(9), plan.num_batches(9)) == (54, 18)
    plan = replace(plan, skips_single_samples=True)
    assert (plan.num_samples(9), plan.num_batches(9)) == (4 * 8, 8)
    assert (plan.num_samples(0), plan.num_batches(0)) == (0, 0)


class Stops(Callback):
    """Callback that ends the run after the given number of rounds."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = trainer.current_epoch + 1 == self.after


def test_a_run_that_stopped_goes_on_to_the_same_end(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> None:
    whole = Perceptron()
    half, algorithm = copy.deepcopy(whole), partial(FedDA, beta=0.8, full_batch_last=2)
    uninterrupted = make_trainer(max_rounds=4)
    uninterrupted.fit(whole, federation(), algorithm())
    make_trainer(max_rounds=4, callbacks=Stops(3), **keeps_files).fit(half, federation(), algorithm())
    resumed, trainer = Perceptron(), make_trainer(max_rounds=4, **keeps_files)
    trainer.fit(resumed, federation(), algorithm(), ckpt_path="last")
    assert torch.equal(torch.tensor(vector(whole)), torch.tensor(vector(resumed)))
    assert equal_states(uninterrupted.run.state_dict(), trainer.run.state_dict())


@pytest.mark.parametrize(
    ("stopped", "max_rounds", "said"),
    [
        (4, 6, ["Rounds 3 to 4 used full batches at the end of 4 rounds; the end of 6 rounds uses them again."]),
        (3, 5, ["Round 3 used full batches at the end of 4 rounds; the end of 5 rounds uses them again."]),
        (3, 4, []),
        (2, 6, []),
    ],
)
def test_the_last_rounds_are_those_of_the_run_that_goes_on(
    stopped: int,
    max_rounds: int,
    said: list[str],
    make_trainer: MakeTrainer,
    keeps_files: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Check that a longer run reports earlier full-batch rounds, and nothing if there were none."""
    algorithm = FedDA(full_batch_last=2)
    make_trainer(max_rounds=4, callbacks=Stops(stopped), **keeps_files).fit(Perceptron(), federation(), algorithm)
    trainer = make_trainer(max_rounds=max_rounds, **keeps_files)
    trainer.fit(Perceptron(), federation(), algorithm, ckpt_path="last")
    assert [record.message for record in caplog.records if "used full batches" in record.message] == said


@pytest.mark.parametrize("given", [-1, 0.5, True])
def test_a_number_of_rounds_is_asked_for(given: Any) -> None:
    sentence = f"full_batch_last, a number of rounds, must be a whole number of at least 0, got {given}"
    with pytest.raises(UserError, match=sentence):
        FedDA(full_batch_last=given)
