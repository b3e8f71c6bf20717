"""FedNova: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020
(arXiv:2007.07481).

client k:  trains with SGD, with or without momentum ρ;            rule: Normalised
           without:  y ← y − η (∇F_k(y) + μ(y − w))
           a_k = ‖coefficients of its gradients‖₁, τ_k for plain SGD
           upload Δ_k = y − w, a_k and n_k                         exchange: WithSampleCount
server:    w ← w + τ_eff Σ_k p_k Δ_k / a_k,  p_k = n_k / Σ_j n_j   aggregator: NormalisedMean, step: Apply
           τ_eff = Σ_k p_k a_k;  Σ_k p_k τ_k with μ > 0, as in the authors' code

The paper sends Δ_k / a_k; dividing on the server gives the same numbers and bits: FedAvg's, and 64 more up. Buffers, such as
those of batch normalisation, are averaged as in FedAvg. If all clients make the same number of steps, this is FedAvg.
"""

from __future__ import annotations

from typing import Any

from lightning_fl.aggregators import NormalisedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.exchanges import WithSampleCount
from lightning_fl.rules import Normalised


class FedNova(Method):
    """FedAvg with normalised updates: clients with more steps do not pull the model further to their own optimum."""

    def __init__(self, mu: float = 0.0, **slots: Any) -> None:
        """Fill the rule, exchange and aggregator slots.

        Args:
            mu: Weight μ ≥ 0 of the proximal term (μ/2)‖y − w‖², as in FedProx; 0 leaves it out.
        """
        super().__init__(
            rule=Normalised(mu=mu),
            exchange=WithSampleCount(),
            aggregator=NormalisedMean("steps" if mu > 0 else "normaliser"),
            **slots,
        )
