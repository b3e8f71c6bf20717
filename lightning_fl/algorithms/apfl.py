"""APFL: Deng et al., Adaptive Personalized Federated Learning, arXiv preprint 2020 (arXiv:2003.13461).

client k:  y ← w;  y ← y − η ∇F_k(y; minibatch), as in the base method;      rule: the base method's
           v_k ← v_k − ηα_k ∇F_k(α_k v_k + (1 − α_k) y; same minibatch)      personal: MixedModel
           α_k ← clip(α_k − η⟨v_k − y, ∇F_k(α_k v_k + (1 − α_k) y)⟩, 0, 1), once a round, after its first step
           upload Δ_k = y − w
server:    as in the base method; FedAvg: w ← w + Σ_k n_k Δ_k / Σ_k n_k

A client predicts with the parameters α_k v_k + (1 − α_k) w; it does not mix the outputs of two models. The bits and the
server's models are those of the base method for every α. v_k begins at the model that the client first receives; a client that
has not taken part predicts with the server's model. Running statistics of the mixture's norms stay with the client. The paper
averages with equal weights: base `Algorithm(aggregator=WeightedMean("uniform"))`. A client computes twice as much as in the
base method. Its steps for v_k are plain SGD, and do not count as steps of the run.

As in the paper, the gradient is taken at the mixture of both models. The authors' code mixes the gradients of both models
instead, α∇F_k(v_k) + (1 − α)∇F_k(w), which is the same only if the gradient is linear.
"""

from __future__ import annotations

from typing import Any

from lightning_fl.algorithms.algorithm import Algorithm
from lightning_fl.algorithms.method import Wrapper
from lightning_fl.personal import MixedModel


class APFL(Wrapper):
    """Any method; each client predicts with a mixture of the server's model and a model of its own."""

    def __init__(self, base: Algorithm | None = None, alpha: float = 0.5, adaptive: bool = True, **slots: Any) -> None:
        """Take over the slots of the base method.

        Args:
            base: Method that trains the server's model: FedAvg, FedProx, SCAFFOLD …; FedAvg if not given.
            alpha: Share α of a client's own model when it first takes part, in [0, 1]; 1 trains it alone.
            adaptive: Let each client adapt its α in every round, or keep it.
        """
        super().__init__(base, [MixedModel(alpha, adaptive)], **slots)
