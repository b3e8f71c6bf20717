"""Test gates on networks of any kind: their choices, unchanged parts, gradients, slicing, counting."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.utilities.compile import from_compiled
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_fl import UserError
from lightning_fl.gates import (
    Gate,
    add_gates,
    count_sliced_macs,
    gate_parameters,
    gates_of,
    lasso,
    observed,
    remove_gates,
    sliced,
    without_gates,
)
from lightning_fl.modules import network


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def chain(batch_norm: bool = True) -> nn.Sequential:
    """Return a network of 3 → 8 → 6 channels on 7×7 images, 5 classes."""
    norms = (nn.BatchNorm2d(8), nn.BatchNorm2d(6)) if batch_norm else (nn.Identity(), nn.Identity())
    made = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), norms[0], nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 6, 3, bias=False), norms[1], nn.ReLU(), nn.Flatten(), nn.Linear(6, 5),
    )  # fmt: skip
    for layer in made:
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, -1, 2)
            nn.init.uniform_(layer.bias, -1, 1)
            nn.init.uniform_(layer.running_mean)
            nn.init.uniform_(layer.running_var, 0.5, 2)
    return made


def stir(gated: nn.Module) -> None:
    """Randomise the gates so that samples choose differently, as with trained gates."""
    for name, parameter in gate_parameters(gated).items():
        nn.init.normal_(parameter, std=3.0 if name.endswith("weight") else 0.3)


def written_out(layers: nn.Sequential, x: Tensor, keep: float, multiply: bool = False) -> np.ndarray:
    """Compute the gated `chain` in evaluation mode by the paper, sample by sample and channel by channel."""
    outputs = []
    for sample in x:
        for first in (0, 4):
            conv, norm = layers[first], layers[first + 1]
            z = conv.gate.weight @ sample.mean((1, 2)) + conv.gate.bias
            pi = 1 / (1 + torch.exp(-z))
            order = sorted(range(len(pi)), key=lambda channel: (-pi[channel].item(), channel))
            kept = order[: max(1, round(keep * len(pi)))]
            y = norm(conv._conv_forward(sample[None], conv.weight, conv.bias))[0]
            rows = [y[c] * (pi[c] if multiply else 1) if c in kept else torch.zeros_like(y[c]) for c in range(len(pi))]
            sample = torch.stack(rows).relu()
            if first == 0:
                sample = F.max_pool2d(sample, 2)
        outputs.append(layers[8](sample.flatten()))
    return torch.stack(outputs).detach().numpy()


@pytest.mark.parametrize("mode", ["ste", "multiply"])
@pytest.mark.parametrize("keep", [0.3, 0.5, 0.8])
def test_a_gated_network_is_the_papers(mode: Any, keep: float) -> None:
    gated = chain().double().eval()
    gates = add_gates(gated, keep, mode)
    stir(gated)
    x = torch.randn(9, 3, 7, 7, dtype=torch.float64)
    plain = copy.deepcopy(gated)
    for layer in plain:
        layer._forward_hooks.clear()
        layer._forward_pre_hooks.clear()
    np.testing.assert_allclose(gated(x).detach().numpy(), written_out(plain, x, keep, mode == "multiply"), atol=1e-12)
    with observed(gates.values()) as outputs:
        gated(x)
    masks = [gate(x if name == "0" else torch.zeros(9, 8, 3, 3, dtype=x.dtype)) for name, gate in gates.items()]
    assert [z.shape for z in outputs] == [(9, 8), (9, 6)]
    assert masks[0].ne(0).sum(1).tolist() == [gates["0"].kept] * 9
    assert len(masks[0].ne(0).unique(dim=0)) > 1, "samples must choose differently"


def test_of_equal_channels_the_first_are_chosen() -> None:
    gate = Gate(2, 5, kept=2)
    nn.init.zeros_(gate.weight)
    assert gate(torch.randn(3, 2, 4, 4)).tolist() == [[1, 1, 0, 0, 0]] * 3


def test_dropped_channels_are_exactly_zero_behind_the_norm() -> None:
    gated = chain()[:3].train()
    add_gates(gated, 0.25)
    y = gated(torch.randn(4, 3, 7, 7))
    assert (y.abs().amax((2, 3)) > 0).sum(1).tolist() == [2] * 4


@pytest.mark.parametrize("mode", ["ste", "multiply"])
@pytest.mark.parametrize("detach", [True, False])
def test_gradients(mode: Any, detach: bool) -> None:
    """Check m = M + π − stopgrad π: π's gradient for all channels, M ⊙ π for the chosen; `detach_input` cuts the input's."""
    gate = Gate(2, 4, kept=2, mode=mode, detach_input=detach)
    nn.init.normal_(gate.weight)
    x = torch.randn(1, 2, 3, 3, requires_grad=True)
    weights = torch.tensor([[1.0, -2.0, 3.0, 5.0]])
    mask = gate(x)
    (mask * weights).sum().backward()
    pi = (gate.weight @ x.mean((2, 3))[0] + gate.bias).sigmoid()
    slope = weights[0] * pi * (1 - pi) * (mask[0] != 0 if mode == "multiply" else 1)
    torch.testing.assert_close(gate.bias.grad, slope.detach())
    torch.testing.assert_close(gate.weight.grad, torch.outer(slope, x.mean((2, 3))[0]).detach())
    assert (x.grad is None) == detach
    if mode == "ste":
        assert mask.unique().tolist() == [0.0, 1.0]


def test_the_rest_has_the_gradient_of_the_masked_network() -> None:
    gated = chain(batch_norm=False).double()
    gates = add_gates(gated, 0.5)
    stir(gated)
    masked = copy.deepcopy(gated)
    x = torch.randn(6, 3, 7, 7, dtype=torch.float64)
    (gated(x) ** 2).sum().backward()
    constants: list[Tensor] = []
    for name, gate in gates_of(masked).items():
        gate.register_forward_hook(lambda gate, inputs, mask: constants.append(mask.detach()) or constants[-1])
        assert name in gates
    (masked(x) ** 2).sum().backward()
    assert len(constants) == 2
    mine = {name: p.grad for name, p in gated.named_parameters() if "gate" not in name}
    for name, parameter in masked.named_parameters():
        if "gate" not in name:
            torch.testing.assert_close(mine[name], parameter.grad, rtol=0, atol=1e-12)


def test_the_lasso() -> None:
    gated = chain()
    gates = add_gates(gated, 0.5)
    with observed(gates.values()) as outputs:
        gated(torch.randn(4, 3, 7, 7))
    gated(torch.randn(4, 3, 7, 7))  # without an observer
    assert len(outputs) == 2
    by_hand = sum(abs(v) for z in outputs for row in z.tolist() for v in row) / 4
    assert lasso(outputs).item() == pytest.approx(by_hand, rel=1e-6)


class Empty(nn.ModuleDict):
    """Layers of an empty container, which is false in an if."""

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("outer", [Empty, lambda layers: nn.Sequential(torch.compile(layers["0"], backend="eager"))])
def test_gates_are_removed_from_every_kind_of_parent(outer: Callable[[Any], nn.Module]) -> None:
    made = outer({"0": nn.Conv2d(3, 8, 3), "1": nn.BatchNorm2d(8)})
    assert add_gates(made, 0.5)
    remove_gates(made)
    assert not gates_of(made)
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in made.modules())


class Wrapped(L.LightningModule):
    """Module around a network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.long
@pytest.mark.parametrize("way", ["part", "in place", "by Lightning"])
def test_a_compiled_network_that_has_run_follows_its_gates(way: str) -> None:
    layers, x = chain().eval(), torch.randn(2, 3, 7, 7)
    called = module = Wrapped(torch.compile(layers, backend="eager") if way == "part" else layers)
    if way == "in place":
        module.compile(backend="eager")
    elif way == "by Lightning":
        called = torch.compile(module, backend="eager")
        module = from_compiled(called)
    dense = called(x)
    add_gates(module, keep=0.25)
    torch.testing.assert_close(called(x), gated := layers(x))
    assert not torch.allclose(gated, dense)
    remove_gates(module)
    torch.testing.assert_close(called(x), dense)


def test_keeping_all_is_no_gate_at_all() -> None:
    dense = chain()
    assert add_gates(dense, 1.0) == {}
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in dense)
    assert add_gates(chain(), 0.93).keys() == {"0"}, "6 · 0.93 rounds to 6, so the layer gets no gate"


def test_names_and_values_of_the_network_stay() -> None:
    dense = chain()
    gated = copy.deepcopy(dense)
    add_gates(gated, 0.5, seed=3)
    own = gated.state_dict()
    for name, value in dense.state_dict().items():
        assert torch.equal(own.pop(name), value)
    assert own.keys() == gate_parameters(gated).keys() == {f"{i}.gate.{p}" for i in (0, 4) for p in ("weight", "bias")}
    again = copy.deepcopy(dense)
    add_gates(again, 0.5, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(gated.parameters(), again.parameters(), strict=True))
    x = torch.randn(3, 3, 7, 7)
    with without_gates(gated):
        assert torch.equal(gated.eval()(x), dense.eval()(x))
    assert not torch.equal(gated(x), dense(x))
    before = {name: p.clone() for name, p in gate_parameters(gated).items()}
    gated.load_state_dict(dense.state_dict())
    assert all(torch.equal(before[name], p) for name, p in gate_parameters(gated).items())
    remove_gates(gated)
    assert torch.equal(gated(x), dense(x))
    assert gated.state_dict().keys() == dense.state_dict().keys()
    add_gates(gated, 0.5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_has_gates_of_its_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    gated = chain().eval()
    add_gates(gated, 0.5)
    stir(gated)
    x = torch.randn(3, 3, 7, 7)
    twin = copied(gated)
    expected = gated(x)
    assert torch.equal(twin(x), expected)
    for parameter in gate_parameters(gated).values():
        nn.init.normal_(parameter)
    assert torch.equal(twin(x), expected)


@pytest.mark.long
@pytest.mark.parametrize("name", ["cnn", "vgg11_bn", "resnet32"])
@pytest.mark.parametrize("mode", ["ste", "multiply"])
def test_sliced_is_masked(name: str, mode: Any) -> None:
    gated = network(name, 10).eval()
    add_gates(gated, 0.5, mode)
    stir(gated)
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        masked = gated(x)
        with sliced(gated):
            one_by_one = torch.cat([gated(sample[None]) for sample in x])
            alike = gated(x[:1].repeat(3, 1, 1, 1))
        torch.testing.assert_close(one_by_one, masked, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(alike, masked[:1].expand(3, -1), rtol=1e-4, atol=1e-4)
        for gate in gates_of(gated).values():
            gate.shared = True
        together = gated(x)
        for gate in gates_of(gated).values():
            gate.shared = False
        with sliced(gated, shared=True):
            torch.testing.assert_close(gated(x), together, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(together, masked)
        assert torch.equal(gated(x), masked), "it must be masked again afterwards"


def test_resnets_gate_both_convolutions_of_a_block_and_no_shortcut() -> None:
    gated = network("resnet32", 10, shortcut="B")
    names = add_gates(gated, 0.5)
    assert len(names) == 1 + 15 * 2
    assert not [name for name in names if "shortcut" in name]
    assert "stage2.0.conv2" in names


@pytest.mark.long
@pytest.mark.parametrize("keep", [0.5, 0.7071])
def test_macs_that_are_really_computed(keep: float) -> None:
    """Count h·w·k²·K_{l−1}·K_l for every convolution of a chain, and C_in·C_out for its gate."""
    gated = network("vgg11_bn", 10).eval()
    add_gates(gated, keep)
    for layer in gated:
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.zeros_(layer.weight)
            nn.init.ones_(layer.bias)  # so that ReLU passes every channel that a gate has kept
    widths = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    sides = [32, 16, 8, 8, 4, 4, 2, 2]
    kept = [3] + [max(1, round(keep * width)) for width in widths[1:]]
    expected = 512 * 512 * 2 + 512 * 10
    for layer, side in enumerate(sides):
        expected += side * side * 9 * kept[layer] * kept[layer + 1] + widths[layer] * widths[layer + 1]
    assert count_sliced_macs(gated, torch.randn(1, 3, 32, 32)) == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "keep", "share"), [("vgg11_bn", 0.7071, 0.51), ("resnet32", 0.7071, 0.57), ("resnet32", 0.65, 0.5)]
)
def test_share_of_the_macs_that_feddps_configurations_leave(name: str, keep: float, share: float) -> None:
    """Check the shares that `configs/feddp` name; β = 1 lets every kept channel through ReLU."""
    gated = network(name, 10).eval()
    image = torch.randn(1, 3, 32, 32)
    with FlopCounterMode(display=False) as counter:
        gated(image)
    add_gates(gated, keep)
    for layer in gated.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.zeros_(layer.weight)
            nn.init.ones_(layer.bias)
    assert 2 * count_sliced_macs(gated, image) / counter.get_total_flops() == pytest.approx(share, abs=0.01)


def test_a_batch_that_disagrees_is_not_sliced() -> None:
    gated = chain().eval()
    add_gates(gated, 0.5)
    stir(gated)
    with sliced(gated), pytest.raises(UserError, match=r"choose different channels.*shared=True"):
        gated(torch.randn(16, 3, 7, 7))
    assert "forward" not in vars(gated[0]) | vars(gated[1])


class Grouped(nn.Module):
    """Module with a convolution in groups, one before a GroupNorm, and a 1-D one on the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, groups=4)
        self.second = nn.Conv2d(8, 6, 1)
        self.norm = nn.GroupNorm(2, 6)
        self.third = nn.Conv1d(6, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.norm(self.second(self.first(x).relu())).relu().flatten(2))


def test_other_convolutions() -> None:
    gated = Grouped().eval()
    add_gates(gated, 0.5)
    stir(gated)
    x = torch.randn(5, 4, 6, 6)
    assert (gated(x).abs().amax(2) > 0).sum(1).tolist() == [2] * 5
    masked = gated(x)
    with sliced(gated):
        torch.testing.assert_close(torch.cat([gated(sample[None]) for sample in x]), masked)


class NormsLast(nn.Module):
    """Network that defines its normalisations behind all of its convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        return self.bn2(self.conv2(x)).relu()


def test_a_norm_of_another_convolution_does_not_get_the_mask_of_the_batch_before() -> None:
    gated, x = NormsLast().eval(), torch.randn(2, 3, 8, 8)
    dense = gated(x)
    add_gates(gated, 0.5)
    with pytest.raises(UserError, match=r"BatchNorm2d of 8 channels, .* is computed before it: define each"):
        gated(x)
    with without_gates(gated):
        assert torch.equal(gated(x), dense)
    remove_gates(gated)
    add_gates(gated, 0.5, skip=["conv2"])
    assert torch.equal(gated(x), gated(torch.cat([x, x]))[:2])


class Interrupted(nn.Sequential):
    """Convolution and norm, whose forward may leave out the norm, or break off before it."""

    normalises, breaks = True, False

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        if self.breaks:
            raise KeyboardInterrupt
        return self[1](x) if self.normalises else x


def test_a_norm_that_is_not_computed_is_named() -> None:
    gated, x = Interrupted(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), torch.randn(2, 3, 8, 8)
    add_gates(gated, 0.5)
    gated.breaks = True
    with pytest.raises(KeyboardInterrupt):
        gated(x)
    gated.breaks = False
    assert (gated(x) != 0).any((2, 3)).sum(1).tolist() == [4, 4]
    gated.normalises = False
    with pytest.raises(
        UserError, match="normalisation of 8 channels, the next one in its Interrupted, is not computed"
    ):
        gated(x)
    remove_gates(gated)
    assert not gated._forward_hooks
    assert not gated._forward_pre_hooks


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: add_gates(chain(), 0.0), ["(0, 1]", "got 0.0"]),
        (lambda: add_gates(chain(), 1.2), ["(0, 1]", "got 1.2"]),
        (lambda: add_gates(chain(), float("nan")), ["(0, 1]", "nan"]),
        (lambda: add_gates(chain(), 0.5, "st"), ["'st'", "did you mean 'ste'"]),  # type: ignore[arg-type]
        (lambda: add_gates(nn.Sequential(nn.Linear(3, 2))), ["Sequential has no convolution", "channels"]),
        (lambda: sliced(chain().eval()).__enter__(), ["Sequential has no gates", "add_gates"]),
        (lambda: twice(), ["has gates already", "remove_gates"]),
        (lambda: sliced_in_training(), ["evaluation mode", "eval()"]),
    ],
)
def test_bad_input_is_refused_in_a_sentence(mistake: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        mistake()
    assert [word for word in words if word not in str(error.value)] == []


def twice() -> None:
    gated = chain()
    add_gates(gated)
    add_gates(gated)


def sliced_in_training() -> None:
    gated = chain()
    add_gates(gated)
    with sliced(gated):
        pass
