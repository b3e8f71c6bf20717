"""Flower's simulation engine: https://github.com/flwrlabs/flower.

The engine starts Ray, whose actors are processes. So it runs in its own process with one actor, and waits there for each round.
A round is the time between two evaluations on the server, Flower's hook at the end of every round. Ray and the actor start in
the first round, which only warms up.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

from . import Work

if importlib.util.find_spec("ray") is None:
    raise ImportError("No module named 'ray'")

client_app = ClientApp()


class Federation:
    """FedAvg of Flower, with one Ray actor for all clients."""

    def __init__(self, work: Work) -> None:
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "work.pt"
        torch.save((work, torch.get_num_threads()), path)
        spawn = multiprocessing.get_context("spawn")
        self.connection, theirs = spawn.Pipe()
        self.process = spawn.Process(target=simulate, args=(path, len(work.clients), theirs))
        self.process.start()
        theirs.close()
        self.connection.recv()

    def round(self) -> None:
        """Run one round over all clients."""
        self.connection.send("round")
        self.connection.recv()

    def global_weights(self) -> list[Tensor]:
        """Return the global model, in the order of the network's parameters."""
        self.connection.send("weights")
        return self.connection.recv()

    def close(self) -> None:
        """End the simulation and Ray."""
        self.connection.close()
        self.process.join()
        self.folder.cleanup()


def simulate(path: Path, num_clients: int, connection: Connection) -> None:
    """Run rounds on demand in Flower's process, until the connection is closed."""
    os.environ.update(
        FLWR_TELEMETRY_ENABLED="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",  # avoids Ray's warning
        RAY_USAGE_STATS_ENABLED="0",
        RAY_worker_niceness="0",  # by default Ray's workers have a low priority, which costs time on a busy machine
    )
    logging.getLogger("flwr").setLevel(logging.ERROR)
    server_app = ServerApp()

    def turn(server_round: int, arrays: ArrayRecord) -> None:
        """Report the end of the round, and send the weights on request."""
        connection.send("over")
        while connection.recv() == "weights":
            connection.send(list(arrays.to_torch_state_dict().values()))

    @server_app.main()
    def run(grid: Grid, context: Context) -> None:
        """Run all rounds."""
        FedAvg(fraction_evaluate=0.0, min_available_nodes=num_clients).start(
            grid=grid,
            initial_arrays=ArrayRecord(read(path).net.state_dict()),
            num_rounds=1_000_000,
            train_config=ConfigRecord({"work": str(path)}),
            evaluate_fn=turn,
        )

    ray = {"num_cpus": 1, "log_to_driver": False}
    backend = {"init_args": ray, "client_resources": {"num_cpus": 1, "num_gpus": 0}}
    with contextlib.suppress(EOFError, BrokenPipeError):  # the connection is closed
        run_simulation(server_app, client_app, num_clients, backend_config=backend)


@functools.cache
def read(path: str | Path) -> Work:
    """Read the work, once in each process."""
    work, threads = torch.load(path, weights_only=False)
    torch.set_num_threads(threads)
    return work


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train a client for one round, as in Flower's quick start for PyTorch."""
    work = read(message.content["config"]["work"])
    x, y = work.clients[context.node_config["partition-id"]]
    work.net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.net.train()
    optimizer = torch.optim.SGD(work.net.parameters(), lr=work.learning_rate)
    for _ in range(work.epochs):
        for inputs, labels in work.batches(x, y):
            optimizer.zero_grad()
            nn.functional.cross_entropy(work.net(inputs), labels).backward()
            optimizer.step()
    arrays, metrics = ArrayRecord(work.net.state_dict()), MetricRecord({"num-examples": len(y)})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
