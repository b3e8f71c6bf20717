"""Test every scheduler of torch against the stock Trainer."""

import copy
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from scheduled import (
    MIXED,
    ONLY_BY_EPOCH,
    SCHEDULERS,
    MakeOptimizer,
    MakeStock,
    MakeTrainer,
    Scheduled,
    adam,
    check,
    sgd,
)
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from toys import Perceptron, federation, samples, vector

from lightning_fl import UserError


def test_every_scheduler_of_torch_is_tried() -> None:
    assert set(lr_scheduler.__all__) - {"LRScheduler"} == SCHEDULERS.keys() | ONLY_BY_EPOCH.keys()


STEPWISE = ["LambdaLR", "LinearLR", "CyclicLR", "OneCycleLR", "chain of a sequence"]
"""Schedulers whose rates depend on the steps, the last rate, the momentum, the number of steps, and other schedulers."""


def with_each_runner(schedulers: dict[str, Any], *in_stacks: str) -> pytest.MarkDecorator:
    """Return cases of all schedulers with SGD, and of some with Adam in stacks.

    A stack has the same schedulers over one optimiser for all clients: those differ there that read its rate, set
    its momentum, or hold other schedulers.
    """
    return pytest.mark.parametrize(
        ("name", "runner", "optimizer"),
        [*((name, "serial", sgd) for name in schedulers), *((name, "stacked", adam) for name in in_stacks)],
    )


@with_each_runner(SCHEDULERS | MIXED | ONLY_BY_EPOCH, *STEPWISE, "ReduceLROnPlateau")
def test_rounds_are_epochs_of_a_stock_trainer(
    name: str, runner: str, optimizer: MakeOptimizer, make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    scheduler = (SCHEDULERS | MIXED | ONLY_BY_EPOCH)[name]
    check(Scheduled(optimizer, by_epoch=scheduler), make_trainer, make_stock_trainer, runner)


@with_each_runner(SCHEDULERS | MIXED, *STEPWISE)
def test_steps_are_those_of_a_stock_trainer(
    name: str, runner: str, optimizer: MakeOptimizer, make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    scheduler = (SCHEDULERS | MIXED)[name]
    check(Scheduled(optimizer, by_step=scheduler), make_trainer, make_stock_trainer, runner)


@pytest.mark.parametrize(
    ("by_epoch", "by_step"),
    [
        *(("LambdaLR", name) for name in SCHEDULERS | MIXED),
        *zip(["SequentialLR", "ChainedScheduler", "OneCycleLR", "LinearLR", "OneCycleLR"], STEPWISE, strict=True),
    ],
)
def test_step_wise_schedulers_start_from_the_rates_of_the_round(
    by_epoch: str, by_step: str, make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    module = Scheduled(sgd, SCHEDULERS[by_epoch], (SCHEDULERS | MIXED)[by_step])
    check(module, make_trainer, make_stock_trainer, "serial")


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_every_client_starts_alike(optimizer: MakeOptimizer, name: str, runner: str, make_trainer: MakeTrainer) -> None:
    module = Scheduled(optimizer, by_step=SCHEDULERS[name])
    data = federation(sizes=(8, 8, 8))
    make_trainer(max_rounds=2, clients_at_once=1 if runner == "stacked" else None, runner=runner).fit(module, data)
    assert module.record.steps[1] != module.record.steps[0]
    assert module.record.steps == 6 * module.record.steps[:2]


class Sets(L.Callback):
    """Callback that sets the learning rate at the start of the third epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = 0.01


@pytest.mark.parametrize("name", [None, "ExponentialLR", "OneCycleLR"])
def test_rates_that_a_callback_sets_stay(
    name: str | None, make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    module = Scheduled(sgd, by_epoch=SCHEDULERS[name] if name else None)
    check(module, make_trainer, make_stock_trainer, "serial", callbacks=Sets())


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR", "SequentialLR", "chain of a sequence"])
def test_schedules_go_on_after_a_checkpoint(
    name: str, optimizer: MakeOptimizer, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    scheduler = (SCHEDULERS | MIXED)[name]
    data, flags = federation(sizes=(8, 8)), {"clients_per_round": 2, "precision": "64-true"}
    whole, begun, resumed = (Scheduled(optimizer, scheduler, SCHEDULERS["LinearLR"]) for _ in range(3))
    begun.load_state_dict(whole.state_dict())
    make_trainer(max_rounds=5, **flags).fit(whole, data)
    make_trainer(max_rounds=2, **flags, **keeps_files).fit(begun, data)
    path = tmp_path / "checkpoints" / "last.ckpt"
    make_trainer(max_rounds=5, **flags, **keeps_files).fit(resumed, data, ckpt_path=path)
    assert begun.record.steps + resumed.record.steps == whole.record.steps
    np.testing.assert_array_equal(vector(resumed), vector(whole))


def test_a_plateau_of_steps_is_refused(make_trainer: MakeTrainer) -> None:
    module = Scheduled(sgd, by_step=ONLY_BY_EPOCH["ReduceLROnPlateau"])
    with pytest.raises(UserError, match="interval must be 'epoch', got 'step'"):
        make_trainer().fit(module, federation())


class Follows(lr_scheduler.LRScheduler):
    """Scheduler of the user's that watches a metric: the rate is a tenth of it."""

    metric = 1.0

    def get_lr(self) -> Any:
        return [0.1 * self.metric for _ in self.base_lrs]

    def step(self, metrics: Any = 1.0) -> None:
        self.metric = float(metrics)
        super().step()


class FollowsValidation(Scheduled):
    """Module with such a scheduler, of the metric `monitor`."""

    monitor, strict, interval = "val/loss", True, "epoch"

    def __init__(self) -> None:
        super().__init__(sgd)

    def configure_optimizers(self) -> Any:
        scheduler = {"scheduler": Follows(optimizer := self.make(self)), "monitor": self.monitor}
        options = {"strict": self.strict, "interval": self.interval, "reduce_on_plateau": True}
        return [optimizer], [scheduler | options]


class FollowsAnew(FollowsValidation):
    """The same with an optimiser without a state in each epoch of a stock trainer."""

    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers[0].state.clear()


@pytest.mark.parametrize("runner", ["serial", "lightning"])
def test_a_scheduler_of_the_users_watches_a_metric(
    runner: str, make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    check(FollowsValidation(), make_trainer, make_stock_trainer, runner, FollowsAnew())


def test_a_metric_that_is_not_logged_is_missed(make_trainer: MakeTrainer) -> None:
    class Misses(FollowsValidation):
        monitor = "val/nothing"

    with pytest.raises(
        UserError, match=r"Follows .* val/nothing which is not available\. Available metrics are: .*val/loss"
    ):
        make_trainer().fit(Misses(), federation())
    Misses.strict = False
    with pytest.warns(RuntimeWarning, match="val/nothing which is not available but strict is False, so"):
        make_trainer().fit(Misses(), federation())
    Misses.interval = "step"
    with pytest.raises(UserError, match="Follows watches a metric of the round, so its interval must be 'epoch'"):
        make_trainer().fit(Misses(), federation())


class Seen(L.Callback):
    """Rate of each batch; a callback, because a stack refuses modules whose objects change."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}


class Rates(Perceptron):
    """Module that records the rate of each batch; a step-wise scheduler halves it. It may skip batches."""

    def __init__(self, frequency: int, skipped: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.frequency, self.skipped = frequency, skipped
        self.seen = Seen()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": self.frequency}]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.rates[batch_idx] = self.trainer.optimizers[0].param_groups[0]["lr"]
        return None if batch_idx in self.skipped else self.loss(batch)


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize(("accumulate", "frequency"), [(1, 2), (2, 2), (2, 3), (3, 2)])
def test_a_frequency_counts_batches(
    accumulate: int, frequency: int, runner: str, make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    compare_rates(Rates(frequency), accumulate, runner, make_trainer, make_stock_trainer)


def test_steps_without_a_loss_move_schedulers(make_trainer: MakeTrainer, make_stock_trainer: MakeStock) -> None:
    compare_rates(Rates(1, skipped=(2, 3)), 2, "serial", make_trainer, make_stock_trainer)


def compare_rates(
    module: Rates, accumulate: int, runner: str, make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    stock = copy.deepcopy(module)
    flags = {"accumulate_grad_batches": accumulate}
    make_trainer(max_rounds=1, clients_per_round=1, runner=runner, **flags).fit(module, federation(sizes=(28,)))
    loader = DataLoader(TensorDataset(*samples(28)), batch_size=4)
    make_stock_trainer(max_epochs=1, **flags).fit(stock, loader)
    assert len(set(stock.seen.rates.values())) > 1
    assert module.seen.rates == stock.seen.rates
