"""Test prunable filters and their dependents, for every network and for networks that cannot be traced."""

import copy
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torch_pruning.dependency import index_mapping
from zoo import WithAuxiliaryHead

from lightning_fl import UserError
from lightning_fl.modules import NETWORKS, ImageClassifier, network
from lightning_fl.modules.networks import usual_input
from lightning_fl.pruning import Plan, plan_for, plans_of, prunable_layers, prune
from lightning_fl.pruning.graph import Network
from lightning_fl.pruning.traced_twin import TracedTwin

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


def image_size(name: str) -> int:
    return 8 if "resnet" in name else usual_input(name)[1]


def images(name: str, count: int = 1) -> Tensor:
    return torch.randn(
        count, usual_input(name)[0], image_size(name), image_size(name), generator=torch.Generator().manual_seed(5)
    )


def random_network(name: str) -> nn.Module:
    """Return a network in float64, with biases and running statistics that are not zero."""
    torch.manual_seed(3)
    net = network(name, 10, image_size=image_size(name)).double().eval()
    for part in net.modules():
        if isinstance(part, (nn.Conv2d, nn.BatchNorm2d)) and part.bias is not None:
            nn.init.normal_(part.bias, std=0.1)
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            part.running_mean.normal_(std=0.1)  # type: ignore[union-attr]
            part.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
    return net


def some_filters(net: nn.Module, layers: tuple[str, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    kept = {}
    for layer in layers:
        width = net.get_submodule(layer).weight.shape[0]  # type: ignore[union-attr,index]
        kept[layer] = torch.randperm(width, generator=generator)[: width // 2 + 1].sort().values
    return kept


def following(net: nn.Module, layer: str) -> str | None:
    """Return the batch normalisation of a convolution, by the names in our networks."""
    name = "bn".join(layer.rsplit("conv", 1))
    return name if name in dict(net.named_modules()) else None


def without(net: nn.Module, filters: dict[str, Tensor]) -> nn.Module:
    """Return the network with the lost filters' weights, biases, γ and β at zero."""
    masked = copy.deepcopy(net)
    with torch.no_grad():
        for layer, kept in filters.items():
            for name in (layer, following(masked, layer)):
                for tensor in masked.get_submodule(name).parameters() if name else ():
                    lost = torch.ones(len(tensor), dtype=torch.bool)
                    lost[kept] = False
                    tensor[lost] = 0
    return masked


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NETWORKS if PRUNABLE[name]])
@pytest.mark.sampled(2)
def test_a_pruned_network_is_the_masked_one(name: str) -> None:
    """Check that pruning weights that are zero does not change the function."""
    net = random_network(name)
    filters = some_filters(net, PRUNABLE[name])
    plan = plan_for(net, filters, images(name))
    masked = without(net, filters)
    expected = masked(images(name, 2).double())
    for small in (masked, copy.deepcopy(net)):  # one with zeros there, one with its own weights
        prune(small, plan)
        assert torch.allclose(small(images(name, 2).double()), expected, rtol=0, atol=1e-10)
    assert list(plan.filters) == list(filters)
    assert tuple(plan.widths) == PRUNABLE[name]
    assert plan.widths == {layer: net.get_submodule(layer).out_channels for layer in PRUNABLE[name]}
    assert not torch.allclose(net(images(name, 2).double()), expected, atol=1e-3)


def counts(net: nn.Module, x: Tensor) -> tuple[int, int]:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(x)
    return sum(p.numel() for p in net.parameters()), counter.get_total_flops() // 2


@pytest.mark.long
def test_parameters_and_macs_of_a_pruned_cnn() -> None:
    """Check counts by hand: 32 → 20, 64 → 30 and 64 → 10 filters on 30², 13² and 4² pixels, then 160 → 64 → 10."""
    net = network("cnn", 10)
    plan = plan_for(net, {"conv1": range(20), "conv2": range(34, 64), "conv3": range(0, 64, 7)}, images("cnn"))
    assert plan.axes["fc1.weight"][1].tolist() == [16 * c + i for c in range(0, 64, 7) for i in range(16)]
    prune(net, plan)
    parameters = (27 * 20 + 20) + (180 * 30 + 30) + (270 * 10 + 10) + (160 * 64 + 64) + (64 * 10 + 10)
    macs = 30**2 * 27 * 20 + 13**2 * 180 * 30 + 4**2 * 270 * 10 + 160 * 64 + 64 * 10
    assert (parameters, macs) == (19_654, 1_452_680)
    assert counts(net, images("cnn")) == (parameters, macs)
    assert (net.conv2.in_channels, net.conv2.out_channels, net.fc1.in_features) == (20, 30, 160)  # type: ignore[union-attr]


@pytest.mark.long
@settings(max_examples=8)
@given(data=st.data(), name=st.sampled_from(["cnn", "lenet5"]))
def test_any_filters_may_stay(data: st.DataObject, name: str) -> None:
    net = random_network(name)
    filters = {}
    for layer in data.draw(st.lists(st.sampled_from(PRUNABLE[name]), unique=True)):
        width = net.get_submodule(layer).out_channels
        kept = data.draw(st.sets(st.integers(0, width - 1), min_size=1))  # type: ignore[arg-type]
        filters[layer] = torch.tensor(sorted(kept))
    expected = without(net, filters)(images(name).double())
    plan = plan_for(net, filters, images(name))
    prune(net, plan)
    assert torch.allclose(net(images(name).double()), expected, rtol=0, atol=1e-10)
    for layer in filters:
        assert net.get_submodule(layer).out_channels == len(filters[layer])


def test_planning_leaves_the_module_alone() -> None:
    module = ImageClassifier("cnn_mnist")
    module.network.conv1.eval()  # type: ignore[union-attr]
    module.trainer = L.Trainer(logger=False, accelerator="cpu")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    with torch.inference_mode():
        plan_for(module, {"network.conv1": [0, 5]})
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert module.training
    assert not module.network.conv1.training  # type: ignore[union-attr]
    assert plans_of(module) == []


def test_layers_that_keep_all_their_filters_are_not_in_the_plan() -> None:
    net = network("cnn_mnist", 10)
    plan = plan_for(net, {"conv1": range(10)}, images("cnn_mnist"))
    assert plan == Plan({}, {}, {"conv1": 10, "conv2": 20})


def test_a_cut_keeps_the_memory_format() -> None:
    weight = torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last)
    plan = Plan(axes={"conv.weight": {0: torch.tensor([0, 2]), 1: torch.tensor([1, 2, 5])}})
    cut = plan.cut("conv.weight", weight)
    assert torch.equal(cut, weight[[0, 2]][:, [1, 2, 5]])
    assert cut.is_contiguous(memory_format=torch.channels_last)
    assert plan.cut("conv.weight", weight.contiguous()).is_contiguous()
    assert plan.cut("other.weight", weight) is weight
    transposed = plan.cut("conv.weight", torch.randn(6, 4).t())
    assert transposed.shape == (2, 3)
    assert transposed.t().is_contiguous()


class Own(nn.Module):
    """User's network: two convolutions, with `between` and `behind` applied to their outputs."""

    def __init__(self, between: Any, behind: Any, features: int, **second: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, **second)
        self.norm = nn.LayerNorm([8, 6, 6])
        self.head = nn.Linear(features, 5)
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.between, self.behind = between, behind

    def forward(self, x: Any) -> Any:
        x = self.second(self.between(self, self.first(x)))
        return self.head(self.behind(self, x))


FOLLOWED = {  # typical user networks: the prunable ones of the two convolutions
    "functions": (lambda _, x: F.gelu(x), lambda _, x: F.max_pool2d(x, 2).flatten(1), 72, {}, ("first", "second")),
    "view": (lambda _, x: x.sigmoid(), lambda _, x: x.view(len(x), -1), 288, {}, ("first", "second")),
    "mean": (lambda _, x: 2 * x + 1, lambda _, x: x.mean((2, 3)), 8, {}, ("first", "second")),
    "used twice": (lambda self, x: F.relu(self.second(x)), lambda _, x: x.mean((2, 3)), 8, {}, ()),
    "concatenated": (
        lambda _, x: x,
        lambda _, x: torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1),
        16,
        {},
        ("first", "second"),
    ),
    "depthwise": (lambda _, x: x, lambda _, x: x.mean((2, 3)), 8, {"groups": 8}, ("first",)),
    "two groups": (lambda _, x: x, lambda _, x: x.mean((2, 3)), 8, {"groups": 2}, ()),
    "permuted": (lambda _, x: x, lambda _, x: x.permute(0, 2, 3, 1).flatten(1), 288, {}, ("first",)),
    "sum with its input": (lambda _, x: x + x.mean(1, keepdim=True), lambda _, x: x.mean((2, 3)), 8, {}, ("second",)),
    "normalised over channels": (lambda self, x: self.norm(x), lambda _, x: x.mean((2, 3)), 8, {}, ("second",)),
    "scaled by a parameter": (lambda self, x: x * self.scale, lambda _, x: x.mean((2, 3)), 8, {}, ("second",)),
    "channels shuffled": (lambda _, x: x.flip(1), lambda _, x: x.mean((2, 3)), 8, {}, ("second",)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FOLLOWED)
def test_networks_as_people_write_them(name: str) -> None:
    between, behind, features, second, expected = FOLLOWED[name]
    torch.manual_seed(0)
    net = Own(between, behind, features, **second).double().eval()
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    found = prunable_layers(net, x)
    assert found == expected
    for layer in ("first", "second"):
        if layer in found:
            prune(net, plan_for(net, {layer: [1, 2, 6]}, x))
            assert net.get_submodule(layer).weight.shape[0] == 3  # type: ignore[union-attr,index]
        else:
            with pytest.raises(UserError, match=f"'{layer}' cannot lose filters: "):
                plan_for(net, {layer: [1, 2, 6]}, x)
    assert net(x).shape == (2, 5)


class WithMask(nn.Module):
    """Network with a scalar among its inputs, and with bools and an empty tensor beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        y = self.second(F.relu(self.first(x))) * scale
        return y, y > 0, torch.tensor(True), y[:0]


def test_bools_empty_tensors_and_scalars_are_no_obstacle() -> None:
    assert prunable_layers(WithMask(), (torch.zeros(1, 3, 9, 9), torch.tensor(2.0))) == ("first",)


def test_a_networks_own_outputs_stay() -> None:
    assert prunable_layers(network("linear", 10), images("linear")) == ()
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    assert prunable_layers(net, torch.zeros(1, 3, 9, 9)) == ("0",)
    pooled = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert prunable_layers(pooled, torch.zeros(1, 3, 9, 9)) == ("0",)


@pytest.mark.parametrize(
    ("filters", "sentence"),
    [
        ({"conv9": [0]}, "'conv9' is not a convolution of this network; did you mean 'conv"),
        ({"fc1": [0]}, "'fc1' is not a convolution of this network"),
        ({"conv1": []}, r"'conv1' must keep one or more of its filters 0 to 9, ascending, got \[\]"),
        ({"conv1": [3, 1]}, r"ascending, got \[3, 1\]"),
        ({"conv1": [1, 1]}, r"ascending, got \[1, 1\]"),
        ({"conv1": [0, 10]}, r"0 to 9, ascending, got \[0, 10\]"),
        ({"conv1": [-1, 2]}, r"0 to 9, ascending, got \[-1, 2\]"),
    ],
)
def test_filters_that_are_not_there_are_refused(filters: dict[str, list[int]], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        plan_for(network("cnn_mnist", 10), filters, images("cnn_mnist"))


@pytest.mark.long
def test_a_reason_is_given_for_every_layer_that_stays_whole() -> None:
    net = network("resnet32", 10, image_size=8)
    with pytest.raises(
        UserError, match=r"'stage1\.0\.conv2' cannot lose filters: its outputs are tied to the outputs of "
    ):
        prunable_layers(net, torch.zeros(1, 3, 8, 8), required=["stage1.0.conv2"])


def test_an_example_is_needed() -> None:
    with pytest.raises(UserError, match="Sequential needs an example input for its forward"):
        prunable_layers(network("cnn", 10))
    with pytest.raises(UserError, match=r"does not take its example input: .*shape.*; set its example_input_array, or"):
        prunable_layers(network("cnn", 10), torch.zeros(1, 3, 40, 40))


class Grouped(nn.Module):
    """Blocks as RegNet's and ResNeXt's: a convolution, one with groups, and another one."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *[
                nn.Sequential(nn.Conv2d(6, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.Conv2d(8, 6, 1))
                for _ in range(num_blocks)
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_layers_before_groups_stay_whole_and_need_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    num_graphs = []
    build = TracedTwin.graph
    monkeypatch.setattr(TracedTwin, "graph", lambda self: num_graphs.append(1) or build(self))
    net = Grouped(8)
    assert prunable_layers(net, torch.zeros(1, 6, 4, 4)) == ()
    assert len(num_graphs) <= 2
    with pytest.raises(UserError, match=r"'blocks\.3\.1', which reads its outputs, has 4 groups"):
        prunable_layers(net, torch.zeros(1, 6, 4, 4), required=["blocks.3.0"])


def test_layers_that_run_only_in_training_are_cut_as_well() -> None:
    net = WithAuxiliaryHead()
    x = torch.randn(2, 3, 6, 6)
    assert prunable_layers(net, x) == ("first", "second")
    assert net.training
    prune(net, plan_for(net, {"first": [0, 3, 4]}, x))
    assert net.auxiliary[0].weight.shape == (4, 3, 1, 1)  # type: ignore[union-attr]
    assert [part.shape for part in net.train()(x)] == [(2, 5), (2, 5)]
    assert net.eval()(x).shape == (2, 5)


def test_a_layer_stays_whole_if_only_training_forbids_the_cut() -> None:
    net, x = WithAuxiliaryHead(wrong=True), torch.randn(2, 3, 6, 6)
    assert prunable_layers(net, x) == ("second",)
    with pytest.raises(UserError, match=r"'auxiliary\.0' cannot lose filters: evaluation does not use it"):
        prunable_layers(net, x, required=["auxiliary.0"])


def test_a_network_that_torch_pruning_cannot_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("torch_pruning.DependencyGraph.build_dependency", fail)
    with pytest.raises(UserError, match=r"torch-pruning cannot read the graph of \w+, probably .*: division by"):
        prunable_layers(network("lenet5", 10), images("lenet5"))


class PixelAttention(nn.Module):
    """Attention of a feature map's pixels to each other, with a bias for each pair of them, as in CoAtNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.qkv = nn.Conv2d(4, 12, 1)
        self.bias = nn.Parameter(torch.zeros(2, 16, 16))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).view(len(x), 2, 6, -1).chunk(3, dim=2)
        weights = (q.transpose(-1, -2) @ k + self.bias).softmax(-1)
        return self.head((v @ weights.transpose(-1, -2)).reshape(len(x), 4, -1).mean(2))


def test_an_attention_does_not_lead_round_in_circles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the channels that torch-pruning computes: without a limit there are more of them in each round of a circle."""
    flattening = index_mapping._FlattenIndexMapping
    reached = flattening.__call__
    num_channels = 0

    def counted(self: Any, channels: list) -> list:
        nonlocal num_channels
        found = reached(self, channels)
        num_channels += len(found)
        assert num_channels < 10_000
        return found

    monkeypatch.setattr(flattening, "__call__", counted)
    found = Network(PixelAttention(), torch.randn(1, 3, 4, 4))
    assert found.layers == ("first",)
    with pytest.raises(UserError, match="'qkv' cannot lose filters"):
        found.require_prunable("qkv")


class Upsampling(nn.Module):
    """Convolution, a transposed convolution (depthwise if `groups` is 6) that reads it, and a convolution as the output."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        width = 12 if groups == 1 else groups
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.up = nn.ConvTranspose2d(6, width, 2, 2, groups=groups)
        self.behind = nn.Conv2d(width, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.up(self.norm(self.first(x)).relu()).tanh())


@pytest.mark.parametrize("groups", [1, 6])
def test_a_convolution_that_a_transposed_one_reads_can_lose_filters(groups: int) -> None:
    """A lost filter is one whose outputs are 0, because its scale and shift in the norm are."""
    torch.manual_seed(0)
    net, x = Upsampling(groups).double().eval(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    kept = [0, 2, 5]
    assert prunable_layers(net, x) == ("first",)
    plan = plan_for(net, {"first": kept}, x)
    whole = copy.deepcopy(net)
    with torch.no_grad():
        for name in ("weight", "bias"):
            getattr(whole.norm, name)[[1, 3, 4]] = 0.0
        if groups > 1:  # what the lost channels' own bias adds is lost with them
            whole.up.bias[[1, 3, 4]] = 0.0
        net.load_state_dict(whole.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)
    net(x).sum().backward()
    optimizer.step()
    prune(net, plan, [optimizer])
    torch.testing.assert_close(net(x), whole(x), rtol=0, atol=1e-12)
    up = net.up
    assert (up.in_channels, up.out_channels, up.groups) == ((3, 12, 1) if groups == 1 else (3, 3, 3))
    assert optimizer.state[up.weight]["momentum_buffer"].shape == up.weight.shape
    net(x).sum().backward()
    optimizer.step()


def test_a_convolution_that_is_the_output_is_named_as_one() -> None:
    with pytest.raises(
        UserError, match="'behind' cannot lose filters: its filters are channels of the network's output"
    ):
        prunable_layers(Upsampling(), torch.randn(1, 3, 6, 6), required=["behind"])
    with pytest.raises(UserError, match="'up' cannot lose filters: it is a transposed convolution"):
        prunable_layers(Upsampling(), torch.randn(1, 3, 6, 6), required=["up"])
