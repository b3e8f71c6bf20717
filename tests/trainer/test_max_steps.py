"""Test that `max_steps` ends a run, and that `min_steps` lets it go on, in the steps that a client's `global_step` counts."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer
from torch.utils.data import DataLoader, TensorDataset
from toys import Perceptron, federation, samples

from lightning_fl import UserError
from lightning_fl.algorithms import FedAsync
from lightning_fl.plan import rehearsal

RUNNERS = ("serial", "stacked", "lightning")


class StopsAtOnce(L.Callback):
    """Callback that stops a run after its first round."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = True


class CountsSteps(Perceptron):
    """Module that keeps `global_step` at the end of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.trainer.global_step)


class TwoOptimizers(Perceptron):
    """Module that makes a step of each of its two optimisers in every batch."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.hidden, self.output)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_last_round_has_the_steps_that_are_left(runner: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    data, flags = lambda: federation((8, 8, 8), batch_size=4), {"runner": runner, "enable_checkpointing": True}
    module, oracle = Perceptron(), Perceptron()
    oracle.load_state_dict(module.state_dict())
    limited = make_trainer(**flags, max_rounds=9, max_steps=5, default_root_dir=tmp_path / "limited")
    limited.fit(module, data())
    whole = make_trainer(**flags, max_rounds=2, default_root_dir=tmp_path / "oracle")
    whole.fit(oracle, data())
    last = make_trainer(**flags, max_rounds=3, local_steps=1, default_root_dir=tmp_path / "oracle")
    last.fit(oracle, data(), ckpt_path="last")
    assert (limited.run.round, limited.run.num_successive_steps, limited.run.num_steps) == (3, 5, 15)
    assert torch.equal(limited.run.params, last.run.params)
    assert limited.fit_loop.rows[-1]["clients/samples"] == last.fit_loop.rows[-1]["clients/samples"]
    assert limited.fit_loop.rows[-1]["time/simulated_seconds"] == last.fit_loop.rows[-1]["time/simulated_seconds"]
    assert "val/loss" in limited.fit_loop.rows[-1]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_resumed_run_goes_on_to_max_steps(
    runner: str, make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"runner": runner, "enable_checkpointing": True, "max_steps": 7}
    module, other = Perceptron(), Perceptron()
    other.load_state_dict(module.state_dict())
    whole = make_trainer(**flags, max_rounds=20, default_root_dir=tmp_path / "whole")
    whole.fit(module, federation())
    make_trainer(**flags, max_rounds=1, default_root_dir=tmp_path / "halves").fit(other, federation())
    resumed = make_trainer(**flags, max_rounds=20, default_root_dir=tmp_path / "halves")
    resumed.fit(other, federation(), ckpt_path="last")
    assert resumed.run.num_successive_steps == whole.run.num_successive_steps == 7
    assert torch.equal(resumed.run.params, whole.run.params)
    again = make_trainer(**flags, max_rounds=20, default_root_dir=tmp_path / "halves")
    with caplog.at_level("INFO", "lightning.pytorch"):
        again.fit(other, federation(), ckpt_path="last")
    assert again.run.round == whole.run.round
    assert "Nothing is left to do: max_steps is 7, and " in caplog.text


def test_one_client_makes_the_steps_of_lightning(make_trainer: MakeTrainer, make_stock_trainer: Any) -> None:
    ours, stock, seen = CountsSteps(), CountsSteps(), [1, 2, 3, 4, 5]
    make_trainer(max_rounds=9, max_steps=5, clients_per_round=1).fit(ours, federation((8,), batch_size=4))
    loader = DataLoader(TensorDataset(*samples(8)), batch_size=4)
    make_stock_trainer(max_epochs=9, max_steps=5, limit_val_batches=0).fit(stock, loader)
    assert ours.seen == stock.seen == seen


@pytest.mark.parametrize("runner", ["serial", "lightning"])
def test_a_batch_of_several_steps_is_the_last_that_begins_below_max_steps(
    runner: str, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(runner=runner, max_rounds=9, max_steps=7, clients_per_round=1)
    trainer.fit(TwoOptimizers(), federation((16,), batch_size=4))
    assert (trainer.run.round, trainer.run.num_steps) == (1, 8)


@pytest.mark.parametrize("seconds", [3600.0, 0.0], ids=["all rounds", "first rounds"])
def test_a_plan_ends_with_max_steps(seconds: float, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "MOST_SECONDS", seconds)
    trainer = make_trainer(max_rounds=20, max_steps=11)
    plan = trainer.plan(Perceptron(), federation((8, 8, 8), batch_size=4))
    trainer.fit(Perceptron(), federation((8, 8, 8), batch_size=4))
    samples_read = sum(row["clients/samples"] for row in trainer.fit_loop.rows)
    assert (plan.rounds, plan.steps) == (trainer.run.round, trainer.run.num_steps) == (6, 33)
    assert plan.macs == 3 * trainer.fit_loop.rows[0]["model/macs"] * samples_read
    assert plan.rehearsed_rounds == (6 if seconds else 2)
    assert plan.uplink_bytes == trainer.fit_loop.rows[-1]["comm/total_uplink_bytes"]


def test_min_steps_lets_a_stopped_run_go_on(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(max_rounds=9, min_steps=5, callbacks=[StopsAtOnce()])
    with caplog.at_level("INFO", "lightning.pytorch"):
        trainer.fit(Perceptron(), federation((8, 8, 8), batch_size=4))
    assert (trainer.run.round, trainer.run.num_successive_steps) == (3, 6)
    assert "StopsAtOnce would stop the run after round 1; it goes on until min_steps 5." in caplog.text


def test_rounds_that_end_before_max_steps_say_so(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lightning.pytorch"):
        make_trainer(max_rounds=1, max_steps=5).fit(Perceptron(), federation((8, 8, 8), batch_size=4))
    assert "The run ends after 2 of max_steps 5, with round 1, the last of max_rounds." in caplog.text


def test_a_server_that_does_not_wait_refuses_max_steps(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"FedAsync .* leave out trainer\.max_steps, and use max_rounds"):
        make_trainer(max_steps=5).fit(Perceptron(), federation(), FedAsync())
