"""Test the sizes of uploads by layer, and their ideal sizes against whole-number arithmetic."""

from math import comb, factorial, prod
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer, agree, ran
from hypothesis import given
from hypothesis import strategies as st
from toys import Normalised, Perceptron, Recorded, federation, read_rows

from lightning_fl.algorithms import Algorithm, FedAvg, FedLDF
from lightning_fl.callbacks import CommunicationMeter
from lightning_fl.codecs import (
    EDEN,
    QSGD,
    STC,
    Blockwise,
    Cast,
    Changes,
    Dense,
    EntropyCoded,
    ErrorFeedback,
    FairTopK,
    Followed,
    LowRank,
    OneBit,
    Quantiser,
    RandomK,
    SharedTopK,
    TernGrad,
    TopK,
)
from lightning_fl.errors import UserError
from lightning_fl.link.messages import UplinkMessage
from lightning_fl.slots import Codec, RoundContext
from lightning_fl.steps import Apply, Compress
from lightning_fl.vectors.layer_groups import Group
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

CODECS: dict[str, Codec] = {
    "dense": Dense(),
    "top": TopK(0.2),
    "all": TopK(1.0),
    "shared": SharedTopK(0.3),
    "fair": FairTopK(0.2),
    "one bit": OneBit(),
    "one bit, one scale": OneBit(groups="global"),
    "four bits": Quantiser("uniform", 4),
    "with feedback": ErrorFeedback(TopK(0.2)),
    "values in blocks": TopK(0.2, values=Blockwise(bits=4)),
    "blocks": Blockwise(bits=4),
    "16 bits": Cast(),
    "rotated": EDEN(2),
    "random levels": QSGD(4, bucket=8),
    "random levels in Elias's code": QSGD(1, bucket=8, coding="elias"),
    "ternary": TernGrad(),
    "range code": EntropyCoded(TernGrad()),
    "random numbers": RandomK(0.2),
    "sparse ternary": ErrorFeedback(STC(0.2)),
    "low rank": ErrorFeedback(LowRank(1)),
}
WHOLE = ("random levels in Elias's code",)
"""Codecs with as many bits for some numbers as for others, which count as shared."""
LAYOUT = Layout(("a", "b"), ((4, 2), (5,)))
CONTEXT = RoundContext(LAYOUT, NO_LAYOUT, num_clients=3)
GROUPS = [Group("first", ("a",)), Group("second", ("b",))]


def crossing(codec: Codec, x: torch.Tensor) -> UplinkMessage:
    payload, _ = codec.encode({"model": x}, {}, CONTEXT)
    return UplinkMessage(0, {"model": x}, codec.decode(payload, CONTEXT), {}, [(codec, payload)], CONTEXT, GROUPS)


def ceil_log2(value: int) -> int:
    """Return ⌈log2 value⌉ exactly."""
    return (value - 1).bit_length()


def test_layers_by_hand() -> None:
    x = torch.tensor([9.0, 0, 8, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0])
    assert crossing(Dense(), x).bits_by_layer() == {"first": 8 * 32, "second": 5 * 32, "shared": 0}
    # Three of 13 numbers, two of them in the first layer; positions are a list of three times four bits.
    assert crossing(TopK(0.25), x).bits_by_layer() == {"first": 64, "second": 32, "shared": 12}
    assert crossing(OneBit(), x).bits_by_layer() == {"first": 8 + 32, "second": 5 + 32, "shared": 0}
    assert crossing(OneBit(groups="global"), x).bits_by_layer() == {"first": 8, "second": 5, "shared": 32}
    assert crossing(Quantiser("uniform", 4), x).bits_by_layer() == {"first": 32 + 32, "second": 20 + 32, "shared": 0}
    # Two blocks and two tensors: the blocks are no tensors. 13 numbers in base 3 take 24 bits, which no number has alone.
    assert crossing(Blockwise(bits=4, block_size=7), x).bits_by_layer() == {"first": 32, "second": 20, "shared": 64}
    assert crossing(QSGD(4, bucket=7), x).bits_by_layer() == {"first": 32, "second": 20, "shared": 64}
    assert crossing(TernGrad(), x).bits_by_layer() == {"first": 32, "second": 32, "shared": 24}
    assert crossing(TernGrad(packing="two_bits"), x).bits_by_layer() == {
        "first": 16 + 32,
        "second": 10 + 32,
        "shared": 0,
    }
    # 13 of 64 rotated numbers, and one scale. Elias's code happens to take 13 bits here, but not one for each number.
    assert crossing(EDEN(2), x).bits_by_layer() == {"first": 16, "second": 10, "shared": 2 * 51 + 32}
    coded = crossing(QSGD(1, bucket=2, coding="elias"), (torch.arange(13) == 4) * 1.0)
    assert coded.bits_by_layer() == {"first": 0, "second": 0, "shared": 13 + 7 * 32}
    # A matrix of 4 × 2 has factors of 4 and 2 numbers.
    assert crossing(LowRank(1), x).bits_by_layer() == {"first": 6 * 32, "second": 5 * 32, "shared": 0}
    signs = TopK(0.25, values=OneBit())
    assert crossing(signs, x).bits_by_layer() == {"first": 2 + 32, "second": 1 + 32, "shared": 12}


def test_a_tensor_without_numbers_has_no_scale() -> None:
    layout = Layout(("a", "none", "b"), ((4, 2), (0,), (5,)))
    context, x, groups = RoundContext(layout, NO_LAYOUT, num_clients=3), torch.ones(13), [Group("first", ("a", "none"))]
    payload, _ = TernGrad(packing="two_bits").encode({"model": x}, {}, context)
    found = UplinkMessage(0, {}, {}, {}, [(TernGrad(packing="two_bits"), payload)], context, groups)
    assert found.bits_by_layer() == {"first": 16 + 32, "shared": 10 + 32}


def test_numbers_drawn_without_a_seed_in_the_message_belong_to_their_layers(make_trainer: MakeTrainer) -> None:
    seen = Recorded()
    make_trainer(callbacks=[seen]).fit(Perceptron(), federation(), Algorithm(uplink=RandomK(0.3, seed_bits=0)))
    for upload in [c for crossings in seen.rounds.values() for c in crossings]:
        for name, part in {"hidden": slice(0, 16), "output": slice(16, 26)}.items():
            assert upload.bits_by_layer()[name] == 32 * int(upload.decoded["model"][part].count_nonzero())


@pytest.mark.parametrize(
    ("codec", "counts"),
    [
        (Cast(), [4, 3]),
        (Cast("bfloat16"), [0, 0]),
        (TopK(0.2, values=Cast()), [2, 2]),
        # The second upload adds what the first has lost: 64,000 + 4,496 is beyond the limit.
        (ErrorFeedback(Cast()), [4, 4]),
        (ErrorFeedback(TopK(0.2, values=Cast())), [2, 2]),
        (Dense(), [None, None]),
        (TopK(0.2), [None, None]),
    ],
    ids=str,
)
def test_numbers_that_are_cut_off_are_counted(codec: Codec, counts: list[int | None]) -> None:
    limit, memory, found = 65_504.0, {}, []
    first = torch.tensor([70_000.0, -1e6, limit, -limit, 1e5, 80_000, 3, 0, 0, 0, 0, 0, 0])
    for x in (first, torch.where(first == 70_000, 64_000.0, first)):
        payload, memory = codec.encode({"model": x, "buffers": torch.tensor([1e6])}, memory, CONTEXT)
        message = {"model": x, "buffers": torch.tensor([1e6])}
        parts = [(Dense(), {}), (codec, payload)]
        arrived = codec.decode(payload, CONTEXT)
        found.append(UplinkMessage(0, message, arrived, memory, parts, CONTEXT, GROUPS).num_saturated)
    assert found == counts


@pytest.mark.long
@given(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0]), min_size=13, max_size=13))
def test_ideal_sizes_are_those_of_whole_number_arithmetic(values: list[float]) -> None:
    x = torch.tensor(values)
    for codec, num_values, scales in ((OneBit(), 2, 64), (Quantiser("uniform", 3, "global"), 8, 32)):
        found = crossing(codec, x)
        ((_, payload),) = found.parts
        symbols, of = codec.symbols("model", payload, CONTEXT) or (x, 0)
        assert of == num_values
        counts = torch.bincount(symbols.long(), minlength=num_values).tolist()
        order = factorial(13) // prod(map(factorial, counts))
        ideal = ceil_log2(comb(13 + of - 1, of - 1)) + ceil_log2(order)
        assert found.entropy_bits == min(ideal, payload["model"].bits) + scales
    assert crossing(TopK(0.25), x).entropy_bits == 3 * 32 + ceil_log2(comb(13, 3))
    assert crossing(Dense(), x).entropy_bits == 13 * 32


def test_the_reference_positions() -> None:
    x = torch.randn(21_840, generator=torch.Generator().manual_seed(0))
    layout = Layout(("a",), ((21_840,),))
    context = RoundContext(layout, NO_LAYOUT, num_clients=1)
    payload, _ = TopK(0.05).encode({"model": x}, {}, context)
    found = UplinkMessage(0, {}, {}, {}, [(TopK(0.05), payload)], context, [])
    assert found.bits == 1092 * 32 + 16_380
    assert found.entropy_bits == 1092 * 32 + 6_249
    assert found.bits_by_layer() == {"shared": found.bits}


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_an_ideal_size_is_never_above_what_is_sent(codec: Codec) -> None:
    generator = torch.Generator().manual_seed(0)
    for x in (torch.zeros(13), torch.ones(13), torch.randn(13, generator=generator), (torch.arange(13) == 4) * 1e30):
        found = crossing(codec, x)
        assert found.entropy_bits <= found.bits


@pytest.mark.parametrize(
    ("codec", "masks"),
    [
        (TopK(0.25, values=Cast()), [(400, 100)]),
        (TopK(0.25, values=TopK(0.25)), [(400, 100), (100, 25)]),
        (RandomK(0.25, "none", values=TopK(0.25)), [(100, 25)]),
        (EntropyCoded(TopK(0.25, values=Cast())), [(400, 100)]),
        (ErrorFeedback(TopK(0.25, values=Cast())), [(400, 100)]),
    ],
    ids=str,
)
def test_positions_of_values_with_a_codec_have_their_ideal_size(codec: Codec, masks: list[tuple[int, int]]) -> None:
    context = RoundContext(Layout(("a",), ((400,),)), NO_LAYOUT, num_clients=1)
    x = torch.randn(400, generator=torch.Generator().manual_seed(0))
    payload, _ = codec.encode({"model": x}, {}, context)
    found = UplinkMessage(0, {}, {}, {}, [(codec, payload)], context, [])
    rest = sum(packed.bits for name, packed in payload.items() if not name.startswith("mask"))
    assert found.entropy_bits == rest + sum(ceil_log2(comb(d, k)) for d, k in masks)


def test_positions_of_changes_have_their_ideal_size() -> None:
    context = RoundContext(Layout(("a",), ((400,),)), NO_LAYOUT, num_clients=1)
    before = torch.zeros(400)
    message = {"model": before + (torch.arange(400) < 30), "moments/first": before}
    payload, _ = Changes().encode(message, {"model": before, "moments/first": before}, context)
    found = UplinkMessage(0, {}, {}, {}, [(Changes(), payload)], context, [])
    assert found.entropy_bits == 2 * 30 * 32 + ceil_log2(comb(400, 30)) < found.bits


@pytest.mark.parametrize("name", CODECS)
def test_layers_add_up_to_what_is_sent(
    name: str, make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    meter = CommunicationMeter(per_layer=True, entropy=True)
    trainer = make_trainer(callbacks=[meter], **keeps_files)
    trainer.fit(Normalised(), federation(), Algorithm(uplink=CODECS[name]))
    for row in read_rows(tmp_path):
        layers = {key: int(float(value)) for key, value in row.items() if key.startswith("comm/uplink_bits/layer/")}
        assert sum(layers.values()) == int(row["comm/uplink_bits"])
        assert layers["comm/uplink_bits/layer/shared"] >= 3 * 6 * 32, "the float buffers"
        assert layers["comm/uplink_bits/layer/hidden"] > 0 or name in WHOLE
        assert int(float(row["comm/uplink_entropy_bits"])) <= int(row["comm/uplink_bits"])


class Broadcasts(L.Callback):
    """Callback that keeps the model that each round begins with, and the messages of the server."""

    def __init__(self) -> None:
        self.models: list[torch.Tensor] = []
        self.clients: list[int | None] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.models.append(trainer.run.params.clone())

    def on_server_message(self, trainer: Any, pl_module: Any, message: Any) -> None:
        self.clients.append(message.client)


def test_the_ideal_size_of_a_broadcast_counts_for_each_client_to_which_it_is_charged(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    codec, seen = Quantiser("uniform", 3, "global"), Broadcasts()
    trainer = make_trainer(callbacks=[CommunicationMeter(entropy=True), seen], **keeps_files)
    # Both ways through one codec: the uplink's messages are not the server's.
    trainer.fit(Normalised(), federation(), Algorithm(uplink=codec, downlink=codec))
    assert seen.clients == [None, None]
    for row, model in zip(read_rows(tmp_path), seen.models, strict=True):
        context = RoundContext(trainer.run.layout, NO_LAYOUT, num_clients=6)
        payload, _ = codec.encode({"model": model}, {}, context)
        symbols, of = codec.symbols("model", payload, context) or (model, 0)
        counts, n = torch.bincount(symbols.long(), minlength=of).tolist(), len(model)
        ideal = ceil_log2(comb(n + of - 1, of - 1)) + ceil_log2(factorial(n) // prod(map(factorial, counts)))
        sent = int(row["comm/downlink_bits"])
        assert sent - int(float(row["comm/downlink_entropy_bits"])) == 3 * (3 * n - ideal)
        assert float(row["comm/uplink_entropy_bits"]) != float(row["comm/downlink_entropy_bits"])


@pytest.mark.parametrize(
    "method",
    [
        FedAvg(),
        FedLDF(n=1),
        Algorithm(steps=(Apply(), Compress(OneBit("l1"))), downlink=Followed(OneBit("l1"))),
    ],
    ids=["dense", "other messages", "followed"],
)
def test_messages_of_the_server_without_another_code_count_as_sent(
    method: Algorithm, make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    make_trainer(callbacks=[CommunicationMeter(entropy=True)], **keeps_files).fit(Perceptron(), federation(), method)
    for row in read_rows(tmp_path):
        assert float(row["comm/downlink_entropy_bits"]) == float(row["comm/downlink_bits"]) > 0


def test_layers_that_are_not_sent_cost_nothing(make_trainer: MakeTrainer) -> None:
    seen = Recorded()
    trainer = make_trainer(callbacks=[seen], clients_per_round=4, max_rounds=3)
    trainer.fit(Perceptron(), federation(), FedLDF(n=1))
    uploads = [c for crossings in seen.rounds.values() for c in crossings if "model" in c.sent]
    assert uploads
    for upload in uploads:
        for name, part in {"hidden": slice(0, 16), "output": slice(16, 26)}.items():
            numbers = len(upload.sent["model"][part]) if upload.sent["model"][part].any() else 0
            assert upload.bits_by_layer()[name] == 32 * numbers


@pytest.mark.parametrize("asked", [{"per_layer": True}, {"entropy": True}])
def test_uploads_need_clients(asked: dict[str, Any], make_stock_trainer: Any) -> None:
    with pytest.raises(UserError, match="use FederatedTrainer"):
        make_stock_trainer(callbacks=[CommunicationMeter(**asked)]).fit(Perceptron(), datamodule=federation())


@pytest.mark.slow
def test_two_processes_count_the_same_sizes(tmp_path: Path) -> None:
    meter = (
        "--trainer.callbacks+=CommunicationMeter --trainer.callbacks.entropy true --trainer.callbacks.per_layer true"
    )
    method = f"Algorithm --algorithm.uplink QSGD --algorithm.downlink Blockwise --trainer.clients_per_round 9 {meter}"
    method += " --trainer.callbacks+=CodecError --algorithm.exchange LayerDivergence --algorithm.exchange.n 3"
    method += " --algorithm.aggregator MaskedMean"
    one, two = ran(tmp_path / "one", algorithm=method), ran(tmp_path / "two", algorithm=method, num_processes=2)
    agree(one, two)
    assert float(one[0][0]["comm/downlink_entropy_bits"]) < float(one[0][0]["comm/downlink_bits"])
