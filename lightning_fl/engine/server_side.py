"""The server's side of a run: its own samples, and training and evaluation of the module on them.

An algorithm reaches it through `ServerTurn.server` (`lightning_fl.slots.Server`). Training on the server is a client's local
training: the same minibatch loop, epochs, batch size and learning rate of the round; (seed, round) decide the order of the
samples. Every process trains, and all use the result of process 0, so that rounding cannot make their models differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from lightning_fl.checks import overrides
from lightning_fl.checks.evaluation_mode import evaluating, keeping_attributes
from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.clients.local_training import finish, train_locally
from lightning_fl.data import FederatedDataModule
from lightning_fl.data.non_iid_degree import non_iid_degree
from lightning_fl.data.samples.loaders import SampleLoader
from lightning_fl.errors import UserError, nearest, noting, require
from lightning_fl.evaluation.evaluation import as_loaders, mean_training_loss, num_batches
from lightning_fl.evaluation.loops import measure
from lightning_fl.evaluation.macs import count_layer_macs
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.module_buffers import check_counters
from lightning_fl.outputs.metric import ACCURACY, falls, find_accuracy
from lightning_fl.processes import of_rank_zero
from lightning_fl.slots import Message, RoundContext, Rule, ServerTraining, is_finite
from lightning_fl.state.outcome import maximum
from lightning_fl.state.run_state import SERVER, Run
from lightning_fl.vectors.submodel import Submodel


@dataclass
class ServerSide:
    """Implementation of `lightning_fl.slots.Server`, which documents the methods; docstrings here say what is special.

    Attributes:
        flat_module: module on flat storage, which the clients train too.
        data: the server's samples, and the sizes and classes of the clients' samples.
        run: holds the random seeds and what clients own at first; not changed.
        schedule: length and batches of a client's local training, which also hold for the server.
        context: facts about the run.
        counters: integer buffers of the module by name, which trainings raise.
        method: name of the algorithm, for errors.
        metric: logged name that the user has given as the accuracy; None to find it.
        num_steps: optimiser steps of its trainings in this turn.
        on_dropped: called when a training is dropped because its result is not finite.
    """

    flat_module: FlatModule
    data: FederatedDataModule
    run: Run
    schedule: LocalSchedule
    context: RoundContext
    counters: dict[str, Tensor]
    method: str
    metric: str | None = None
    num_steps: int = 0
    on_dropped: Callable[[], None] = lambda: None

    def branch(self) -> ServerSide:
        return replace(self)

    @property
    def num_samples(self) -> int:
        return len(self.data.server_indices)

    @property
    def has_labels(self) -> bool:
        return self.data.has_classes

    @property
    def skips_single_samples(self) -> bool:
        return self.flat_module.skips_single_samples

    @property
    def seed(self) -> int:
        """First seed of the server in this round, which also decides the order of the samples in `train`."""
        return self.run.torch_seeds(SERVER)[0]

    @property
    def untrained(self) -> list[slice]:
        return self.flat_module.layout.slices(self.flat_module.untrained)

    def require_samples(self) -> None:
        require(
            self.num_samples > 0,
            f"{self.method} trains on samples of the server, which has none: set --data.server_fraction, for example 0.05.",
        )

    @property
    def batch_size(self) -> int:
        return self.schedule.batch_size

    @property
    def samples_per_client(self) -> float:
        sizes = self.data.client_sizes[self.data.client_sizes > 0]
        return float(np.mean([self.schedule.num_samples(int(size)) for size in sizes]))

    def layer_macs(self) -> dict[str, int]:
        samples = self.data.server_data() or self.data.client(self.data.largest_client)
        macs = count_layer_macs(self.flat_module, samples, self.data.train.resident)
        return macs or {}

    def train(
        self,
        received: Message,
        rule: Rule | None = None,
        epochs: int | None = None,
        rows: slice = slice(None),
        mask: Tensor | None = None,
    ) -> ServerTraining:
        """Train as a client does; every process trains, and all use the deltas of process 0."""
        flat_module, run, rule = self.flat_module, self.run, rule or Rule()
        self.require_samples()
        samples = self.data.train.select(self.data.server_indices[rows])
        context = self.context
        if mask is not None:
            context = replace(context, unpruned=Submodel.from_masks(context.layout, context.buffer_layout, mask))
        flat_module.personal.load(run.personal)
        state = rule.init(received["model"])
        schedule = self.schedule if epochs is None else replace(self.schedule, epochs=epochs, steps=None)
        schedule = replace(schedule.in_round(rule, context), drop_last=False)
        job = ClientJob(rule, context, received, schedule, run, self.counters)
        turn = noting(lambda: f"The server was training in round {run.round}.")
        with turn, keeping_attributes(flat_module.own_parts):  # which count the clients' batches
            work = schedule.work(samples, run.torch_seeds(SERVER), self.data.train.resident)
            local = train_locally(flat_module, job, work, state)
            flat_module.progress = None
            flat_module.logs.forget()
        message = finish(flat_module, job, local)
        message = {name: of_rank_zero(flat_module.fabric, x) for name, x in message.items()}
        self.num_steps += local.num_steps
        if not is_finite(message):
            self.on_dropped()
            return ServerTraining({name: torch.zeros_like(x) for name, x in message.items()}, 0.0, local.num_steps)
        reached = flat_module.read_counters()
        check_counters(flat_module.module, self.counters, reached)
        self.counters = maximum(self.counters, reached)
        return ServerTraining(message, float(len(samples)), local.num_steps)

    def accuracy(self, params: Tensor, buffers: Tensor, rows: slice = slice(None)) -> float:
        """Return the accuracy that `validation_step` logs, without augmentation and callbacks.

        Raises:
            UserError: `validation_step` logs no accuracy, or one outside [0, 1].
        """
        flat_module, data = self.flat_module, self.data
        name = type(flat_module.module).__name__
        if not overrides("validation_step", flat_module.module):
            raise UserError(
                f"{self.method} needs the accuracy on the server's data: give {name} a validation_step that logs {ACCURACY!r}."
            )
        flat_module.load(params, buffers, self.counters)
        flat_module.personal.load(self.run.personal)
        loaders = as_loaders(SampleLoader(data.evaluated, data.server_indices[rows], data.eval_batch_size))
        logged = measure(flat_module, "validation", loaders, num_batches(loaders, None))
        accuracy = accuracy_in(logged, self.method, name, self.metric)
        within = -1e-6 <= accuracy <= 1 + 1e-6
        require(within, f"an accuracy must be in [0, 1], but the validation_step of {name} logs {accuracy:g}.")
        return min(max(accuracy, 0.0), 1.0)

    def loss(self, params: Tensor, buffers: Tensor) -> float:
        """Return the mean loss of `training_step`, without augmentation."""
        data, flat_module = self.data, self.flat_module
        flat_module.load(params, buffers, self.counters)
        flat_module.personal.load(self.run.personal)
        size, count = data.eval_batch_size, len(data.server_indices)
        batches = data.train.batches(size, data.server_indices)
        sizes = [min(size, count - start) for start in range(0, count, size)]
        return mean_training_loss(flat_module, batches, sizes, data.train.resident)

    def try_accuracy(self) -> None:
        """Evaluate the initial model on the first samples."""
        self.accuracy(self.run.params, self.run.buffers, slice(self.data.eval_batch_size))

    def inputs(self, rows: Tensor, batch_size: int) -> Iterator[Any]:
        """Yield the first part of each batch, without augmentation; the last batch may be smaller."""
        data, flat_module = self.data, self.flat_module
        for batch in data.train.batches(batch_size, data.server_indices[rows.numpy()]):
            yield flat_module.inputs(batch, data.train.resident)

    def logits(self, params: Tensor, buffers: Tensor, inputs: Any, training: bool = False) -> Tensor:
        flat_module = self.flat_module
        if self.context.unpruned is not None:
            params = params * self.context.unpruned.factors.to(params.dtype)
        flat_module.personal.load(self.run.personal)
        views = flat_module.layout.views(params)
        views |= {name: views[name].detach() for name in flat_module.untrained}
        tree = views | flat_module.buffer_layout.views(buffers) | flat_module.read_counters()
        with evaluating(flat_module.module), flat_module.fabric.autocast():
            flat_module.module.train(training)
            return functional_call(flat_module.module, tree, (inputs,))

    def try_logits(self) -> None:
        """Run `forward` on two samples."""
        name, logits = type(self.flat_module.module).__name__, None
        with torch.no_grad():
            try:
                inputs = next(self.inputs(torch.arange(min(2, self.num_samples)), batch_size=2))
                logits = self.logits(self.run.params, self.run.buffers, inputs)
            except Exception as error:
                raise UserError(
                    f"{self.method} needs {name}.forward(inputs) to return logits, but it fails: {error}"
                ) from error
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        require(
            isinstance(logits, Tensor) and logits.ndim == 2,
            f"{self.method} needs {name}.forward(inputs) to return logits (samples, classes), got {shape}.",
        )
        require(
            logits.shape[1] > 1,
            f"{self.method} needs the logits of at least two classes, whose probabilities the server learns, but "
            f"{name}.forward(inputs) returns one number a sample: use a method that needs no classes, such as FedAvg.",
        )

    def degrees(self, clients: Sequence[int]) -> tuple[float, float]:
        """Return the degrees D of `lightning_fl.data.non_iid_degree`."""
        histograms, server_histogram = self.data.label_histograms, self.data.server_histogram
        assert histograms is not None
        assert server_histogram is not None
        everyone = histograms.sum(0)
        cohort = histograms[np.asarray(clients)].sum(0)
        return float(non_iid_degree(cohort, everyone)), float(non_iid_degree(server_histogram, everyone))

    def label_histograms(self) -> Tensor:
        assert self.data.label_histograms is not None
        return torch.from_numpy(self.data.label_histograms).float()


def accuracy_in(logged: Mapping[str, float], method: str, module: str, given_name: str | None = None) -> float:
    """Return the accuracy among logged values: the given name, or the one that `find_accuracy` finds.

    >>> accuracy_in({"val_loss": 2.0, "val_acc": 0.4}, "FedAP", "Classifier")
    0.4

    Raises:
        UserError: the given name is a loss or is not logged, or no name or several are those of an accuracy.
    """
    needed = f"{method} needs the accuracy on the server's data"
    if given_name is not None:
        require(
            not falls(given_name),
            f"{needed}, but trainer.metric is {given_name!r}, a loss or error: give the name of an accuracy.",
        )
        require(
            given_name in logged,
            f"{needed} as trainer.metric {given_name!r}, which is not logged; {nearest(given_name, logged)}.",
        )
    name = given_name or find_accuracy(logged)
    require(
        name is not None,
        f"{needed}: let the validation_step of {module} log {ACCURACY!r}; it logs "
        f"{', '.join(map(repr, sorted(logged))) or 'nothing'}, of which trainer.metric may name one.",
    )
    assert name is not None
    return logged[name]
