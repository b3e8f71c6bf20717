"""Test that rules act in the steps of Lightning's own loop as the runner `serial` lets them act in its steps."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer, resumed_like_whole
from roster import ROSTER, problem
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from toys import Perceptron, federation, samples, stepped_by_hand, vector

from lightning_fl import UserError
from lightning_fl.algorithms import IMC, SCAFFOLD, Algorithm, FedBN, FedDA, FedDP, FedNova, FedProx, FedRep
from lightning_fl.data import Federated
from lightning_fl.personal import PersonalLayers
from lightning_fl.rules import Pulled

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scheduled": {"local_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
    "by value": {"local_steps": 5, "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
}


def plain(module: L.LightningModule) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.05)


def scheduled(module: L.LightningModule) -> Any:
    """Return SGD with weight decay, whose rates differ between the layers and fall with each second batch."""
    layers = [{"params": module.hidden.parameters()}, {"params": module.output.parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(layers, lr=0.05, weight_decay=0.1)
    return [optimizer], [{"scheduler": StepLR(optimizer, 2, gamma=0.8), "interval": "step"}]


class Logs(Perceptron):
    """Module that logs, and draws random numbers in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = self.loss((x * (torch.rand_like(x) > 0.2), y))
        self.log("drawn", loss, on_step=True, on_epoch=True)
        return loss


def ended(make_trainer: MakeTrainer, module: L.LightningModule, data: Any, method: Any, **flags: Any) -> dict[str, Any]:
    """Return all that a run ends with: weights, states of clients and server, and logs."""
    L.seed_everything(0, verbose=False)
    fitted = copy.deepcopy(module)
    flags = {"max_rounds": 3, "clients_per_round": 4, "precision": "64-true", **flags}
    trainer = make_trainer(**flags)
    trainer.fit(fitted, data, method)
    logged = {name: value for name, value in trainer.callback_metrics.items() if name != "time/round_seconds"}
    run, steps = trainer.run, torch.tensor(trainer.global_step)
    clients = {k: dict(state.items()) for k, state in run.clients.items()}
    memory = {k: dict(state.items()) for k, state in run.client_memory.items()}
    return {
        **fitted.state_dict(),
        "logs": logged,
        "clients": clients,
        "memory": memory,
        "server": run.server,
        "steps": steps,
    }


def close(one: Any, other: Any, name: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), name
        for key in one:
            close(one[key], other[key], f"{name}/{key}")
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, equal_nan=True, msg=lambda text: f"{name}: {text}", **TOLERANCE)
    else:
        assert one == other, name


ONE_GRADIENT = "and that computes one gradient a step, but {} needs others"
REFUSED = {
    "FedSAM": ONE_GRADIENT.format(r"FedSAM \(SharpnessAware\)"),
    "MOON": ONE_GRADIENT.format(r"MOON \(ModelContrast\)"),
    "DeviceM-mime": ONE_GRADIENT.format(r"DeviceM \(CorrectedMomentum\)"),
    "DeviceM-mime-lite": ONE_GRADIENT.format(r"DeviceM \(FrozenMomentum\)"),
    "Ditto": r"and that trains one model of a client, but Ditto \(PersonalModel\) trains a second one",
    "APFL": r"and that trains one model of a client, but APFL \(MixedModel\) trains a second one",
}
"""Methods that Lightning's own loop does not train, and a part of the sentence that says so."""
SMALLER = ("HeteroFL", "FjORD", "FederatedDropout")
"""Beginnings of the names of methods whose clients train smaller networks, which Lightning's own loop does not."""
ALLOWED = [name for name in ROSTER if name not in REFUSED and not name.startswith(SMALLER)]


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.sampled(6)
def test_a_method_trains_as_by_the_runner_serial(name: str, flags: str, make_trainer: MakeTrainer) -> None:
    entry, kind = ROSTER[name], Perceptron if name.startswith(("FedKT", "FedDF")) else Logs
    module = kind(configure=plain if flags == "plain" else scheduled)
    ends = [
        ended(make_trainer, module, entry.federation(), entry.algorithm(), runner=runner, **FLAGS[flags])
        for runner in ("serial", "lightning")
    ]
    close(*ends)


class Normal(Logs):
    """Module with a batch norm, and a layer that only batches of an odd size use."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm, self.seldom = nn.BatchNorm1d(4), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.output(self.norm(torch.tanh(self.hidden(x))))
        return y + self.seldom(x) if len(x) % 2 else y


class NormalByHand(Normal):
    """Module with two optimisers, which it steps itself."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        shared = [*self.hidden.parameters(), *self.norm.parameters(), *self.seldom.parameters()]
        return [torch.optim.SGD(shared, 0.1), torch.optim.Adam(self.output.parameters(), 0.01)]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return stepped_by_hand(self, super().training_step(batch, batch_idx))


def with_momentum(module: L.LightningModule) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def by_adam(module: L.LightningModule) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


PARTS: dict[str, tuple[Callable[[], Any], Callable[[L.LightningModule], Any]]] = {
    "layers of clients": (partial(Algorithm, personal=[PersonalLayers(["output"])]), with_momentum),
    "layers and statistics of clients": (partial(Algorithm, personal=[PersonalLayers(["output", "norm"])]), by_adam),
    "norms of clients": (FedBN, with_momentum),
    "layers of SCAFFOLD's clients": (partial(SCAFFOLD, personal=[PersonalLayers(["output"])]), plain),
    "FedProx by Adam": (partial(FedProx, mu=0.5), by_adam),
    "FedNova with momentum": (partial(FedNova, mu=0.5), with_momentum),
    "implicit pull": (partial(Algorithm, rule=Pulled(2.0, "implicit")), with_momentum),
    "a mask": (partial(IMC, rate=0.4, prune_round=1), by_adam),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_methods_train_as_by_the_runner_serial(name: str, make_trainer: MakeTrainer) -> None:
    method, configure = PARTS[name]
    flags = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "local_epochs": 2}
    module = Normal(configure=configure)
    close(*(ended(make_trainer, module, federation(), method(), runner=r, **flags) for r in ("serial", "lightning")))


def test_clients_that_step_by_hand_keep_layers(make_trainer: MakeTrainer) -> None:
    module, method = NormalByHand(), Algorithm(personal=[PersonalLayers(["output"])])
    ends = [ended(make_trainer, module, federation(), method, runner=runner) for runner in ("serial", "lightning")]
    close(*ends)
    kept = [state["personal"] for state in ends[1]["clients"].values()]
    assert not torch.equal(kept[0], kept[1])


class Scales(Perceptron):
    """Module whose steps grow from batch to batch."""

    def rate(self, batch_idx: int) -> float:
        return 0.02 * (1 + batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.rate(batch_idx)
        optimizer.step(closure=optimizer_closure)


class StepsLater(Scales):
    """Module that computes the gradient before it sets the rate, and steps without a closure."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        super().optimizer_step(epoch, batch_idx, optimizer, None)


class Skips(Scales):
    """Module that steps on every second batch only."""

    def rate(self, batch_idx: int) -> float:
        return 0.05 * (batch_idx % 2)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


@pytest.mark.parametrize("kind", [Scales, StepsLater, Skips])
@pytest.mark.parametrize("method", [FedProx(mu=0.5), SCAFFOLD()], ids=lambda method: method.name)
def test_a_module_that_changes_its_steps_trains_as_a_plain_loop(
    kind: type[Scales], method: Any, make_trainer: MakeTrainer
) -> None:
    module = kind()
    given, start = problem(rounds=3, epochs=2), vector(module)

    def proximal(w: np.ndarray, batches: oracle.Batches, eta: float) -> np.ndarray:
        y = w.copy()
        for index, batch in enumerate(batches):
            y = y - module.rate(index) * (oracle.gradient(y, *batch) + 0.5 * (y - w))
        return y

    make_trainer(max_rounds=3, clients_per_round=3, local_epochs=2, precision="64-true").fit(
        module, federation(), method
    )
    if method.name == "FedProx":
        expected = oracle.fedavg(given, start, proximal)
    else:
        expected = oracle.scaffold(given, start, eta=module.rate)
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-12)


class Watches(Perceptron):
    """Module that keeps what hooks find in the optimiser: its parameters, and whether they have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def watch(self, hook: str, optimizer: Any) -> None:
        members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = members == list(self.parameters())
        self.seen.append((hook, own, {parameter.grad is None for parameter in members}))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.watch("on_before_zero_grad", optimizer)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.watch("optimizer_zero_grad", optimizer)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.watch("on_before_optimizer_step", optimizer)

    def configure_gradient_clipping(self, optimizer: Any, *arguments: Any, **options: Any) -> None:
        self.watch("configure_gradient_clipping", optimizer)
        self.log("clipped", 1.0)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.watch("optimizer_step", optimizer)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.watch("after the step", optimizer)


@pytest.mark.parametrize(
    "method", [FedProx(mu=0.0), SCAFFOLD(personal=["output"]), Algorithm(personal=["hidden"])], ids=lambda m: m.name
)
def test_hooks_find_what_lightnings_trainer_shows(
    method: Any, make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    ours = Watches()
    stock = copy.deepcopy(ours)
    loader = DataLoader(TensorDataset(*(x[:1].repeat(8, 1) for x in samples(8))), batch_size=4)
    make_stock_trainer(max_epochs=1, limit_val_batches=0).fit(stock, loader)
    data = federation((8,), [x[:1].repeat(8, 1) for x in samples(8)])
    make_trainer(max_rounds=2, clients_per_round=1, runner="lightning").fit(ours, data, method)
    assert ours.seen == 2 * stock.seen
    assert len(stock.seen) == 12


class Corrects(Perceptron):
    """Module of `lightning.Trainer` that is FedProx's client."""

    def on_train_start(self) -> None:
        self.received = [parameter.detach().clone() for parameter in self.parameters()]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter, received in zip(self.parameters(), self.received, strict=True):
            parameter.grad += 0.5 * (parameter.detach() - received)


def test_clients_with_loaders_of_their_own_correct_gradients(
    make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    def loader(client: int) -> DataLoader:
        return DataLoader(TensorDataset(*samples(10, seed=client)), batch_size=4)

    module = Perceptron()
    average = vector(module)
    for _ in range(2):
        trained = []
        for client in range(3):
            alone = Corrects()
            nn.utils.vector_to_parameters(torch.as_tensor(average).float(), alone.parameters())
            make_stock_trainer(max_epochs=2, limit_val_batches=0).fit(alone, loader(client))
            trained.append(vector(alone))
        average = np.mean(trained, axis=0)
    data = Federated(NoLoader(), num_clients=3, client_loaders=loader)
    make_trainer(max_rounds=2, clients_per_round=3, local_epochs=2).fit(module, data, FedProx(mu=0.5))
    np.testing.assert_allclose(vector(module), average, rtol=0, atol=1e-6)


class NoLoader(L.LightningDataModule):
    """Data module whose clients bring their loaders."""

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*samples(10, seed=1)), batch_size=5)


def by_second_order(module: L.LightningModule) -> Any:
    return torch.optim.LBFGS(module.parameters(), lr=0.1)


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_with_further_gradients_or_models_is_refused(name: str, make_trainer: MakeTrainer) -> None:
    chosen, auto = (make_trainer(max_rounds=1, clients_per_round=2, runner=runner) for runner in ("lightning", "auto"))
    with pytest.raises(UserError, match=f"^runner 'lightning' leaves the steps.*{REFUSED[name]}.*another runner"):
        chosen.fit(Perceptron(), federation(), ROSTER[name].algorithm())
    with pytest.raises(UserError, match=f"^Scales overrides optimizer_step.*{REFUSED[name]}.*SCAFFOLD\\.$"):
        auto.fit(Scales(), federation(), ROSTER[name].algorithm())


def test_phases_are_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1, clients_per_round=2, runner="lightning", local_epochs=2)
    with pytest.raises(
        UserError, match=r"and that steps all .*FedRep \(HeadThenBody\) steps clients' own ones by turns"
    ):
        trainer.fit(Perceptron(), federation(), FedRep())


@pytest.mark.parametrize(
    "method", [FedProx(), Algorithm(personal=["output"]), FedNova()], ids=lambda method: method.name
)
def test_an_optimiser_with_a_closure_is_refused(method: Any, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1, clients_per_round=2, runner="lightning")
    with pytest.raises(UserError, match=f"LBFGS needs the loss several times in a step.*but {method.name} acts on"):
        trainer.fit(Perceptron(configure=by_second_order), federation(), method)


@pytest.mark.parametrize("name", ["PFedMe", "PerFedAvg", "IFCA", "DASHA", "FedDA", "PruneFL", "FedDP"])
def test_methods_that_read_samples_are_refused_for_loaders_of_clients(name: str, make_trainer: MakeTrainer) -> None:
    methods = {"FedDP": partial(FedDP, variant="threshold"), "FedDA": partial(FedDA, full_batch_last=1)}
    method = methods[name]() if name in methods else ROSTER[name].algorithm()
    data = Federated(NoLoader(), num_clients=2, client_loaders=lambda _: DataLoader(TensorDataset(*samples(8)), 4))
    with pytest.raises(UserError, match=f"loaders of their own, .*but {name}.* counts, repeats or reads samples"):
        make_trainer(max_rounds=2, clients_per_round=2).fit(Perceptron(), data, method)


def test_a_resumed_run_is_the_whole_run(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    resumed_like_whole(
        make_trainer, tmp_path, Scales, algorithm=lambda: SCAFFOLD(personal=["output"]), clients_per_round=3
    )


class ReadsSome(Perceptron):
    """Module that reads no batch of an odd size."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if len(batch[0]) % 2 else self.loss(batch)


@pytest.mark.parametrize("method", ["SCAFFOLD", "FedNova-proximal", "FedDyn"])
def test_a_batch_whose_step_is_none_is_skipped(method: str, make_trainer: MakeTrainer) -> None:
    module, data, flags = ReadsSome(), partial(federation, (5, 9, 8)), {"clients_per_round": 2}
    ends = [
        ended(make_trainer, module, data(), ROSTER[method].algorithm(), runner=runner, **flags)
        for runner in ("serial", "lightning")
    ]
    close(*ends)
