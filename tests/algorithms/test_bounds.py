"""Test the bounds of a comparison: all samples in one place, and each client alone."""

import copy
from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from roster import problem
from torch.utils.data import DataLoader, TensorDataset
from toys import Normalised, Perceptron, federation, samples, vector

from lightning_fl import UserError
from lightning_fl.algorithms import Algorithm, Centralised, Ditto, FedAvg, FedBN, FedProx, LocalOnly, Method
from lightning_fl.clients.own_models import PARAMS
from lightning_fl.codecs import TopK
from lightning_fl.exchanges import InPlace, NoUploads


def test_centralised_is_the_stock_trainer_on_all_samples(make_trainer: MakeTrainer, make_stock_trainer: Any) -> None:
    """Compare batches of all samples, whose order does not matter, with all clients in each round of two epochs."""
    module = Perceptron()
    stock = copy.deepcopy(module)
    make_trainer(max_rounds=3, clients_per_round=1.0, local_epochs=2, precision="64-true").fit(
        module, federation(batch_size=40), Centralised()
    )
    loader = DataLoader(TensorDataset(*samples(40)), batch_size=40)
    make_stock_trainer(max_epochs=6, precision="64-true", limit_val_batches=0).fit(stock, loader)
    np.testing.assert_allclose(vector(module), vector(stock), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({"local_epochs": 2}, 10),  # one pass over 40 samples in batches of 4
        ({"local_epochs": 1}, 5),
        ({"local_epochs": 1, "clients_per_round": 1}, 2),  # 10 / 6, rounded
        ({"local_epochs": 4, "clients_per_round": 1.0}, 40),
        ({"local_epochs": 2, "accumulate_grad_batches": 3}, 4),
        ({"local_steps": 7}, 21),
        ({"local_epochs": 2, "limit_train_batches": 1}, 6),  # a pass of one batch of each of six clients
        ({"local_epochs": 2, "limit_train_batches": 0.5}, 5),
    ],
)
def test_centralised_makes_the_steps_of_a_cohort(flags: dict[str, Any], steps: int, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=2, **flags)
    trainer.fit(Perceptron(), federation(), Centralised())
    assert trainer.run.num_steps == 2 * steps


def test_a_whole_federation_reads_as_many_samples_in_one_place(make_trainer: MakeTrainer) -> None:
    read = []
    for method in (Centralised(), FedAvg()):
        trainer = make_trainer(max_rounds=1, clients_per_round=1.0, local_epochs=3)
        trainer.fit(Perceptron(), federation(), method)
        read.append(trainer.fit_loop.rows[-1]["clients/samples"])
    assert read == [120, 120]


def test_clients_alone_continue_their_own_models(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    start = vector(module)
    expected = oracle.alone(problem(rounds=5, epochs=2), start)
    trainer = make_trainer(max_rounds=5, local_epochs=2, precision="64-true")
    trainer.fit(module, federation(), LocalOnly())
    assert trainer.run.clients.keys() == expected.keys()
    for client, model in expected.items():
        np.testing.assert_allclose(trainer.run.clients[client][PARAMS].numpy(), model, rtol=0, atol=1e-12)
    assert (vector(module) == start).all()


def test_clients_alone_are_those_of_ditto_without_its_pull(make_trainer: MakeTrainer) -> None:
    """Compare parameters, running statistics and counters, and what validation logs of the clients."""
    kept, logged = [], []
    module = Normalised()
    for method in (LocalOnly(), Ditto(strength=0)):
        trainer = make_trainer(max_rounds=4, clients_per_round=1.0)
        data = federation(sizes=(4, 8, 12, 8))
        trainer.fit(copy.deepcopy(module), data, method)
        kept.append({k: trainer.run.clients[k] for k in trainer.run.clients})
        logged.append(trainer.fit_loop.rows[-1]["val/loss"])
    assert kept[0].keys() == kept[1].keys() == {0, 1, 2, 3}
    for client, state in kept[0].items():
        for name, entry in state.items():
            torch.testing.assert_close(entry, kept[1][client][name], rtol=0, atol=1e-6)
    assert logged[0] == pytest.approx(logged[1], rel=1e-5)


def test_the_model_and_its_statistics_stay_on_the_clients(make_trainer: MakeTrainer) -> None:
    module = Normalised()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    make_trainer(max_rounds=2).fit(module, federation(sizes=(4, 8, 12)), LocalOnly())
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())


@pytest.mark.parametrize("method", [Centralised, LocalOnly])
def test_nothing_crosses_the_link(method: type[Method], make_trainer: MakeTrainer) -> None:
    """Count a pruning and its queries to clients, which are charged with any other method."""

    class Asking(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            for source in trainer.sources():
                source.answer(3)

    trainer = make_trainer(max_rounds=2, callbacks=Asking())
    trainer.fit(Perceptron(), federation(), method())
    assert [trainer.run.ledger.total_bytes(way) for way in ("up", "down")] == [0, 0]
    charged = make_trainer(max_rounds=2, callbacks=Asking())
    charged.fit(Perceptron(), federation(), FedAvg())
    assert charged.run.ledger.total_bytes("up") > 2 * 3 * 26 * 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Centralised(uplink=TopK(0.1)), ["Centralised fills the slot uplink itself", "rule"]),
        (lambda: LocalOnly(personal=["output"]), ["LocalOnly fills the slot personal itself", "rule"]),
        (lambda: FedBN(Centralised()), ["base", "Centralised()"]),
        (lambda: Algorithm(exchange=NoUploads()), ["NoUploads", "TrainedAlone"]),
    ],
)
def test_slots_that_make_no_sense_are_refused(make: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        make()
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_other_methods_may_use_no_link(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    other = copy.deepcopy(module)
    make_trainer(max_rounds=3).fit(module, federation(), FedProx(mu=0.1))
    make_trainer(max_rounds=3).fit(other, federation(), FedProx(mu=0.1, exchange=InPlace()))
    assert (vector(module) == vector(other)).all()
