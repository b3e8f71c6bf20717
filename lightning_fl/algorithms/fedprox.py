"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020 (arXiv:1812.06127).

client k:  y ← y − η (∇F_k(y) + μ(y − w))                          rule: Proximal
the rest is FedAvg
"""

from __future__ import annotations

from typing import Any

from lightning_fl.algorithms.method import Method
from lightning_fl.rules import Proximal


class FedProx(Method):
    """FedAvg with a proximal term that pulls clients towards the model they received."""

    def __init__(self, mu: float = 0.001, **slots: Any) -> None:
        """Fill the rule slot.

        Args:
            mu: Weight μ ≥ 0 of the proximal term (μ/2)‖y − w‖²; 0 is FedAvg.
        """
        super().__init__(rule=Proximal(mu=mu), **slots)
