"""Test Elias's omega code against its recursive definition, and buckets of levels."""

from itertools import permutations
from math import log2

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_fl.codecs import QSGD
from lightning_fl.coding.elias import decode_levels, encode_levels, joined, omega
from lightning_fl.slots import RoundContext
from lightning_fl.vectors.layout import NO_LAYOUT, Layout


def omega_of(number: int) -> str:
    """Return the code by its definition."""
    text = "0"
    while number > 1:
        text = f"{number:b}{text}"
        number = number.bit_length() - 1
    return text


def as_text(bits: torch.Tensor) -> str:
    return "".join("01"[int(bit)] for bit in bits)


@pytest.mark.long
@given(st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=30))
@example([1, 2, 3, 4, 7, 8, 15, 16, 2**31 - 1])
def test_codes_are_those_of_the_definition(numbers: list[int]) -> None:
    codes, lengths = omega(torch.tensor(numbers))
    assert as_text(joined(codes, lengths)) == "".join(map(omega_of, numbers))
    assert lengths.tolist() == [len(omega_of(number)) for number in numbers]


def test_no_code_begins_another() -> None:
    texts = [as_text(joined(*omega(torch.tensor([number])))) for number in range(1, 70)]
    assert not any(other.startswith(text) for text, other in permutations(texts, 2))


@pytest.mark.long
@given(
    st.lists(st.one_of(st.just(0), st.integers(-9, 9), st.integers(-(2**20), 2**20)), max_size=60), st.integers(1, 20)
)
@example([0] * 9, 4)
@example([1, -1] * 9, 4)
@example([0, 0, 0, 5], 512)
def test_levels_survive(levels: list[int], bucket: int) -> None:
    bits = encode_levels(torch.tensor(levels, dtype=torch.int64), bucket)
    assert decode_levels(bits, len(levels), bucket).tolist() == levels
    padded = torch.cat([bits, torch.zeros(7, dtype=torch.bool)])  # whole bytes cross
    assert decode_levels(padded, len(levels), bucket).tolist() == levels
    text = ""
    for start in range(0, len(levels), bucket):
        part, last = levels[start : start + bucket], -1
        text += omega_of(sum(level != 0 for level in part) + 1)
        for place, level in enumerate(part):
            if level:
                text += omega_of(place - last) + "01"[level < 0] + omega_of(abs(level))
                last = place
    assert as_text(bits) == text


@pytest.mark.long
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=60))
def test_a_prefix_code_takes_no_less_than_the_entropy(levels: list[int]) -> None:
    _, codes = omega(torch.tensor([abs(level) + 1 for level in levels]))
    lengths = [code + (level != 0) for level, code in zip(levels, codes.tolist(), strict=True)]
    counts = [levels.count(level) for level in set(levels)]
    entropy = -sum(count * log2(count / len(levels)) for count in counts)
    assert sum(lengths) >= entropy - 1e-9


def test_bits_of_the_paper_s_code() -> None:
    x = torch.tensor([0.0, 0.0, 0.0, 5.0])
    context = RoundContext(Layout(("a",), ((4,),)), NO_LAYOUT, num_clients=1)
    payload, _ = QSGD(1, coding="elias").encode({"model": x}, {}, context)
    # 32 for the norm; fixed width takes 8, the code 3 + 6 + 1 + 1 and would take more: one flag.
    assert sum(packed.bits for packed in payload.values()) == 32 + 8 + 1
    assert len(encode_levels(torch.tensor([0, 0, 0, 1]), 512)) == 3 + 6 + 1 + 1


@pytest.mark.parametrize("d", [3000, 1, 13])
@pytest.mark.parametrize("s", [1, 2, 128])
def test_the_code_changes_no_number_and_is_never_longer_by_more_than_its_flag(s: int, d: int) -> None:
    context = RoundContext(Layout(("a",), ((d,),)), NO_LAYOUT, num_clients=1)
    x = torch.randn(d, generator=torch.Generator().manual_seed(0)) ** 5
    found = []
    for coding in ("fixed", "elias"):
        codec = QSGD(s, coding=coding)  # type: ignore[arg-type]
        payload, _ = codec.encode({"model": x}, {}, context)
        found.append((codec.decode(payload, context)["model"], payload["model"]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[1][1].bits <= found[0][1].bits + 1
    assert len(found[1][1].content) == -(-found[1][1].bits // 8)
    if s < 128 and d == 3000:
        assert found[1][1].bits < 0.6 * found[0][1].bits
