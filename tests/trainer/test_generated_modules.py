"""Test generated modules: one client with all samples does in a round what `lightning.Trainer` does in an epoch.

A module is drawn with the hooks that it overrides, what it logs in them and how, its metrics, buffers, lists, optimiser and
loaders. Weights, every value in `callback_metrics` at every hook, and the order of the hooks are those of the stock trainer. The
faster runners compute what Lightning's own loop computes.
"""

import difflib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric
from toys import samples

from lightning_fl.data import Federated

SAMPLES, BATCH = 10, 4
OWN_COLUMNS = ("clients/", "comm/", "model/", "time/", "round", "train/loss")
"""Columns that a federation adds."""
LOGS_IN = (
    "training_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "validation_step",
    "on_validation_batch_end",
    "on_validation_epoch_end",
)
CALLED_BESIDE = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_end",
    "on_train_end",
)
CHANGES_STEPS = ("optimizer_step", "configure_gradient_clipping", "backward", "optimizer_zero_grad")
METRICS = {"mean": MeanMetric, "sum": SumMetric, "max": MaxMetric}


@dataclass(frozen=True)
class Log:
    """A call of `self.log` in a hook: the batch's value, a metric of it, or a collection of metrics."""

    hook: str
    kind: str
    on_step: bool | None
    on_epoch: bool | None
    prog_bar: bool
    reduce_fx: str
    forward: bool

    @property
    def options(self) -> dict[str, Any]:
        flags = {"prog_bar": self.prog_bar}
        if self.kind == "value":
            flags["reduce_fx"] = self.reduce_fx
        by_epoch = self.hook.endswith("epoch_end")
        flags["on_step"], flags["on_epoch"] = (False, True) if by_epoch else (self.on_step, self.on_epoch)
        return flags


@dataclass(frozen=True)
class Drawn:
    """Draw of the hooks, logs, attributes and training of a module."""

    logs: tuple[Log, ...]
    hooks: tuple[str, ...]
    changes: tuple[str, ...]
    optimizer: str
    scheduler: str
    normalizes: bool
    counts: bool
    keeps_list: bool
    loaders: int
    accumulate: int
    clip: float | None
    sanity: int
    callback_logs: str
    transfers: bool
    manual: bool

    def names(self, of_epoch: bool) -> set[str]:
        """Return the names that are logged in a training: those with a value of the epoch, or those of single steps alone."""
        logs = [(i, log) for i, log in enumerate(self.logs) if "train" in log.hook and _has_epoch(log) == of_epoch]
        single = {f"{log.hook}/{index}{suffix}" for index, log in logs for suffix in ("", "_epoch")}
        parts = [(index, part) for index, log in logs if log.kind == "collection" for part in "ab"]
        return single | {f"{index}/{part}{suffix}" for index, part in parts for suffix in ("", "_epoch")}


def flag() -> st.SearchStrategy[bool | None]:
    return st.sampled_from([None, True, False])


def _has_steps(log: Log) -> bool:
    return "train" in log.hook if log.options["on_step"] is None else log.options["on_step"]


def _has_epoch(log: Log) -> bool:
    return "train" not in log.hook if log.options["on_epoch"] is None else log.options["on_epoch"]


LOGS = st.builds(
    Log,
    hook=st.sampled_from(LOGS_IN),
    kind=st.sampled_from(["value", "mean", "sum", "max", "collection"]),
    on_step=flag(),
    on_epoch=flag(),
    prog_bar=st.booleans(),
    reduce_fx=st.sampled_from(["mean", "sum", "max", "min"]),
    forward=st.booleans(),
).filter(lambda log: _has_steps(log) or _has_epoch(log))
MODULES = st.builds(
    Drawn,
    logs=st.lists(LOGS, max_size=4).map(tuple),
    hooks=st.lists(st.sampled_from(CALLED_BESIDE), max_size=4, unique=True).map(tuple),
    changes=st.lists(st.sampled_from(CHANGES_STEPS), max_size=2, unique=True).map(tuple),
    optimizer=st.sampled_from(["sgd", "two groups"]),
    scheduler=st.sampled_from(["", "epoch", "plateau"]),
    normalizes=st.booleans(),
    counts=st.booleans(),
    keeps_list=st.booleans(),
    loaders=st.integers(0, 2),
    accumulate=st.integers(1, 3),
    clip=st.sampled_from([None, 0.05]),
    sanity=st.integers(0, 2),
    callback_logs=st.sampled_from(["", "on_train_batch_end", "on_train_epoch_end", "on_validation_epoch_end"]),
    transfers=st.booleans(),
    manual=st.booleans(),
).map(lambda drawn: replace(drawn, accumulate=1, clip=None, changes=()) if drawn.manual else drawn)


class Base(L.LightningModule):
    """Module that keeps the samples of its batches, by epoch."""

    drawn: Drawn

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not self.drawn.manual
        self.read: list[list[list[int]]] = []
        self.hidden, self.output = nn.Linear(3, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4) if self.drawn.normalizes else nn.Identity()
        if self.drawn.counts:
            self.register_buffer("steps", torch.tensor(0.0))
        self.losses: list[Tensor] = []
        for index, log in enumerate(self.drawn.logs):
            if log.kind in METRICS:
                setattr(self, f"metric_{index}", METRICS[log.kind]())
            elif log.kind == "collection":
                setattr(
                    self, f"metric_{index}", MetricCollection({f"{index}/a": MeanMetric(), f"{index}/b": MaxMetric()})
                )

    def loss(self, batch: Any) -> Tensor:
        x, y, _ = batch
        return 0.5 * (self.output(torch.tanh(self.norm(self.hidden(x)))) - y).square().sum(1).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.drawn.counts:
            self.steps += 1
            loss = loss * (1 + 0.1 * self.steps)
        if self.drawn.keeps_list:
            self.losses.append(loss.detach())
        self.write("training_step", loss.detach())
        if self.drawn.manual:
            optimizers: Any = self.optimizers()
            self.manual_backward(loss)
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("val/loss", loss, add_dataloader_idx=self.drawn.loaders > 1)
        self.write("validation_step", loss)

    def on_train_epoch_end(self) -> None:
        if self.drawn.keeps_list:
            self.log("mean of the list", torch.stack(self.losses).mean())
            self.losses.clear()
        self.write("on_train_epoch_end", self.hidden.weight.detach().sum())
        if self.drawn.manual and (scheduler := self.lr_schedulers()) is not None:
            by_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*[self.trainer.callback_metrics[self.validated]] if by_metric else [])  # type: ignore[union-attr]

    def write(self, hook: str, value: Tensor) -> None:
        """Log what is drawn for a hook."""
        for index, log in enumerate(self.drawn.logs):
            if log.hook != hook:
                continue
            name = f"{hook}/{index}"
            if log.kind == "value":
                self.log(name, value, **log.options)
                continue
            metric = getattr(self, f"metric_{index}")
            if log.forward:
                metric(value)  # of which Lightning logs the step's value
            else:
                metric.update(value)
            if log.kind == "collection":
                self.log_dict(metric, **log.options)
            else:
                self.log(name, metric, **log.options)

    @property
    def validated(self) -> str:
        return "val/loss/dataloader_idx_0" if self.drawn.loaders > 1 else "val/loss"

    def configure_optimizers(self) -> Any:
        groups: Any = self.parameters()
        if self.drawn.optimizer == "two groups":
            groups = [
                {"params": self.hidden.parameters(), "lr": 0.05},
                {"params": [*self.norm.parameters(), *self.output.parameters()]},
            ]
        if self.drawn.manual and self.drawn.optimizer == "two groups":
            first, optimizer = (torch.optim.SGD([group], lr=0.1) for group in groups)
            optimizers = [first, optimizer]
        else:
            optimizers = [optimizer := torch.optim.SGD(groups, lr=0.1)]
        if self.drawn.scheduler == "epoch":
            return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]
        if self.drawn.scheduler == "plateau" and self.drawn.loaders:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
            return optimizers, [{"scheduler": scheduler, "monitor": self.validated}]
        return optimizers


def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + batch_idx)
    optimizer.step(closure=optimizer_closure)


def configure_gradient_clipping(self: Any, optimizer: Any, *arguments: Any, **options: Any) -> None:
    self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="value")


def backward(self: Any, loss: Tensor, *arguments: Any, **options: Any) -> None:
    (2 * loss).backward()


def optimizer_zero_grad(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
    if batch_idx % 2 == 0:
        optimizer.zero_grad()


CHANGES = {each.__name__: each for each in (optimizer_step, configure_gradient_clipping, backward, optimizer_zero_grad)}


def generated(drawn: Drawn, seen: list[Any]) -> Any:
    """Return a module of a class that overrides what is drawn, and keeps in `seen` the hooks that are called."""

    def hook(name: str) -> Callable[..., None]:
        def call(self: Any, *arguments: Any, **options: Any) -> None:
            seen.append(f"module.{name}")
            if name.endswith("batch_end"):
                self.write(name, self.output.weight.detach().sum())
            elif name == "on_validation_epoch_end":
                self.write(name, self.output.bias.detach().sum())

        return call

    logged_in = {log.hook for log in drawn.logs} - {"training_step", "validation_step", "on_train_epoch_end"}
    names = {"drawn": drawn} | {name: hook(name) for name in sorted(logged_in | set(drawn.hooks))}
    return type("Generated", (Base,), names | {name: CHANGES[name] for name in drawn.changes})()


class Watches(Callback):
    """Callback that keeps the hooks that are called, with the metrics that it finds in them, and the samples of the batches."""

    def __init__(self, seen: list[Any], logs_in: str) -> None:
        self.seen, self.logs_in = seen, logs_in
        self.epochs: list[list[list[int]]] = []


def _watched(name: str) -> Callable[..., None]:
    def call(self: Any, trainer: Any, pl_module: Any, *arguments: Any, **options: Any) -> None:
        if name == "on_train_epoch_start":
            self.epochs.append([])
        elif name == "on_train_batch_start":
            self.epochs[-1].append(arguments[0][2].tolist())
        metrics = {key: float(x) for key, x in trainer.callback_metrics.items() if not key.startswith(OWN_COLUMNS)}
        self.seen.append((name, metrics))
        if name == self.logs_in:
            self.log("of the callback", pl_module.output.bias.detach().sum(), on_step=False, on_epoch=True)

    return call


WATCHED = [
    name for name in dir(Callback) if name.startswith("on_") and "checkpoint" not in name and "exception" not in name
]
for _name in WATCHED:
    setattr(Watches, _name, _watched(_name))


class InOrder:
    """Batch sampler that reads the given batches of each epoch."""

    def __init__(self, epochs: list[list[list[int]]]) -> None:
        self.epochs, self.next = epochs, 0

    def __len__(self) -> int:
        return len(self.epochs[0])

    def __iter__(self) -> Iterator[list[int]]:
        self.next += 1
        return iter(self.epochs[self.next - 1])


class Data(L.LightningDataModule):
    """Ten samples, each with its index, in batches of four, which `epochs` sets for each epoch."""

    def __init__(self, drawn: Drawn, epochs: list[list[list[int]]] | None = None) -> None:
        super().__init__()
        self.loaders, self.transfers, self.epochs = drawn.loaders, drawn.transfers, epochs
        self.samples = TensorDataset(*samples(SAMPLES), torch.arange(SAMPLES))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y, indices = batch
        return (x + 0.5 * self.trainer.training, y, indices) if self.transfers else batch

    def train_dataloader(self) -> DataLoader:
        if self.epochs is None:
            return DataLoader(self.samples, batch_size=BATCH, shuffle=True)
        return DataLoader(self.samples, batch_sampler=InOrder(self.epochs))


class ValidatedData(Data):
    """Data with one or two loaders for validation."""

    def val_dataloader(self) -> Any:
        held_out = TensorDataset(*samples(7, seed=1), torch.arange(7))
        loaders = [DataLoader(held_out, batch_size=3 + index) for index in range(self.loaders)]
        return loaders[0] if len(loaders) == 1 else loaders


def differences(drawn: Drawn, make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]) -> list[str]:
    """Return what differs between a federation of one client and Lightning's trainer: hooks, metrics in them, weights."""
    seen: list[Any] = []
    stock_seen: list[Any] = []
    L.seed_everything(0, verbose=False)
    ours, stock = generated(drawn, seen), generated(drawn, stock_seen)
    stock.load_state_dict(ours.state_dict())
    flags: dict[str, Any] = {"accumulate_grad_batches": drawn.accumulate, "num_sanity_val_steps": drawn.sanity}
    if "configure_gradient_clipping" not in drawn.changes:
        flags["gradient_clip_val"] = drawn.clip
    watches = Watches(seen, drawn.callback_logs)
    data = ValidatedData if drawn.loaders else Data
    federated = make_trainer(callbacks=watches, runner="lightning", clients_per_round=1, max_rounds=2, **flags)
    federated.fit(ours, Federated(data(drawn), num_clients=1))
    trainer = make_stock_trainer(callbacks=Watches(stock_seen, drawn.callback_logs), log_every_n_steps=1, **flags)
    trainer.fit(stock, datamodule=data(drawn, watches.epochs))
    found = [*different_hooks(seen, stock_seen), *different_weights(ours, stock)]
    return found or [*different_metrics(seen, stock_seen, drawn)]


def different_hooks(seen: list[Any], expected: list[Any]) -> Iterator[str]:
    """Yield the hooks that are missing (-) or called too often (+)."""
    lists = ([one if isinstance(one, str) else one[0] for one in each] for each in (expected, seen))
    yield from (line for line in difflib.ndiff(*lists) if line[0] in "+-")


def different_metrics(seen: list[Any], expected: list[Any], drawn: Drawn) -> Iterator[str]:
    """Yield the metrics with another value than the stock trainer's in a hook of the callback.

    Values of a training are there when the clients have trained, so already in the validation. A name that is logged in single
    steps alone has their mean then, where the stock trainer has the last one.
    """
    of_steps, of_epoch = drawn.names(of_epoch=False), drawn.names(of_epoch=True)
    if "train" in drawn.callback_logs:
        of_epoch.add("of the callback")
    after_the_hook = {
        name for name in of_steps if name.startswith("on_train_batch_end")
    } | {  # which is the module's own
        f"{index}/{part}" for index, log in enumerate(drawn.logs) if log.hook == "on_train_batch_end" for part in "ab"
    }
    pairs = ([one for one in each if not isinstance(one, str)] for each in (seen, expected))
    for (hook, metrics), (_, stock) in zip(*pairs, strict=True):
        left_out = of_steps
        if hook == "on_train_batch_end":
            left_out = after_the_hook | {name for name in of_steps if name not in stock}
        elif "validation" in hook:
            left_out = of_steps | of_epoch
        for name in sorted((metrics.keys() | stock.keys()) - left_out):
            mine, value = metrics.get(name), stock.get(name)
            if mine is None or value is None or mine != pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True):
                yield f"{hook}: {name} is {mine}, not {value}"


def different_weights(module: L.LightningModule, stock: L.LightningModule) -> Iterator[str]:
    """Yield the entries of the state with other values."""
    state = module.state_dict()
    yield from (
        name for name, value in stock.state_dict().items() if not torch.allclose(state[name], value, rtol=0, atol=1e-5)
    )


def columns(drawn: Drawn, runner: str, make_trainer: MakeTrainer) -> dict[str, float]:
    """Return all columns of a run of three clients but times, and the sum of each entry of the state."""
    L.seed_everything(0, verbose=False)
    module = generated(drawn, [])
    trainer = make_trainer(
        runner=runner,
        clients_per_round=2,
        max_rounds=2,
        accumulate_grad_batches=drawn.accumulate,
        gradient_clip_val=drawn.clip,
    )
    trainer.fit(module, Federated((ValidatedData if drawn.loaders else Data)(drawn), num_clients=3))
    rows = {
        f"{index}/{name}": float(value)
        for index, row in enumerate(trainer.fit_loop.rows)
        for name, value in row.items()
        if not name.startswith("time/")
    }
    return rows | {name: float(value.double().sum()) for name, value in module.state_dict().items()}


def different_columns(drawn: Drawn, make_trainer: MakeTrainer) -> list[str]:
    """Return the columns in which the faster runners differ from Lightning's own loop."""
    drawn = replace(drawn, changes=())  # which only that loop calls
    expected = columns(drawn, "lightning", make_trainer)
    return [
        f"{runner}: {name} is {found.get(name)}, not {expected.get(name)}"
        for runner in ("serial", "auto")
        for found in [columns(drawn, runner, make_trainer)]
        for name in sorted(found.keys() | expected.keys())
        if not math.isclose(found.get(name, math.inf), expected.get(name, -math.inf), rel_tol=1e-4, abs_tol=1e-5)
    ]


CHEAP = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]}
FEW, MANY = settings(max_examples=20, **CHEAP), settings(max_examples=400, **CHEAP)


@FEW
@given(drawn=MODULES)
def test_a_round_of_one_client_is_an_epoch(
    drawn: Drawn, make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    assert differences(drawn, make_trainer, make_stock_trainer) == []


@FEW
@given(drawn=MODULES)
def test_the_faster_runners_compute_what_lightnings_loop_computes(drawn: Drawn, make_trainer: MakeTrainer) -> None:
    assert different_columns(drawn, make_trainer) == []


@pytest.mark.slow
@MANY
@given(drawn=MODULES)
def test_a_round_of_one_client_is_an_epoch_of_many_modules(
    drawn: Drawn, make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    assert differences(drawn, make_trainer, make_stock_trainer) == []


@pytest.mark.slow
@MANY
@given(drawn=MODULES)
def test_the_faster_runners_compute_what_lightnings_loop_computes_for_many(
    drawn: Drawn, make_trainer: MakeTrainer
) -> None:
    assert different_columns(drawn, make_trainer) == []
