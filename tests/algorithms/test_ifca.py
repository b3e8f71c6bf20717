"""Test IFCA: planted clusters, its limit, all of its models, what clients predict with, refusals."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from quadratics import Quadratics, Regression
from roster import problem
from toys import SIZES, Normalised, Perceptron, federation, samples, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.aggregators import MeanOfEach, WeightedMean
from lightning_fl.algorithms import IFCA, Algorithm, FedAvg, FedBuff
from lightning_fl.callbacks import ClientEvaluation, EnergyMeter, MagnitudePruning
from lightning_fl.codecs import Dense, Followed, OneBit
from lightning_fl.features.clock import ClientClock, SimulatedClock
from lightning_fl.features.privacy import ClientPrivacy, LocalPrivacy
from lightning_fl.features.secure_aggregation import SecureAggregation
from lightning_fl.personal import BestOfModels
from lightning_fl.rules import BestModel
from lightning_fl.steps import Apply, Compress, FurtherModels, Momentum

FURTHER = "1:FurtherModels"


def models_of(trainer: FederatedTrainer) -> list[np.ndarray]:
    """Return all models of a run."""
    return [x.double().numpy() for x in (trainer.run.params, *trainer.run.server[FURTHER].values())]


@pytest.mark.matrix
def test_two_planted_clusters_separate(make_trainer: MakeTrainer) -> None:
    """Check six clients with two optima: each cluster has a model at its optimum, which its clients find, and FedAvg neither."""
    drawn = Quadratics.drawn(num_clients=6, least=0.3, d=4)
    centres = np.array([[1.0, -2.0, 0.5, 1.5], [-1.5, 1.0, 1.0, -2.0]])
    members = np.array([0, 1, 0, 1, 1, 0])
    given = Quadratics(drawn.curvatures, centres[members] + 0.05 * drawn.optima)
    optima = [Quadratics(given.curvatures[members == j], given.optima[members == j]).optimum for j in (0, 1)]
    module = Regression(4, lr=0.5, start=0.7)
    flags = {"max_rounds": 70, "clients_per_round": 6, "precision": "64-true"}
    trainer = make_trainer(**flags)
    trainer.fit(module, given.data(), IFCA(clusters=2))
    models = models_of(trainer)
    order = np.argsort([np.abs(model - optima[0]).max() for model in models])
    for place, optimum in zip(order, optima, strict=True):
        np.testing.assert_allclose(models[place], optimum, atol=1e-5)
    assert trainer.callback_metrics["ifca/models"] == 2
    average = Regression(4, lr=0.5, start=0.7)
    make_trainer(**flags).fit(average, given.data(), FedAvg())
    assert min(np.abs(vector(average) - optimum).max() for optimum in optima) > 0.5


def test_with_one_model_it_is_fedavg_bit_for_bit(make_trainer: MakeTrainer) -> None:
    ends, start = [], Perceptron()
    for algorithm in (FedAvg(), IFCA(clusters=1)):
        module = copy.deepcopy(start)
        trainer = make_trainer(max_rounds=3)
        trainer.fit(module, federation(), algorithm)
        numbers = {name: float(x) for name, x in trainer.callback_metrics.items() if not name.startswith("time/")}
        ends.append((vector(module).tolist(), numbers))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("clock", [ClientClock, SimulatedClock])
@pytest.mark.parametrize("computation", [None, 7.0])
def test_losses_take_the_time_of_forward_passes(clock: Any, computation: Any, make_trainer: MakeTrainer) -> None:
    """Check that with C models clients compute (3 E + C) / 3 E times as long as with one, and use as much more energy."""
    epochs, macs, ends = 2, 3 * 4 + 4 * 2, []
    speeds = {"macs_per_second": 1e3, "uplink_mebibytes_per_second": 1e6, "downlink_mebibytes_per_second": 1e6}
    flags = {"max_rounds": 1, "clients_per_round": 6, "local_epochs": epochs}
    for clusters in (1, 3):
        given = clock(computation_seconds=computation, **speeds)
        trainer = make_trainer(**flags, clock=given, callbacks=EnergyMeter("wifi"))
        trainer.fit(Perceptron(), federation(), IFCA(clusters=clusters))
        ends.append(trainer.fit_loop.rows[0])
    one, several = ends
    assert several["clients/loss_samples"] == 3 * sum(SIZES)
    assert "clients/loss_samples" not in one
    longer = (3 * epochs + 3) / (3 * epochs)
    if computation is None:
        assert one["time/simulated_seconds"] == pytest.approx(3 * macs * epochs * max(SIZES) / 1e3, rel=1e-4)
    assert several["time/simulated_seconds"] == pytest.approx(longer * one["time/simulated_seconds"], rel=1e-4)
    assert several["energy/compute_joules"] == pytest.approx(longer * one["energy/compute_joules"])
    plan = make_trainer(**flags).plan(Perceptron(), federation(), IFCA(clusters=3))
    assert plan.macs == 3 * macs * epochs * sum(SIZES) + 3 * (macs * 3 * sum(SIZES) // 3)


def test_all_models_are_the_papers(make_trainer: MakeTrainer) -> None:
    """Check eight rounds in which clients train every model; a model that nobody prefers in a round stays bit for bit."""
    module, found, counts = Perceptron(), [], []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            found.append(models_of(trainer))
            counts.append(int(trainer.callback_metrics["ifca/models"]))

    flags = {"max_rounds": 8, "clients_per_round": 3, "precision": "64-true", "callbacks": Watch()}
    start = vector(module)
    make_trainer(**flags).fit(module, federation(), IFCA(clusters=3))
    before = [start, *(oracle.turned_signs(start, number) for number in (1, 2))]
    moved = set[int]()
    for t, (models, count) in enumerate(zip(found, counts, strict=True)):
        expected = oracle.ifca(problem(rounds=t + 1), start, clusters=3)
        stays = [np.array_equal(model, earlier) for model, earlier in zip(models, before, strict=True)]
        for model, other in zip(models, expected, strict=True):
            np.testing.assert_allclose(model, other, rtol=0, atol=1e-10)
        assert count == stays.count(False)
        moved |= {j for j, stay in enumerate(stays) if not stay}
        before = models
    assert len(moved) > 1, "clients disagree"
    assert 0 < min(counts) < 3


class Chosen(Callback):
    """Callback that measures by hand what each client predicts with after each round."""

    def __init__(self) -> None:
        self.means, self.used = list[float](), set[int]()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        given, losses, models = problem(1), [], models_of(trainer)
        test = [z.double().numpy() for z in samples(10, seed=1)]
        for client, (x, y) in enumerate(zip(given.x, given.y, strict=True)):
            best = int(np.argmin([oracle.loss(model, x, y) for model in models]))
            self.used.add(best)
            losses.append(oracle.loss(models[best], *test))
            with trainer.client_model(client) as module:
                np.testing.assert_allclose(vector(module), models[best], rtol=0, atol=1e-12)
        self.means.append(sum(losses) / len(losses))


@pytest.mark.matrix
def test_each_client_predicts_with_the_model_that_suits_it(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """Check validation in a fit, after it and of its checkpoint, tests in rounds, and the evaluation of clients."""
    watch, data = Chosen(), federation()
    flags = {"precision": "64-true", "max_rounds": 3, "clients_per_round": 6}
    trainer = make_trainer(callbacks=watch, **flags, **keeps_files)
    trainer.fit(Perceptron(), data, IFCA(clusters=2))
    assert len(watch.used) == 2
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(watch.means[-1], rel=1e-9)
    assert float(trainer.callback_metrics["val/loss_server"]) != pytest.approx(watch.means[-1], rel=1e-3)
    last = tmp_path / "checkpoints" / "last.ckpt"
    for again, path in ((trainer, None), (make_trainer(**flags), last)):
        module = again.lightning_module if path is None else Perceptron()
        (found,) = again.validate(module, data, algorithm=IFCA(clusters=2), ckpt_path=path)
        assert found["val/loss"] == pytest.approx(watch.means[-1], rel=1e-9)
    (alone,) = make_trainer(**flags).validate(Perceptron(), data, algorithm=IFCA(clusters=2))
    assert alone["val/loss"] == pytest.approx(alone["val/loss_server"], rel=1e-9), (
        "a module without a run has one model"
    )
    held_out = federation()
    held_out.val_fraction = 0.3
    other = make_trainer(callbacks=ClientEvaluation(1), test_every_n_rounds=1, **flags)
    other.fit(Perceptron(), held_out, IFCA(clusters=2))
    metrics = {name: float(value) for name, value in other.callback_metrics.items()}
    assert metrics["val/loss_clients_mean"] == pytest.approx(metrics["val/loss_local"], rel=1e-9)
    (tested,) = other.test(other.lightning_module, held_out, algorithm=IFCA(clusters=2))
    assert tested["test/loss"] == pytest.approx(metrics["test/loss"], rel=1e-9)
    assert metrics["test/loss"] != pytest.approx(metrics["test/loss_server"], rel=1e-3)


def test_each_model_is_validated_once_not_for_each_client(make_trainer: MakeTrainer) -> None:
    batches = []

    class Counting(Perceptron):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            batches.append(batch_idx)
            super().validation_step(batch, batch_idx)

    watch = Chosen()
    flags = {"max_rounds": 2, "clients_per_round": 6, "precision": "64-true", "num_sanity_val_steps": 0}
    trainer = make_trainer(callbacks=watch, **flags)
    trainer.fit(Counting(), federation(), IFCA(clusters=2))
    assert len(watch.used) == 2
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(watch.means[-1], rel=1e-9)
    assert len(batches) == 2 * 3 * (2 + 2), "three batches in two rounds, for both models and twice for the server's"


class Halved(BestOfModels):
    """Predict with half of the best model."""

    def adapt(self, params: torch.Tensor, own: Any) -> torch.Tensor:
        return super().adapt(params, own) / 2


def test_whoever_changes_the_best_model_makes_no_choice_among_those_of_all() -> None:
    own: Any = SimpleNamespace(loss=lambda model: model.sum(), shared={"model/2": torch.zeros(3)})
    assert BestOfModels(2).choice(torch.ones(3), own) == 1
    assert Halved(2).choice(torch.ones(3), own) is None


def test_a_mask_holds_in_all_models(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=3, callbacks=MagnitudePruning(0.4, prune_epoch=1))
    trainer.fit(Perceptron(), federation(), IFCA(clusters=2))
    assert trainer.run.mask is not None
    pruned = ~trainer.run.mask.numpy()
    assert 0 < pruned.sum() < 26
    assert all((model[pruned] == 0).all() for model in models_of(trainer))


def test_no_model_changes_where_the_optimizer_lacks_parameters(make_trainer: MakeTrainer) -> None:
    """Check it with a codec that would move zeros, in a round in which clients train both models."""
    module = Perceptron(configure=lambda m: torch.optim.SGD(m.output.parameters(), lr=0.1))
    start = vector(module)
    trainer = make_trainer(max_rounds=1, clients_per_round=6)
    trainer.fit(module, federation(), IFCA(clusters=2, uplink=OneBit(groups="global")))
    for model, before in zip(models_of(trainer), (start, oracle.turned_signs(start, 1)), strict=True):
        np.testing.assert_array_equal(model[:16], before[:16])
        assert (model[16:] != before[16:]).any()


def test_models_begin_as_draws_of_the_same_size() -> None:
    params = torch.randn(4000, generator=torch.Generator().manual_seed(1))
    params[::4] = 0
    for turned in (0.5, 0.1):
        states = FurtherModels(3, turned).init(params)
        assert list(states) == ["model/2", "model/3"]
        for model in states.values():
            assert torch.equal(model.abs(), params.abs())
            share = float((model != params).sum()) / 3000
            assert share == pytest.approx(turned, abs=4 * (turned * (1 - turned) / 3000) ** 0.5)
        assert not torch.equal(*states.values())


def parts(**slots: Any) -> Algorithm:
    """Return the parts of IFCA with two models, put together by hand."""
    return Algorithm(
        **{"rule": BestModel(2), "aggregator": MeanOfEach(2), "steps": [Apply(), FurtherModels(2)]} | slots
    )


def test_the_parts_put_together_by_hand_are_ifca(make_trainer: MakeTrainer) -> None:
    ends, start = [], Perceptron()
    for algorithm in (IFCA(), parts()):
        module = copy.deepcopy(start)
        make_trainer(clients_per_round=6).fit(module, federation(), algorithm)
        ends.append(vector(module).tolist())
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("make", "flags", "words"),
    [
        (lambda: IFCA(clusters=0), {}, ["at least 1, got 0"]),
        (lambda: IFCA(turned=0.0), {}, ["turned, the probability that a sign is turned", "0.0"]),
        (lambda: IFCA(steps=[Momentum()]), {}, ["IFCA fills the slot", "steps"]),
        (lambda: parts(aggregator=WeightedMean()), {}, ["FurtherModels needs 'model/2'", "'mask/chosen'"]),
        (lambda: parts(steps=[Apply()]), {}, ["BestModel needs 'model/2', which no step shares"]),
        (
            lambda: parts(downlink=Followed(Dense()), steps=[Apply(), FurtherModels(2), Compress(Dense())]),
            {},
            ["no other step may share anything"],
        ),
        (
            lambda: parts(steps=[Apply(), FurtherModels(2), Momentum()]),
            {},
            ["Momentum would change the first model alone"],
        ),
        (
            lambda: parts(steps=[Apply(0.5), FurtherModels(2)]),
            {},
            ["Apply would change", "use Apply() without a learning"],
        ),
        (lambda: IFCA(), {}, ["buffers such as 'norm.running_mean'", "GroupNorm in place of BatchNorm"]),
        (lambda: IFCA(), {"runner": "stacked"}, ["BestModel reads losses of whole models", "'auto' or 'serial'"]),
        (lambda: IFCA(), {"privacy": ClientPrivacy(noise_multiplier=1.0)}, ["MeanOfEach needs more than a sum"]),
        (lambda: IFCA(), {"privacy": LocalPrivacy(noise_multiplier=1.0)}, ["'mask/chosen', no vector of the model"]),
        (lambda: IFCA(), {"secure_aggregation": SecureAggregation()}, ["aggregator (MeanOfEach)"]),
        (lambda: FedBuff(rule=BestModel(2)), {}, ["BestModel needs 'model/2'"]),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    make: Callable[[], Algorithm], flags: dict[str, Any], words: list[str], make_trainer: MakeTrainer
) -> None:
    module = Normalised() if "norm" in words[0] else Perceptron()
    with pytest.raises(UserError) as error:
        make_trainer(**flags).fit(module, federation(), make())
    assert [word for word in words if word not in str(error.value)] == []
