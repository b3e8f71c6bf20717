"""Test DataSharing, HybridFL and FedDF beyond the roster."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from torch.utils.data import TensorDataset
from toys import Normalised, Perceptron, Served, WithoutLogits, federation, vector

from lightning_fl import UserError
from lightning_fl.aggregators import KeepUploads, WeightedMean
from lightning_fl.algorithms import Algorithm, DataSharing, FedAvg, FedDF, FedDU, HRank, HybridFL, PruneFL
from lightning_fl.data import Arrays, Digits
from lightning_fl.data.samples.dataset_samples import DatasetSamples
from lightning_fl.features.loss_guard import LossGuard
from lightning_fl.modules import ImageClassifier
from lightning_fl.slots import Result, Upload

METHODS = [DataSharing(), FedDU(), HybridFL(), FedDF()]


@pytest.mark.parametrize("algorithm", METHODS, ids=lambda algorithm: algorithm.name)
def test_without_server_data_it_is_refused(algorithm: Algorithm, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=rf"^{algorithm.name} .*--data\.server_fraction, for example 0\.05"):
        make_trainer().fit(Perceptron(), federation(), algorithm)


ADVISED: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "on the server": (FedDU(), {}),
    "shared": (DataSharing(), {}),
    "loss guard": (FedAvg(), {"loss_guard": LossGuard(rounds=3)}),
    "PruneFL": (PruneFL(initial_passes=2), {}),
    "HRank": (HRank(prune_round=0), {}),
}


@pytest.mark.parametrize("case", ADVISED)
def test_the_advice_for_missing_server_data_is_enough(case: str, make_trainer: MakeTrainer) -> None:
    """Test that the sentence names `server_fraction` alone, and that a run with it starts."""
    method, flags = ADVISED[case]
    model = ImageClassifier(network="lenet5", num_classes=10, in_channels=1, image_size=32)
    with pytest.raises(UserError, match=r"--data\.server_fraction, for example 0\.05(?!.*client_fraction)"):
        make_trainer(max_rounds=1, **flags).fit(model, Digits(num_clients=10, image_size=32), method)
    make_trainer(max_rounds=1, **flags).fit(model, Digits(num_clients=10, image_size=32, server_fraction=0.05), method)


@pytest.mark.parametrize("algorithm", METHODS, ids=lambda algorithm: algorithm.name)
def test_server_data_change_the_result(algorithm: Algorithm, make_trainer: MakeTrainer) -> None:
    one = Normalised()
    other = copy.deepcopy(one)
    make_trainer(max_rounds=2).fit(one, Served(9), algorithm)
    make_trainer(max_rounds=2).fit(other, Served(9), FedAvg())
    for name, value in one.state_dict().items():
        assert torch.isfinite(value).all()
        assert name == "norm.num_batches_tracked" or not torch.equal(value, other.state_dict()[name]), name


def test_distillation_of_no_steps_is_fedavg(make_trainer: MakeTrainer) -> None:
    one = Perceptron()
    other = copy.deepcopy(one)
    make_trainer(max_rounds=3).fit(one, Served(9), FedDF(max_steps=0))
    make_trainer(max_rounds=3).fit(other, Served(9), FedAvg())
    np.testing.assert_array_equal(vector(one), vector(other))


@pytest.mark.parametrize("average", ["logits", "probs"])
def test_a_student_that_is_its_only_teacher_learns_nothing(average: Any, make_trainer: MakeTrainer) -> None:
    """Take one step a round: Adam divides by the gradient's size, so it would amplify rounding errors in the next step."""
    one = Perceptron()
    other = copy.deepcopy(one)
    flags = {"max_rounds": 2, "clients_per_round": 1, "precision": "64-true"}
    trainer = make_trainer(**flags)
    trainer.fit(one, Served(9), FedDF(average=average, max_steps=1))
    make_trainer(**flags).fit(other, Served(9), FedAvg())
    np.testing.assert_allclose(vector(one), vector(other), rtol=0, atol=1e-9)
    assert abs(trainer.callback_metrics["feddf/loss"]) < 1e-12


def test_a_teacher_has_its_own_running_statistics(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=2, clients_per_round=1, precision="64-true")
    trainer.fit(Normalised(), Served(9), FedDF(max_steps=1, freeze_batch_norm=True))
    assert abs(trainer.callback_metrics["feddf/loss"]) < 1e-12


def test_frozen_batch_norm_keeps_the_averaged_statistics(make_trainer: MakeTrainer) -> None:
    start = Normalised()
    models = {}
    for name, algorithm in {
        "average": FedAvg(),
        "frozen": FedDF(max_steps=5, freeze_batch_norm=True),
        "moving": FedDF(max_steps=5),
    }.items():
        models[name] = copy.deepcopy(start)
        make_trainer(max_rounds=1).fit(models[name], Served(9), algorithm)
    assert torch.equal(models["frozen"].norm.running_mean, models["average"].norm.running_mean)
    assert not torch.equal(models["frozen"].norm.weight, models["average"].norm.weight)
    assert not torch.equal(models["moving"].norm.running_mean, models["average"].norm.running_mean)


def test_a_student_with_batch_norm_skips_a_batch_of_one_sample(make_trainer: MakeTrainer) -> None:
    """Check nine samples in batches of four or eight: the last one has nothing to normalise with."""
    for batch_size, steps in ((4, 2), (8, 1)):
        trainer = make_trainer(max_rounds=1)
        trainer.fit(Normalised(), Served(9), FedDF(max_steps=steps, batch_size=batch_size, val_fraction=0.0))
        assert trainer.callback_metrics["feddf/steps"] == steps


@pytest.mark.parametrize(("num_server", "batch_size"), [(1, 8), (9, 1)])
def test_a_student_with_batch_norm_needs_two_samples(
    num_server: int, batch_size: int, make_trainer: MakeTrainer
) -> None:
    method = FedDF(max_steps=2, batch_size=batch_size, val_fraction=0.0)
    with pytest.raises(UserError, match="the student has batch normalisation, which cannot train on one sample"):
        make_trainer().fit(Normalised(), Served(num_server), method)
    frozen = FedDF(max_steps=2, batch_size=batch_size, val_fraction=0.0, freeze_batch_norm=True)
    trainer = make_trainer(max_rounds=1)
    trainer.fit(Normalised(), Served(num_server), frozen)
    assert trainer.callback_metrics["feddf/steps"] == 2


def test_the_best_validated_student_is_kept(make_trainer: MakeTrainer) -> None:
    """Hold out three of nine samples; the learning rate ruins the student, so the first validated one is the best."""
    trainer = make_trainer(max_rounds=1)
    trainer.fit(Perceptron(), Served(9), FedDF(max_steps=3, val_fraction=0.34, learning_rate=0.01))
    metrics = trainer.callback_metrics
    assert metrics["feddf/steps"] == 3
    assert round(float(metrics["feddf/accuracy"]) * 3, 5) in (0, 1, 2, 3)


class WithDropout(Perceptron):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(torch.nn.functional.dropout(torch.tanh(self.hidden(x)), training=self.training))


class Draws(Callback):
    """Draw from torch's global generator, as the clients of another process would."""

    def on_client_message(self, trainer: Any, pl_module: Any, message: Any) -> None:
        torch.rand(1)


def test_dropout_of_the_student_depends_on_seed_and_round_alone(make_trainer: MakeTrainer) -> None:
    one = WithDropout()
    other = copy.deepcopy(one)
    make_trainer(max_rounds=2).fit(one, Served(9), FedDF(max_steps=3))
    make_trainer(max_rounds=2, callbacks=Draws()).fit(other, Served(9), FedDF(max_steps=3))
    np.testing.assert_array_equal(vector(one), vector(other))


class ReadByLoader(Served):
    """Data with the same samples, read through a DataLoader."""

    def load(self) -> Any:
        train, test = super().load()
        read = DatasetSamples(TensorDataset(*self.samples))
        read.labels = train.labels
        return read, test


def test_distillation_reads_a_dataset_in_whole_passes(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check one loader for each teacher and pass, not for each minibatch; the result equals that with tensors."""
    passes: list[int] = []
    batches = DatasetSamples.batches

    def count(self: DatasetSamples, batch_size: int, indices: Any = None) -> Any:
        passes.append(len(indices))
        return batches(self, batch_size, indices)

    monkeypatch.setattr(DatasetSamples, "batches", count)
    one = Perceptron()
    other = copy.deepcopy(one)
    method = FedDF(max_steps=7, batch_size=4, learning_rate=0.02)
    make_trainer(max_rounds=1).fit(one, Served(9), method)
    make_trainer(max_rounds=1).fit(other, ReadByLoader(9), method)
    np.testing.assert_allclose(vector(other), vector(one), rtol=0, atol=1e-6)
    # Two samples to check for logits, three teachers, and three passes of three minibatches for seven steps.
    assert [count for count in passes if count in (2, 9)] == [2] + [9] * (3 + 3)


class Demanding(Perceptron):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x * mask)


class OneNumber(Perceptron):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, :1]


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (OneNumber(), r"logits of at least two classes, .* OneNumber.forward\(inputs\) returns one number a sample"),
        (WithoutLogits(), r"WithoutLogits.forward\(inputs\) to return logits .*got \(\)"),
        (Demanding(), "it fails: .*mask"),
    ],
    ids=["one logit", "no logits", "more inputs"],
)
def test_distillation_needs_logits(module: Perceptron, sentence: str, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=sentence):
        make_trainer().fit(module, Served(9), FedDF())


def test_members_are_what_came_in() -> None:
    aggregator, accumulator = KeepUploads(WeightedMean()), {}
    for client, weight in ((3, 1.0), (5, 3.0)):
        result = Result(client, {}, weight, {}, {}, {}, 1)
        aggregator.add(accumulator, Upload(result, {"model": torch.full((2,), float(client))}))
    merged = aggregator.finish(accumulator)
    assert merged["model"].tolist() == [4.5, 4.5]
    assert merged["uploads/model"].tolist() == [[3.0, 3.0], [5.0, 5.0]]


@pytest.mark.parametrize(("cap", "each"), [(1.0, 10), (0.05, 2)])
def test_shared_images_are_booked_as_bytes_and_labels_as_32_bits(
    cap: float, each: int, make_trainer: MakeTrainer
) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(60, 8, 8, 3), dtype=np.uint8)
    labels = rng.integers(3, size=60)
    data = Arrays(
        train=(images, labels),
        test=(images[:5], labels[:5]),
        num_clients=4,
        client_fraction=5 / 6,
        server_fraction=0.2,
    )
    model = ImageClassifier("linear", num_classes=3, in_channels=3, image_size=8)
    trainer = make_trainer(max_rounds=1, clients_per_round=2)
    trainer.fit(model, data, DataSharing(cap=cap))
    assert trainer.run.ledger.setup() == {"up": 0, "down": 4 * each * (8 * 3 * 8 * 8 + 32)}
    assert trainer.run.ledger.setup_bits["down"]["data"] == trainer.run.ledger.setup()["down"]
    assert data.client_sizes.sum() == 50, "the user's data must not change"


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: DataSharing(cap=0.0), "0.0"),
        (lambda: DataSharing(cap=1.5), "1.5"),
        (lambda: DataSharing(warmup_epochs=-1), "-1"),
        (lambda: FedDF(max_steps=-1), "-1"),
        (lambda: FedDF(batch_size=0), "0"),
        (lambda: FedDF(temperature=0.0), "0.0"),
        (lambda: FedDF(learning_rate=-1e-3), "-0.001"),
        (lambda: FedDF(val_fraction=1.0), "1.0"),
        (lambda: FedDF(average="logit"), "did you mean 'logits'"),  # type: ignore[arg-type]
    ],
)
def test_hyper_parameters_outside_their_range_are_refused(make: Callable[[], Algorithm], given: str) -> None:
    with pytest.raises(UserError, match=given):
        make()
