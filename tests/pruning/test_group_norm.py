"""Test pruning in front of a GroupNorm: whole groups of filters go, so that the pruned network is the masked one."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.resnet import BasicBlock, ResNet

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import FedAvg
from lightning_fl.callbacks import AdaptivePruning, FilterPruning
from lightning_fl.data import Arrays
from lightning_fl.pruning import filters_to_keep, load_pruned, plan_for, prunable_layers, prune
from lightning_fl.pruning.graph import Network

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(16, channels)


def resnet() -> ResNet:
    """ResNet with a block of 64 and a block of 128 channels, in groups of 4 and 8."""
    net = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3, norm_layer=group_norm)
    net.layer3 = net.layer4 = nn.Identity()
    net.fc = nn.Linear(128, 3)
    return net


FIRST = ("layer1.0.conv1", "layer2.0.conv1")
"""Convolutions that a residual network can prune: the first of each block."""


def randomised(net: nn.Module) -> nn.Module:
    """Return the network in float64, with normalisations that are not the identity."""
    net = net.double().eval()
    for part in net.modules():
        if isinstance(part, nn.GroupNorm):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias, std=0.3)
    return net


def masked(net: nn.Module, readers: dict[str, Tensor]) -> nn.Module:
    """Return the network in which these layers read zeros for all but the kept channels."""
    whole = copy.deepcopy(net)
    for name, kept in readers.items():
        weight: Any = whole.get_submodule(name).weight
        lost = [channel for channel in range(weight.shape[1]) if channel not in kept.tolist()]
        weight.data[:, lost] = 0
    return whole


@pytest.mark.long
def test_a_resnet_with_group_normalisation_loses_whole_groups() -> None:
    torch.manual_seed(0)
    net = randomised(resnet())
    network = Network(net, X)
    assert network.layers == FIRST
    scores = {name: torch.rand(network.widths[name]) for name in FIRST}
    kept = filters_to_keep(scores, 0.4, network.blocks)
    for name, indices in kept.items():
        size = network.widths[name] // 16
        groups = indices.unflatten(0, (-1, size)) // size
        assert (groups == groups[:, :1]).all(), "filters of a group stay together"
        assert len(groups) == 16 - int(0.4 * 16)
        means = scores[name].unflatten(0, (16, size)).mean(1)
        assert groups[:, 0].tolist() == sorted(means.argsort()[6:].tolist()), "those of the highest mean score"
    expected = masked(net, {name.replace("conv1", "conv2"): indices for name, indices in kept.items()})(X.double())
    small = copy.deepcopy(net)
    prune(small, network.plan(kept))
    torch.testing.assert_close(small(X.double()), expected, rtol=0, atol=1e-10)
    assert not torch.allclose(net(X.double()), expected, atol=1e-3)
    norm: Any = small.get_submodule("layer2.0.bn1")
    assert (norm.num_groups, norm.num_channels) == (10, 80)


@settings(max_examples=10)
@given(groups=st.sampled_from([(2, 3), (4, 2), (8, 1)]), seed=st.integers(0, 99))
@pytest.mark.matrix
def test_any_groups_may_go(groups: tuple[int, int], seed: int) -> None:
    """Also of two layers one after the other, and behind a depthwise convolution."""
    count, size = groups
    torch.manual_seed(seed)
    width = count * size
    net = randomised(
        nn.Sequential(
            nn.Conv2d(3, width, 3),
            nn.GroupNorm(count, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, groups=width),
            nn.GroupNorm(count, width),
            nn.Conv2d(width, 2 * width, 3),
            nn.GroupNorm(count, 2 * width),
            nn.Flatten(),
            nn.Linear(2 * width * 100, 2),
        )
    )
    assert prunable_layers(net, X) == ("0", "5")
    stays = torch.rand(count) < 0.5
    stays[seed % count] = True
    kept, later = (stays.repeat_interleave(n).nonzero().flatten() for n in (size, 2 * size))
    columns = (100 * later[:, None] + torch.arange(100)).flatten()
    expected = masked(net, {"5": kept, "8": columns})(X.double())
    prune(net, plan_for(net, {"0": kept, "5": later}, X))
    torch.testing.assert_close(net(X.double()), expected, rtol=0, atol=1e-10)


class Dense(nn.Module):
    """Two convolutions whose outputs are normalised together, in groups of `size`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 1)
        self.norm = nn.GroupNorm(12 // size, 12)
        self.head = nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(self.norm(torch.cat([x, self.second(x)], 1)))


def test_groups_of_a_concatenation() -> None:
    assert prunable_layers(Dense(3), X) == ("first", "second")
    assert Network(Dense(3), X).blocks["second"].tolist() == [0, 0, 0, 3, 3, 3]
    with pytest.raises(
        UserError, match=r"'first' cannot lose filters: its outputs share a group of 'norm' \(GroupNorm\)"
    ):
        prunable_layers(Dense(4), X, required=["first"])


def net_with(*norms: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 1), *norms, nn.ReLU(), nn.Conv2d(8, 2, 1))


class Standardised(nn.Conv2d):
    """Convolution whose weights have mean 0 over their inputs."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight, self.bias)


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (net_with(nn.GroupNorm(1, 8)), r"'1' \(GroupNorm\) normalises its outputs over all channels"),
        (net_with(nn.GroupNorm(2, 8, affine=False)), r"'1' \(GroupNorm\) normalises its outputs but has no weights"),
        (net_with(nn.LayerNorm([8, 16, 16])), "an operation that reads its output|over all channels"),
        (
            nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(4, 8), Standardised(8, 2, 1)),
            "an operation that reads its output cannot be cut .*; perhaps '2', a Standardised with a forward of its own",
        ),
        (net_with(nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1, groups=8), nn.GroupNorm(1, 8)), "over all channels"),
    ],
    ids=["one group", "no weights", "layer norm", "standardised", "one group behind"],
)
def test_what_holds_a_layer_whole_is_named(net: nn.Module, reason: str) -> None:
    network = Network(net, X)
    assert network.layers == ()
    with pytest.raises(UserError, match=f"'0' cannot lose filters: .*({reason})"):
        network.require_prunable("0")
    assert "'0' cannot because " in network.first_obstacles


def test_a_group_is_not_torn() -> None:
    with pytest.raises(
        UserError, match=r"'0' must keep all or none of its filters 2, 3, which a GroupNorm .*got \[0, 1, 3\]"
    ):
        plan_for(net_with(nn.GroupNorm(4, 8)), {"0": [0, 1, 3]}, X)
    assert plan_for(net_with(nn.InstanceNorm2d(8, affine=True)), {"0": [0, 5]}, X).axes["1.weight"][0].tolist() == [
        0,
        5,
    ]


@pytest.mark.matrix
def test_where_nothing_can_be_pruned_few_trials_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 24 layers that no cut suits, bisection would make 47 trials."""
    trials = []
    tried = Network._tried
    monkeypatch.setattr(Network, "_tried", lambda self, filters: trials.append(len(filters)) or tried(self, filters))
    net = nn.Sequential(*[Standardised(3, 3, 1) for _ in range(25)])
    assert Network(net, X).layers == ()
    assert len(trials) <= 5
    one = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1), *net)
    assert Network(one, X).layers == ("0",)


class Module(L.LightningModule):
    """User's module: a small residual network with group normalisation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = resnet()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(12, 3, 16, 16, generator=generator), torch.arange(12) % 3


PRUNINGS: dict[str, Callable[[], Any]] = {
    "magnitude": lambda: FilterPruning(0.5, prune_epoch=1, importance="magnitude"),
    "ranks": lambda: FilterPruning(0.5, prune_epoch=1, num_batches=1, batch_size=4),
    "adaptive": lambda: AdaptivePruning(prune_epoch=1, rate_mode="fixed", rate=0.5, rank_samples=4),
}


@pytest.mark.parametrize("pruning", PRUNINGS)
def test_in_the_stock_trainer(pruning: str, make_stock_trainer: Callable[..., L.Trainer], tmp_path: Path) -> None:
    trainer, module = make_stock_trainer(max_epochs=2, callbacks=PRUNINGS[pruning]()), Module()
    trainer.fit(module, DataLoader(TensorDataset(*samples()), batch_size=6))
    norm: Any = module.net.layer1[0].bn1  # type: ignore[index]
    assert norm.num_groups < 16
    assert norm.num_channels == 4 * norm.num_groups == module.net.layer1[0].conv1.out_channels  # type: ignore[index]
    trainer.save_checkpoint(tmp_path / "pruned.ckpt")
    loaded = load_pruned(Module, tmp_path / "pruned.ckpt")
    assert torch.equal(loaded.eval()(X), module.eval()(X))
    if pruning == "magnitude":
        assert norm.num_groups == 8


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.matrix
def test_in_a_federation(
    runner: str, make_trainer: Callable[..., FederatedTrainer], keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    def fit(rounds: int, folder: str, **options: Any) -> Module:
        flags = {"default_root_dir": tmp_path / folder, "runner": runner, **keeps_files}
        module, data = Module(), Arrays(train=samples(), test=samples(), num_clients=3, batch_size=2)
        trainer = make_trainer(max_rounds=rounds, callbacks=PRUNINGS["magnitude"](), **flags)
        trainer.fit(module, data, FedAvg(), **options)
        return module

    whole = fit(3, "whole")
    assert whole.net.layer2[0].bn1.num_groups == 8  # type: ignore[index]
    fit(2, "half")
    resumed = fit(3, "half", ckpt_path="last")
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value)
    loaded = load_pruned(Module, tmp_path / "whole" / "model.ckpt")
    assert torch.equal(loaded.eval()(X), whole.eval()(X))


def test_no_group_small_enough_is_said(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    module = Module()
    pruning = FilterPruning(0.05, prune_epoch=0, importance="magnitude")
    with pytest.warns(
        UserWarning,
        match="FilterPruning removes nothing: with rate .* no layer loses a whole filter, or in front of a GroupNorm",
    ):
        make_stock_trainer(max_epochs=1, callbacks=pruning).fit(
            module, DataLoader(TensorDataset(*samples()), batch_size=6)
        )


def test_a_refusal_names_the_first_obstacles(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    module = Module()
    module.net = net_with(nn.GroupNorm(1, 8))  # type: ignore[assignment]
    with pytest.raises(
        UserError, match=r"no layer of Module can lose filters: 'net\.0' cannot because 'net\.1' \(GroupN"
    ):
        make_stock_trainer(callbacks=FilterPruning(0.4, prune_epoch=0)).fit(
            module, DataLoader(TensorDataset(*samples()))
        )
