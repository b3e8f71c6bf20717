"""Test what codecs declare of themselves, all of them on vectors that are hard to encode."""

from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_fl.codecs
from lightning_fl.codecs import (
    DRIVE,
    EDEN,
    QSGD,
    STC,
    Blockwise,
    Cast,
    Changes,
    Dense,
    Differences,
    EntropyCoded,
    ErrorFeedback,
    FairTopK,
    Followed,
    Integers,
    LowRank,
    OneBit,
    Quantiser,
    RandomK,
    SharedTopK,
    TernGrad,
    TopK,
    Uniform,
)
from lightning_fl.link.messages import UplinkMessage
from lightning_fl.slots import Codec, Draw, Message, Payload, RoundContext, State, Traits
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

CODECS: list[Codec] = [
    *(Dense(), Cast(), Cast("bfloat16"), Cast(stochastic=True), Cast("bfloat16", stochastic=True)),
    *(Blockwise(), Blockwise("nf4", 4, 16), Blockwise(bits=2, block_size=7), Blockwise(block_size=4, nested=True)),
    *(Quantiser(), Quantiser("uniform", 4), Quantiser("log", 8, "global"), Quantiser("uniform", 32)),
    *(OneBit(), OneBit("l1"), OneBit("l1", "global"), OneBit("unit")),
    *(QSGD(), QSGD(1, bucket=8, coding="elias"), QSGD(2, norm="max"), QSGD(2**22), TernGrad(), TernGrad(clip=2.5)),
    *(DRIVE(), DRIVE(scale="min_mse"), EDEN(2), EDEN(3, chunks="pad"), EDEN(4, scale="min_mse")),
    *(STC(0.3), TopK(0.3), TopK(1.0), SharedTopK(0.3), FairTopK(0.3), FairTopK(0.3, "max"), LowRank(1)),
    *(Uniform(), Uniform(2), Uniform(5, block_size=7), Uniform(2**16), Uniform(4, rotate=True)),
    *(Integers(), Integers(3, "channel"), Integers(2, symmetric=True), Integers(16, "channel", symmetric=True)),
    *(RandomK(0.3), RandomK(0.3, "none"), RandomK(1.0), RandomK(0.5, common=True, seed_bits=0), Changes()),
    *(TopK(0.3, values=Blockwise(bits=4)), TopK(0.5, values=QSGD(1)), TopK(0.3, values=Cast())),
    *(TopK(0.5, values=TopK(0.5)), RandomK(0.5, values=QSGD()), RandomK(0.5, values=EDEN(1))),
    *(RandomK(0.5, "none", values=Quantiser()), RandomK(0.5, values=Cast("bfloat16", stochastic=True))),
    *(EntropyCoded(QSGD()), EntropyCoded(TopK(0.3, values=Blockwise(bits=4))), EntropyCoded(STC(0.3))),
    *(Followed(Quantiser()), ErrorFeedback(TopK(0.3)), ErrorFeedback(LowRank(1)), ErrorFeedback(OneBit("l1"))),
    *(ErrorFeedback(EntropyCoded(Quantiser())), ErrorFeedback(EDEN(1, scale="min_mse"))),
    *(Differences(RandomK(0.3)), Differences(QSGD(), momentum=0.5), Differences(Dense())),
]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=str)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
D, CARRIER = 40, "model/change"
LAYOUT = Layout(("a", "b", "c", "d"), ((5, 4), (6,), (13,), ()))
ONE = Layout(("a",), ((1,),))


def spiky(ratio: float) -> Tensor:
    """Return a vector (D,) in which one number is `ratio` times the norm of the others."""
    x = torch.randn(D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[7] = 0
    x[7] = ratio * x.norm()
    return x


def hard_vectors(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return vectors by name, the largest so that norms and sums of them are numbers of the dtype."""
    limits, even = torch.finfo(dtype), spiky(0.3) / spiky(0.3).abs().max()
    vectors = {f"spike {ratio}": spiky(ratio) for ratio in (1, 2, 3, 6, 100)}
    vectors |= {
        "sparse": torch.eye(D)[3] - 0.01 * torch.eye(D)[30],
        "constant": torch.full((D,), -0.3),
        "zero": torch.zeros(D),
        "small": even * limits.tiny**0.75,
        "tiny": even * limits.tiny * 2,
        "subnormal": even * limits.tiny * limits.eps * 4,
        "large": even * limits.max**0.75,
        "huge": even * limits.max / 256,
        "all huge": even.sign() * limits.max / 256,
        "one": torch.tensor([-0.3]),
        "one zero": torch.tensor([0.0]),
    }
    return {name: x.to(dtype) for name, x in vectors.items()}


def setting_of(x: Tensor, seed: int = 0) -> RoundContext:
    layout = ONE if len(x) == 1 else LAYOUT
    return RoundContext(layout, NO_LAYOUT, num_clients=3, dtype=x.dtype, draw=Draw((seed, 0, 11), 0, "up"))


def sent(codec: Codec, x: Tensor, seed: int = 0) -> tuple[Tensor, Payload, State]:
    """Return what arrives of a vector, the payload, and the sender's new memory."""
    follows, context = isinstance(codec, Followed), setting_of(x, seed)
    message: Message = {"model": x, CARRIER: x} if follows else {"model": x}
    payload, memory = codec.encode(message, {}, context)
    return codec.decode(payload, context)[CARRIER if follows else "model"], payload, memory


def square_error(arrived: Tensor, x: Tensor) -> float:
    """Return ‖C(x) − x‖² / ‖x‖², which is 0 for 0."""
    largest = float(x.double().abs().max()) or 1.0
    error, of_x = ((y / largest).square().sum() for y in (arrived.double() - x.double(), x.double()))
    return float(error / of_x) if of_x else float(error)


def has_range(codec: Codec) -> bool:
    """True if a codec's numbers have a range of their own, whatever the scale of the vector is."""
    return codec.largest is not None or codec == OneBit("unit")


def test_all_codecs_are_tested() -> None:
    assert {type(codec).__name__ for codec in CODECS} == set(lightning_fl.codecs.__all__)


def is_random(codec: Codec) -> bool:
    return not torch.equal(sent(codec, spiky(1).float(), 0)[0], sent(codec, spiky(1).float(), 1)[0])


@pytest.mark.long
@each_codec
@pytest.mark.sampled(8)
def test_what_a_codec_declares_of_single_messages(codec: Codec) -> None:
    """Check bits, numbers, the second time, and the error, of which random codecs declare only the mean."""
    contracts, failures = (
        Traits.CONTRACTS in codec.traits and not is_random(codec),
        list[tuple[str, str, torch.dtype]](),
    )
    for dtype in DTYPES:
        for name, x in hard_vectors(dtype).items():
            if dtype.itemsize == 2 and name.startswith("spike"):
                continue
            arrived, payload, memory = sent(codec, x)
            crossing = UplinkMessage(0, {}, {}, memory, [(codec, payload)], setting_of(x), [])
            of_content = [packed.content.nbytes == -(-packed.bits // 8) for packed in payload.values()]
            lost = has_range(codec) or name == "subnormal"  # to below the smallest number, or beyond the largest
            most = 1.0 if lost or not x.any() else 0.9999
            holds = {
                "dtype": arrived.dtype == dtype,
                "finite": all(bool(y.isfinite().all()) for y in (arrived, *memory.values())),
                "zeros": bool(x.any()) or not arrived.any() or codec == OneBit("unit"),
                "bits": all(of_content) or isinstance(codec, Followed),
                "ideal bits": crossing.entropy_bits <= crossing.bits,
                "largest": codec.largest is None or not bool((arrived.abs() > codec.largest).any()),
                "idempotent": Traits.IDEMPOTENT not in codec.traits or torch.equal(sent(codec, arrived)[0], arrived),
                "lossless": Traits.LOSSLESS not in codec.traits or torch.equal(arrived, x),
                "contracts": not contracts or square_error(arrived, x) <= most,
            }
            failures += [(of, name, dtype) for of, held in holds.items() if not held]
    assert failures == []


@each_codec
def test_entries_beside_the_model_cross_as_they_are_in_any_order(codec: Codec) -> None:
    x = spiky(1).float()
    names = ["model", CARRIER] if isinstance(codec, Followed) else ["model"]
    message: Message = {"buffers": torch.arange(3.0), **dict.fromkeys(names, x), "scalars/steps": torch.tensor([7.0])}
    found = [
        codec.decode(codec.encode(entries, {}, setting_of(x))[0], setting_of(x))
        for entries in (message, dict(reversed(message.items())))
    ]
    for name in names:
        assert torch.equal(found[0][name], found[1][name])
    for name in ("buffers", "scalars/steps"):
        assert torch.equal(found[0][name], message[name])


NESTED: list[Codec] = [
    TopK(0.5, values=TopK(0.5, values=QSGD(1))),
    RandomK(0.5, values=RandomK(0.5, values=TernGrad())),
]


@pytest.mark.parametrize("codec", [*CODECS, *NESTED], ids=str)
def test_whole_numbers_positions_and_bits_are_those_of_the_content(codec: Codec) -> None:
    x, context = spiky(1).float(), setting_of(spiky(1).float())
    arrived, payload, _ = sent(codec, x)
    for name, packed in payload.items():
        if (coded := codec.symbols(name, payload, context)) is not None:
            symbols, num_values = coded
            assert 0 <= int(symbols.min()) <= int(symbols.max()) < num_values
            if not isinstance(codec, EntropyCoded):
                assert torch.equal(codec.from_symbols(name, symbols, num_values), packed.content)
        if (positions := codec.positions(name, payload, context)) is not None:
            assert set(arrived.nonzero().flatten().tolist()) <= set(positions.tolist()), name
        shares = codec.bits_by_tensor(name, payload, context)
        assert sum((shares or {}).values()) <= packed.bits


def test_positions_of_values_are_among_those_of_the_vector() -> None:
    x, context = spiky(1).float(), setting_of(spiky(1).float())
    for codec in (TopK(0.5, values=TopK(0.5)), RandomK(0.5, "none", values=TopK(0.5))):
        arrived, payload, _ = sent(codec, x)
        outer, inner = (codec.positions(name, payload, context) for name in ("model", next(iter(payload))))
        assert outer is not None
        assert inner is not None
        assert len(outer) == D // 2
        assert inner.tolist() == arrived.nonzero().flatten().tolist()
        assert len(inner) == D // 4


def test_numbers_of_whole_numbers_that_are_counted() -> None:
    """They are those that a codec may send, and above 65,537 they are too many to be counted."""
    x, context = spiky(1).float(), setting_of(spiky(1).float())
    expected = {
        TernGrad(): 3,
        OneBit(): 2,
        QSGD(1): 3,
        QSGD(4): 9,
        QSGD(2**15): 2**16 + 1,
        QSGD(2**15 + 1): None,
        Quantiser("uniform", 3): 8,
        Quantiser("uniform", 16): 2**16,
        Quantiser("uniform", 17): None,
        EDEN(3): 8,
    }
    for codec, count in expected.items():
        coded = codec.symbols("model", sent(codec, x)[1], context)
        assert (None if coded is None else coded[1]) == count, codec


def test_values_of_drawn_positions_have_their_codecs_bits() -> None:
    codec, x = RandomK(0.5, values=EDEN(2)), spiky(1).float()
    payload = sent(codec, x)[1]
    shares = codec.bits_by_tensor(next(iter(payload)), payload, setting_of(x))
    assert shares is not None
    assert sum(shares.values()) == 2 * D // 2


def test_large_numbers_of_wide_matrices_have_factors() -> None:
    """Sums of them are beyond float64's range."""
    layout = Layout(("a",), ((4, 256),))
    context = RoundContext(layout, NO_LAYOUT, num_clients=3, dtype=torch.float64, draw=Draw((0, 0, 11), 0, "up"))
    x = torch.full((layout.numel,), torch.finfo(torch.float64).max / 8, dtype=torch.float64)
    payload, _ = LowRank(1).encode({"model": x}, {}, context)
    torch.testing.assert_close(LowRank(1).decode(payload, context)["model"] / x, torch.ones_like(x))


def test_fair_coordinates_are_taken_in_turns_or_by_the_largest() -> None:
    context = RoundContext(Layout(("a",), ((5,),)), NO_LAYOUT, num_clients=3)
    message = {"model": torch.tensor([10.0, 9, 0, 0, 0]), "moments/first": torch.tensor([0.0, 0, 1, 0, 0])}
    for union, model in (("interleaved", [10, 0, 0, 0, 0]), ("max", [10, 9, 0, 0, 0])):
        codec = FairTopK(0.4, union)
        assert codec.decode(codec.encode(message, {}, context)[0], context)["model"].tolist() == model


@pytest.mark.long
@pytest.mark.parametrize(
    "codec", [codec for codec in CODECS if Traits.CONTRACTS in codec.traits and is_random(codec)], ids=str
)
def test_mean_errors_are_smaller_than_the_vector_if_it_is_declared(codec: Codec) -> None:
    vectors = hard_vectors(torch.float32)
    for name in ("spike 2", "spike 100", "sparse", "tiny", "huge"):
        errors = [square_error(sent(codec, vectors[name], seed)[0], vectors[name]) for seed in range(20)]
        assert sum(errors) / 20 < 0.9999, name


@pytest.mark.long
@pytest.mark.parametrize("codec", [codec for codec in CODECS if Traits.UNBIASED in codec.traits], ids=str)
@pytest.mark.sampled(4)
def test_the_mean_over_draws_is_the_vector_if_it_is_declared(codec: Codec) -> None:
    names = ["spike 2", "spike 6"] if has_range(codec) else ["spike 2", "spike 6", "tiny", "huge"]
    for name in names:
        for dtype in (torch.float32, torch.float64) if name in ("tiny", "huge") else (torch.float32,):
            x, count = hard_vectors(dtype)[name], 60 if "spike" in name else 20
            factor = x.double().abs().max()
            exact = x.double() / factor
            found = torch.stack([sent(codec, x, seed)[0].double() / factor for seed in range(count)])
            # Along the largest number, and along all others together, where a bias adds up.
            largest = (exact.abs() == 1).double()
            for direction in (largest, (1 - largest) * exact):
                along, expected = found @ direction, float(exact @ direction)
                # Six standard errors, and what draws may miss that are so rare that they tell nothing of the spread.
                slack = 6 * along.std(correction=0) / count**0.5 + 12 * along.abs().max() / count
                assert abs(float(along.mean()) - expected) <= float(slack) + 1e-5 * abs(expected), (name, dtype)


@pytest.mark.long
def test_the_means_tell_a_biased_codec() -> None:
    for codec in (DRIVE(), EDEN(2), TernGrad(clip=2.5)):
        with pytest.raises(AssertionError):
            test_the_mean_over_draws_is_the_vector_if_it_is_declared(codec)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if not has_range(codec)], ids=str)
@pytest.mark.parametrize(("dtype", "power"), [(torch.float32, 80), (torch.float64, 900)], ids=str)
def test_the_size_of_a_vector_changes_nothing_but_the_size(codec: Codec, dtype: torch.dtype, power: int) -> None:
    x = spiky(1).to(dtype)
    arrived, payload, _ = sent(codec, x)
    for factor in (2.0**power, 2.0**-power):
        scaled, of_scaled, _ = sent(codec, x * factor)
        torch.testing.assert_close(scaled / factor, arrived, rtol=1e-5, atol=1e-6)
        assert {name: packed.bits for name, packed in of_scaled.items()} == {
            name: packed.bits for name, packed in payload.items()
        }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codec", [Cast(), Cast("bfloat16"), Cast("bfloat16", stochastic=True)], ids=str)
def test_the_largest_number_of_one_dtype_of_16_bits_is_cut_off_in_the_other(codec: Any, dtype: torch.dtype) -> None:
    for value in (torch.finfo(dtype).max, 65_504.0, 65_536.0):
        x = torch.tensor([value], dtype=torch.float64).to(dtype)
        if x.isfinite():
            arrived = sent(codec, x)[0]
            assert arrived.isfinite()
            assert float(arrived) == pytest.approx(min(float(x), codec.largest, torch.finfo(dtype).max), rel=0.01)
