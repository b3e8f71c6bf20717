"""Test TwoTurns against PowerSGD as its authors run it, with all clients, and against LowRank of the mean."""

from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer, agree, assert_same, bits_of, fits, ran
from tensor_shapes import CNN, SMALL
from torch import Tensor
from toys import Perceptron, Pruning, federation, reordered, vector

from lightning_fl import UserError
from lightning_fl.aggregators import KeepUploads, MajorityVote, MaskedMean, NormalisedMean, WeightedMean
from lightning_fl.algorithms import Algorithm
from lightning_fl.callbacks import CodecError, CommunicationMeter, MagnitudePruning
from lightning_fl.codecs import Dense, ErrorFeedback, LowRank, TopK
from lightning_fl.exchanges import GradientTurn, TwoTurns
from lightning_fl.link.link import Link
from lightning_fl.processes import mean
from lightning_fl.rules import ControlVariates, CorrectedMomentum, SquaredGradients
from lightning_fl.slots import Aggregator, Draw, Exchange, Result, RoundContext, State, Upload
from lightning_fl.steps import Apply, ControlUpdate, GradientMomentum, Reconfiguration
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

NUMBERS = 109
METHOD = Algorithm(exchange=TwoTurns(1))
WEIGHTS = (3.0, 1.0, 2.0)


class OneProcess:
    """Stand-in for the Fabric of one process."""

    world_size = 1


def setting_of(
    shapes: dict[str, tuple[int, ...]], round: int = 0, is_reordered: bool = False, **fields: Any
) -> RoundContext:
    layout = Layout.of(reordered({name: torch.empty(shape) for name, shape in shapes.items()}, is_reordered))
    return RoundContext(layout, NO_LAYOUT, num_clients=3, draw=Draw((3, round, 11), 3), **fields)


def collected(
    exchange: Exchange,
    context: RoundContext,
    deltas: list[Tensor],
    memory: dict[int, State] | None = None,
    aggregator: Aggregator = WeightedMean(),  # noqa: B008
) -> tuple[dict[int, Upload], Link]:
    """Return the uploads of some clients, and the link that they have crossed."""
    clients = range(len(deltas))
    link = Link(
        context,
        Dense(),
        Dense(),
        client_memory=memory or {},
        mean=lambda uploads: mean(OneProcess(), aggregator, context, clients, uploads),  # type: ignore[arg-type]
    )
    results = [Result(k, {"model": deltas[k]}, WEIGHTS[k], {}, {}, {}, num_steps=1) for k in clients]
    return {upload.result.client: upload for upload in exchange.collect(results, link)}, link


def merged(uploads: dict[int, Upload]) -> Tensor:
    weights = [upload.result.weight for upload in uploads.values()]
    return sum(w * u.message["model"].double() for w, u in zip(weights, uploads.values(), strict=True)) / sum(weights)


def start_of(context: RoundContext, tensor: str, m: int, rank: int) -> Tensor:
    return torch.randn(m, rank, generator=context.draw.generator(f"model/right/{tensor}"))


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_bits_of_the_cnn(rank: int) -> None:
    uploads, link = collected(TwoTurns(rank), setting_of(CNN), [torch.randn(21840) for _ in range(3)])
    assert len(uploads) == 3
    rows, columns, whole = 10 + 20 + 50 + 10, 25 + 250 + 320 + 50, 90
    first = rank * rows
    assert link.ledger.bits("down") == 3 * 32 * first
    assert link.ledger.bits("up") == 3 * 32 * (first + rank * columns + whole)
    assert link.ledger.bits("up") == 3 * {1: 26_400, 2: 49_920, 4: 96_960}[rank]
    if rank == 2:
        assert link.ledger.bits("down") == 3 * 5_760


@pytest.mark.parametrize("is_reordered", [False, True], ids=["contiguous", "reordered"])
def test_with_all_clients_it_is_the_authors_loop(is_reordered: bool) -> None:
    """Compare the merged uploads of four rounds with PowerSGD, whose clients keep e_k = z_k − M̂."""
    memory: dict[int, State] = {}
    errors = [np.zeros(NUMBERS) for _ in range(3)]
    shares = np.array(WEIGHTS) / sum(WEIGHTS)
    for round in range(4):
        context = setting_of(SMALL, round, is_reordered, dtype=torch.float64)
        deltas = [torch.randn(NUMBERS, dtype=torch.float64) for _ in range(3)]
        uploads, link = collected(TwoTurns(2), context, deltas, memory)
        wanted = [torch.from_numpy(delta.numpy() + e) for delta, e in zip(deltas, errors, strict=True)]
        expected = torch.from_numpy(sum(p * z.numpy() for p, z in zip(shares, wanted, strict=True)))
        views, of_clients = context.layout.views(expected), [context.layout.views(z) for z in wanted]
        for name, n, m in (("conv", 4, 12), ("fc", 6, 8)):
            right = start_of(context, name, m, 2).double().numpy()
            matrices = [z[name].reshape(n, m).numpy() for z in of_clients]
            left = oracle.gram_schmidt(sum(p * (matrix @ right) for p, matrix in zip(shares, matrices, strict=True)))
            mean_right = sum(p * (matrix.T @ left) for p, matrix in zip(shares, matrices, strict=True))
            views[name].copy_(torch.from_numpy(left @ mean_right.T).view(views[name].shape))
        torch.testing.assert_close(merged(uploads), expected, rtol=1e-9, atol=1e-9)
        errors = [z.numpy() - expected.numpy() for z in wanted]
        for tensor in ("bias", "thin"):  # sent whole, so nothing is left
            for e in errors:
                context.layout.views(torch.from_numpy(e))[tensor].zero_()
        memory = {client: link.commit(client) for client in uploads}
        kept = sum(p * memory[client]["residual/model"].numpy() for client, p in enumerate(shares))
        np.testing.assert_allclose(kept, sum(p * e for p, e in zip(shares, errors, strict=True)), atol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 0.1)], ids=str
)
def test_it_is_low_rank_of_the_mean(dtype: torch.dtype, tolerance: float) -> None:
    context = setting_of(SMALL, dtype=dtype)
    deltas = [torch.randn(NUMBERS, dtype=dtype) for _ in range(3)]
    uploads, link = collected(TwoTurns(2), context, deltas)
    average = (sum(w * x.double() for w, x in zip(WEIGHTS, deltas, strict=True)) / sum(WEIGHTS)).to(dtype)
    starts = {f"data/q/model/{name}": start_of(context, name, m, 2) for name, m in (("conv", 12), ("fc", 8))}
    codec = LowRank(2)
    expected = codec.decode(codec.encode({"model": average}, starts, context)[0], context)["model"]
    torch.testing.assert_close(merged(uploads), expected.double(), rtol=tolerance, atol=tolerance)
    for client, upload in uploads.items():
        assert upload.message["model"].dtype == dtype
        kept = link.commit(client)["residual/model"]
        torch.testing.assert_close(kept + upload.message["model"], deltas[client], rtol=tolerance, atol=tolerance)


def test_the_mean_has_the_rank_and_that_of_clients_that_encode_alone_has_not() -> None:
    context = setting_of({"a": (6, 6)})
    deltas = [torch.zeros(6, 6) for _ in range(2)]
    deltas[0][0, 0] = deltas[1][3, 4] = 1
    uploads, _ = collected(TwoTurns(1), context, [x.flatten() for x in deltas])
    assert torch.linalg.matrix_rank(merged(uploads).float().view(6, 6)) == 1
    alone = []
    for delta in deltas:
        payload, _ = LowRank(1).encode({"model": delta.flatten()}, {}, context)
        alone.append(LowRank(1).decode(payload, context)["model"].view(6, 6))
    assert torch.linalg.matrix_rank((3 * alone[0] + alone[1]) / 4) == 2


def test_a_mean_of_the_rank_arrives_whatever_the_clients_send() -> None:
    context = setting_of({"a": (30, 20), "b": (40, 3, 3, 3)})
    average = torch.cat([(torch.randn(n, 2) @ torch.randn(2, m)).flatten() for n, m in ((30, 20), (40, 27))])
    noise = torch.randn(len(average))
    uploads, _ = collected(TwoTurns(2), context, [average + noise, average - noise, average - noise])  # 3 + 1 − 2 …
    torch.testing.assert_close(merged(uploads).float(), average, rtol=1e-3, atol=1e-3)


def test_tensors_whose_factors_are_no_smaller_are_exact_and_alone_refused() -> None:
    context, exchange = setting_of(SMALL), TwoTurns(6)
    deltas = [torch.randn(NUMBERS) for _ in range(3)]
    uploads, link = collected(exchange, context, deltas)
    assert all(torch.equal(uploads[client].message["model"], delta) for client, delta in enumerate(deltas))
    assert (link.ledger.bits("up"), link.ledger.bits("down")) == (3 * 32 * NUMBERS, 0)
    with pytest.raises(
        UserError, match=r"TwoTurns\(rank=6\) would send every tensor whole, .*: give it a rank of at most 3\."
    ):
        exchange.check(context, 3)
    TwoTurns(1).check(context, 3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("position", [48, 70], ids=["whole", "factored"])
def test_clients_that_are_not_finite_take_no_part_in_the_second_turn(bad: float, position: int) -> None:
    context, deltas = setting_of(SMALL), [torch.randn(NUMBERS) for _ in range(3)]
    without, _ = collected(TwoTurns(1), context, deltas)
    deltas[1][position] = bad
    uploads, link = collected(TwoTurns(1), context, deltas)
    assert link.ledger.bits("up") == 32 * (3 * (4 + 6) + 2 * (12 + 8 + 4 + 9))
    assert link.ledger.bits("down") == 2 * 32 * (4 + 6)
    assert link.commit(1) == {}
    del uploads[1]
    average = (3 * deltas[0] + 2 * deltas[2]) / 5
    starts = {f"data/q/model/{name}": start_of(context, name, m, 1) for name, m in (("conv", 12), ("fc", 8))}
    payload, _ = LowRank(1).encode({"model": average}, starts, context)
    expected = LowRank(1).decode(payload, context)["model"]
    torch.testing.assert_close(merged(uploads).float(), expected, rtol=1e-5, atol=1e-5)
    assert without.keys() == {0, 1, 2}


def test_a_client_that_is_rejected_later_leaves_the_projection_of_the_others() -> None:
    context, deltas = setting_of({"a": (6, 8)}), [torch.randn(48) for _ in range(3)]
    uploads, link = collected(TwoTurns(2), context, deltas)
    right = start_of(context, "a", 8, 2)
    shares = torch.tensor(WEIGHTS) / sum(WEIGHTS)
    left = torch.linalg.qr(sum(p * (x.view(6, 8) @ right) for p, x in zip(shares, deltas, strict=True))).Q
    del uploads[1]  # the loss guard has rejected it, so it keeps the error that it had, none
    average = ((3 * deltas[0] + 2 * deltas[2]) / 5).view(6, 8)
    torch.testing.assert_close(merged(uploads).float().view(6, 8), left @ left.T @ average, rtol=1e-4, atol=1e-5)
    assert not link.client_memory


def test_nobody_is_left() -> None:
    uploads, link = collected(TwoTurns(1), setting_of(SMALL), [torch.full((NUMBERS,), torch.nan)] * 3)
    assert len(uploads) == 3
    assert (link.ledger.bits("up"), link.ledger.bits("down")) == (3 * 32 * 10, 0)


def test_zeros_stay_zeros() -> None:
    uploads, link = collected(TwoTurns(1), setting_of(SMALL), [torch.zeros(NUMBERS)] * 3)
    assert not merged(uploads).any()
    assert not link.commit(0)["residual/model"].any()


# ---------------------------------------------------------------------------------------------------------- in runs

UP, DOWN = 32 * ((4 + 3) + 4 + (2 + 4) + 2), 32 * (26 + 4 + 2)
"""Bits of the perceptron, whose matrices are 4 × 3 and 2 × 4; the model goes down first."""


def test_every_bit_is_counted(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=3)
    trainer.fit(Perceptron(), federation(), METHOD)
    assert bits_of(trainer, "up") == {"model": 3 * UP}
    assert bits_of(trainer, "down") == {"model": 3 * DOWN}
    assert {name: tuple(x.shape) for name, x in next(iter(trainer.run.client_memory.values())).items()} == {
        "residual/model": (26,)
    }


def test_stacked_clients_send_the_same(make_trainer: MakeTrainer) -> None:
    assert_same(fits(make_trainer, Perceptron(), federation, METHOD))


def test_a_resumed_run_is_the_unbroken_one(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> None:
    models = [Perceptron() for _ in range(3)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    make_trainer(max_rounds=4, precision="64-true").fit(models[0], federation(), METHOD)
    for rounds, model, resume in ((2, models[1], {}), (4, models[2], {"ckpt_path": "last"})):
        make_trainer(max_rounds=rounds, precision="64-true", **keeps_files).fit(model, federation(), METHOD, **resume)
    assert vector(models[0]).tolist() == vector(models[2]).tolist()


def test_clients_that_are_rejected_drop_out_or_straggle(make_trainer: MakeTrainer) -> None:
    x, y = (torch.randn(40, width, generator=torch.Generator().manual_seed(1)) for width in (3, 2))
    y[0] = torch.nan
    trainer = make_trainer(max_rounds=4, clients_per_round=6, dropout_rate=0.3, straggler_rate=0.5)
    trainer.fit(Perceptron(), federation(train=(x, y)), METHOD)
    run = trainer.run
    assert 0 < run.num_rejected < run.num_uploads < 4 * 6
    assert len(run.client_memory) == 5
    assert run.params.isfinite().all()
    total = run.ledger.total_bits
    left = 32 * (4 + 2)
    accepted = run.num_uploads - run.num_rejected
    assert total["up"]["model"] == run.num_rejected * left + accepted * UP
    assert total["down"]["model"] == 4 * 6 * 32 * 26 + accepted * left


def test_it_follows_removed_filters_and_a_turn_of_gradients(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=4, callbacks=[Pruning(2)])
    trainer.fit(Perceptron(), federation(), METHOD)
    assert bits_of(trainer, "up")["model"] == 3 * 32 * ((3 + 3) + 3 + (2 + 3) + 2)
    rule, steps = CorrectedMomentum(), [Apply(), GradientMomentum()]
    method = Algorithm(rule=rule, steps=steps, exchange=GradientTurn(TwoTurns(1)))
    trainer = make_trainer(max_rounds=2)
    trainer.fit(Perceptron(), federation(), method)
    assert bits_of(trainer, "up") == {"model": 3 * UP, "moments": 3 * 32 * 26}


def test_callbacks_see_what_arrives(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=2, callbacks=[CodecError(), CommunicationMeter(per_layer=True)])
    trainer.fit(Perceptron(), federation(), METHOD)
    columns = {name: float(x) for name, x in trainer.callback_metrics.items()}
    assert 0 < columns["codec/error"] < 1
    assert columns["codec/residual"] > 0
    layers = {name: bits for name, bits in columns.items() if name.startswith("comm/uplink_bits/layer/")}
    assert sum(layers.values()) == columns["comm/uplink_bits"] == 3 * UP
    assert layers["comm/uplink_bits/layer/hidden"] == 3 * 32 * (4 + 3 + 4)
    assert layers["comm/uplink_bits/layer/output"] == 3 * 32 * (2 + 4 + 2)


def test_what_does_not_fit_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(
        UserError, match="TwoTurns compresses the uploads, and the uplink ErrorFeedback would compress them"
    ):
        Algorithm(exchange=TwoTurns(), uplink=ErrorFeedback(LowRank()))
    Algorithm(exchange=TwoTurns(), uplink=TopK(1.0))
    for aggregator in (MaskedMean(), MajorityVote(), NormalisedMean(), KeepUploads(WeightedMean())):
        clause = f"the mean of the uploads, which {type(aggregator).__name__} does not take: use WeightedMean"
        with pytest.raises(UserError, match=clause):
            Algorithm(exchange=TwoTurns(), aggregator=aggregator)
    with pytest.raises(UserError, match="must receive all of it: TwoTurns sends parts, use OneShot"):
        Algorithm(rule=ControlVariates(), steps=[Apply(), ControlUpdate()], exchange=TwoTurns())
    clause = r"TwoTurns\(rank=1\) needs matrices, of which a mask leaves rows of numbers: use another exchange"
    rule = SquaredGradients(interval=1)
    with pytest.raises(UserError, match=f"Reconfiguration sets a pruning mask, and {clause}"):
        Algorithm(rule=rule, exchange=TwoTurns(1), steps=[Apply(), Reconfiguration(rule, initial_passes=0)])
    trainer = make_trainer(callbacks=[MagnitudePruning(0.3, prune_epoch=1)])
    with pytest.raises(UserError, match=f"^MagnitudePruning sets a pruning mask, and {clause}"):
        trainer.fit(Perceptron(), federation(), METHOD)
    with pytest.raises(UserError, match=r"TwoTurns\(rank=2\) would send every tensor whole, .* at most 1\."):
        make_trainer().fit(Perceptron(), federation(), Algorithm(exchange=TwoTurns()))
    for rank in (0, 1.5, True):
        with pytest.raises(UserError, match="rank, the columns of each factor, must be a whole number of at least 1"):
            TwoTurns(rank)  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_processes_are_one(tmp_path: Path) -> None:
    method = "Algorithm --algorithm.exchange TwoTurns --trainer.clients_per_round 9 --trainer.max_rounds 3"
    agree(ran(tmp_path / "one", algorithm=method), ran(tmp_path / "two", algorithm=method, num_processes=2))
