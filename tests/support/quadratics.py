"""Federations whose losses are quadratics, so that optimum, curvature and gradients have closed forms."""

from dataclasses import dataclass
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import torch
from torch import Tensor, nn

from lightning_fl.data import Arrays, Partition


class Regression(L.LightningModule):
    """Module x (B, d) → ⟨x, w⟩ with the mean of ½(⟨x, w⟩ − y)² as its loss."""

    def __init__(self, d: int, lr: float = 1.0, start: float = 0.0) -> None:
        super().__init__()
        self.lr = lr
        self.w = nn.Parameter(torch.full((d,), start, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return 0.5 * (x @ self.w - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@dataclass(frozen=True)
class InOrder(Partition):
    """Partition that gives every client as many consecutive samples."""

    needs_labels = False

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return np.split(np.arange(len(labels)), num_clients)


@dataclass(frozen=True)
class Quadratics:
    """Losses ½(w − b_k)ᵀA_k(w − b_k) of clients with d samples each.

    Attributes:
        curvatures: A_k (N, d, d).
        optima: b_k (N, d).
    """

    curvatures: np.ndarray
    optima: np.ndarray

    @classmethod
    def drawn(cls, num_clients: int, least: float, seed: int = 0, d: int = 4) -> "Quadratics":
        """Draw different curvatures with eigenvalues from `least` to 1, and different optima."""
        rng = np.random.default_rng(seed)
        rotations = [np.linalg.qr(rng.standard_normal((d, d)))[0] for _ in range(num_clients)]
        curvatures = [q @ np.diag(np.geomspace(least, 1, d)) @ q.T for q in rotations]
        return cls(np.stack(curvatures), rng.standard_normal((num_clients, d)))

    @property
    def optimum(self) -> np.ndarray:
        """Minimum of the mean of all losses (d,)."""
        right = np.einsum("kij,kj->i", self.curvatures, self.optima)
        return np.linalg.solve(self.curvatures.sum(0), right)

    def gradient(self, w: np.ndarray) -> np.ndarray:
        """Return the gradient of the mean of all losses."""
        return np.einsum("kij,kj->i", self.curvatures, w - self.optima) / len(self.optima)

    def data(self) -> Arrays:
        """Return the data, of which every client has one full batch."""
        num_clients, d = self.optima.shape
        # Σ xxᵀ/d over a client's samples is A_k, and y = ⟨x, b_k⟩.
        roots = [np.linalg.cholesky(a).T * d**0.5 for a in self.curvatures]
        x = np.concatenate(roots)
        y = np.concatenate([root @ b for root, b in zip(roots, self.optima, strict=True)])
        train = torch.from_numpy(x), torch.from_numpy(y)
        return Arrays(train=train, test=train, num_clients=num_clients, batch_size=d, partition=InOrder())
