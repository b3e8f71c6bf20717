"""Test Blockwise: the loop over blocks, exact bits, the bound on the error, and whole models."""

from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, assert_same, bits_of, fits
from torch import Tensor
from toys import Perceptron, federation

from lightning_fl.algorithms import Algorithm
from lightning_fl.codecs import Blockwise, ErrorFeedback, Followed
from lightning_fl.codecs.blockwise import NF4
from lightning_fl.coding.bit_packing import nearest_level
from lightning_fl.errors import UserError
from lightning_fl.slots import Message, RoundContext, Traits
from lightning_fl.steps import Apply, Compress
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

PLAIN = [Blockwise(), Blockwise(bits=4), Blockwise(bits=2, block_size=7), Blockwise("nf4", 4), Blockwise("nf4", 4, 64)]
NESTED = [Blockwise(nested=True), Blockwise("nf4", 4, 64, nested=True), Blockwise(bits=3, block_size=1, nested=True)]
each_codec = pytest.mark.parametrize("codec", [*PLAIN, *NESTED], ids=str)


def setting_of(d: int, dtype: torch.dtype = torch.float32) -> RoundContext:
    return RoundContext(Layout(("a", "b"), ((d // 3,), (d - d // 3,))), NO_LAYOUT, num_clients=5, dtype=dtype)


def through(codec: Any, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    payload, memory = codec.encode({"model": x}, {}, setting_of(len(x)))
    assert memory == {}
    return codec.decode(payload, setting_of(len(x), dtype))["model"]


def bits(codec: Any, x: Tensor) -> int:
    payload, _ = codec.encode({"model": x}, {}, setting_of(len(x)))
    assert all(packed.content.nbytes == -(-packed.bits // 8) for packed in payload.values())
    return sum(packed.bits for packed in payload.values())


def normal(d: int, seed: int = 0) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (Blockwise(), 177_472),
        (Blockwise(bits=4), 90_112),
        (Blockwise("nf4", 4), 90_112),
        (Blockwise(bits=4, block_size=64, nested=True), 90_160),
    ],
)
def test_bits_of_the_cnn(codec: Any, expected: int) -> None:
    assert bits(codec, torch.randn(21_840)) == expected


@pytest.mark.parametrize(("d", "blocks"), [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (512, 2), (513, 3)])
def test_bits_count_the_last_block_as_it_is(d: int, blocks: int) -> None:
    assert bits(Blockwise(bits=5), torch.randn(d)) == 5 * d + 32 * blocks
    assert bits(Blockwise(block_size=10**9), torch.randn(d)) == 8 * d + 32 * min(1, d)


@pytest.mark.parametrize("d", [0, 1, 256, 257])
def test_bits_of_nested_scales(d: int) -> None:
    assert bits(Blockwise(block_size=1, nested=True), torch.randn(d)) == 8 * d + 8 * d + 32 * -(-d // 256)


def levels_of(codec: Any) -> np.ndarray:
    return (
        np.array(NF4)
        if codec.levels == "nf4"
        else np.arange(-(2 ** (codec.bits - 1)) + 1, 2 ** (codec.bits - 1)) / (2 ** (codec.bits - 1) - 1)
    )


def by_loops(x: np.ndarray, codec: Any) -> np.ndarray:
    """Return a · the level nearest to x/a, number by number."""
    size = codec.block_size
    scales = [max(abs(number) for number in x[i : i + size]) for i in range(0, len(x), size)]
    if codec.nested:
        tops = [max(scales[i : i + 256]) for i in range(0, len(scales), 256)]
        scales = [tops[i // 256] * round(float(scale / tops[i // 256] * 255)) / 255 for i, scale in enumerate(scales)]
    arrived = [
        min(levels_of(codec) * scales[i // size], key=lambda y, x=number: abs(y - x)) for i, number in enumerate(x)
    ]
    return np.array(arrived)


@each_codec
def test_numbers_go_to_the_nearest_level_of_their_block(codec: Any) -> None:
    x = normal(700).double() * torch.linspace(0.1, 3, 700)
    np.testing.assert_allclose(
        through(codec, x, torch.float64).numpy(), by_loops(x.numpy(), codec), rtol=1e-5, atol=1e-6
    )


def test_the_values_of_nf4_are_the_published_ones() -> None:
    """Compute them as the paper does: quantiles of a normal number, of which 7 are negative and 8 positive."""
    offset = 0.9677083  # of bitsandbytes, (1 - 1/30 + 1 - 1/32) / 2
    quantile = torch.special.ndtri
    positive = quantile(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1]).flip(0)
    negative = -quantile(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    values = torch.cat([negative, torch.zeros(1), positive]) / positive[-1]
    torch.testing.assert_close(torch.tensor(NF4, dtype=torch.float64), values, rtol=0, atol=2e-7)


@pytest.mark.parametrize("codec", [Blockwise(), Blockwise(bits=4), Blockwise(bits=2)], ids=str)
def test_linear_levels_lose_half_a_step_at_most(codec: Any) -> None:
    for x in (normal(1_000), normal(1_000).exp(), torch.linspace(-1, 1, 1_000)):
        for block, arrived in zip(x.split(256), through(codec, x).split(256), strict=True):
            largest = float(block.abs().max())
            assert float((arrived - block).abs().max()) <= largest / (2 ** (codec.bits) - 2) * (1 + 1e-5)


def test_an_outlier_makes_only_its_own_block_coarse() -> None:
    x = normal(1_024)
    x[300] = 1e6
    error = (through(Blockwise(), x) - x).abs()
    assert float(error[256:512].max()) > 0.1
    assert float(torch.cat([error[:256], error[512:]]).max()) < 0.02


@each_codec
def test_blocks_contract_and_telescope(codec: Any) -> None:
    vectors = [normal(500), torch.eye(500)[3], torch.ones(500), torch.zeros(500), normal(500) * (torch.arange(500) < 9)]
    for x in vectors:
        assert float((through(codec, x) - x).norm()) <= 0.8 * float(x.norm())
    feedback, memory, sent = ErrorFeedback(codec), {}, torch.zeros(500)
    for x in vectors:
        payload, memory = feedback.encode({"model": x}, memory, setting_of(500))
        sent += feedback.decode(payload, setting_of(500))["model"]
    torch.testing.assert_close(sent + memory["residual/model"], sum(vectors), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", [*PLAIN, Blockwise(bits=7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_encoding_twice_changes_nothing(codec: Any, dtype: torch.dtype) -> None:
    once = through(codec, normal(2_000).exp().to(dtype), dtype)
    assert once.dtype == dtype
    assert torch.equal(through(codec, once, dtype), once)


def test_traits_are_those_of_the_scales() -> None:
    for codec in (*PLAIN, *NESTED):
        assert codec.traits == Traits.CONTRACTS | Traits.IDEMPOTENT.only_if(not codec.nested)
    nested = Blockwise(block_size=16, nested=True)
    once = through(nested, normal(2_000))
    assert not torch.equal(through(nested, once), once), "nested scales would be idempotent, too"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Blockwise(bits=1), "bits of a number in a block must be a whole number from 2 to 8, got 1."),
        (lambda: Blockwise(bits=9), "bits of a number in a block must be a whole number from 2 to 8, got 9."),
        (lambda: Blockwise(block_size=0), "block_size must be a whole number of at least 1, got 0."),
        (lambda: Blockwise("nf4"), "levels 'nf4' take bits=4, got 8."),
        (lambda: Blockwise("nf3", 4), "levels 'nf3' is unknown; did you mean 'nf4'? Allowed: linear, nf4."),
    ],
)
def test_bad_parameters_are_refused_in_a_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        make()
    assert str(refused.value) == sentence


@each_codec
def test_zeros_and_tiny_vectors(codec: Any) -> None:
    for d in (0, 1, 2, 600):
        assert torch.equal(through(codec, torch.zeros(d)), torch.zeros(d))
    for x in (torch.tensor([1e-3]), torch.tensor([-7.0])):
        torch.testing.assert_close(through(codec, x), x, rtol=1e-6, atol=0)
    half_zero = torch.cat([torch.zeros(256), torch.ones(256)])
    assert torch.equal(through(codec, half_zero), half_zero)


@each_codec
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(codec: Any, value: float) -> None:
    x = normal(600)
    x[300] = value
    assert not through(codec, x).isfinite().all()
    assert bits(codec, x) == bits(codec, normal(600))


def test_other_entries_cross_as_they_are() -> None:
    message: Message = dict.fromkeys(("model", "moments/first", "buffers", "scalars/steps"), normal(90))
    payload, _ = NESTED[0].encode(message, {}, setting_of(90))
    arrived = NESTED[0].decode(payload, setting_of(90))
    assert arrived.keys() == message.keys()
    assert all(torch.equal(arrived[name], message[name]) == (name in ("buffers", "scalars/steps")) for name in message)


@pytest.mark.parametrize("count", [2, 16, 34, 255])
def test_the_nearest_level_is_that_of_a_search(count: int) -> None:
    levels = normal(count).double().sort().values
    middles, far = (levels[1:] + levels[:-1]) / 2, torch.tensor([-1e9, 1e9, torch.inf])
    values = torch.cat([normal(500, seed=1).double(), levels, middles, far])
    distances = (values[:, None] - levels).abs()
    chosen = nearest_level(values, levels).long()
    assert (distances.gather(1, chosen[:, None])[:-1, 0] <= distances[:-1].amin(1) + 1e-12).all()
    assert chosen[500 : 500 + count].tolist() == [*range(count)]
    assert chosen[500 + count : -3].tolist() == [*range(1, count)], "of two equally near levels the higher"
    assert nearest_level(torch.tensor([torch.nan]), levels).tolist() == [0]


def test_a_federation_trains_and_the_ledger_is_exact(make_trainer: MakeTrainer) -> None:
    pair = fits(
        make_trainer, Perceptron(), federation, Algorithm(uplink=Blockwise(bits=6, block_size=8), downlink=Blockwise())
    )
    assert_same(pair, tolerance=0.02, of_metrics=0.02)  # a number near the middle of two levels may go to either
    for _, trainer in pair:
        assert bits_of(trainer, "up") == {"model": 4 * 6 * 26, "scalars": 4 * 4 * 32}
        assert bits_of(trainer, "down") == {"model": 4 * 8 * 26, "scalars": 4 * 32}


def test_the_server_s_change_crosses(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=3)
    codec = Blockwise("nf4", 4, 8, nested=True)
    trainer.fit(Perceptron(), federation(), Algorithm(steps=[Apply(), Compress(codec)], downlink=Followed(codec)))
    assert bits_of(trainer, "down") == {"model": 6 * 4 * 26, "scalars": 6 * (4 * 8 + 32)}
