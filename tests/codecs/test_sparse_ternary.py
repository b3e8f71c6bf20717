"""Test STC against loops over numbers as in the paper, and the gaps between positions bit by bit."""

from math import ceil, comb, log2, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, assert_same, fits
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from toys import Perceptron, federation, vector

from lightning_fl.algorithms import Algorithm
from lightning_fl.codecs import STC, ErrorFeedback, Followed
from lightning_fl.coding.golomb import most_bits, pack_gaps, rice_width, unpack_gaps
from lightning_fl.coding.top_k import num_kept
from lightning_fl.errors import UserError
from lightning_fl.link.messages import UplinkMessage
from lightning_fl.slots import Message, Payload, RoundContext
from lightning_fl.steps import Apply, Compress
from lightning_fl.vectors.layer_groups import Group
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

CHANNELS = (25 * 10, 10, 20 * 250, 20, 50 * 320, 50, 10 * 50, 10)
"""Tensors of the CNN with 21,840 parameters."""
numbers = st.one_of(st.floats(-1e6, 1e6, width=32), st.sampled_from([0.0, 0.0, 1.0, -1.0, 3.0]))
vectors = st.integers(1, 60).flatmap(lambda d: arrays(np.float32, d, elements=numbers))
shares = st.sampled_from([1e-9, 0.05, 0.1, 0.3, 0.36, 0.5, 0.9, 1.0])


def setting_of(d: int, dtype: torch.dtype = torch.float32) -> RoundContext:
    return RoundContext(Layout(("a",), ((d,),)), NO_LAYOUT, num_clients=5, dtype=dtype)


def bits_of(payload: Payload) -> int:
    return sum(packed.bits for packed in payload.values())


def through(codec: STC, x: torch.Tensor) -> torch.Tensor:
    context = setting_of(len(x), x.dtype)
    payload, memory = codec.encode({"model": x}, {}, context)
    for packed in payload.values():
        assert packed.content.numel() * packed.content.element_size() == ceil(packed.bits / 8)
    assert memory == {}
    return codec.decode(payload, context)["model"]


def by_the_paper(z: np.ndarray, alpha: float) -> tuple[np.ndarray, list[int], int]:
    """Return C(z), its positions and its bits."""
    d, k = len(z), num_kept(alpha, len(z))
    largest = sorted(range(d), key=lambda i: (-abs(float(z[i])), i))[:k]
    chosen = sorted(i for i in largest if z[i] != 0)
    sent = np.zeros(d)
    for i in chosen:
        sent[i] = np.sign(z[i]) * np.float32(sum(abs(float(z[j])) for j in chosen) / len(chosen))
    return sent, chosen, len(chosen) + 32 + ceil(log2(k + 1)) + len(code_of(chosen, k, d))


def code_of(chosen: list[int], k: int, d: int) -> str:
    """Return the positions as zeros and ones: one gap after the other, or a mask."""
    if len(chosen) == d:
        return ""
    p, golden = k / d, (1 + sqrt(5)) / 2
    b = 0 if k == d else max(0, 1 + int(np.floor(np.log2(np.log(golden - 1) / np.log(1 - p)))))
    if len(chosen) * (b + 1) + (d - len(chosen)) // 2**b > d:
        return "".join("1" if i in chosen else "0" for i in range(d))
    code, last = "", -1
    for i in chosen:
        quotient, rest = divmod(i - last - 1, 2**b)
        code += "1" * quotient + "0" + (format(rest, f"0{b}b") if b else "")
        last = i
    return code


@pytest.mark.long
@given(vectors, shares)
@settings(max_examples=80)
def test_it_is_the_paper_s(x: np.ndarray, alpha: float) -> None:
    codec, z = STC(alpha), torch.from_numpy(x.copy())
    sent, chosen, bits = by_the_paper(x, alpha)
    payload, _ = codec.encode({"model": z, "buffers": torch.arange(3.0)}, {}, setting_of(len(x)))
    assert bits_of(payload) == bits + 3 * 32
    decoded = codec.decode(payload, setting_of(len(x)))
    np.testing.assert_allclose(decoded["model"].numpy(), sent, rtol=1e-6)
    assert decoded["model"].nonzero().flatten().tolist() == [i for i in chosen if sent[i]]
    assert decoded.keys() == {"model", "buffers"}


@pytest.mark.long
@given(st.integers(0, 200).flatmap(lambda d: st.lists(st.booleans(), min_size=d, max_size=d)), st.integers(0, 9))
@settings(max_examples=60)
def test_positions_survive_at_any_width(chosen: list[bool], width: int) -> None:
    positions, d = torch.tensor(chosen, dtype=torch.bool).nonzero().flatten(), len(chosen)
    packed, bits = pack_gaps(positions, d, width)
    assert len(packed) == ceil(bits / 8)
    assert bits <= min(d, most_bits(len(positions), d, width))
    assert unpack_gaps(packed, len(positions), d, width).tolist() == positions.tolist()


@pytest.mark.parametrize("step", [1, 2, 7, 1000], ids="every {}th".format)
def test_regular_positions_survive(step: int) -> None:
    positions = torch.arange(step - 1, 30_000, step)
    for width in (0, 1, 4, rice_width(len(positions), 30_000), 16):
        packed, _ = pack_gaps(positions, 30_000, width)
        assert torch.equal(unpack_gaps(packed, len(positions), 30_000, width), positions)


def test_bits_of_the_cnn() -> None:
    d = sum(CHANNELS)
    every_20th = torch.where(torch.arange(d) % 20 == 19, torch.randn(d), 0)
    payload, _ = STC(0.05).encode({"model": every_20th}, {}, setting_of(d))
    assert {name: packed.bits for name, packed in payload.items()} == {
        "model": 1092,
        "scalars/scale/model": 32,
        "mask/count/model": 11,
        "mask/model": 6552,
    }
    assert bits_of(payload) == 7687
    for seed in range(5):
        x = torch.randn(d, generator=torch.Generator().manual_seed(seed))
        payload, _ = STC(0.05).encode({"model": x}, {}, setting_of(d))
        assert 6500 < bits_of(payload) <= 7891
    last = torch.where(torch.arange(d) >= d - 1092, 1.0, 0.0)  # one long gap: the most bits
    payload, _ = STC(0.05).encode({"model": last}, {}, setting_of(d))
    assert bits_of(payload) == 7891


@pytest.mark.parametrize(("alpha", "width", "positions"), [(0.36, 1, 21840), (0.5, 0, 21837), (1.0, 0, 0)])
def test_positions_of_many_numbers(alpha: float, width: int, positions: int) -> None:
    d = 21840
    k = num_kept(alpha, d)
    assert rice_width(k, d) == width
    x = torch.zeros(d)
    x[: k - 1], x[d - 4] = 1, 1
    payload, _ = STC(alpha).encode({"model": x if k < d else torch.ones(d)}, {}, setting_of(d))
    assert payload["mask/model"].bits == positions


@pytest.mark.long
@given(vectors, shares, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
@settings(max_examples=40)
def test_it_contracts_and_a_second_time_changes_nothing(x: np.ndarray, alpha: float, dtype: torch.dtype) -> None:
    z = torch.from_numpy(x.copy()).to(dtype)
    sent = through(STC(alpha), z)
    assert sent.dtype == dtype
    assert torch.equal(through(STC(alpha), sent), sent)
    error, length = float((z - sent).double().norm() ** 2), float(z.double().norm() ** 2)
    k, scale = int(sent.count_nonzero()), float(sent.double().abs().max())
    tolerance = 0.01 if dtype == torch.bfloat16 else 1e-5
    assert error == pytest.approx(length - k * scale**2, abs=2 * tolerance * length)
    assert error <= (1 - 1 / len(x) + tolerance) * length


def test_numbers_of_one_magnitude_arrive() -> None:
    x = torch.where(torch.randn(500) > 0, 0.3, -0.3)
    assert torch.equal(through(STC(1.0), x), x)
    one = torch.tensor([-0.7])
    assert torch.equal(through(STC(0.01), one), one)
    assert torch.equal(through(STC(), torch.zeros(9)), torch.zeros(9))


def test_sizes_by_layer_and_of_an_ideal_code() -> None:
    layout = Layout(("a", "b"), ((4, 4), (5,)))
    context = RoundContext(layout, NO_LAYOUT, num_clients=3)
    x = torch.tensor([9.0, 0, 8, 0, 0, 0, 0, 0, -7, 0, 0, 0, 0, 0, 0, 0, 0, 0, -9, 8, 0])
    codec = STC(0.3)  # k = 6, k' = 5
    payload, _ = codec.encode({"model": x}, {}, context)
    found = UplinkMessage(0, {}, {}, {}, [(codec, payload)], context, [Group("first", ("a",)), Group("second", ("b",))])
    gaps = len(code_of([0, 2, 8, 18, 19], 6, 21))
    assert found.bits_by_layer() == {"first": 3, "second": 2, "shared": 32 + 3 + gaps}
    positions, counts, order = ((choices - 1).bit_length() for choices in (comb(21, 5), comb(6, 1), comb(5, 2)))
    assert counts + order > 5, "signs are shorter as they are sent"
    assert found.entropy_bits == 32 + 3 + 5 + min(gaps, positions)


def test_nothing_costs_nothing() -> None:
    payload, _ = STC().encode({"model": torch.zeros(0)}, {}, setting_of(0))
    assert bits_of(payload) == 0
    assert STC().decode(payload, setting_of(0))["model"].shape == (0,)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so_and_costs_as_usual(bad: float) -> None:
    x = torch.full((40,), bad)
    payload, _ = STC(0.1).encode({"model": x}, {}, setting_of(40))
    assert payload["model"].bits == 4
    assert not STC(0.1).decode(payload, setting_of(40))["model"].isfinite().all()


@pytest.mark.long
def test_error_feedback_sends_all_in_the_end() -> None:
    codec, memory, context = ErrorFeedback(STC(0.1)), {}, setting_of(300)
    wanted = arrived = torch.zeros(300)
    for _ in range(20):
        x = torch.randn(300)
        payload, memory = codec.encode({"model": x}, memory, context)
        wanted, arrived = wanted + x, arrived + codec.decode(payload, context)["model"]
    torch.testing.assert_close(arrived + memory["residual/model"], wanted, atol=1e-5, rtol=1e-5)
    assert memory["residual/model"].norm() < wanted.norm() * 4


def test_it_needs_error_feedback() -> None:
    sentence = r"the uplink STC would lose most of every upload for good: use ErrorFeedback\(STC\(…\)\)\.$"
    with pytest.raises(UserError, match=sentence):
        Algorithm(uplink=STC())
    with pytest.raises(UserError, match="STC is too coarse for a whole model"):
        Algorithm(downlink=STC())
    with pytest.raises(UserError, match=r"Compress\(STC\) needs error feedback"):
        Compress(STC(), feedback=False)
    Algorithm(uplink=ErrorFeedback(STC()))


@pytest.mark.parametrize("alpha", [0, 1.1, "many"])
def test_shares_outside_their_range_are_refused(alpha: Any) -> None:
    with pytest.raises(UserError, match=r"must lie in \(0, 1\]"):
        STC(alpha)


BOTH_WAYS = {
    "uplink": ErrorFeedback(STC(0.2)),
    "downlink": Followed(STC(0.2)),
    "steps": [Apply(), Compress(STC(0.2))],
}


def test_every_bit_is_counted_both_ways(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[int]] = {"up": [], "step": []}
    encode = STC.encode

    def recorded(codec: STC, message: Message, memory: Any, context: RoundContext) -> Any:
        assert context.layout.numel == 26
        for name in message:
            seen[context.draw.direction].append(by_the_paper(message[name].numpy(), codec.alpha)[2])
        return encode(codec, message, memory, context)

    monkeypatch.setattr(STC, "encode", recorded)
    trainer = make_trainer(max_rounds=4)
    trainer.fit(Perceptron(), federation(), Algorithm(**BOTH_WAYS))
    assert [len(seen["up"]), len(seen["step"])] == [4 * 3, 4]
    total = trainer.run.ledger.total_bits
    assert sum(total["up"].values()) == sum(seen["up"])
    assert total["up"]["model"] == 4 * 3 * 5
    # The first broadcast is whole; each later one has the change of the round before, for all six clients.
    assert sum(total["down"].values()) == 6 * (26 * 32 + sum(seen["step"][:3]))


def test_stacked_clients_send_the_same(make_trainer: MakeTrainer) -> None:
    pair = fits(make_trainer, Perceptron(), federation, Algorithm(**BOTH_WAYS))
    assert_same(pair)
    ledgers = [trainer.run.ledger.total_bits for _, trainer in pair]
    assert ledgers[0] == ledgers[1]


def test_a_resumed_run_is_the_unbroken_one(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> None:
    models = [Perceptron() for _ in range(3)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    flags: dict[str, Any] = {"precision": "64-true"}
    unbroken = make_trainer(max_rounds=4, **flags)
    unbroken.fit(models[0], federation(), Algorithm(**BOTH_WAYS))
    for rounds, model, resume in ((2, models[1], {}), (4, models[2], {"ckpt_path": "last"})):
        resumed = make_trainer(max_rounds=rounds, **flags, **keeps_files)
        resumed.fit(model, federation(), Algorithm(**BOTH_WAYS), **resume)
    assert unbroken.run.params.dtype == torch.float64
    assert vector(models[0]).tolist() == vector(models[2]).tolist()
    assert unbroken.run.ledger.total_bits == resumed.run.ledger.total_bits


def test_a_client_that_is_rejected_keeps_its_residual(make_trainer: MakeTrainer) -> None:
    x, y = (torch.randn(40, width, generator=torch.Generator().manual_seed(1)) for width in (3, 2))
    y[0] = torch.nan
    trainer = make_trainer(max_rounds=2, clients_per_round=6)
    trainer.fit(Perceptron(), federation(train=(x, y)), Algorithm(uplink=ErrorFeedback(STC(0.2))))
    assert trainer.run.num_rejected == 2
    assert len(trainer.run.client_memory) == 5
    assert trainer.run.params.isfinite().all()
