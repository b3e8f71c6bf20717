"""Train the module as a classifier before the first round: Adam on hard labels, from weights that the method gives.

Each process trains every model in its one working module, with one optimiser and one flat gradient: a training begins by
copying its initial model. Methods reach the learner through `SetupTurn.learner` (`lightning_fl.slots.Learner`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_fl.checks.evaluation_mode import evaluating
from lightning_fl.data import FederatedDataModule
from lightning_fl.data.samples.tensor_samples import Selection
from lightning_fl.errors import require
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.link.ledger import Ledger
from lightning_fl.processes import gather_objects, gather_tensors, share_of
from lightning_fl.slots import Message
from lightning_fl.vectors.flat_gradient import FlatGradient


@dataclass
class ModuleLearner:
    """Implementation of `lightning_fl.slots.Learner`, which documents the methods; docstrings here say what is special.

    It uses the module's `forward`, without callbacks and `training_step`.

    Attributes:
        flat_module: the module.
        data: the clients' samples.
        counters: initial integer buffers of every model, by name.
        ledger: counts the bits of the set-up, for the clients of all processes.
        on_client: called after each client of this process with its index, its position from 1, and the number of these clients.
        most_steps: optimiser steps of each training at most; None for all.
        num_steps: optimiser steps made so far, in all processes.
        num_left_out: steps that `most_steps` has left out, in this process.
    """

    flat_module: FlatModule
    data: FederatedDataModule
    counters: Mapping[str, Tensor]
    ledger: Ledger
    on_client: Callable[[int, int, int], None]
    most_steps: int | None = None
    num_steps: int = 0
    num_left_out: int = 0

    def train(
        self,
        start: Message,
        samples: Selection,
        labels: Tensor,
        epochs: int,
        batch_size: int,
        learning_rate: float,
        random: np.random.Generator,
    ) -> Message:
        """Train in training mode, with the augmentation of the data, if any; `forward` takes the first part of each batch."""
        flat_module = self.flat_module
        buffers = flat_module.personal.buffers
        owned = [*flat_module.personal.leaves, *buffers.views, *buffers.counter_names]
        require(
            not owned,
            f"models are trained before the first round, each as a whole, but clients keep {owned[0] if owned else ''!r}: use a "
            "method that trains in rounds only, or keep nothing on the clients.",
        )
        adam, untrained = self._adam, flat_module.layout.slices(flat_module.untrained)
        order, own_seed = (int(seed) for seed in random.integers(2**63, size=2))
        flat_module.load(start["model"], start["buffers"], self.counters)
        flat_module.generators.seed(own_seed)
        adam.state.clear()
        adam.param_groups[0]["lr"] = learning_rate
        labels = labels.to(flat_module.fabric.device)
        generator = torch.Generator().manual_seed(order)
        planned = epochs * self._num_batches(len(samples), batch_size)
        passes = (self._labelled(samples, labels, batch_size, generator) for _ in range(epochs))
        for inputs, classes in islice(chain.from_iterable(passes), self.most_steps):
            self._gradient.zero()
            with flat_module.fabric.autocast():
                loss = F.cross_entropy(flat_module.module(inputs), classes)
            flat_module.fabric.backward(loss)
            flat_module.bind_replaced()
            self._gradient.complete()
            for part in untrained:
                adam.param_groups[0]["params"][0].grad[part].zero_()
            adam.step()
            self.num_steps += 1
        self.num_left_out += 0 if self.most_steps is None else max(0, planned - self.most_steps)
        for parameter in self._parameters:
            parameter.grad = None
        flat_module.gradient.zero()
        return {"model": flat_module.params.clone(), "buffers": flat_module.read_buffers().clone()}

    def votes(self, model: Message, samples: Selection) -> Tensor:
        """Vote for the class with the largest logit, the first of equal ones."""
        flat_module = self.flat_module
        flat_module.load(model["model"], model["buffers"], self.counters)
        parts = []
        with evaluating(flat_module.module), torch.no_grad():
            for batch in samples.batches(self.data.eval_batch_size):
                with flat_module.fabric.autocast():
                    logits = flat_module.module(flat_module.inputs(batch, self.data.train.resident))
                parts.append(F.one_hot(logits.argmax(1), logits.shape[1]))
        return torch.cat(parts).cpu()

    def sum_over_clients(self, work: Callable[[int], Tensor]) -> Tensor:
        """Sum integers of one shape, and count the bits and steps of other processes' clients."""
        fabric, sizes = self.flat_module.fabric, self.data.client_sizes
        booked, steps_before = deepcopy(self.ledger.round_bits), self.num_steps
        clients = [int(client) for client in sizes.nonzero()[0]]
        mine = share_of(clients, sizes, fabric.global_rank, fabric.world_size)
        total = torch.zeros((), dtype=torch.int64)
        for position, client in enumerate(mine, start=1):
            total = total + work(client)
            self.on_client(client, position, len(mine))
        parts = gather_objects(fabric, (self.ledger.since(booked), self.num_steps - steps_before))
        for rank, (bits, num_steps) in enumerate(parts):
            if rank != fabric.global_rank:
                self.ledger.add(bits)
                self.num_steps += num_steps
        return sum(gather_tensors(fabric, total), torch.zeros((), dtype=torch.int64))

    @cached_property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.flat_module.module.parameters() if parameter.requires_grad]

    @cached_property
    def _gradient(self) -> FlatGradient:
        """Flat gradient that gathers all gradients for the one vector that Adam steps."""
        layout, vector = self.flat_module.layout, self._adam.param_groups[0]["params"][0].grad
        return FlatGradient(layout, self._parameters, vector, used_names=layout.names)

    @cached_property
    def _adam(self) -> torch.optim.Adam:
        params = nn.Parameter(self.flat_module.params)
        params.grad = torch.zeros_like(params)
        return torch.optim.Adam([params])

    def _labelled(
        self, samples: Selection, labels: Tensor, batch_size: int, generator: torch.Generator
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield inputs and classes of each minibatch of one pass, without a last one too small for batch normalisation."""
        state = generator.get_state()
        order = torch.randperm(len(samples), generator=generator)
        generator.set_state(state)
        parts = labels[order.to(labels.device)].split(batch_size)
        for classes, batch in zip(parts, samples.batches(batch_size, generator), strict=True):
            if not self._skips(len(classes)):
                yield self.flat_module.inputs(batch, self.data.train.resident), classes

    def _num_batches(self, num_samples: int, batch_size: int) -> int:
        """Return the number of minibatches of one pass."""
        sizes = (min(batch_size, num_samples - start) for start in range(0, num_samples, batch_size))
        return sum(not self._skips(size) for size in sizes)

    def _skips(self, num_samples: int) -> bool:
        """True if a minibatch is too small for batch normalisation."""
        return num_samples == 1 and self.flat_module.skips_single_samples
