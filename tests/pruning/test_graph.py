"""Which filters can go and what follows, for every network and for networks that cannot be followed."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_fl.modules import NETWORKS, network
from lightning_fl.modules.networks import usual_input
from lightning_fl.pruning import plan_for, prunable_layers, prune

BLOCKS = {
    "resnet18": [(s, b) for s in (1, 2, 3, 4) for b in (0, 1)],
    "resnet32": [(s, b) for s in (1, 2, 3) for b in range(5)],
}
PRUNABLE = {
    "cnn": ("conv1", "conv2", "conv3"),
    "lenet5": ("conv1", "conv2"),
    "cnn_mnist": ("conv1", "conv2"),
    "vgg9": tuple(f"conv{i}" for i in range(1, 9)),
    "vgg11": tuple(f"conv{i}" for i in range(1, 9)),
    "vgg11_bn": tuple(f"conv{i}" for i in range(1, 9)),
    "resnet18": tuple(f"stage{s}.{b}.conv1" for s, b in BLOCKS["resnet18"]),
    "resnet32": tuple(f"stage{s}.{b}.conv1" for s, b in BLOCKS["resnet32"]),
    "linear": (),
}


def images(name: str, count: int = 1) -> Tensor:
    in_channels, size = usual_input(name)
    return torch.randn(count, in_channels, size, size, generator=torch.Generator().manual_seed(5))


def random_network(name: str) -> nn.Module:
    """In float64, with biases and running statistics that are not zero."""
    torch.manual_seed(3)
    net = network(name, 10).double().eval()
    for part in net.modules():
        if isinstance(part, (nn.Conv2d, nn.BatchNorm2d)) and part.bias is not None:
            nn.init.normal_(part.bias, std=0.1)
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            part.running_mean.normal_(std=0.1)  # type: ignore[union-attr]
            part.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
    return net


def some_filters(net: nn.Module, layers: tuple[str, ...], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kept = {}
    for layer in layers:
        width = net.get_submodule(layer).weight.shape[0]  # type: ignore[union-attr,index]
        kept[layer] = torch.randperm(width, generator=generator)[: width // 2 + 1].sort().values
    return kept


def following(net: nn.Module, layer: str) -> str | None:
    """By the names of our networks: the batch normalisation of a convolution."""
    name = "bn".join(layer.rsplit("conv", 1))
    return name if name in dict(net.named_modules()) else None


def without(net: nn.Module, filters: dict[str, Tensor]) -> nn.Module:
    """The network with the lost filters' weights, biases, γ and β at zero."""
    masked = copy.deepcopy(net)
    with torch.no_grad():
        for layer, kept in filters.items():
            for name in (layer, following(masked, layer)):
                for tensor in masked.get_submodule(name).parameters() if name else ():
                    lost = torch.ones(len(tensor), dtype=torch.bool)
                    lost[kept] = False
                    tensor[lost] = 0
    return masked


@pytest.mark.parametrize("name", NETWORKS)
def test_finds_the_convolutions_that_can_lose_filters(name: str) -> None:
    assert prunable_layers(network(name, 10), images(name)) == PRUNABLE[name]


@pytest.mark.parametrize("name", [name for name in NETWORKS if PRUNABLE[name]])
def test_a_pruned_network_is_the_masked_one(name: str) -> None:
    """Surgery preserves the function if what it removes is zero (invariant 10)."""
    net = random_network(name)
    filters = some_filters(net, PRUNABLE[name])
    plan = plan_for(net, filters, images(name))
    masked = without(net, filters)
    expected = masked(images(name, 2).double())
    for small in (masked, copy.deepcopy(net)):  # without its own zeros, and without what was there
        prune(small, plan)
        assert torch.allclose(small(images(name, 2).double()), expected, rtol=0, atol=1e-10)
    assert plan.filters.keys() == filters.keys()
    assert plan.widths == {layer: net.get_submodule(layer).out_channels for layer in PRUNABLE[name]}
    assert not torch.allclose(net(images(name, 2).double()), expected, atol=1e-3)


def counts(net: nn.Module, x: Tensor) -> tuple[int, int]:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(x)
    return sum(p.numel() for p in net.parameters()), counter.get_total_flops() // 2


def test_parameters_and_macs_of_a_pruned_cnn() -> None:
    """By hand: 32 → 20, 64 → 30 and 64 → 10 filters on 30², 13² and 4² pixels, then 160 → 64 → 10."""
    net = network("cnn", 10)
    plan = plan_for(net, {"conv1": range(20), "conv2": range(34, 64), "conv3": range(0, 64, 7)}, images("cnn"))
    assert plan.axes["fc1.weight"][1].tolist() == [16 * c + i for c in range(0, 64, 7) for i in range(16)]
    prune(net, plan)
    parameters = (27 * 20 + 20) + (180 * 30 + 30) + (270 * 10 + 10) + (160 * 64 + 64) + (64 * 10 + 10)
    macs = 30**2 * 27 * 20 + 13**2 * 180 * 30 + 4**2 * 270 * 10 + 160 * 64 + 64 * 10
    assert (parameters, macs) == (19_654, 1_452_680)
    assert counts(net, images("cnn")) == (parameters, macs)
    assert (net.conv2.in_channels, net.conv2.out_channels, net.fc1.in_features) == (20, 30, 160)  # type: ignore[union-attr]
