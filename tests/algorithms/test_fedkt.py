"""Test FedKT beyond the roster: the count of votes, the mode that stops, bits of the set-up, its requirements."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from roster import problem
from toys import Normalised, Perceptron, Served, Unlabelled, WithoutLogits, federation, read_rows, vector

from lightning_fl import UserError
from lightning_fl.algorithms import FedAvg, FedKT
from lightning_fl.algorithms.fedkt import tally
from lightning_fl.data import Arrays
from lightning_fl.modules import ImageClassifier

BRIEF: dict[str, Any] = {"t": 2, "epochs": 3, "learning_rate": 0.02, "batch_size": 4}


def ballots(*students: tuple[int, ...]) -> torch.Tensor:
    """Return one-hot votes among three classes (s, m, 3)."""
    return torch.nn.functional.one_hot(torch.tensor(students), 3)


def test_unanimous_students_give_their_label_and_split_ones_none() -> None:
    votes = tally(ballots((0, 2, 1), (0, 1, 1)), consistent=True)
    assert votes.tolist() == [[2, 0, 0], [0, 0, 0], [0, 2, 0]]
    assert tally(ballots((0, 2, 1), (0, 1, 1)), consistent=False).tolist() == [[2, 0, 0], [0, 1, 1], [0, 2, 0]]
    assert tally(ballots((2, 0)), consistent=True).tolist() == [[0, 0, 1], [1, 0, 0]], "a single student always agrees"


class Alone(Served):
    """Data of which one client has all samples."""

    def __init__(self, client: int) -> None:
        super().__init__(9)
        self.alone = client

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        self.client_sizes[np.arange(6) != self.alone] = 0


@pytest.mark.parametrize("consistent", [True, False])
def test_inputs_without_a_vote_are_left_out(consistent: bool, make_trainer: MakeTrainer) -> None:
    """Check that a client with differing students does not vote, and that the final model learns the other inputs."""
    module, trace = Perceptron(), []
    given = problem(rounds=0, absent=frozenset({0, 1, 3, 4, 5}), num_server=9)
    expected = oracle.fedkt(
        given, vector(module), s=2, t=2, epochs=3, eta=0.02, batch_size=4, consistent=consistent, trace=trace
    )
    assert [int(sum(votes)) for votes in trace[0]].count(0) == (5 if consistent else 0)
    trainer = make_trainer(max_rounds=9, clients_per_round=1, precision="64-true")
    trainer.fit(module, Alone(2), FedKT(mode="one_shot", consistent=consistent, **BRIEF))
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)


def test_students_that_never_agree_leave_the_initial_model(
    make_trainer: MakeTrainer, says_lost: Callable[..., Any]
) -> None:
    module = Perceptron()
    before = vector(module)
    with says_lost("no input of the server got a vote"):
        make_trainer(clients_per_round=1).fit(module, Alone(5), FedKT(mode="one_shot", **BRIEF))
    np.testing.assert_array_equal(vector(module), before)


def test_one_shot_makes_one_round_without_clients_and_ends(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    module = Perceptron()
    expected = oracle.fedkt(problem(rounds=0, num_server=9), vector(module), s=2, t=2, epochs=3, eta=0.02, batch_size=4)
    trainer = make_trainer(max_rounds=5, val_every_n_rounds=3, precision="64-true", **keeps_files)
    trainer.fit(module, Served(9), FedKT(mode="one_shot", **BRIEF))
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)
    (row,) = read_rows(tmp_path)
    assert 0 <= float(row["val/accuracy"]) <= 1
    told = {name: int(row[name]) for name in row if name.startswith(("clients/", "comm/")) and "total" not in name}
    assert told == {
        "clients/selected": 0,
        "clients/accepted": 0,
        "clients/rejected": 0,
        "clients/dropped": 0,
        "clients/samples": 0,
        "comm/uplink_bits": 0,
        "comm/downlink_bits": 0,
        "comm/setup_uplink_bits": 6 * 2 * 64 * 26,
        "comm/setup_downlink_bits": 6 * 32 * 3 * 9,
    }
    again = make_trainer(max_rounds=5, precision="64-true", **keeps_files)
    again.fit(Perceptron(), Served(9), FedKT(mode="one_shot", **BRIEF), ckpt_path="last")
    assert len(read_rows(tmp_path)) == 1, "a run whose one round is done must not train again"


def test_fedavg_goes_on_from_the_model_of_the_set_up(make_trainer: MakeTrainer) -> None:
    start = Perceptron()
    taught, both = copy.deepcopy(start), copy.deepcopy(start)
    make_trainer().fit(taught, Served(9), FedKT(mode="one_shot", **BRIEF))
    make_trainer(max_rounds=3).fit(taught, Served(9), FedAvg())
    make_trainer(max_rounds=3).fit(both, Served(9), FedKT(**BRIEF))
    np.testing.assert_allclose(vector(both), vector(taught), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("s", "t", "down"), [(1, 1, 0), (2, 1, 0), (1, 2, 1), (3, 2, 1)])
def test_students_go_up_and_images_down_once(s: int, t: int, down: int, make_trainer: MakeTrainer) -> None:
    """Count bits: 8·C·H·W·n_0 down unless the teachers are sent up themselves, s·q·d up."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(256, size=(60, 8, 8, 3), dtype=np.uint8), rng.integers(3, size=60)
    data = Arrays(
        train=(images, labels), test=(images[:5], labels[:5]), num_clients=4, client_fraction=5 / 6, server_fraction=0.2
    )
    model = ImageClassifier("linear", num_classes=3, in_channels=3, image_size=8)
    trainer = make_trainer(max_rounds=1, clients_per_round=2)
    trainer.fit(model, data, FedKT(mode="one_shot", s=s, t=t, epochs=1))
    d, ledger = 3 * (8 * 8 * 3 + 1), trainer.run.ledger
    assert ledger.setup_bits["down"] == dict.fromkeys(ledger.setup_bits["down"], 0) | {"data": down * 4 * 8 * 192 * 10}
    assert ledger.setup_bits["up"] == dict.fromkeys(ledger.setup_bits["up"], 0) | {"model": 4 * s * 32 * d}


def test_running_statistics_go_up_too_and_the_final_ones_stay(make_trainer: MakeTrainer) -> None:
    module = Normalised()
    before = module.norm.running_mean.clone()
    trainer = make_trainer(max_rounds=1)
    trainer.fit(module, Served(9), FedKT(mode="one_shot", s=1, **BRIEF))
    numel = sum(parameter.numel() for parameter in module.parameters())
    up = trainer.run.ledger.setup_bits["up"]
    assert up["model"] == 6 * 32 * numel
    assert up["buffers"] == 6 * 32 * 2 * len(before)
    assert not torch.equal(module.norm.running_mean, before)
    assert torch.isfinite(module.norm.running_mean).all()


def test_every_client_is_announced_and_every_step_counted(make_trainer: MakeTrainer) -> None:
    seen: list[tuple[int, int, int]] = []

    class Watch(Callback):
        def on_client_prepared(self, trainer: Any, module: Any, client: int, position: int, total: int) -> None:
            seen.append((client, position, total))

    trainer = make_trainer(callbacks=Watch(), enable_progress_bar=True)
    trainer.fit(Perceptron(), Served(9), FedKT(mode="one_shot", s=1, **BRIEF))
    assert seen == [(client, client + 1, 6) for client in range(6)]
    # Halves of 3, 5, 4, 9, 12 and 7 samples in batches of 4 take 15 steps an epoch, the server's nine 3, per student.
    assert trainer.global_step == 3 * (15 + 6 * 3 + 3)


class Broken(Perceptron):
    """Perceptron whose logits are NaN on samples with a first feature beyond 100."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.where(x[:, :1] > 100, torch.nan, 1.0)


def test_students_that_are_not_finite_do_not_vote(make_trainer: MakeTrainer, says_lost: Any) -> None:
    """Check with t = 1: the client's only teacher breaks, and the result is as if that client had no samples."""
    data = Served(9)
    data.setup("fit")
    x, y = data.samples
    x = x.clone()
    x[data.client_indices[3][0]] = 1000.0
    module, flags = Broken(), {"mode": "one_shot", **BRIEF, "t": 1}
    given = problem(rounds=0, absent=frozenset({3}), num_server=9)
    expected = oracle.fedkt(given, vector(module), s=2, t=1, epochs=3, eta=0.02, batch_size=4)
    with says_lost("student of client 3 is not finite"):
        make_trainer(precision="64-true").fit(module, Served(9, (x, y)), FedKT(**flags))
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)


def test_more_teachers_than_samples_is_said(make_trainer: MakeTrainer) -> None:
    with pytest.warns(UserWarning, match=r"t=4 teachers .* such as 3"):
        make_trainer(max_rounds=1).fit(Perceptron(), Served(9), FedKT(mode="one_shot", s=1, t=4, epochs=1))


def test_the_light_preset_may_be_changed() -> None:
    assert (lambda a: (a.s, a.t, a.epochs))(FedKT()) == (2, 5, 100)
    assert (lambda a: (a.s, a.t, a.epochs))(FedKT(preset="light")) == (1, 2, 20)
    assert (lambda a: (a.s, a.t, a.epochs))(FedKT(preset="light", s=3)) == (3, 2, 20)


@pytest.mark.parametrize(
    ("module", "data", "sentence"),
    [
        (Perceptron(), federation(), "server_fraction"),
        (Perceptron(), Unlabelled(9), "FedKT's teachers learn classes"),
        (WithoutLogits(), Served(9), r"WithoutLogits.forward\(inputs\) to return logits"),
    ],
    ids=["no server data", "no labels", "no logits"],
)
def test_what_it_lacks_is_said_before_training(
    module: Perceptron, data: Any, sentence: str, make_trainer: MakeTrainer
) -> None:
    with pytest.raises(UserError, match=sentence):
        make_trainer().fit(module, data, FedKT())


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: FedKT(mode="oneshot"), "did you mean 'one_shot'"),  # type: ignore[arg-type]
        (lambda: FedKT(preset="lite"), "did you mean 'light'"),  # type: ignore[arg-type]
        (lambda: FedKT(s=0), "s of FedKT must be a whole number of at least 1, got 0"),
        (lambda: FedKT(t=0), "t of FedKT must be a whole number of at least 1, got 0"),
        (lambda: FedKT(epochs=0), "epochs of FedKT must be a whole number of at least 1, got 0"),
        (lambda: FedKT(batch_size=0), "batch_size of FedKT must be a whole number of at least 1, got 0"),
        (lambda: FedKT(learning_rate=0.0), "learning_rate of FedKT must be positive, got 0.0"),
    ],
)
def test_hyper_parameters_outside_their_range_are_refused(make: Callable[[], FedKT], given: str) -> None:
    with pytest.raises(UserError, match=given):
        make()
