"""Clients with quadratic losses of other minima, curvatures and numbers of samples, whose common minimum is known."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from toys import Perceptron, samples

from lightning_fl.data import Arrays
from lightning_fl.data.partitions.given_indices import GivenIndices

UNEQUAL = (4, 8, 20)


class Linear(Perceptron):
    """Module x (B, 3) → w·x, whose loss is the batch's mean of ½(w·x − y)²."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr=lr)
        self.hidden = self.output = None  # type: ignore[assignment]
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight)[:, None]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return 0.5 * (self(x) - y[:, :1]).square().sum(1).mean()


def unequal_samples() -> tuple[Tensor, Tensor]:
    """Return inputs (32, 3) and targets (32, 2), of which the first is nearly linear, by a vector of each client's own."""
    generator = torch.Generator().manual_seed(5)
    parts = []
    for client, count in enumerate(UNEQUAL):
        x = torch.randn(count, 3, generator=generator) * torch.tensor([0.6 + 0.4 * client, 1.0, 1.4 - 0.4 * client])
        own = torch.randn(3, generator=generator)
        parts.append((x, (x @ own)[:, None].expand(-1, 2)))
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return x, y


def rows_of_clients() -> list[list[int]]:
    """Return the positions of each client's samples."""
    ends = np.cumsum(UNEQUAL)
    return [list(range(end - count, end)) for end, count in zip(ends, UNEQUAL, strict=True)]


def unequal() -> Arrays:
    """Return the clients' data; every minibatch has all samples of a client."""
    return Arrays(
        train=unequal_samples(),
        test=samples(10, seed=1),
        num_clients=len(UNEQUAL),
        batch_size=max(UNEQUAL),
        partition=GivenIndices(rows_of_clients()),
        eval_batch_size=4,
    )


def quadratics() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return H_k (3, 3) and b_k (3,) of each client's loss ½wᵀH_k w − b_k·w + constant."""
    x, y = (tensor.double().numpy() for tensor in unequal_samples())
    parts = [(x[rows], y[rows, 0]) for rows in rows_of_clients()]
    return [(x_k.T @ x_k / len(x_k), x_k.T @ y_k / len(x_k)) for x_k, y_k in parts]


def optimum() -> np.ndarray:
    """Return the minimum (3,) of the mean of the clients' losses, in which each client counts alike."""
    curvatures, slopes = zip(*quadratics(), strict=True)
    return np.linalg.solve(sum(curvatures), sum(slopes))
