"""Test FedExP: its server learning rate, the mean of two models that is evaluated, refusals."""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from roster import problem
from toys import Perceptron, federation, read_rows, samples, vector

from lightning_fl import UserError
from lightning_fl.aggregators import ExtrapolatedMean, Krum, WeightedMean
from lightning_fl.algorithms import Algorithm, FedAvg, FedExP
from lightning_fl.data import IID, Arrays
from lightning_fl.slots import Merging, Result, RoundContext, Upload
from lightning_fl.vectors.layout import Layout

COLUMN = "fedexp/server_learning_rate"


def merged(deltas: list[list[float]], sizes: list[float], **hyper_parameters: Any) -> tuple[torch.Tensor, float]:
    """Return the merged change of uploads, and η_g."""
    weighting = hyper_parameters.pop("weighting", "uniform")
    aggregator, accumulator = ExtrapolatedMean(WeightedMean(weighting), **hyper_parameters), dict[str, Any]()
    for client, (delta, size) in enumerate(zip(deltas, sizes, strict=True)):
        message = {"model": torch.tensor(delta), "buffers": torch.ones(2)}
        aggregator.add(accumulator, Upload(Result(client, {}, size, {}, {}, {}, num_steps=1), message))
    merging = Merging(RoundContext(Layout.of({}), Layout.of({}), num_clients=9))
    message = aggregator.combine(accumulator, merging)
    torch.testing.assert_close(message["buffers"], torch.ones(2, dtype=torch.float64))
    return message["model"], merging.metrics[COLUMN]


def test_changes_that_agree_are_averaged_and_orthogonal_ones_extrapolated() -> None:
    change, rate = merged([[3.0, 4.0]] * 4, [1, 2, 3, 4])
    assert rate == 1
    assert change.tolist() == [3, 4]
    change, rate = merged(torch.eye(6).tolist(), [1.0] * 6, eps=1e-9)
    assert rate == pytest.approx(6 / 2, rel=1e-6)
    assert change.tolist() == pytest.approx([3 / 6] * 6, rel=1e-6)


def test_epsilon_bounds_the_rate_where_changes_cancel() -> None:
    _, rate = merged([[1.0, 0.0], [-1.0, 0.0]], [1, 1], eps=0.125)
    assert rate == 1 / (2 * 0.125)


def test_samples_weigh_if_asked() -> None:
    change, rate = merged([[1.0, 0.0], [0.0, 2.0]], [3, 1], eps=1e-3, weighting="samples")
    expected = (0.75 * 1 + 0.25 * 4) / (2 * (0.75**2 + 0.5**2 + 1e-3))
    assert rate == pytest.approx(max(1.0, expected))
    assert change.tolist() == pytest.approx([0.75 * rate, 0.5 * rate])


def test_the_rate_is_the_papers_and_at_least_one_in_every_round(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    module, rates = Perceptron(), list[float]()
    oracle.fedexp(problem(rounds=12, cohort_size=4), vector(module), eps=1e-4, rates=rates)
    trainer = make_trainer(
        max_rounds=12, clients_per_round=4, precision="64-true", default_root_dir=tmp_path, logger=True
    )
    trainer.fit(module, federation(), FedExP(eps=1e-4))
    logged = [float(row[COLUMN]) for row in read_rows(tmp_path)]
    np.testing.assert_allclose(logged, rates, rtol=1e-6)
    assert min(logged) >= 1
    assert max(logged) > 1.05


def test_with_a_large_epsilon_it_is_fedavg_with_equal_weights(make_trainer: MakeTrainer) -> None:
    one = Perceptron()
    other = copy.deepcopy(one)
    make_trainer(max_rounds=3, precision="64-true").fit(one, federation(), FedExP(eps=1e9))
    uniform = Algorithm(aggregator=WeightedMean("uniform"))
    make_trainer(max_rounds=3, precision="64-true").fit(other, federation(), uniform)
    np.testing.assert_array_equal(vector(one), vector(other))


class Shown(Perceptron):
    """Perceptron that keeps the models on which it is validated and tested."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: dict[str, list[np.ndarray]] = {"validation": [], "test": []}

    def on_validation_epoch_start(self) -> None:
        self.shown["validation"].append(vector(self))

    def on_test_epoch_start(self) -> None:
        self.shown["test"].append(vector(self))


def test_the_mean_of_the_last_two_models_is_evaluated_and_the_last_is_sent(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    module = Shown()
    models = [vector(module)]

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            models.append(trainer.run.params.double().numpy().copy())
            np.testing.assert_array_equal(vector(pl_module), models[-1])

    flags = {"max_rounds": 4, "test_every_n_rounds": 1, "precision": "64-true", "num_sanity_val_steps": 0}
    trainer = make_trainer(**flags, callbacks=Watch(), default_root_dir=tmp_path, enable_checkpointing=True)
    algorithm = FedExP(eps=1e-4, mean_of_two=True)
    data = Arrays(
        train=samples(40), test=samples(10, seed=1), num_clients=6, batch_size=4, partition=IID(), val_fraction=0.2
    )
    trainer.fit(module, data, algorithm)
    means = [(before + after) / 2 for before, after in pairwise(models)]
    np.testing.assert_allclose(module.shown["validation"], means, rtol=0, atol=1e-12)
    np.testing.assert_allclose(module.shown["test"], means, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(vector(module), models[-1])
    # Later, the model in memory and that of the checkpoint are evaluated alike, and another model as it is.
    trainer.test(module, data, algorithm=algorithm)
    np.testing.assert_allclose(module.shown["test"][-1], means[-1], rtol=0, atol=1e-12)
    trainer.test(module, data, algorithm=algorithm, ckpt_path="last")
    np.testing.assert_allclose(module.shown["test"][-1], means[-1], rtol=0, atol=1e-12)
    other = Shown()
    trainer.test(other, data, algorithm=algorithm)
    np.testing.assert_array_equal(other.shown["test"][-1], vector(other))
    trainer.test(other, data, algorithm=FedAvg(), ckpt_path="last")
    np.testing.assert_array_equal(other.shown["test"][-1], models[-1])


def test_the_bits_are_those_of_fedavg_with_the_mean_of_two(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=2)
    trainer.fit(Perceptron(), federation(), FedExP(mean_of_two=True))
    assert trainer.run.ledger.bits("up") == trainer.run.ledger.bits("down") == 3 * 32 * 26


def test_refuses_an_epsilon_that_is_not_positive_and_what_is_no_mean() -> None:
    with pytest.raises(UserError, match="extrapolates a mean, got inner=Krum"):
        ExtrapolatedMean(Krum(1))
    with pytest.raises(UserError, match="eps, which bounds FedExP's server learning rate, must be positive, got 0"):
        FedExP(eps=0)
