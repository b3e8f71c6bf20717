"""FedPAQ: Reisizadeh et al., FedPAQ: A Communication-Efficient Federated Learning Method with Periodic Averaging and
Quantization, AISTATS 2020 (arXiv:1909.13014).

client k:  y ← y − η ∇F_k(y)  for τ steps, the trainer's            rule: LocalOptimizer
           upload C(y − w), rounded at random to s levels           uplink: QSGD
server:    w ← w + (1/K) Σ_k C(y_k − w)                             aggregator: WeightedMean, step: Apply
"""

from __future__ import annotations

from typing import Any

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.codecs import QSGD


class FedPAQ(Method):
    """FedAvg with equal weights and uploads that are stochastically rounded to a few levels."""

    def __init__(self, levels: int = 4, bucket: int = 512, **slots: Any) -> None:
        """Fill the uplink and aggregator slots.

        Args:
            levels: Levels s ≥ 1 of the magnitudes besides 0.
            bucket: Consecutive numbers that share a norm, at least 1.
        """
        super().__init__(uplink=QSGD(levels, bucket), aggregator=WeightedMean("uniform"), **slots)
