"""SCAFFOLD: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020
(arXiv:1910.06378), option II.

client k:  y ← y − η (∇F_k(y) − c_k + c)                           rule: ControlVariates
           c_k⁺ = c_k − c + (w − y)/(τη)
           upload Δ_k = y − w and c_k⁺ − c_k;  c_k ← c_k⁺
server:    w ← w + η_g Σ_k n_k Δ_k / Σ_k n_k                       aggregator: WeightedMean, step: Apply
           c ← c + (1/N) Σ_k (c_k⁺ − c_k), sent down with w        step: ControlUpdate

Twice FedAvg's bits in both directions. The paper averages the models with equal weights (`weighting="uniform"`), Li et al.,
Federated Learning on Non-IID Data Silos, ICDE 2022, by samples. The c_k are averaged with equal weights in both.

SCAFFOLD needs a smaller learning rate than FedAvg. The correction c − c_k is the same in all τ steps, so a client with a flat
loss moves by τη along the federation's gradient. This is stable only if τη times the curvature is below about 2. The paper's
theory also requires η of the order of 1/τ.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.rules import ControlVariates
from lightning_fl.steps import Apply, ControlUpdate


class SCAFFOLD(Method):
    """FedAvg with control variates that correct the drift of each client's gradients."""

    def __init__(
        self, weighting: Literal["samples", "uniform"] = "samples", server_learning_rate: float = 1.0, **slots: Any
    ) -> None:
        """Fill the rule, aggregator and step slots.

        Args:
            weighting: Average the models by `samples`, or with `uniform` weights as in the paper.
            server_learning_rate: Learning rate η_g > 0 of the server.
        """
        super().__init__(
            (Apply(learning_rate=server_learning_rate), ControlUpdate()),
            rule=ControlVariates(),
            aggregator=WeightedMean(weighting),
            **slots,
        )
