"""Clients divided among the processes of Fabric: GPUs, CPU cores or machines.

Every rank draws the same cohort, trains its share of it on its own copy of the model, and holds the same model again after the
uploads are summed. The rank that simulates a client counts the bits that it sends. Modules are never wrapped in DDP, which
would average the gradients of different clients.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from lightning_fl.errors import UserError, require
from lightning_fl.slots import Aggregator, Message, Result, State, Upload

GRACE_S = 5.0
"""Seconds in which the processes of a failed run end by themselves, longer than `cli.failures.PATIENCE_S`."""


def launch(fabric: Fabric) -> None:
    """Start the run's other processes, or join them.

    Raises:
        UserError: torchrun has started another number of processes than the flags say, or the processes' port is in use.
    """
    strategy = fabric.strategy
    num_devices, num_nodes = getattr(strategy, "num_processes", 1), getattr(strategy, "num_nodes", 1)
    if TorchElasticEnvironment.detect():
        started = TorchElasticEnvironment().world_size()
        require(
            started == num_devices * num_nodes,
            f"torchrun has started {started} processes (WORLD_SIZE is {started}), but trainer.devices × trainer.num_nodes is "
            f"{num_devices} × {num_nodes} = {num_devices * num_nodes}: set trainer.devices to the processes of each machine.",
        )
    try:
        fabric.launch()
    except torch.distributed.DistNetworkError as error:
        children = getattr(strategy.launcher, "procs", ())
        for process in children:  # they would wait for this process's port for half an hour
            process.kill()
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"port {os.environ.get('MASTER_PORT')}, by which the processes of the run find each other, is in use by another "
            "program: set the environment variable MASTER_PORT to a free one, or leave it unset."
        ) from error


def end_children(fabric: Fabric, grace_s: float = GRACE_S) -> None:
    """Let this process, which has failed, take along those that it has started, when it exits.

    They would wait for it, in a collective with NCCL for half an hour. Those with the same error end by themselves first.

    Args:
        fabric: Fabric of the processes; without a launcher that starts processes nothing happens.
        grace_s: seconds to wait for them before they are killed.
    """
    children = getattr(fabric.strategy.launcher, "procs", None)
    if children:
        atexit.register(_end, list(children), grace_s)


def _end(children: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    """Kill the processes that have not ended after some seconds."""
    end = time.monotonic() + grace_s
    while time.monotonic() < end and any(child.poll() is None for child in children):
        time.sleep(0.05)
    for child in children:
        if child.poll() is None:
            child.kill()
            child.wait()


def share_of(clients: Sequence[int], sizes: np.ndarray, rank: int, num_ranks: int) -> list[int]:
    """Return the clients that `rank` trains: the largest first, each assigned to the rank with the fewest samples so far.

    Args:
        clients: indices of the clients of the round.
        sizes: number of samples of every client of the federation (N,).
        rank: rank of this process.
        num_ranks: number of processes.

    Returns:
        Subset of `clients` in their order; the subsets of all ranks are a partition of `clients`.
    """
    if num_ranks == 1:
        return list(clients)
    samples = [0] * num_ranks
    mine = []
    for position in sorted(range(len(clients)), key=lambda position: -int(sizes[clients[position]])):
        lightest = samples.index(min(samples))
        samples[lightest] += int(sizes[clients[position]])
        if lightest == rank:
            mine.append(position)
    return [clients[position] for position in sorted(mine)]


def share_states(fabric: Fabric, mine: dict[int, State]) -> Iterator[tuple[int, State]]:
    """Yield the client states of all ranks, in the same order on each, so that any rank may train any client next.

    Tensors are broadcast one by one, so that the exchange needs memory for only one client's state.

    Args:
        fabric: Fabric of the processes.
        mine: states of this rank's clients.
    """
    forms = {
        client: [(name, tensor.shape, tensor.dtype) for name, tensor in state.items()] for client, state in mine.items()
    }
    for source, theirs in enumerate(gather_objects(fabric, forms)):
        for client, form in theirs.items():
            if fabric.world_size == 1:
                yield client, mine[client]
                continue
            state = {}
            for name, shape, dtype in form:
                tensor = mine[client][name] if source == fabric.global_rank else torch.empty(shape, dtype=dtype)
                payload = tensor.contiguous().view(-1).view(torch.uint8).to(fabric.device)
                torch.distributed.broadcast(payload, source)
                state[name] = payload.cpu().view(dtype).view(shape)
            yield client, state


def gather_objects(fabric: Fabric, mine: Any) -> list[Any]:
    """Return the object of each rank, in order of ranks; only for small objects, which are pickled."""
    if fabric.world_size == 1:
        return [mine]
    parts: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(parts, mine)
    return parts


def gather_by_client(fabric: Fabric, clients: Sequence[int], mine: dict[int, Any]) -> dict[int, Any]:
    """Return the values of all ranks for their clients, in the order of `clients`; only for small objects."""
    known = {client: value for part in gather_objects(fabric, mine) for client, value in part.items()}
    return {client: known[client] for client in clients if client in known}


def share_uploads(fabric: Fabric, mine: Sequence[Upload], clients: Sequence[int]) -> list[Upload]:
    """Return all ranks' accepted uploads, for an aggregator that keeps them; their results have only client and weight.

    Args:
        fabric: Fabric of the processes.
        mine: uploads of this rank's clients.
        clients: clients of the round, which give the order of the uploads.
    """
    weights = gather_by_client(fabric, clients, {upload.result.client: upload.result.weight for upload in mine})
    messages = dict(share_states(fabric, {upload.result.client: upload.message for upload in mine}))
    sent = dict(share_states(fabric, {upload.result.client: upload.sent for upload in mine}))
    return [
        Upload(
            Result(client, {}, weight, {}, {}, {}, num_steps=0),
            *({name: tensor.to(fabric.device) for name, tensor in part[client].items()} for part in (messages, sent)),
        )
        for client, weight in weights.items()
    ]


class UploadMerge:
    """Merges the uploads of all processes by an aggregator.

    Sums cross the processes as one accumulator, whatever the number of clients. An aggregator that keeps the uploads needs all
    of them in every process.

    Attributes:
        shares_uploads: True if the uploads themselves cross the processes.
    """

    def __init__(self, fabric: Fabric, aggregator: Aggregator) -> None:
        self.shares_uploads = fabric.world_size > 1 and aggregator.keeps_uploads
        self._fabric, self._aggregator = fabric, aggregator
        self._accumulator: dict[str, Any] = {}
        self._kept: list[Upload] = []

    def add(self, upload: Upload) -> None:
        """Take an accepted upload of this process."""
        if self.shares_uploads:
            self._kept.append(upload)
        else:
            self._aggregator.add(self._accumulator, upload)

    def accumulate(self, clients: Sequence[int]) -> dict[str, Any]:
        """Return the accumulator of all processes, which must all call this; kept uploads are added in the order of `clients`."""
        if not self.shares_uploads:
            return _sum(self._fabric, self._accumulator)
        for upload in share_uploads(self._fabric, self._kept, clients):
            self._aggregator.add(self._accumulator, upload)
        return self._accumulator


def mean(fabric: Fabric, aggregator: Aggregator, clients: Sequence[int], uploads: Iterable[Upload]) -> Message:
    """Merge uploads of all processes by an aggregator; returns {} if there is none.

    Args:
        fabric: Lightning Fabric, which knows the processes.
        aggregator: aggregator that merges the uploads.
        clients: the round's clients, in whose order kept uploads are merged.
        uploads: uploads of this process's clients.
    """
    merge, count = UploadMerge(fabric, aggregator), 0
    for upload in uploads:
        merge.add(upload)
        count += 1
    accumulator = merge.accumulate(clients)
    return aggregator.finish(accumulator) if any(gather_objects(fabric, count)) else {}


def _sum(fabric: Fabric, accumulator: dict[str, Any]) -> dict[str, Any]:
    """Sum an accumulator over all processes: each number crosses once."""
    if fabric.world_size == 1:
        return accumulator
    sizes = gather_objects(fabric, {name: len(total) for name, total in accumulator.items()})
    merged = {}
    # A rank whose clients all dropped out adds zeros, because every rank must take part.
    for name, size in {name: size for part in sizes for name, size in part.items()}.items():
        total = accumulator.get(name)
        if total is None:
            total = torch.zeros(size, dtype=torch.float64, device=fabric.device)
        merged[name] = fabric.all_reduce(total, reduce_op="sum")
    return merged
