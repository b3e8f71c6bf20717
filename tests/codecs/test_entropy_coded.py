"""Test range codes: what arrives is the same, and the bits are between the entropy and 1 % above it."""

from math import ceil, log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from toys import Perceptron, federation, read_rows

from lightning_fl.algorithms import Algorithm
from lightning_fl.cli import main
from lightning_fl.codecs import (
    EDEN,
    QSGD,
    STC,
    Blockwise,
    Cast,
    Dense,
    EntropyCoded,
    ErrorFeedback,
    OneBit,
    Quantiser,
    RandomK,
    TernGrad,
    TopK,
    entropy_coded,
)
from lightning_fl.errors import UserError
from lightning_fl.link.messages import UplinkMessage
from lightning_fl.slots import Codec, Message, Packed, Payload, RoundContext, State
from lightning_fl.vectors.layer_groups import Group
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

CODECS: dict[str, Codec] = {
    "random levels": QSGD(1),
    "Elias's code": QSGD(1, coding="elias"),
    "ternary": TernGrad(),
    "ternary in two bits": TernGrad(packing="two_bits"),
    "blocks": Blockwise(bits=4),
    "scales in blocks": Blockwise(nested=True),
    "rotated": EDEN(2),
    "one bit": OneBit(),
    "four bits": Quantiser("uniform", 4),
    "signs": STC(0.1),
    "values": TopK(0.1, values=QSGD(1)),
    "drawn values": RandomK(0.5, values=TernGrad()),
    "with feedback": ErrorFeedback(Blockwise(bits=4)),
}
each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def setting_of(d: int) -> RoundContext:
    return RoundContext(Layout(("a", "b"), ((d // 3,), (d - d // 3,))), NO_LAYOUT, num_clients=3)


def bits_of(payload: Payload) -> int:
    return sum(packed.bits for packed in payload.values())


def normal(d: int) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(d))


@each_codec
@pytest.mark.parametrize("d", [0, 1, 7, 5000])
def test_what_arrives_is_the_same_and_at_most_a_bit_an_entry_longer(codec: Codec, d: int) -> None:
    message, context = {"model": normal(d), "buffers": torch.ones(3)}, setting_of(d)
    plain, kept = codec.encode(message, {}, context)
    payload, memory = EntropyCoded(codec).encode(message, {}, context)
    expected, found = codec.decode(plain, context), EntropyCoded(codec).decode(payload, context)
    assert expected.keys() == found.keys() == message.keys()
    for name, vector in expected.items():
        assert torch.equal(found[name], vector)
    assert all(torch.equal(memory[name], kept[name]) for name in (*kept, *memory))
    flags = [name for name in payload if name.startswith("mask/coded/")]
    assert bits_of(payload) <= bits_of(plain) + len(flags)
    assert len(flags) == len(payload) - len(plain) <= 2
    for packed in payload.values():
        num_bytes = packed.content.numel() * packed.content.element_size()
        assert 8 * num_bytes - 8 < packed.bits <= 8 * num_bytes


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1.0])
@each_codec
def test_numbers_that_are_not_finite_and_equal_ones_arrive_as_without_it(codec: Codec, value: float) -> None:
    x, context = torch.full((300,), value), setting_of(300)
    plain, _ = codec.encode({"model": x}, {}, context)
    payload, _ = EntropyCoded(codec).encode({"model": x}, {}, context)
    expected = codec.decode(plain, context)["model"]
    torch.testing.assert_close(
        EntropyCoded(codec).decode(payload, context)["model"], expected, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.long
@settings(max_examples=50)
@given(
    st.integers(2, 300), st.integers(1, 3000), st.floats(0.001, 0.999), st.sampled_from(["random", "constant", "turns"])
)
@example(3, 100_000, 0.9, "random")
def test_the_code_is_between_the_entropy_and_one_per_cent_above(
    num_values: int, n: int, zeros: float, kind: str
) -> None:
    generator = np.random.default_rng(n)
    given_numbers = {
        "random": generator.integers(0, num_values, n) * (generator.random(n) > zeros),
        "constant": np.full(n, num_values - 1),
        "turns": np.arange(n) % num_values,
    }[kind]
    numbers = torch.from_numpy(given_numbers)
    packed = entropy_coded._coded(numbers, num_values)
    found, values = entropy_coded._decoded(packed.content)
    assert torch.equal(found, numbers)
    assert values == num_values
    counts = torch.bincount(numbers).tolist()
    entropy = sum(count * log2(n / count) for count in counts if count)
    header = 64 + num_values * ceil(log2(n + 1))
    # Gibbs's inequality: no code of symbols that has one model for a message is shorter than its entropy.
    assert entropy - 1e-6 <= packed.bits - header <= 1.01 * entropy + 64


def test_bits_by_hand() -> None:
    # 4,000 signs, of which 40 are positive: entropy 323 bits, in words 352 or 384; counts 2 × 12 bits, 64 bits for n and A.
    x = torch.where(torch.arange(4000) % 100 == 0, 1.0, -1.0)
    codec, context = EntropyCoded(OneBit(groups="global")), setting_of(4000)
    payload, _ = codec.encode({"model": x}, {}, context)
    assert payload["mask/coded/model"].bits == 1
    assert (payload["model"].bits - 64 - 24) % 32 == 0
    assert 323 <= payload["model"].bits - 64 - 24 <= 323 + 64
    assert bits_of(payload) == payload["model"].bits + 32 + 1


def test_layers_and_ideal_sizes() -> None:
    x, context = normal(5000) ** 3, setting_of(5000)
    groups = [Group("first", ("a",)), Group("second", ("b",))]

    def crossing(codec: Codec) -> UplinkMessage:
        payload, _ = codec.encode({"model": x}, {}, context)
        return UplinkMessage(0, {"model": x}, codec.decode(payload, context), {}, [(codec, payload)], context, groups)

    for inner in (Blockwise(bits=4), TopK(0.5, values=Blockwise(bits=4))):
        plain, coded = crossing(inner), crossing(EntropyCoded(inner))
        assert coded.entropy_bits == plain.entropy_bits + 1 < coded.bits < plain.bits
        # Coded numbers belong to no layer, those that stay as they were do.
        assert coded.bits_by_layer() == {"first": 0, "second": 0, "shared": coded.bits}
    plain, coded = crossing(OneBit()), crossing(EntropyCoded(OneBit()))
    assert coded.bits_by_layer() == {**plain.bits_by_layer(), "shared": 1}


@pytest.mark.parametrize("direction", ["uplink", "downlink"])
def test_a_run_differs_only_in_its_bits(
    direction: str, make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    rows = []
    for codec in (Quantiser("uniform", 12), EntropyCoded(Quantiser("uniform", 12))):
        torch.manual_seed(0)
        make_trainer(**keeps_files).fit(Perceptron(), federation(), Algorithm(**{direction: codec}))
        rows.append(read_rows(tmp_path))
    for plain, coded in zip(*rows, strict=True):
        assert {name for name in plain if plain[name] != coded[name]} <= {
            name for name in plain if name.startswith(("comm/", "time/", "sys/"))
        }
        assert int(plain[f"comm/{direction}_bits"]) < int(
            coded[f"comm/{direction}_bits"]
        )  # too few numbers: a bit more
    assert rows[0][-1]["val/loss"] == rows[1][-1]["val/loss"]


@pytest.mark.usefixtures("types_of_a_new_process")
@pytest.mark.matrix
def test_from_the_command_line(tmp_path: Path) -> None:
    flags = "fit --config quickstart --trainer.max_rounds 2 --algorithm Algorithm --algorithm.uplink"
    folders = [tmp_path / "plain", tmp_path / "coded"]
    for folder, codec in zip(folders, ("QSGD", "EntropyCoded --algorithm.uplink.codec QSGD"), strict=True):
        main(f"{flags} {codec} --trainer.default_root_dir {folder}".split())
    plain, coded = (read_rows(folder)[-1] for folder in folders)
    assert plain["val/accuracy"] == coded["val/accuracy"]
    assert int(coded["comm/uplink_bits"]) < 0.6 * int(plain["comm/uplink_bits"])


class Whole(Codec):
    """Codec of one's own, no dataclass."""

    def __init__(self, inner: Codec) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"Whole({self.inner})"

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        return {name: Packed.whole(vector) for name, vector in message.items()}, {}

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        return {name: packed.content for name, packed in payload.items()}


def test_codecs_of_other_content_are_named_once() -> None:
    entropy_coded.WARNINGS.clear()  # other tests may have said it in this process
    for codec in (Dense(), Cast("bfloat16"), TopK(0.25), Whole(Dense())):
        with pytest.warns(UserWarning, match="EntropyCoded changes nothing, as .* sends no whole numbers"):
            EntropyCoded(codec).encode({"model": torch.ones(9)}, {}, setting_of(9))
    payload, _ = EntropyCoded(STC(0.2)).encode({"model": torch.zeros(9)}, {}, setting_of(9))
    assert not any(name.startswith("mask/coded/") for name in payload)  # no signs, and no warning


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    for inner in (EntropyCoded(QSGD()), TopK(0.1, values=EntropyCoded(QSGD())), Whole(EntropyCoded(QSGD()))):
        with pytest.raises(UserError, match=f"around {type(inner).__name__} would code the same numbers twice"):
            EntropyCoded(inner)
    monkeypatch.setattr(entropy_coded, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"needs the package constriction, .*: pip install 'lightning-fl\[entropy\]'"):
        EntropyCoded(QSGD())


def test_a_codec_of_ones_own_must_give_back_its_content() -> None:
    class Backwards(QSGD):
        def from_symbols(self, name: str, symbols: Tensor, num_values: int) -> Tensor:
            return super().from_symbols(name, symbols.flip(0), num_values)

    with pytest.raises(ValueError, match=r"Backwards\.from_symbols does not give back the content of 'model'"):
        EntropyCoded(Backwards()).encode({"model": normal(90)}, {}, setting_of(90))


def test_vectors_without_whole_numbers_leave_others_coded(recwarn: pytest.WarningsRecorder) -> None:
    context = setting_of(3000)
    x = torch.zeros(3000)
    x[::3] = 1
    payload, _ = EntropyCoded(STC(1.0)).encode({"moments/first": torch.zeros(3000), "model": x}, {}, context)
    assert payload["mask/coded/model"].content.tolist() == [1]
    codec = EntropyCoded(OneBit())
    payload, _ = codec.encode({"model": x - 0.5}, {}, context)
    assert payload["mask/coded/model"].content.tolist() == [1]
    assert codec.bits_by_tensor("model", payload, context) == {}
    assert [str(warning.message) for warning in recwarn] == []
