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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor

from lightning_fl.errors import UserError, require
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.module_logs import LogCollector, LoggedNames, Sums, on_host
from lightning_fl.slots import Aggregator, Merging, Message, Result, RoundContext, State, Upload

Forms = dict[int, list[tuple[str, tuple[int, ...], torch.dtype]]]
"""For each client, name, shape and dtype of the tensors of its state."""
GRACE_S = 5.0
"""Seconds in which the processes of a failed run end by themselves, longer than `cli.failures.PATIENCE_S`."""


def launch(fabric: Fabric) -> None:
    """Start the run's other processes, or join them.

    Raises:
        UserError: torchrun or a cluster has started another number of processes than the flags say, or the processes' port is
            in use.
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
    except ValueError as error:  # the cluster has started another number of processes
        raise UserError(" ".join(str(error).split())) from error


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


def share_states(
    fabric: Fabric, mine: Mapping[int, State], forms: Sequence[Forms] | None = None
) -> Iterator[tuple[int, State]]:
    """Yield the client states of all ranks, in the same order on each, so that any rank may train any client next.

    Each state is broadcast by itself, so that the exchange needs memory for only one client's state.

    Args:
        fabric: Fabric of the processes.
        mine: states of this rank's clients.
        forms: `forms_of` the states of each rank, in order of ranks; None to gather them.
    """
    if fabric.world_size == 1:
        yield from mine.items()
        return
    for source, theirs in enumerate(gather_objects(fabric, forms_of(mine)) if forms is None else forms):
        for client, form in theirs.items():
            sizes = [prod(shape) * dtype.itemsize for _, shape, dtype in form]
            payload = torch.empty(sum(sizes), dtype=torch.uint8, device=fabric.device)
            if source == fabric.global_rank and form:
                payload = torch.cat([_bytes(tensor) for tensor in mine[client].values()]).to(fabric.device)
            if len(payload):
                torch.distributed.broadcast(payload, source)
            parts = payload.cpu().split(sizes)
            yield (
                client,
                {
                    # A copy begins at an address that suits any dtype.
                    name: part.clone().view(dtype).view(shape)
                    for (name, shape, dtype), part in zip(form, parts, strict=True)
                },
            )


def forms_of(states: Mapping[int, State]) -> Forms:
    """Return name, shape and dtype of the tensors of each client's state."""
    return {
        client: [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()]
        for client, state in states.items()
    }


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor (n,), a view if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def of_rank_zero(fabric: Fabric, tensor: Tensor) -> Tensor:
    """Return the tensor of rank 0, of the same shape and dtype on every rank, on this rank's accelerator."""
    if fabric.world_size == 1 or not tensor.numel():
        return tensor
    received = tensor.detach().to(fabric.device, memory_format=torch.contiguous_format, copy=True)
    torch.distributed.broadcast(_bytes(received), 0)
    return received.to(tensor.device)


def agree_on_model(flat_module: FlatModule) -> None:
    """Copy the model of rank 0 to every rank, because an unseeded script initialises it differently in each process."""
    fabric = flat_module.fabric
    if fabric.world_size > 1:
        for tensor in (*flat_module.module.state_dict().values(), flat_module.personal.vector):
            if isinstance(tensor, Tensor):  # a module may save other things besides
                tensor.copy_(of_rank_zero(fabric, tensor))


def gather_tensors(fabric: Fabric, mine: Tensor) -> list[Tensor]:
    """Return the tensor of each rank, which may differ in shape and dtype, in order of ranks, on the host."""
    return [state["tensor"] for _, state in share_states(fabric, {fabric.global_rank: {"tensor": mine}})]


def gather_objects(fabric: Fabric, mine: Any) -> list[Any]:
    """Return the object of each rank, in order of ranks; only for small objects without tensors, which are pickled.

    A tensor would take along the whole storage that it is a view of, and, on a GPU, open that of its sender.
    """
    if fabric.world_size == 1:
        return [mine]
    parts: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(parts, mine)
    return parts


def checksum(vector: Tensor) -> int:
    """Return a sum of the bits of a vector, which does not depend on the order of the sum, the device or the thread."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(vector.detach().contiguous().view(kinds[vector.element_size()]).sum(dtype=torch.int64))


def check_agreement(prunings: Sequence[int]) -> None:
    """Check that all processes have pruned and unfrozen their modules equally.

    Args:
        prunings: checksum of the prunings and unfreezings of each process.

    Raises:
        UserError: they have not.
    """
    require(
        len(set(prunings)) == 1,
        "the processes have pruned or unfrozen their models differently: a callback must do the same in each, so its choice must "
        "not depend on a random number or on samples that only one of them has.",
    )


def gather_logs(
    fabric: Fabric, logs: LogCollector, more: Any = None
) -> tuple[list[Sums], list[LoggedNames], list[Any]]:
    """Return what all processes have logged since the last `take`, how they log, and one more object of each."""
    mine = on_host([logs.take()])[0], logs.knowledge(), more
    sums, knowledge, others = zip(*gather_objects(fabric, mine), strict=True)
    return list(sums), list(knowledge), list(others)


def gather_by_client(fabric: Fabric, clients: Sequence[int], mine: dict[int, Any]) -> dict[int, Any]:
    """Return the values of all ranks for their clients, in the order of `clients`; only for small objects."""
    values = {client: value for part in gather_objects(fabric, mine) for client, value in part.items()}
    return {client: values[client] for client in clients if client in values}


def share_uploads(fabric: Fabric, mine: Sequence[Upload], clients: Sequence[int]) -> list[Upload]:
    """Return all ranks' accepted uploads, for an aggregator that keeps them; their results have only client, weight and attacker.

    Args:
        fabric: Fabric of the processes.
        mine: uploads of this rank's clients.
        clients: clients of the round, which give the order of the uploads.
    """
    facts = {upload.result.client: (upload.result.weight, upload.result.attacking) for upload in mine}
    messages = dict(share_states(fabric, {upload.result.client: upload.message for upload in mine}))
    sent = dict(share_states(fabric, {upload.result.client: upload.sent for upload in mine}))

    def on_device(part: State) -> State:
        return {name: tensor.to(fabric.device) for name, tensor in part.items()}

    return [
        Upload(
            Result(client, {}, weight, {}, {}, {}, num_steps=0, attacking=attacking),
            on_device(messages[client]),
            on_device(sent[client]),
        )
        for client, (weight, attacking) in gather_by_client(fabric, clients, facts).items()
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

    @property
    def sizes(self) -> dict[str, int]:
        """Length of each entry of this process's accumulator."""
        return {} if self.shares_uploads else {name: len(total) for name, total in self._accumulator.items()}

    def accumulate(self, clients: Sequence[int], sizes: Sequence[Mapping[str, int]]) -> dict[str, Any]:
        """Return the accumulator of all processes, which must all call this.

        Args:
            clients: clients of the round, in whose order kept uploads are added.
            sizes: `sizes` of each process.
        """
        if not self.shares_uploads:
            return _sum(self._fabric, self._accumulator, sizes)
        for upload in share_uploads(self._fabric, self._kept, clients):
            self._aggregator.add(self._accumulator, upload)
        return self._accumulator


def mean(
    fabric: Fabric, aggregator: Aggregator, context: RoundContext, clients: Sequence[int], uploads: Iterable[Upload]
) -> tuple[Message, int]:
    """Merge uploads of all processes by an aggregator, {} if there is none or it skips the round, and count them.

    Args:
        fabric: Lightning Fabric, which knows the processes.
        aggregator: aggregator that merges the uploads.
        context: facts about the run.
        clients: the round's clients, in whose order kept uploads are merged.
        uploads: uploads of this process's clients.
    """
    merge, count = UploadMerge(fabric, aggregator), 0
    for upload in uploads:
        merge.add(upload)
        count += 1
    sizes, counts = zip(*gather_objects(fabric, (merge.sizes if fabric.world_size > 1 else {}, count)), strict=True)
    accumulator = merge.accumulate(clients, sizes)
    return aggregator.combine(accumulator, Merging(context)) if any(counts) else {}, sum(counts)


def summed(fabric: Fabric, mine: dict[str, Any]) -> dict[str, Any]:
    """Return the sums over all processes of vectors in float64 by name; every process must call it."""
    if fabric.world_size == 1:
        return mine
    return _sum(fabric, mine, gather_objects(fabric, {name: len(total) for name, total in mine.items()}))


def _sum(fabric: Fabric, accumulator: dict[str, Any], sizes: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Sum an accumulator over all processes in one reduction: each number crosses once."""
    if fabric.world_size == 1:
        return accumulator
    lengths = {name: length for part in sizes for name, length in part.items()}
    if not lengths:
        return {}
    # A rank whose clients all dropped out adds zeros, because every rank must take part.
    parts = [
        accumulator[name] if name in accumulator else torch.zeros(length, dtype=torch.float64, device=fabric.device)
        for name, length in lengths.items()
    ]
    total = torch.cat(parts)
    torch.distributed.all_reduce(total)  # Fabric's own would wait at a barrier first
    return dict(zip(lengths, total.split(list(lengths.values())), strict=True))
