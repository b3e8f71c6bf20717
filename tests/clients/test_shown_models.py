"""Test the models that the module holds while hooks hear of a client, and the one that a client predicts with."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from toys import SIZES, Perceptron, Served, federation, vector

from lightning_fl.algorithms import SCAFFOLD, Algorithm, DeviceM, Ditto, FedAvg, FedLDF, PFedMe
from lightning_fl.clients import shown_models
from lightning_fl.codecs import Cast, TopK
from lightning_fl.errors import UserError
from lightning_fl.features.attacks import ALIE, Adversary

METHODS: dict[str, Callable[[], Any]] = {
    "FedAvg": FedAvg,
    "FedLDF": FedLDF,
    "FedPer": lambda: Algorithm(personal=["output"]),
    "Mime": lambda: DeviceM(variant="mime"),
    "SCAFFOLD": SCAFFOLD,
    "TopK": lambda: Algorithm(uplink=TopK(0.3)),
}


class Watch(Callback):
    """Reads the module as a callback does that saves the clients' models."""

    def __init__(self) -> None:
        self.server: list[np.ndarray] = []
        self.received: list[dict[int, np.ndarray]] = []
        self.trained: list[dict[int, np.ndarray]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.server.append(vector(pl_module))
        self.received.append({})
        self.trained.append({})

    def on_client_download(self, trainer: Any, pl_module: Any, client: int) -> None:
        self.received[-1][client] = vector(pl_module)

    def on_client_upload(self, trainer: Any, pl_module: Any, client: int, position: int, total: int) -> None:
        self.trained[-1][client] = vector(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.server.append(vector(pl_module))


def watched(make_trainer: MakeTrainer, algorithm: Any, module: Any = None, **flags: Any) -> Watch:
    torch.manual_seed(0)
    watch = Watch()
    trainer = make_trainer(precision="64-true", callbacks=watch, clients_per_round=4, **flags)
    trainer.fit(Perceptron() if module is None else module, Served(9), algorithm)
    return watch


@pytest.mark.parametrize("method", METHODS)
def test_both_runners_show_the_same_models(method: str, make_trainer: MakeTrainer) -> None:
    alone, together = (
        watched(make_trainer, METHODS[method](), max_rounds=3, runner=runner) for runner in ("serial", "stacked")
    )
    for serial, stacked in zip([*alone.trained, *alone.received], [*together.trained, *together.received], strict=True):
        assert serial.keys() == stacked.keys()
        for client in serial:
            np.testing.assert_allclose(serial[client], stacked[client], rtol=0, atol=1e-10)
    for trained in alone.trained:
        # With Mime clients of a single step make the same.
        assert len({model.tobytes() for model in trained.values()}) >= 3


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_the_mean_of_the_shown_models_is_the_servers_next(runner: str, make_trainer: MakeTrainer) -> None:
    watch = watched(make_trainer, FedAvg(), max_rounds=3, runner=runner)
    for before, received, trained, after in zip(
        watch.server[:-1], watch.received, watch.trained, watch.server[1:], strict=True
    ):
        assert all((model == before).all() for model in received.values())
        mean = np.average(list(trained.values()), axis=0, weights=[SIZES[client] for client in trained])
        np.testing.assert_allclose(mean, after, rtol=0, atol=1e-12)


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize("clients", [1, 2])
def test_an_attacker_is_shown_as_it_has_trained(runner: str, clients: int, make_trainer: MakeTrainer) -> None:
    """Those that know the uploads of all wait until the others have trained."""
    plain = watched(make_trainer, FedAvg(), max_rounds=1, runner="serial")
    attacked = watched(
        make_trainer, FedAvg(), max_rounds=1, runner=runner, adversary=Adversary(ALIE(), attackers=[*range(clients)])
    )
    assert attacked.trained[0].keys() == plain.trained[0].keys()
    for client, model in plain.trained[0].items():
        np.testing.assert_allclose(attacked.trained[0][client], model, rtol=0, atol=1e-12)


def test_a_received_model_has_crossed_the_downlink(make_trainer: MakeTrainer) -> None:
    alone, together = (
        watched(make_trainer, Algorithm(downlink=Cast()), max_rounds=2, runner=runner)
        for runner in ("serial", "stacked")
    )
    for client, received in alone.received[1].items():
        assert (received != alone.server[1]).any()
        np.testing.assert_allclose(received, together.received[1][client], rtol=0, atol=1e-12)


def test_the_run_is_the_same_whoever_watches(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is copied where nobody does, as with a progress bar alone."""
    for runner in ("serial", "stacked"):
        torch.manual_seed(0)
        module = Perceptron()
        other = copy.deepcopy(module)
        watched(make_trainer, Algorithm(personal=["output"]), module, runner=runner)
        with monkeypatch.context() as patch:
            patch.setattr(shown_models, "TrainedModel", None)
            patch.setattr("lightning_fl.clients.stacked.TrainedModel", None)
            trainer = make_trainer(precision="64-true", clients_per_round=4, runner=runner, enable_progress_bar=True)
            trainer.fit(other, Served(9), Algorithm(personal=["output"]))
        assert (vector(module) == vector(other)).all()


class Predicts(Callback):
    """Reads what each client predicts with, also while the module holds a client's model in training."""

    def __init__(self) -> None:
        self.models: dict[int, np.ndarray] = {}

    def on_client_upload(self, trainer: Any, pl_module: Any, client: int, position: int, total: int) -> None:
        before = vector(pl_module)
        with trainer.client_model((client + 1) % 6) as module:
            assert module is pl_module
        assert (vector(pl_module) == before).all()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        before = vector(pl_module)
        for client in range(6):
            with trainer.client_model(client) as module:
                self.models[client] = vector(module)
        assert (vector(pl_module) == before).all()


@pytest.mark.parametrize("own", [Ditto, lambda: PFedMe(strength=1.0)], ids=["Ditto", "PFedMe"])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_client_predicts_with_its_own_model(own: Any, place: str, make_trainer: MakeTrainer) -> None:
    module, predicts = Perceptron(), Predicts()
    kept: dict[int, np.ndarray] = {}

    class Keeps(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            kept.update({k: state["own/model"].double().numpy().copy() for k, state in trainer.run.clients.items()})

    flags = {"clients_per_round": 3, "client_states": place, "max_rounds": 1}
    make_trainer(callbacks=[predicts, Keeps()], **flags).fit(module, federation(), own())
    assert len(kept) == 3
    for client, model in predicts.models.items():
        assert (model == kept.get(client, vector(module))).all()


def test_a_client_predicts_with_its_own_layers(make_trainer: MakeTrainer) -> None:
    module, predicts = Perceptron(), Predicts()
    trainer = make_trainer(callbacks=predicts, clients_per_round=3, max_rounds=1)
    trainer.fit(module, federation(), Algorithm(personal=["output"]))
    server = vector(module)
    for client, model in predicts.models.items():
        state = trainer.run.clients.get(client)
        assert (model[:-10] == server[:-10]).all()
        assert (model[-10:] == (server[-10:] if state is None else state["personal"].double().numpy())).all()
    assert len({model.tobytes() for model in predicts.models.values()}) == 4


def test_without_a_fit_or_a_client_there_is_none(make_trainer: MakeTrainer) -> None:
    class Reads(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            with trainer.client_model(6):
                pass

    trainer = make_trainer(callbacks=Reads())
    with pytest.raises(UserError, match="client_model needs the index of a client, 0 to 5, got 6"):
        trainer.fit(Perceptron(), federation())
    with pytest.raises(UserError, match="no fit is running"), trainer.client_model(0):
        pass
