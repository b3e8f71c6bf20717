"""Test every optimiser of torch against the stock Trainer."""

import copy
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from scheduled import Anew, MakeOptimizer, MakeStock, MakeTrainer, Scheduled, check, of
from torch.optim import Optimizer
from toys import federation, vector

from lightning_fl import UserError
from lightning_fl.algorithms import FedProx


def matrices(module: L.LightningModule) -> list[torch.Tensor]:
    return [p for p in module.parameters() if p.dim() == 2]


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adafactor": of(torch.optim.Adafactor),
    "Adadelta": of(torch.optim.Adadelta),
    "Adagrad": of(torch.optim.Adagrad, initial_accumulator_value=0.1),
    "Adam": of(torch.optim.Adam, lr=torch.tensor(0.02), weight_decay=0.1, amsgrad=True),
    "Adamax": of(torch.optim.Adamax),
    "AdamW": of(torch.optim.AdamW, lr=0.02),
    "ASGD": of(torch.optim.ASGD, lr=0.1, t0=2),
    "Muon": lambda module: torch.optim.Muon(matrices(module)),
    "NAdam": of(torch.optim.NAdam),
    "RAdam": of(torch.optim.RAdam),
    "RMSprop": of(torch.optim.RMSprop, momentum=0.5, centered=True),
    "Rprop": of(torch.optim.Rprop),
    "SGD": of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
}


def test_every_optimiser_of_torch_is_tried() -> None:
    named = {name: getattr(torch.optim, name) for name in torch.optim.__all__}
    kinds = {name for name, kind in named.items() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    assert kinds - {"Optimizer"} == OPTIMIZERS.keys() | {"LBFGS", "SparseAdam"}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_optimisers_are_those_of_a_stock_trainer(
    runner: str, name: str, make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    if runner == "stacked" and name in ("Adafactor", "Adagrad", "Muon"):
        pytest.skip("its steps or its first state depend on the tensors' shapes, so it is not stacked")
    check(Scheduled(OPTIMIZERS[name]), make_trainer, make_stock_trainer, runner)


class Looks(Scheduled):
    """Module whose output is looked up in a table (5, 2) with sparse gradients."""

    def __init__(self, optimizer: MakeOptimizer) -> None:
        super().__init__(optimizer)
        del self.hidden, self.output
        self.table = torch.nn.Embedding(5, 2, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x[:, 0].abs() * 10).long() % 5)


class LooksAnew(Looks, Anew):
    """The same in a stock trainer."""


@pytest.mark.parametrize("runner", ["serial", "lightning"])
def test_sparse_adam_is_that_of_a_stock_trainer(
    runner: str, make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    module = Looks(of(torch.optim.SparseAdam, lr=0.1))
    check(module, make_trainer, make_stock_trainer, runner, stock=LooksAnew(module.make))


def test_sparse_adam_needs_sparse_gradients(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"SparseAdam .*sparse gradients.*Adam.* 'serial' or 'lightning'"):
        make_trainer().fit(Looks(of(torch.optim.SparseAdam)), federation(), FedProx())


def test_methods_that_read_gradients_take_sparse_ones(make_trainer: MakeTrainer) -> None:
    module = Looks(of(torch.optim.SGD, lr=0.1))
    other = copy.deepcopy(module)
    make_trainer().fit(module, federation())
    make_trainer().fit(other, federation(), FedProx(mu=0))
    np.testing.assert_allclose(vector(other), vector(module), rtol=0, atol=1e-6)


class Counting(torch.optim.SGD):
    """SGD whose rate falls with its own count of steps, which it keeps in its groups."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["lr"] /= group["step"]
        super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"], group["weight_decay"] = rate, 0.1 * group["step"]


def test_optimisers_that_count_in_their_groups_start_anew(make_trainer: MakeTrainer) -> None:
    module = Scheduled(of(Counting, lr=0.1))
    make_trainer(max_rounds=2).fit(module, federation(sizes=(8, 8, 8)))
    assert module.record.steps == 6 * module.record.steps[:2]
