"""Test codecs that draw at random, against plain loops, their means and their variances."""

from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, bits_of, fits
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.overrides import TorchFunctionMode
from toys import Perceptron, federation, vector

from lightning_fl.algorithms import Algorithm, FedAvg, FedPAQ
from lightning_fl.codecs import QSGD, Blockwise, Followed, RandomK, TernGrad
from lightning_fl.errors import UserError
from lightning_fl.slots import Codec, Draw, Payload, RoundContext, Traits
from lightning_fl.steps import Apply, Compress
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

CODECS: dict[str, Codec] = {
    "qsgd": QSGD(),
    "qsgd 1": QSGD(1, bucket=7),
    "qsgd max": QSGD(2, norm="max"),
    "ternary": TernGrad(),
    "ternary in two bits": TernGrad(packing="two_bits"),
    "clipped": TernGrad(clip=1.0),
    "random": RandomK(0.2),
    "random, as it is": RandomK(0.2, scale="none"),
    "random, common": RandomK(0.2, common=True, seed_bits=0),
}
each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
REFERENCE = ((10, 25), (10,), (20, 250), (20,), (320, 50), (50,), (50, 10), (10,))
"""Shapes of the CNN of 21,840 parameters."""


def setting_of(*shapes: tuple[int, ...], **facts: Any) -> RoundContext:
    names = tuple(map(str, range(len(shapes))))
    return RoundContext(Layout(names, shapes), NO_LAYOUT, num_clients=3, **facts)


def of_seed(seed: int, context: RoundContext, party: int = 0) -> RoundContext:
    return RoundContext(context.layout, NO_LAYOUT, 3, dtype=context.dtype, draw=Draw((seed, 0, 11), party, "up"))


def sent(codec: Codec, x: torch.Tensor, context: RoundContext) -> tuple[torch.Tensor, Payload]:
    payload, memory = codec.encode({"model": x}, {}, context)
    assert memory == {}
    return codec.decode(payload, context)["model"], payload


def bits(payload: Payload) -> int:
    return sum(packed.bits for packed in payload.values())


def mean_over_seeds(codec: Codec, x: torch.Tensor, context: RoundContext, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard error of C(x) over seeds."""
    found = np.array([sent(codec, x, of_seed(seed, context))[0].double().numpy() for seed in range(count)])
    return found.mean(0), found.std(0) / count**0.5


# -- bits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (QSGD(4), 88_736),
        (QSGD(1), 45_056),
        (TernGrad(), 35_200),
        (TernGrad(packing="two_bits"), 43_936),
        (RandomK(0.05), 35_008),
        (RandomK(0.05, seed_bits=0), 34_944),
        (RandomK(1.0), 698_880),
    ],
    ids=str,
)
def test_bits_of_the_reference(codec: Codec, expected: int) -> None:
    context = setting_of(*REFERENCE)
    _, payload = sent(codec, torch.randn(21_840), context)
    assert bits(payload) == expected
    for packed in payload.values():
        stored = packed.content.numel() * packed.content.element_size() * 8
        assert 0 <= stored - packed.bits < 8


@pytest.mark.parametrize("d", [1, 511, 512, 513])
def test_bits_of_the_last_bucket(d: int) -> None:
    _, payload = sent(QSGD(4), torch.randn(d), setting_of((d,)))
    assert bits(payload) == 4 * d + 32 * -(-d // 512)


class Largest(TorchFunctionMode):
    """Note the most elements of a tensor that torch has made."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.count = max(self.count, made.numel() if isinstance(made, torch.Tensor) else 0)
        return made


@pytest.mark.parametrize("codec", [QSGD(bucket=10**9), QSGD(bucket=10**9, norm="max"), Blockwise(block_size=10**9)])
def test_a_bucket_that_is_larger_than_the_vector_takes_no_more_memory(codec: Codec) -> None:
    """Check with torch's device `meta`, whose tensors take none."""
    with Largest() as made:
        codec.encode({"model": torch.empty(1000, device="meta")}, {}, setting_of((1000,)))
    assert made.count == 1000


@pytest.mark.parametrize("d", range(1, 12))
def test_five_ternary_numbers_fill_a_byte(d: int) -> None:
    x = torch.arange(d).remainder(3) - 1.0  # only −1, 0 and 1, which are sent exactly
    arrived, payload = sent(TernGrad(), x, setting_of((d,)))
    assert bits(payload) == 8 * -(-d // 5) + 32
    assert torch.equal(arrived, x)


# -- values ---------------------------------------------------------------------------------------------------------------

numbers = st.one_of(st.floats(-1e6, 1e6, width=32), st.sampled_from([0.0, 1.0, -2.0]))
vectors = st.integers(1, 40).flatmap(lambda d: arrays(np.float32, d, elements=numbers))


@pytest.mark.long
@settings(max_examples=40)
@given(vectors, st.integers(1, 9), st.sampled_from(["l2", "max"]))
def test_qsgd_is_that_of_the_paper(x: np.ndarray, s: int, norm: Any) -> None:
    context = of_seed(1, setting_of((len(x),)))
    arrived, payload = sent(QSGD(s, bucket=16, norm=norm), torch.from_numpy(x), context)
    draws = torch.rand(len(x), generator=context.draw.generator("model")).numpy()
    levels, _ = QSGD(s, bucket=16, norm=norm).symbols("model", payload, context) or (torch.zeros(0), 0)
    for i, (xi, u) in enumerate(zip(x.astype(float), draws, strict=True)):
        bucket = x[i // 16 * 16 : i // 16 * 16 + 16].astype(float)
        v = float(np.float32(np.linalg.norm(bucket) if norm == "l2" else np.abs(bucket).max()))
        a = min(abs(xi) * s / v, s) if v else 0.0
        level = int(np.floor(a)) + (u < a - np.floor(a))
        if abs(a - np.floor(a) - u) > 1e-4 and abs(a - round(a)) > 1e-4:  # rounding may decide otherwise
            assert int(levels[i]) - s == np.sign(xi) * level
        assert float(arrived[i]) == pytest.approx(v * (int(levels[i]) - s) / s, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if Traits.UNBIASED in codec.traits])
@pytest.mark.sampled(3)
def test_the_mean_over_draws_is_the_number(name: str) -> None:
    check_mean_over_draws(CODECS[name])


def check_mean_over_draws(codec: Codec) -> None:
    x, context = torch.randn(12, generator=torch.Generator().manual_seed(0)), setting_of((3, 2), (6,))
    mean, error = mean_over_seeds(codec, x, context, 600)
    assert (np.abs(mean - x.double().numpy()) < 5 * error + 1e-6).all()


@pytest.mark.long
def test_the_mean_over_draws_tells_a_biased_codec() -> None:
    with pytest.raises(AssertionError):
        check_mean_over_draws(TernGrad(clip=0.5))


@pytest.mark.matrix
def test_the_error_of_qsgd_is_the_paper_s() -> None:
    x, context = torch.randn(200, generator=torch.Generator().manual_seed(0)), setting_of((200,))
    v, squares = float(x.double().norm()), float(x.double().square().sum())
    for s in (1, 4, 16):
        fractions = (x.double().abs() * s / v) % 1
        expected = (v / s) ** 2 * float((fractions * (1 - fractions)).sum())
        errors = [float((sent(QSGD(s), x, of_seed(seed, context))[0] - x).square().sum()) for seed in range(400)]
        assert np.mean(errors) == pytest.approx(expected, rel=0.05)
        assert expected <= min(200 / s**2, 200**0.5 / s) * squares


@pytest.mark.matrix
def test_the_error_of_terngrad_and_random_coordinates() -> None:
    x, context = torch.randn(60, generator=torch.Generator().manual_seed(0)), setting_of((20,), (40,))
    square = float(x.double().square().sum())
    ternary = sum(float(part.abs().max() * part.abs().sum()) for part in x.split([20, 40])) - square
    for codec, expected in (
        (TernGrad(), ternary),
        (RandomK(0.2), 4 * square),
        (RandomK(0.2, scale="none"), 0.8 * square),
    ):
        errors = [float((sent(codec, x, of_seed(seed, context))[0] - x).square().sum()) for seed in range(1500)]
        assert np.mean(errors) == pytest.approx(expected, rel=0.06)


def test_random_coordinates() -> None:
    x, context = torch.arange(1.0, 101), setting_of((100,))
    arrived, payload = sent(RandomK(0.2), x, of_seed(0, context))
    kept = arrived.nonzero().flatten()
    assert len(kept) == 20
    torch.testing.assert_close(arrived[kept], 5 * x[kept])
    assert torch.equal(RandomK(0.2).positions("model", payload, of_seed(0, context)), kept)
    assert RandomK(0.2).decode(payload, of_seed(9, context))["model"].equal(arrived), "the seed has crossed"
    own = {tuple(sent(RandomK(0.2), x, of_seed(0, context, party))[0].tolist()) for party in range(3)}
    common = {tuple(sent(RandomK(0.2, common=True), x, of_seed(0, context, party))[0].tolist()) for party in range(3)}
    assert (len(own), len(common)) == (3, 1)


@pytest.mark.long
@pytest.mark.parametrize("codec", [QSGD(), QSGD(coding="elias"), TernGrad()], ids=str)
@pytest.mark.sampled(1)
def test_no_numbers_cost_nothing_and_no_product_overflows(codec: Codec) -> None:
    arrived, payload = sent(codec, torch.zeros(0), setting_of((0,)))
    assert len(arrived) == 0
    assert bits(payload) <= 1
    huge = torch.tensor([3e38, 0.0, 1e38])
    mean = np.mean(
        [sent(codec, huge, of_seed(seed, setting_of((3,), (0,))))[0].double().numpy() for seed in range(400)], 0
    )
    np.testing.assert_allclose(mean, huge.double(), rtol=0.15, atol=3e36)


def test_limits_are_exact() -> None:
    x, context = torch.randn(600), setting_of((600,))
    assert torch.equal(sent(RandomK(1.0), x, context)[0], x)
    torch.testing.assert_close(sent(QSGD(2**20), x, context)[0], x, atol=1e-4, rtol=0)
    one = torch.tensor([-3.7])
    torch.testing.assert_close(sent(QSGD(), one, setting_of((1,)))[0], one)
    assert torch.equal(sent(TernGrad(), one, setting_of((1,)))[0], one)


@each_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_zero_arrives_as_zero_in_the_model_s_dtype_and_nothing_raises(codec: Codec, dtype: torch.dtype) -> None:
    context = setting_of((3,), (4,), dtype=dtype)
    arrived, _ = sent(codec, torch.zeros(7, dtype=dtype), context)
    assert arrived.dtype == dtype
    assert not arrived.any()
    for wrong in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(7, dtype=dtype)
        x[2] = wrong
        sent(codec, x, context)
    rest, _ = codec.encode({"buffers": torch.ones(2), "scalars/steps": torch.ones(1)}, {}, context)
    assert bits(rest) == 96
    assert codec.decode(rest, context).keys() == {"buffers", "scalars/steps"}


def test_idempotence_and_contraction_are_as_declared() -> None:
    x, context = torch.randn(40), setting_of((40,))
    once, _ = sent(RandomK(0.2, scale="none"), x, context)
    assert torch.equal(sent(RandomK(0.2, scale="none"), once, context)[0], once)
    assert Traits.CONTRACTS in RandomK(0.2, scale="none").traits
    assert Traits.UNBIASED not in TernGrad(clip=2.5).traits
    for codec in (QSGD(), TernGrad(), TernGrad(clip=2.5), RandomK(0.2)):
        assert not codec.traits.fit_error_feedback


@pytest.mark.parametrize("x", [torch.tensor([-0.3]), torch.full((4,), 0.3)])
def test_equal_numbers_are_not_cut_off(x: torch.Tensor) -> None:
    """Check that numbers without a deviation, such as a single one, are not taken for large ones."""
    codec = TernGrad(clip=2.5)
    assert torch.equal(sent(codec, x, setting_of((len(x),)))[0], x)
    both = torch.cat([x, torch.tensor([1.0, -2.0, 0.5])])
    assert torch.equal(sent(codec, both, setting_of((len(x),), (3,)))[0][: len(x)], x)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: QSGD(0),
        lambda: QSGD(2.5),  # type: ignore[arg-type]
        lambda: QSGD(bucket=0),
        lambda: QSGD(norm="l1"),  # type: ignore[arg-type]
        lambda: TernGrad(clip=0.0),
        lambda: TernGrad(packing="one"),  # type: ignore[arg-type]
        lambda: RandomK(0.0),
        lambda: RandomK(seed_bits=32),
        lambda: RandomK(scale="all"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(wrong: Any) -> None:
    with pytest.raises(UserError):
        wrong()


# -- in a federation ------------------------------------------------------------------------------------------------------


def test_bits_of_a_round_up_and_down(make_trainer: MakeTrainer) -> None:
    codec = QSGD(4, bucket=10)
    trainer = make_trainer(max_rounds=3)
    method = Algorithm(uplink=codec, steps=[Apply(), Compress(codec)], downlink=Followed(codec))
    trainer.fit(Perceptron(), federation(), method)
    assert bits_of(trainer, "up") == {"model": 3 * 26 * 4, "scalars": 3 * 3 * 32}
    assert bits_of(trainer, "down") == {"model": 6 * 26 * 4, "scalars": 6 * 3 * 32}


@each_codec
def test_stacked_clients_send_the_same(codec: Codec, make_trainer: MakeTrainer) -> None:
    (serial, _), (stacked, _) = fits(
        make_trainer, Perceptron().double(), federation, Algorithm(uplink=codec), precision="64-true"
    )
    np.testing.assert_allclose(vector(serial), vector(stacked), rtol=1e-6, atol=1e-9)


def test_fedpaq_with_many_levels_is_fedavg_with_equal_weights(make_trainer: MakeTrainer) -> None:
    torch.manual_seed(0)
    one, other = Perceptron(), Perceptron()
    other.load_state_dict(one.state_dict())
    make_trainer(max_rounds=3).fit(one, federation((5,) * 6), FedPAQ(levels=2**20))
    make_trainer(max_rounds=3).fit(other, federation((5,) * 6), FedAvg())
    np.testing.assert_allclose(vector(one), vector(other), atol=1e-4)


def test_equal_magnitudes_are_not_cut_off() -> None:
    """They are two and a half deviations away from no other number; whether they are positive is kept."""
    x = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    assert torch.equal(sent(TernGrad(clip=2.5), x, setting_of((6,)))[0], x)
    outlier = torch.tensor([-1.0, 1.0] * 50 + [-90.0])
    clipped = sent(TernGrad(clip=2.5), outlier, setting_of((101,)))[0]
    assert clipped[-1] == pytest.approx(-2.5 * float(outlier.std(correction=0)))


@pytest.mark.parametrize("levels", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 8, 24, 37])
def test_both_codes_of_levels_give_the_same_numbers(levels: int, count: int) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    found = [
        sent(QSGD(levels, norm="max", coding=coding), x, setting_of((count,)))[0]  # type: ignore[arg-type]
        for coding in ("fixed", "elias")
    ]
    assert torch.equal(*found)
