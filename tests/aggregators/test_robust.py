"""Test robust aggregators: breakdown points, brute force, invariances, and whole runs."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toys import Normalised, Perceptron, Served, federation, vector

from lightning_fl import UserError
from lightning_fl.aggregators import (
    Bucketing,
    Bulyan,
    CoordinateMedian,
    GeometricMedian,
    KeepUploads,
    Krum,
    MaskedMean,
    MeanOfEach,
    MultiKrum,
    NormalisedMean,
    NormBound,
    StaleMean,
    TrimmedMean,
    WeightedMean,
)
from lightning_fl.algorithms import Algorithm, DeviceM, FedLDF, FedProx
from lightning_fl.codecs import STC, Dense, ErrorFeedback, RandomK, TopK
from lightning_fl.features.attacks import Adversary, SignFlip
from lightning_fl.slots import (
    Aggregator,
    Draw,
    Merging,
    Message,
    Result,
    RoundContext,
    ServerTraining,
    ServerTurn,
    Step,
    Traits,
    Upload,
)
from lightning_fl.steps import CentredClipping, TrustScores
from lightning_fl.vectors.layout import Layout

WHOLE: tuple[Aggregator, ...] = (
    CoordinateMedian(),
    TrimmedMean(2),
    TrimmedMean(0.2),
    Krum(2),
    MultiKrum(2),
    Bulyan(2),
    GeometricMedian(),
    Bucketing(CoordinateMedian(), 1),
)
"""Parts that keep all uploads, and tolerate two of eleven."""


def context_of(dimension: int, round: int = 0) -> RoundContext:
    layout = Layout(("a",), ((dimension,),))
    return RoundContext(layout, Layout((), ()), num_clients=11, draw=Draw((0, round, 0)), round=round)


def merged(
    aggregator: Aggregator,
    rows: Tensor,
    sent: Tensor | None = None,
    clients: Sequence[int] | None = None,
    **more: Tensor,
) -> Message:
    """Return what the aggregator makes of the clients' models (K, d), and of more vectors by name."""
    accumulator: dict[str, Any] = {}
    for place in range(len(rows)) if clients is None else clients:
        message = {"model": rows[place], **{name: entry[place] for name, entry in more.items()}}
        masks = {} if sent is None else {"model": sent[place]}
        aggregator.add(accumulator, Upload(Result(place, {}, 1.0 + place, {}, {}, {}, num_steps=1), message, masks))
    return aggregator.combine(accumulator, Merging(context_of(rows.shape[1])))


def points(num: int, dimension: int, seed: int) -> Tensor:
    """Return normal numbers (num, dimension) in float64."""
    return torch.randn(num, dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


seeds = st.integers(0, 10**6)


@pytest.mark.parametrize("aggregator", WHOLE, ids=repr)
def test_equal_uploads_give_that_upload_and_order_does_not_matter(aggregator: Aggregator) -> None:
    one = points(1, 7, 0)
    for name, entry in merged(aggregator, one.expand(11, 7), buffers=2 * one.expand(11, 7)).items():
        torch.testing.assert_close(entry, one[0] * (2 if name == "buffers" else 1), rtol=1e-12, atol=1e-12)
    rows = points(11, 7, 1)
    expected = merged(aggregator, rows)["model"]
    for seed in range(3):
        clients = torch.randperm(11, generator=torch.Generator().manual_seed(seed)).tolist()
        assert torch.equal(merged(aggregator, rows, clients=clients)["model"], expected)


@pytest.mark.parametrize(
    "aggregator", [TrimmedMean(0), NormBound(1e30), MultiKrum(0, 9), Bucketing(CoordinateMedian(), 9)], ids=repr
)
def test_is_the_uniform_mean_in_the_limit(aggregator: Aggregator) -> None:
    rows, buffers = points(9, 5, 2), points(9, 3, 3)
    found = merged(aggregator, rows, buffers=buffers)
    torch.testing.assert_close(found["model"], rows.mean(0))
    torch.testing.assert_close(found["buffers"], buffers.mean(0))


@pytest.mark.long
@pytest.mark.parametrize("sign", [1e9, -1e9])
@given(seed=seeds)
@settings(max_examples=20)
def test_attackers_up_to_the_bound_move_it_only_so_far(sign: float, seed: int) -> None:
    rows = points(11, 4, seed)
    attacked = torch.cat([rows[:9], torch.full((2, 4), sign, dtype=torch.float64)])
    low, high = rows[:9].amin(0), rows[:9].amax(0)
    assert merged(WeightedMean("uniform"), attacked)["model"].abs().min() > 1e8, "two break the mean"
    for aggregator in (CoordinateMedian(), TrimmedMean(2), Bulyan(2), MultiKrum(2)):
        found = merged(aggregator, attacked)["model"]
        assert ((found >= low) & (found <= high)).all(), aggregator
    assert (rows[:9] == merged(Krum(2), attacked)["model"]).all(1).any()
    centre = rows[:9].mean(0)
    farthest, share = float((rows[:9] - centre).norm(dim=1).max()), 2 / 11
    median = merged(GeometricMedian(), attacked)["model"]
    assert float((median - centre).norm()) <= 2 * (1 - share) / (1 - 2 * share) * farthest
    clipped = [merged(NormBound(1.5), x)["model"] for x in (attacked, torch.cat([rows[:9], torch.zeros(2, 4)]))]
    assert float((clipped[0] - clipped[1]).norm()) <= 2 * 1.5 / 11 * (1 + 1e-9)


def krum_by_hand(rows: np.ndarray, f: int, left: list[int]) -> list[float]:
    """Return each upload's sum of squared distances to its nearest others, of those that are left."""
    scores = []
    for i in left:
        others = sorted(float(((rows[i] - rows[j]) ** 2).sum()) for j in left if j != i)
        scores.append(sum(others[: max(1, len(left) - f - 2)]))
    return scores


@pytest.mark.long
@given(seed=seeds, num=st.integers(7, 11), f=st.integers(0, 1))
@settings(max_examples=20)
def test_krum_and_bulyan_are_those_of_a_brute_force(seed: int, num: int, f: int) -> None:
    rows = points(num, 3, seed)
    array = rows.numpy()
    scores = krum_by_hand(array, f, list(range(num)))
    best = sorted(range(num), key=lambda i: scores[i])
    np.testing.assert_allclose(merged(Krum(f), rows)["model"].numpy(), array[best[0]])
    np.testing.assert_allclose(merged(MultiKrum(f), rows)["model"].numpy(), array[best[: num - f]].mean(0), rtol=1e-9)
    left, chosen = list(range(num)), []
    while len(chosen) < num - 2 * f:
        scores = krum_by_hand(array, f, left)
        chosen.append(left.pop(scores.index(min(scores))))
    expected = []
    for column in array[sorted(chosen)].T:
        size = len(column) - 2 * f
        distance = np.abs(column - np.median(column))
        subsets = itertools.combinations(range(len(column)), size)
        nearest = min(subsets, key=lambda places: distance[list(places)].sum())
        expected.append(column[list(nearest)].mean())
    np.testing.assert_allclose(merged(Bulyan(f), rows)["model"].numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.long
@given(seed=seeds, num=st.integers(1, 8), trim=st.integers(0, 3))
@settings(max_examples=40)
def test_coordinates_are_merged_over_those_that_sent_them(seed: int, num: int, trim: int) -> None:
    rows, sent = points(num, 6, seed), points(num, 6, seed + 1) > 0
    hidden = torch.where(sent, rows, 0.0)
    median, mean = (merged(part, hidden, sent).get("model") for part in (CoordinateMedian(), TrimmedMean(trim)))
    assert median is not None
    for j in range(6):
        values = np.sort(rows[sent[:, j], j].numpy())
        assert float(median[j]) == pytest.approx(float(np.median(values)) if len(values) else 0.0)
        if num > 2 * trim:
            assert mean is not None
            kept = values[trim : len(values) - trim]
            assert float(mean[j]) == pytest.approx(float(kept.mean()) if len(values) > 2 * trim else 0.0)
    assert (mean is None) == (num <= 2 * trim)


@pytest.mark.parametrize("aggregator", WHOLE, ids=repr)
def test_follows_translations_and_scales(aggregator: Aggregator) -> None:
    rows, shift = points(11, 5, 4), points(1, 5, 5)
    plain = merged(aggregator, rows)["model"]
    torch.testing.assert_close(merged(aggregator, rows + shift)["model"], plain + shift[0], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(merged(aggregator, 8 * rows)["model"], 8 * plain, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("aggregator", [Krum(2), MultiKrum(2), GeometricMedian(iterations=200)], ids=repr)
def test_follows_rotations(aggregator: Aggregator) -> None:
    rows, rotation = points(11, 5, 6), torch.linalg.qr(points(5, 5, 7))[0]
    plain = merged(aggregator, rows)["model"]
    torch.testing.assert_close(merged(aggregator, rows @ rotation)["model"], plain @ rotation, rtol=1e-6, atol=1e-6)


def test_the_geometric_median_has_the_least_sum_of_distances() -> None:
    rows = points(9, 3, 8)

    def total(centre: Tensor) -> float:
        return float((rows - centre).norm(dim=1).sum())

    found = merged(GeometricMedian(iterations=300), rows)["model"]
    nearby = [found + 0.01 * step for step in points(50, 3, 9)]
    assert all(total(found) <= total(other) for other in nearby)
    weights = torch.arange(1.0, 10.0, dtype=torch.float64)
    weighted = merged(GeometricMedian(iterations=300, weighting="samples"), rows)["model"]
    pull = (weights[:, None] * (rows - weighted) / (rows - weighted).norm(dim=1, keepdim=True)).sum(0)
    assert float(pull.norm()) < 1e-6, "the weighted unit vectors to all points cancel"


def test_buckets_are_shuffled_anew_and_average_neighbours() -> None:
    rows = torch.arange(8.0, dtype=torch.float64)[:, None]
    accumulator: dict[str, Any] = {}
    part = Bucketing(Krum(0), 2)
    for client in range(8):
        part.add(accumulator, Upload(Result(client, {}, 1.0, {}, {}, {}, num_steps=1), {"model": rows[client]}))
    assert float(part.finish(accumulator)["model"]) in {0.5, 2.5, 4.5, 6.5}
    found = set()
    for round in range(20):
        found.add(float(part.combine(accumulator, Merging(context_of(1, round)))["model"]))
    assert len(found) > 3


@pytest.mark.parametrize("s", [1, 3, 9])
def test_buckets_weigh_clients_as_the_part_inside(s: int) -> None:
    rows = points(9, 2, 13)
    for inner in (WeightedMean(), WeightedMean("uniform"), WeightedMean(uniform=("model",))):
        found = merged(Bucketing(inner, s), rows, buffers=rows)
        torch.testing.assert_close(found, merged(inner, rows, buffers=rows))


def test_buckets_keep_the_order_of_the_clients_and_one_draw_holds_for_all_parties() -> None:
    rows, part, accumulator = points(8, 1, 10), Bucketing(CoordinateMedian(), 3), dict[str, Any]()
    for client in (5, 2, 7, 0, 1, 6, 3, 4):
        result = Result(client, {}, 1.0 + 3 * client % 8, {}, {}, {}, num_steps=1)
        part.add(accumulator, Upload(result, {"model": rows[client]}))
    means = torch.stack([bucket.mean(0) for bucket in rows.split(3)])
    torch.testing.assert_close(part.finish(accumulator)["model"], means.median(0).values)
    context = context_of(1)
    elsewhere = replace(context, draw=replace(context.draw, party=4))
    one, other = (part.combine(accumulator, Merging(place))["model"] for place in (context, elsewhere))
    assert torch.equal(one, other)


@pytest.mark.parametrize("part", [Krum, MultiKrum, Bulyan, GeometricMedian, NormBound], ids=repr)
def test_all_vectors_are_measured_side_by_side(part: Callable[..., Aggregator]) -> None:
    rows, buffers = points(9, 4, 11), 3 * points(9, 2, 12)
    found = merged(part(by="all"), rows, buffers=buffers)
    whole = merged(part(by="model"), torch.cat([buffers, rows], dim=1))["model"]
    torch.testing.assert_close(torch.cat([found["buffers"], found["model"]]), whole)


@pytest.mark.parametrize(("share", "num", "count"), [(0.2, 10, 2), (0.45, 3, 1), (0.45, 4, 1), (0.3, 5, 2)])
def test_a_share_is_that_count_of_uploads(share: float, num: int, count: int) -> None:
    rows = points(num, 4, 13)
    assert torch.equal(merged(TrimmedMean(share), rows)["model"], merged(TrimmedMean(count), rows)["model"])


@pytest.mark.parametrize(
    ("part", "is_equal"),
    [
        (CoordinateMedian(), True),
        (GeometricMedian(), True),
        (GeometricMedian(weighting="samples"), False),
        (MaskedMean(), False),
        (NormalisedMean(), False),
        (StaleMean(), True),
        (StaleMean(weighting="samples"), False),
    ],
    ids=repr,
)
def test_kept_uploads_weigh_as_the_part_says(part: Aggregator, is_equal: bool) -> None:
    accumulator: dict[str, Any] = {}
    keeper = KeepUploads(part)
    for client, row in enumerate(points(3, 2, 14)):
        result = Result(client, {}, 5.0 + client, {}, {}, {}, num_steps=1)
        keeper.add(accumulator, Upload(result, {"model": row, "scalars/normaliser": torch.ones(1)}))
    assert keeper.finish(accumulator)["uploads/weight"].tolist() == ([1.0, 1.0, 1.0] if is_equal else [5.0, 6.0, 7.0])


@pytest.mark.parametrize(
    ("decay", "factors"),
    [
        ("constant", [1, 1, 1, 1]),
        ("polynomial", [1, 0.5, 6**-0.5, 0.1]),
        ("hinge", [1, 1, 1 / 11, 1 / 951]),
        (2.0, [1, 1 / 16, 1 / 36, 1 / 100**2]),
    ],
)
def test_stale_uploads_count_less(decay: Any, factors: list[float]) -> None:
    part = StaleMean(decay, alpha=0.5)
    assert [part.factor(staleness) for staleness in (0, 3, 5, 99)] == pytest.approx([0.5 * x for x in factors])


def test_models_are_divided_by_their_normalisers_and_buffers_are_not() -> None:
    accumulator: dict[str, Any] = {}
    part = NormalisedMean("steps")
    for weight, normaliser, steps, value in ((1.0, 2.0, 4, 8.0), (3.0, 5.0, 8, 10.0)):
        message = {"model": torch.tensor([value]), "buffers": torch.tensor([value])}
        message["scalars/normaliser"] = torch.tensor([normaliser])
        part.add(accumulator, Upload(Result(0, {}, weight, {}, {}, {}, num_steps=steps), message))
    found = part.finish(accumulator)
    assert float(found["model"]) == pytest.approx((1 * 8 / 2 + 3 * 10 / 5) / 4 * (1 * 4 + 3 * 8) / 4)
    assert float(found["buffers"]) == pytest.approx((1 * 8 + 3 * 10) / 4)


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize("aggregator", [CoordinateMedian(), MultiKrum(1), NormBound(0.05), GeometricMedian()], ids=repr)
def test_any_method_takes_it_and_no_bit_more_is_sent(
    aggregator: Aggregator, runner: str, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(max_rounds=2, clients_per_round=6, runner=runner)
    module = Perceptron()
    start = vector(module)
    trainer.fit(module, federation(), FedProx(mu=0.1, aggregator=aggregator))
    assert np.isfinite(vector(module)).all()
    assert (vector(module) != start).any()
    assert trainer.run.ledger.bits("up") == 6 * 32 * 26
    if aggregator != NormBound(0.05):
        assert int(trainer.history["robust/skipped"].iloc[-1]) == 0


def test_a_round_with_too_few_uploads_is_skipped(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    start = vector(module)
    trainer = make_trainer(max_rounds=2, clients_per_round=6, dropout_rate=0.7)
    trainer.fit(module, federation(), Algorithm(aggregator=Krum(1)))
    assert trainer.history["clients/accepted"].max() < 5
    assert list(trainer.history["robust/skipped"]) == [1, 1]
    np.testing.assert_array_equal(vector(module), start)


@pytest.mark.parametrize(
    ("aggregator", "said"),
    [
        (Krum(2), "needs 7 clients in a round, but there are 6"),
        (Bulyan(1), "needs 7 clients in a round, but there are 6"),
        (TrimmedMean(3), "needs 7 clients in a round, but there are 6"),
        (TrimmedMean(0.45), "leaves out 3 of 6 uploads at each end, so that none is left"),
        (MultiKrum(1, 6), "m=6 of 6 uploads include attackers' if f is 1: give m of at most 5"),
        (Bucketing(Krum(1), 2), "needs 5 clients in a round, but there are 3"),
    ],
    ids=repr,
)
def test_bounds_are_checked_before_the_run(aggregator: Aggregator, said: str, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=said):
        make_trainer(clients_per_round=6).fit(Perceptron(), federation(), Algorithm(aggregator=aggregator))


@pytest.mark.parametrize(
    ("aggregator", "cohort_size"),
    [
        (Bucketing(Krum(1), 2), 9),
        (MultiKrum(1, 5), 6),
        (MultiKrum(0, 9), 9),
        (MultiKrum(1), 5),
        (TrimmedMean(2), 5),
        (GeometricMedian(iterations=1), 1),
        (Bulyan(1), 7),
    ],
    ids=repr,
)
def test_the_least_cohort_is_enough(aggregator: Aggregator, cohort_size: int) -> None:
    aggregator.check(cohort_size)
    assert torch.isfinite(merged(aggregator, points(cohort_size, 3, 15))["model"]).all()


@pytest.mark.parametrize(("num_senders", "left"), [(3, 1), (4, 2), (5, 3)])
def test_a_share_is_taken_of_the_clients_that_sent_a_number(num_senders: int, left: int) -> None:
    """Test that the mean is that of the values in the middle, however many clients sent others."""
    values = torch.arange(10.0, dtype=torch.float64).square()[:, None]
    sent = (torch.arange(10) < num_senders)[:, None]
    cut = (num_senders - left) // 2
    found = merged(TrimmedMean(0.2), values * sent, sent)["model"]
    assert found.item() == values[cut : num_senders - cut].mean().item()


@pytest.mark.parametrize("aggregator", [TrimmedMean(), TrimmedMean(1)], ids=repr)
def test_too_few_senders_of_a_number_are_refused(aggregator: Aggregator, make_trainer: MakeTrainer) -> None:
    method = Algorithm(exchange=FedLDF(2).exchange, aggregator=aggregator)
    said = r"LayerDivergence lets 2 of 6 clients send a number, too few for TrimmedMean\(.*: let more clients send it"
    with pytest.raises(UserError, match=said):
        make_trainer(clients_per_round=6).fit(Perceptron(), federation(), method)


def test_layers_of_some_clients_move_the_model(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    start = vector(module)
    method = Algorithm(exchange=FedLDF(3).exchange, aggregator=TrimmedMean(0.2))
    make_trainer(clients_per_round=6, max_rounds=1).fit(module, federation(), method)
    assert not np.array_equal(vector(module), start)


@pytest.mark.parametrize("aggregator", [*WHOLE, NormBound()], ids=repr)
@pytest.mark.parametrize("adversary", [None, Adversary(SignFlip(), [1])], ids=["honest", "attacked"])
def test_gradients_of_a_turn_of_their_own_are_merged(
    aggregator: Aggregator, adversary: Adversary | None, make_trainer: MakeTrainer
) -> None:
    """Test that clients are compared by what they send, also where this is a gradient and no model."""
    aggregator = replace(aggregator, f=0) if hasattr(aggregator, "f") else aggregator
    trainer = make_trainer(clients_per_round=6, max_rounds=1, adversary=adversary)
    trainer.fit(Perceptron(), federation(), DeviceM(variant="mime", aggregator=aggregator))
    assert trainer.history["clients/accepted"].tolist() == [6]


def test_an_average_of_several_skips_rounds_in_which_attackers_would_be_among_them() -> None:
    assert [MultiKrum(2, 6).least_uploads, MultiKrum(2, 3).least_uploads, MultiKrum(0, 6).least_uploads] == [8, 7, 6]
    assert Krum(3).least_uploads == 9


def test_parts_of_models_need_a_part_that_knows_what_was_sent() -> None:
    for part in (Krum(), GeometricMedian(), NormBound(), Bucketing(CoordinateMedian())):
        with pytest.raises(UserError, match="would count what was not sent as zero"):
            Algorithm(exchange=FedLDF(1).exchange, aggregator=part)
    for part in (CoordinateMedian(), TrimmedMean(1)):
        assert Algorithm(exchange=FedLDF(1).exchange, aggregator=part).aggregator == part


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: TrimmedMean(0.5), r"trim as a share must lie in \[0, 0.5\), got 0.5"),
        (lambda: TrimmedMean(-1), "trim as a count must be a whole number of at least 0, got -1"),
        (lambda: Krum(-1), "f must be a whole number of at least 0, got -1"),
        (lambda: Krum(m=0), "m must be a whole number of at least 1, got 0"),
        (lambda: GeometricMedian(smoothing=0), "smoothing must be positive, got 0"),
        (lambda: NormBound(0), "bound must be positive, got 0"),
        (lambda: CentredClipping(float("nan")), "radius must be positive, got nan"),
        (lambda: Bucketing(Krum(), 0), "s must be a whole number of at least 1, got 0"),
        (lambda: Bucketing(MeanOfEach()), r"MeanOfEach needs \['mask/chosen'\] of each client"),
        (lambda: Krum(by="al"), "by 'al' is unknown; did you mean 'all'"),  # type: ignore[arg-type]
    ],
)
def test_bad_numbers_are_refused(build: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build()


# --------------------------------------------------------------------------------------------------------------- steps


class FixedServer:
    """Server whose own training gives a fixed delta."""

    def __init__(self, delta: Tensor) -> None:
        self.delta = delta

    def train(self, received: Message) -> ServerTraining:
        return ServerTraining({"model": self.delta}, 1.0, 1)


def turn_of(rows: Tensor, delta: Tensor | None = None, **more: Tensor) -> ServerTurn:
    """Return the turn of clients whose models, and more vectors by name, are these rows."""
    uploads = {"model": rows, **more}
    merged = {name: x.mean(0) for name, x in uploads.items()} | {f"uploads/{name}": x for name, x in uploads.items()}
    zero, buffers = torch.zeros(rows.shape[1], dtype=torch.float64), torch.arange(1.0, 4.0, dtype=torch.float64)
    server: Any = FixedServer(zero if delta is None else delta)
    clients = list(range(len(rows)))
    return ServerTurn(context_of(rows.shape[1]), server, 0, clients, 1.0, {}, zero, buffers, merged, zero, buffers)


@pytest.mark.long
@given(seed=seeds, radius=st.floats(0.1, 3))
@settings(max_examples=20)
def test_centred_clipping_from_zero_is_the_norm_bound_and_moves_so_far(seed: int, radius: float) -> None:
    rows, step = points(9, 4, seed), CentredClipping(radius)
    turn = turn_of(rows, buffers=points(9, 3, seed + 1))
    state = step(turn, step.init(turn.params))
    expected = merged(NormBound(radius), rows, buffers=points(9, 3, seed + 1))
    torch.testing.assert_close(turn.proposal, expected["model"])
    torch.testing.assert_close(turn.proposed_buffers, turn.buffers + expected["buffers"])
    again = turn_of(rows, buffers=points(9, 3, seed + 1))
    step(again, state)
    lengths = (rows - state["centre"]).norm(dim=1)
    factors = (radius / lengths).clamp(max=1) / 9
    expected_buffers = state["buffers"] + factors @ (points(9, 3, seed + 1) - state["buffers"])
    torch.testing.assert_close(again.proposed_buffers, again.buffers + expected_buffers)
    shift = points(1, 4, seed + 2)[0]
    one, moved = turn_of(rows), turn_of(rows + shift)
    step(one, {"centre": state["centre"]})
    step(moved, {"centre": state["centre"] + shift})
    torch.testing.assert_close(moved.proposal, one.proposal + shift)
    attacked = torch.cat([rows[:7], torch.full((2, 4), 1e9, dtype=torch.float64)])
    pulled, stays = turn_of(attacked), turn_of(torch.cat([rows[:7], state["centre"].expand(2, 4)]))
    for given_turn in (pulled, stays):
        step(given_turn, {"centre": state["centre"]})
    assert float((pulled.proposal - stays.proposal).norm()) <= 2 * radius / 9 * (1 + 1e-9)


def test_centred_clipping_without_a_radius_is_the_mean() -> None:
    rows = points(9, 4, 1)
    turn = turn_of(rows)
    CentredClipping(1e30)(turn, {"centre": points(1, 4, 2)[0]})
    torch.testing.assert_close(turn.proposal, rows.mean(0))


@given(seed=seeds)
@settings(max_examples=20)
def test_trust_depends_on_the_direction_alone(seed: int) -> None:
    rows, delta = points(6, 4, seed), points(1, 4, seed + 1)[0]
    rows[0] = delta  # so that one is trusted
    step, turns = TrustScores(), []
    factors = torch.tensor([1e6, 1.0, 3.0, 1e-3, 5.0, 2.0], dtype=torch.float64)[:, None]
    opposed = torch.cat([rows, -delta[None] * 1e9, torch.zeros(1, 4, dtype=torch.float64)])
    for sent in (rows, rows * factors, opposed):
        turns.append(turn_of(sent, delta, buffers=sent[:, :3] / sent.norm(dim=1, keepdim=True).clamp(min=1e-300)))
        step(turns[-1], {})
    torch.testing.assert_close(turns[1].proposal, turns[0].proposal)
    torch.testing.assert_close(turns[2].proposal, turns[0].proposal)
    cosines = torch.nn.functional.cosine_similarity(rows, delta[None]).clamp(min=0)
    unit = rows / rows.norm(dim=1, keepdim=True)
    torch.testing.assert_close(turns[0].proposal, delta.norm() * (cosines @ unit) / cosines.sum())
    shares = cosines / rows.norm(dim=1) * delta.norm() / cosines.sum()
    torch.testing.assert_close(turns[0].proposed_buffers, turns[0].buffers + shares @ unit[:, :3])
    assert turns[0].metrics["robust/trusted"] == int((cosines > 0).sum())


def test_trust_in_one_alone_takes_its_direction_whatever_it_is() -> None:
    delta, row = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([[0.0, 2.0], [-1.0, 0.0]]).double()
    turn, too_short = turn_of(row, delta), turn_of(1e-200 * row, delta)
    for given_turn in (turn, too_short):
        TrustScores()(given_turn, {})
    torch.testing.assert_close(turn.proposal, torch.tensor([0.0, 5.0], dtype=torch.float64))
    assert turn.metrics["robust/trusted"] == 1
    assert torch.equal(too_short.proposal, torch.zeros(2, dtype=torch.float64)), "it has no direction that is a number"


def test_trust_in_nobody_leaves_the_model() -> None:
    delta = points(1, 4, 3)[0]
    alike, against, zero = (turn_of(delta.expand(5, 4) * sign, delta) for sign in (1, -1, 0))
    still = turn_of(points(5, 4, 4), torch.zeros(4, dtype=torch.float64))
    for turn in (alike, against, zero, still):
        TrustScores()(turn, {})
    torch.testing.assert_close(alike.proposal, delta)
    for turn in (against, zero, still):
        assert torch.equal(turn.proposal, torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("step", [CentredClipping(0.1), TrustScores()], ids=repr)
def test_steps_run_and_resume(step: Step, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def fit(rounds: int, folder: str, ckpt_path: str | None = None) -> np.ndarray:
        torch.manual_seed(0)
        module = Normalised()
        trainer = make_trainer(
            max_rounds=rounds, clients_per_round=6, default_root_dir=tmp_path / folder, enable_checkpointing=True
        )
        algorithm = Algorithm(aggregator=KeepUploads(WeightedMean()), steps=[step])
        trainer.fit(module, Served(12), algorithm, ckpt_path=ckpt_path)
        return vector(module)

    whole = fit(3, "whole")
    fit(2, "part")
    np.testing.assert_array_equal(fit(3, "part", "last"), whole)


# --------------------------------------------------------------------------------------------------- shares of the uploads


def told(aggregator: Aggregator, rows: Tensor, attackers: Sequence[int]) -> dict[str, float]:
    """Return what a part reports of uploads of which some are attackers'."""
    accumulator: dict[str, Any] = {}
    for client in reversed(range(len(rows))):
        result = Result(client, {}, 1.0 + client, {}, {}, {}, num_steps=1, attacking=float(client in attackers))
        aggregator.add(accumulator, Upload(result, {"model": rows[client]}))
    merging = Merging(context_of(rows.shape[1]))
    aggregator.combine(accumulator, merging)
    return merging.metrics


@given(seed=seeds, num=st.integers(4, 11), s=st.integers(1, 5))
@settings(max_examples=15)
def test_what_is_kept_of_buckets_are_the_uploads_in_them(seed: int, num: int, s: int) -> None:
    rows = points(num, 6, seed)
    for inner in (TrimmedMean(0), NormBound(1e30), MultiKrum(0, -(-num // s)) if num > 2 * s else TrimmedMean(0)):
        metrics = told(Bucketing(inner, s), rows, [1, 3])
        buckets = [min(s, num - first) for first in range(0, num, s)]
        equal = len(buckets) ** 2 / sum(
            1 / size for size in buckets
        )  # each bucket has the same weight, whatever its size
        assert metrics["robust/kept"] == pytest.approx(equal)
        assert num % s or equal == pytest.approx(num)
    if s < num and num % s == 0 and num >= 3 * s:
        assert told(Bucketing(Krum(0), s), rows, [1])["robust/kept"] == pytest.approx(s)


@pytest.mark.long
@given(seed=seeds, num=st.integers(7, 11))
@settings(max_examples=15)
def test_shares_are_those_of_plain_loops(seed: int, num: int) -> None:
    rows, attackers = points(num, 6, seed), [1, 4]
    array = rows.numpy()

    def shares_between(first: int, last: int) -> np.ndarray:
        shares = np.zeros(num)
        for column in array.T:
            order = sorted(range(num), key=lambda k: column[k])
            for place in range(first, last + 1):
                shares[order[place]] += 1 / (last - first + 1) / array.shape[1]
        return shares

    lengths = np.linalg.norm(array, axis=1)
    bound = float(np.median(lengths))
    scores = krum_by_hand(array, 1, list(range(num)))
    best = sorted(range(num), key=lambda i: scores[i])[: num - 1]
    nearness = 1 / np.linalg.norm(array - np.median(array, axis=0), axis=1)
    expected = {
        CoordinateMedian(): shares_between((num - 1) // 2, num // 2),
        TrimmedMean(2): shares_between(2, num - 3),
        MultiKrum(1): np.isin(np.arange(num), best) / len(best),
        GeometricMedian(iterations=1): nearness / nearness.sum(),
        NormBound(bound): np.minimum(1, bound / lengths),
    }
    for aggregator, shares in expected.items():
        metrics = told(aggregator, rows, attackers)
        assert metrics["robust/kept"] == pytest.approx(shares.sum() ** 2 / (shares**2).sum()), aggregator
        assert metrics["robust/attackers_kept"] == pytest.approx(shares[attackers].sum() / shares.sum()), aggregator
    whole = told(Bulyan(1), rows, attackers)
    assert 1 <= whole["robust/kept"] <= num - 2


def test_a_bucket_counts_as_an_attackers_by_its_share() -> None:
    rows = torch.ones(8, 3, dtype=torch.float64)
    metrics = told(Bucketing(MultiKrum(0, 4), 2), rows, [0, 1, 2])
    assert metrics["robust/attackers_kept"] == pytest.approx(3 / 8)
    weighted = told(Bucketing(GeometricMedian(weighting="samples"), 2), rows, [0, 1, 2])
    assert weighted["robust/attackers_kept"] == pytest.approx((1 + 2 + 3) / 36)
    unsent = told(CoordinateMedian(), torch.zeros(3, 0, dtype=torch.float64), [1])
    assert unsent["robust/attackers_kept"] == 0, "of a model without numbers"


def test_a_median_of_what_few_clients_send_is_warned_of(make_trainer: MakeTrainer) -> None:
    for aggregator in (CoordinateMedian(), Bucketing(CoordinateMedian(), 2)):
        method = Algorithm(uplink=ErrorFeedback(TopK(0.3)), aggregator=aggregator)
        with pytest.warns(UserWarning, match="the median of a number stays 0"):
            make_trainer(max_rounds=1, clients_per_round=6).fit(Perceptron(), federation(), method)
    for fine in (TopK(0.6), RandomK(0.3, common=True), Dense()):
        assert Traits.SENDS_FEW not in fine.traits
    assert Traits.SENDS_FEW in STC(0.3).traits & RandomK(0.3).traits
