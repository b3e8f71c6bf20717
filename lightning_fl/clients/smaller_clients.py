"""Clients that train smaller networks: one network after the other, each by the run's own runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lightning_fl.clients.client_job import ClientJob
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.slots import Result


def train_by_network(
    train: Callable[[ClientJob, Sequence[int]], Iterator[Result]],
    flat_module: FlatModule,
    job: ClientJob,
    clients: Sequence[int],
) -> Iterator[Result]:
    """Train clients on the networks that the job gives them; their uploads have the vectors of the whole model.

    Clients of one network train next to each other, so that a stack holds one width, and the module is cut once for them.

    Args:
        train: trains clients on the network that the module is.
        flat_module: holds the module.
        job: job of the clients.
        clients: indices of the clients.
    """
    if not job.smaller:
        yield from train(job, clients)
        return
    groups: dict[int, list[int]] = {}
    for client in clients:
        groups.setdefault(id(job.smaller[client][0]) if client in job.smaller else 0, []).append(client)
    for members in groups.values():
        if members[0] not in job.smaller:
            yield from train(job, members)
            continue
        network, received = job.smaller[members[0]]
        with flat_module.cut_to(network):
            yield from map(network.whole, train(job.on_smaller(network, received), members))
