"""Evaluate the server's model with what each client owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lightning_fl.clients.companion import client_model, read_companion
from lightning_fl.clients.flat_module import FlatModule
from lightning_fl.data import FederatedDataModule
from lightning_fl.rules.personal.mixed import SHARE
from lightning_fl.server.evaluation import are_resident, limited, measure, num_batches
from lightning_fl.server.macs import count_flops
from lightning_fl.slots import Setting, State


@dataclass
class ModelValidation:
    """Implementation of `lightning_fl.slots.Validation`; the flat module holds the server's model.

    Attributes:
        flat_module: the module.
        data: the federated data, with the clients' own validation parts.
        stage: `validation` or `test`.
        loaders: loaders of the validation data.
        limit: Lightning's `limit_val_batches` or `limit_test_batches`.
        states: states of the clients that have taken part.
        setting: setting of the run; None outside a run.
        cohort_size: clients of a round, K; 0 outside a run.
        random: draws the clients to validate with.
    """

    flat_module: FlatModule
    data: FederatedDataModule
    stage: str
    loaders: CombinedLoader
    limit: int | float | None
    states: Mapping[int, State]
    setting: Setting | None = None
    cohort_size: int = 0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        self._common = self.flat_module.read_personal()

    @property
    def module(self) -> Any:
        """The module."""
        return self.flat_module.module

    @property
    def owns(self) -> bool:
        """True if clients own parts of the model."""
        return bool(self._common) or self.flat_module.has_companions

    def clients(self, most: int | None = None) -> list[int]:
        """Return all clients, or `most` of them drawn at random, in ascending order."""
        everyone = self.data.num_clients
        if most is None or most >= everyone:
            return list(range(everyone))
        return sorted(int(client) for client in self.random.choice(everyone, most, replace=False))

    def has_taken_part(self, client: int) -> bool:
        """True if a client has personal values."""
        return client in self.states

    def averages(self, client: int | None = None) -> dict[str, float]:
        """Return what the module logs with a client's personal parameters, or with the initial ones if `client` is None."""
        return self._measure(client, self._batches(), are_resident(self.loaders))

    def local_averages(self, client: int) -> dict[str, float]:
        """Return the same averages on the client's own validation part; {} if it has none."""
        rows = self.data.client_val_indices[client]
        if not len(rows):
            return {}
        size, train = self.data.eval_batch_size, self.data.train
        length = -(-len(rows) // size)
        limit = min(length, self.limit) if isinstance(self.limit, int) else length
        return self._measure(client, islice(train.batches(size, rows), limit), train.resident)

    def macs(self, inside: Callable[[Any], AbstractContextManager[Any]]) -> int | None:
        """Count the multiply-accumulates of `forward` for one sample in a context; None if `forward` needs other arguments."""
        batch = self.flat_module.transfer(next(self._batches()), are_resident(self.loaders))
        inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
        if not isinstance(inputs, Tensor):
            return None
        counter = count_flops(self.flat_module, inputs[:1], inside(self.module))
        return None if counter is None else int(counter.get_total_flops()) // 2

    def _measure(self, client: int | None, batches: Iterable[Any], resident: bool) -> dict[str, float]:
        state = {} if client is None else self.states.get(client, {})
        with client_model(self.flat_module, state):
            return measure(self.flat_module, self.stage, batches, resident)

    def _batches(self) -> Iterator[Any]:
        return (batch for batch, _, _ in limited(self.loaders, num_batches(self.loaders, self.limit)))


def owned_by_clients(flat_module: FlatModule, states: Mapping[int, State]) -> dict[int, State]:
    """Return what each client owns, of the clients whose values match this module."""
    shapes = {name: x.shape for name, x in flat_module.read_personal().items()}
    if flat_module.has_companions:
        shapes |= {name: x.shape for name, x in read_companion(flat_module).items()}
    names = shapes.keys() | ({SHARE} if flat_module.has_companions else set())
    owned = {k: {name: x for name, x in state.items() if name in names} for k, state in states.items()}
    return {k: own for k, own in owned.items() if own and {n: x.shape for n, x in own.items() if n != SHARE} == shapes}
