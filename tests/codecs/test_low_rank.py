"""Test LowRank against PowerSGD's iteration with one sender, and that it is refused where there are no matrices."""

from math import ceil
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer, agree, assert_same, bits_of, equal_states, fits, ran
from tensor_shapes import CNN, SMALL
from toys import Perceptron, Pruning, federation, reordered, vector

from lightning_fl.aggregators import MaskedMean
from lightning_fl.algorithms import Algorithm
from lightning_fl.callbacks import MagnitudePruning
from lightning_fl.codecs import Dense, ErrorFeedback, Followed, LowRank, TopK
from lightning_fl.errors import UserError
from lightning_fl.exchanges import LayerDivergence
from lightning_fl.link.link import Link
from lightning_fl.pruning import apply_masks
from lightning_fl.rules import SquaredGradients
from lightning_fl.slots import Draw, Payload, RoundContext, State
from lightning_fl.steps import Apply, Compress, Reconfiguration
from lightning_fl.vectors.layer_groups import layer_groups
from lightning_fl.vectors.layout import NO_LAYOUT, Layout
from lightning_fl.vectors.submodel import Submodel

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)


def setting_of(shapes: dict[str, tuple[int, ...]], is_reordered: bool = False, **fields: Any) -> RoundContext:
    layout = Layout.of(reordered({name: torch.empty(shape) for name, shape in shapes.items()}, is_reordered))
    return RoundContext(layout, NO_LAYOUT, num_clients=5, **fields)


def total(payload: Payload) -> int:
    for packed in payload.values():
        assert packed.content.numel() * packed.content.element_size() == ceil(packed.bits / 8)
    return sum(packed.bits for packed in payload.values())


def through(codec: LowRank, x: torch.Tensor, context: RoundContext, memory: State | None = None) -> torch.Tensor:
    return codec.decode(codec.encode({"model": x}, memory or {}, context)[0], context)["model"]


@pytest.mark.parametrize(("rank", "bits"), [(1, 26_400), (2, 49_920), (4, 96_960), (50, 698_880)])
def test_bits_of_the_cnn(rank: int, bits: int) -> None:
    context = setting_of(CNN)
    payload, _ = LowRank(rank).encode({"model": torch.randn(21840)}, {}, context)
    assert total(payload) == bits


@dtypes
@pytest.mark.parametrize("is_reordered", [False, True], ids=["contiguous", "reordered"])
def test_it_is_the_power_iteration_with_a_warm_start(dtype: torch.dtype, is_reordered: bool) -> None:
    codec, memory, shapes = LowRank(2), {}, {"conv": (4, 3, 2, 2), "bias": (4,), "fc": (6, 8)}
    context = setting_of(shapes, is_reordered, draw=Draw((3, 1, 11), 2, "up"), dtype=dtype)
    firsts = {name: context.draw.generator(f"data/q/model/{name}") for name in ("conv", "fc")}
    right = {name: torch.randn(m, 2, generator=firsts[name]).double().numpy() for name, m in (("conv", 12), ("fc", 8))}
    for _ in range(3):
        x = torch.randn(100).to(dtype)
        payload, memory = codec.encode({"model": x}, memory, context)
        got = context.layout.views(codec.decode(payload, context)["model"])
        assert got["bias"].dtype == dtype
        sent = context.layout.views(x)
        assert torch.equal(got["bias"], sent["bias"])
        for name, rows in (("conv", 4), ("fc", 6)):
            matrix = sent[name].double().numpy().reshape(rows, -1)
            left = oracle.gram_schmidt(matrix @ right[name])
            right[name] = matrix.T @ left
            expected = left @ right[name].T
            tolerance = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 0.05}[dtype]
            np.testing.assert_allclose(got[name].double().numpy().reshape(rows, -1), expected, atol=tolerance)
            error = np.linalg.norm(matrix - expected) ** 2
            assert error == pytest.approx(np.linalg.norm(matrix) ** 2 - np.linalg.norm(left.T @ matrix) ** 2)
    assert {name: tuple(q.shape) for name, q in memory.items()} == {
        "data/q/model/conv": (12, 2),
        "data/q/model/fc": (8, 2),
    }


@dtypes
@pytest.mark.parametrize("kind", ["random", "sparse", "constant", "zero"])
def test_it_contracts(kind: str, dtype: torch.dtype) -> None:
    x = torch.randn(109)
    x = {"random": x, "sparse": x * (torch.rand(109) < 0.05), "constant": x * 0 + 2, "zero": x * 0}[kind].to(dtype)
    context = setting_of(SMALL, dtype=dtype)
    assert sum(context.layout.sizes) == 109
    error = (x - through(LowRank(1), x, context)).double().norm()
    assert error < x.double().norm() or kind == "zero"
    if kind == "constant":
        assert error <= (0.05 if dtype == torch.bfloat16 else 1e-5) * x.double().norm()
    if kind == "zero":
        assert error == 0


@pytest.mark.parametrize("scale", [1.0, 1e-18, 1e15])
def test_matrices_of_the_rank_arrive_whatever_their_size(scale: float) -> None:
    context = setting_of({"a": (30, 20), "b": (40, 3, 3, 3)})
    matrices = [torch.randn(n, 2) @ torch.randn(2, m) * scale for n, m in ((30, 20), (40, 27))]
    x = torch.cat([matrix.flatten() for matrix in matrices])
    memory: State = {}
    for _ in range(3):
        payload, memory = LowRank(2).encode({"model": x}, memory, context)
        torch.testing.assert_close(
            LowRank(2).decode(payload, context)["model"] / scale, x / scale, atol=1e-5, rtol=1e-4
        )
    assert total(payload) == 32 * 2 * (50 + 67)


def test_matrices_whose_factors_are_no_smaller_are_exact() -> None:
    x = torch.randn(109)
    assert torch.equal(through(LowRank(6), x, setting_of(SMALL)), x)
    x = torch.randn(16)  # 2 · (4 + 4) numbers of the factors are no fewer than 4 · 4
    assert torch.equal(through(LowRank(2), x, setting_of({"a": (4, 4)})), x)


def test_a_matrix_of_zeros_leaves_the_start_as_it_was() -> None:
    codec, context, memory = LowRank(1), setting_of(SMALL), {}
    for x in (torch.randn(109), torch.zeros(109), torch.randn(109)):
        before = dict(memory)
        _, memory = codec.encode({"model": x}, memory, context)
        if not x.any():
            assert equal_states(memory, before)
    assert all(q.any() for q in memory.values())
    _, first = codec.encode({"model": torch.zeros(109)}, {}, context)
    assert all(q.any() for q in first.values())


def test_another_shape_starts_anew_and_tensors_that_stay_away_are_remembered() -> None:
    codec, whole = LowRank(1), setting_of(SMALL)
    _, memory = codec.encode({"model": torch.randn(109)}, {}, whole)
    kept = {name: q.clone() for name, q in memory.items()}
    part = setting_of({"fc": (6, 5)})
    x = torch.randn(30)
    payload, after = codec.encode({"model": x}, memory, part)
    assert equal_states(memory, kept)
    assert torch.equal(after["data/q/model/conv"], kept["data/q/model/conv"])
    assert after["data/q/model/fc"].shape == (5, 1)
    assert torch.equal(codec.decode(payload, part)["model"], through(codec, x, part))


def test_vectors_have_starts_of_their_own() -> None:
    message = {name: torch.randn(109) for name in ("model", "moments/first")} | {"buffers": torch.arange(3.0)}
    payload, memory = LowRank(1).encode(message, {}, setting_of(SMALL))
    assert len(memory) == 4
    decoded = LowRank(1).decode(payload, setting_of(SMALL))
    assert torch.equal(decoded["buffers"], message["buffers"])
    assert total(payload) == 2 * 32 * (16 + 4 + 9 + 14) + 3 * 32


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x = torch.randn(109)
    x[70] = bad
    payload, _ = LowRank(1).encode({"model": x}, {}, setting_of(SMALL))
    assert total(payload) == 32 * (16 + 4 + 9 + 14)
    assert not LowRank(1).decode(payload, setting_of(SMALL))["model"].isfinite().all()


def test_tiny_layouts() -> None:
    for shapes, x in (({}, torch.zeros(0)), ({"a": (0, 3)}, torch.zeros(0)), ({"a": ()}, torch.tensor([-0.7]))):
        payload, memory = LowRank().encode({"model": x}, {}, setting_of(shapes))
        assert total(payload) == 32 * len(x)
        assert memory == {}
        assert torch.equal(LowRank().decode(payload, setting_of(shapes))["model"], x)


def test_error_feedback_sends_all_in_the_end() -> None:
    codec, memory, context = ErrorFeedback(LowRank(1)), {}, setting_of(SMALL)
    wanted = arrived = torch.zeros(109)
    for _ in range(20):
        x = torch.randn(109)
        payload, memory = codec.encode({"model": x}, memory, context)
        wanted, arrived = wanted + x, arrived + codec.decode(payload, context)["model"]
    torch.testing.assert_close(arrived + memory["residual/model"], wanted, atol=1e-5, rtol=1e-5)
    assert memory["residual/model"].norm() < 2 * wanted.norm()
    assert memory["data/q/model/fc"].shape == (8, 1)


def test_clients_that_encode_alone_send_a_mean_of_a_higher_rank() -> None:
    context = setting_of({"a": (6, 6)})
    uploads = [torch.zeros(6, 6) for _ in range(2)]
    uploads[0][0, 0] = uploads[1][3, 4] = 1
    mean = sum(through(LowRank(1), x.flatten(), context) for x in uploads) / 2
    assert torch.linalg.matrix_rank(mean.view(6, 6)) == 2


@pytest.mark.parametrize("rank", [0, 1.5, True])
def test_ranks_outside_their_range_are_refused(rank: Any) -> None:
    with pytest.raises(UserError, match="rank, the columns of each factor, must be a whole number of at least 1"):
        LowRank(rank)


@pytest.mark.parametrize(
    "slots",
    [
        {"uplink": ErrorFeedback(LowRank(2))},
        {"downlink": Followed(LowRank(2)), "steps": [Apply(), Compress(LowRank(2))]},
    ],
    ids=["uplink", "downlink"],
)
def test_a_rank_that_factors_nothing_is_refused_before_training(slots: Any, make_trainer: MakeTrainer) -> None:
    """Test matrices of 4 × 3 and 2 × 4, whose factors of rank 2 have 14 and 12 numbers."""
    with pytest.raises(
        UserError, match=r"^LowRank\(rank=2\) would send every tensor whole, .*: give it a rank of at most 1"
    ):
        make_trainer().fit(Perceptron(), federation(), Algorithm(**slots))
    with pytest.raises(UserError, match=r"would send every tensor whole, .*: leave it out"):
        LowRank(1).check(setting_of({"a": (1, 50), "b": (2, 2), "empty": (0, 3), "bias": (9,)}))
    ErrorFeedback(LowRank(2)).check(setting_of({"a": (2, 2), "b": (5, 4)}))  # 18 numbers instead of 20


def test_the_values_of_a_sparse_codec_have_no_matrices() -> None:
    with pytest.raises(UserError, match="TopK's values are a row of numbers, which LowRank would send unchanged"):
        TopK(0.1, values=LowRank(1))


BOTH_WAYS = {
    "uplink": ErrorFeedback(LowRank(1)),
    "downlink": Followed(LowRank(1)),
    "steps": [Apply(), Compress(LowRank(1))],
}
UPLOAD = 32 * ((4 + 3) + 4 + (2 + 4) + 2)
"""Bits of the perceptron, whose matrices are 4 × 3 and 2 × 4."""


def test_every_bit_is_counted_both_ways(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=3)
    trainer.fit(Perceptron(), federation(), Algorithm(**BOTH_WAYS))
    assert bits_of(trainer, "up") == {"model": 3 * UPLOAD}
    assert bits_of(trainer, "down") == {"model": 6 * UPLOAD}
    memory = next(iter(trainer.run.client_memory.values()))
    assert {name: tuple(x.shape) for name, x in memory.items()} == {
        "data/q/model/hidden.weight": (3, 1),
        "data/q/model/output.weight": (4, 1),
        "residual/model": (26,),
    }


def test_stacked_clients_send_the_same(make_trainer: MakeTrainer) -> None:
    assert_same(fits(make_trainer, Perceptron(), federation, Algorithm(**BOTH_WAYS)))


def test_a_resumed_run_is_the_unbroken_one(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> None:
    models = [Perceptron() for _ in range(3)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    make_trainer(max_rounds=4, precision="64-true").fit(models[0], federation(), Algorithm(**BOTH_WAYS))
    for rounds, model, resume in ((2, models[1], {}), (4, models[2], {"ckpt_path": "last"})):
        resumed = make_trainer(max_rounds=rounds, precision="64-true", **keeps_files)
        resumed.fit(model, federation(), Algorithm(**BOTH_WAYS), **resume)
    assert vector(models[0]).tolist() == vector(models[2]).tolist()


def test_a_client_that_sends_layers_keeps_the_starts_of_the_others(make_trainer: MakeTrainer) -> None:
    model = Perceptron()
    layout = Layout.of(dict(model.named_parameters()))
    layers = layer_groups(model)
    link, memory = Link(RoundContext(layout, NO_LAYOUT, num_clients=6), LowRank(1), Dense()), []
    for wanted in ((True, False), (False, True), (True, False)):
        kept = [torch.tensor([is_sent]) for is_sent in wanted]
        link.send_up(0, {"model": torch.randn(26)}, Submodel.from_groups(layout, NO_LAYOUT, layers, kept))
        memory.append(dict(link._pending[0]))
    assert link.ledger.bits("up") == 32 * (2 * (7 + 4) + 6 + 2)
    hidden, output = "data/q/model/hidden.weight", "data/q/model/output.weight"
    assert [set(kept) for kept in memory] == [{hidden}, {hidden, output}, {hidden, output}]
    assert torch.equal(memory[0][hidden], memory[1][hidden])
    assert torch.equal(memory[1][output], memory[2][output])
    assert not torch.equal(memory[1][hidden], memory[2][hidden])

    trainer = make_trainer(max_rounds=3, clients_per_round=6)
    method = Algorithm(uplink=ErrorFeedback(LowRank(1)), exchange=LayerDivergence(n=3), aggregator=MaskedMean())
    trainer.fit(Perceptron(), federation(), method)
    assert bits_of(trainer, "up")["model"] == 3 * UPLOAD  # three clients send each layer


def test_removed_filters_start_anew(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=4, callbacks=[Pruning(2)])
    trainer.fit(Perceptron(), federation(), Algorithm(uplink=ErrorFeedback(LowRank(1))))
    assert bits_of(trainer, "up")["model"] == 3 * 32 * ((3 + 3) + 3 + (2 + 3) + 2)
    assert trainer.run.num_rejected == 0


def test_a_pruning_mask_is_refused(make_trainer: MakeTrainer) -> None:
    clause = r"LowRank\(rank=2\)\)? needs matrices, of which a mask leaves rows of numbers: use another codec"
    rule = SquaredGradients(interval=1)
    step = Reconfiguration(rule, initial_passes=0)
    for slots in ({"uplink": ErrorFeedback(LowRank())}, {"compressed": Compress(LowRank())}):
        steps = [Apply(), *([slots.pop("compressed")] if "compressed" in slots else []), step]
        with pytest.raises(UserError, match=f"Reconfiguration sets a pruning mask, and .*{clause}"):
            Algorithm(rule=rule, steps=steps, **slots)  # type: ignore[arg-type]

    class Masks(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            apply_masks(pl_module, {"hidden.weight": torch.tensor([[True, False, True]] * 4)})

    method, clause = Algorithm(uplink=ErrorFeedback(LowRank(1))), clause.replace("2", "1")
    for callback, source in ((Masks(), "a callback"), (MagnitudePruning(0.3, prune_epoch=1), "MagnitudePruning")):
        trainer = make_trainer(callbacks=[callback])
        with pytest.raises(UserError, match=f"^{source} sets a pruning mask, and .*{clause}"):
            trainer.fit(Perceptron(), federation(), method)
        assert trainer.current_epoch == 0


def test_it_needs_error_feedback() -> None:
    with pytest.raises(UserError, match="the uplink LowRank would lose most of every upload for good"):
        Algorithm(uplink=LowRank())
    with pytest.raises(UserError, match=r"Compress\(LowRank\) needs error feedback"):
        Compress(LowRank(), feedback=False)


@pytest.mark.slow
def test_two_processes_share_the_starts(tmp_path: Path) -> None:
    method = "Algorithm --algorithm.uplink ErrorFeedback --algorithm.uplink.codec LowRank --trainer.clients_per_round 9"
    agree(ran(tmp_path / "one", algorithm=method), ran(tmp_path / "two", algorithm=method, num_processes=2))
