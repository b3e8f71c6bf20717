"""fluke: https://github.com/makgyver/fluke."""

from __future__ import annotations

import copy

from fluke import FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from torch import Tensor, nn

from . import Work


class Federation:
    """FedAvg of fluke, with its clients, channel and loader."""

    def __init__(self, work: Work) -> None:
        FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
        loaders = [
            FastDataLoader(
                *client, num_labels=10, batch_size=work.batch_size, shuffle=work.shuffle, skip_singleton=False
            )
            for client in work.clients
        ]
        sgd = OptimizerConfigurator({"name": "SGD", "lr": work.learning_rate})
        clients = [
            Client(i, loader, None, sgd, nn.CrossEntropyLoss(), local_epochs=work.epochs)
            for i, loader in enumerate(loaders)
        ]
        self.server = Server(copy.deepcopy(work.net), None, clients, weighted=True)
        self.federation = FedAVG(len(clients), None, {}, clients=clients, server=self.server)
        self.federation.finalize = lambda: None  # it would end the run after every round

    def round(self) -> None:
        """Run one round over all clients."""
        self.federation.run(1, 1.0)

    def global_weights(self) -> list[Tensor]:
        """Return the global model, in the order of the network's parameters."""
        return [parameter.detach() for parameter in self.server.model.parameters()]

    def close(self) -> None:
        """Free fluke's cache of this federation."""
        FlukeENV().close_cache()
