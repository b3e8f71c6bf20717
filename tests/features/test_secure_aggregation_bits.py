"""Test the bits of secure sums against the paper's formulas, and that their numbers have room for the sum."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fl import UserError
from lightning_fl.features.secure_aggregation import Masked, SecureAggregation, SecureSum
from lightning_fl.slots import RoundContext
from lightning_fl.vectors.layout import Layout

CONTEXT = RoundContext(Layout((), ()), Layout((), ()), num_clients=6)


@pytest.mark.parametrize(
    ("num_clients", "num_numbers", "width", "up", "down"),
    [(1024, 2**20, 26, 28_049_408, 1_047_552), (10, 61_706, 20, 1_241_800, 9_216), (2**14, 2**24, 30, None, None)],
)
def test_known_values(num_clients: int, num_numbers: int, width: int, up: int | None, down: int | None) -> None:
    protocol = SecureAggregation()
    assert protocol.width(num_clients) == width
    sent = protocol.uplink_bits(num_clients, num_numbers)
    assert sent == 2 * 256 + (3 * num_clients - 2) * 256 + num_numbers * width
    dropped, received = protocol.agreement_bits(num_clients)
    assert dropped == 2 * 256 + 2 * (num_clients - 1) * 256
    assert received == 2 * (num_clients - 1) * (256 + 256)
    if up is not None:
        assert (sent, received) == (up, down)


def test_expansion_is_the_paper_s() -> None:
    """The paper's abstract: 1.73 times the numbers themselves for 2^10 users and 2^20 numbers, 1.98 for 2^14 and 2^24."""
    protocol = SecureAggregation()
    for num_clients, num_numbers, expansion in ((2**10, 2**20, 1.734), (2**14, 2**24, 1.984)):
        both_ways = protocol.uplink_bits(num_clients, num_numbers) + protocol.agreement_bits(num_clients)[1]
        assert both_ways / (16 * num_numbers) == pytest.approx(expansion, abs=0.0005)


@pytest.mark.long
@given(st.integers(1, 2**15), st.integers(1, 64))
def test_width_is_the_least_in_which_the_sum_has_room(num_clients: int, value_bits: int) -> None:
    width = SecureAggregation(value_bits=value_bits).width(num_clients)
    largest = num_clients * (2**value_bits - 1)
    assert 2 ** (width - 1) <= largest < 2**width


@given(st.integers(2, 10_000))
def test_threshold_is_two_thirds_and_never_one_client(num_clients: int) -> None:
    threshold = SecureAggregation().threshold(num_clients)
    assert 3 * threshold >= 2 * num_clients > 3 * (threshold - 1)
    assert threshold >= 2
    secure_sum = SecureSum(SecureAggregation(), num_clients)
    assert secure_sum.is_lost(threshold - 1)
    assert not secure_sum.is_lost(threshold)


@pytest.mark.long
@given(st.integers(2, 9), st.integers(1, 20), st.data())
def test_masked_sums_are_the_sums(num_clients: int, value_bits: int, data: st.DataObject) -> None:
    """Mask whole numbers as the paper does, let some clients drop out after the shares, and remove what is left of the masks."""
    protocol = SecureAggregation(value_bits=value_bits)
    modulus = 2 ** protocol.width(num_clients)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    values = random.integers(0, 2**value_bits, (num_clients, 5))
    if data.draw(st.booleans()):
        values[:] = 2**value_bits - 1
    least = protocol.threshold(num_clients)
    answering = sorted(
        data.draw(st.sets(st.integers(0, num_clients - 1), min_size=least, max_size=num_clients)),
    )
    pairwise = random.integers(0, modulus, (num_clients, num_clients, 5))  # from the agreed keys
    own = random.integers(0, modulus, (num_clients, 5))

    def mask(k: int) -> np.ndarray:
        signed = [pairwise[k, j] if k < j else -pairwise[j, k] for j in range(num_clients) if j != k]
        return sum(signed, own[k])

    received = sum((values[k] + mask(k)) % modulus for k in answering)
    gone = [k for k in range(num_clients) if k not in answering]
    of_gone = sum((pairwise[k, j] if k < j else -pairwise[j, k] for k in answering for j in gone), np.zeros(5, int))
    assert ((received - own[answering].sum(0) - of_gone) % modulus).tolist() == values[answering].sum(0).tolist()


def test_a_message_costs_its_numbers_a_weight_and_the_unmasking() -> None:
    protocol = SecureAggregation(key_bits=100, share_bits=7, value_bits=3)
    message = {"model": torch.randn(5), "buffers": torch.randn(2), "scalars/normaliser": torch.randn(1)}
    width = 6  # 9 · 7 = 63
    codec = Masked(SecureSum(protocol, 9))
    payload, memory = codec.encode(message, {}, CONTEXT)
    assert {name: packed.bits for name, packed in payload.items()} == {
        "model": 5 * width,
        "buffers": 2 * width,
        "scalars/normaliser": width,
        "scalars/weights": width,
        "keys/unmasking": 9 * 7,
    }
    assert memory == {}
    decoded = codec.decode(payload, CONTEXT)
    assert decoded.keys() == message.keys()
    assert all(torch.equal(decoded[name], vector) for name, vector in message.items())
    assert sum(packed.bits for packed in payload.values()) + protocol.agreement_bits(9)[0] == protocol.uplink_bits(9, 9)


def test_a_message_with_its_weight_needs_no_other_and_parts_need_one_for_each_number() -> None:
    protocol, message = SecureAggregation(), {"model": torch.randn(5), "buffers": torch.randn(2)}
    with_count, _ = Masked(SecureSum(protocol, 4)).encode(message | {"scalars/samples": torch.ones(1)}, {}, CONTEXT)
    assert with_count["scalars/weights"].bits == 0
    parts, _ = Masked(SecureSum(protocol, 4, weighs_each=True)).encode(message, {}, CONTEXT)
    assert parts["scalars/weights"].bits == (5 + 2 + 1) * protocol.width(4)


@pytest.mark.parametrize(("name", "value"), [("key_bits", 0), ("share_bits", 1.5), ("value_bits", 65)])
def test_sizes_are_whole_numbers_from_one_on(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"secure_aggregation.{name}"):
        SecureAggregation(**{name: value})
