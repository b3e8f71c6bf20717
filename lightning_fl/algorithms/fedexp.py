"""FedExP: Jhunjhunwala et al., FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023 (arXiv:2301.09604).

client k:  as in FedAvg;  upload Δ_k = y − x                       rule: LocalOptimizer
server:    η_g = max(1, Σ_k‖Δ_k‖² / (2K(‖Δ‖² + ε)))                aggregator: ExtrapolatedMean,
           x ← x + η_g Δ,  Δ = Σ_k Δ_k / K                         WeightedMean (uniform), step: Apply
           validated: (x_t + x_{t−1})/2, with `mean_of_two`        step: MeanOfTwo

FedAvg's bits: the server computes the norms of the uploads itself. Equal deltas give η_g = 1, orthogonal deltas K/2.

All clients have equal weights, as in the paper. The authors' code weighs by samples, as `weighting="samples"` does, multiplies
ε by K (Σ_k p_k‖Δ_k‖² / (2(‖Σ_k p_k Δ_k‖² + Kε))), and multiplies ε by 0.998² after every round and the learning rate by 0.998.
Its ε is 0.001 for CIFAR and 0.1 for EMNIST. The paper validates the mean of the last two models, because x_t oscillates if η_g
is large. The server reads the norm of every upload, which rules out secure aggregation and central privacy. The norms include
the noise of local privacy.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning_fl.aggregators import ExtrapolatedMean, WeightedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.rules import LocalOptimizer
from lightning_fl.steps import Apply, MeanOfTwo


class FedExP(Method):
    """FedAvg with a server learning rate that grows as the clients' deltas disagree."""

    def __init__(
        self,
        eps: float = 1e-3,
        weighting: Literal["uniform", "samples"] = "uniform",
        mean_of_two: bool = False,
        **slots: Any,
    ) -> None:
        """Fill the slots rule, aggregator and steps.

        Args:
            eps: ε > 0, which bounds the server learning rate where the mean of the changes is near 0.
            weighting: Average with `uniform` weights as in the paper, or by `samples` as in the authors' code.
            mean_of_two: Validate and test the mean of the last two models, as the paper does; clients receive the last.
        """
        super().__init__(
            (Apply(), *([MeanOfTwo()] if mean_of_two else ())),
            rule=LocalOptimizer(),
            aggregator=ExtrapolatedMean(WeightedMean(weighting), eps),
            **slots,
        )
