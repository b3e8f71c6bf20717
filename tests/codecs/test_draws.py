"""Test the random draws of codecs, and a server's change that is encoded once."""

import copy
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer, bits_of, fits
from toys import Perceptron, federation, vector

from lightning_fl.algorithms import Algorithm
from lightning_fl.codecs import (
    EDEN,
    QSGD,
    STC,
    Blockwise,
    Cast,
    Dense,
    ErrorFeedback,
    FairTopK,
    Followed,
    LowRank,
    OneBit,
    Quantiser,
    RandomK,
    TernGrad,
    TopK,
)
from lightning_fl.errors import UserError
from lightning_fl.slots import Codec, Draw, Message, Packed, Payload, RoundContext, State, Traits, compressible
from lightning_fl.steps import Apply, Compress
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

LAYOUT = Layout(("a", "b"), ((5, 4), (6,)))
SEEN: list[Draw] = []


@dataclass(frozen=True)
class Noisy(Codec):
    """Codec that adds a hundredth of a normal draw to every number; it sends more bits for a second encoding."""

    traits = Traits.UNBIASED
    noise: float = 0.01

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        SEEN.append(context.draw)
        return {name: Packed(self._noisy(name, x, context), self._bits(x)) for name, x in message.items()}, {}

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        return {name: packed.content for name, packed in payload.items()}

    def _noisy(self, name: str, x: torch.Tensor, context: RoundContext) -> torch.Tensor:
        if not compressible(name):
            return x
        return (1000 * (x + self.noise * torch.randn(len(x), generator=context.draw.generator(name)))).round() / 1000

    def _bits(self, x: torch.Tensor) -> int:
        return 8 * len(x) if torch.equal(x, (1000 * x).round() / 1000) else 4 * len(x)


def test_draws_differ_by_every_one_of_their_numbers_and_agree_otherwise() -> None:
    draws = [
        Draw((seed, round, 11), party, direction, turn)
        for seed, round, party, direction, turn in product((0, 1), (0, 1), (0, 1), ("up", "down", "step"), (0, 1))
    ]
    seeds = [draw.seed(name) for draw in draws for name in ("model", "moments/first")]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [copy.copy(draw).seed(name) for draw in draws for name in ("model", "moments/first")]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_common_draw_is_the_same_for_all_parties_and_no_one_s_own() -> None:
    draws = [Draw((3, 1, 11), party, "up") for party in range(4)]
    common = {draw.seed("model", common=True) for draw in draws}
    assert len(common) == 1
    assert common.isdisjoint({draw.seed("model") for draw in draws})


def test_every_message_has_its_own_draws(make_trainer: MakeTrainer) -> None:
    SEEN.clear()
    trainer = make_trainer(max_rounds=3)
    trainer.fit(Perceptron(), federation(), Algorithm(uplink=Noisy(), downlink=Noisy()))
    assert len(SEEN) == 3 * (1 + 3)
    assert len(set(SEEN)) == len(SEEN)
    assert {(draw.direction, draw.purpose[1]) for draw in SEEN} == set(product(("up", "down"), range(3)))
    assert [draw.party for draw in SEEN if draw.direction == "down"] == [6, 6, 6]  # the server has no client's number


def test_draws_are_the_same_for_stacked_clients(make_trainer: MakeTrainer) -> None:
    pair = fits(make_trainer, Perceptron(), federation, Algorithm(uplink=Noisy(), downlink=Noisy()))
    (serial, _), (stacked, _) = pair
    # Rounding in thousandths may differ by one thousandth; other draws would differ by ten.
    torch.testing.assert_close(torch.from_numpy(vector(serial)), torch.from_numpy(vector(stacked)), atol=2e-3, rtol=0)


def test_a_resumed_run_draws_what_the_unbroken_one_drew(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> None:
    method = Algorithm(uplink=Noisy(), downlink=Followed(Noisy()), steps=[Apply(), Compress(Noisy())])
    start = Perceptron()
    whole, resumed = copy.deepcopy(start), copy.deepcopy(start)
    unbroken = make_trainer(max_rounds=4)
    unbroken.fit(whole, federation(), method)
    make_trainer(max_rounds=2, **keeps_files).fit(copy.deepcopy(start), federation(), method)
    again = make_trainer(max_rounds=4, **keeps_files)
    again.fit(resumed, federation(), method, ckpt_path="last")
    assert vector(whole).tolist() == vector(resumed).tolist()
    assert unbroken.run.ledger.total_bits == again.run.ledger.total_bits


def test_the_server_s_change_is_encoded_once(make_trainer: MakeTrainer) -> None:
    SEEN.clear()
    trainer = make_trainer(max_rounds=3)
    trainer.fit(Perceptron(), federation(), Algorithm(steps=[Apply(), Compress(Noisy())], downlink=Followed(Noisy())))
    assert [draw.direction for draw in SEEN] == ["step"] * 3
    # A second encoding would take 8 bits a number; Followed goes to all six clients.
    assert bits_of(trainer, "down") == {"model": 4 * 26 * 6}


def test_clients_receive_the_change_that_the_server_made() -> None:
    downlink, change = Followed(Noisy()), torch.arange(26.0)
    context = RoundContext(
        NO_LAYOUT, NO_LAYOUT, num_clients=6, encoded={"model/change": torch.tensor([7, 0, 0, 5, 0, 0, 0])}
    )
    payload, _ = downlink.encode({"model": change, "model/change": change}, {}, context)
    assert sum(packed.bits for packed in payload.values()) == 12
    assert torch.equal(downlink.decode(payload, context)["model/change"], change)


def test_a_change_that_has_no_bits_is_not_encoded_again() -> None:
    """Check that only a codec that loses nothing the second time encodes what another has encoded."""
    change, context = torch.arange(26.0), RoundContext(LAYOUT, NO_LAYOUT, num_clients=6)
    message = {"model": change, "model/change": change}
    with pytest.raises(UserError, match=r"Followed\(Noisy\) would encode 'model/change' a second time"):
        Followed(Noisy()).encode(message, {}, context)
    Followed(TopK(0.5)).encode(message, {}, context)


GROWING = [
    Noisy(),
    QSGD(),
    TernGrad(),
    TernGrad(clip=2.5),
    RandomK(0.2),
    EDEN(4),
    TopK(0.5, values=QSGD(1)),
    TopK(0.5, values=RandomK(0.05)),
]
BOUNDED = [
    *(
        Dense(),
        Cast(),
        Quantiser(),
        OneBit(),
        OneBit("l1"),
        Blockwise(bits=4),
        TopK(0.5),
        FairTopK(0.5),
        STC(0.5),
        LowRank(1),
        EDEN(4, scale="min_mse"),
    ),
    *(TopK(0.5, values=Blockwise(bits=4)), RandomK(0.5, scale="none"), RandomK(0.5, scale="none", values=Quantiser())),
]


@pytest.mark.parametrize("make", [ErrorFeedback, lambda codec: Compress(codec, feedback=True)], ids=["uplink", "step"])
@pytest.mark.parametrize("codec", GROWING, ids=str)
def test_error_feedback_is_refused_where_errors_would_grow(codec: Codec, make: Any) -> None:
    with pytest.raises(UserError, match="would add up errors that may be larger"):
        make(codec)
    if codec.traits.keep_means:
        assert not Compress(codec).adds_error


@pytest.mark.long
@pytest.mark.parametrize("codec", BOUNDED, ids=str)
def test_what_error_feedback_keeps_is_bounded_elsewhere(codec: Codec) -> None:
    x, memory = torch.randn(26, generator=torch.Generator().manual_seed(0)), dict[str, torch.Tensor]()
    feedback = ErrorFeedback(codec)
    for index in range(60):
        context = RoundContext(LAYOUT, NO_LAYOUT, num_clients=6, draw=Draw((0, index, 11), 0, "up"))
        _, memory = feedback.encode({"model": x}, memory, context)
    kept = memory.get("residual/model", torch.zeros(1))
    assert kept.norm() < 10 * x.norm()


def test_an_unbiased_change_needs_no_error_feedback() -> None:
    assert not Compress(Noisy()).adds_error
    assert Compress(Dense()).adds_error
    assert not Compress(Dense(), feedback=False).adds_error


@pytest.mark.parametrize("codec", [QSGD(), QSGD(norm="max"), TernGrad(packing="two_bits")], ids=repr)
def test_no_size_is_read_from_the_device(codec: Any) -> None:
    """Check with torch's device `meta`, whose numbers nobody can read, so that the host cannot wait for them."""
    there = torch.empty(LAYOUT.numel, device="meta")
    context = RoundContext(LAYOUT, NO_LAYOUT, num_clients=2)
    payload, _ = codec.encode({"model": there}, {}, context)
    assert codec.decode(payload, context)["model"].shape == there.shape
