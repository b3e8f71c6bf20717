"""Scaffnew: Mishchenko et al., ProxSkip: Yes! Local Gradient Steps Provably Lead to Communication Acceleration! Finally!,
ICML 2022 (arXiv:2202.09357), Algorithm 2.

client k:  y ← y − η (∇F_k(y) − h_k), τ times, τ geometric         rule: ProxSkip
           with mean 1/p, the same for all clients of a round
           upload u_k − w,  u_k = y − (η/p) h_k
           h_k ← (p/η)(w⁺ − u_k), with the next model w⁺
server:    w ← (1/N) Σ_k u_k                                       aggregator: WeightedMean, step: Apply

FedAvg's bits. Since Σ_k h_k = 0, the mean of the u_k is the mean of the y. With full gradients, η = 1/L and p = 1/√κ, w converges
linearly to the optimum of all clients, however different they are, in O(√κ log 1/ε) rounds; gradient descent takes
O(κ log 1/ε). The paper averages with equal weights (`weighting="uniform"`); `samples` minimises the mean loss over all samples.

All clients take part in each round. If some drop out, the model moves to the mean of the others, and a client that was away
uses the next model that it receives as w⁺; the next round with all clients restores Σ_k h_k = 0. A lossy uplink needs error
feedback. Its error does not vanish, because the messages do not vanish: at the optimum they are −(η/p) h_k.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.errors import require
from lightning_fl.rules import ProxSkip
from lightning_fl.slots import RoundContext, Server


class Scaffnew(Method):
    """A random number of corrected local steps between averages over all clients: fewer rounds than gradient descent."""

    def __init__(self, p: float = 0.1, weighting: Literal["uniform", "samples"] = "uniform", **slots: Any) -> None:
        """Fill the rule and aggregator slots.

        Args:
            p: Probability p in (0, 1] that a local step is the last of its round, so that a round has 1/p steps on average; 1 is
                gradient descent. The paper takes 1/√κ, where κ is the condition number of the loss.
            weighting: Average the models with `uniform` weights, as in the paper, or by `samples`.
        """
        super().__init__(rule=ProxSkip(p), aggregator=WeightedMean(weighting), **slots)

    def check(self, context: RoundContext, server: Server, cohort_size: int) -> None:
        """Check the run, and raise `UserError` if a round lacks clients."""
        super().check(context, server, cohort_size)
        require(
            cohort_size == context.num_clients,
            f"{self.name} averages all {context.num_clients} clients in each round, but a round has {cohort_size}: set "
            f"--trainer.clients_per_round {context.num_clients}, or use SCAFFOLD.",
        )
