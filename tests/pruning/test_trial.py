"""Test the random networks on which a pruning is tried."""

import torch
from torch import Tensor, nn

from lightning_fl.pruning.trial import fit_norms, randomise


class Residual(nn.Module):
    """Adds a convolution and its norm to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x))


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
