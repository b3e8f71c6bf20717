"""Test capacities that follow the clock: each client trains the widest level whose round meets a deadline."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from compared_runs import RUNNERS, MakeTrainer, resumed_like_whole, time_of
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import in_parts, levels_in_time
from roster import problem
from toys import SIZES, Perceptron, federation, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import FedAvg, FederatedDropout, FjORD, HeteroFL
from lightning_fl.codecs import EntropyCoded, ErrorFeedback, TopK
from lightning_fl.exchanges import DrawnUnits, FirstUnits
from lightning_fl.features.clock import ClientClock, SimulatedClock
from lightning_fl.features.clock.client_capacities import ClientCapacities
from lightning_fl.features.selection import Fastest
from lightning_fl.slots import Capacities

LEVELS = [1.0, 0.5, 0.25]
MEDIAN = (1e3, 2e-4, 4e-4)
"""A whole network of the perceptron takes the median client about a second to receive, train on six samples and send."""
SIGMAS = (0.9, 1.2, 1.2)
NAMES = ("macs_per_second", "uplink_mebibytes_per_second", "downlink_mebibytes_per_second")
CLOCK = ClientClock(**dict(zip(NAMES, MEDIAN, strict=True)), devices="phones")
METHODS = {
    "HeteroFL": (lambda deadline: HeteroFL(LEVELS, deadline=deadline), {}),
    "FjORD": (lambda deadline: FjORD(LEVELS, deadline=deadline), {"ordered": True}),
    "FederatedDropout": (
        lambda deadline: FederatedDropout(deadline=deadline, rates=[0, 0.5, 0.75]),
        {"seed_bits": 64},
    ),
}
by_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture
def fitted(make_trainer: MakeTrainer) -> Callable[..., FederatedTrainer]:
    """Return a function that trains all six clients in each round."""

    def fit(algorithm: Any, **flags: Any) -> FederatedTrainer:
        torch.manual_seed(0)
        flags = {"max_rounds": 1, "clients_per_round": 6, "precision": "64-true", "clock": CLOCK, **flags}
        trainer = make_trainer(**flags)
        trainer.fit(Perceptron(), federation(), algorithm)
        return trainer

    return fit


def found(trainer: FederatedTrainer) -> dict[int, float]:
    level = trainer.fit_loop.engine.level
    assert level is not None
    return {k: level(k) for k in range(len(SIZES))}


@by_method
@pytest.mark.parametrize("seed", [0, 1])
def test_levels_are_those_of_the_plain_loop(
    method: str, seed: int, fitted: Callable[..., FederatedTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check levels for deadlines from one that nobody meets to one that all meet, and that costs are those of the levels."""
    monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
    of_deadline, how = METHODS[method]
    seen = set()
    for deadline in (1e-6, 1.0, 2.0, 1e6):
        trainer = fitted(of_deadline(deadline))
        expected = levels_in_time(problem(rounds=1, seed=seed), LEVELS, deadline, MEDIAN, SIGMAS, **how)
        assert found(trainer) == expected
        seen |= {frozenset(expected.values())}
        units = {k: int(np.ceil(4 * level)) for k, level in expected.items()}
        up = sum(64 * (6 * h + 2) for h in units.values())
        row = trainer.fit_loop.rows[0]
        assert row["comm/uplink_bits"] == up
        seeds = sum(how.get("seed_bits", 0) for level in expected.values() if level < 1)
        assert row["comm/downlink_bits"] == up + seeds
        if method != "FjORD":
            assert row["clients/macs"] == sum(SIZES[k] * 5 * h for k, h in units.items())
        time = time_of(trainer)
        assert time.devices is not None
        for client, seconds in time.expected_seconds(range(6), trainer.fit_loop.engine).items():
            assert seconds <= deadline or expected[client] == 0.25
    assert {frozenset({1.0}), frozenset({0.25})} < seen


def test_the_widest_level_that_meets_the_deadline_is_chosen(fitted: Callable[..., FederatedTrainer]) -> None:
    """Check for any levels and deadlines that no wider level meets it, and that a longer deadline gives no client less."""
    trainer = fitted(FjORD(LEVELS, deadline=1.0))
    time, engine = time_of(trainer), trainer.fit_loop.engine
    assert time.devices is not None

    def of(levels: Any, deadline: float) -> dict[int, tuple[float, float]]:
        capacities = ClientCapacities(Capacities(tuple(levels), deadline), time, time.devices, engine)
        return {k: capacities.of(k) for k in range(len(SIZES))}

    shares = st.lists(st.integers(1, 8).map(lambda eighths: eighths / 8), min_size=1, max_size=4, unique=True)

    @settings(max_examples=20, deadline=None)
    @given(shares.map(partial(sorted, reverse=True)), st.floats(1e-2, 1e2), st.floats(1.0, 10.0))
    def check(levels: list[float], deadline: float, factor: float) -> None:
        alone = {level: of([level], deadline) for level in levels}
        longer = of(levels, factor * deadline)
        for client, (level, seconds) in of(levels, deadline).items():
            assert seconds == alone[level][client][1]
            assert seconds <= deadline or level == min(levels)
            assert all(alone[wider][client][1] > deadline for wider in levels if wider > level)
            assert level <= longer[client][0]

    check()


@RUNNERS
@by_method
def test_models_are_those_of_the_plain_loop(method: str, runner: str, make_trainer: MakeTrainer) -> None:
    """Check the model after three rounds, in which three of the six clients take part."""
    of_deadline, how = METHODS[method]
    given_problem, module = problem(rounds=3), Perceptron().double()
    levels = levels_in_time(given_problem, LEVELS, 2.0, MEDIAN, SIGMAS, **how)
    assert len(set(levels.values())) > 1

    def part(t: int, k: int) -> Any:
        h = int(np.ceil(4 * levels[k]))
        if method == "HeteroFL":
            return range(h), levels[k]
        if method == "FjORD":
            counts = [int(np.ceil(4 * p)) for p in sorted(LEVELS) if p <= levels[k]]
            return range(h), counts if len(counts) > 1 else 1.0
        seed = int(np.random.default_rng([0, t, 30, 6]).integers(2**63))
        order = np.random.default_rng([seed, crc32(b"hidden")]).permutation(4)
        return ([int(u) for u in order[:h]] if levels[k] < 1 else range(4)), 1.0

    expected = in_parts(given_problem, vector(module), part)
    trainer = make_trainer(
        max_rounds=3, precision="64-true", clock=CLOCK, runner="auto" if method == "FjORD" else runner
    )
    trainer.fit(module, federation(), of_deadline(2.0))
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-12)


@RUNNERS
def test_with_time_for_all_it_is_fedavg_bit_for_bit(runner: str, make_trainer: MakeTrainer) -> None:
    ends = []
    for algorithm in (HeteroFL(LEVELS, deadline=1e6), FedAvg()):
        torch.manual_seed(0)
        module = Perceptron()
        make_trainer(runner=runner, clock=CLOCK, max_rounds=3).fit(module, federation(), algorithm)
        ends.append(vector(module))
    assert np.array_equal(*ends)


def test_the_run_says_who_has_which_level(
    fitted: Callable[..., FederatedTrainer], caplog: pytest.LogCaptureFixture
) -> None:
    fitted(HeteroFL(LEVELS, deadline=2.0))
    expected = list(levels_in_time(problem(rounds=1), LEVELS, 2.0, MEDIAN, SIGMAS).values())
    counts = ", ".join(f"{expected.count(level)} train level {level:g}" for level in LEVELS)
    assert f"Of 6 clients {counts}, the widest whose round takes at most 2 s of simulated time" in caplog.text
    caplog.clear()
    fitted(HeteroFL(LEVELS, deadline=1e-6))
    assert (
        "6 train level 0.25, the widest whose round takes at most 1e-06 s of simulated time; 6 with level 0.25 take longer."
        in (caplog.text)
    )


def test_levels_follow_longer_trainings(fitted: Callable[..., FederatedTrainer]) -> None:
    trainer = fitted(HeteroFL(LEVELS, deadline=2.0))
    engine = trainer.fit_loop.engine
    before = found(trainer)
    engine.schedule = replace(engine.schedule, epochs=6)
    expected = levels_in_time(problem(rounds=1, epochs=6), LEVELS, 2.0, MEDIAN, SIGMAS)
    assert found(trainer) == expected != before


def test_a_plan_has_the_costs_of_the_run(make_trainer: MakeTrainer) -> None:
    flags = {"max_rounds": 4, "clients_per_round": 3, "clock": CLOCK}
    algorithm = partial(FjORD, LEVELS, deadline=2.0, uplink=ErrorFeedback(TopK(0.3)))
    plan = make_trainer(**flags).plan(Perceptron(), federation(), algorithm())
    trainer = make_trainer(**flags)
    trainer.fit(Perceptron(), federation(), algorithm())
    rows = trainer.fit_loop.rows
    assert plan.is_fixed
    assert (plan.uplink_bytes, plan.downlink_bytes) == tuple(
        trainer.run.ledger.total_bytes(way) for way in ("up", "down")
    )
    assert plan.macs == 3 * sum(row["clients/macs"] for row in rows)


def test_resumed_equals_uninterrupted(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    algorithm = partial(HeteroFL, LEVELS, deadline=2.0, uplink=ErrorFeedback(TopK(0.2)))
    resumed_like_whole(make_trainer, tmp_path, Perceptron, algorithm=algorithm, clock=CLOCK, dropout_rate=0.2)


def test_the_fastest_are_selected_with_their_own_networks(fitted: Callable[..., FederatedTrainer]) -> None:
    trainer = fitted(HeteroFL(LEVELS, deadline=2.0), clients_per_round=2, selection=Fastest(6))
    engine = trainer.fit_loop.engine
    seconds = time_of(trainer).expected_seconds(range(6), engine)
    assert set(engine.cohort.selected) == set(sorted(seconds, key=lambda k: seconds[k])[:2])


@pytest.mark.parametrize(
    ("algorithm", "flags", "said"),
    [
        (
            FjORD(LEVELS, deadline=1),
            {"clock": SimulatedClock()},
            "algorithm.deadline of FjORD needs a clock that knows each client's time",
        ),
        (
            HeteroFL(LEVELS, deadline=1, uplink=EntropyCoded(TopK(0.1))),
            {},
            "how much EntropyCoded sends is known only after the training",
        ),
    ],
)
def test_runs_without_known_seconds_are_refused(
    algorithm: Any, flags: Any, said: str, fitted: Callable[..., FederatedTrainer]
) -> None:
    with pytest.raises(UserError, match=said):
        fitted(algorithm, **flags)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FirstUnits(LEVELS), "levels must be a mapping from levels .* or a list of levels with a deadline"),
        (lambda: FirstUnits([], deadline=1.0), "levels must be a mapping"),
        (lambda: FirstUnits(["wide"], deadline=1.0), "levels must be a mapping"),
        (lambda: FirstUnits([2.0], deadline=1.0), "must lie in"),
        (lambda: FirstUnits(LEVELS, deadline=0.0), "deadline must be positive"),
        (lambda: FirstUnits(LEVELS, fixed=False, deadline=1.0), "fixed is False, so that clients draw their levels"),
        (lambda: DrawnUnits(deadline=1.0), "deadline chooses among rates, got deadline 1.0 and rates None"),
        (lambda: DrawnUnits(rates=[0.5]), "deadline chooses among rates, got deadline None"),
        (lambda: DrawnUnits(deadline=1.0, rates=[1.0]), "rates must be a list of different numbers in"),
    ],
)
def test_settings_are_checked(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()
