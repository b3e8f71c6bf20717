"""Test FedRep and FedBN where the roster does not: FedRep needs two passes over the data or more, FedBN a norm."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer, equal_states
from lightning.pytorch import Callback
from toys import Normalised, Perceptron, federation

from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import FedBN, FedRep
from lightning_fl.engine.population import Population

METHODS = {"FedRep": (Perceptron, partial(FedRep, ["output"], head_epochs=1)), "FedBN": (Normalised, FedBN)}
EACH = pytest.mark.parametrize(("make", "method"), METHODS.values(), ids=METHODS)


def state_of(trainer: FederatedTrainer) -> dict[str, Any]:
    run = trainer.run
    kept = {
        "params": run.params,
        "buffers": run.buffers,
        "counters": run.counters,
        "clients": dict(run.clients.items()),
    }
    return copy.deepcopy(kept)


@EACH
def test_a_round_that_nobody_survives_changes_nothing(
    make: Any, method: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering, states = Population.answering, list[dict[str, Any]]()
    monkeypatch.setattr(
        Population, "answering", lambda self, run, selected: [] if run.round == 1 else answering(self, run, selected)
    )

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            states.append(state_of(trainer))

    make_trainer(max_rounds=3, local_epochs=2, callbacks=Watch()).fit(make(), federation(), method())
    assert equal_states(states[0], states[1])
    assert not torch.equal(states[1]["params"], states[2]["params"])
    assert states[0]["clients"]


@EACH
def test_order_of_the_cohort_does_not_matter(
    make: Any, method: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, select, states = make(), Population.select, []
    for order in (select, lambda self, run: sorted(select(self, run))):
        monkeypatch.setattr(Population, "select", order)
        trainer = make_trainer(max_rounds=3, local_epochs=2, clients_per_round=6, precision="64-true")
        trainer.fit(copy.deepcopy(module), federation(), method())
        states.append(state_of(trainer))
    one, other = states
    torch.testing.assert_close(one["params"], other["params"], rtol=0, atol=1e-12)
    assert one["clients"].keys() == other["clients"].keys()
    for client, state in one["clients"].items():
        torch.testing.assert_close(dict(state), dict(other["clients"][client]), rtol=0, atol=1e-12)
