"""pFedMe: Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020 (arXiv:2006.08848).

client k:  u ← w, θ_k ← w;  for each minibatch:                        rule: MoreauEnvelope
             θ_k ← θ_k − α(∇F_k(θ_k; minibatch) + λ(θ_k − u)), K times
             u ← u − ηλ(u − θ_k)
           upload Δ_k = u − w, and keep θ_k                            personal: KeptModel
server:    w ← w + β mean_k Δ_k                                        aggregator: WeightedMean (uniform), step: Apply

A client predicts with the θ_k of its last round, and the running statistics of its norms then; a client that has not taken part
predicts with the server's model. η is the module's learning rate. `local_steps` is R, the number of minibatches of a round, 20 in
the authors' code; each is K steps of the run. With K = 1, ηλ = 1 and β = 1 it is FedAvg with equal weights and learning rate α.

In the paper all N clients train in each round, and the server averages the models of a sample of them. Here, as in other
methods, only the round's clients train; the others keep the θ_k of their last round. The authors' code also has a weight decay
of 0.001: set `weight_decay` of the module's SGD.
"""

from __future__ import annotations

from typing import Any

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.personal import KeptModel
from lightning_fl.rules import MoreauEnvelope
from lightning_fl.steps import Apply


class PFedMe(Method):
    """Clients train personal models near copies of the server's (Moreau envelope); the copies follow and are averaged."""

    def __init__(
        self,
        strength: float = 15.0,
        inner_steps: int = 5,
        inner_learning_rate: float = 0.01,
        server_learning_rate: float = 1.0,
        **slots: Any,
    ) -> None:
        """Fill the slots rule, aggregator, steps and personal.

        Args:
            strength: Weight λ > 0 of the pull (λ/2)‖θ − u‖²; λ times the module's learning rate is at most 1.
            inner_steps: Steps K ≥ 1 of a client's own model θ on each minibatch.
            inner_learning_rate: Learning rate α > 0 of these steps, which are plain SGD.
            server_learning_rate: Learning rate β > 0 of the server.
        """
        super().__init__(
            (Apply(server_learning_rate),),
            rule=MoreauEnvelope(strength, inner_steps, inner_learning_rate),
            aggregator=WeightedMean("uniform"),
            personal=[KeptModel()],
            **slots,
        )
