"""Evaluate the server's model with each client's personal values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lightning_fl.clients.adapted_models import ClientSamples
from lightning_fl.clients.own_models import client_model
from lightning_fl.data import FederatedDataModule
from lightning_fl.data.samples.loaders import SampleLoader
from lightning_fl.evaluation.evaluation import as_loaders, num_batches
from lightning_fl.evaluation.loops import measure
from lightning_fl.evaluation.macs import count_flops
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.static_statistics import settle_statistics, statistic_batches
from lightning_fl.processes import gather_by_client
from lightning_fl.slots import Message, Personal, RoundContext, State, Width, adapter, has_client_models

NEWCOMER = -1
"""Stands for all clients that have not taken part, which predict with the same model."""


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
        personal: parts that say what clients keep.
        most_clients: number of clients to measure, drawn at random; None for all.
        context: context of the run; None outside a run.
        cohort_size: clients of a round, K; 0 outside a run.
        random: draws the clients to measure.
        shared: entries that the server's steps send down with the model; {} outside a run.
    """

    flat_module: FlatModule
    data: FederatedDataModule
    stage: str
    loaders: CombinedLoader
    limit: int | float | None
    states: Mapping[int, State]
    personal: Sequence[Personal] = ()
    most_clients: int | None = None
    context: RoundContext | None = None
    cohort_size: int = 0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    shared: Message = field(default_factory=dict)

    @property
    def module(self) -> Any:
        """The module."""
        return self.flat_module.module

    @property
    def owns(self) -> bool:
        """True if clients own parts of the model, or models of their own."""
        return bool(self.flat_module.personal.read()) or has_client_models(self.personal)

    @property
    def limits(self) -> list[int | float]:
        """Batches to run of each loader."""
        return num_batches(self.loaders, self.limit)

    def averages(self) -> dict[str, float]:
        """Return the averages that the module logs with the server's model and the initial personal values."""
        return measure(self.flat_module, self.stage, self.loaders, self.limits, probes=self._probes)

    def averages_at(self, width: Width) -> dict[str, float]:
        """Return the averages that the module logs as a smaller network, cut from the server's model."""
        flat_module = self.flat_module
        network = flat_module.smaller_network(width, self._example)
        model = network.submodel.gather({"model": flat_module.params, "buffers": flat_module.read_buffers()})
        counters = flat_module.read_counters()
        with flat_module.cut_to(network, trains=False):
            flat_module.load(model["model"], model.get("buffers", flat_module.buffers), counters)
            if network.sent is not network.submodel:
                settle_statistics(flat_module, statistic_batches(self.data), self.data.train.resident)
            return measure(flat_module, self.stage, self.loaders, self.limits)

    def client_means(self) -> dict[str, float]:
        """Return means over clients of the values that the module logs, and under `…_local` those on their own samples.

        The processes share the clients; each measures its own on all batches.
        """
        clients = self._clients()
        alike = self._alike(clients)
        groups = list(dict.fromkeys(alike.values()))
        fabric = self.flat_module.fabric
        rank, num_ranks = fabric.global_rank, fabric.world_size
        mine = {client: self._measure(client, self.loaders, self.limits) for client in groups[rank::num_ranks]}
        my_values = {client: self._measure_own(client) for client in clients[rank::num_ranks]}
        measured, local = gather_by_client(fabric, groups, mine), gather_by_client(fabric, clients, my_values)
        return {
            **_means([measured[alike[client]] for client in clients]),
            **{f"{name}_local": value for name, value in _means(local.values()).items()},
        }

    def macs(self, inside: Callable[[Any], AbstractContextManager[Any]]) -> int | None:
        """Count the multiply-accumulates of `forward` for one sample in a context; None if `forward` needs other arguments."""
        inputs = self._example()
        if not isinstance(inputs, Tensor):
            return None
        counter = count_flops(self.flat_module, inputs[:1], inside(self.module))
        return None if counter is None else int(counter.get_total_flops()) // 2

    def _example(self) -> Any:
        return self.flat_module.inputs(next(iter(self.loaders.flattened[0])), resident=False)

    def _clients(self) -> list[int]:
        """Return the clients to measure, in ascending order; those without samples never train, and count in no mean."""
        everyone, most = self.data.client_sizes.nonzero()[0], self.most_clients
        if most is None or most >= len(everyone):
            return [int(client) for client in everyone]
        return sorted(int(client) for client in self.random.choice(everyone, most, replace=False))

    def _alike(self, clients: Sequence[int]) -> dict[int, int]:
        """Return for each client one that predicts with the same model, which is measured for both."""
        part, flat_module = adapter(self.personal), self.flat_module
        if part is None:
            return {client: client if client in self.states else NEWCOMER for client in clients}
        if flat_module.personal.read():
            return {client: client for client in clients}
        fabric, params = flat_module.fabric, flat_module.params.clone()
        chosen = {
            client: part.choice(params, ClientSamples(flat_module, self.data, client, self.shared))
            for client in clients[fabric.global_rank :: fabric.world_size]
        }
        first: dict[int, int] = {}
        return {
            client: client if number is None else first.setdefault(number, client)
            for client, number in gather_by_client(fabric, clients, chosen).items()
        }

    def _measure_own(self, client: int) -> dict[str, float]:
        """Return the averages that the module logs on the client's own validation part; {} if it has none."""
        rows = self.data.client_val_indices[client]
        if not len(rows):
            return {}
        loaders = as_loaders(SampleLoader(self.data.evaluated, rows, self.data.eval_batch_size))
        limit = self.limit if isinstance(self.limit, int) else None  # a fraction is ignored
        return self._measure(client, loaders, num_batches(loaders, limit))

    def _measure(self, client: int, loaders: CombinedLoader, limits: Sequence[int | float]) -> dict[str, float]:
        state = self.states.get(client, {})
        with client_model(self.flat_module, self.personal, state, self.data, client, self.shared):
            return measure(self.flat_module, self.stage, loaders, limits, alone=True, probes=self._probes)

    @property
    def _probes(self) -> Sequence[Callback]:
        return self.flat_module.hooks.probes if self.stage == "validation" else ()


def _means(measured: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the unweighted mean of each name over the clients that logged it."""
    by_name: dict[str, list[float]] = {}
    for client_values in measured:
        for name, value in client_values.items():
            by_name.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in by_name.items()}
