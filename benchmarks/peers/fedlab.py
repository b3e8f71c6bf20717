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
    """FedAvg of FedLab, which weighs all clients alike by default: here they send the number of their samples too."""

    def __init__(self, work: Work) -> None:
        trainer = Trainer(work.net, len(work.clients))
        trainer.setup_dataset(Clients(work))
        trainer.setup_optim(work.epochs, work.batch_size, work.learning_rate)
        self.handler = Handler(work.net, global_round=0, sample_ratio=1.0)
        self.pipeline = Pipeline(self.handler, trainer)

    def round(self) -> None:
        """One round over all clients."""
        self.handler.global_round += 1
        self.pipeline.main()

    def global_weights(self) -> list[Tensor]:
        """The global model, in the order of the network's parameters."""
        return [parameter.detach() for parameter in self.handler.model.parameters()]

    def close(self) -> None:
        """Nothing runs in the background."""


class Loader:
    """The batches of a client, as often as they are asked for."""

    def __init__(self, work: Work, client: int) -> None:
        self.work, self.data = work, work.clients[client]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.work.batches(*self.data)


class Clients:
    """FedLab's data set, of which its trainer asks nothing else."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def get_dataloader(self, client: int, batch_size: int) -> Loader:
        """The batches of a client."""
        return Loader(self.work, client)


class Trainer(FedAvgSerialClientTrainer):
    """Sends the number of samples along."""

    def train(self, model_parameters: Tensor, train_loader: Loader) -> list[Tensor]:
        """The parameters after training, and the number of samples."""
        return [*super().train(model_parameters, train_loader), torch.tensor(len(train_loader.data[1]))]


class Handler(FedAvgServerHandler):
    """Weighs by the number of samples."""

    def global_update(self, buffer: list[list[Tensor]]) -> None:
        """Average what the clients sent."""
        parameters, samples = zip(*buffer, strict=True)
        average = Aggregators.fedavg_aggregate(list(parameters), torch.stack(samples))
        SerializationTool.deserialize_model(self._model, average)


class Pipeline(StandalonePipeline):
    """Evaluates nothing."""

    def evaluate(self) -> None:
        """Nothing."""
