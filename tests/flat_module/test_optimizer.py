"""Test learning-rate schedules and optimisers of stock modules against plain loops."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from roster import problem
from torch.optim import lr_scheduler
from toys import Perceptron, federation, samples, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import Algorithm, Centralised, DataSharing, DeviceM, FedAvg, FedProx, Scaffnew
from lightning_fl.data import Arrays, Federated

Configure = Callable[[L.LightningModule], Any]
MakeStock = Callable[..., L.Trainer]


def sgd(module: L.LightningModule) -> torch.optim.Optimizer:
    groups = [
        {"params": module.hidden.parameters(), "lr": 0.2},
        {"params": module.output.parameters(), "weight_decay": 0.1},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def by_round(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def by_step(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=[0.2, 0.05], total_steps=20)


def step_of(scheduler: Callable[[Any], Any], **options: Any) -> Configure:
    def configure(module: L.LightningModule) -> Any:
        optimizer = sgd(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler(optimizer), **options}}

    return configure


def both(module: L.LightningModule) -> Any:
    optimizer = sgd(module)
    return [optimizer], [by_round(optimizer), {"scheduler": by_step(optimizer), "interval": "step"}]


SCHEDULES = {
    # name: configure_optimizers, factor of round t, scheduler inside the round, optimiser steps per scheduler step
    "none": (sgd, lambda t: 1.0, None, 1),
    "round": (step_of(by_round), lambda t: 0.5**t, None, 1),
    "every second round": (step_of(by_round, frequency=2), lambda t: 0.5 ** (t // 2), None, 1),
    "step": (step_of(by_step, interval="step"), lambda t: 1.0, by_step, 1),
    "every third step": (step_of(by_step, interval="step", frequency=3), lambda t: 1.0, by_step, 3),
    "step with momentum": (step_of(one_cycle, interval="step"), lambda t: 1.0, one_cycle, 1),
    "round and step": (both, lambda t: 0.5**t, by_step, 1),
}


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0)], ids=lambda a: a.name)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_match_a_loop_by_hand(name: str, algorithm: Algorithm, make_trainer: MakeTrainer) -> None:
    configure, factor, inside, frequency = SCHEDULES[name]
    rounds, given = 3, problem(rounds=3, epochs=2)
    module = Perceptron(configure=configure)
    server = copy.deepcopy(module)
    for t in range(rounds):
        total, samples = np.zeros(26), 0
        for k in given.cohort(t):
            client = copy.deepcopy(server)
            optimizer = sgd(client)
            for group in optimizer.param_groups:
                group["lr"] *= factor(t)
            scheduler = inside(optimizer) if inside else None
            for done, (x, y) in enumerate(given.batches(t, k), start=1):
                optimizer.zero_grad()
                client.loss((torch.tensor(x).float(), torch.tensor(y).float())).backward()
                optimizer.step()
                if scheduler is not None and done % frequency == 0:
                    scheduler.step()
            total += len(given.x[k]) * vector(client)
            samples += len(given.x[k])
        torch.nn.utils.vector_to_parameters(torch.tensor(total / samples).float(), server.parameters())
    make_trainer(max_rounds=rounds, local_epochs=2).fit(module, federation(), algorithm)
    np.testing.assert_allclose(vector(module), vector(server), rtol=0, atol=2e-6)


def test_a_plateau_is_found_in_the_rounds_metrics(make_trainer: MakeTrainer) -> None:
    def configure(module: L.LightningModule) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val/loss"}}

    rates: list[float] = []

    class Rates(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    # The loss falls, so ReduceLROnPlateau in mode "max" halves the rate in every round after the first.
    make_trainer(max_rounds=4, callbacks=Rates()).fit(Perceptron(configure=configure), federation())
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.025])


def test_a_plateau_of_something_not_logged_is_refused(make_trainer: MakeTrainer) -> None:
    def configure(module: L.LightningModule) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val/loose"}

    with pytest.raises(UserError, match=r"val/loose .*val/loss"):
        make_trainer().fit(Perceptron(configure=configure), federation())


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(), DeviceM()], ids=lambda a: a.name)
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_schedules_give_no_warnings(interval: str, algorithm: Algorithm, make_trainer: MakeTrainer) -> None:
    def configure(module: L.LightningModule) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": by_step(optimizer), "interval": interval}]

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make_trainer().fit(Perceptron(configure=configure), federation(), algorithm)


def test_restarted_momentum_follows_a_schedule_and_weight_decay(make_trainer: MakeTrainer) -> None:
    def configure(module: L.LightningModule) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.3)
        return [optimizer], [{"scheduler": by_step(optimizer), "interval": "step"}]

    given = problem(rounds=2, epochs=2)
    module = Perceptron(configure=configure)

    def local(w: np.ndarray, batches: Any, eta: float) -> np.ndarray:
        y, v = w.copy(), np.zeros_like(w)
        for step, batch in enumerate(batches):
            v = 0.8 * v + 0.2 * (oracle.gradient(y, *batch) + 0.3 * y)
            y -= eta / (1 + step) * v
        return y

    expected = oracle.fedavg(given, vector(module), local)
    make_trainer(local_epochs=2, precision="64-true").fit(module, federation(), DeviceM(local_beta=0.8))
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)


def test_modules_may_ask_how_many_steps_there_will_be(make_trainer: MakeTrainer) -> None:
    """Check `OneCycleLR(total_steps=self.trainer.estimated_stepping_batches)`, as in Lightning's manual."""
    asked: list[int] = []

    def configure(module: L.LightningModule) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        asked.append(module.trainer.estimated_stepping_batches)
        cycle = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=asked[0])
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    make_trainer(local_epochs=3, clients_per_round=2).fit(Perceptron(configure=configure), federation(sizes=(10, 10)))
    assert asked == [3 * 3]


HOOKS = ["setup", "configure_model", "configure_optimizers"]
METHODS: list[Algorithm] = [FedAvg(), Centralised(), DataSharing(), Scaffnew(p=0.3)]


class AsksEarly(Perceptron):
    """Module that asks for its number of steps in a hook, and notes the answer."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.answers: list[float] = []
        own = getattr(self, hook)

        def ask(*arguments: Any, **named: Any) -> Any:
            self.answers.append(self.trainer.estimated_stepping_batches)
            return own(*arguments, **named)

        setattr(self, hook, ask)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize(
    "flags",
    [
        {"local_epochs": 2, "accumulate_grad_batches": 2},
        {"local_epochs": None, "local_steps": 7},
        {"limit_train_batches": 2},
        {"max_steps": 4, "runner": "lightning"},
    ],
    ids=str,
)
def test_the_number_of_steps_is_known_from_setup_on(
    flags: dict[str, Any], method: Algorithm, make_trainer: MakeTrainer
) -> None:
    answers = []
    for hook in HOOKS:
        module = AsksEarly(hook)
        data = Arrays(train=samples(60), test=samples(4), num_clients=4, batch_size=4, server_fraction=0.1)
        cohort = 4 if isinstance(method, Scaffnew) else 2  # which needs all
        trainer = make_trainer(max_rounds=1, clients_per_round=cohort, **flags)
        for _ in range(2):
            L.seed_everything(0, verbose=False)
            trainer.fit(module, data, copy.deepcopy(method))
        answers.append(module.answers)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0] > 0


def in_order() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples(10)), batch_size=4)


class ReadsInOrder(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return in_order()


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("runner", ["auto", "lightning"])
def test_a_single_client_reads_lightnings_number_of_steps(
    hook: str, runner: str, make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    """Check it with divided samples and with the loader as it is."""
    stock, federated = AsksEarly(hook), AsksEarly(hook)
    make_stock_trainer(max_epochs=1).fit(stock, in_order())
    trainer = make_trainer(max_rounds=1, clients_per_round=1, runner=runner)
    trainer.fit(federated, Federated(ReadsInOrder(), num_clients=1))
    assert federated.answers == stock.answers == [3]


class SetsUpData(Perceptron):
    """Module that reads its loader in `setup`, as Lightning's guide to version 2 says."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def setup(self, stage: str) -> None:
        trainer = self.trainer
        self.seen += [trainer.train_dataloader, trainer.num_training_batches]
        trainer.fit_loop.setup_data()
        self.seen += [len(trainer.train_dataloader), trainer.num_training_batches, trainer.estimated_stepping_batches]


@pytest.mark.parametrize("runner", ["auto", "lightning"])
def test_loader_and_number_of_batches_are_unknown_in_setup_until_they_are_wanted(
    runner: str, make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    stock, federated = SetsUpData(), SetsUpData()
    make_stock_trainer(max_epochs=1).fit(stock, in_order())
    trainer = make_trainer(max_rounds=1, clients_per_round=1, runner=runner)
    for _ in range(2):  # a second fit does not read the first one's
        trainer.fit(federated, Federated(ReadsInOrder(), num_clients=1))
    assert stock.seen == [None, math.inf, 3, 3, 3]
    assert federated.seen == stock.seen * 2


def test_a_number_of_steps_that_changes_after_setup_is_refused(make_trainer: MakeTrainer) -> None:
    class AddsLayer(AsksEarly):
        def configure_model(self) -> None:
            self.hidden = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))  # type: ignore[assignment]

    with pytest.raises(
        UserError, match=r"estimated_stepping_batches was 3 when AddsLayer read it in setup .*, and is 2 now"
    ):
        make_trainer(clients_per_round=2).fit(AddsLayer("setup"), federation((9, 9)))


def test_the_number_of_steps_is_unknown_before_there_are_data(make_trainer: MakeTrainer) -> None:
    class BringsData(AsksEarly):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples(10)), batch_size=4)

    module = BringsData("setup")
    with pytest.raises(UserError, match=r"is not known before Federated is set up: read it in configure_optimizers"):
        make_trainer().fit(module, Federated(module, num_clients=2))


def test_modules_reach_their_optimiser_and_scheduler(make_trainer: MakeTrainer) -> None:
    class Asks(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("rate", self.optimizers().param_groups[0]["lr"])
            assert self.lr_schedulers() is not None
            return self.loss(batch)

    trainer = make_trainer(max_rounds=3)
    trainer.fit(Asks(configure=step_of(by_round)), federation())
    assert trainer.callback_metrics["rate"] == pytest.approx(0.2 * 0.25)


@pytest.mark.parametrize("runner", ["serial", "stacked", "auto"])
def test_an_optimiser_that_wants_a_closure_is_refused(runner: str, make_trainer: MakeTrainer) -> None:
    module = Perceptron(configure=lambda m: torch.optim.LBFGS(m.parameters()))
    with pytest.raises(UserError, match=r"LBFGS needs the loss several times .*closure"):
        make_trainer(runner=runner).fit(module, federation())


def test_a_rate_that_the_parameters_cannot_hold_is_refused(make_trainer: Callable[..., FederatedTrainer]) -> None:
    with pytest.raises(UserError, match=r"lr of SGD is 1e\+300, but the parameters hold numbers of at most 3\.4e\+38"):
        make_trainer().fit(Perceptron(lr=1e300), federation())
