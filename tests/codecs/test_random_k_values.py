"""Test RandomK whose values cross through another codec, as EDEN with less than a bit for a number."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer, assert_same, bits_of, fits
from toys import Perceptron, federation

from lightning_fl.algorithms import Algorithm
from lightning_fl.codecs import (
    DRIVE,
    EDEN,
    QSGD,
    STC,
    Blockwise,
    Cast,
    Changes,
    Dense,
    ErrorFeedback,
    Followed,
    RandomK,
    TernGrad,
    TopK,
)
from lightning_fl.errors import UserError
from lightning_fl.link.messages import UplinkMessage
from lightning_fl.slots import Codec, Draw, Message, RoundContext, Traits
from lightning_fl.steps import Apply, Compress
from lightning_fl.vectors.layer_groups import Group
from lightning_fl.vectors.layout import NO_LAYOUT, Layout
from lightning_fl.vectors.submodel import Submodel

LAYOUT = Layout(("a", "b", "c"), ((10, 8), (300,), (20,)))
NAMES = ("model", "moments/first", "buffers", "scalars/steps")


def setting_of(layout: Layout, seed: int = 0, party: int = 1, dtype: torch.dtype = torch.float32) -> RoundContext:
    return RoundContext(layout, NO_LAYOUT, num_clients=5, draw=Draw((seed, 0, 11), party, "up"), dtype=dtype)


def flat(count: int, seed: int = 0, **fields: Any) -> RoundContext:
    return setting_of(Layout(("a",), ((count,),)), seed, **fields)


def message() -> Message:
    return {name: torch.randn(400, generator=torch.Generator().manual_seed(seed)) for seed, name in enumerate(NAMES)}


@pytest.mark.parametrize("inner", [EDEN(1), EDEN(3), QSGD(4), TernGrad(), Cast(stochastic=True), RandomK(0.5)], ids=str)
@pytest.mark.parametrize("seed_bits", [64, 0])
def test_the_drawn_numbers_cross_as_a_smaller_model_with_draws_of_its_own(inner: Codec, seed_bits: int) -> None:
    context, codec = setting_of(LAYOUT), RandomK(0.1, seed_bits=seed_bits, values=inner)
    payload, memory = codec.encode(message(), {}, context)
    arrived, total = codec.decode(payload, context), 0
    assert memory == {}
    assert arrived.keys() == message().keys()
    for name, x in message().items():
        if name in ("buffers", "scalars/steps"):
            assert torch.equal(arrived[name], x)
            continue
        order = torch.randperm(400, generator=torch.Generator().manual_seed(context.draw.seed(name)))
        positions = order[:40].sort().values
        mask = torch.zeros(400, dtype=torch.bool)
        mask[positions] = True
        within = context.within(Submodel.from_masks(LAYOUT, NO_LAYOUT, mask))
        within = replace(within, draw=replace(context.draw, purpose=(0, 0, 11, 1)))
        of_values, _ = inner.encode({name: 10 * x[positions]}, {}, within)
        expected = torch.zeros(400)
        expected[positions] = inner.decode(of_values, within)[name]
        assert torch.equal(arrived[name], expected)
        total += sum(packed.bits for packed in of_values.values()) + seed_bits
    assert sum(packed.bits for packed in payload.values()) == total + 2 * 32 * 400


@pytest.mark.parametrize(
    (
        "alpha",
        "bits",
    ),  # k = 10,920, 5,460 and 1,092 in chunks of 8,192+2,048+512+128+64, 4,096+1,024+256+128, 1,024+128
    [(0.5, 10_944 + 5 * 32 + 64), (0.25, 5_504 + 4 * 32 + 64), (0.05, 1_152 + 2 * 32 + 64)],
)
def test_bits_of_the_cnn_below_a_bit(alpha: float, bits: int) -> None:
    payload, _ = RandomK(alpha, values=EDEN(1)).encode({"model": torch.randn(21_840)}, {}, flat(21_840))
    assert sum(packed.bits for packed in payload.values()) == bits
    assert {name.partition("/")[0] for name in payload} == {"model", "scalars"}


@pytest.mark.matrix
def test_it_is_nearly_unbiased_and_its_error_is_that_of_both() -> None:
    """EDEN with one bit has an error of 0.571 ‖x‖², so the values of a half of the numbers one of 2 · 1.571 − 1."""
    x, codec, seeds = torch.randn(512, generator=torch.Generator().manual_seed(1)), RandomK(0.5, values=EDEN(1)), 1_000
    total, square, error = torch.zeros(512), torch.zeros(512), 0.0
    for seed in range(seeds):
        context = flat(512, seed)
        arrived = codec.decode(codec.encode({"model": x}, {}, context)[0], context)["model"]
        total, square = total + arrived, square + arrived.square()
        error += float((arrived - x).square().sum() / x.square().sum()) / seeds
    mean = total / seeds
    standard_errors = ((square / seeds - mean.square()) / seeds).sqrt()
    assert ((mean - x).abs() < 5 * standard_errors).all()
    assert error == pytest.approx(2 * 1.571 - 1, rel=0.02)


@pytest.mark.long
def test_fifty_clients_average_out_also_with_common_coordinates() -> None:
    x = torch.randn(512, generator=torch.Generator().manual_seed(1))
    errors = {}
    for common in (False, True):
        codec, total = RandomK(0.5, common=common, values=EDEN(1)), torch.zeros(512)
        for client in range(50):
            context = flat(512, party=client)
            total += codec.decode(codec.encode({"model": x}, {}, context)[0], context)["model"] / 50
        sent = total != 0
        assert int(sent.sum()) == (256 if common else 512)
        errors[common] = float((total - 2 * x * sent if common else total - x).square().sum() / x.square().sum())
    assert errors[False] < 2 * 2.142 / 50
    assert errors[True] < 2 * 4 * 0.5 * 0.571 / 50, "rotations are each client's own"


@pytest.mark.parametrize(
    ("codec", "traits", "is_lossy"),
    [
        (RandomK(0.1), Traits.UNBIASED | Traits.DELTAS_ONLY | Traits.SENDS_FEW, True),
        (RandomK(0.6, "none"), Traits.CONTRACTS | Traits.IDEMPOTENT | Traits.DELTAS_ONLY, True),
        (RandomK(1.0), Traits.UNBIASED | Traits.CONTRACTS | Traits.IDEMPOTENT, False),
        (RandomK(0.1, common=True, values=QSGD()), Traits.UNBIASED | Traits.DELTAS_ONLY, True),
        (RandomK(0.6, values=EDEN(1)), Traits.NEARLY_UNBIASED | Traits.DELTAS_ONLY, True),
        (RandomK(0.6, "none", values=EDEN(1, scale="min_mse")), Traits.CONTRACTS | Traits.DELTAS_ONLY, True),
        (RandomK(1.0, values=EDEN(1)), Traits.NEARLY_UNBIASED | Traits.DELTAS_ONLY, True),
        (RandomK(1.0, "none", values=Cast()), Traits.CONTRACTS, True),
        (RandomK(1.0, values=Dense()), Traits.UNBIASED | Traits.CONTRACTS, False),
    ],
    ids=str,
)
def test_traits_are_those_of_both(codec: RandomK, traits: Traits, is_lossy: bool) -> None:
    assert codec.traits == traits
    assert codec.is_lossy_for("model") == is_lossy


@pytest.mark.long
def test_a_contraction_stays_one() -> None:
    codec, error = RandomK(0.5, "none", values=EDEN(1, scale="min_mse")), 0.0
    for seed in range(100):
        context, x = flat(256, seed), torch.randn(256, generator=torch.Generator().manual_seed(seed))
        arrived = codec.decode(codec.encode({"model": x}, {}, context)[0], context)["model"]
        error += float((arrived - x).square().sum() / x.square().sum()) / 100
    assert error == pytest.approx(1 - 0.5 * 0.637, rel=0.03)


def test_all_numbers_need_no_seed() -> None:
    x, context = torch.randn(400), setting_of(LAYOUT)
    codec = RandomK(1.0, values=DRIVE())
    payload, _ = codec.encode({"model": x}, {}, context)
    assert sum(packed.bits for packed in payload.values()) == 448 + 3 * 32
    arrived = codec.decode(payload, context)["model"]
    assert float(arrived @ x) == pytest.approx(float(x @ x), rel=1e-4)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_tiny_vectors(count: int) -> None:
    context, x = flat(count), torch.randn(count)
    codec = RandomK(0.5, values=QSGD(2**20))
    payload, _ = codec.encode({"model": x}, {}, context)
    arrived = codec.decode(payload, context)["model"]
    assert len(arrived) == count
    if count == 1:
        torch.testing.assert_close(arrived, x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_is_not_finite_raises_nothing_and_zeros_stay(bad: float, dtype: torch.dtype) -> None:
    context, codec = flat(100, dtype=dtype), RandomK(0.5, values=EDEN(1))
    x = torch.zeros(100, dtype=dtype)
    x[:] = bad
    payload, _ = codec.encode({"model": x}, {}, context)
    arrived = codec.decode(payload, context)["model"]
    assert arrived.dtype == dtype
    assert bad != 0 or not arrived.any()


def test_layers_and_ideal_sizes_are_those_of_the_values() -> None:
    x, context = message()["model"], setting_of(LAYOUT)
    codec = RandomK(0.1, values=QSGD(4))
    payload, _ = codec.encode({"model": x}, {}, context)
    groups = [Group(name, (name,)) for name in "abc"]
    crossing = UplinkMessage(0, {"model": x}, {}, {}, [(codec, payload)], context, groups)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(context.draw.seed("model")))[:40]
    counts = torch.bincount(torch.bucketize(order, torch.tensor([80, 380]), right=True), minlength=3).tolist()
    of_layers = dict(zip("abc", (4 * count for count in counts), strict=True))
    assert crossing.bits_by_layer() == {**of_layers, "shared": 64 + 32}
    assert 64 + 32 < crossing.entropy_bits < crossing.bits
    assert codec.symbols("model", payload, context) is None


@pytest.mark.parametrize(
    ("scale", "inner", "clause"),
    [
        (
            "unbiased",
            Blockwise(),
            r"RandomK\(scale='unbiased'\) is unbiased only if the codec of its values is, and Blockw",
        ),
        ("none", QSGD(), r"RandomK\(scale='none'\) is a contraction only if the codec of its values is, and QSGD"),
        ("none", EDEN(1), r"RandomK\(scale='none'\) is a contraction only if .*EDEN.* is not: give it another one"),
        ("unbiased", TopK(), "is unbiased only if"),
        (
            "unbiased",
            ErrorFeedback(TopK()),
            "RandomK's values have other positions in every message, but ErrorFeedback builds on the p",
        ),
        ("unbiased", Changes(), "but Changes builds on the previous message"),
    ],
    ids=str,
)
def test_codecs_that_do_not_fit_are_refused(scale: Any, inner: Codec, clause: str) -> None:
    with pytest.raises(UserError, match=clause):
        RandomK(0.1, scale, values=inner)


def test_neighbours_know_what_it_is() -> None:
    with pytest.raises(UserError, match="ErrorFeedback around RandomK would add up errors"):
        ErrorFeedback(RandomK(0.1, values=EDEN(1)))
    with pytest.raises(UserError, match="the uplink RandomK would lose most of every upload for good"):
        Algorithm(uplink=RandomK(0.5, "none", values=STC(0.1)))
    ErrorFeedback(RandomK(0.1, "none", values=EDEN(1, scale="min_mse")))


HALF_A_BIT = RandomK(0.5, values=EDEN(1))
BOTH_WAYS = {"uplink": HALF_A_BIT, "downlink": Followed(HALF_A_BIT), "steps": [Apply(), Compress(HALF_A_BIT)]}


def test_every_bit_is_counted_both_ways(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=3)
    trainer.fit(Perceptron(), federation(), Algorithm(**BOTH_WAYS))
    assert bits_of(trainer, "up") == {"model": 3 * 64, "scalars": 3 * (32 + 64)}
    assert bits_of(trainer, "down") == {"model": 6 * 64, "scalars": 6 * (32 + 64)}


def test_stacked_clients_send_the_same(make_trainer: MakeTrainer) -> None:
    assert_same(fits(make_trainer, Perceptron(), federation, Algorithm(**BOTH_WAYS), precision="64-true"))
