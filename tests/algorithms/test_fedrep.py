"""Test FedRep: the paper's loop, its limits, exact bits, the waiting half, refusals."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import RUNNERS, MakeTrainer, equal_states, fits, resumed_like_whole
from lightning.pytorch import Callback
from roster import problem
from toys import OWN, SHARED, Normalised, Perceptron, federation, personal_values, vector

from lightning_fl import UserError
from lightning_fl.algorithms import Algorithm, FedAvg, FedBN, FedRep


@RUNNERS
@pytest.mark.parametrize("flags", [{}, {"straggler_rate": 0.6}, {"gradient_clip_val": 0.3}], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_is_the_papers(decay: float, flags: dict[str, Any], runner: str, make_trainer: MakeTrainer) -> None:
    """Check all clients, of which some have one batch and others three; only the body decays and only the trained half clips."""
    module = Perceptron(configure=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=decay))
    given = problem(rounds=4, epochs=5, cohort_size=5, straggler_rate=flags.get("straggler_rate", 0.0))
    clip = flags.get("gradient_clip_val", np.inf)
    w, heads = oracle.fedrep(given, vector(module), OWN, head_epochs=3, clip=clip, decay=decay)
    flags = {"max_rounds": 4, "clients_per_round": 5, "local_epochs": 5, "precision": "64-true", **flags}
    start = vector(module)
    trainer = make_trainer(runner=runner, **flags)
    trainer.fit(module, federation(), FedRep(["output"], head_epochs=3, body_epochs=2))
    np.testing.assert_allclose(vector(module)[SHARED], w[SHARED], rtol=0, atol=1e-10)
    assert personal_values(trainer).keys() == heads.keys()
    for client, head in heads.items():
        np.testing.assert_allclose(personal_values(trainer)[client], head, rtol=0, atol=1e-10)
    np.testing.assert_array_equal(vector(module)[OWN], start[OWN])
    assert trainer.callback_metrics["comm/uplink_bits"] == 5 * 16 * 64


def test_equal_weights_are_the_papers(make_trainer: MakeTrainer) -> None:
    """Check that bodies of clients with one batch and with three count as much."""
    module = Perceptron()
    w, _ = oracle.fedrep(problem(rounds=2, epochs=2, cohort_size=5), vector(module), OWN, head_epochs=1, uniform=True)
    trainer = make_trainer(max_rounds=2, clients_per_round=5, local_epochs=2, precision="64-true")
    trainer.fit(module, federation(), FedRep(["output"], weighting="uniform"))
    np.testing.assert_allclose(vector(module)[SHARED], w[SHARED], rtol=0, atol=1e-10)


@RUNNERS
def test_without_a_head_it_is_fedper_without_one_and_fedavg_bit_for_bit(runner: str, make_trainer: MakeTrainer) -> None:
    plain, fitted = Perceptron(), []
    for algorithm in (FedAvg(), Algorithm(personal=[]), FedRep([], head_epochs=0, body_epochs=2)):
        module = copy.deepcopy(plain)
        # Equal stacks, because the order of a sum decides its last bit.
        trainer = make_trainer(
            max_rounds=4, local_epochs=2, runner=runner, **{"clients_at_once": 1} if runner == "stacked" else {}
        )
        trainer.fit(module, federation(), algorithm)
        fitted.append((dict(module.state_dict()), trainer.run.ledger.state_dict(), trainer.run.num_steps))
    assert all(run[1:] == fitted[0][1:] for run in fitted)
    assert all(equal_states(run[0], fitted[0][0]) for run in fitted)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "decay": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.2),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda m: torch.optim.AdamW(m.parameters(), lr=0.02),
}


@RUNNERS
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_head_epochs_heads_stay_initial(optimizer: str, runner: str, make_trainer: MakeTrainer) -> None:
    module = Perceptron(configure=OPTIMIZERS[optimizer])
    start = vector(module)
    trainer = make_trainer(max_rounds=3, local_epochs=2, runner=runner)
    trainer.fit(module, federation(), FedRep(["output"], head_epochs=0, body_epochs=2))
    assert personal_values(trainer)
    assert all((head == start[OWN]).all() for head in personal_values(trainer).values())
    assert (vector(module)[SHARED] != start[SHARED]).all()


@RUNNERS
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_half_that_waits_makes_no_step(optimizer: str, runner: str, make_trainer: MakeTrainer) -> None:
    """Check a straggler that stops before the body's phase: it uploads no change, and its head has moved."""
    module = Perceptron(configure=OPTIMIZERS[optimizer])
    start = vector(module)
    trainer = make_trainer(max_rounds=1, clients_per_round=1, local_epochs=41, straggler_rate=0.999999, runner=runner)
    trainer.fit(module, federation(sizes=(4,)), FedRep(["output"], head_epochs=40, body_epochs=1))
    assert 0 < trainer.run.num_steps <= 40
    np.testing.assert_array_equal(vector(module)[SHARED], start[SHARED])
    assert (personal_values(trainer)[0] != start[OWN]).all()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_runners_agree(optimizer: str, make_trainer: MakeTrainer) -> None:
    """Check clients with one, two and three batches a pass, which change phase at different steps."""
    module = Perceptron(configure=OPTIMIZERS[optimizer])
    flags = {"precision": "64-true", "local_epochs": 3, "clients_per_round": 6, "clients_at_once": 6}
    algorithm = FedRep(["hidden"], head_epochs=2, body_epochs=1)
    (_, one), (_, other) = fits(make_trainer, module, federation, algorithm, **flags)
    torch.testing.assert_close(one.run.params, other.run.params, rtol=0, atol=1e-12)
    for client, state in one.run.clients.items():
        torch.testing.assert_close(state, dict(other.run.clients[client]), rtol=0, atol=1e-12)


def test_statistics_of_norms_move_in_both_phases(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1, local_epochs=3)
    module = Normalised()
    trainer.fit(module, federation(sizes=(4, 4, 4)), FedRep(["output"], head_epochs=2, body_epochs=1))
    assert int(module.norm.num_batches_tracked) == 3


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_resumed_equals_uninterrupted(where: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    method = partial(FedRep, ["output"], head_epochs=2, body_epochs=1)
    resumed_like_whole(make_trainer, tmp_path, Perceptron, algorithm=method, local_epochs=3, client_states=where)


class Poisoned(Perceptron):
    """Module whose head may get a gradient that is not finite, from a finite loss."""

    poisoned = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        bad = (self.output.bias - self.output.bias.detach()).abs().sqrt().sum()
        return self.loss(batch) + bad if self.poisoned else self.loss(batch)


def test_a_rejected_client_keeps_its_head(make_trainer: MakeTrainer) -> None:
    """Let a client train well in the first round, and badly in the second."""
    kept: list[dict[int, np.ndarray]] = []

    class Watch(Callback):
        def on_client_download(self, trainer: Any, pl_module: Any, client: int) -> None:
            pl_module.poisoned = client == 0 and trainer.current_epoch == 1

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            kept.append(personal_values(trainer))

    trainer = make_trainer(max_rounds=2, clients_per_round=6, local_epochs=2, callbacks=Watch())
    trainer.fit(Poisoned(), federation(), FedRep(["output"], head_epochs=1, body_epochs=1))
    assert trainer.callback_metrics["clients/rejected"] == 1
    np.testing.assert_array_equal(kept[0][0], kept[1][0])
    assert all((kept[0][k] != kept[1][k]).any() for k in range(1, 6))


def test_a_client_may_keep_norms_and_a_head(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(local_epochs=2)
    trainer.fit(Normalised(), federation(), FedBN(FedRep(["output"], head_epochs=1, body_epochs=1)))
    for state in trainer.run.clients.values():
        assert state["personal"].shape == (16,)
        assert state["personal/buffers"].shape == (6,)


def test_by_default_the_head_is_the_last_layer_and_trains_until_the_last_pass(make_trainer: MakeTrainer) -> None:
    plain, runs = Perceptron(), []
    for algorithm in (FedRep(), FedRep(["output"], head_epochs=4, body_epochs=1)):
        trainer = make_trainer(local_epochs=5)
        trainer.fit(copy.deepcopy(plain), federation(), algorithm)
        runs.append((trainer.run.params, dict(trainer.run.clients.items())))
    assert torch.equal(runs[0][0], runs[1][0])
    assert equal_states(runs[0][1], runs[1][1])


@pytest.mark.parametrize(
    ("options", "flags", "words"),
    [
        ({"personal": []}, {"local_epochs": 11}, ["personal names no layer", "head_epochs=0"]),
        ({"head_epochs": 10}, {"local_epochs": 5}, ["10 epochs", "local_epochs must be 11, got 5"]),
        ({"body_epochs": 2}, {"local_epochs": 2}, ["local_epochs must be 3 or more, got 2"]),
        ({"head_epochs": 10}, {"local_epochs": None, "local_steps": 7}, ["must be 11", "got local_steps instead"]),
        ({"personal": ["outputs"]}, {"local_epochs": 11}, ["'outputs'", "did you mean 'output'"]),
        ({"head_epochs": -1}, {}, ["head_epochs", "-1"]),
        ({"body_epochs": 0}, {}, ["body_epochs", "0"]),
        ({"head_epochs": 2.5}, {}, ["head_epochs", "2.5"]),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    options: dict[str, Any], flags: dict[str, Any], words: list[str], make_trainer: MakeTrainer
) -> None:
    with pytest.raises(UserError) as error:
        make_trainer(**flags).fit(Perceptron(), federation(), FedRep(**options))
    assert [word for word in words if word not in str(error.value)] == []
