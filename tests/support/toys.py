"""Module and data small enough to be checked by hand."""

import copy
import csv
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_fl.algorithms import Algorithm
from lightning_fl.data import Arrays, FederatedDataModule, Partition
from lightning_fl.data.samples.tensor_samples import TensorSamples
from lightning_fl.pruning import Plan, plans_of, prune
from lightning_fl.slots import Codec, LocalTraining, Message, Packed, Payload, RoundContext, Rule, State, Traits

SIZES = (3, 5, 4, 9, 12, 7)
"""Numbers of samples of the six clients: unequal, some with a last batch of one."""
BATCH_SIZE = 4
SHARED, OWN = slice(0, 16), slice(16, 26)
"""Places of the hidden layer in a perceptron's vector, and of the output, where that is personal."""


def stepped_by_hand(module: L.LightningModule, loss: Tensor) -> Tensor:
    """Step the optimisers of a module with manual optimisation; return the loss."""
    optimizers: Any = module.optimizers()
    for optimizer in optimizers:
        optimizer.zero_grad()
    module.manual_backward(loss)
    for optimizer in optimizers:
        optimizer.step()
    return loss


class Perceptron(L.LightningModule):
    """Module x (B, 3) → W₂ tanh(W₁x + b₁) + b₂ (B, 2); the loss is the batch's mean of ½‖output − y‖²."""

    def __init__(self, lr: float = 0.1, configure: Callable[[L.LightningModule], Any] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters("lr")
        self.configure = configure
        self.hidden = nn.Linear(3, 4)
        self.output = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.tanh(self.hidden(x)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return 0.5 * (self(x) - y).square().sum(1).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))
        x, y = batch
        self.log("val/accuracy", (self(x).argmax(1) == y.argmax(1)).double().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        if self.configure is not None:
            return self.configure(self)
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


@dataclass(frozen=True)
class Sizes(Partition):
    """Partition that gives client k exactly `sizes[k]` samples."""

    needs_labels = False
    takes_shuffled = True
    sizes: tuple[int, ...] = SIZES

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return np.split(rng.permutation(len(labels)), np.cumsum(self.sizes)[:-1])


def samples(num: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs (num, 3) and targets (num, 2)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 3, generator=generator), torch.randn(num, 2, generator=generator)


def federation(sizes: tuple[int, ...] = SIZES, train: Any = None, batch_size: int = BATCH_SIZE) -> Arrays:
    """Return data of clients with `sizes` samples each, and ten test samples."""
    return Arrays(
        train=samples(sum(sizes)) if train is None else train,
        test=samples(10, seed=1),
        num_clients=len(sizes),
        batch_size=batch_size,
        partition=Sizes(sizes=sizes),
        eval_batch_size=4,
    )


class Measuring(Perceptron):
    """Perceptron that logs its loss in training as a torchmetrics object."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean(loss.detach())
        self.log("train/mean", self.mean)
        return loss


class Served(FederatedDataModule):
    """`federation` with `num_server` more samples for the server; the class of a sample is its larger target."""

    def __init__(self, num_server: int, train: Any = None, sizes: tuple[int, ...] = SIZES) -> None:
        num_clients = sum(sizes)
        super().__init__(
            num_clients=len(sizes),
            batch_size=BATCH_SIZE,
            partition=Sizes(sizes=sizes),
            client_fraction=num_clients / (num_clients + num_server),
            server_fraction=num_server / num_clients,
            eval_batch_size=4,
        )
        self.samples = samples(num_clients + num_server) if train is None else train

    @property
    def num_classes(self) -> int:
        return 2

    def load(self) -> tuple[TensorSamples, TensorSamples]:
        x, y = self.samples
        return TensorSamples(x, y, labels=y.argmax(1).numpy()), TensorSamples(*samples(10, seed=1))


class OnlyTrains(L.LightningDataModule):
    """Data module with a training loader alone."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*samples(8)), batch_size=4)


def without_units(module: nn.Module, drop: tuple[int, ...]) -> Plan:
    """Return the plan that removes some hidden units from a perceptron."""
    width = len(module.hidden.bias)
    kept = torch.tensor([unit for unit in range(width) if unit not in drop])
    axes = {"hidden.weight": {0: kept}, "hidden.bias": {0: kept}, "output.weight": {1: kept}}
    return Plan(filters={"hidden": kept}, axes=axes, widths={"hidden": width})


class Pruning(L.Callback):
    """Callback that removes hidden units from a perceptron once, when a round starts."""

    def __init__(self, when: int = 2, drop: tuple[int, ...] = (1,)) -> None:
        self.when, self.drop = when, drop

    def plan(self, module: nn.Module) -> Plan:
        return without_units(module, self.drop)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.when and not plans_of(pl_module):
            prune(pl_module, self.plan(pl_module), trainer.optimizers)


class Recorded(L.Callback):
    """Callback that keeps the messages of clients that have crossed the uplink, by round."""

    def __init__(self) -> None:
        self.rounds: dict[int, list[Any]] = {}

    def on_client_message(self, trainer: Any, pl_module: Any, message: Any) -> None:
        self.rounds.setdefault(trainer.current_epoch, []).append(copy.deepcopy(message))


def fit_until(trainer: Any, rounds: int, *given: Any, **named: Any) -> None:
    """Fit, and end it by Ctrl-C when so many rounds are done, unless it ends there by itself."""
    train_round = trainer.fit_loop._round

    def interrupted() -> None:
        if trainer.run.round == rounds:
            raise KeyboardInterrupt
        train_round()

    trainer.fit_loop._round = interrupted
    with suppress(KeyboardInterrupt):
        trainer.fit(*given, **named)
    assert trainer.run.round == rounds


def reordered(tree: Mapping[str, Tensor], is_used: bool = True) -> dict[str, Tensor]:
    """Return copies of tensors (…) that are stored with axis 1 innermost, matrices transposed, if this is used."""
    if not is_used:
        return dict(tree)
    orders = {
        name: (1, 0) if x.dim() == 2 else (*[axis for axis in range(x.dim()) if axis != 1], 1)
        for name, x in tree.items()
    }
    return {
        name: torch.empty_permuted(x.shape, orders[name], dtype=x.dtype).copy_(x.detach()) if x.dim() > 1 else x
        for name, x in tree.items()
    }


def vector(module: nn.Module) -> np.ndarray:
    """Return all parameters as one float64 vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()]).double().numpy()


def personal_values(trainer: Any) -> dict[int, np.ndarray]:
    """Return the personal parameters that each client keeps."""
    return {client: state["personal"].double().numpy() for client, state in trainer.run.clients.items()}


def own_models(trainer: Any) -> dict[int, np.ndarray]:
    """Return the model of its own that each client keeps."""
    return {client: state["own/model"].double().numpy() for client, state in trainer.run.clients.items()}


def read_rows(root: Path) -> list[dict[str, str]]:
    """Return the rows of a run's metrics.csv, without the wall clock."""
    with (root / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row.pop("time/round_seconds", None)
    return rows


@dataclass(frozen=True)
class Drifting(Rule):
    """Rule with the gradient g + pull·c; a client keeps the sum c of its deltas and the number of its rounds.

    The state is changed in place, which a rule may do because it gets a copy.
    """

    pull: float = 0.3

    def init(self, params: Tensor) -> State:
        return {"sum": torch.zeros_like(params), "turns": torch.zeros((), dtype=torch.int64)}

    def correct(self, local: LocalTraining) -> None:
        local.gradient += self.pull * local.state["sum"]

    def finish(self, local: LocalTraining) -> Message:
        delta = local.params - local.received["model"]
        local.state["sum"] += delta
        local.state["turns"] += 1
        return {"model": delta}


@dataclass(frozen=True)
class Halves(Codec):
    """Codec that sends half of the message plus half of the kept rest, at one bit a number."""

    traits = Traits.CONTRACTS

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        wanted = {name: x + memory.get(name, 0) for name, x in message.items()}
        payload = {name: Packed(x / 2, x.numel()) for name, x in wanted.items()}
        return payload, {name: x / 2 for name, x in wanted.items()}

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        return {name: packed.content for name, packed in payload.items()}


class Remembering(Algorithm):
    """Algorithm whose clients and codecs keep states between rounds."""

    def __init__(self) -> None:
        super().__init__(rule=Drifting(), uplink=Halves())


class Statistics(Perceptron):
    """Module that keeps a running mean of its inputs and counts its batches, in place or in new tensors."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("precise", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("batches", torch.tensor(0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        change = batch[0].detach().mean(0) - self.mean
        if self.in_place:
            self.mean += 0.5 * change
            self.precise += 0.5 * change
            self.batches += 1
        else:
            self.mean = self.mean + 0.5 * change
            self.precise = self.precise + 0.5 * change
            self.batches = self.batches + 1
        return self.loss(batch)


class Tied(Perceptron):
    """Module whose encoder and decoder share one weight (4, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(3, 4, bias=False)
        self.output.weight = self.hidden.weight

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.hidden(x)) @ self.output.weight)[:, :2]


class Normalised(Perceptron):
    """Module with batch normalisation: 6 more parameters, 6 float buffers and one counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Poisoned(Perceptron):
    """Module whose loss is NaN on samples with a first feature beyond 100."""

    def loss(self, batch: Any) -> torch.Tensor:
        poison = torch.where(batch[0][:, 0].max() > 100, torch.nan, 1.0)
        return super().loss((batch[0].clamp(max=100), batch[1])) * poison


class Convolved(Perceptron):
    """Perceptron whose hidden neurons are filters of one pixel: the same 26 numbers at the same positions."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr=lr)
        self.hidden = nn.Conv2d(3, 4, 1)  # type: ignore[assignment]
        self.hidden.weight.data *= 0.4  # smaller than the other weights, so that filters are pruned
        self.example_input_array = torch.zeros(1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.hidden(x[..., None, None])).flatten(1))


class Unlabelled(Served):
    """Server samples without known classes."""

    def load(self) -> tuple[TensorSamples, TensorSamples]:
        train, test = super().load()
        train.labels = None
        return train, test


class WithoutLogits(Perceptron):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).sum()
