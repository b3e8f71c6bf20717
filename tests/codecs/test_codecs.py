"""Test every codec: its size is as stated, decoding inverts packing, and the loss is within the theory."""

from math import ceil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from lightning_fl import UserError, codecs
from lightning_fl.codecs import (
    Changes,
    Dense,
    ErrorFeedback,
    FairTopK,
    Followed,
    Integers,
    OneBit,
    Quantiser,
    SharedTopK,
    TopK,
)
from lightning_fl.coding import top_k as selection
from lightning_fl.coding.bit_packing import bit_width, pack, unpack
from lightning_fl.coding.top_k import (
    num_kept,
    pack_positions,
    positions_bits,
    top_k,
    top_k_in_turns,
    top_k_of_max,
    unpack_positions,
)
from lightning_fl.slots import Codec, Message, Payload, RoundContext, State, Traits
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

LOSSY: dict[str, Codec] = {
    "top": TopK(0.3),
    "top all": TopK(1.0),
    "top one": TopK(1e-9),
    "shared": SharedTopK(0.3),
    "shared second": SharedTopK(0.3, "moments/second"),
    "fair": FairTopK(0.3),
    "fair max": FairTopK(0.3, "max"),
    "one bit l2": OneBit("l2"),
    "one bit l1": OneBit("l1"),
    "one bit global": OneBit("l1", "global"),
    "log": Quantiser("log", 3),
    "log 2": Quantiser("log", 2, "global"),
    "log 9": Quantiser("log", 9),
    "log 32": Quantiser("log", 32),
    "uniform": Quantiser("uniform", 4),
    "uniform 2": Quantiser("uniform", 2, "global"),
    "uniform 17": Quantiser("uniform", 17),
    "symmetric integers": Integers(4, symmetric=True),
    "symmetric integers of channels": Integers(12, "channel", symmetric=True),
}
each_codec = pytest.mark.parametrize("codec", LOSSY.values(), ids=LOSSY)

# Numbers whose squares also lie within float32's range, and many equal ones.
numbers = st.one_of(
    st.floats(-1e9, 1e9, width=32).filter(lambda x: x == 0 or abs(x) > 1e-9), st.sampled_from([0.0, 1.0, -1.0, 2.0])
)
vectors = st.integers(1, 70).flatmap(lambda d: arrays(np.float32, d, elements=numbers))


def setting_of(d: int) -> RoundContext:
    """Return a context with two tensors, a third and the rest of the coordinates."""
    return RoundContext(Layout(("a", "b"), ((d // 3,), (d - d // 3,))), Layout((), ()), num_clients=5)


def message_of(vector: np.ndarray) -> Message:
    """Return three different vectors, buffers and a scalar."""
    x = torch.from_numpy(vector.copy())
    return {
        "model": x,
        "moments/first": x.flip(0) / 2,
        "moments/second": x.square().sqrt() - 1,
        "buffers": torch.arange(3.0),
        "scalars/steps": torch.tensor([7.0]),
    }


def through(codec: Codec, message: Message) -> Message:
    context = setting_of(len(message["model"]))
    payload, memory = codec.encode(message, {}, context)
    assert memory == {}
    return codec.decode(payload, context)


def length(x: Tensor) -> float:
    return float(x.double().norm())


@pytest.mark.long
@settings(max_examples=50)
@given(st.integers(0, 32), st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_whole_numbers_survive_packing(width: int, values: list[int]) -> None:
    expected = torch.tensor([value % 2**width for value in values], dtype=torch.int64)
    packed = pack(expected, width)
    assert packed.dtype == torch.uint8
    assert len(packed) == ceil(len(values) * width / 8)
    assert unpack(packed, len(values), width).tolist() == expected.tolist()


@pytest.mark.long
@settings(max_examples=50)
@given(st.lists(st.booleans(), max_size=100))
def test_positions_survive_packing_in_the_shorter_way(chosen: list[bool]) -> None:
    mask = torch.tensor(chosen, dtype=torch.bool)
    k, d = sum(chosen), len(chosen)
    packed = pack_positions(mask.nonzero().flatten(), d)
    assert unpack_positions(packed, k, d).tolist() == mask.nonzero().flatten().tolist()
    assert positions_bits(k, d) == (0 if k == d else min(d, k * bit_width(d)))
    assert len(packed) == ceil(positions_bits(k, d) / 8)


def by_definition(magnitudes: np.ndarray, k: int) -> np.ndarray:
    """Return the mask of the k largest magnitudes: NaN last, equal ones in their order."""
    mask = np.zeros(len(magnitudes), dtype=bool)
    mask[np.lexsort((np.arange(len(magnitudes)), -np.nan_to_num(magnitudes, nan=-1.0, posinf=np.inf)))[:k]] = True
    return mask


with_nan = st.integers(1, 40).flatmap(
    lambda d: arrays(np.float32, d, elements=st.sampled_from([0.0, 1.0, -1.0, 3.0, -5.0, np.nan, np.inf]))
)


@pytest.mark.long
@settings(max_examples=50)
@given(st.one_of(with_nan, vectors), st.data())
def test_top_k_is_exact_and_takes_the_first_of_equal_ones(x: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(x)))
    with patch.object(
        selection, "SAMPLE", data.draw(st.sampled_from([3, selection.SAMPLE]))
    ):  # as if 9 numbers were many
        positions = top_k(torch.from_numpy(x), k).numpy()
    assert len(positions) == k
    np.testing.assert_array_equal(positions, by_definition(np.abs(x), k).nonzero()[0])
    if k <= np.isfinite(x).sum():
        assert not np.isnan(x[positions]).any()


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "periodic", "with NaN", "ascending"])
@pytest.mark.parametrize("k", [1, 7_500, 149_000])
def test_top_k_of_many_numbers_is_exact(kind: str, k: int) -> None:
    x = np.random.default_rng(0).normal(size=150_000).astype(np.float32)
    x = {
        "normal": x,
        "ties": x.round(1),
        "zeros": x * 0,
        "periodic": np.resize([9.0, 0.0, 1.0], len(x)).astype(np.float32),
        "with NaN": np.where(x > 1, np.nan, x),
        "ascending": np.sort(x),
    }[kind]
    np.testing.assert_array_equal(top_k(torch.from_numpy(x), k).numpy(), by_definition(np.abs(x), k).nonzero()[0])


@pytest.mark.long
@given(vectors, st.data())
@settings(max_examples=30)
def test_masks_of_several_vectors_are_the_papers(x: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(x)))
    several = [x, np.roll(x, 3) * np.float32(0.7), data.draw(arrays(np.float32, len(x), elements=numbers))]
    tensors = [torch.from_numpy(y) for y in several]
    doubles = [y.astype(np.float64) for y in several]
    turns = top_k_in_turns(tensors, k).tolist()
    assert turns == sorted(oracle.fair_mask(doubles, k)[0])
    assert top_k_of_max(tensors, k).tolist() == sorted(oracle.max_mask(doubles, k)[0])


@pytest.mark.long
@each_codec
@given(vectors)
@settings(max_examples=12)
def test_what_is_booked_is_what_is_packed(codec: Codec, x: np.ndarray) -> None:
    payload, _ = codec.encode(message_of(x), {}, setting_of(len(x)))
    for name, packed in payload.items():
        assert packed.content.numel() * packed.content.element_size() == ceil(packed.bits / 8), name


@pytest.mark.long
@each_codec
@given(vectors)
@settings(max_examples=12)
@pytest.mark.sampled(6)
def test_encoding_twice_changes_nothing_and_other_entries_never_do(codec: Codec, x: np.ndarray) -> None:
    message = message_of(x)
    once = through(codec, message)
    assert once.keys() == message.keys()
    if not isinstance(codec, FairTopK):  # it chooses other coordinates the second time
        twice = through(codec, once)
        for name in message:
            assert torch.equal(twice[name], once[name]), name
    for name in ("buffers", "scalars/steps"):
        assert torch.equal(once[name], message[name])
    for name in message:
        if not codec.is_lossy_for(name):
            assert torch.equal(once[name], message[name])


@pytest.mark.long
@pytest.mark.parametrize("alpha", [1e-9, 0.1, 0.3, 0.9])
@given(vectors)
@settings(max_examples=12)
def test_top_k_contracts(alpha: float, x: np.ndarray) -> None:
    message = message_of(x)
    k, d = num_kept(alpha, len(x)), len(x)
    top, shared = through(TopK(alpha), message), through(SharedTopK(alpha), message)
    for name in ("model", "moments/first", "moments/second"):
        residual = {key: length(message[name] - sent[name]) for key, sent in (("top", top), ("shared", shared))}
        assert residual["top"] ** 2 <= (1 - k / d) * length(message[name]) ** 2 * (1 + 1e-6)
        assert residual["top"] <= residual["shared"]
        for sent in (top, shared):
            assert int((sent[name] != 0).sum()) <= k
            kept = sent[name] != 0
            assert torch.equal(sent[name][kept], message[name][kept])
    assert torch.equal(top["model"], shared["model"])


@pytest.mark.long
@pytest.mark.parametrize(
    "codec", [OneBit("l1"), Quantiser("log", 2), Quantiser("log", 3), Quantiser("log", 8), Quantiser("uniform", 4)]
)
@given(vectors)
@settings(max_examples=12)
def test_few_bits_contract(codec: Codec, x: np.ndarray) -> None:
    model = torch.from_numpy(x)
    residual = length(model - through(codec, message_of(x))["model"])
    assert residual < length(model) or not length(model)


def test_the_l2_scale_may_move_further_from_z_than_zero_is() -> None:
    x = np.zeros(99, dtype=np.float32)
    x[50] = 1
    residual = {
        scale: length(torch.from_numpy(x) - through(OneBit(scale, "global"), message_of(x))["model"])
        for scale in ("l1", "l2")
    }  # type: ignore[arg-type]
    assert residual["l1"] < 1 < residual["l2"]
    assert residual["l2"] ** 2 == pytest.approx(2 - 2 / np.sqrt(99), rel=1e-6)


@pytest.mark.long
@given(vectors)
@settings(max_examples=20)
def test_levels_are_the_nearest(x: np.ndarray) -> None:
    d = len(x)
    groups = (slice(0, d // 3), slice(d // 3, d)) if d >= 3 else (slice(0, d),)
    for codec, levels in (
        (Quantiser("log", 3), oracle.log_levels(3)),
        (Quantiser("log", 5), oracle.log_levels(5)),
        (Quantiser("uniform", 4), oracle.uniform_levels(4)),
    ):
        sent = through(codec, message_of(x))["model"].double().numpy()
        best = oracle.quantise(x.astype(np.float64), levels, groups)
        # float32's rounding may decide a tie differently, so compare the distance to the level.
        np.testing.assert_allclose(np.abs(sent - x), np.abs(best - x), atol=1e-6 * max(np.abs(x).max(), 1e-30))


def test_ties_between_levels_go_to_the_larger() -> None:
    message = {"model": torch.tensor([1.0, 0.75, -0.375, 0.125, 0.1249, -0.0, 0.0])}
    context = setting_of(7)
    log = Quantiser("log", 3, "global")
    payload, _ = log.encode(message, {}, context)
    assert log.decode(payload, context)["model"].tolist() == [1.0, 1.0, -0.5, 0.25, 0.0, 0.0, 0.0]
    uniform = Quantiser("uniform", 2, "global")
    payload, _ = uniform.encode({"model": torch.tensor([1.0, -0.5, 0.49, 0, 0, 0, 0])}, {}, context)
    assert uniform.decode(payload, context)["model"].tolist() == [1, -1, 0, 0, 0, 0, 0]


@pytest.mark.long
@each_codec
@given(st.lists(vectors, min_size=2, max_size=5))
@settings(max_examples=8)
@pytest.mark.sampled(4)
def test_error_feedback_telescopes(codec: Codec, rounds: list[np.ndarray]) -> None:
    d = min(map(len, rounds))
    context, memory = setting_of(d), {}
    wanted, sent = {}, {}
    feedback = ErrorFeedback(codec)
    for x in rounds:
        message = {name: y.double() for name, y in message_of(x[:d]).items()}
        payload, memory = feedback.encode(message, memory, context)
        for name, y in feedback.decode(payload, context).items():
            wanted[name] = wanted.get(name, 0) + message[name]
            sent[name] = sent.get(name, 0) + y
    for name, total in wanted.items():
        left = memory.get(f"residual/{name}", 0)
        scale = max(float(np.abs(x).max()) for x in rounds) ** 2 + 1
        assert torch.allclose(sent[name] + left, total, rtol=0, atol=1e-12 * scale)
        assert (f"residual/{name}" in memory) == codec.is_lossy_for(name)


@pytest.mark.parametrize("exponent", [0, 1, 2, 5, 16, 23])
def test_an_index_has_as_many_bits_as_the_largest_needs(exponent: int) -> None:
    """Check ⌈log2 d⌉ at and around the powers of two, where rounding decides."""
    assert bit_width(2**exponent) == exponent
    assert bit_width(2**exponent + 1) == exponent + 1
    assert bit_width(0) == 0


@each_codec
def test_what_a_codec_may_lose_is_what_it_loses(codec: Codec) -> None:
    message = {
        name: torch.randn(50, generator=torch.Generator().manual_seed(seed))
        for seed, name in enumerate(("model", "moments/first", "moments/second", "buffers", "scalars/steps"))
    }
    sent = through(codec, message)
    for name, x in message.items():
        assert codec.is_lossy_for(name) == (not torch.equal(sent[name], x)), name


class Counting(Dense):
    """Codec that counts its uploads in the client's memory."""

    traits = Traits.EXACT

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Any, State]:
        payload, _ = super().encode(message, {}, context)
        return payload, {"uploads": memory.get("uploads", torch.zeros(1)) + 1}


def test_error_feedback_keeps_the_memory_of_its_codec() -> None:
    memory: State = {}
    for _ in range(3):
        _, memory = ErrorFeedback(Counting()).encode({"model": torch.ones(6)}, memory, setting_of(6))
    assert {name: x.tolist() for name, x in memory.items()} == {"uploads": [3.0]}


@each_codec
def test_nothing_of_nothing_and_zero_of_zero(codec: Codec) -> None:
    for d in (0, 1, 10):
        zeros = {name: torch.zeros(d) for name in ("model", "moments/first", "moments/second")}
        sent = through(codec, zeros)
        for name, x in sent.items():
            assert torch.equal(x, zeros[name])


def test_a_mask_of_other_numbers_than_bools_is_refused() -> None:
    signs = torch.tensor([-1.0, 0.0, 1.0])
    with pytest.raises(UserError, match=r"'mask/signs' of a message is a mask, of bools, but has float32: name other"):
        Dense().encode({"mask/signs": signs}, {}, setting_of(3))
    with pytest.raises(
        UserError, match=r"'mask/signs' .* is a mask, a vector of bools, but has shape \(1, 3\): flatten it"
    ):
        Dense().encode({"mask/signs": signs[None] > 0}, {}, setting_of(3))


@each_codec
def test_a_mask_of_bools_costs_one_bit_a_number(codec: Codec) -> None:
    message = {**message_of(np.linspace(-1, 2, 10, dtype=np.float32)), "mask/signs": torch.arange(7) < 3}
    payload, _ = codec.encode(message, {}, setting_of(10))
    assert payload["mask/signs"].bits == 7
    assert torch.equal(codec.decode(payload, setting_of(10))["mask/signs"], message["mask/signs"])


def test_a_vector_of_zeros_sends_its_first_coordinates() -> None:
    payload, _ = TopK(0.3).encode({"model": torch.zeros(10)}, {}, setting_of(10))
    assert unpack_positions(payload["mask/model"].content, 3, 10).tolist() == [0, 1, 2]
    assert [payload[name].bits for name in ("model", "mask/model")] == [96, 10]


@each_codec
def test_tensors_without_elements_cost_nothing(codec: Codec) -> None:
    message = message_of(np.linspace(-1, 2, 10, dtype=np.float32))
    shapes = {"a": (0,), "b": (2, 3), "c": (4, 0), "d": (4,), "e": (0, 5)}
    sent = []
    for names in ("bd", "abcde"):
        layout = Layout(tuple(names), tuple(shapes[name] for name in names))
        context = RoundContext(layout, Layout((), ()), num_clients=5)
        payload, _ = codec.encode(message, {}, context)
        shares = [codec.bits_by_tensor(name, payload, context) for name in payload]
        decoded = codec.decode(payload, context)
        sent.append(
            (
                {name: packed.bits for name, packed in payload.items()},
                {name: x.tolist() for name, x in decoded.items()},
                [share and {name: bits for name, bits in share.items() if bits} for share in shares],
            )
        )
    assert sent[0] == sent[1]


@each_codec
def test_a_vector_of_nan_does_not_become_finite(codec: Codec) -> None:
    sent = through(codec, {name: torch.full((6,), torch.nan) for name in ("model", "moments/first", "moments/second")})
    assert all(x.isnan().any() for x in sent.values())


# The numbers of FedAdam-SSM's setting: 21,840 parameters of the CNN with indices, 9,750,922 of VGG-11 with a mask.
@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (Dense(), 2_096_640),
        (SharedTopK(0.05), 121_212),
        (FairTopK(0.05), 121_212),
        (TopK(0.05), 153_972),
        (SharedTopK(0.05, index_bits="exact"), 120_573),  # 1,092 · (96 + log2 21,840), rounded up
        (FairTopK(0.05, index_bits="exact"), 120_573),
        (TopK(0.05, index_bits="exact"), 152_055),
    ],
)
def test_bits_of_the_cnn(codec: Codec, bits: int) -> None:
    d = 21840
    message = {name: torch.randn(d) for name in ("model", "moments/first", "moments/second")}
    payload, _ = codec.encode(message, {}, setting_of(d))
    assert sum(packed.bits for packed in payload.values()) == bits


def test_bits_of_vgg11_by_the_formula() -> None:
    d = 9_750_922
    k = num_kept(0.05, d)
    assert k == 487_546
    assert 3 * 32 * k + positions_bits(k, d) == 56_555_338
    assert 3 * (32 * k + positions_bits(k, d)) == 76_057_182


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "bits"), [(SharedTopK(0.05), 56_555_338), (TopK(0.05), 76_057_182)])
def test_bits_of_vgg11(codec: Codec, bits: int) -> None:
    d = 9_750_922
    message = {name: torch.randn(d) for name in ("model", "moments/first", "moments/second")}
    payload, _ = codec.encode(message, {}, setting_of(d))
    assert sum(packed.bits for packed in payload.values()) == bits


@pytest.mark.parametrize("bits", [8, 12])
def test_uniform_levels_of_a_small_dtype_are_the_nearest(bits: int) -> None:
    """Check that in bfloat16 the error is that of the nearest levels, rounded to the dtype."""
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)).bfloat16()
    context = RoundContext(Layout(("a",), ((2000,),)), NO_LAYOUT, num_clients=1, dtype=torch.bfloat16)
    codec = Quantiser("uniform", bits)
    arrived = codec.decode(codec.encode({"model": x}, {}, context)[0], context)["model"]
    most = x.abs().max().double() / (2 ** (bits - 1) - 1)
    nearest = ((x.double() / most).round() * most).bfloat16()
    error, least = ((found.double() - x.double()).square().sum() for found in (arrived, nearest))
    assert error <= 1.05 * least + 1e-12


@pytest.mark.parametrize(
    ("codec", "bits"), [(OneBit(), 70 + 2 * 32), (OneBit(groups="global"), 70 + 32), (Quantiser(bits=5), 350 + 64)]
)
def test_bits_of_a_quantised_vector(codec: Codec, bits: int) -> None:
    payload, _ = codec.encode({"model": torch.randn(70)}, {}, setting_of(70))
    assert sum(packed.bits for packed in payload.values()) == bits


@pytest.mark.long
@given(vectors, st.data())
@settings(max_examples=20)
def test_changes_bring_followers_to_the_new_values_exactly(x: np.ndarray, data: st.DataObject) -> None:
    d = len(x)
    context, codec = setting_of(d), Changes()
    before = message_of(x)
    payload, memory = codec.encode(before, {}, context)
    assert _bits(payload) == (3 * d + 3 + 1) * 32, "the first broadcast must be whole"
    assert all(torch.equal(y, before[name]) for name, y in codec.decode_incremental(payload, {}, context).items())
    changed = sorted(data.draw(st.sets(st.integers(0, d - 1))))
    after = {name: y.clone() for name, y in before.items()}
    for place, i in enumerate(changed):
        after[("model", "moments/first", "moments/second")[place % 3]][i] += 2e9
    after["buffers"] += 1
    payload, _ = codec.encode(after, memory, context)
    u = len(changed)
    assert _bits(payload) == min(3 * u * 32 + positions_bits(u, d), 3 * d * 32) + 4 * 32
    followed = codec.decode_incremental(payload, memory, context)
    assert followed.keys() == after.keys()
    assert all(torch.equal(y, after[name]) for name, y in followed.items())
    assert all(torch.equal(memory[name], before[name]) for name in memory), "the clients' memory must not change"


def test_changes_are_of_no_use_to_newcomers() -> None:
    context, codec = setting_of(10), Changes()
    _, memory = codec.encode({"model": torch.zeros(10)}, {}, context)
    payload, _ = codec.encode({"model": torch.ones(10) * (torch.arange(10) < 2)}, memory, context)
    with pytest.raises(ValueError, match="broadcast before"):
        codec.decode(payload, context)


def test_followers_pay_for_the_carrier_alone() -> None:
    codec, context = Followed(TopK(0.2), "model/change"), setting_of(10)
    message = message_of(np.arange(10, dtype=np.float32))
    payload, _ = codec.encode(message, {}, context)
    assert _bits(payload) == (3 * 10 + 3 + 1) * 32
    message["model/change"] = message["model"] * (torch.arange(10) > 7)
    payload, _ = codec.encode(message, {}, context)
    assert _bits(payload) == (2 * 32 + min(10, 2 * 4)) + 4 * 32
    decoded = codec.decode(payload, context)
    assert decoded.keys() == message.keys()
    assert all(torch.equal(x, message[name]) for name, x in decoded.items())


def _bits(payload: Payload) -> int:
    return sum(packed.bits for packed in payload.values())


def test_codecs_say_what_they_are_for() -> None:
    assert Traits.DELTAS_ONLY in ErrorFeedback(OneBit()).traits
    assert Traits.DELTAS_ONLY not in Quantiser().traits
    assert (
        SharedTopK(leader="moments/first").needs
        == {"moments/first"}
        == ErrorFeedback(SharedTopK(leader="moments/first")).needs
    )
    assert num_kept(0.29, 100) == 29


@pytest.mark.parametrize(
    "codec", [TopK(0.2), SharedTopK(0.2), FairTopK(0.2), FairTopK(0.2, "max"), OneBit(), Quantiser()]
)
def test_buffers_alone_cross_whole(codec: Codec) -> None:
    payload, memory = codec.encode({"buffers": torch.arange(3.0)}, {}, setting_of(0))
    assert _bits(payload) == 3 * 32
    torch.testing.assert_close(codec.decode(payload, setting_of(0))["buffers"], torch.arange(3.0), rtol=0, atol=0)
    assert memory == {}


def test_the_readme_counts_the_codecs_that_compress() -> None:
    """Check that those which send all, or wrap another codec, are not counted."""
    others = {"Dense", "EntropyCoded", "ErrorFeedback", "Followed", "Changes", "Differences"}
    assert len({*codecs.__all__} - others) == 16
    assert "[sixteen](docs/how-to/codecs.md)" in (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
