"""Test TopK whose values cross through another codec."""

from math import comb
from typing import Any, ClassVar

import pytest
import torch
from compared_runs import MakeTrainer, assert_same, bits_of, fits
from torch import Tensor
from toys import Perceptron, federation

from lightning_fl.algorithms import Algorithm
from lightning_fl.codecs import (
    DRIVE,
    EDEN,
    Blockwise,
    Cast,
    Changes,
    Dense,
    ErrorFeedback,
    Followed,
    OneBit,
    Quantiser,
    RandomK,
    SharedTopK,
    TernGrad,
    TopK,
)
from lightning_fl.coding.top_k import top_k
from lightning_fl.errors import UserError
from lightning_fl.link.messages import UplinkMessage
from lightning_fl.slots import Codec, Draw, Message, RoundContext, Traits
from lightning_fl.vectors.layer_groups import Group
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

INNER: list[Codec] = [
    Cast(),
    Blockwise(bits=4),
    Quantiser(),
    OneBit("l1"),
    OneBit("l1", "global"),
    DRIVE(),
    EDEN(4),
    TopK(0.5),
]
each_codec = pytest.mark.parametrize("inner", INNER, ids=str)
LAYOUT = Layout(("a", "b", "c"), ((10, 8), (300,), (20,)))
CONTEXT = RoundContext(LAYOUT, NO_LAYOUT, num_clients=5, draw=Draw((0, 0, 11), 1, "up"))


def message() -> Message:
    names = ("model", "moments/first", "model/change", "buffers", "scalars/steps")
    return {name: torch.randn(400, generator=torch.Generator().manual_seed(seed)) for seed, name in enumerate(names)}


@each_codec
def test_the_largest_numbers_cross_as_a_smaller_model(inner: Codec) -> None:
    codec = TopK(0.1, values=inner)
    payload, memory = codec.encode(message(), {}, CONTEXT)
    assert memory == {}
    arrived = codec.decode(payload, CONTEXT)
    assert arrived.keys() == message().keys()
    total = 0
    for name, x in message().items():
        if name in ("buffers", "scalars/steps"):
            assert torch.equal(arrived[name], x)
            continue
        positions = top_k(x, 40)
        sizes = [
            int(((positions >= start) & (positions < end)).sum()) for start, end in ((0, 80), (80, 380), (380, 400))
        ]
        held = [(letter, (size,)) for letter, size in zip("abc", sizes, strict=True) if size]
        smaller = Layout(tuple(letter for letter, _ in held), tuple(shape for _, shape in held))
        context = RoundContext(smaller, NO_LAYOUT, num_clients=5, draw=CONTEXT.draw)
        of_values, _ = inner.encode({name: x[positions]}, {}, context)
        expected = torch.zeros(400)
        expected[positions] = inner.decode(of_values, context)[name]
        assert torch.equal(arrived[name], expected)
        total += sum(packed.bits for packed in of_values.values()) + 40 * 9  # nine bits for each index
    whole = 2 * 32 * 400
    assert sum(packed.bits for packed in payload.values()) == total + whole


def test_bits_of_the_cnn() -> None:
    codec = TopK(0.05, values=Blockwise(bits=4))
    context = RoundContext(Layout(("a",), ((21_840,),)), NO_LAYOUT, num_clients=5)
    payload, _ = codec.encode({"model": torch.randn(21_840)}, {}, context)
    bits = {name: packed.bits for name, packed in payload.items()}
    assert sorted(bits.values()) == [5 * 32, 4 * 1_092, 15 * 1_092]
    assert {name.partition("/")[0] for name in bits} == {"model", "scalars", "mask"}


def test_exact_values_give_what_top_k_gives() -> None:
    payload, _ = TopK(0.1, values=Dense()).encode(message(), {}, CONTEXT)
    plain, _ = TopK(0.1).encode(message(), {}, CONTEXT)
    arrived, expected = TopK(0.1, values=Dense()).decode(payload, CONTEXT), TopK(0.1).decode(plain, CONTEXT)
    assert all(torch.equal(arrived[name], expected[name]) for name in message())
    assert sum(packed.bits for packed in payload.values()) == sum(packed.bits for packed in plain.values())


def crossing(codec: Codec, x: Tensor) -> UplinkMessage:
    payload, _ = codec.encode({"model": x}, {}, CONTEXT)
    groups = [Group(name, (name,)) for name in "abc"]
    return UplinkMessage(0, {"model": x}, {}, {}, [(codec, payload)], CONTEXT, groups)


def test_layers_and_ideal_sizes_are_those_of_the_values() -> None:
    x = torch.zeros(400)
    x[[3, 5, 90, 100, 110, 120, 399]] = torch.tensor([8.0, 7, -7, 7, 7, -7, 7])
    found = crossing(TopK(7 / 400, values=Blockwise(bits=4)), x)
    assert found.bits_by_layer() == {"a": 8, "b": 16, "c": 4, "shared": 7 * 9 + 32}
    # Of 15 levels, 6 is sent four times, −6 twice, 7 once: one of 105 orders, and one of C(21, 14) ways to count seven symbols.
    assert found.entropy_bits == 17 + 7 + 32 + (comb(400, 7) - 1).bit_length()
    twice = crossing(TopK(7 / 400, values=TopK(1 / 7)), x)
    assert twice.bits_by_layer() == {"a": 32, "b": 0, "c": 0, "shared": 7 * 9 + 3}


@pytest.mark.parametrize(
    ("codec", "num_symbols", "num_values"),
    [(DRIVE(), 448, 2), (EDEN(3), 448, 8), (Blockwise(), 400, 255), (Blockwise("nf4", 4), 400, 16)],
)
def test_symbols_are_the_codes(codec: Codec, num_symbols: int, num_values: int) -> None:
    x = message()["model"]
    payload, _ = codec.encode({"model": x}, {}, CONTEXT)
    found = codec.symbols("model", payload, CONTEXT)
    assert found is not None
    assert (len(found[0]), found[1]) == (num_symbols, num_values)
    assert 0 <= int(found[0].min()) < int(found[0].max()) < num_values
    assert codec.symbols("scalars/scale/model", payload, CONTEXT) is None
    assert crossing(codec, x).entropy_bits < crossing(codec, x).bits + 8 * num_values


def test_rounded_scales_are_symbols_too() -> None:
    codec = Blockwise(block_size=8, nested=True)
    payload, _ = codec.encode({"model": message()["model"]}, {}, CONTEXT)
    found = codec.symbols("scalars/scale/model", payload, CONTEXT)
    assert found is not None
    assert (len(found[0]), found[1]) == (50, 256)
    assert codec.symbols("scalars/scale_of_scales/model", payload, CONTEXT) is None


@pytest.mark.parametrize(
    ("codec", "traits", "is_lossy"),
    [
        (TopK(0.6), Traits.CONTRACTS | Traits.IDEMPOTENT | Traits.DELTAS_ONLY, True),
        (TopK(1.0), Traits.CONTRACTS | Traits.IDEMPOTENT, False),
        (TopK(0.1, values=Cast()), Traits.CONTRACTS | Traits.DELTAS_ONLY | Traits.SENDS_FEW, True),
        (TopK(1.0, values=Cast()), Traits.CONTRACTS, True),
        (TopK(1.0, values=OneBit("l1")), Traits.CONTRACTS | Traits.DELTAS_ONLY, True),
        (TopK(0.6, values=OneBit("l2")), Traits.DELTAS_ONLY, True),
        (TopK(0.6, values=DRIVE()), Traits.DELTAS_ONLY | Traits.ERROR_MAY_GROW, True),
    ],
)
def test_traits_are_those_of_both(codec: TopK, traits: Traits, is_lossy: bool) -> None:
    assert codec.traits == traits
    assert codec.is_lossy_for("model") == is_lossy
    assert not codec.is_lossy_for("buffers")


@pytest.mark.parametrize(
    "inner", [ErrorFeedback(TopK()), Changes(), Followed(TopK())], ids=["feedback", "changes", "followed"]
)
def test_codecs_that_build_on_earlier_messages_are_refused(inner: Any) -> None:
    with pytest.raises(
        UserError, match=f"TopK's values have other positions in every message, but {type(inner).__name__} builds on"
    ):
        TopK(values=inner)


@each_codec
def test_odd_vectors(inner: Codec) -> None:
    codec = TopK(0.3, values=inner)
    for d in (0, 1, 9):
        context = RoundContext(Layout(("a",), ((d,),)), NO_LAYOUT, num_clients=5)
        payload, _ = codec.encode({"model": torch.zeros(d)}, {}, context)
        assert torch.equal(codec.decode(payload, context)["model"], torch.zeros(d))
    payload, _ = codec.encode({"model": torch.full((9,), torch.nan)}, {}, context)
    assert codec.decode(payload, context)["model"].isnan().any()


def test_error_feedback_adds_both_losses_later() -> None:
    codec, memory, sent = ErrorFeedback(TopK(0.1, values=Blockwise(bits=3))), {}, torch.zeros(400)
    for _ in range(8):
        payload, memory = codec.encode({"model": message()["model"]}, memory, CONTEXT)
        sent += codec.decode(payload, CONTEXT)["model"]
    torch.testing.assert_close(sent + memory["residual/model"], 8 * message()["model"], rtol=1e-5, atol=1e-4)


def test_a_federation_trains_and_the_ledger_is_exact(make_trainer: MakeTrainer) -> None:
    uplink = ErrorFeedback(TopK(0.4, values=Blockwise(bits=5)))
    pair = fits(make_trainer, Perceptron(), federation, Algorithm(uplink=uplink))
    assert_same(pair, tolerance=0.05, of_metrics=0.05)
    for _, trainer in pair:
        assert bits_of(trainer, "up") == {"model": 4 * 5 * 10, "scalars": 4 * 32, "mask": 4 * 26}


@pytest.mark.parametrize("outer", [TopK, RandomK])
def test_values_by_the_mask_of_another_vector_are_refused(outer: Any) -> None:
    with pytest.raises(UserError, match="chooses positions by model: use a codec that reads each vector alone"):
        outer(0.5, values=SharedTopK(0.5))


class Asked(TernGrad):
    """Codec that packs symbols in its own way, and notes the names of the entries that it is asked about."""

    names: ClassVar[list[str]] = []

    def from_symbols(self, name: str, symbols: Tensor, num_values: int) -> Tensor:
        self.names.append(name)
        return super().from_symbols(name, symbols, num_values)


@pytest.mark.parametrize("outer", [TopK, RandomK])
def test_an_entry_of_the_values_is_that_of_their_codec_and_the_vector_is_none(outer: Any) -> None:
    Asked.names.clear()
    codec = outer(0.1, values=Asked())
    payload, _ = codec.encode({"model": message()["model"]}, {}, CONTEXT)
    chosen = codec.positions("model", payload, CONTEXT)
    assert len(chosen) == 40
    coded = {name: found for name in payload if (found := codec.symbols(name, payload, CONTEXT))}
    ((name, (symbols, num_values)),) = coded.items()
    assert torch.equal(codec.from_symbols(name, symbols, num_values), payload[name].content)
    assert Asked.names == ["model"]
    assert torch.equal(codec.positions(name, payload, CONTEXT), chosen)
    for method in (codec.choice, codec.symbols, codec.bits_by_tensor):
        assert method("model", payload, CONTEXT) is None
