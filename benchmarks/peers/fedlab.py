"""FedLab's standalone pipeline: https://github.com/SMILELab-FL/FedLab."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils import Aggregators, SerializationTool
from torch import Tensor

from . import Work


class Federation:
    """FedAvg of FedLab. By default it weights all clients equally; here they also send their number of samples."""

    def __init__(self, work: Work) -> None:
        trainer = Trainer(work.net, len(work.clients))
        trainer.setup_dataset(Clients(work))
        trainer.setup_optim(work.epochs, work.batch_size, work.learning_rate)
        self.handler = Handler(work.net, global_round=0, sample_ratio=1.0)
        self.pipeline = Pipeline(self.handler, trainer)

    def round(self) -> None:
        """Run one round over all clients."""
        self.handler.global_round += 1
        self.pipeline.main()

    def global_weights(self) -> list[Tensor]:
        """Return the global model, in the order of the network's parameters."""
        return [parameter.detach() for parameter in self.handler.model.parameters()]

    def close(self) -> None:
        """Do nothing: no process runs in the background."""


class Loader:
    """Loader of a client's batches."""

    def __init__(self, work: Work, client: int) -> None:
        self.work, self.data = work, work.clients[client]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.work.batches(*self.data)


class Clients:
    """Data set with the one method that FedLab's trainer calls."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def get_dataloader(self, client: int, batch_size: int) -> Loader:
        """Return the loader of a client."""
        return Loader(self.work, client)


class Trainer(FedAvgSerialClientTrainer):
    """Client trainer that also sends the number of samples."""

    def train(self, model_parameters: Tensor, train_loader: Loader) -> list[Tensor]:
        """Return the parameters after training, and the number of samples."""
        return [*super().train(model_parameters, train_loader), torch.tensor(len(train_loader.data[1]))]


class Handler(FedAvgServerHandler):
    """Server that weights clients by their number of samples."""

    def global_update(self, buffer: list[list[Tensor]]) -> None:
        """Average the clients' parameters."""
        parameters, samples = zip(*buffer, strict=True)
        average = Aggregators.fedavg_aggregate(list(parameters), torch.stack(samples))
        SerializationTool.deserialize_model(self._model, average)


class Pipeline(StandalonePipeline):
    """Pipeline without evaluation."""

    def evaluate(self) -> None:
        """Do nothing."""
