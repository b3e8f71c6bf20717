"""Federations of one client with all samples, held against the stock Trainer step by step.

A client begins a round with a new optimiser and new step-wise schedulers, while epoch-wise schedulers go on from round to round.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import oracle
import torch
from compared_runs import MakeTrainer
from torch.optim import Optimizer, lr_scheduler
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from toys import BATCH_SIZE, Perceptron, federation, samples, vector

from lightning_fl.flat_module.optimizers.manual_optimizers import AllOptimizers

ROUNDS, STEPS, SIZE = 5, 3, 12
MakeStock = Callable[..., L.Trainer]
MakeOptimizer = Callable[[L.LightningModule], Optimizer]
MakeScheduler = Callable[[Any], Any]


class Record(L.Callback):
    """Hyper-parameters of an optimiser's groups in each step; a callback, because stacks refuse objects that change."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def add(self, optimizer: Optimizer) -> None:
        names = ("lr", "momentum", "betas", "weight_decay")
        groups = [[group[name] for name in names if name in group] for group in optimizer.param_groups]
        self.steps.append([float(x) for x in tree_leaves(groups)])


class Scheduled(Perceptron):
    """Perceptron that records the hyper-parameters of each step."""

    def __init__(
        self, optimizer: MakeOptimizer, by_epoch: MakeScheduler | None = None, by_step: MakeScheduler | None = None
    ) -> None:
        super().__init__()
        self.make, self.by_epoch, self.by_step = optimizer, by_epoch, by_step
        self.record = Record()

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self)
        made = [(self.by_epoch, "epoch"), (self.by_step, "step")]
        return [optimizer], [
            {"scheduler": make(optimizer), "interval": interval, "monitor": "val/loss"}
            for make, interval in made
            if make is not None
        ]

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0:
            self.record.steps.clear()  # steps of a trial before the training

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.record.add(self.trainer.optimizers[0])
        return self.loss(batch)


class Anew(Scheduled):
    """Module that makes its optimiser and step-wise scheduler anew in each epoch of a stock trainer.

    With schedulers of both kinds, the epoch-wise one moves an optimiser of its own, from whose rates each epoch starts.
    """

    def configure_optimizers(self) -> Any:
        if self.by_epoch is None or self.by_step is None:
            return super().configure_optimizers()
        self.rounds = self.make(self)
        self.rounds._opt_called = True  # it only carries rates; schedulers warn of optimisers that never step
        self.scheduler = self.by_epoch(self.rounds)
        return [optimizer := self._of_round()], [{"scheduler": self.by_step(optimizer), "interval": "step"}]

    def _of_round(self) -> Optimizer:
        optimizer = self.make(self)
        for group, of_round in zip(optimizer.param_groups, self.rounds.param_groups, strict=True):
            group.update({name: of_round[name] for name in ("lr", "momentum", "betas") if name in group})
        return optimizer

    def on_train_epoch_start(self) -> None:
        if self.by_step is None:
            optimizer = self.trainer.optimizers[0]
            optimizer.state.clear()
            optimizer.state.update(self.make(self).state)
        elif self.current_epoch > 0:
            if self.by_epoch is not None:
                self.scheduler.step()
            optimizer = self.make(self) if self.by_epoch is None else self._of_round()
            self.trainer.strategy.optimizers = [optimizer]
            self.trainer.strategy.lr_scheduler_configs[0].scheduler = self.by_step(optimizer)


class Halves:
    """Scheduler with no class of torch: halves the rate at each step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] /= 2

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class ByHand(Scheduled):
    """Module with an optimiser for each layer, which it steps itself, as their schedulers: one by epoch, one by step."""

    def __init__(self, by_epoch: MakeScheduler, by_step: MakeScheduler) -> None:
        super().__init__(sgd, by_epoch, by_step)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in (self.hidden, self.output)]
        made = [(self.by_epoch, optimizers[0]), (self.by_step, optimizers[1])]
        return optimizers, [make(optimizer) for make, optimizer in made if make is not None]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        both: Any = self.optimizers()
        self.record.add(AllOptimizers(optimizer.optimizer for optimizer in both))  # type: ignore[arg-type]
        loss = self.loss(batch)
        for optimizer in both:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in both:
            optimizer.step()
        self.lr_schedulers()[1].step()  # type: ignore[index,call-arg,union-attr]
        return loss

    def on_validation_epoch_end(self) -> None:
        if isinstance(scheduler := self.lr_schedulers()[0], lr_scheduler.ReduceLROnPlateau):  # type: ignore[index]
            scheduler.step(float(self.trainer.callback_metrics["val/loss"]))

    def on_train_epoch_end(self) -> None:
        if not isinstance(scheduler := self.lr_schedulers()[0], lr_scheduler.ReduceLROnPlateau):  # type: ignore[index]
            scheduler.step()


class ByHandAnew(ByHand):
    """Module that begins each epoch of a stock trainer with optimisers and a step-wise scheduler as they were at first."""

    def on_train_epoch_start(self) -> None:
        by_epoch, by_step = (optimizer.optimizer for optimizer in self.optimizers())  # type: ignore[union-attr]
        by_epoch.state.clear()
        by_step.state.clear()
        scheduler: Any = self.lr_schedulers()[1]  # type: ignore[index]
        if self.current_epoch == 0:
            self.first = copy.deepcopy((by_step.state_dict(), scheduler.state_dict()))
        by_step.load_state_dict(copy.deepcopy(self.first[0]))
        scheduler.load_state_dict(copy.deepcopy(self.first[1]))


class Epochs(IterableDataset):
    """Batches of one epoch after the other, in the order in which a federation's only client reads its samples."""

    def __init__(self) -> None:
        data = federation(sizes=(SIZE,))
        data.setup("fit")
        x, y = (tensor.double().numpy()[data.client_indices[0]] for tensor in samples(SIZE))
        self.problem = oracle.Problem([x], [y], BATCH_SIZE, cohort_size=1, rounds=ROUNDS)
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        for batch in self.problem.batches(self.epoch - 1, 0):
            yield tuple(map(torch.tensor, batch))


def sgd(module: L.LightningModule) -> Optimizer:
    groups = [
        {"params": module.hidden.parameters(), "lr": 0.2},
        {"params": module.output.parameters(), "weight_decay": 0.1},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def adam(module: L.LightningModule) -> Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.02)


def of(kind: Any, **options: Any) -> MakeOptimizer:
    return lambda module: kind(module.parameters(), **options)


def check(
    module: Scheduled,
    make_trainer: MakeTrainer,
    make_stock_trainer: MakeStock,
    runner: str,
    stock: Scheduled | None = None,
    **flags: Any,
) -> None:
    """Compare the hyper-parameters of every step and the weights at the end with those of the stock Trainer."""
    stock = Anew(module.make, module.by_epoch, module.by_step) if stock is None else stock
    stock.load_state_dict(module.state_dict())
    flags["precision"] = "64-true"
    make_stock_trainer(max_epochs=ROUNDS, **flags).fit(
        stock, DataLoader(Epochs(), batch_size=None), DataLoader(TensorDataset(*samples(10, seed=1)), batch_size=4)
    )
    make_trainer(max_rounds=ROUNDS, clients_per_round=1, runner=runner, **flags).fit(module, federation(sizes=(SIZE,)))
    assert len(module.record.steps) == ROUNDS * STEPS
    np.testing.assert_allclose(module.record.steps, stock.record.steps, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(vector(module), vector(stock), rtol=0, atol=1e-9)


def chained(optimizer: Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


def sequential(optimizer: Optimizer) -> Any:
    warm_up, later = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 4)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, later], milestones=[2])


def nested(optimizer: Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler([sequential(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)])


SCHEDULERS: dict[str, MakeScheduler] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: t / 3),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[1, 2], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.1, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.01, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "SequentialLR": sequential,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4, eta_min=0.01),
    "ChainedScheduler": chained,
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.02, 0.2, step_size_up=2, mode="exp_range", gamma=0.9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=6),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=4, power=2),
}
MIXED: dict[str, MakeScheduler] = {"chain of a sequence": nested}
ONLY_BY_EPOCH: dict[str, MakeScheduler] = {
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, mode="max", patience=0, factor=0.5)
}
