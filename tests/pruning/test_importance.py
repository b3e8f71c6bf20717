"""Test scores of filters against plain loops."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_fl import UserError
from lightning_fl.modules import network
from lightning_fl.pruning import feature_map_ranks, filter_magnitudes, filters_to_keep, lowest


def by_hand(maps: Tensor) -> list[float]:
    """Return the mean rank over images of (B, c, H, W) maps, one matrix at a time."""
    maps = maps.detach().clamp(min=0)
    return [float(np.mean([np.linalg.matrix_rank(image[j].numpy()) for image in maps])) for j in range(maps.shape[1])]


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, 32, 32, generator=generator), torch.zeros(4)) for _ in range(2)]


@pytest.mark.long
def test_ranks_are_those_of_every_map_behind_its_relu() -> None:
    torch.manual_seed(0)
    net = network("cnn", 10)
    net.conv1.weight.data[3] = 0  # type: ignore[union-attr,operator]
    ranks = feature_map_ranks(net, batches(), ["conv1", "conv3"])
    x = torch.cat([images for images, _ in batches()])
    first = net.conv1(x)  # type: ignore[operator]
    last = net[:7](x)  # type: ignore[index]
    assert ranks["conv1"].tolist() == pytest.approx(by_hand(first))
    assert ranks["conv3"].tolist() == pytest.approx(by_hand(last))
    assert ranks["conv1"][3] == 0
    assert ranks["conv1"].max() > 10


@pytest.mark.long
def test_ranks_are_taken_behind_batch_normalisation_and_leave_the_network_alone() -> None:
    torch.manual_seed(0)
    net = network("resnet32", 10)
    net.stage1[0].bn1.weight.data[2] = 0  # type: ignore[union-attr,index]
    net.stage1[0].bn1.bias.data[2] = -1  # type: ignore[union-attr,index]
    net.stage2.eval()  # type: ignore[union-attr]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    ranks = feature_map_ranks(net, batches(), ["stage1.0.conv1"])["stage1.0.conv1"]
    assert ranks[2] == 0
    assert (ranks[[0, 1, 3]] > 5).all()
    assert net.stage1.training  # type: ignore[union-attr]
    assert not net.stage2.training  # type: ignore[union-attr]
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_maps_of_one_pixel_have_rank_zero_or_one() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 32), nn.ReLU())
    nn.init.zeros_(net[0].weight)  # type: ignore[arg-type]
    net[0].bias.data = torch.tensor([1.0, -1.0, 0.0, 2.0])
    assert feature_map_ranks(net, batches(), ["0"])["0"].tolist() == [1, 0, 0, 1]


def test_magnitudes() -> None:
    net = network("lenet5", 10)
    weight = net.conv2.weight.detach()  # type: ignore[union-attr]
    for norm in (1, 2):
        expected = [float(np.linalg.norm(w.numpy().ravel(), norm)) for w in weight]  # type: ignore[union-attr]
        assert filter_magnitudes(net, ["conv2"], norm)["conv2"].tolist() == pytest.approx(expected)


def test_the_lowest_go_and_of_equal_ones_the_first() -> None:
    scores = torch.tensor([1.0, 0.5, 0.5, 0.5, 2.0])
    assert lowest(scores, 0).tolist() == []
    assert lowest(scores, 2).tolist() == [1, 2]
    assert lowest(scores, 4).tolist() == [0, 1, 2, 3]
    assert lowest(scores, 5).tolist() == [0, 1, 2, 3]
    kept = filters_to_keep({"a": scores, "b": torch.arange(100.0)}, {"a": 0.39, "b": 0.29})
    assert kept["a"].tolist() == [0, 2, 3, 4]
    assert kept["b"].tolist() == list(range(29, 100))
    assert filters_to_keep({"a": scores}, {})["a"].tolist() == [0, 1, 2, 3, 4]


def test_bad_input_is_refused() -> None:
    net = network("cnn", 10)
    with pytest.raises(UserError, match="at least one batch"):
        feature_map_ranks(net, [], ["conv1"])
    with pytest.raises(UserError, match="got dict"):
        feature_map_ranks(net, [{"x": 1}], ["conv1"])
    with pytest.raises(UserError, match="maps of 'conv1' are not finite"):
        feature_map_ranks(net, [torch.full((1, 3, 32, 32), torch.nan)], ["conv1"])
    unused = nn.ModuleDict({"a": nn.Conv2d(3, 4, 3), "b": nn.Conv2d(3, 4, 3)})
    unused.forward = lambda x: unused["a"](x)  # type: ignore[method-assign]
    with pytest.raises(UserError, match="does not use the layer 'b'"):
        feature_map_ranks(unused, batches(), ["b"])
