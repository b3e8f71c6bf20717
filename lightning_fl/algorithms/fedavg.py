"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017
(arXiv:1602.05629).

client k:  y ← w;  y ← y − η ∇F_k(y; minibatch), E passes          rule: LocalOptimizer
           upload Δ_k = y − w                                      codec: Dense, exchange: OneShot
server:    w ← w + Σ_k n_k Δ_k / Σ_k n_k                           aggregator: WeightedMean, step: Apply
"""

from __future__ import annotations

from typing import Any

from lightning_fl.algorithms.method import Method
from lightning_fl.rules import LocalOptimizer


class FedAvg(Method):
    """Federated averaging: clients train locally, the server averages their models by samples."""

    def __init__(self, **slots: Any) -> None:
        """Fill the rule slot; the other slots are FedAvg's if they are not given."""
        super().__init__(rule=LocalOptimizer(), **slots)
