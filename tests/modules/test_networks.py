from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_fl.errors import UserError
from lightning_fl.modules import NETWORKS, network
from lightning_fl.modules.networks import usual_input
from lightning_fl.modules.residual_blocks import PaddingShortcut

PARAMETERS = {  # published or derived counts for 10 and 100 classes
    "cnn": (122_570, 128_420),
    "lenet5": (62_006, 69_656),
    "vgg9": (9_231_114, 9_231_114 + 90 * 513),
    "vgg11": (9_750_922, 9_797_092),
    "vgg11_bn": (9_756_426, 9_756_426 + 90 * 513),
    "resnet18": (11_178_762, 11_224_932),
    "resnet32": (464_154, 464_154 + 90 * 65),
    "cnn_mnist": (21_840, 21_840 + 90 * 51),
    "linear": (30_730, 307_300),
}
# 24² pixels of 10 filters 5×5×1, 8² pixels of 20 filters 5×5×10, then 320→50→10
CNN_MNIST_MACS = 24**2 * 10 * 25 + 8**2 * 20 * 250 + 320 * 50 + 50 * 10
MACS = {
    "cnn": (4_548_608, 4_554_368),
    "lenet5": (651_720, 659_280),
    "vgg9": (152_769_536, 152_769_536 + 90 * 512),
    "vgg11": (153_293_824, 153_339_904),
    "vgg11_bn": (153_293_824, 153_339_904),
    "resnet18": (555_422_720, 555_422_720 + 90 * 512),
    "resnet32": (68_862_592, 68_862_592 + 90 * 64),
    "cnn_mnist": (CNN_MNIST_MACS, CNN_MNIST_MACS + 90 * 50),
    "linear": (30_720, 307_200),
}


def num_parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def macs(net: nn.Module, in_channels: int, image_size: int) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net.eval()(torch.zeros(1, in_channels, image_size, image_size))
    return counter.get_total_flops() // 2


def images(name: str, batch_size: int = 2) -> torch.Tensor:
    in_channels, image_size = usual_input(name)
    return torch.randn(batch_size, in_channels, image_size, image_size)


def test_the_tables_cover_the_registry() -> None:
    assert list(PARAMETERS) == list(MACS) == list(NETWORKS)


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("column", [0, 1], ids=["10 classes", "100 classes"])
def test_parameters_and_macs(name: str, column: int) -> None:
    net = network(name, (10, 100)[column])
    assert num_parameters(net) == PARAMETERS[name][column]
    assert macs(net, *usual_input(name)) == MACS[name][column]


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_forward_shape_and_gradient_flow(name: str) -> None:
    net = network(name, 7)
    logits = net(images(name))
    assert logits.shape == (2, 7)
    logits.logsumexp(dim=1).sum().backward()
    for key, parameter in net.named_parameters():
        assert parameter.grad is not None, key
        # a bias before a BatchNorm has no effect, so its gradient is rounding noise around zero
        assert parameter.grad.isfinite().all(), key
        if not (key.endswith("bias") and "conv" in key):
            assert parameter.grad.any(), key


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "in_channels", "image_size"),
    [
        ("cnn", 1, 28),
        ("cnn", 3, 18),
        ("lenet5", 1, 28),
        ("lenet5", 3, 16),
        ("vgg9", 1, 63),
        ("vgg11", 3, 64),
        ("vgg11_bn", 1, 40),
        ("resnet18", 1, 28),
        ("resnet18", 3, 9),
        ("resnet32", 1, 8),
        ("resnet32", 3, 45),
        ("cnn_mnist", 3, 32),
        ("cnn_mnist", 1, 16),
        ("linear", 1, 8),
    ],
)
def test_other_image_sizes(name: str, in_channels: int, image_size: int) -> None:
    net = network(name, 5, in_channels, image_size).eval()
    assert net(torch.randn(2, in_channels, image_size, image_size)).shape == (2, 5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "smallest"),
    [("cnn", 18), ("lenet5", 16), ("vgg9", 32), ("vgg11", 32), ("vgg11_bn", 32), ("cnn_mnist", 16)],
)
def test_too_small_images_are_refused_with_the_smallest_allowed(name: str, smallest: int) -> None:
    network(name, 10, image_size=smallest)
    for image_size in (1, smallest - 1):
        with pytest.raises(UserError, match=f"'{name}' needs images of at least {smallest}×{smallest}"):
            network(name, 10, image_size=image_size)


@pytest.mark.long
def test_options() -> None:
    assert num_parameters(network("resnet18", 10, conv_bias=False)) == 11_173_962
    assert num_parameters(network("resnet18", 100, conv_bias=False)) == 11_220_132
    option_b = network("resnet32", 10, shortcut="B")
    assert num_parameters(option_b) == 466_906
    # two 1×1 convolutions: 16→32 on 16² pixels and 32→64 on 8²
    assert macs(option_b, 3, 32) == 68_862_592 + 16 * 32 * 16**2 + 32 * 64 * 8**2
    assert not any(isinstance(module, nn.Dropout) for module in network("vgg11", 10).modules())
    layers = list(network("vgg11", 10, dropout=0.5))  # type: ignore[call-overload]
    linear = [index for index, layer in enumerate(layers) if isinstance(layer, nn.Linear)]
    dropout = [index for index, layer in enumerate(layers) if isinstance(layer, nn.Dropout)]
    assert dropout == [linear[0] - 1, linear[1] - 1]
    assert num_parameters(network("vgg11_bn", 10, dropout=0.5)) == 9_756_426


@pytest.mark.long
@pytest.mark.parametrize("name", ["vgg9", "vgg11", "vgg11_bn"])
def test_width_narrows_every_layer_but_the_last(name: str) -> None:
    assert num_parameters(network(name, 10, width=1.0)) == PARAMETERS[name][0]
    narrow = network(name, 10, width=0.125)
    channels = [layer.out_channels for layer in narrow if isinstance(layer, nn.Conv2d)]  # type: ignore[attr-defined]
    assert channels == [8, 16, 32, 32, 64, 64, 64, 64]
    neurons = [layer.out_features for layer in narrow if isinstance(layer, nn.Linear)]  # type: ignore[attr-defined]
    assert neurons == [10] if name == "vgg9" else [64, 64, 10]
    assert narrow(images(name)).shape == (2, 10)
    with pytest.raises(UserError, match=rf"network '{name}': width must lie in \(0, 1\], got 0"):
        network(name, 10, width=0)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_a_stem_of_even_size_keeps_the_image_size() -> None:
    net = network("resnet18", 10, stem_kernel=2)
    assert net.conv1(images("resnet18")).shape == (2, 64, 32, 32)  # type: ignore[operator]
    assert num_parameters(net) == 11_178_762 - 64 * 3 * (9 - 4)


def test_bad_names_and_options() -> None:
    with pytest.raises(UserError, match="unknown network 'resnet-18': did you mean 'resnet18'"):
        network("resnet-18", 10)
    with pytest.raises(UserError, match="no option 'dropuot': did you mean 'dropout'"):
        network("vgg11", 10, dropuot=0.5)
    with pytest.raises(UserError, match="'cnn' has no option 'dropout': it has none"):
        network("cnn", 10, dropout=0.5)
    with pytest.raises(UserError, match="shortcut 'C' is unknown; allowed: A, B"):
        network("resnet32", 10, shortcut="C")
    with pytest.raises(UserError, match=r"dropout must lie in \[0, 1\), got 1"):
        network("vgg11", 10, dropout=1.0)
    with pytest.raises(UserError, match="stem_kernel must be a whole number of at least 1, got 0"):
        network("resnet18", 10, stem_kernel=0)
    for argument in ("num_classes", "in_channels", "image_size"):
        with pytest.raises(UserError, match=f"{argument} must be a whole number of at least 1, got 0"):
            network("linear", **{"num_classes": 10, argument: 0})


@pytest.mark.long
@pytest.mark.parametrize("name", ["vgg11", "resnet18"])
def test_convolutions_start_with_fan_out_variance_and_no_bias(name: str) -> None:
    for module in network(name, 10).modules():
        if isinstance(module, nn.Conv2d):
            assert module.bias is not None
            assert not module.bias.any()
            if module.weight.numel() >= 10_000:
                expected = 2 / (module.kernel_size[0] ** 2 * module.out_channels)
                assert module.weight.var().item() == pytest.approx(expected, rel=0.1)


def test_convolutions_start_with_different_weights_from_different_seeds() -> None:
    torch.manual_seed(1)
    first = network("cnn", 10)
    torch.manual_seed(1)
    again = network("cnn", 10)
    other = network("cnn", 10)
    assert torch.equal(first.conv1.weight, again.conv1.weight)  # type: ignore[union-attr,arg-type]
    assert not torch.equal(first.conv1.weight, other.conv1.weight)  # type: ignore[union-attr,arg-type]


def test_padding_shortcut_keeps_every_second_pixel_between_zero_channels() -> None:
    x = torch.randn(2, 4, 5, 5)
    y = PaddingShortcut(extra=4, stride=2)(x)
    assert y.shape == (2, 8, 3, 3)
    assert torch.equal(y[:, 2:6], x[:, :, ::2, ::2])
    assert not y[:, :2].any()
    assert not y[:, 6:].any()


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "linear"])
def test_every_relu_is_a_module_used_once_and_not_in_place(name: str) -> None:
    net = network(name, 10).eval()
    calls: list[nn.Module] = []

    def remember(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        calls.append(module)
        assert output.min() == 0 <= output.max()
        assert output is not inputs[0]

    relus = [module for module in net.modules() if isinstance(module, nn.ReLU)]
    for relu in relus:
        assert not relu.inplace
        relu.register_forward_hook(remember)
    net(images(name))
    assert len(calls) == len(set(calls)) == len(relus) > 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["cnn", "resnet32"])
def test_channels_last_gives_the_same_logits(name: str) -> None:
    net = network(name, 10).eval()
    x = images(name)
    expected = net(x)
    twin = copy.deepcopy(net).to(memory_format=torch.channels_last)
    torch.testing.assert_close(twin(x.contiguous(memory_format=torch.channels_last)), expected, atol=1e-5, rtol=1e-4)
