"""Test Cast: numbers of 16 bits, to the nearest and at random, and numbers that are too large."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, assert_same, bits_of, fits
from torch import Tensor
from toys import Perceptron, federation, vector

from lightning_fl.algorithms import Algorithm
from lightning_fl.codecs import Cast, ErrorFeedback, Followed
from lightning_fl.codecs.cast import WARNINGS
from lightning_fl.errors import UserError
from lightning_fl.slots import Draw, Message, RoundContext, Traits
from lightning_fl.steps import Apply, Compress
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

CODECS = [Cast(dtype, stochastic) for dtype in ("float16", "bfloat16") for stochastic in (False, True)]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=str)


@pytest.fixture(autouse=True)
def _warn_anew() -> Iterator[None]:
    WARNINGS.clear()
    yield
    WARNINGS.clear()


def setting_of(d: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> RoundContext:
    draw = Draw((seed, 0, 11), 0, "up")
    return RoundContext(Layout(("a",), ((d,),)), NO_LAYOUT, num_clients=5, draw=draw, dtype=dtype)


def through(codec: Any, x: Tensor, seed: int = 0) -> Tensor:
    payload, memory = codec.encode({"model": x}, {}, setting_of(len(x)))
    assert memory == {}
    context = setting_of(len(x), seed, x.dtype)
    payload, _ = codec.encode({"model": x}, {}, context)
    assert payload["model"].bits == 16 * len(x) == 8 * payload["model"].content.nbytes
    return codec.decode(payload, context)["model"]


def test_a_model_of_bfloat16_is_cut_off_as_others_are() -> None:
    """Check that ±65,504, which is no number of bfloat16, is the limit there, too."""
    x = torch.tensor([70000.0, 1.0, -65536.0], dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="Cast to float16 sends numbers beyond"):
        payload, _ = Cast().encode({"model": x}, {}, setting_of(3, dtype=x.dtype))
    assert payload["model"].content.tolist() == [65504.0, 1.0, -65504.0]


def normal(d: int, seed: int = 0) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


def test_bits_of_the_cnn() -> None:
    payload, _ = Cast().encode({"model": normal(21_840)}, {}, setting_of(21_840))
    assert sum(packed.bits for packed in payload.values()) == 349_440


def test_float16_is_that_of_numpy() -> None:
    x = torch.cat([normal(3_000), 1e-6 * normal(3_000), 1e4 * normal(1_000).clamp(-6, 6)])
    assert through(Cast(), x).tolist() == x.numpy().astype(np.float16).astype(np.float32).tolist()


def test_bfloat16_is_float32_without_its_last_bits() -> None:
    x = torch.cat([normal(3_000), 1e-38 * normal(1_000), 1e37 * normal(1_000)])
    bits = x.numpy().view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32)  # half goes to the even one
    assert through(Cast("bfloat16"), x).tolist() == rounded.view(np.float32).tolist()


def grid(x: float, dtype: str) -> tuple[float, float]:
    """Return the two numbers of 16 bits around x > 0, from their definition."""
    significant, smallest = {"float16": (11, 2.0**-24), "bfloat16": (8, 2.0**-133)}[dtype]
    step = max(2.0 ** (int(np.floor(np.log2(x))) - significant + 1), smallest)
    return float(np.floor(x / step) * step), float((np.floor(x / step) + 1) * step)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_random_rounding_goes_to_both_neighbours_and_has_the_right_mean(dtype: Any) -> None:
    draws = 4_000
    x = torch.tensor([1.0001, -3.1415926, 1e-3, 5e-8, -60_000.3, 0.99999, 2e-5, 0.5, 0.0])
    arrived = through(Cast(dtype, stochastic=True), x.repeat_interleave(draws)).double()
    for number, sample in zip(x.tolist(), arrived.split(draws), strict=True):
        seen = {abs(y) for y in sample.tolist()}
        if number in (0.5, 0.0):
            assert seen == {number}
            continue
        low, high = grid(abs(number), dtype)
        assert seen == {low, high}
        share = (abs(number) - low) / (high - low)
        standard_error = (high - low) * (share * (1 - share) / draws) ** 0.5
        assert abs(float(sample.mean()) - number) < 5 * standard_error


@each_codec
def test_errors_are_within_the_bound(codec: Any) -> None:
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[codec.dtype] * (2 if codec.stochastic else 1)
    for x in (normal(2_000).double().abs() + 1e-3, 1 + torch.rand(2_000), torch.linspace(1, 2, 2_000)):
        error = ((through(codec, x) - x).abs() / x).max()
        assert 0.3 * unit < float(error) <= unit


@each_codec
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_encoding_twice_changes_nothing(codec: Any, dtype: torch.dtype) -> None:
    x = torch.cat([normal(500), 1e-6 * normal(500)]).to(dtype)
    once = through(codec, x)
    assert once.dtype == dtype
    assert torch.equal(through(codec, once, seed=1), once)


@each_codec
def test_numbers_that_are_too_large_become_the_largest_with_one_warning(codec: Any) -> None:
    largest = torch.finfo(getattr(torch, codec.dtype)).max
    x = torch.tensor([1.0, 1e5, -1e5, -3.4e38, torch.inf]).double()
    x[3] *= 1 + 2e-3  # beyond bfloat16's range, too
    with pytest.warns(UserWarning, match=f"Cast to {codec.dtype} sends numbers beyond") as said:
        arrived = through(codec, x)
    assert ("has the range of float32" in str(said[0].message)) == (codec.dtype == "float16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        through(codec, x)
    expected = [1.0, largest, -largest] if codec.dtype == "float16" else [1.0, *x[1:3].bfloat16().tolist()]
    if codec.stochastic:
        expected[1:3] = arrived[1:3].tolist()
    assert arrived.tolist() == [*expected, -largest, torch.inf]


@each_codec
def test_numbers_in_the_range_give_no_warning(codec: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (torch.tensor([65_504.0, -65_504.0, 0.0]), torch.tensor([torch.inf, 1.0]), torch.tensor([torch.nan])):
            arrived = through(codec, x)
            assert torch.equal(arrived.isfinite(), x.isfinite())


@each_codec
def test_zeros_and_tiny_vectors(codec: Any) -> None:
    for d in (0, 1, 10):
        assert torch.equal(through(codec, torch.zeros(d)), torch.zeros(d))
    assert torch.equal(through(codec, torch.tensor([-1.5])), torch.tensor([-1.5]))


def test_traits_are_those_of_the_rounding() -> None:
    for codec in CODECS:
        assert codec.traits == Traits.IDEMPOTENT | (Traits.UNBIASED if codec.stochastic else Traits.CONTRACTS)
    with pytest.raises(UserError, match="ErrorFeedback around Cast would add up errors"):
        ErrorFeedback(Cast(stochastic=True))


@pytest.mark.parametrize("codec", [Cast(), Cast("bfloat16")], ids=str)
def test_rounding_to_the_nearest_contracts(codec: Any) -> None:
    for x in (normal(500), torch.eye(500)[3], torch.ones(500) / 3, torch.zeros(500)):
        assert float((through(codec, x) - x).norm()) <= 2.0**-8 * float(x.norm())


def test_a_bad_dtype_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError) as refused:
        Cast("float8")  # type: ignore[arg-type]
    assert str(refused.value) == "dtype 'float8' is unknown; did you mean 'float16'? Allowed: bfloat16, float16."


def test_other_entries_cross_as_they_are() -> None:
    message: Message = dict.fromkeys(("model", "moments/first", "buffers", "scalars/steps"), normal(90))
    payload, _ = Cast().encode(message, {}, setting_of(90))
    arrived = Cast().decode(payload, setting_of(90))
    assert {name: torch.equal(arrived[name], message[name]) for name in message} == {
        name: name in ("buffers", "scalars/steps") for name in message
    }
    stochastic, _ = Cast(stochastic=True).encode(message, {}, setting_of(90))
    assert not torch.equal(stochastic["model"].content, stochastic["moments/first"].content), "one draw for all entries"


@pytest.mark.parametrize("codec", [Cast(), Cast("bfloat16", stochastic=True)], ids=str)
def test_a_federation_trains_and_the_ledger_is_exact(codec: Cast, make_trainer: MakeTrainer) -> None:
    pair = fits(make_trainer, Perceptron(), federation, Algorithm(uplink=codec, downlink=codec))
    assert_same(pair, tolerance=0.02, of_metrics=0.02)  # a number between two may go to either
    for _, trainer in pair:
        assert bits_of(trainer, "up") == bits_of(trainer, "down") == {"model": 4 * 16 * 26}


def test_the_server_s_change_crosses(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=3)
    codec = Cast(stochastic=True)
    trainer.fit(Perceptron(), federation(), Algorithm(steps=[Apply(), Compress(codec)], downlink=Followed(codec)))
    assert bits_of(trainer, "down") == {"model": 6 * 16 * 26}


def test_numbers_of_16_bits_give_the_model_of_fedavg(make_trainer: MakeTrainer) -> None:
    models = []
    for algorithm in (Algorithm(), Algorithm(uplink=Cast(), downlink=Cast())):
        torch.manual_seed(0)
        models.append(Perceptron())
        make_trainer(max_rounds=2).fit(models[-1], federation(), algorithm)
    exact, cast = map(vector, models)
    np.testing.assert_allclose(cast, exact, rtol=0, atol=2e-3)
    assert cast.tolist() != exact.tolist()


@each_codec
def test_the_largest_number_beside_an_infinite_one_is_sent_as_it_is(codec: Cast) -> None:
    x = torch.tensor([torch.inf, codec.largest, -codec.largest])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        payload, _ = codec.encode({"model": x}, {}, setting_of(3))
    assert payload["model"].content.tolist() == x.tolist()
