"""Test stragglers, clients that are stopped early. `test_algorithms.py` tests that methods treat them as in their papers."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from compared_runs import MakeTrainer
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback
from toys import BATCH_SIZE, Perceptron, federation, read_rows

from lightning_fl.algorithms import FedNova
from lightning_fl.clients.local_schedule import LocalSchedule


class Watch(Callback):
    """Callback that counts the batches and steps of each round's clients, which train one after the other."""

    def __init__(self) -> None:
        self.batches: Counter[int] = Counter()
        self.promised: dict[int, int] = {}
        self.steps: list[int] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.promised[trainer.current_epoch] = trainer.num_training_batches

    def on_client_download(self, trainer: Any, pl_module: Any, client: int) -> None:
        self.steps.append(0)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.steps[-1] += 1

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self.batches[trainer.current_epoch] += 1


@pytest.mark.parametrize(
    "flags",
    [
        {"local_epochs": 2},
        {"local_steps": 5},
        {"local_steps": 7, "accumulate_grad_batches": 2},
        {"local_epochs": 3, "accumulate_grad_batches": 2, "limit_train_batches": 0.7},
    ],
    ids=lambda flags: " ".join(flags),
)
def test_rounds_promise_the_batches_that_they_train(flags: dict[str, Any], make_trainer: MakeTrainer) -> None:
    watch = Watch()
    flags = {"max_rounds": 6, "clients_per_round": 5, "straggler_rate": 0.5, "dropout_rate": 0.2, **flags}
    make_trainer(callbacks=watch, **flags).fit(Perceptron(), federation())
    assert dict(watch.batches) == watch.promised


def test_all_straggle_and_make_between_one_step_and_all_but_one(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    watch = Watch()
    trainer = make_trainer(max_rounds=40, local_steps=4, straggler_rate=1.0, callbacks=watch, **keeps_files)
    trainer.fit(Perceptron(), federation())
    assert {steps: watch.steps.count(steps) > 20 for steps in set(watch.steps)} == {1: True, 2: True, 3: True}
    assert [row["clients/straggling"] for row in read_rows(tmp_path)] == ["3"] * 40


@pytest.mark.matrix
def test_as_many_straggle_as_the_rate_says(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    trainer = make_trainer(max_rounds=100, local_steps=3, straggler_rate=0.3, **keeps_files)
    trainer.fit(Perceptron(), federation())
    straggling = sum(int(row["clients/straggling"]) for row in read_rows(tmp_path))
    assert 60 < straggling < 120  # of 300; 90 ± 8


def test_a_client_with_one_step_cannot_straggle(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    plain, stragglers = Perceptron(), Perceptron()
    stragglers.load_state_dict(plain.state_dict())
    for module, rate in ((plain, 0.0), (stragglers, 1.0)):
        folder = {**keeps_files, "default_root_dir": tmp_path / str(rate)}
        make_trainer(max_rounds=2, local_steps=1, straggler_rate=rate, **folder).fit(module, federation())
    assert all((plain.state_dict()[name] == value).all() for name, value in stragglers.state_dict().items())
    assert [row["clients/straggling"] for row in read_rows(tmp_path / "1.0")] == ["0", "0"]
    assert "clients/straggling" not in read_rows(tmp_path / "0.0")[0]


def test_the_clock_waits_until_the_time_is_up(make_trainer: MakeTrainer) -> None:
    """Check that a round takes as long as without stragglers, because its time limit is what stops them."""
    seconds = [
        float(trainer.callback_metrics["time/simulated_seconds"])
        for trainer in (make_trainer(max_rounds=3, local_steps=6, straggler_rate=rate) for rate in (0.0, 1.0))
        if trainer.fit(Perceptron(), federation(), FedNova()) is None
    ]
    assert seconds[0] == seconds[1] > 0


@pytest.mark.long
@given(
    num_samples=st.integers(0, 40),
    epochs=st.integers(1, 3),
    accumulate=st.integers(1, 3),
    full_batch=st.booleans(),
    skip_single=st.booleans(),
    repeat=st.integers(1, 3),
    drop_last=st.booleans(),
)
def test_samples_and_batches_add_up_step_by_step(
    num_samples: int,
    epochs: int,
    accumulate: int,
    full_batch: bool,
    skip_single: bool,
    repeat: int,
    drop_last: bool,
) -> None:
    plan = LocalSchedule(
        BATCH_SIZE,
        epochs,
        steps=None,
        accumulate=accumulate,
        full_batch=full_batch,
        repeat=repeat,
        drop_last=drop_last,
        skips_single_samples=skip_single,
    )
    sizes = plan.batch_sizes(num_samples)
    in_step = len(sizes) if full_batch else accumulate
    steps = [sizes[start : start + in_step] for start in range(0, len(sizes), in_step or 1) for _ in range(repeat)]
    done = plan.num_steps(len(sizes))
    stream = (steps * done)[:done]
    for count in range(done + 1):
        read = [size for step in stream[:count] for size in step]
        assert plan.num_batches(num_samples, count) == len(read)
        assert plan.num_samples(num_samples, count) == sum(read)
    assert plan.num_samples(num_samples) == plan.num_samples(num_samples, done)
