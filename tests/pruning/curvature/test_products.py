"""Test products with the Hessian and the Gauss-Newton matrix against dense ones of small networks."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lightning_fl.pruning.curvature.products import (
    as_function,
    gauss_newton_product,
    hessian_product,
    trainable,
)

INPUTS = torch.linspace(-2, 2, 15, dtype=torch.float64).view(5, 3).cos()
LABELS = torch.tensor([0, 1, 1, 2, 0])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def loss(module: nn.Module) -> torch.Tensor:
    return F.cross_entropy(module(INPUTS), LABELS)


def by_hand(vector: torch.Tensor) -> torch.Tensor:
    """Return the network's logits as a function of one vector (31,)."""
    first, bias, second, other = vector.split([12, 4, 12, 3])
    return (INPUTS @ first.view(4, 3).T + bias).tanh() @ second.view(3, 4).T + other


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def dense(product, size: int) -> torch.Tensor:
    return torch.stack([product(unit) for unit in torch.eye(size, dtype=torch.float64)])


def test_hessian_is_the_dense_one():
    module = network()
    product = hessian_product(as_function(module, loss), list(trainable(module).values()))
    expected = torch.autograd.functional.hessian(lambda w: F.cross_entropy(by_hand(w), LABELS), flat(module))
    torch.testing.assert_close(dense(product, 31), expected, rtol=1e-10, atol=1e-12)


def test_hessian_product_is_the_finite_difference_of_gradients():
    module, step = network(), 1e-5
    vector = torch.randn(31, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    product = hessian_product(as_function(module, loss), list(trainable(module).values()))

    def gradient(w: torch.Tensor) -> torch.Tensor:
        return torch.autograd.functional.jacobian(lambda w: F.cross_entropy(by_hand(w), LABELS), w)

    difference = gradient(flat(module) + step * vector) - gradient(flat(module) - step * vector)
    torch.testing.assert_close(product(vector), difference / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.long
def test_gauss_newton_is_the_dense_one():
    module = network()
    product = gauss_newton_product(
        as_function(module, lambda m: m(INPUTS)),
        lambda z: F.cross_entropy(z, LABELS),
        list(trainable(module).values()),
    )
    jacobian = torch.autograd.functional.jacobian(by_hand, flat(module)).reshape(15, 31)
    probability = by_hand(flat(module)).softmax(1)
    curvature = torch.block_diag(*[torch.diag(p) - torch.outer(p, p) for p in probability]) / len(LABELS)
    torch.testing.assert_close(dense(product, 31), jacobian.T @ curvature @ jacobian, rtol=1e-10, atol=1e-12)


def test_parameters_without_curvature_have_none():
    module = nn.Module()
    module.curved = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    module.linear = nn.Parameter(torch.ones(1, dtype=torch.float64))
    module.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    module.frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
    function = as_function(module, lambda m: (m.curved**3).sum() + 5 * m.linear.sum())
    product = hessian_product(function, list(trainable(module).values()))
    assert dense(product, 5).diagonal().tolist() == [6, 12, 0, 0, 0]
    straight = hessian_product(lambda parameters: parameters[0].sum(), [torch.ones(2)])
    assert straight(torch.ones(2)).tolist() == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
def test_module_stays_as_it_was(kind):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()  # training mode
    before = copy.deepcopy(module.state_dict())
    modes = [part.training for part in module.modules()]
    point = list(trainable(module).values())
    if kind == "hessian":
        product = hessian_product(as_function(module, loss), point)
    else:
        product = gauss_newton_product(
            as_function(module, lambda m: m(INPUTS)), lambda z: F.cross_entropy(z, LABELS), point
        )
    product(torch.ones(sum(part.numel() for part in point), dtype=torch.float64))
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert [part.training for part in module.modules()] == modes
    assert all(parameter.grad is None for parameter in module.parameters())
