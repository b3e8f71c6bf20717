"""Apple's pfl-research: https://github.com/apple/pfl-research."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from . import Work


class Federation:
    """Federated averaging of pfl on its simulated backend."""

    def __init__(self, work: Work) -> None:
        users = [Client(work, *client) for client in work.clients]
        next_user = itertools.cycle(range(len(users))).__next__
        data = FederatedDataset(users.__getitem__, next_user)
        self.module = WithLoss(copy.deepcopy(work.net))
        central = torch.optim.SGD(self.module.parameters(), lr=1.0)
        self.model = PyTorchModel(self.module, torch.optim.SGD, central)
        self.backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
        self.algorithm = FederatedAveraging()
        self.cohort_size = len(users)
        self.training = NNTrainHyperParams(
            local_batch_size=work.batch_size,
            local_num_epochs=work.epochs,
            local_learning_rate=work.learning_rate,
        )
        self.rounds = 0

    def round(self) -> None:
        """Run one round over all clients. pfl evaluates only the first, which warms up."""
        self.rounds += 1
        parameters = NNAlgorithmParams(
            central_num_iterations=self.rounds,
            evaluation_frequency=1_000_000,
            train_cohort_size=self.cohort_size,
            val_cohort_size=None,
        )
        self.algorithm.run(parameters, self.backend, self.model, self.training, send_metrics_to_platform=False)

    def global_weights(self) -> list[Tensor]:
        """Return the global model, in the order of the network's parameters."""
        return [parameter.detach() for parameter in self.module.parameters()]

    def close(self) -> None:
        """Do nothing: no process runs in the background."""


class WithLoss(nn.Module):
    """Module with the methods that pfl requires."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Return the metrics of a batch."""
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class Client(PyTorchTensorDataset):
    """Client whose samples are shuffled in each epoch, which pfl's own data sets do not do."""

    def __init__(self, work: Work, x: Tensor, y: Tensor) -> None:
        super().__init__((x, y))
        self.work = work

    def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, ...]]:
        """Return the batches of one epoch; without a batch size all samples at once, for metrics."""
        return self.work.batches(*self.raw_data) if batch_size == self.work.batch_size else super().iter(batch_size)
