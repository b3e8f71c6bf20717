"""Test the curvature of a LightningModule's training loss, without changes to the module."""

import copy
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torchmetrics import MeanMetric

from lightning_fl.errors import UserError
from lightning_fl.pruning import TrainingLoss
from lightning_fl.pruning.curvature.products import as_function, gauss_newton_product, hessian_product

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))
        self.mean = MeanMetric()
        self.kept: list[Any] = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.mean.update(loss)
        self.kept.append(batch_idx)
        self.log("train/loss", loss)
        self.log_dict({"train/other": loss})
        return {"loss": loss}


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_product_is_that_of_the_module_in_evaluation_mode(kind):
    module = Classifier()
    problem = TrainingLoss(module, kind)
    vector = torch.randn(size(module), generator=torch.Generator().manual_seed(1))
    found = problem.curvature((X, Y))(problem.point)(vector)
    twin = copy.deepcopy(module.net).eval()
    point = [parameter.detach() for parameter in twin.parameters()]
    if kind == "hessian":
        expected = hessian_product(as_function(twin, lambda m: F.cross_entropy(m(X), Y)), point)
    else:
        expected = gauss_newton_product(as_function(twin, lambda m: m(X)), lambda z: F.cross_entropy(z, Y), point)
    torch.testing.assert_close(found, expected(vector))


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_nothing_of_the_module_changes(kind):
    module = Classifier()
    state, modes = copy.deepcopy(module.state_dict()), [part.training for part in module.modules()]
    problem = TrainingLoss(module, kind)
    problem.curvature((X, Y))(problem.point)(torch.ones(size(module)))
    assert all(torch.equal(x, state[name]) for name, x in module.state_dict().items())
    assert [part.training for part in module.modules()] == modes
    assert all(parameter.grad is None and parameter.requires_grad for parameter in module.parameters())
    assert module.mean.weight == 0
    assert module.kept == []
    assert "log" not in vars(module)


def test_step_without_an_index_and_with_a_bare_loss():
    class Bare(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([2.0]))

        def training_step(self, batch):
            return (self.weight**3 * batch).sum()

    problem = TrainingLoss(Bare())
    assert problem.curvature(torch.tensor([0.5]))(problem.point)(torch.ones(1)).tolist() == [6.0]


def test_what_cannot_be_asked_is_refused():
    class Manual(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    class Silent(Classifier):
        def training_step(self, batch, batch_idx):
            return None

    class Squared(Classifier):
        def training_step(self, batch, batch_idx):
            return self(batch[0]).square().mean()

    with pytest.raises(
        UserError, match=r"Manual steps its optimisers itself .*, so AdaptivePruning .*: use FilterPruning"
    ):
        TrainingLoss(Manual())
    with pytest.raises(UserError, match="curvature 'hesian' is unknown; did you mean 'hessian'"):
        TrainingLoss(Classifier(), "hesian")
    silent, squared, good = TrainingLoss(Silent()), TrainingLoss(Squared(), "ggn"), TrainingLoss(Classifier(), "ggn")
    with pytest.raises(UserError, match="training_step of Silent returns no loss, but NoneType"):
        silent.curvature((X, Y))(silent.point)
    with pytest.raises(UserError, match=r"curvature='ggn' needs a classifier: Squared\.forward"):
        squared.curvature((X, Y))
    with pytest.raises(UserError, match="curvature='ggn' needs a classifier"):
        good.curvature(X)


def test_operations_that_cannot_be_differentiated_twice_are_named():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x**2

        @staticmethod
        def backward(ctx, gradient):
            raise NotImplementedError("derivative for once is not implemented")

    class Network(Classifier):
        def training_step(self, batch, batch_idx):
            return Once.apply(self(batch[0])).sum()

    problem = TrainingLoss(Network())
    with pytest.raises(UserError, match=r"loss of Network cannot be differentiated twice.*curvature='ggn' may work"):
        problem.curvature((X, Y))(problem.point)
