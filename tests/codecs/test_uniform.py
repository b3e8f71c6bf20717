"""Test rounding at random between the smallest and the largest number, against a plain loop, its mean, variance and bits."""

from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, bits_of
from toys import Perceptron, federation

from lightning_fl import UserError
from lightning_fl.algorithms import FedAvg
from lightning_fl.codecs import DRIVE, EntropyCoded, ErrorFeedback, Uniform
from lightning_fl.slots import Codec, Draw, Payload, RoundContext
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

D = 21_840


def setting_of(d: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> RoundContext:
    layout = Layout(("a",), ((d,),))
    return RoundContext(layout, NO_LAYOUT, num_clients=3, dtype=dtype, draw=Draw((seed, 0, 11), 0, "up"))


def sent(codec: Codec, x: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, Payload]:
    context = setting_of(len(x), seed, x.dtype)
    payload, _ = codec.encode({"model": x}, {}, context)
    return codec.decode(payload, context)["model"], payload


def normal(d: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (Uniform(2), D + 64),
        (Uniform(16), 4 * D + 64),
        (Uniform(5), 3 * D + 64),
        (Uniform(16, block_size=1000), 4 * D + 22 * 64),
        (Uniform(16, rotate=True), 4 * (D + 48) + 5 * 64),  # chunks of 16384, 4096, 1024, 256 and 128
    ],
    ids=str,
)
def test_bits_are_those_of_the_formula(codec: Uniform, expected: int) -> None:
    _, payload = sent(codec, normal(D, torch.float32))
    assert sum(packed.bits for packed in payload.values()) == expected


@pytest.mark.parametrize("block_size", [None, 7])
def test_it_is_the_papers_plain_loop(block_size: int | None) -> None:
    x, k = normal(40), 6
    arrived, _ = sent(Uniform(k, block_size=block_size), x)
    draws = torch.rand(40, generator=setting_of(40).draw.inside().generator("model")).double().numpy()
    size = block_size or 40
    for start in range(0, 40, size):
        block = x[start : start + size].numpy()
        low, high = block.min(), block.max()
        borders = [low + r * (high - low) / (k - 1) for r in range(k)]
        for place, value in enumerate(block):
            r = next(r for r in range(k - 1, -1, -1) if borders[r] <= value) if value < high else k - 2
            chance = (value - borders[r]) / (borders[r + 1] - borders[r])
            expected = borders[r + 1] if draws[start + place] < chance else borders[r]
            assert float(arrived[start + place]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.matrix
def test_the_mean_is_the_vector_and_the_error_that_of_the_theory(rotate: bool) -> None:
    """Test E C(x) = x to 5 standard errors, and Theorem 2 of the paper, an upper bound."""
    x, k, count = normal(64), 4, 2000
    found = torch.stack([sent(Uniform(k, rotate=rotate), x, seed)[0] for seed in range(count)])
    deviation = found.std(0, correction=0) / count**0.5
    assert ((found.mean(0) - x).abs() <= 5 * deviation + 1e-9).all()
    error = float((found - x).square().sum(1).mean())
    if not rotate:
        share = (x - x.min()) / (x.max() - x.min()) * (k - 1)
        fraction = share - share.floor()
        exact = float((fraction * (1 - fraction)).sum() * ((x.max() - x.min()) / (k - 1)) ** 2)
        assert error == pytest.approx(exact, rel=0.05)
    assert error <= 64 / (2 * (k - 1) ** 2) * float(x.square().sum())


def test_rotation_helps_where_a_number_outweighs_the_others() -> None:
    x = normal(4096) * 0.01
    x[5] = 1.0
    errors = [
        np.mean([float((sent(Uniform(4, rotate=rotate), x, seed)[0] - x).square().sum()) for seed in range(5)])
        for rotate in (False, True)
    ]
    assert errors[1] < errors[0] / 20


def test_its_rotation_is_that_of_drive() -> None:
    """With very many levels the vector arrives, rotated back by the same signs and matrix."""
    x = normal(100)
    torch.testing.assert_close(sent(Uniform(2**16, rotate=True), x)[0], x, rtol=0, atol=1e-3)
    codes = [sent(codec, x)[1]["model"] for codec in (Uniform(2, rotate=True), DRIVE())]
    assert codes[0].bits == codes[1].bits == 128
    assert not torch.equal(codes[0].content, codes[1].content)


def test_constants_and_extremes_arrive_exactly() -> None:
    for x in (torch.full((9,), 0.1), torch.tensor([-3.0, 7.0])):
        assert torch.equal(sent(Uniform(3), x)[0], x)
    large = torch.tensor([-1.0, 1.0, 0.5]) * torch.finfo(torch.float32).max
    assert sent(Uniform(3), large)[0].isfinite().all()


def test_what_is_not_finite_does_not_become_so() -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        for rotate in (False, True):
            assert not sent(Uniform(rotate=rotate), torch.tensor([1.0, value, 2.0]))[0].isfinite().all()


def test_a_run_costs_what_the_formula_says(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1)
    trainer.fit(Perceptron(), federation(), FedAvg(uplink=Uniform(16)))
    assert bits_of(trainer, "up") == {"model": 3 * 4 * 26, "scalars": 3 * 64}


def test_an_ideal_code_takes_fewer_bits_where_levels_are_few_times_used() -> None:
    x = torch.cat([normal(4000) * 0.01, torch.tensor([-1.0, 1.0])]).float()
    plain, coded = (
        sum(p.bits for p in sent(codec, x)[1].values()) for codec in (Uniform(16), EntropyCoded(Uniform(16)))
    )
    assert coded < 0.5 * plain


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Uniform(1), "levels of Uniform must be .* got 1"),
        (lambda: Uniform(rotate=True, block_size=8), "the chunks that it rotates, got block_size=8: leave one out"),
        (lambda: FedAvg(downlink=Uniform()), "too coarse for a whole model"),
        (lambda: ErrorFeedback(Uniform()), "Uniform"),
    ],
)
def test_refusals(make: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()
