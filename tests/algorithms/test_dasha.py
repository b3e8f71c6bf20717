"""Test DASHA: its theorem, its limits, the invariant that server and clients share, refusals."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from quadratics import Quadratics, Regression
from toys import SIZES, Perceptron, federation, vector

from lightning_fl import UserError
from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms import DASHA, Algorithm, FedBuff
from lightning_fl.codecs import Dense, Differences, RandomK, TopK
from lightning_fl.features.privacy import ClientPrivacy
from lightning_fl.features.secure_aggregation import SecureAggregation
from lightning_fl.rules import GradientStep

N = len(SIZES)


def gradients(
    given: Quadratics, algorithm: Algorithm, rate: float, rounds: int, make_trainer: MakeTrainer
) -> tuple[list[float], float]:
    """Return the norm of the gradient of the mean loss after each round, and the bits that all clients have sent."""
    found = list[float]()

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            found.append(float(np.linalg.norm(given.gradient(vector(pl_module)))))

    num_clients, d = given.optima.shape
    flags = {"val_every_n_rounds": rounds, "precision": "64-true", "runner": "serial"}
    trainer = make_trainer(max_rounds=rounds, clients_per_round=num_clients, callbacks=Watch(), **flags)
    trainer.fit(Regression(d, rate), given.data(), algorithm)
    return found, 8 * trainer.run.ledger.total_bytes("up")


@pytest.mark.matrix
def test_converges_with_fewer_bits_than_compressed_gradient_descent(make_trainer: MakeTrainer) -> None:
    """Check clients that differ: the error of compressed gradients does not vanish, whatever the step; DASHA's does."""
    given, codec = Quadratics.drawn(num_clients=4, least=0.2, d=8), RandomK(0.25)
    compressed = Algorithm(GradientStep(), uplink=codec, aggregator=WeightedMean("uniform"))
    ours, our_bits = gradients(given, DASHA(codec), 0.4, 110, make_trainer)
    assert ours[109] < 1e-3
    assert ours[109] < 0.1 * ours[59] < 0.01 * ours[9], "linear: no floor"
    for rate in (0.03, 0.1, 0.3):
        others, bits = gradients(given, compressed, rate, 120, make_trainer)
        assert bits > our_bits
        assert min(others) > 20 * ours[109]


@pytest.mark.parametrize("momentum", [None, 0.3])
def test_without_loss_it_is_gradient_descent(momentum: float | None, make_trainer: MakeTrainer) -> None:
    given = Quadratics.drawn(num_clients=3, least=0.1)
    w, expected = np.zeros(4), []
    for _ in range(6):
        w = w - 0.7 * given.gradient(w)
        expected.append(np.linalg.norm(given.gradient(w)))
    found, _ = gradients(given, DASHA(Dense(), momentum), 0.7, 6, make_trainer)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_the_server_holds_the_mean_of_what_clients_keep(make_trainer: MakeTrainer) -> None:
    """Check drop-outs, absent clients and rejected uploads: g = (1/N) Σ g_k in every round."""
    gaps = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            kept = [memory["estimate/model"] for memory in trainer.run.client_memory.values()]
            total = trainer.run.server["0:Accumulate"]["total"]
            gaps.append(float((total - torch.stack(kept).sum(0) / N).abs().max()))

    flags = {"max_rounds": 8, "clients_per_round": 4, "dropout_rate": 0.3, "callbacks": Watch()}
    make_trainer(**flags, precision="64-true").fit(Perceptron(), federation(), DASHA(RandomK(0.3)))
    assert len(gaps) == 8
    assert max(gaps) < 1e-12


@pytest.mark.parametrize(
    ("make", "flags", "words"),
    [
        (lambda: DASHA(TopK(0.3)), {}, ["known bound", "TopK(alpha=0.3", "RandomK(), QSGD(), TernGrad()"]),
        (lambda: DASHA("Dense"), {}, ["Differences needs an object of kind Codec", "codec='Dense'"]),
        (lambda: DASHA(momentum=0.0), {}, ["the momentum of compressed differences", "0.0"]),
        (lambda: DASHA(batch="mini"), {}, ["did you mean 'minibatch'"]),
        (lambda: DASHA(uplink=Dense()), {}, ["DASHA fills the slot uplink itself"]),
        (
            lambda: DASHA(),
            {"privacy": ClientPrivacy(noise_multiplier=1.0)},
            ["Differences builds each message on those before", "clipped since"],
        ),
        (lambda: DASHA(Dense()), {"secure_aggregation": SecureAggregation()}, ["uplink (Differences)"]),
        (lambda: FedBuff(rule=GradientStep(), uplink=Differences(Dense())), {}, ["no step adds up"]),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    make: Callable[[], Algorithm], flags: dict[str, Any], words: list[str], make_trainer: MakeTrainer
) -> None:
    with pytest.raises(UserError) as error:
        make_trainer(**flags).fit(Perceptron(), federation(), make())
    assert [word for word in words if word not in str(error.value)] == []
