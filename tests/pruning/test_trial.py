"""Test the random networks on which a pruning is tried."""

import pytest
import torch
from compared_runs import MakeTrainer
from torch import Tensor, nn
from toys import Perceptron, Served

from lightning_fl.algorithms import IMC, Algorithm, HeteroFL, PruneFL
from lightning_fl.pruning.trial import fit_norms, randomise


class Residual(nn.Module):
    """Adds a convolution and its norm to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x))


class Empty(Perceptron):
    """Perceptron with a branch of width 0."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(3, 0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.branch(x).sum(1, keepdim=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "algorithm",
    [HeteroFL(), IMC(rate=0.4, prune_round=1), PruneFL(initial_passes=2)],
    ids=lambda algorithm: algorithm.name,
)
def test_layers_without_numbers_are_no_obstacle(algorithm: Algorithm, make_trainer: MakeTrainer) -> None:
    make_trainer().fit(Empty(), Served(9), algorithm)


@torch.no_grad()
def test_fitted_norms_keep_the_numbers_of_a_deep_network_small() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[Residual() for _ in range(60)]).double().eval()
    for part in net.modules():
        randomise(part)
    x = 100 * torch.randn(1, 8, 8, 8, dtype=torch.float64)
    before = net(x).abs().max()
    fit_norms(net, lambda: net(x))
    squares: list[float] = []
    for block in net:
        block.norm.register_forward_hook(lambda part, inputs, output: squares.append(float(output.square().mean())))
    assert net(x).abs().max() < 1000 < 1e6 < before
    assert len(squares) == 60
    assert 0.2 < min(squares) < max(squares) < 5
    assert all(module.num_batches_tracked == 0 for module in net.modules() if isinstance(module, nn.BatchNorm2d))
