"""MOON: Li et al., Model-Contrastive Federated Learning, CVPR 2021 (arXiv:2103.16257).

client k:  y ← y − η ∇(F_k(y) + μ ℓ(y)),                           rule: ModelContrast
           ℓ = mean log(1 + exp((s(z, z_k) − s(z, z_x))/τ)), s the cosine
           z, z_x, z_k: representations of a sample by y, by the received model x, and by y_k, the client's last model
           y_k ← y
the rest is FedAvg

FedAvg's bits. Every client keeps its last model with its running statistics. A step takes two extra forward passes, which the
clock and the energy count as one extra gradient. x and y_k are in evaluation mode, with the random draws of y. Clients train
one after the other. Parts of the model that a client owns are the same in all three.

The representation is the input of the last linear layer, or of the layer that the user names. The authors' code adds a
projection head of two linear layers below the last one, whose output is the representation; a network here may have such a
head, too. A client that takes part for the first time has no last model: then z_k = z_x, and the step is FedAvg's. The
authors' code uses a random network instead. Its defaults are μ = 1 and τ = 0.5; the paper's best μ is 5 for CIFAR-10, and 1
for CIFAR-100 and Tiny-ImageNet.
"""

from __future__ import annotations

from typing import Any

from lightning_fl.algorithms.method import Method
from lightning_fl.rules import ModelContrast


class MOON(Method):
    """FedAvg with a contrastive loss that pulls clients' representations to the server's, away from those of their last model."""

    def __init__(self, mu: float = 1.0, tau: float = 0.5, layer: str | None = None, **slots: Any) -> None:
        """Fill the rule slot.

        Args:
            mu: Weight μ ≥ 0 of the contrastive loss; 0 is FedAvg. The paper tries 0.1, 1, 5 and 10.
            tau: Temperature τ > 0 of the contrastive loss.
            layer: Name of the layer whose input represents a sample, such as network.fc; the last linear layer if not given.
        """
        super().__init__(rule=ModelContrast(mu, tau, layer), **slots)
