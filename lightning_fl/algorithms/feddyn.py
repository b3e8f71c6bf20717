"""FedDyn: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021 (arXiv:2111.04263), Algorithm 1.

client k:  y ← arg min F_k(y) − ⟨g_k, y⟩ + (α/2)‖y − x‖²,          rule: DynamicRegularisation
           by local steps from y = x on g(y) − g_k + α(y − x)
           upload Δ_k = y − x;  g_k ← g_k − αΔ_k, at first 0
server:    h ← h − (α/N) Σ_k Δ_k, at first 0                       aggregator: WeightedMean (uniform)
           x ← (1/K) Σ_k y_k − h/α                                 step: CorrectedMean

FedAvg's bits in both directions. Every client keeps g_k, a vector as long as the model. At a fixed point y_k = x for every
client, so g_k = ∇F_k(x), and their mean h is 0. So x minimises Σ_k F_k / N, with equal weights for all clients. FedAvg with
several local steps has another fixed point.

Weight decay, momentum and clipping are those of the module and the trainer; the authors' code has a weight decay of 0.001 and
clips gradients at norm 10. The authors' code also divides α by N times the client's share of the samples, so that all samples
have equal weight; with clients of equal size this is the same. With a lossy uplink, g_k uses the delta as the server decodes
it.

FedLab's class of the same name computes the regulariser from a detached copy of the parameters. It has no gradient there, so
clients train as in FedAvg.
"""

from __future__ import annotations

from typing import Any

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.rules import DynamicRegularisation
from lightning_fl.steps import CorrectedMean


class FedDyn(Method):
    """FedAvg with a dynamic regulariser on each client, which aligns the clients' optima with the federation's."""

    def __init__(self, alpha: float = 0.01, **slots: Any) -> None:
        """Fill the slots rule, aggregator and steps.

        Args:
            alpha: Weight α > 0 of the regulariser. The paper tries 0.001, 0.01 and 0.1.
        """
        super().__init__(
            (CorrectedMean(alpha),),
            rule=DynamicRegularisation(alpha),
            aggregator=WeightedMean("uniform"),
            **slots,
        )
