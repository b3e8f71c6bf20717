"""Test plans that keep some units of every hidden layer: the cut network computes as the whole one without the other units."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import Perceptron, without_units

from lightning_fl import UserError
from lightning_fl.modules.networks import network
from lightning_fl.pruning import hidden_units, prune
from lightning_fl.pruning.apply_plan import reads_along
from lightning_fl.pruning.hidden_units import HiddenUnits
from lightning_fl.pruning.trial import tensors_of


class Joined(nn.Module):
    """Two branches that are joined, a residual block, a GroupNorm, a depthwise convolution and a flattened reader."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(1, 4, 1), nn.Conv2d(1, 6, 1)
        self.norm = nn.BatchNorm2d(10)
        self.stem = nn.Conv2d(10, 8, 1)
        self.block = nn.Sequential(nn.Conv2d(8, 5, 1), nn.ReLU(), nn.Conv2d(5, 8, 1))
        self.groups, self.depthwise = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1, groups=8)
        self.hidden, self.output = nn.Linear(32, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(torch.relu(self.norm(torch.cat([self.one(x), self.other(x)], 1))))
        x = torch.relu(self.depthwise(self.groups(x + self.block(x))))
        return self.output(torch.relu(self.hidden(x.flatten(1))))


UNITS = HiddenUnits(Joined().eval(), torch.zeros(1, 1, 2, 2))


def test_layers_whose_outputs_are_added_have_their_units_in_common() -> None:
    assert UNITS.widths == {"one": 4, "other": 6, "stem": 8, "block.0": 5, "hidden": 6}
    assert UNITS.layers == ["one", "other", "stem", "block.0", "block.2", "depthwise", "hidden"]
    assert UNITS.blocks["stem"].tolist() == [0] * 4 + [4] * 4, "the channels of a group stay or go together"


def test_the_tensors_are_listed_once_not_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = []
    monkeypatch.setattr(hidden_units, "tensors_of", lambda module: listed.append(module) or tensors_of(module))
    HiddenUnits(Perceptron(), torch.zeros(1, 3))
    assert len(listed) == 1


@pytest.mark.long
@given(st.data())
@settings(max_examples=25)
def test_the_cut_network_computes_as_the_whole_one_without_the_other_units(data: st.DataObject) -> None:
    kept = {}
    for name, blocks in UNITS.blocks.items():
        numbers = sorted(set(blocks.tolist()))
        chosen = data.draw(st.sets(st.sampled_from(numbers), min_size=1))
        kept[name] = torch.isin(blocks, torch.tensor(sorted(chosen)))
    plan = UNITS.plan(kept)
    whole = Joined().eval()
    cut = copy.deepcopy(whole)
    prune(cut, plan)
    named = dict(whole.named_parameters())
    for name, axes in plan.axes.items():
        for axis, indices in axes.items():
            if name in named and reads_along(whole, name, axis):
                lost = torch.ones(named[name].shape[axis], dtype=torch.bool).index_fill(0, indices, False)
                named[name].data[(slice(None),) * axis + (lost,)] = 0
    x = torch.randn(3, 1, 2, 2)
    torch.testing.assert_close(cut(x), whole(x))
    assert sum(p.numel() for p in cut.parameters()) <= sum(p.numel() for p in whole.parameters())


def test_a_perceptron_is_cut_as_by_hand() -> None:
    kept = torch.tensor([True, False, True, False])
    plan, expected = (
        HiddenUnits(Perceptron(), torch.zeros(1, 3)).plan({"hidden": kept}),
        without_units(Perceptron(), (1, 3)),
    )
    assert plan.widths == expected.widths == {"hidden": 4}
    assert {name: {axis: x.tolist() for axis, x in axes.items()} for name, axes in plan.axes.items()} == {
        name: {axis: x.tolist() for axis, x in axes.items()} for name, axes in expected.axes.items()
    }


def test_an_activation_with_one_weight_for_all_units_stays_whole() -> None:
    units = HiddenUnits(nn.Sequential(nn.Linear(5, 8), nn.PReLU(), nn.Linear(8, 2)), torch.zeros(1, 5))
    plan = units.plan({"0": torch.arange(8) < 3})
    assert {(name, *axes) for name, axes in plan.axes.items()} == {("0.weight", 0), ("0.bias", 0), ("2.weight", 1)}


@pytest.mark.parametrize(("name", "count"), [("lenet5", 4), ("vgg11_bn", 10), ("resnet18", 12), ("cnn_mnist", 3)])
@pytest.mark.matrix
def test_every_hidden_layer_of_the_networks_can_be_cut(name: str, count: int) -> None:
    channels, size = (1, 28) if name == "cnn_mnist" else (3, 32)
    net = network(name, 10, **({"width": 0.125} if name == "vgg11_bn" else {}))
    units = HiddenUnits(net, torch.zeros(1, channels, size, size))
    assert len(units.blocks) == count
    weights = [part for part in net.modules() if isinstance(part, (nn.Conv2d, nn.Linear))]
    assert len(units.layers) == len(weights) - 1, "all but the output layer"


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.hidden, self.output = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.relu(self.hidden(self.lstm(x)[0][:, -1])))


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.output = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 8, 3), nn.Linear(72, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.relu(self.conv(self.first(x))).view(-1, 72))


class Gated(nn.Module):
    """Multiply one half of a layer's outputs by a gate from the other half."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(5, 8), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.hidden(x).chunk(2, -1)
        return self.output(value * gate.sigmoid())


def normalised_over_all_channels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 1), nn.GroupNorm(1, 8), nn.Flatten(), nn.Linear(32, 2))


@pytest.mark.long
@pytest.mark.parametrize(
    ("net", "x", "said"),
    [
        (
            network("linear", 10, 1, 8),
            torch.zeros(1, 1, 8, 8),
            "Sequential has no hidden layer whose units could be cut",
        ),
        (
            Recurrent(),
            torch.zeros(1, 5, 4),
            "'lstm' of Recurrent cannot lose units: layers of the kind LSTM cannot be cut",
        ),
        (
            Viewed(),
            torch.zeros(1, 1, 5, 5),
            "the hidden layer 'conv' of Viewed cannot lose units: an operation that reads",
        ),
        (
            nn.Sequential(nn.Linear(5, 8), nn.GLU(), nn.Linear(4, 3)),
            torch.zeros(1, 5),
            "the hidden layer '0' of Sequential cannot lose units: an operation that reads",
        ),
        (
            Gated(),
            torch.zeros(1, 5),
            "the hidden layer 'hidden' of Gated cannot lose units: an operation that reads",
        ),
        (
            normalised_over_all_channels(),
            torch.zeros(1, 1, 2, 2),
            r"'0' of Sequential .* normalises its outputs over all",
        ),
        (
            network("resnet32", 10),
            torch.zeros(1, 3, 32, 32),
            "the hidden layer 'conv1' of Sequential cannot lose units",
        ),
    ],
)
def test_the_first_layer_that_cannot_be_cut_is_named(net: nn.Module, x: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        HiddenUnits(net, x)
