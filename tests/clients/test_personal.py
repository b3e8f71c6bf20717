"""Test parameters that clients own: trained, kept between rounds, never sent; with any rule, in every runner."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import RUNNERS, MakeTrainer, resumed_like_whole
from lightning.pytorch import Callback
from roster import problem
from toys import OWN, SHARED, SIZES, Perceptron, Remembering, federation, personal_values, samples, vector

from lightning_fl import UserError
from lightning_fl.algorithms import Algorithm, FedAvg
from lightning_fl.callbacks import MagnitudePruning
from lightning_fl.personal import PersonalLayers
from lightning_fl.rules import ControlVariates, LocalOptimizer, Proximal
from lightning_fl.slots import Rule
from lightning_fl.steps import Apply, ControlUpdate


@RUNNERS
@pytest.mark.parametrize("rule", [LocalOptimizer(), Proximal(mu=0.0), Proximal(mu=0.5)], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_is_fedper(rule: Rule, decay: float, runner: str, make_trainer: MakeTrainer) -> None:
    """Compare with Arivazhagan et al. 2019: base layers averaged, head kept without weight decay and proximal term."""
    module = Perceptron(configure=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=decay))
    w, heads = oracle.fedper(problem(rounds=5, epochs=2), vector(module), OWN, getattr(rule, "mu", 0.0), decay)
    start = vector(module)
    trainer = make_trainer(max_rounds=5, local_epochs=2, precision="64-true", runner=runner)
    trainer.fit(module, federation(), Algorithm(rule=rule, personal=["output"]))
    np.testing.assert_allclose(vector(module)[SHARED], w[SHARED], rtol=0, atol=1e-10)
    assert personal_values(trainer).keys() == heads.keys()
    for client, head in heads.items():
        np.testing.assert_allclose(personal_values(trainer)[client], head, rtol=0, atol=1e-10)
    np.testing.assert_array_equal(vector(module)[OWN], start[OWN])
    assert trainer.callback_metrics["comm/uplink_bits"] == 3 * 16 * 64


OPTIMIZERS = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.02),
    "groups": lambda m: torch.optim.SGD(
        [{"params": m.hidden.parameters()}, {"params": m.output.parameters(), "lr": 0.3}], lr=0.1
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("flags", [{}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}], ids=str)
@RUNNERS
def test_one_client_owning_a_part_trains_as_if_it_did_not(
    optimizer: str, flags: dict[str, Any], runner: str, make_trainer: MakeTrainer
) -> None:
    """Test one round of one client, in which nothing is averaged: the module's optimiser trains its own layer."""
    module = Perceptron(configure=OPTIMIZERS[optimizer])
    plain = copy.deepcopy(module)
    flags = {"max_rounds": 1, "clients_per_round": 1, "local_epochs": 3, "precision": "64-true", **flags}
    trainer = make_trainer(runner=runner, **flags)
    trainer.fit(module, federation(sizes=(10,)), Algorithm(personal=["output.weight", "output.bias"]))
    make_trainer(**flags).fit(plain, federation(sizes=(10,)), FedAvg())
    np.testing.assert_allclose(vector(module)[SHARED], vector(plain)[SHARED], rtol=0, atol=1e-12)
    np.testing.assert_allclose(personal_values(trainer)[0], vector(plain)[OWN], rtol=0, atol=1e-12)


class Bounded(torch.optim.SGD):
    """Optimiser of a user, with an attribute."""

    def __init__(self, params: Any, lr: float, bound: float) -> None:
        super().__init__(params, lr)
        self.bound = bound

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad.clamp_(-self.bound, self.bound)
        return super().step(closure)


def test_personal_values_of_clients_is_stepped_by_optimisers_with_attributes(make_trainer: MakeTrainer) -> None:
    """Compare one client, with a scheduler, which replaces the optimiser's `step`."""

    def configure(module: Perceptron) -> Any:
        optimizer = Bounded(module.parameters(), 0.1, bound=0.02)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}

    module = Perceptron(configure=configure)
    plain, data = copy.deepcopy(module), federation(sizes=(10,))
    make_trainer(clients_per_round=1, runner="serial").fit(plain, data, FedAvg())
    trainer = make_trainer(clients_per_round=1, runner="serial")
    trainer.fit(module, data, Algorithm(personal=["output"]))
    np.testing.assert_allclose(vector(module)[SHARED], vector(plain)[SHARED], rtol=0, atol=1e-6)
    np.testing.assert_allclose(personal_values(trainer)[0], vector(plain)[OWN], rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_runners_agree(optimizer: str, make_trainer: MakeTrainer) -> None:
    """Test clients with different numbers of steps and different last batches."""
    trainers = {}
    module = Perceptron(configure=OPTIMIZERS[optimizer])
    for runner in ("serial", "stacked"):
        fitted = copy.deepcopy(module)
        trainers[runner] = make_trainer(
            max_rounds=4, clients_per_round=5, precision="64-true", runner=runner, local_epochs=2, gradient_clip_val=0.5
        )
        trainers[runner].fit(fitted, federation(), Algorithm(personal=["hidden"]))
    one, other = (trainers[runner].run for runner in ("serial", "stacked"))
    torch.testing.assert_close(one.params, other.params, rtol=0, atol=1e-12)
    assert one.clients.keys() == other.clients.keys()
    for client in one.clients:
        torch.testing.assert_close(
            one.clients[client]["personal"], other.clients[client]["personal"], rtol=0, atol=1e-12
        )


def test_those_who_take_part_change_and_no_one_else(make_trainer: MakeTrainer) -> None:
    kept: list[dict[int, np.ndarray]] = [{}]
    uploads: list[set[int]] = []

    class Watch(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            uploads.append(set())

        def on_client_upload(self, trainer: Any, module: Any, client: int, place: int, total: int) -> None:
            uploads[-1].add(client)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            kept.append({client: x.copy() for client, x in personal_values(trainer).items()})

    flags = {"max_rounds": 6, "clients_per_round": 4, "dropout_rate": 0.3, "callbacks": Watch()}
    make_trainer(**flags).fit(Perceptron(), federation(), Algorithm(personal=["output"]))
    for before, now, present in zip(kept[:-1], kept[1:], uploads, strict=True):
        assert now.keys() == before.keys() | present
        assert {k for k in now if k not in before or (now[k] != before[k]).any()} == present
    assert 0 < sum(map(len, uploads)) < 6 * 4


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_resumed_equals_uninterrupted(where: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Test a rule and a codec that also keep states; the new module starts with another head."""

    def algorithm() -> Algorithm:
        method = Remembering()
        method.personal = (PersonalLayers(["output"]),)
        return method

    _, trainer = resumed_like_whole(make_trainer, tmp_path, Perceptron, algorithm=algorithm, client_states=where)
    assert all(state.keys() == {"sum", "turns", "personal"} for state in trainer.run.clients.values())
    assert trainer.run.clients


class Poisoned(Perceptron):
    """Module with a finite head output and a gradient that is not finite on samples with a first feature beyond 100."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = self.loss((x.clamp(max=100), y))
        bad = bool(x[:, 0].max() > 100)
        return loss + (self.output.bias - self.output.bias.detach()).abs().sqrt().sum() if bad else loss


def test_a_client_whose_own_part_is_not_finite_is_rejected(make_trainer: MakeTrainer) -> None:
    x, y = samples(sum(SIZES))
    data = federation()
    data.setup("fit")
    x[data.client_indices[0]] = 1000.0
    trainer = make_trainer(max_rounds=1, clients_per_round=6)
    trainer.fit(Poisoned(), federation(train=(x, y)), Algorithm(personal=["output"]))
    assert trainer.callback_metrics["clients/rejected"] == 1
    assert 0 not in trainer.run.clients
    assert all(torch.isfinite(state["personal"]).all() for state in trainer.run.clients.values())


def test_a_checkpoint_of_the_middle_of_a_round_has_the_common_beginning(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    module, path = Perceptron(), tmp_path / "middle.ckpt"
    start = module.state_dict()["output.weight"].clone()

    class Saves(Callback):
        def on_client_upload(self, trainer: Any, pl_module: Any, *upload: Any) -> None:
            changed.append(not torch.equal(pl_module.output.weight, start))
            trainer.save_checkpoint(path)

    changed: list[bool] = []
    make_trainer(callbacks=Saves()).fit(module, federation(), Algorithm(personal=["output"]))
    assert all(changed)
    assert torch.equal(torch.load(path)["state_dict"]["output.weight"], start)


def test_scaffold_leaves_it_alone(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=3)
    algorithm = Algorithm(rule=ControlVariates(), steps=(Apply(), ControlUpdate()), personal=["output"])
    trainer.fit(Perceptron(), federation(), algorithm)
    for state in trainer.run.clients.values():
        assert (len(state["control"]), len(state["personal"])) == (16, 10)


class HiddenOnly(Perceptron):
    """Module whose optimiser lacks the output layer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.hidden.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("module", "personal", "words"),
    [
        (Perceptron, ["outputs"], ["'outputs'", "Perceptron", "did you mean 'output'"]),
        (
            Perceptron,
            ["hidden", "output"],
            ["clients own all trainable parameters of Perceptron", "none is left to federate", "LocalOnly"],
        ),
        (HiddenOnly, ["output"], ["'output.weight'", "configure_optimizers of HiddenOnly", "self.parameters()"]),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    module: type[Perceptron], personal: list[str], words: list[str], make_trainer: MakeTrainer
) -> None:
    with pytest.raises(UserError) as error:
        make_trainer().fit(module(), federation(), Algorithm(personal=personal))
    assert [word for word in words if word not in str(error.value)] == []


@RUNNERS
def test_a_mask_leaves_it_whole(runner: str, make_trainer: MakeTrainer) -> None:
    """Check that the mask covers only shared parameters; clients' heads keep all their numbers."""
    trainer = make_trainer(max_rounds=4, runner=runner, callbacks=MagnitudePruning(rate=0.6, prune_epoch=1))
    trainer.fit(Perceptron(), federation(), Algorithm(personal=["output"]))
    mask = trainer.run.mask
    assert mask is not None
    assert mask.shape == (16,)
    assert 0 < int(mask.sum()) < 16
    assert (vector(trainer.lightning_module)[SHARED][~mask.numpy()] == 0).all()
    assert all((head != 0).all() for head in personal_values(trainer).values())
