"""Test signs of one bit up, their majority vote, and the vote's way down."""

from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer, assert_same, fits
from toys import Normalised, Perceptron, federation

from lightning_fl.aggregators import MajorityVote
from lightning_fl.algorithms import Algorithm
from lightning_fl.codecs import ErrorFeedback, Followed, OneBit
from lightning_fl.errors import UserError
from lightning_fl.exchanges import DrawnLayers
from lightning_fl.rules import ControlVariates, CorrectedMomentum, WarmedUpAdam
from lightning_fl.slots import Message, Result, RoundContext, Traits, Upload
from lightning_fl.steps import Apply, Compress, ControlUpdate, GradientMomentum, WarmedUpMoments
from lightning_fl.vectors.layout import NO_LAYOUT, Layout


def vote(messages: list[Message], weights: list[float], weighting: Any = "uniform") -> Message:
    aggregator, accumulator = MajorityVote(weighting), {}
    for client, (message, weight) in enumerate(zip(messages, weights, strict=True)):
        aggregator.add(accumulator, Upload(Result(client, {}, weight, {}, {}, {}, num_steps=1), message))
    return aggregator.finish(accumulator)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_vote_is_the_sign_of_the_weighted_sum(weighting: str) -> None:
    signs = torch.where(torch.randn(6, 200) > 0, 1.0, -1.0)
    weights = [3.0, 5.0, 4.0, 9.0, 12.0, 7.0]
    of = {"uniform": [1.0] * 6, "samples": weights}[weighting]
    merged = vote([{"model": 0.1 * row, "buffers": row[:4]} for row in signs], weights, weighting)
    ties = 0
    for i in range(200):
        total = sum(weight * float(row[i]) for weight, row in zip(of, signs, strict=True))
        assert float(merged["model"][i]) == (1 if total >= 0 else -1)
        ties += total == 0
    assert ties
    for i in range(4):
        mean = sum(weight * float(row[i]) for weight, row in zip(of, signs, strict=True)) / sum(of)
        assert float(merged["buffers"][i]) == pytest.approx(mean)


def test_flips_below_half_the_weight_change_nothing() -> None:
    truth = torch.where(torch.randn(300) > 0, 1.0, -1.0)
    weights = [10.0, 10.0, 20.0, 30.0, 31.0]
    for liars, is_changed in (((0, 3), False), ((0, 1, 2), False), ((2, 4), True), ((3, 4), True)):
        messages = [{"model": -truth if client in liars else truth} for client in range(5)]
        assert torch.equal(vote(messages, weights, "samples")["model"], -truth if is_changed else truth)
    messages = [{"model": truth if client > 1 else -truth} for client in range(5)]
    assert torch.equal(vote(messages, weights)["model"], truth)
    assert torch.equal(vote([{"model": truth}, {"model": -truth}], [1.0, 9.0])["model"], torch.ones(300))


def test_zero_is_no_vote() -> None:
    messages = [{"model": torch.tensor([0.0, 0.0, 0.0, 2.0])}, {"model": torch.tensor([0.0, -1e-9, 3.0, -0.1])}]
    assert vote(messages, [9.0, 1.0], "samples")["model"].tolist() == [0, -1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_signs_take_one_bit_each(dtype: torch.dtype) -> None:
    codec = OneBit("unit")
    context = RoundContext(Layout(("a", "b"), ((3,), (2, 3))), NO_LAYOUT, num_clients=5, dtype=dtype)
    x = torch.tensor([0.2, -0.0, 0.0, -3.0, -1e-9, 1e9, -torch.inf, torch.nan, 5.0], dtype=dtype)
    payload, memory = codec.encode({"model": x, "buffers": torch.arange(2.0)}, {}, context)
    assert {name: packed.bits for name, packed in payload.items()} == {"model": 9, "buffers": 64}
    assert len(payload["model"].content) == 2
    sent = codec.decode(payload, context)["model"]
    assert sent.dtype == dtype
    assert sent.tolist() == [1, 1, 1, -1, -1, 1, -1, -1, 1]
    again, _ = codec.encode({"model": sent}, memory, context)
    assert torch.equal(codec.decode(again, context)["model"], sent)


def test_signs_say_what_they_are() -> None:
    codec = OneBit("unit")
    assert codec.traits == Traits.IDEMPOTENT | Traits.DELTAS_ONLY
    ErrorFeedback(codec)
    with pytest.raises(UserError, match="scale 'units' is unknown; did you mean 'unit'"):
        OneBit("units")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="weighting 'sample' is unknown; did you mean 'samples'"):
        MajorityVote("sample")  # type: ignore[arg-type]
    empty = RoundContext(NO_LAYOUT, NO_LAYOUT, num_clients=5)
    payload, _ = codec.encode({"model": torch.zeros(0)}, {}, empty)
    assert payload["model"].bits == 0
    assert codec.decode(payload, empty)["model"].shape == (0,)


def test_parts_and_clients_that_must_count_equally_are_refused() -> None:
    with pytest.raises(UserError, match="MajorityVote would count what was not sent as zero: use MaskedMean"):
        Algorithm(exchange=DrawnLayers(n=2), aggregator=MajorityVote())
    parts: dict[str, Any] = {"rule": ControlVariates(), "steps": [Apply(), ControlUpdate()]}
    Algorithm(aggregator=MajorityVote(), **parts)
    with pytest.raises(UserError, match="MajorityVote weighs by samples"):
        Algorithm(aggregator=MajorityVote("samples"), **parts)


def test_every_upload_must_have_a_model() -> None:
    with pytest.raises(UserError, match="MajorityVote needs 'model', which WarmedUpAdam does not send in every round"):
        Algorithm(rule=WarmedUpAdam(warmup=1), aggregator=MajorityVote(), steps=[WarmedUpMoments(OneBit(), warmup=1)])
    with pytest.raises(
        UserError, match="MajorityVote needs 'model', which clients of CorrectedMomentum do not send before"
    ):
        Algorithm(rule=CorrectedMomentum(), aggregator=MajorityVote(), steps=[Apply(), GradientMomentum()])


RATE = 0.03
DOWN = OneBit("l1", "global")


def method() -> Algorithm:
    return Algorithm(
        uplink=OneBit("unit"),
        aggregator=MajorityVote(),
        steps=[Apply(RATE), Compress(DOWN)],
        downlink=Followed(DOWN),
    )


def test_one_bit_a_number_crosses_both_ways(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=4)
    model = Perceptron()
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    trainer.fit(model, federation(), method())
    total = trainer.run.ledger.total_bits
    assert {kind: bits for kind, bits in total["up"].items() if bits} == {"model": 4 * 3 * 26}
    # The first broadcast is whole; each later one goes to all six clients.
    assert {kind: bits for kind, bits in total["down"].items() if bits} == {
        "model": 6 * (26 * 32 + 3 * 26),
        "scalars": 6 * 3 * 32,
    }
    steps = (trainer.run.params - start) / RATE
    torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)
    assert set(steps.round().int().tolist()) <= {-4, -2, 0, 2, 4}


def test_stacked_clients_vote_the_same_and_buffers_are_averaged(make_trainer: MakeTrainer) -> None:
    pair = fits(make_trainer, Normalised(), federation, method())
    assert_same(pair)
    assert pair[0][1].run.buffers.abs().sum() > 0
