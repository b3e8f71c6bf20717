"""Test integers with a zero point: a plain loop, bits, torch's own quantisation, channels, refusals."""

from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, bits_of
from lightning.pytorch import Callback
from torch import nn
from toys import Convolved, Perceptron, federation, reordered

from lightning_fl import UserError
from lightning_fl.algorithms import FedAvg
from lightning_fl.callbacks import MagnitudePruning
from lightning_fl.codecs import ErrorFeedback, Integers
from lightning_fl.groups import layer_groups
from lightning_fl.slots import Payload, RoundContext
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

SHAPES = {"conv.weight": (4, 3, 2, 2), "conv.bias": (4,), "fc.weight": (2, 16)}
D = 48 + 4 + 32


def setting_of(is_reordered: bool = False, **facts: Any) -> RoundContext:
    layout = Layout.of(reordered({name: torch.empty(shape) for name, shape in SHAPES.items()}, is_reordered))
    return RoundContext(layout, NO_LAYOUT, num_clients=3, **{"dtype": torch.float64, **facts})


def sent(codec: Integers, x: torch.Tensor, context: RoundContext) -> tuple[torch.Tensor, Payload]:
    payload, _ = codec.encode({"model": x}, {}, context)
    return codec.decode(payload, context)["model"], payload


def vector() -> torch.Tensor:
    return torch.randn(D, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.3


def by_hand(group: np.ndarray, bits: int, symmetric: bool) -> np.ndarray:
    """Return a group of numbers as integers and back, number by number."""
    most = 2**bits - 1
    if symmetric:
        half = 2 ** (bits - 1) - 1
        step, zero, most = np.abs(group).max() / half, half, 2 * half
    else:
        low, high = min(group.min(), 0), max(group.max(), 0)
        step = (high - low) / most
        zero = round(-low / step)
    found = [min(max(round(value / step) + zero, 0), most) for value in group.ravel()]
    return np.array([(integer - zero) * step for integer in found]).reshape(group.shape)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize("bits", [2, 5, 8, 12])
@pytest.mark.parametrize("is_reordered", [False, True])
def test_it_is_the_plain_loop(bits: int, per: Any, symmetric: bool, is_reordered: bool) -> None:
    context = setting_of(is_reordered)
    x = vector()
    arrived, _ = sent(Integers(bits, per, symmetric), x, context)
    for (name, tensor), found in zip(
        context.layout.views(x).items(), context.layout.views(arrived).values(), strict=True
    ):
        groups = [tensor] if per == "tensor" or tensor.dim() < 2 else list(tensor)
        expected = np.stack([by_hand(group.numpy(), bits, symmetric) for group in groups]).reshape(tensor.shape)
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12, err_msg=name)


def test_integers_are_those_of_torch() -> None:
    """Test against the scale and zero point of torch's own quantisation of tensors to uint8."""
    x = vector().float()
    context = setting_of(dtype=torch.float32)
    arrived, payload = sent(Integers(), x, context)
    scales = payload["scalars/scale/model"].content
    zeros = payload["scalars/zero/model"].content
    parts = zip(context.layout.views(x).values(), context.layout.views(arrived).values(), scales, zeros, strict=True)
    for tensor, found, scale, zero in parts:
        expected = torch.fake_quantize_per_tensor_affine(tensor, float(scale), int(zero), 0, 255)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (Integers(), 8 * D + 3 * 40),
        (Integers(4), 4 * D + 3 * 36),
        (Integers(8, "channel"), 8 * D + (4 + 1 + 2) * 40),
        (Integers(8, symmetric=True), 8 * D + 3 * 32),
        (Integers(3, "channel", symmetric=True), 3 * D + 7 * 32),
    ],
    ids=str,
)
def test_bits_are_those_of_the_formula(codec: Integers, expected: int) -> None:
    _, payload = sent(codec, vector().float(), setting_of(dtype=torch.float32))
    assert sum(packed.bits for packed in payload.values()) == expected


def test_zero_arrives_as_zero_and_errors_are_at_most_a_step() -> None:
    x = vector()
    x[::3] = 0
    for codec in (Integers(4), Integers(4, symmetric=True)):
        arrived, payload = sent(codec, x, setting_of())
        assert not arrived[::3].any()
        steps = payload["scalars/scale/model"].content / (7 if codec.symmetric else 1)
        views = zip(setting_of().layout.views(arrived - x).values(), steps, strict=True)
        assert all(float(error.abs().max()) <= float(step) for error, step in views)


def test_a_transposed_convolutions_channels_are_its_second_axis() -> None:
    module = nn.Sequential(nn.ConvTranspose2d(3, 4, 2, bias=False))
    layout = Layout.of(dict(module.named_parameters()))
    context = RoundContext(layout, NO_LAYOUT, 3, groups=layer_groups(module))
    x = torch.arange(48.0) + 1
    payload, _ = Integers(8, "channel").encode({"model": x}, {}, context)
    largest = x.view(3, 4, 2, 2).amax((0, 2, 3))
    torch.testing.assert_close(payload["scalars/scale/model"].content, largest / 255)


def test_channels_keep_more_where_their_sizes_differ() -> None:
    x = vector()
    setting_of().layout.views(x)["conv.weight"].mul_(torch.tensor([1.0, 10, 100, 1000]).view(4, 1, 1, 1))
    errors = [
        float(((sent(Integers(8, per), x, setting_of())[0] - x) / x).abs()[:12].max()) for per in ("tensor", "channel")
    ]
    assert errors[1] < errors[0] / 10


def test_what_is_not_finite_does_not_become_so() -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        for codec in (Integers(), Integers(symmetric=True)):
            x = vector()
            x[1] = value
            assert not sent(codec, x, setting_of())[0].isfinite().all()


def test_a_run_costs_what_the_formula_says_in_both_directions(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=2)
    trainer.fit(Perceptron(), federation(), FedAvg(uplink=ErrorFeedback(Integers(6)), downlink=Integers(8, "channel")))
    assert bits_of(trainer, "up") == {"model": 3 * 6 * 26, "scalars": 3 * 4 * (32 + 6)}
    assert bits_of(trainer, "down") == {"model": 3 * 8 * 26, "scalars": 3 * 8 * (32 + 8)}  # 4 + 1 + 2 + 1 groups


def test_a_mask_leaves_tensors_and_no_channels(make_trainer: MakeTrainer) -> None:
    def prune() -> Callback:
        return MagnitudePruning(rate=0.5, prune_epoch=1)

    trainer = make_trainer(max_rounds=3, callbacks=prune())
    trainer.fit(Convolved(), federation(), FedAvg(uplink=Integers()))
    kept = int(trainer.run.mask.sum())
    assert bits_of(trainer, "up")["model"] == 3 * 8 * kept
    with pytest.raises(UserError, match="needs matrices, of which a mask leaves rows of numbers"):
        make_trainer(max_rounds=3, callbacks=prune()).fit(
            Convolved(), federation(), FedAvg(uplink=Integers(per="channel"))
        )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"bits": 1}, "bits of an integer must be .* got 1"),
        ({"bits": 17}, "got 17"),
        ({"per": "row"}, "allowed: channel, tensor|'row'"),
    ],
)
def test_refuses_what_it_does_not_know(given: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Integers(**given)
