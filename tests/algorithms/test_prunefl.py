"""Test PruneFL beyond its oracle: the mask is optimal, clients keep dense gradients, and bits are counted."""

import copy
from dataclasses import replace
from itertools import chain, combinations, pairwise
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback
from roster import problem
from toys import Convolved, Perceptron, Served, federation, vector

from lightning_fl import UserError
from lightning_fl.algorithms import FedAvg, PruneFL
from lightning_fl.callbacks import FilterPruning, MagnitudePruning
from lightning_fl.modules import ImageClassifier
from lightning_fl.pruning.prunefl_mask import fastest, smallest_kept

some_weights = st.lists(
    st.tuples(st.booleans(), st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=10
)  # (True if it is a candidate, Z, t)


@pytest.mark.long
@given(some_weights, st.integers(0, 30), st.integers(1, 10))
def test_no_other_choice_trains_faster(weights: list[tuple[bool, int, int]], numerator: int, denominator: int) -> None:
    candidates, importance, seconds = (torch.tensor(column) for column in zip(*weights, strict=True))

    def speed(chosen: Any) -> float:
        return (numerator + sum(weights[j][1] for j in chosen)) / (denominator + sum(weights[j][2] for j in chosen))

    free = [j for j, (candidate, _, _) in enumerate(weights) if candidate]
    best = max(map(speed, chain.from_iterable(combinations(free, count) for count in range(len(free) + 1))))
    chosen = fastest(candidates, importance.float(), seconds.float(), numerator, denominator)
    assert not (chosen & ~candidates).any()
    assert speed(chosen.nonzero().flatten().tolist()) == pytest.approx(best, rel=1e-12)
    if numerator:
        bounded = fastest(candidates, importance.float(), seconds.float(), numerator, denominator, most=2)
        assert int(bounded.sum()) == min(2, int(chosen.sum()))
        assert not (bounded & ~chosen).any()


def test_where_nothing_matters_only_what_is_fixed_stays() -> None:
    assert not fastest(torch.ones(5, dtype=torch.bool), torch.zeros(5), torch.ones(5), 0.0, 1.0).any()
    assert not fastest(torch.ones(5, dtype=torch.bool), torch.zeros(5), torch.ones(5), 0.0, 0.0).any()


def test_the_smallest_of_each_layer_may_go() -> None:
    weights = torch.tensor([0.1, -0.2, 0.3, 0.4, 9.0, 8.0, 0.05])
    kept = torch.tensor([True, True, True, False, True, True, True])
    assert smallest_kept(weights, kept, [slice(0, 4), slice(4, 6)], 0.5).tolist() == [
        *(True, False, False, False),
        *(False, True),
        False,  # in no layer
    ]


def test_nothing_pruned_is_fedavg(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    modules = [copy.deepcopy(module) for _ in range(2)]
    for fitted, algorithm in zip(modules, (FedAvg(), PruneFL(interval=None, initial_passes=0)), strict=True):
        trainer = make_trainer(max_rounds=3)
        trainer.fit(fitted, federation(), algorithm)
        assert trainer.run.mask is None
        assert trainer.run.ledger.total_bytes("up") == 3 * 3 * 26 * 4
    np.testing.assert_allclose(vector(modules[0]), vector(modules[1]), rtol=0, atol=1e-7)


class Masks(Callback):
    def __init__(self) -> None:
        self.kept: list[set[int]] = []
        self.bits: list[dict[str, dict[str, int]]] = []
        self.logged: list[tuple[float, float]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.kept.append(set(trainer.run.mask.nonzero().flatten().tolist()) if trainer.run.mask is not None else set())
        self.bits.append(trainer.run.ledger.round_bits)
        metrics = trainer.callback_metrics
        self.logged.append((float(metrics["prune/kept"]), float(metrics["prune/rate"])))


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_weights_come_back_and_every_bit_is_counted(runner: str, make_trainer: MakeTrainer) -> None:
    """Test all clients in every round, so that Γ alone decides and no bound applies."""
    module, masks, trace = Perceptron(), Masks(), []
    flags = {"interval": 2, "fixed_share": 0.5}
    expected = oracle.prunefl(
        problem(rounds=12, cohort_size=6), vector(module), interval=2, share=0.3, fixed_seconds=10, trace=trace
    )
    trainer = make_trainer(max_rounds=12, clients_per_round=6, precision="64-true", callbacks=masks, runner=runner)
    trainer.fit(module, federation(), PruneFL(initial_passes=0, **flags))
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-8)
    trace[0] = set()  # there is no mask yet
    assert masks.kept == trace
    assert any(after - before for before, after in pairwise(trace[1:])), "some weights must come back"
    for round, bits in enumerate(masks.bits):
        kept = len(trace[round - 1]) if round > 1 else 26
        nothing = dict.fromkeys(bits["up"], 0)
        importance = {"scalars": 6 * 64 * 26} if round % 2 else {}
        has_changed = round > 1 and trace[round - 1] != trace[round - 2]
        mask = {"mask": 6 * 26} if has_changed else {}
        assert bits["up"] == nothing | {"model": 6 * 64 * kept} | importance
        assert bits["down"] == nothing | {"model": 6 * 64 * kept} | mask
        now = len(trace[round]) or 26
        assert masks.logged[round] == pytest.approx((now, (26 - now) / 20))


def test_what_clients_keep_is_dense_and_theirs_until_it_is_sent(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=5, precision="64-true")
    trainer.fit(Perceptron(), federation(), PruneFL(interval=4, initial_passes=0, fixed_share=5))
    given, run = problem(rounds=5), trainer.run
    assert run.mask is not None
    for client, state in run.clients.items():
        importance, took_part = state["importance"], [client in given.cohort(t) for t in range(5)]
        if took_part[4]:
            assert (importance[~run.mask] != 0).any(), "gradients of masked weights count too"
        elif took_part[3]:
            assert not importance.any()
        else:
            assert importance.any()


def test_convolutions_take_their_time(make_trainer: MakeTrainer) -> None:
    """Check 30 · 30 multiply-accumulates a sample for a weight of the first convolution, and one for the last layer."""
    from lightning_fl.data import Arrays
    from lightning_fl.steps.reconfiguration import Reconfiguration

    seen: list[torch.Tensor] = []

    class Looks(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            engine = trainer.fit_loop.engine
            step = next(step for step in trainer.algorithm.steps if isinstance(step, Reconfiguration))
            step = replace(step, seconds_per_mac=1.0, bandwidth=16.0)
            seen.append(step._seconds(engine.context, engine.server_side(), trainer.run.params))

    images = np.random.default_rng(0).integers(0, 255, (12, 32, 32, 3), dtype=np.uint8), np.arange(12) % 10
    data = Arrays(train=images, test=images, num_clients=3, batch_size=2)
    trainer = make_trainer(max_rounds=1, callbacks=Looks(), local_epochs=2)
    trainer.fit(ImageClassifier("cnn", num_classes=10), data, PruneFL(initial_passes=0))
    views = trainer.run.layout.views(seen[0])
    per_weight = {name.split(".")[-2]: set(x.flatten().tolist()) for name, x in views.items() if x.dim() > 1}
    samples, sending = 2 * 4, 2 * 32 / 16
    expected = {"conv1": 900, "conv2": 169, "conv3": 16, "fc1": 1, "fc2": 1}
    assert per_weight == {name: {samples * macs + sending} for name, macs in expected.items()}
    assert not any(x.any() for x in views.values() if x.dim() == 1)


def test_it_needs_server_data_to_begin_with(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"there are none: set --data.server_fraction.* or initial_passes 0"):
        make_trainer().fit(Perceptron(), federation(), PruneFL())


def test_it_has_the_only_mask(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(callbacks=MagnitudePruning())
    with pytest.raises(UserError, match="MagnitudePruning would replace the pruning mask that PruneFL sets"):
        trainer.fit(Perceptron(), federation(), PruneFL(initial_passes=0))


def test_a_callback_that_prunes_too_reports_beside_it(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1, callbacks=FilterPruning(0.5, prune_epoch=0, importance="magnitude"))
    trainer.fit(Convolved(), federation(), PruneFL(interval=None, initial_passes=0))
    assert trainer.callback_metrics["prune/rate"] == 0
    assert trainer.callback_metrics["prune/rate_2"] == 0.5


def test_the_server_stops_when_the_mask_settles(make_trainer: MakeTrainer) -> None:
    """Check that the mask settles at once with nothing to prune: six reconfigurations, the last after pass 10."""
    trainer = make_trainer(max_rounds=1)
    algorithm = PruneFL(interval=None, shrink=0.0, initial_passes=1000, initial_batches=1, initial_interval=2)
    algorithm.steps = (algorithm.steps[0], replace(algorithm.steps[1], start_accuracy=0.0))
    trainer.fit(Perceptron(), Served(9), algorithm)
    clients = sum(-(-len(problem(1, num_server=9).x[k]) // 4) for k in problem(1, num_server=9).cohort(0))
    assert trainer.run.num_steps == 11 + clients


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"interval": 0}, "interval of rounds must be a whole number of at least 1, got 0"),
        ({"shrink": 1.0}, r"\[0, 1\), got 1.0"),
        ({"max_density": 0.0}, r"max_density must lie in \(0, 1\], got 0.0"),
        ({"half_life": 0}, "half_life must be positive"),
        ({"bandwidth": 0}, "bandwidth must be positive"),
        ({"initial_passes": -1}, "initial_passes must be a whole number of at least 0"),
        ({"initial_batches": 0}, "initial_batches must be a whole number of at least 1"),
        ({"initial_interval": 0}, "initial_interval must be a whole number of at least 1"),
        ({"seconds_per_mac": -1}, "seconds_per_mac must be at least 0"),
        ({"fixed_share": -1}, "fixed_share must be at least 0"),
    ],
)
def test_values_outside_their_range_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PruneFL(**given)
