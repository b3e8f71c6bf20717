"""Per-FedAvg: Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, NeurIPS 2020 (arXiv:2002.07948), first-order.

client k:  ŷ = y − β ∇F_k(y; minibatch 1)                          rule: MetaGradient
           y ← y − η ∇F_k(ŷ; minibatch 2)
           upload y − w
           predicts with w − β ∇F_k(w; minibatch)                  personal: AdaptedModel
server:    w ← w + mean of the uploads                             aggregator and step: FedAvg's

So w is trained to be good after one step on the samples of any client. Each client takes that step from the server's present
model before it predicts. β is the paper's α, and η its β. FedAvg's bits. A step uses a pair of minibatches, so an epoch has
half as many steps as FedAvg's, and as many gradients. The paper averages with equal weights:
`aggregator=WeightedMean("uniform")`. `val/…_server` measures w without the step.
"""

from __future__ import annotations

from typing import Any

from lightning_fl.algorithms.method import Method
from lightning_fl.personal import AdaptedModel
from lightning_fl.rules import MetaGradient


class PerFedAvg(Method):
    """FedAvg of an initial model that each client adapts by one gradient step on its own samples before it predicts."""

    def __init__(self, beta: float = 0.01, **slots: Any) -> None:
        """Fill the slots rule and personal.

        Args:
            beta: Learning rate β > 0 of the step that adapts the model to a client, in training and before it predicts.
        """
        super().__init__(rule=MetaGradient(beta), personal=[AdaptedModel(beta)], **slots)
